//! What is tried, in order, for a request that no free block serves.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Device, Lanes};
use crate::config::LastTry;
use crate::driver::{Driver, DriverError};
use crate::error::{AllocError, Holder, OutOfMemory};
use crate::event::Action;
use crate::strategy::{Release, Request, Strategy};
use crate::units::{DeviceAddress, TorchRelease};

impl<L: Lanes> Device<L> {
    /// Returns what serves a request that no free block of its lane, `own`, does: the first of these attempts that
    /// succeeds. `None` where none does.
    ///
    /// Only lane `own` need have been entered; the others are where they are needed.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the device fails otherwise than for lack of memory, [`AllocError::Poisoned`].
    pub fn serve_miss(
        &mut self,
        own: usize,
        request: &Request,
    ) -> Result<Option<DeviceAddress>, AllocError> {
        self.apply_configured_fraction(own)?;
        // A limit is for what all lanes hold together.
        if self.counts_all_lanes(own) {
            self.lanes.enter_all()?;
            self.share_limit();
        }
        // Where the user set a threshold, memory long idle goes back before more is taken.
        self.lanes.lane(own).release(Release::Idle)?;
        // Where the user wants that, the driver is not asked for what the device is not to hold.
        if self.is_rejected(own, request)? {
            return Ok(None);
        }
        // New memory, within the limit.
        if let Some(address) = self.lanes.lane(own).grow(request)? {
            return Ok(Some(address));
        }
        self.lanes.enter_all()?;
        self.sync_peaks();
        // What private pools hold free, where their owners allow that.
        if let Some(address) = self.take_from_open_pools(own, request) {
            return Ok(Some(address));
        }
        // New memory, once just enough cached memory went back for the driver to have what is missing.
        if let Some(address) = self.grow_after_release_for(own, request)? {
            return Ok(Some(address));
        }
        // In a capture nothing may wait for events, so that nothing else goes back.
        if self.lane().is_capturing() {
            return Ok(None);
        }
        // Everything cached goes back, what waits for events included; then the last tries.
        self.reclaim_pending()?;
        self.release_cached(Some(request))?;
        self.share_limit();
        if let Some(address) = self.try_again(own, request)? {
            return Ok(Some(address));
        }
        // Private pools may have more free, too.
        self.sync_peaks();
        Ok(self.take_from_open_pools_again(own, request))
    }

    /// Returns whether what all lanes hold decides if one may take more memory.
    fn counts_all_lanes(&mut self, own: usize) -> bool {
        let rejects = self.lanes.lane(own).config.rejects_above().is_some();
        rejects || self.lanes.parts().0.limit.is_some()
    }

    /// Returns whether a request for new memory fails at once, without the driver being asked. What would pass the
    /// limit does not: then cached memory goes back.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device does not say how much memory it has.
    fn is_rejected(&mut self, own: usize, request: &Request) -> Result<bool, DriverError> {
        let lane = self.lanes.lane(own);
        let size = lane.segment_size(request);
        debug_assert!(size >= request.size, "a segment has room for the block");
        let rejects_above = lane.config.rejects_above();
        let Some(fraction) = rejects_above.filter(|_| !lane.heap.exceeds_limit(size)) else {
            return Ok(false);
        };
        let most = lane.physical.driver.memory_info()?.total.scale(fraction);
        Ok(self.limited().saturating_add(size) > most)
    }

    fn grow_after_release_for(
        &mut self,
        own: usize,
        request: &Request,
    ) -> Result<Option<DeviceAddress>, DriverError> {
        if !self.lanes.lane(own).release(Release::For(request))? {
            return Ok(None);
        }
        self.share_limit();
        self.lanes.lane(own).grow(request)
    }

    /// Returns a free block or new memory, in the order of [`Config::last_try`](crate::Config::last_try), now that
    /// everything that could go back did.
    fn try_again(
        &mut self,
        own: usize,
        request: &Request,
    ) -> Result<Option<DeviceAddress>, DriverError> {
        let lane = self.lanes.lane(own);
        lane.heap.stats.num_alloc_retries += 1;
        match lane.config.last_try() {
            LastTry::FreeFirst => match lane.take(request) {
                Some(address) => Ok(Some(address)),
                None => lane.grow(request),
            },
            LastTry::NewFirst => Ok(lane.grow(request)?.or_else(|| lane.take(request))),
            LastTry::NewOnly => lane.grow(request),
        }
    }

    /// Returns a free block of a pool that serves others' requests before they fail. Private pools are in the first
    /// lane; those whose own request it is had their turn.
    fn take_from_open_pools(&mut self, own: usize, request: &Request) -> Option<DeviceAddress> {
        let stream = self.lanes.lane(own).stream_of_default_pool(request)?;
        let found = self.lane_mut().take_from_open_pools(request, stream)?;
        self.sync_peaks();
        Some(found)
    }

    fn take_from_open_pools_again(
        &mut self,
        own: usize,
        request: &Request,
    ) -> Option<DeviceAddress> {
        let looks_again = self.lanes.lane(own).config.last_try() != LastTry::NewOnly;
        looks_again
            .then(|| self.take_from_open_pools(own, request))
            .flatten()
    }

    /// Returns the error for a request of lane `own` that nothing serves, and counts it.
    ///
    /// # Errors
    ///
    /// What the driver said when it was asked how much memory there is.
    pub fn out_of_memory(
        &mut self,
        own: usize,
        request: &Request,
    ) -> Result<AllocError, DriverError> {
        let reserved_in_private = self.lane().reserved_in_private_pools();
        let active_in_private = self.lane().active_in_private_pools();
        let (allocated, reserved) = (self.allocated(), self.reserved());
        let holders = self.holders();
        // Private pools are all in the first lane.
        let paused = self.lane().heap.domains.paused_regions();
        let limit = self.limit();
        debug_assert!(allocated <= reserved);
        debug_assert!(active_in_private <= reserved_in_private);
        let is_rejected = self.is_rejected(own, request)?;
        let lane = self.lanes.lane(own);
        let info = lane.physical.driver.memory_info()?;
        let heap = &lane.heap;
        let domain = heap.domains.domain(request.domain);
        let out_of_memory = OutOfMemory {
            device: lane.device,
            requested: request.requested,
            stream: domain.stream,
            pool: heap.domains.pool(domain.pool).id,
            segment_size: lane.segment_size(request),
            largest_free: lane.strategy.largest_free(heap, request.domain),
            allocated,
            reserved,
            limit,
            free_in_private_pools: reserved_in_private.saturating_sub(active_in_private),
            device_free: info.free,
            device_total: info.total,
            paused: paused.into_iter().collect(),
            details: lane.strategy.describe(heap, request),
            holders,
            is_rejected,
            expandable_segments: lane.config.has_expandable_segments(),
            torch: TorchRelease::NEWEST,
        };
        if is_rejected {
            lane.heap.stats.num_oom_rejections += 1;
        } else {
            let address = DeviceAddress(info.free.get());
            lane.heap
                .record(Action::OutOfMemory, request.domain, address, request.size);
            lane.heap.stats.num_ooms += 1;
        }
        Ok(AllocError::OutOfMemory(Box::new(out_of_memory)))
    }

    /// Returns how many blocks of which size the program holds on the device, on which stream and in which region, those
    /// that take the most first.
    fn holders(&self) -> Vec<Holder> {
        let mut counts = BTreeMap::new();
        let lanes = self.lanes.parts().1;
        lanes.for_each(|lane| lane.count_holders(&mut counts));
        let holder = |((size, stream, region), count)| Holder {
            size,
            stream,
            region,
            count,
        };
        let mut holders: Vec<Holder> = counts.into_iter().map(holder).collect();
        holders.sort_by_key(|holder| Reverse((holder.bytes(), holder.size)));
        holders
    }
}
