//! A device: the state that its lanes have in common, such as the limit, and the peaks and snapshots of the whole
//! device.
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

mod inspect;
mod limits;
mod miss;

use std::sync::Arc;

use crate::config::Config;
use crate::driver::{Driver, DriverError};
use crate::error::AllocError;
use crate::lane::{Found, Lane};
use crate::peaks::Peaks;
use crate::physical::{Memory, Physical};
use crate::recent_events::EventClock;
use crate::strategy::Request;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

pub use inspect::DevicePast;

/// The state that the lanes of a device have in common.
#[derive(Debug)]
pub struct DeviceState {
    /// Bytes that all lanes together may reserve, if there is a limit.
    limit: Option<Bytes>,
    /// The fraction of the device's memory that the configuration allows, until the device's size is known.
    fraction: Option<f64>,
    /// The device's peaks, if it has several lanes. The peaks of a single lane are the device's.
    peaks: Peaks,
    /// Orders the events that its lanes keep for the explanation of an out-of-memory error, if they keep any.
    clock: Option<Arc<EventClock>>,
}

impl DeviceState {
    /// Returns the state of a device that holds no memory. A miss starts `clock` once memory is short. Lanes then
    /// [keep their last events](crate::EventLog::keep_recent).
    pub fn new(config: &Config, clock: Option<Arc<EventClock>>) -> DeviceState {
        DeviceState {
            limit: None,
            fraction: config.memory_fraction(),
            peaks: Peaks::default(),
            clock,
        }
    }
}

/// How a [`Device`] reaches its lanes: it owns its only lane, or it locks one of several.
pub trait Lanes {
    /// How its lanes reach the physical memory.
    type Memory: Memory;

    /// Returns the first lane, which has been entered.
    fn first(&self) -> &Lane<Self::Memory>;

    /// Returns a lane that has been entered.
    fn lane(&mut self, index: usize) -> &mut Lane<Self::Memory>;

    /// Enters every lane in use. Otherwise only the lane of the request may be used.
    ///
    /// # Errors
    ///
    /// [`AllocError::Poisoned`].
    fn enter_all(&mut self) -> Result<(), AllocError>;

    /// Returns whether every lane in use has been entered.
    fn has_all(&self) -> bool;

    /// Returns the device's state and the lanes that have been entered, in their order.
    fn parts(&self) -> (&DeviceState, impl Iterator<Item = &Lane<Self::Memory>>);

    /// Returns the same as [`Lanes::parts`], mutable.
    fn parts_mut(
        &mut self,
    ) -> (
        &mut DeviceState,
        impl Iterator<Item = &mut Lane<Self::Memory>>,
    );
}

/// One device. Every function but [`Device::serve_miss`] needs all lanes to have been
/// [entered](Lanes::enter_all).
#[derive(Debug)]
pub struct Device<L> {
    /// Its lanes, and the state they have in common.
    pub lanes: L,
}

/// The only lane of a device, and the device's state.
#[derive(Debug)]
pub struct OneLane<D> {
    lane: Lane<Physical<D>>,
    state: DeviceState,
}

/// A device of one lane, for one thread.
pub type DeviceAllocator<D> = Device<OneLane<D>>;

impl<D: Driver> Lanes for OneLane<D> {
    type Memory = Physical<D>;

    fn first(&self) -> &Lane<Physical<D>> {
        &self.lane
    }

    #[inline(always)]
    fn lane(&mut self, index: usize) -> &mut Lane<Physical<D>> {
        debug_assert_eq!(index, 0, "there is one lane");
        &mut self.lane
    }

    fn enter_all(&mut self) -> Result<(), AllocError> {
        Ok(())
    }

    fn has_all(&self) -> bool {
        true
    }

    fn parts(&self) -> (&DeviceState, impl Iterator<Item = &Lane<Physical<D>>>) {
        (&self.state, std::iter::once(&self.lane))
    }

    fn parts_mut(
        &mut self,
    ) -> (
        &mut DeviceState,
        impl Iterator<Item = &mut Lane<Physical<D>>>,
    ) {
        (&mut self.state, std::iter::once(&mut self.lane))
    }
}

impl<D: Driver> Device<OneLane<D>> {
    /// Returns a device that holds no memory. `number` is the device's number in messages.
    pub fn new(driver: D, number: u32, config: &Config) -> DeviceAllocator<D> {
        Device {
            lanes: OneLane {
                lane: Lane::new(Physical::new(driver, None), 0, number, config, None),
                state: DeviceState::new(config, None),
            },
        }
    }

    /// Returns the address of a block of at least `requested` bytes that work in `stream` may use at once. Returns
    /// [`DeviceAddress::NULL`] for zero bytes.
    ///
    /// Constant time on a hit for every strategy except BFC with a safe frontier. A miss makes driver calls.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] when no more memory can be released, and as [`Lane::allocate`].
    #[inline]
    pub fn allocate(
        &mut self,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        let found = self.lanes.lane.allocate(requested, stream)?;
        self.serve(found)
    }

    /// Returns the address of a block from the pool `pool`, whatever routes are set. A replay uses this, because a
    /// recording names the pool of each block. A pool that does not exist is created. A pool with a use count of zero
    /// gets a use count of one, even if memory runs out. A request for zero bytes, or one that fails before the search
    /// for memory, leaves the pools unchanged.
    ///
    /// # Errors
    ///
    /// As [`Device::allocate`].
    pub fn allocate_in(
        &mut self,
        pool: MempoolId,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        let found = self.lanes.lane.allocate_in(pool, requested, stream)?;
        self.serve(found)
    }

    /// Returns the address of the found block, or serves the miss.
    #[inline(always)]
    fn serve(&mut self, found: Found) -> Result<DeviceAddress, AllocError> {
        match found {
            Found::Block(address) => Ok(address),
            Found::Nothing(request) => self.serve_new(&request),
        }
    }

    /// Serves a miss. Separate, so that a hit does not pay for it.
    #[cold]
    fn serve_new(&mut self, request: &Request) -> Result<DeviceAddress, AllocError> {
        let served = self.serve_miss(0, request, false)?;
        Ok(served.expect("a request that cannot wait is served or fails"))
    }

    /// Frees a block like [`Lane::free`].
    ///
    /// # Errors
    ///
    /// As [`Lane::free`].
    #[inline(always)]
    pub fn free(&mut self, address: DeviceAddress) -> Result<(), AllocError> {
        self.lanes.lane.free(address)
    }

    /// Returns the driver.
    pub fn driver(&mut self) -> &mut D {
        self.lanes.lane.memory.driver_mut()
    }
}

impl<L: Lanes> Device<L> {
    /// Returns the first lane, which has the private pools. A [`DeviceAllocator`] has no other lane.
    pub fn lane(&self) -> &Lane<L::Memory> {
        self.lanes.first()
    }

    /// Returns the same as [`Device::lane`], mutable.
    pub fn lane_mut(&mut self) -> &mut Lane<L::Memory> {
        self.lanes.lane(0)
    }

    /// Releases all unused memory to the driver, or only that of one private pool. Unless a capture forbids it, first
    /// waits for the events of all pending blocks, or only those of the pool. Held private pools keep their memory.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the driver refuses a call; memory released before that stays released.
    /// [`AllocError::NoSuchPool`] for a pool that does not exist.
    pub fn empty_cache(&mut self, pool: Option<MempoolId>) -> Result<(), AllocError> {
        if let Some(pool) = pool {
            return self.lane_mut().empty_pool(pool);
        }
        self.reclaim_pending()?;
        Ok(self.release_cached(None)?)
    }

    /// Waits for the events of all pending blocks; does nothing during a capture, which forbids the wait.
    fn reclaim_pending(&mut self) -> Result<(), DriverError> {
        if self.lane().is_capturing() {
            return Ok(());
        }
        self.sync_peaks();
        self.lane_mut().heap.stats.num_sync_all_streams += 1;
        self.for_each_lane(Lane::reclaim_pending)
    }

    /// Releases all free memory except that of private pools that are still held.
    fn release_cached(&mut self, failing: Option<&Request>) -> Result<(), DriverError> {
        self.for_each_lane(|lane| lane.release_cached(failing))
    }

    /// Calls `act` with each lane until one fails. One lane's changes are added to the peaks before the next lane
    /// is called.
    fn for_each_lane(
        &mut self,
        act: impl Fn(&mut Lane<L::Memory>) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let count = self.lanes.parts().1.count();
        for index in 0..count {
            let result = act(self.lanes.lane(index));
            self.sync_peaks();
            result?;
        }
        Ok(())
    }

    /// Notifies observers of new events. Updates the device's peaks if a lane has a new peak or another lane came
    /// into use. Must be called after each lane's changes, before another lane changes.
    pub fn sync_peaks(&mut self) {
        let (mut count, mut has_new_peak) = (0, false);
        for lane in self.lanes.parts_mut().1 {
            lane.notify_observers();
            has_new_peak |= lane.has_new_peak();
            count += 1;
        }
        let (state, lanes) = self.lanes.parts_mut();
        // The peaks of a single lane are the device's.
        if count == 1 || !has_new_peak && count == state.peaks.count() {
            return;
        }
        state.peaks.sync(lanes.map(|lane| &mut lane.heap.stats));
        let (state, lanes) = self.lanes.parts_mut();
        let figures = lanes.map(|lane| &mut lane.heap.stats);
        state.peaks.write_ceilings(figures);
        debug_assert_eq!(state.peaks.count(), count);
    }

    fn has_one_lane(&self) -> bool {
        self.lanes.parts().1.nth(1).is_none()
    }

    fn sum(&self, bytes: impl Fn(&Lane<L::Memory>) -> Bytes) -> Bytes {
        self.lanes.parts().1.map(bytes).sum()
    }
}
