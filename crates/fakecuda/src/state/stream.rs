//! A stream, and the tasks in its queue.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::progress;

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    /// Ordered with the legacy default stream.
    pub(crate) is_blocking: bool,
    /// A test keeps its next task from starting.
    pub(crate) is_held: bool,
    pub(crate) is_destroyed: bool,
    /// The context's own, not made by `cuStreamCreate`.
    pub(crate) is_default: bool,
    /// The capture that takes its work.
    pub(crate) capture: Option<u64>,
    pub(crate) queue: Queue,
}

impl Stream {
    /// Takes the next task if it may begin now.
    pub(crate) fn next_task(&mut self, is_lazy: bool) -> Option<Task> {
        let is_wanted = !is_lazy || self.queue.is_wanted();
        if self.is_held || !is_wanted {
            return None;
        }
        let first = self.queue.tasks.front()?;
        first.after.iter().for_each(Marker::want);
        let is_due = |task: &Task| task.after.iter().all(Marker::is_passed);
        self.queue.tasks.front().is_some_and(is_due).then(|| {
            let next = self.queue.tasks.pop_front();
            next.expect("looked at above")
        })
    }
}

/// A point in a stream's work. It stays valid when the stream is gone.
#[derive(Clone, Debug)]
pub(crate) struct Marker {
    progress: Arc<Progress>,
    /// How many of the stream's tasks lie before it.
    number: u64,
}

/// How far a stream is, in tasks.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) done: AtomicU64,
    /// How many of them somebody asked for: a lazy stream does no others.
    wanted: AtomicU64,
}

impl Marker {
    /// Returns whether the work before it is done. Constant time.
    pub(crate) fn is_passed(&self) -> bool {
        self.progress.done.load(Ordering::Acquire) >= self.number
    }

    /// Asks for the work before it, which a lazy stream does not do otherwise.
    pub(crate) fn want(&self) {
        let before = self
            .progress
            .wanted
            .fetch_max(self.number, Ordering::Relaxed);
        if before < self.number {
            progress::notify();
        }
    }
}

/// A stream's tasks.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) tasks: VecDeque<Task>,
    pub(crate) submitted: u64,
    pub(crate) progress: Arc<Progress>,
    pub(crate) has_worker: bool,
}

impl Queue {
    /// Returns the point after all that was submitted.
    pub(crate) fn tail(&self) -> Marker {
        Marker {
            progress: Arc::clone(&self.progress),
            number: self.submitted,
        }
    }

    /// Returns whether somebody asked for the next task.
    fn is_wanted(&self) -> bool {
        let Progress { done, wanted } = &*self.progress;
        wanted.load(Ordering::Relaxed) > done.load(Ordering::Relaxed)
    }
}

/// One piece of a stream's work.
#[derive(Debug)]
pub(crate) struct Task {
    /// Points in other streams that come first.
    pub(crate) after: Vec<Marker>,
    pub(crate) work: Work,
}

/// What a stream can do. There are no kernels.
#[derive(Debug)]
pub(crate) enum Work {
    /// Nothing, but after what it waits for.
    Wait { marker: Marker },
    /// Notes the time.
    Stamp { time: Arc<OnceLock<Instant>> },
    Copy {
        destination: Place,
        source: Source,
        bytes: u64,
    },
    Fill {
        destination: Place,
        /// Repeated.
        value: u32,
        bytes: u64,
    },
    Call {
        function: unsafe extern "C" fn(*mut c_void),
        /// The caller's pointer, as a number so that it may cross threads.
        argument: usize,
    },
    /// The end of `cuMemFreeAsync`.
    Free { address: u64 },
}

/// An address, and what it was when the work was asked for: device memory that is gone when the work
/// is done must not be taken for the host's, and pinned memory must be pinned still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) is_device: bool,
    pub(crate) is_pinned: bool,
}

#[derive(Debug)]
pub(crate) enum Source {
    Place(Place),
    /// Pageable host memory is read when the copy is asked for.
    Staged(Box<[u8]>),
}
