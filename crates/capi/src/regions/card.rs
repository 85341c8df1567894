//! The device that a region's memory is on.

use std::ffi::c_int;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::{Bytes, Driver, DriverError, Stream};
use lowtide_cuda::CudaDriver;
use lowtide_region::Device;

use crate::devices::{self, Allocator};
use crate::preload::is_of_thread;

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

/// The device that a region's memory is on.
pub(crate) struct Card {
    ordinal: c_int,
    device: lowtide_cuda::Device,
}

impl Card {
    /// The device may be about to be used: it is asked for nothing yet.
    pub(super) fn new(ordinal: c_int, allocator: &Allocator) -> Card {
        let device = allocator.with_driver(|driver| driver.device().clone());
        Card { ordinal, device }
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Card").field(&self.ordinal).finish()
    }
}

impl Device for Card {
    type Driver = CudaDriver;

    fn with_driver<R>(&self, act: impl FnOnce(&mut CudaDriver) -> R) -> R {
        allocator(self.ordinal).with_driver(act)
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.device.synchronize()
    }

    fn wait_for(&self, stream: Stream) -> Result<(), DriverError> {
        if is_of_thread(stream) {
            // The driver would take the number for a pointer.
            return self.synchronize();
        }
        let waited = self.with_driver(|driver| driver.synchronize_stream(stream));
        waited.or_else(|_| self.synchronize())
    }

    fn margin(&self) -> Bytes {
        margin()
    }
}

/// Returns the allocator of a region's device.
pub(super) fn allocator(device: c_int) -> &'static Allocator {
    devices::get(device).expect("a region is on devices in use")
}
