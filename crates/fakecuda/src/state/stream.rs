//! A stream, and the tasks in its queue.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::progress;

/// A stream.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    /// Whether it is ordered with the legacy default stream.
    pub(crate) is_blocking: bool,
    /// Whether a test keeps its next task from starting.
    pub(crate) is_held: bool,
    pub(crate) is_destroyed: bool,
    /// Whether it is a default stream of the context, not created by `cuStreamCreate`.
    pub(crate) is_default: bool,
    /// The capture that the stream is part of.
    pub(crate) capture: Option<u64>,
    pub(crate) queue: Queue,
}

impl Stream {
    /// Removes and returns the next task if it may start now.
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

/// A point in a stream's work. It stays valid after the stream no longer exists.
#[derive(Clone, Debug)]
pub(crate) struct Marker {
    progress: Arc<Progress>,
    /// The number of the stream's tasks before it.
    number: u64,
}

/// A stream's progress, counted in tasks.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) done: AtomicU64,
    /// The number of tasks that a call has waited for or queried. A lazy stream runs no others.
    wanted: AtomicU64,
}

impl Marker {
    /// Returns whether the work before it is done. Constant time.
    pub(crate) fn is_passed(&self) -> bool {
        self.progress.done.load(Ordering::Acquire) >= self.number
    }

    /// Requests the work before it, which a lazy stream would not run otherwise.
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
    /// Returns the point after all submitted work.
    pub(crate) fn tail(&self) -> Marker {
        Marker {
            progress: Arc::clone(&self.progress),
            number: self.submitted,
        }
    }

    /// Returns whether the next task was requested.
    fn is_wanted(&self) -> bool {
        let Progress { done, wanted } = &*self.progress;
        wanted.load(Ordering::Relaxed) > done.load(Ordering::Relaxed)
    }
}

/// A task of a stream.
#[derive(Debug)]
pub(crate) struct Task {
    /// Points in other streams that the task waits for.
    pub(crate) after: Vec<Marker>,
    pub(crate) work: Work,
}

/// The kinds of work of a stream. There are no kernels.
#[derive(Debug)]
pub(crate) enum Work {
    /// Waits for a marker, and does nothing.
    Wait { marker: Marker },
    /// Does nothing: an event's marker is behind it.
    Record,
    Copy {
        destination: Place,
        source: Source,
        bytes: u64,
    },
    Fill {
        destination: Place,
        /// The word that is repeated.
        value: u32,
        bytes: u64,
    },
    Call {
        function: unsafe extern "C" fn(*mut c_void),
        /// The caller's pointer, as a number so that threads can share it.
        argument: usize,
    },
    /// The free of a `cuMemFreeAsync`.
    Free { address: u64 },
}

/// An address, and the kind of memory that was there when the work was submitted. If that memory no longer exists
/// when the work runs, it must not be used as host memory. Pinned memory must still be pinned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) is_device: bool,
    pub(crate) is_pinned: bool,
}

#[derive(Debug)]
pub(crate) enum Source {
    Place(Place),
    /// A copy of pageable host memory, which is read when the copy is submitted.
    Staged(Box<[u8]>),
}
