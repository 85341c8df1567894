//! What a device does when no free block serves a request.

use std::time::{Duration, Instant};

use lowtide_core::{AllocError, Bytes, DeviceAddress, Driver, Growth, Lanes, Request, Stream};

use crate::lane::{Common, LaneGuard};
use crate::{SharedAllocator, SharedDriver, SharedError};

/// What became of a request under the locks of all lanes.
enum Outcome {
    Served(DeviceAddress),
    /// It is to be tried again when another thread has given memory back, within this time.
    MayWait(Duration),
}

impl<D: Driver> SharedAllocator<D> {
    /// Serves a request that no free block of lane `index` served when the lane had been visited so often.
    #[cold]
    pub(crate) fn allocate_new(
        &self,
        index: usize,
        requested: Bytes,
        stream: Stream,
        (request, visits): (Request, u64),
    ) -> Result<DeviceAddress, SharedError> {
        let start = Instant::now();
        let has_news = self.relieve_shortage()?;
        // Only as long as nobody else is in the lane; a search is not repeated for nothing.
        let mut searched = Some((request, visits + 1)).filter(|_| !has_news);
        loop {
            let mut common = self.common.lock()?;
            let mut visit = self.enter(index)?;
            let searched = searched.take_if(|(_, visits)| *visits == visit.state.visits);
            let searched = searched.map(|(request, _)| request);
            let attempt = self.try_in_lane(&mut common, &mut visit, searched, requested, stream);
            let (request, found) = match attempt {
                Ok(attempt) => attempt,
                Err(error) => {
                    drop(common);
                    self.leave(visit)?;
                    return Err(error.into());
                }
            };
            if let Some(address) = found {
                drop(common);
                // Who gives memory back and takes it again is as far from the end as before.
                let has_new_peak = visit.state.allocator.has_new_peak();
                self.leave(visit)?;
                if has_new_peak {
                    self.keep_events_where_memory_is_short();
                }
                return Ok(address);
            }
            let mut visits = self.enter_others(visit)?;
            let left = self.wait_left(&visits[index], start);
            let outcome = self.grow_under_all(&mut common, &mut visits, index, &request, left);
            match outcome? {
                Outcome::Served(address) => {
                    drop(visits);
                    drop(common);
                    self.keep_events_where_memory_is_short();
                    return Ok(address);
                }
                Outcome::MayWait(left) => {
                    drop(common);
                    // The lane was not left since the attempt, so that nothing that came free is missed.
                    self.wait(visits.swap_remove(index), left)?;
                }
            }
        }
    }

    /// Returns a request and what serves it of its own lane, with new memory of the driver if that is not
    /// limited. `searched` is the request if no free block of the lane serves it.
    fn try_in_lane(
        &self,
        common: &mut Common,
        visit: &mut LaneGuard<'_, D>,
        searched: Option<Request>,
        requested: Bytes,
        stream: Stream,
    ) -> Result<(Request, Option<DeviceAddress>), AllocError> {
        let lane = &mut visit.state.allocator;
        let (request, found) = match searched {
            Some(request) => (request, None),
            None => {
                let request = lane.request(requested, stream)?;
                let found = lane.take(&request);
                (request, found)
            }
        };
        self.apply_configured_fraction(common)?;
        // What all lanes hold together is looked at later where there is a limit.
        if found.is_some() || common.limit.is_some() {
            return Ok((request, found));
        }
        match lane.grow(&request)? {
            Growth::Served(address) => Ok((request, Some(address))),
            Growth::Rejected | Growth::Exhausted => Ok((request, None)),
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
        if is_short || self.limit().is_ok_and(|limit| limit.is_some()) {
            self.clock.start();
        }
    }

    /// Tries everything that the device can do for a request of lane `own`. Where that is not enough, the
    /// request may wait if there is time left, or has failed.
    fn grow_under_all(
        &self,
        common: &mut Common,
        visits: &mut [LaneGuard<'_, D>],
        own: usize,
        request: &Request,
        left: Option<Duration>,
    ) -> Result<Outcome, SharedError> {
        let has_limit = common.limit.is_some();
        let mut lanes = common.lanes(visits);
        let outcome = match grow_any_way(&mut lanes, own, request, has_limit) {
            Ok(Some(address)) => Ok(Outcome::Served(address)),
            Ok(None) => match left {
                Some(left) => Ok(Outcome::MayWait(left)),
                None => Err(lanes
                    .out_of_memory(own, request)
                    .unwrap_or_else(AllocError::from)),
            },
            Err(error) => Err(error),
        };
        lanes.sync_peaks();
        for visit in visits {
            self.notify(visit);
        }
        Ok(outcome?)
    }

    /// Enters the lanes besides one that the caller, who has the common lock, is in.
    fn enter_others<'a>(
        &'a self,
        own: LaneGuard<'a, D>,
    ) -> Result<Vec<LaneGuard<'a, D>>, SharedError> {
        let (index, mut own) = (own.index, Some(own));
        let enter = |other| match own.take_if(|_| other == index) {
            Some(own) => Ok(own),
            None => self.enter(other),
        };
        (0..self.count_in_use()).map(enter).collect()
    }

    /// Returns how long a request may still wait for other threads to free memory, if at all.
    fn wait_left(&self, visit: &LaneGuard<'_, D>, start: Instant) -> Option<Duration> {
        let wait_ms = visit.state.allocator.retry_wait_ms()?;
        Duration::from_millis(wait_ms).checked_sub(start.elapsed())
    }

    /// Leaves the lane until another thread may have freed memory, or the time is up.
    fn wait(&self, mut visit: LaneGuard<'_, D>, left: Duration) -> Result<(), SharedError> {
        let index = visit.index;
        visit.state.waiting += 1;
        let order = self.freed.order.lock()?;
        drop(visit);
        let (order, _) = self.freed.condition.wait_timeout(order, left)?;
        drop(order);
        self.enter(index)?.state.waiting -= 1;
        Ok(())
    }
}

/// Returns what may serve a request of lane `own` that the lane has no free block for.
fn grow_any_way<D: Driver>(
    lanes: &mut Lanes<'_, SharedDriver<D>>,
    own: usize,
    request: &Request,
    has_limit: bool,
) -> Result<Option<DeviceAddress>, AllocError> {
    if has_limit {
        lanes.share_limit();
        match lanes.lane(own).grow(request)? {
            Growth::Served(address) => return Ok(Some(address)),
            Growth::Rejected => return Ok(None),
            Growth::Exhausted => {}
        }
    } else if lanes.lane(own).is_rejected(request)? {
        return Ok(None);
    }
    lanes.grow_after_release(own, request)
}
