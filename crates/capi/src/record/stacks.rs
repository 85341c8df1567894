//! Where a request came from, for recordings with stacks: the functions of Python that led to it.
//!
//! A stack is gathered before any lock is taken, as that may need Python's own. PyTorch does the same for its
//! history, at the same places, and lets go of Python's lock before it allocates, so that a thread mostly has
//! to take it; a thread that Python does not know has no stack. A function that was seen before at the same
//! instruction costs two look-ups in tables, and a stack that was seen before one. The code objects that were seen
//! are kept for as long as the process lives, so that their addresses stay theirs.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowtide_trace::{Frame, StackId, StackTable};

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
    /// The number of each frame, by the place in a code object.
    frames: HashMap<Place, u32>,
    texts: Vec<(String, String, u32)>,
    /// The number of each stack, from 1 on, by its frames, innermost first.
    stacks: HashMap<Box<[u32]>, u32>,
    table: StackTable,
    ids: Vec<StackId>,
}

/// Has stacks gathered from now on, or no more.
pub(super) fn want(are_wanted: bool) {
    ARE_WANTED.store(are_wanted, Ordering::Relaxed);
}

#[inline]
pub(crate) fn are_wanted() -> bool {
    ARE_WANTED.load(Ordering::Relaxed)
}

/// Returns what `act` does, whose events are of the stack that this thread is in.
#[cold]
pub(crate) fn with_stack<R>(act: impl FnOnce() -> R) -> R {
    let outer = CURRENT.replace(gather());
    let result = act();
    CURRENT.set(outer);
    result
}

/// Returns the number of the stack of the call that this thread is in.
#[inline]
pub(super) fn current() -> u32 {
    CURRENT.get()
}

/// Returns what `act` does with the stack of a number and the table that has it.
pub(super) fn with<R>(number: u32, act: impl FnOnce(StackId, &StackTable) -> R) -> R {
    let mut known = known();
    let known = known.get_or_insert_default();
    let index = (number as usize).checked_sub(1);
    let id = index.and_then(|index| known.ids.get(index));
    act(id.copied().unwrap_or_default(), &known.table)
}

fn known() -> MutexGuard<'static, Option<Known>> {
    // A panic leaves a frame or a stack that nothing names.
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gather() -> u32 {
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
        let id = self.table.intern(texts.map(|(name, filename, line)| Frame {
            name,
            filename,
            line: *line,
        }));
        self.ids.push(id);
        let number = number(self.ids.len());
        self.stacks.insert(frames.into(), number);
        number
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).expect("the host's memory ends before 2^32 stacks")
}
