//! The lanes of a device, each behind a lock, and visits to them.

use std::fmt;
use std::mem;
use std::thread;

use lowtide_core::Lane;

use crate::driver::SharedDriver;
use crate::lane_lock::{LaneLock, LockGuard};
use crate::sync::atomic::{AtomicU64, Ordering};

/// The alert of a device whose requests may be routed to private pools.
pub(crate) const ROUTED: u64 = 1 << 62;
/// The alert of a device inside which a thread has panicked.
pub(crate) const POISONED: u64 = 1 << 63;

/// A lane behind its lock: in cache lines of its own, two because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct SharedLane<D>(pub(crate) LaneLock<LaneState<D>>);

pub(crate) struct LaneState<D> {
    pub(crate) lane: Lane<SharedDriver<D>>,
    /// How often the lane was entered.
    pub(crate) visits: u64,
    /// Threads that wait for memory. Almost always none, and then a free makes no system call.
    pub(crate) waiting: usize,
    /// Whether the lane's bit in the device's flags is set.
    pub(crate) is_alert: bool,
}

impl<D: fmt::Debug> fmt::Debug for LaneState<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut state = f.debug_struct("LaneState");
        state.field("lane", &self.lane);
        state.finish_non_exhaustive()
    }
}

/// A lane that a thread is in.
pub(crate) struct LaneGuard<'a, D> {
    /// In front of the lock, so that nobody enters in between.
    pub(crate) poison: PoisonOnPanic<'a>,
    pub(crate) state: LockGuard<'a, LaneState<D>>,
    pub(crate) index: usize,
}

impl<D> LaneGuard<'_, D> {
    /// Ends it: nothing panicked.
    #[inline]
    pub(crate) fn end(self) {
        mem::forget(self.poison);
    }
}

/// Poisons the device when a panic drops it.
pub(crate) struct PoisonOnPanic<'a> {
    pub(crate) flags: &'a AtomicU64,
    /// Whether the thread panicked before, so that what unwinds may use the allocator.
    pub(crate) was_panicking: bool,
}

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.was_panicking {
            self.flags.fetch_or(POISONED, Ordering::Relaxed);
        }
    }
}
