//! The lanes of a device, each behind a lock, and guards for them.

use std::fmt;
use std::mem;
use std::thread;

use lowtide_core::Lane;

use crate::lane_lock::{LaneLock, LockGuard};
use crate::memory::SharedMemory;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The flag of a device whose requests may be routed to private pools.
pub(crate) const ROUTED: u64 = 1 << 62;
/// The flag of a device in which a thread has panicked.
pub(crate) const POISONED: u64 = 1 << 63;

/// A lane behind its lock. It has two cache lines of its own, because processors fetch cache lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct SharedLane<D>(pub(crate) LaneLock<LaneState<D>>);

pub(crate) struct LaneState<D> {
    pub(crate) lane: Lane<SharedMemory<D>>,
    /// How often the lane was entered.
    pub(crate) visits: u64,
    /// Number of threads that wait for memory. Usually zero, and then a free makes no system call.
    pub(crate) waiting: usize,
    /// Whether the lane's bit in the device's flags is set.
    pub(crate) is_flagged: bool,
}

impl<D: fmt::Debug> fmt::Debug for LaneState<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut state = f.debug_struct("LaneState");
        state.field("lane", &self.lane);
        state.finish_non_exhaustive()
    }
}

/// A lane that a thread has locked.
pub(crate) struct LaneGuard<'a, D> {
    /// Before the lock in drop order, so that no thread enters between the two drops.
    pub(crate) poison: PoisonOnPanic<'a>,
    pub(crate) state: LockGuard<'a, LaneState<D>>,
    pub(crate) index: usize,
}

impl<D> LaneGuard<'_, D> {
    /// Ends the visit without a panic.
    #[inline]
    pub(crate) fn end(self) {
        mem::forget(self.poison);
    }
}

/// Poisons the device when a panic drops it.
pub(crate) struct PoisonOnPanic<'a> {
    pub(crate) flags: &'a AtomicU64,
    /// Whether the thread was already panicking, so that destructors may use the allocator while it unwinds.
    pub(crate) was_panicking: bool,
}

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.was_panicking {
            self.flags.fetch_or(POISONED, Ordering::Relaxed);
        }
    }
}
