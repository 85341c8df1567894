//! The device that a region's memory is on: the trait [`Device`].

use lowtide_core::{Bytes, Driver, DriverError, MempoolId, Physical, Stream};
use lowtide_shared::SharedAllocator;

/// The device that a region's memory is on, which others use at the same time.
///
/// It is a trait as its process alone can find the allocator, which may not be in use yet when a region is made, and wait
/// for the device without the driver's lock: others would be kept from the driver until the last kernel ends.
pub trait Device {
    /// Its driver.
    type Driver: Driver;

    /// Returns the device's allocator, which has the region's pools.
    fn allocator(&self) -> &SharedAllocator<Self::Driver>;

    /// Waits for all work of the device, without keeping others from the driver.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn synchronize(&self) -> Result<(), DriverError>;

    /// Returns whether the driver can wait for a stream by this number. All work of the device is waited for otherwise.
    fn can_wait_for(&self, _stream: Stream) -> bool {
        true
    }

    /// Returns how much of the device regions leave free when they grow.
    fn margin(&self) -> Bytes {
        Bytes::ZERO
    }

    /// Notifies observers that the memory of every segment of the region's pools is about to leave, or is back. `has_pool`
    /// says which pools these are: it does not change under the lock of the pools.
    fn notify(&self, is_leaving: bool, has_pool: impl Fn(MempoolId) -> bool);

    /// Returns what `act` does with the physical memory. It is one call, or a few: others wait for the memory meanwhile.
    fn with_physical<R>(&self, act: impl FnOnce(&mut Physical<Self::Driver>) -> R) -> R {
        self.allocator().with_physical(act)
    }

    /// Returns what `act` does with the driver. It is one call, or a few: others wait for the driver
    /// meanwhile.
    fn with_driver<R>(&self, act: impl FnOnce(&mut Self::Driver) -> R) -> R {
        self.allocator().with_driver(act)
    }
}
