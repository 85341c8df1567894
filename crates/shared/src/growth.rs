//! What a device does when no free block serves a request: [`Device::serve_miss`] under the locks that it needs, again
//! and again where it may wait for other threads.

use std::time::{Duration, Instant};

use lowtide_core::{AllocError, Bytes, Device, DeviceAddress, Driver, Lanes, Request, Stream};

use crate::SharedAllocator;
use crate::entered::Entered;

impl<D: Driver> SharedAllocator<D> {
    /// Serves a request that no free block of lane `index` served when the lane had been visited so often.
    #[cold]
    pub(crate) fn allocate_new(
        &self,
        index: usize,
        requested: Bytes,
        stream: Stream,
        searched: Option<(Request, u64)>,
    ) -> Result<DeviceAddress, AllocError> {
        let start = Instant::now();
        let mut searched = searched;
        loop {
            let mut device = self.enter_with_lane(index)?;
            // Only as long as nobody else is in the lane; a search is not repeated for nothing.
            let visits = device.lanes.guard(index).state.visits;
            let known = searched.take().filter(|(_, before)| before + 1 == visits);
            let known = known.map(|(request, _)| request);
            let left = self.wait_left(start);
            let attempt = attempt(&mut device, index, known, (requested, stream));
            let (request, found) = match attempt {
                Ok(attempt) => attempt,
                Err(error) => {
                    self.leave_device(device)?;
                    return Err(error);
                }
            };
            match (found, left) {
                (Some(address), _) => {
                    let may_be_short = is_nearer_to_the_end(&device);
                    self.leave_device(device)?;
                    if may_be_short {
                        self.keep_events_where_memory_is_short();
                    }
                    return Ok(address);
                }
                // The lane was not left since the attempt, so that nothing that came free is missed.
                (None, Some(left)) => self.wait(device, index, left)?,
                (None, None) => {
                    let error = device.out_of_memory(index, &request);
                    self.leave_device(device)?;
                    return Err(error?);
                }
            }
        }
    }

    /// Has the last events kept from now on where little of the device is left, or there is a limit: only then
    /// will someone ask for them soon.
    fn keep_events_where_memory_is_short(&self) {
        const LEFT_OF_DEVICE: u64 = 4;
        if self.clock.is_running() {
            return;
        }
        // A device that does not answer has said so, or will, to a request.
        let is_short = self
            .with_driver(Driver::memory_info)
            .is_ok_and(|info| info.free.get() < info.total.get() / LEFT_OF_DEVICE);
        let has_limit = || {
            self.enter_device()
                .is_ok_and(|device| device.limit().is_some())
        };
        if is_short || has_limit() {
            self.clock.start();
        }
    }

    /// Returns how long a request may still wait for other threads to free memory, if at all.
    fn wait_left(&self, start: Instant) -> Option<Duration> {
        self.retry_wait?.checked_sub(start.elapsed())
    }

    /// Leaves the device until another thread may have freed memory, or the time is up.
    fn wait(
        &self,
        mut device: Device<Entered<'_, D>>,
        index: usize,
        left: Duration,
    ) -> Result<(), AllocError> {
        self.settle(&mut device)?;
        device.lanes.guard(index).state.waiting += 1;
        let order = self.freed.order.lock().map_err(|_| AllocError::Poisoned)?;
        drop(device);
        let waited = self.freed.condition.wait_timeout(order, left);
        drop(waited.map_err(|_| AllocError::Poisoned)?);
        self.enter(index)?.state.waiting -= 1;
        Ok(())
    }
}

/// Returns a request and what serves it. `known` is the request if no free block of its lane serves it.
fn attempt<D: Driver>(
    device: &mut Device<Entered<'_, D>>,
    own: usize,
    known: Option<Request>,
    (requested, stream): (Bytes, Stream),
) -> Result<(Request, Option<DeviceAddress>), AllocError> {
    let request = match known {
        Some(request) => request,
        None => {
            let lane = device.lanes.lane(own);
            let request = lane.request(requested, stream)?;
            if let Some(address) = lane.take(&request) {
                return Ok((request, Some(address)));
            }
            request
        }
    };
    let found = device.serve_miss(own, &request)?;
    Ok((request, found))
}

/// Returns whether less memory may be left than ever: who gives memory back and takes it again is as far from the end
/// as before.
fn is_nearer_to_the_end<D: Driver>(device: &Device<Entered<'_, D>>) -> bool {
    let mut lanes = device.lanes.parts().1;
    device.lanes.has_all() || lanes.any(|lane| lane.news().has_new_peak)
}
