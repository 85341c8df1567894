//! Call sites of requests, for recordings with stacks: the Python functions that led to a request or, if there
//! are none, the program's native functions.
//!
//! A stack is collected before any lock is taken, because that may need Python's own. PyTorch does the same for
//! its history, at the same points. It releases Python's lock before it allocates, so a thread usually has to
//! take it again.
//!
//! A frame that was seen before costs two table look-ups, and a stack that was seen before costs one. Code
//! objects that were seen are kept until the process ends, so that their addresses stay unique. The addresses of
//! native functions keep the names that were found when they were first written.

use std::cell::Cell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use lowtide_trace::{Frame, StackId, StackTable};

use super::native::{self, FrameText};
use super::python::{self, Place};
use crate::switch::Switch;

/// Frames further out are omitted.
const FRAMES_MAX: usize = 128;

/// Whether each process that records by the environment records stacks.
static BY_ENVIRONMENT: Switch = Switch::new("LOWTIDE_RECORD_STACKS", false);

/// Whether stacks are collected: [`NO`], [`YES`] or [`UNKNOWN`].
static WANTED: AtomicU8 = AtomicU8::new(UNKNOWN);

const NO: u8 = 0;
const YES: u8 = 1;
/// Before the first request, which begins the recording that the environment asks for, and is in it with its stack.
const UNKNOWN: u8 = 2;

thread_local! {
    /// The number of the current request's stack; 0 if there is none.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
}

/// The stacks that were collected in this process.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Known {
    /// The number of each Python frame, by its position in a code object.
    frames: HashMap<Place, u32>,
    texts: Vec<FrameText>,
    /// The number of each stack, from 1 on, by its Python frames, innermost first.
    stacks: HashMap<Box<[u32]>, u32>,
    /// The number of each stack without Python frames, by its calls.
    natives: HashMap<Arc<[usize]>, u32>,
    table: StackTable,
    /// The stacks by number.
    found: Vec<Found>,
}

/// A stack that was seen.
enum Found {
    Described(StackId),
    /// Return addresses whose functions still have to be looked up.
    Calls(Arc<[usize]>),
}

/// Turns collecting stacks on or off.
pub(super) fn want(are_wanted: bool) {
    WANTED.store(u8::from(are_wanted), Ordering::Relaxed);
}

/// Returns whether the environment asks for stacks.
pub(super) fn are_asked_for() -> bool {
    BY_ENVIRONMENT.is_on()
}

/// Enters the current stack for a request: the request's events have this stack until the returned value is
/// dropped. Returns `None` if no stacks are collected.
#[must_use = "the stack is the request's until this is dropped"]
#[inline]
pub(crate) fn enter() -> Option<EnteredStack> {
    match WANTED.load(Ordering::Relaxed) {
        NO => None,
        wanted => enter_if_wanted(wanted),
    }
}

#[cold]
fn enter_if_wanted(wanted: u8) -> Option<EnteredStack> {
    let is_wanted = wanted == YES || are_asked_for();
    if wanted == UNKNOWN {
        let known = u8::from(is_wanted);
        // Another thread may have begun a recording.
        let _ = WANTED.compare_exchange(UNKNOWN, known, Ordering::Relaxed, Ordering::Relaxed);
    }
    is_wanted.then(|| EnteredStack {
        outer: CURRENT.replace(gather()),
        stays_in_thread: PhantomData,
    })
}

/// Marks the thread as inside a request. Dropping it ends that, also during a panic.
pub(crate) struct EnteredStack {
    /// The stack of the enclosing request.
    outer: u32,
    stays_in_thread: PhantomData<*const ()>,
}

impl Drop for EnteredStack {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

/// Returns the number of the thread's current stack.
#[inline]
pub(super) fn current() -> u32 {
    CURRENT.get()
}

/// Returns the calls of a stack whose functions have not been looked up yet.
pub(super) fn calls_of(number: u32) -> Option<Arc<[usize]>> {
    match known().found(number)? {
        Found::Calls(calls) => Some(Arc::clone(calls)),
        Found::Described(_) => None,
    }
}

/// Stores the functions of a stack's calls, innermost first. The look-up takes long and takes the loader's locks,
/// so the caller does it without holding a lock of this module.
pub(super) fn describe(number: u32, frames: &[FrameText]) {
    known().describe(number, frames);
}

/// Returns the result of `act` with a stack and the table that has it. A stack that is not described yet is
/// passed as no stack.
pub(super) fn with<R>(number: u32, act: impl FnOnce(StackId, &StackTable) -> R) -> R {
    let known = known();
    let id = match known.found(number) {
        Some(&Found::Described(id)) => id,
        _ => StackId::NONE,
    };
    act(id, &known.table)
}

fn known() -> MutexGuard<'static, Known> {
    // After a panic, at most a frame or a stack without a name remains.
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gather() -> u32 {
    match gather_of_python() {
        0 => {
            let calls = native::calls(FRAMES_MAX);
            known().stack_of_calls(&calls)
        }
        stack => stack,
    }
}

fn gather_of_python() -> u32 {
    // Python's lock comes first: a thread that holds it must never wait for ours while we wait for Python's.
    let stack = python::with_frames(FRAMES_MAX, |frames| {
        let known = &mut *known();
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

    fn found(&self, number: u32) -> Option<&Found> {
        let index = (number as usize).checked_sub(1)?;
        self.found.get(index)
    }

    /// Stores the functions of a stack's calls.
    fn describe(&mut self, number: u32, frames: &[FrameText]) {
        let id = self.table.intern(frames.iter().map(frame_of));
        self.found[number as usize - 1] = Found::Described(id);
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
