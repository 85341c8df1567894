//! The device of a region's memory, as that region sees it.

use std::ffi::c_int;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use lowtide_core::Bytes;

/// How many bytes of each device regions leave free when they grow.
static MARGIN: AtomicU64 = AtomicU64::new(0);

/// Sets how many bytes of each device regions leave free when they grow.
pub(super) fn set_margin(bytes: u64) {
    MARGIN.store(bytes, Ordering::Relaxed);
}

/// Returns how many bytes of each device regions leave free when they grow.
pub(super) fn margin() -> Bytes {
    Bytes(MARGIN.load(Ordering::Relaxed))
}

/// The device of a region's memory, and what observers know of that memory.
pub(crate) struct Card {
    pub(super) ordinal: c_int,
    pub(super) device: lowtide_cuda::Device,
    /// When observers were notified that the region is paused, in microseconds since 1970; 0 if they were notified of its
    /// resume, or of nothing. Does not change while observers are locked.
    pub(super) notified_pause_us: AtomicI64,
}

impl Card {
    pub(super) fn new(ordinal: c_int, device: lowtide_cuda::Device) -> Card {
        Card {
            ordinal,
            device,
            notified_pause_us: AtomicI64::new(0),
        }
    }

    /// Returns since when the region is paused for observers, in microseconds since 1970; `None` if it is not.
    pub(super) fn paused_since_us(&self) -> Option<i64> {
        let paused_us = self.notified_pause_us.load(Ordering::Relaxed);
        (paused_us != 0).then_some(paused_us)
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Card").field(&self.ordinal).finish()
    }
}
