//! A device: what its lanes have in common, such as the limit, peaks and pictures of the whole.
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

mod inspect;
mod limits;
mod miss;

use crate::config::Config;
use crate::driver::{Driver, DriverError};
use crate::error::AllocError;
use crate::lane::Lane;
use crate::peaks::Peaks;
use crate::strategy::Request;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

pub use inspect::DevicePast;

/// What the lanes of a device have in common.
#[derive(Debug)]
pub struct DeviceState {
    /// Bytes that all lanes together may hold from the driver, where there is a limit.
    limit: Option<Bytes>,
    /// The share of the device's memory that the configuration allows, until the device was asked how
    /// much that is.
    fraction: Option<f64>,
    /// The device's peaks, where it has several lanes. Those of a single lane are the device's.
    peaks: Peaks,
}

impl DeviceState {
    /// Returns the state of a device that holds nothing yet.
    pub fn new(config: &Config) -> DeviceState {
        DeviceState {
            limit: None,
            fraction: config.memory_fraction(),
            peaks: Peaks::default(),
        }
    }
}

/// How a [`Device`] reaches its lanes: it owns the only one, or each has a lock that is taken.
pub trait Lanes {
    /// The driver of the device.
    type Driver: Driver;

    /// Returns a lane that has been entered.
    fn lane(&mut self, index: usize) -> &mut Lane<Self::Driver>;

    /// Enters every lane in use. Without that only the lane may be used whose request is served.
    ///
    /// # Errors
    ///
    /// [`AllocError::Poisoned`].
    fn enter_all(&mut self) -> Result<(), AllocError>;

    /// Returns the device's state, and the lanes that have been entered, in their order.
    fn parts(&self) -> (&DeviceState, impl Iterator<Item = &Lane<Self::Driver>>);

    /// Returns what [`Lanes::parts`] does, to be changed.
    fn parts_mut(
        &mut self,
    ) -> (
        &mut DeviceState,
        impl Iterator<Item = &mut Lane<Self::Driver>>,
    );
}

/// One device. Every function but [`Device::serve_miss`] needs all lanes to have been
/// [entered](Lanes::enter_all).
#[derive(Debug)]
pub struct Device<L> {
    /// Its lanes, and what they have in common.
    pub lanes: L,
}

/// The only lane of a device, and the device's state.
#[derive(Debug)]
pub struct OneLane<D> {
    lane: Lane<D>,
    state: DeviceState,
}

/// A device of one lane, for one thread.
pub type DeviceAllocator<D> = Device<OneLane<D>>;

impl<D: Driver> Lanes for OneLane<D> {
    type Driver = D;

    #[inline(always)]
    fn lane(&mut self, index: usize) -> &mut Lane<D> {
        debug_assert_eq!(index, 0, "there is one lane");
        &mut self.lane
    }

    fn enter_all(&mut self) -> Result<(), AllocError> {
        Ok(())
    }

    fn parts(&self) -> (&DeviceState, impl Iterator<Item = &Lane<D>>) {
        (&self.state, std::iter::once(&self.lane))
    }

    fn parts_mut(&mut self) -> (&mut DeviceState, impl Iterator<Item = &mut Lane<D>>) {
        (&mut self.state, std::iter::once(&mut self.lane))
    }
}

impl<D: Driver> Device<OneLane<D>> {
    /// Returns a device that holds nothing yet. `number` is the one that messages name.
    pub fn new(driver: D, number: u32, config: &Config) -> DeviceAllocator<D> {
        Device {
            lanes: OneLane {
                lane: Lane::new(driver, number, config),
                state: DeviceState::new(config),
            },
        }
    }

    /// Returns the address of a block of at least `requested` bytes that work in `stream` may use at
    /// once; [`DeviceAddress::NULL`] for zero bytes.
    ///
    /// Constant time on a hit for every strategy but BFC with a safe frontier; on a miss, driver
    /// calls.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] when nothing more can be given back, and as [`Lane::request`].
    #[inline]
    pub fn allocate(
        &mut self,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        let request = self.lanes.lane.request(requested, stream)?;
        self.serve(&request)
    }

    /// Returns the address of a block from the pool called `pool`, whatever routes are set: how a
    /// recording, which knows the pool of each block, is replayed. A pool that does not exist is made;
    /// one that nothing holds is held once from then on, even where memory runs out. A request for zero
    /// bytes, or one that is refused before memory is looked for, leaves the pools as they were.
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
        let request = self.lanes.lane.request_in(pool, requested, stream)?;
        self.serve(&request)
    }

    /// Returns what serves a request, if anything does.
    #[inline(always)]
    fn serve(&mut self, request: &Request) -> Result<DeviceAddress, AllocError> {
        match self.lanes.lane.take(request) {
            Some(address) => Ok(address),
            None => self.serve_new(request),
        }
    }

    /// Serves a miss. Apart from [`Device::serve`], so that a hit does not pay for it.
    #[cold]
    fn serve_new(&mut self, request: &Request) -> Result<DeviceAddress, AllocError> {
        match self.serve_miss(0, request)? {
            Some(address) => Ok(address),
            None => Err(self.out_of_memory(0, request)?),
        }
    }

    /// Takes a block back, as [`Lane::free`] does.
    ///
    /// # Errors
    ///
    /// As [`Lane::free`].
    #[inline(always)]
    pub fn free(&mut self, address: DeviceAddress) -> Result<(), AllocError> {
        self.lanes.lane.free(address)
    }
}

impl<L: Lanes> Device<L> {
    /// Returns the first lane, which private pools are in. A [`DeviceAllocator`] has no other.
    pub fn lane(&self) -> &Lane<L::Driver> {
        self.lanes.parts().1.next().expect("a device has a lane")
    }

    /// Returns what [`Device::lane`] does, to be changed.
    pub fn lane_mut(&mut self) -> &mut Lane<L::Driver> {
        self.lanes.lane(0)
    }

    /// Gives everything that is not in use back to the driver, after the events that freed blocks
    /// wait for, unless a capture forbids the wait. Private pools that are still held keep theirs.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the driver refuses a call; what went back before that is gone.
    pub fn empty_cache(&mut self) -> Result<(), AllocError> {
        self.reclaim_pending()?;
        Ok(self.release_cached(None)?)
    }

    /// Waits for every event that a freed block waits for; during a capture, in which that is not
    /// allowed, for none.
    fn reclaim_pending(&mut self) -> Result<(), DriverError> {
        if self.lane().is_capturing() {
            return Ok(());
        }
        self.sync_peaks();
        self.lane_mut().heap.stats.num_sync_all_streams += 1;
        self.for_each_lane(Lane::reclaim_pending)
    }

    /// Gives back everything that is free, but for what private pools keep that are still held.
    fn release_cached(&mut self, failing: Option<&Request>) -> Result<(), DriverError> {
        self.for_each_lane(|lane| lane.release_cached(failing))
    }

    /// Does to each lane what may fail, until it does. What one has done is settled before the next does something.
    fn for_each_lane(
        &mut self,
        act: impl Fn(&mut Lane<L::Driver>) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let count = self.lanes.parts().1.count();
        for index in 0..count {
            let result = act(self.lanes.lane(index));
            self.sync_peaks();
            result?;
        }
        Ok(())
    }

    /// Notifies observers of what happened, and brings the device's peaks up to date where any lane's have risen, or
    /// another lane came into use. What one lane has done must be settled before another does something.
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

    fn sum(&self, bytes: impl Fn(&Lane<L::Driver>) -> Bytes) -> Bytes {
        self.lanes.parts().1.map(bytes).sum()
    }
}
