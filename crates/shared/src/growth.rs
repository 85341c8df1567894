//! Serves misses: calls [`Device::serve_miss`] under the locks that it needs, and repeats it while the request may wait
//! for other threads.

use std::time::{Duration, Instant};

use lowtide_core::{
    AllocError, Bytes, Device, DeviceAddress, Driver, Found, Lanes, Request, Stream,
};

use crate::SharedAllocator;
use crate::entered::Entered;

impl<D: Driver> SharedAllocator<D> {
    /// Serves a request that lane `index` had no free block for. `searched` has the request and the lane's visit count
    /// then; `None` if memory was freed since.
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
            // Valid only if no other thread has entered the lane since. If so, the search need not be repeated.
            let visits = device.lanes.guard(index).state.visits;
            let known = searched.take().filter(|(_, before)| before + 1 == visits);
            let known = known.map(|(request, _)| request);
            let left = self.wait_left(start);
            let served = serve(
                &mut device,
                index,
                known,
                left.is_some(),
                (requested, stream),
            );
            match served.transpose() {
                // The lane was not left since the attempt, so no free can be missed.
                None => self.wait(device, index, left.unwrap_or_default())?,
                // Perhaps only some lanes are entered. Their statistics alone say nothing about the device.
                Some(Err(AllocError::Poisoned)) => return Err(AllocError::Poisoned),
                Some(served) => {
                    self.leave_device(device)?;
                    return served;
                }
            }
        }
    }

    /// Returns how long a request may still wait for other threads to free memory; `None` if it may not wait.
    fn wait_left(&self, start: Instant) -> Option<Duration> {
        self.retry_wait?.checked_sub(start.elapsed())
    }

    /// Leaves the device until another thread may have freed memory or the time is up.
    fn wait(
        &self,
        mut device: Device<Entered<'_, D>>,
        index: usize,
        left: Duration,
    ) -> Result<(), AllocError> {
        self.publish_all(&mut device);
        device.lanes.guard(index).state.waiting += 1;
        let order = self.freed.order.lock().map_err(|_| AllocError::Poisoned)?;
        drop(device);
        let waited = self.freed.condition.wait_timeout(order, left);
        drop(waited.map_err(|_| AllocError::Poisoned)?);
        self.enter(index)?.state.waiting -= 1;
        Ok(())
    }
}

/// Serves a request, or returns `None` if it fails and `can_wait`. `known` is the request if its lane has no free block
/// for it.
fn serve<D: Driver>(
    device: &mut Device<Entered<'_, D>>,
    own: usize,
    known: Option<Request>,
    can_wait: bool,
    (requested, stream): (Bytes, Stream),
) -> Result<Option<DeviceAddress>, AllocError> {
    let request = match known {
        Some(request) => request,
        None => match device.lanes.lane(own).allocate(requested, stream)? {
            Found::Block(address) => return Ok(Some(address)),
            Found::Nothing(request) => request,
        },
    };
    device.serve_miss(own, &request, can_wait)
}
