//! A device that a thread has entered: it holds the common lock and the lock of one lane or of all lanes.

use std::fmt;

use lowtide_core::{AllocError, Device, DeviceState, Driver, Lane, Lanes, Stream};

use crate::lane::LaneGuard;
use crate::memory::SharedMemory;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::{LANES_MAX, SharedAllocator};

/// The lanes of a device that a thread has locked. The thread also holds the common lock.
pub struct Entered<'a, D> {
    allocator: &'a SharedAllocator<D>,
    state: MutexGuard<'a, DeviceState>,
    /// By lane number; `None` if the lane is not entered.
    lanes: [Option<LaneGuard<'a, D>>; LANES_MAX],
    /// Whether all lanes in use are entered.
    has_all: bool,
}

impl<D> fmt::Debug for Entered<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut entered = f.debug_struct("Entered");
        entered.field("has_all", &self.has_all);
        entered.finish_non_exhaustive()
    }
}

impl<D: Driver> Lanes for Entered<'_, D> {
    type Memory = SharedMemory<D>;

    fn first(&self) -> &Lane<SharedMemory<D>> {
        let first = self.lanes[0].as_ref().expect("the lane was entered");
        &first.state.lane
    }

    fn lane(&mut self, index: usize) -> &mut Lane<SharedMemory<D>> {
        &mut self.guard(index).state.lane
    }

    fn enter_all(&mut self) -> Result<(), AllocError> {
        if self.has_all {
            return Ok(());
        }
        for index in 0..self.allocator.count_in_use() {
            if self.lanes[index].is_none() {
                self.lanes[index] = Some(self.allocator.enter(index)?);
            }
        }
        self.has_all = true;
        Ok(())
    }

    fn has_all(&self) -> bool {
        self.has_all
    }

    fn parts(&self) -> (&DeviceState, impl Iterator<Item = &Lane<SharedMemory<D>>>) {
        let lanes = self.lanes.iter().flatten();
        (&self.state, lanes.map(|guard| &guard.state.lane))
    }

    fn parts_mut(
        &mut self,
    ) -> (
        &mut DeviceState,
        impl Iterator<Item = &mut Lane<SharedMemory<D>>>,
    ) {
        let lanes = self.lanes.iter_mut().flatten();
        (&mut self.state, lanes.map(|guard| &mut guard.state.lane))
    }
}

impl<'a, D: Driver> Entered<'a, D> {
    pub(crate) fn guard(&mut self, index: usize) -> &mut LaneGuard<'a, D> {
        let guard = self.lanes[index].as_mut();
        guard.expect("the lane was entered")
    }
}

impl<D: Driver> SharedAllocator<D> {
    /// Locks all lanes, calls `act` with the device, and returns its result. No other thread can be in a lane
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// [`AllocError::Poisoned`]; `act` is not called.
    pub fn with_all<R>(
        &self,
        act: impl FnOnce(&mut Device<Entered<'_, D>>) -> R,
    ) -> Result<R, AllocError> {
        let mut device = self.enter_device()?;
        device.lanes.enter_all()?;
        device.sync_peaks();
        let result = act(&mut device);
        self.leave_device(device)?;
        Ok(result)
    }

    /// Takes the common lock.
    pub(crate) fn enter_device(&self) -> Result<Device<Entered<'_, D>>, AllocError> {
        let state = self.state.lock().map_err(|_| AllocError::Poisoned)?;
        let lanes = Entered {
            allocator: self,
            state,
            lanes: [const { None }; LANES_MAX],
            has_all: false,
        };
        Ok(Device { lanes })
    }

    /// Takes the common lock and the lock of one lane.
    pub(crate) fn enter_with_lane(
        &self,
        index: usize,
    ) -> Result<Device<Entered<'_, D>>, AllocError> {
        let mut device = self.enter_device()?;
        device.lanes.lanes[index] = Some(self.enter(index)?);
        Ok(device)
    }

    /// Leaves a device: publishes what was done and wakes threads that wait for memory.
    pub(crate) fn leave_device(
        &self,
        mut device: Device<Entered<'_, D>>,
    ) -> Result<(), AllocError> {
        if !device.lanes.has_all {
            return self.leave_lane(device);
        }
        self.publish_all(&mut device);
        let mut lanes = device.lanes.lanes.iter().flatten();
        let someone_waits = lanes.any(|guard| guard.state.waiting > 0);
        drop(device);
        if someone_waits {
            self.wake_waiting()?;
        }
        Ok(())
    }

    /// Leaves a device with one entered lane. Unlocks the common lock first, so that misses of other lanes do not wait
    /// for a slow observer.
    fn leave_lane(&self, device: Device<Entered<'_, D>>) -> Result<(), AllocError> {
        let Entered { state, lanes, .. } = device.lanes;
        drop(state);
        let mut lanes = lanes.into_iter().flatten();
        let guard = lanes.next();
        debug_assert!(lanes.next().is_none(), "one lane was entered");
        guard.map_or(Ok(()), |guard| self.leave(guard))
    }

    /// Publishes the changes that other threads must know, and updates the device's peaks. All lanes were entered.
    pub(crate) fn publish_all(&self, device: &mut Device<Entered<'_, D>>) {
        debug_assert!(device.lanes.has_all, "peaks are of all lanes");
        device.sync_peaks();
        for guard in device.lanes.lanes.iter_mut().flatten() {
            self.publish(guard);
        }
    }

    /// Ends a visit that changed something other threads must know.
    #[cold]
    pub(crate) fn leave_with_news(&self, mut guard: LaneGuard<'_, D>) -> Result<(), AllocError> {
        let has_new_peak = self.publish(&mut guard);
        guard.end();
        if has_new_peak {
            let mut device = self.enter_device()?;
            device.lanes.enter_all()?;
            device.sync_peaks();
        }
        Ok(())
    }

    /// Assigns a stream to the lane that serves it from now on.
    #[cold]
    pub(crate) fn give_lane(&self, stream: Stream) -> Result<usize, AllocError> {
        let mut device = self.enter_device()?;
        let index = self.streams.find_or_insert(stream, self.lanes.len());
        if index >= self.count_in_use() {
            device.lanes.enter_all()?;
            device.lanes.lanes[index] = Some(self.enter(index)?);
            // All lanes are locked, because a thread in any lane may read this count.
            self.lanes_in_use.fetch_add(1, Ordering::Relaxed);
            device.sync_peaks();
        }
        Ok(index)
    }
}
