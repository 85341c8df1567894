//! The lanes of a device, what they have in common, and visits to them.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::thread;

use lowtide_core::{Bytes, Config, DeviceAllocator, Driver, Lanes, Peaks};

use crate::driver::SharedDriver;
use crate::lane_lock::{LaneLock, LockGuard};
use crate::sync::atomic::{AtomicU64, Ordering};

/// The alert of a device whose requests may be routed to private pools.
pub(crate) const ROUTED: u64 = 1 << 62;
/// The alert of a device inside which a thread has panicked.
pub(crate) const POISONED: u64 = 1 << 63;

/// Called without any lock when no free block serves a request and before the driver is asked; returns
/// whether it freed something.
pub type Shortage = Arc<dyn Fn() -> bool + Send + Sync>;

/// What all lanes of a device have in common, behind a lock that is taken before any lane's.
pub(crate) struct Common {
    peaks: Peaks,
    /// Bytes that may be held from the driver, where there is a limit.
    pub(crate) limit: Option<Bytes>,
    /// The share of the device's memory that the configuration allows, until the device was asked how
    /// much that is.
    pub(crate) fraction: Option<f64>,
    pub(crate) shortage: Option<Shortage>,
}

impl fmt::Debug for Common {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut common = f.debug_struct("Common");
        common
            .field("peaks", &self.peaks)
            .field("limit", &self.limit);
        common.field("fraction", &self.fraction);
        common.finish_non_exhaustive()
    }
}

impl Common {
    pub(crate) fn new(config: &Config) -> Common {
        Common {
            peaks: Peaks::default(),
            limit: None,
            fraction: config.memory_fraction(),
            shortage: None,
        }
    }

    /// Returns the lanes of a device as one: all that are in use.
    pub(crate) fn lanes<'a, D: Driver>(
        &'a mut self,
        visits: &'a mut [LaneGuard<'_, D>],
    ) -> Lanes<'a, SharedDriver<D>> {
        let lanes = visits.iter_mut().map(|visit| &mut visit.state.allocator);
        Lanes::new(lanes.collect(), &mut self.peaks, self.limit)
    }
}

/// A part of a device: in cache lines of its own, two because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Lane<D> {
    pub(crate) state: LaneLock<LaneState<D>>,
}

pub(crate) struct LaneState<D> {
    pub(crate) allocator: DeviceAllocator<SharedDriver<D>>,
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
        state.field("allocator", &self.allocator);
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
