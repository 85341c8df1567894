//! The trait [`Device`]: what a region needs from the process that it is in.

use std::sync::{Arc, MutexGuard};

use lowtide_core::{Bytes, Driver, DriverError, MempoolId, Physical};
use lowtide_shared::SharedAllocator;

use crate::backup::Backups;
use crate::error::RegionError;

/// The device of one region's memory. Other regions and the rest of the process use the device at the same time.
///
/// Only the process can find the device's allocator and wait for the device without the lock of the physical memory. Under
/// that lock, no other thread could call the driver until the last kernel ends.
pub trait Device: Send + Sync + 'static {
    /// The device's driver.
    type Driver: Driver;

    /// What keeps contents of the device's regions while they are paused.
    type Backups: Backups;

    /// Returns the device's number.
    fn number(&self) -> u32;

    /// Returns the device's allocator, which has the region's pools.
    fn allocator(&self) -> &SharedAllocator<Self::Driver>;

    /// Locks the backups of the device's regions, the same for each region. The lock is held while one of them is
    /// paused, resumed or trimmed.
    ///
    /// # Errors
    ///
    /// [`RegionError::Poisoned`], and the driver's error if there are no backups yet and they cannot be made.
    fn lock_backups(&self) -> Result<MutexGuard<'_, Self::Backups>, RegionError>;

    /// Waits for all work of the device. Other threads may call the driver meanwhile.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn synchronize(&self) -> Result<(), DriverError>;

    /// Returns how many bytes of the device regions leave free when they grow.
    fn margin(&self) -> Bytes {
        Bytes::ZERO
    }

    /// Notifies observers that the memory of the region called `tag` is about to leave, or is back: every segment of the
    /// pools that `has_pool` names. The pools of a region do not change under the lock of the device's pools.
    fn notify(&self, tag: &Arc<str>, is_leaving: bool, has_pool: impl Fn(MempoolId) -> bool);

    /// Blocks the program's signals for threads that are started until the returned value is dropped.
    fn block_signals(&self) -> impl Sized {}

    /// Is called after regions of the device were changed, with the number of bytes that left it or came back.
    fn finish_change(&self, _moved: Bytes) {}

    /// Returns the result of `act` with the physical memory locked. `act` makes one call or a few, because other threads
    /// wait.
    fn with_physical<R>(&self, act: impl FnOnce(&mut Physical<Self::Driver>) -> R) -> R {
        act(&mut self.allocator().physical())
    }

    /// Returns the result of `act` with the driver locked. `act` makes one call or a few, because other threads wait.
    fn with_driver<R>(&self, act: impl FnOnce(&mut Self::Driver) -> R) -> R {
        act(self.allocator().physical().driver_mut())
    }
}
