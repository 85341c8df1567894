//! Where a request came from, for recordings with stacks: the functions of Python that led to it and, where
//! there are none, those of the program.
//!
//! A stack is gathered before any lock is taken, as that may need Python's own. PyTorch does the same for its
//! history, at the same places, and lets go of Python's lock before it allocates, so that a thread mostly has
//! to take it. A function that was seen before at the same instruction costs two look-ups in tables, and a stack
//! that was seen before one. The code objects that were seen are kept for as long as the process lives, so that
//! their addresses stay theirs; the addresses of other functions are taken for what was there when they were
//! first written.

use std::cell::Cell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lowtide_trace::{Frame, StackId, StackTable};

use super::native::{self, FrameText};
use super::python::{self, Place};

/// Frames further out are left away.
const FRAMES_MAX: usize = 128;

static ARE_WANTED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The number of the stack of the call under way; 0 where there is none.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
}

/// What was gathered in this process.
static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

#[derive(Default)]
struct Known {
    /// The number of each frame of Python, by the place in a code object.
    frames: HashMap<Place, u32>,
    texts: Vec<FrameText>,
    /// The number of each stack, from 1 on, by its frames of Python, innermost first.
    stacks: HashMap<Box<[u32]>, u32>,
    /// And by its calls, where Python knows nothing of it.
    natives: HashMap<Arc<[usize]>, u32>,
    table: StackTable,
    /// By their numbers.
    found: Vec<Found>,
}

/// A stack that was seen.
enum Found {
    Described(StackId),
    /// Which functions these are is still to be looked up.
    Calls(Arc<[usize]>),
}

/// Has stacks gathered from now on, or no more.
pub(super) fn want(are_wanted: bool) {
    ARE_WANTED.store(are_wanted, Ordering::Relaxed);
}

/// Returns what ends a request for memory when it is dropped: the request's events are of the stack that this thread
/// is in now. `None` where no stacks are wanted.
#[must_use = "the stack is the request's until this is dropped"]
#[inline]
pub(crate) fn enter() -> Option<EnteredStack> {
    ARE_WANTED.load(Ordering::Relaxed).then(gather_current)
}

#[cold]
fn gather_current() -> EnteredStack {
    EnteredStack {
        outer: CURRENT.replace(gather()),
        stays_in_thread: PhantomData,
    }
}

/// The thread is in the stack of a request until this is dropped, by a panic too.
pub(crate) struct EnteredStack {
    /// The stack of the call around the request.
    outer: u32,
    stays_in_thread: PhantomData<*const ()>,
}

impl Drop for EnteredStack {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

/// Returns the number of the stack of the call that this thread is in.
#[inline]
pub(super) fn current() -> u32 {
    CURRENT.get()
}

/// Returns the calls of a stack of which nobody has looked up yet which functions they lie in.
pub(super) fn calls_of(number: u32) -> Option<Arc<[usize]>> {
    match known().get_or_insert_default().found(number)? {
        Found::Calls(calls) => Some(Arc::clone(calls)),
        Found::Described(_) => None,
    }
}

/// Notes which functions the calls of a stack lie in, innermost first. To look them up takes long, and locks of the
/// loader's, so that it is done without any here.
pub(super) fn describe(number: u32, frames: &[FrameText]) {
    known().get_or_insert_default().describe(number, frames);
}

/// Returns what `act` does with the stack of a number and the table that has it; none where it is not described.
pub(super) fn with<R>(number: u32, act: impl FnOnce(StackId, &StackTable) -> R) -> R {
    let mut known = known();
    let known = known.get_or_insert_default();
    let id = match known.found(number) {
        Some(&mut Found::Described(id)) => id,
        _ => StackId::NONE,
    };
    act(id, &known.table)
}

fn known() -> MutexGuard<'static, Option<Known>> {
    // A panic leaves a frame or a stack that nothing names.
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gather() -> u32 {
    match gather_of_python() {
        0 => gather_of_program(),
        stack => stack,
    }
}

fn gather_of_program() -> u32 {
    let calls = native::calls(FRAMES_MAX);
    known().get_or_insert_default().stack_of_calls(&calls)
}

fn gather_of_python() -> u32 {
    // Python's lock comes first: who has that may not wait for it with ours.
    let stack = python::with_frames(FRAMES_MAX, |frames| {
        let mut known = known();
        let known = known.get_or_insert_default();
        let numbers = frames.iter().map(|frame| {
            let count = known.texts.len();
            *known.frames.entry(frame.place()).or_insert_with(|| {
                known.texts.push(frame.describe_and_keep());
                number(count)
            })
        });
        let numbers: Vec<u32> = numbers.collect();
        known.stack(&numbers)
    });
    stack.unwrap_or(0)
}

impl Known {
    fn stack(&mut self, frames: &[u32]) -> u32 {
        if frames.is_empty() {
            return 0;
        }
        if let Some(&number) = self.stacks.get(frames) {
            return number;
        }
        let texts = frames.iter().map(|&frame| &self.texts[frame as usize]);
        let id = self.table.intern(texts.map(frame_of));
        let number = self.push(Found::Described(id));
        self.stacks.insert(frames.into(), number);
        number
    }

    fn stack_of_calls(&mut self, calls: &[usize]) -> u32 {
        if let Some(&number) = self.natives.get(calls) {
            return number;
        }
        let calls: Arc<[usize]> = calls.into();
        let number = self.push(Found::Calls(Arc::clone(&calls)));
        self.natives.insert(calls, number);
        number
    }

    fn push(&mut self, found: Found) -> u32 {
        self.found.push(found);
        number(self.found.len())
    }

    fn found(&mut self, number: u32) -> Option<&mut Found> {
        let index = (number as usize).checked_sub(1)?;
        self.found.get_mut(index)
    }

    /// Notes which functions the calls of a stack lie in.
    fn describe(&mut self, number: u32, frames: &[FrameText]) {
        let id = self.table.intern(frames.iter().map(frame_of));
        if let Some(found) = self.found(number) {
            *found = Found::Described(id);
        }
    }
}

fn frame_of((name, filename, line): &FrameText) -> Frame<'_> {
    Frame {
        name: name.as_str().into(),
        filename: filename.as_str().into(),
        line: *line,
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).expect("the host's memory ends before 2^32 stacks")
}
