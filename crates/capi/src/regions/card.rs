//! The device that a region's memory is on.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use lowtide_core::Bytes;

use crate::devices::{self, Allocator};

/// How many bytes of a device regions leave free when they grow.
static MARGIN: AtomicU64 = AtomicU64::new(0);

/// Says how many bytes of each device regions leave free when they grow.
pub(super) fn set_margin(bytes: u64) {
    MARGIN.store(bytes, Ordering::Relaxed);
}

/// Returns how many bytes of each device regions leave free when they grow.
pub(super) fn margin() -> Bytes {
    Bytes(MARGIN.load(Ordering::Relaxed))
}

/// The device that a region's memory is on, and what observers know of that region there.
pub(crate) struct Card {
    pub(super) ordinal: c_int,
    pub(super) tag: Arc<str>,
    pub(super) device: lowtide_cuda::Device,
    /// Since when observers know the region's memory to be away, in microseconds since 1970; 0 where it is not. Changes
    /// while no listener does.
    pub(super) notified_away_us: AtomicI64,
}

impl Card {
    /// The device may be about to be used: it is asked for nothing yet.
    pub(super) fn new(ordinal: c_int, allocator: &Allocator, tag: Arc<str>) -> Card {
        let device = allocator.with_driver(|driver| driver.device().clone());
        Card {
            ordinal,
            tag,
            device,
            notified_away_us: AtomicI64::new(0),
        }
    }

    /// Returns since when the region's memory is away, as far as observers were notified, in microseconds since 1970.
    pub(super) fn away_since_us(&self) -> Option<i64> {
        let away_us = self.notified_away_us.load(Ordering::Relaxed);
        (away_us != 0).then_some(away_us)
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Card").field(&self.ordinal).finish()
    }
}

/// Returns the allocator of a region's device.
pub(super) fn allocator(device: c_int) -> &'static Allocator {
    devices::get(device).expect("a region is on devices in use")
}
