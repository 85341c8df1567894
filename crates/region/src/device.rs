//! What a region needs from outside: the device that its memory is on, and the pools that its blocks are in.

use lowtide_core::{Bytes, Driver, DriverError, Stream};

use crate::backup::MemoryRange;
use crate::error::PoolsError;

/// The device that a region's memory is on, which others use at the same time.
pub trait Device {
    /// Its driver.
    type Driver: Driver;

    /// Returns what `act` does with the driver. It is one call, or a few: others wait for the driver
    /// meanwhile.
    fn with_driver<R>(&self, act: impl FnOnce(&mut Self::Driver) -> R) -> R;

    /// Waits for all work of the device, without keeping others from the driver.
    ///
    /// # Errors
    ///
    /// What the driver says.
    fn synchronize(&self) -> Result<(), DriverError>;

    /// Waits for the work of a stream that used memory which is free by now, so that the program may have
    /// destroyed the stream: what is refused of one is waited for with all work of the device.
    ///
    /// # Errors
    ///
    /// What the driver says to that.
    fn wait_for(&self, stream: Stream) -> Result<(), DriverError> {
        let waited = self.with_driver(|driver| driver.synchronize_stream(stream));
        waited.or_else(|_| self.synchronize())
    }

    /// Returns how much of the device regions leave free when they grow.
    fn margin(&self) -> Bytes {
        Bytes::ZERO
    }
}

/// The pools whose segments come from one region memory.
pub trait Pools {
    /// Says that their memory is away, so that nothing is allocated in them, or back.
    ///
    /// # Errors
    ///
    /// What their allocator says.
    fn set_paused(&mut self, is_paused: bool) -> Result<(), PoolsError>;

    /// Waits until no stream, of whatever device, uses what was freed in them. Comes after the device was waited for.
    ///
    /// # Errors
    ///
    /// What their allocator says.
    fn wait_for_pending(&mut self) -> Result<(), PoolsError> {
        Ok(())
    }

    /// Gives back the free segments of the pools that may lose them, and returns the blocks that the program
    /// holds in all of them, by rising addresses.
    ///
    /// # Errors
    ///
    /// What their allocator says.
    fn trim_and_list(&mut self) -> Result<Vec<MemoryRange>, PoolsError>;

    /// Notes the held blocks that begin with ranges of which a copy stays: each until a block is handed out there,
    /// which the copy is not of; or (`is_watched` false) forgets that they were noted.
    fn watch(&mut self, ranges: &[MemoryRange], is_watched: bool);

    /// Tells whoever wants to know that the memory of every segment of the pools is about to leave, or is back.
    fn notify(&mut self, is_leaving: bool);
}
