//! The attempts, in order, to serve a request that no free block serves.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Device, Lanes};
use crate::config::LastTry;
use crate::driver::{DriverError, MemoryInfo};
use crate::error::{AllocError, Holder, OutOfMemory};
use crate::event::Action;
use crate::strategy::{Release, Request, Strategy};
use crate::units::{DeviceAddress, TorchRelease};

/// Events are kept once less than this part of the device's memory is left: a quarter.
const LEFT_OF_DEVICE: u64 = 4;

/// The outcome of the attempts to serve a request.
enum Miss {
    /// One of them served it, at this address.
    Served(DeviceAddress),
    /// The configuration makes requests of this size fail at once.
    Rejected,
    /// The driver or the limit allows no more memory.
    Unserved,
}

impl<L: Lanes> Device<L> {
    /// Serves a request that no free block of its lane `own` serves. If no memory is left and the request `can_wait`
    /// for another thread to free some, returns `None` and counts and records no out-of-memory error.
    ///
    /// Only lane `own` must have been entered. The others are entered when they are needed.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`], which is counted and recorded. [`AllocError::Driver`] when the device fails for
    /// another reason than lack of memory, and [`AllocError::Poisoned`].
    #[cold]
    pub fn serve_miss(
        &mut self,
        own: usize,
        request: &Request,
        can_wait: bool,
    ) -> Result<Option<DeviceAddress>, AllocError> {
        match self.attempt(own, request)? {
            Miss::Served(address) => {
                self.keep_events_where_memory_is_short(own);
                Ok(Some(address))
            }
            _ if can_wait => Ok(None),
            miss => Err(self.out_of_memory(own, request, matches!(miss, Miss::Rejected))?),
        }
    }

    /// Starts to keep the last events if little device memory is left or a limit is set. Only then may an out-of-memory
    /// error need them soon.
    fn keep_events_where_memory_is_short(&mut self, own: usize) {
        let (state, _) = self.lanes.parts();
        let (clock, has_limit) = (state.clock.clone(), state.limit.is_some());
        let Some(clock) = clock.filter(|clock| !clock.is_running()) else {
            return;
        };
        // A program that releases memory and allocates it again is no nearer to the end. A miss that entered every lane
        // is: it found no memory at once, or there is a limit.
        if !self.lanes.has_all() && !self.lanes.lane(own).has_new_peak() {
            return;
        }
        // A device that fails this query has reported the error to a request, or will.
        let is_short = |info: MemoryInfo| info.free.get() < info.total.get() / LEFT_OF_DEVICE;
        if has_limit || self.lanes.lane(own).memory_info().is_ok_and(is_short) {
            clock.start();
        }
    }

    /// Serves a request by the first of these attempts that succeeds.
    fn attempt(&mut self, own: usize, request: &Request) -> Result<Miss, AllocError> {
        self.apply_configured_fraction(own)?;
        // A limit applies to the memory of all lanes together.
        if self.counts_all_lanes(own) {
            self.lanes.enter_all()?;
            self.share_limit();
        }
        // If the user set a threshold, release memory that was idle for long before more is reserved.
        self.lanes.lane(own).release(Release::Garbage)?;
        // The user may want requests above a fraction of the device's memory to fail before any attempt to allocate.
        if self.is_rejected(own, request)? {
            return Ok(Miss::Rejected);
        }
        // New memory, within the limit.
        if let Some(address) = self.lanes.lane(own).grow(request)? {
            return Ok(Miss::Served(address));
        }
        self.lanes.enter_all()?;
        self.sync_peaks();
        // Free memory of private pools whose owners allow that.
        if let Some(address) = self.take_from_open_pools(own, request) {
            return Ok(Miss::Served(address));
        }
        // New memory, after just enough cached memory is released for the driver to have it.
        if let Some(address) = self.grow_after(Release::For(request), own, request)? {
            return Ok(Miss::Served(address));
        }
        // In a capture nothing may wait for events, so no more memory can be released.
        if self.lane().is_capturing() {
            return Ok(Miss::Unserved);
        }
        // The same after a wait, which also frees pending blocks.
        self.reclaim_pending()?;
        if let Some(address) = self.grow_after(Release::ForAfterWait(request), own, request)? {
            return Ok(Miss::Served(address));
        }
        // Release all cached memory, then try the last times.
        self.release_cached(Some(request))?;
        self.share_limit();
        if let Some(address) = self.try_again(own, request)? {
            return Ok(Miss::Served(address));
        }
        // Private pools may also have more free memory now. PyTorch does not always look again.
        self.sync_peaks();
        if self.lanes.lane(own).config.options().last_try() != LastTry::NewOnly
            && let Some(address) = self.take_from_open_pools(own, request)
        {
            return Ok(Miss::Served(address));
        }
        Ok(Miss::Unserved)
    }

    /// Returns whether the memory of all lanes decides if one lane may reserve more.
    fn counts_all_lanes(&mut self, own: usize) -> bool {
        let options = self.lanes.lane(own).config.options();
        options.rejects_above().is_some() || self.lanes.parts().0.limit.is_some()
    }

    /// Returns whether a request for new memory fails without an attempt to allocate. A request that exceeds the limit
    /// does not fail here: it releases cached memory first.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device does not report its memory size.
    fn is_rejected(&mut self, own: usize, request: &Request) -> Result<bool, DriverError> {
        let lane = self.lanes.lane(own);
        let size = lane.segment_size(request);
        debug_assert!(size >= request.size, "a segment has room for the block");
        let rejects_above = lane.config.options().rejects_above();
        let Some(fraction) = rejects_above.filter(|_| !lane.heap.exceeds_limit(size)) else {
            return Ok(false);
        };
        let most = lane.memory_info()?.total.scale(fraction);
        Ok(self.limited().saturating_add(size) > most)
    }

    fn grow_after(
        &mut self,
        wanted: Release<'_>,
        own: usize,
        request: &Request,
    ) -> Result<Option<DeviceAddress>, DriverError> {
        if !self.lanes.lane(own).release(wanted)? {
            return Ok(None);
        }
        self.share_limit();
        self.lanes.lane(own).grow(request)
    }

    /// Returns a free block or new memory, in the order of [`Config::last_try`](crate::Config::last_try), after
    /// everything that can be released was released.
    fn try_again(
        &mut self,
        own: usize,
        request: &Request,
    ) -> Result<Option<DeviceAddress>, DriverError> {
        let lane = self.lanes.lane(own);
        lane.heap.stats.num_alloc_retries += 1;
        match lane.config.options().last_try() {
            LastTry::FreeFirst => match lane.take(request) {
                Some(address) => Ok(Some(address)),
                None => lane.grow(request),
            },
            LastTry::NewFirst => Ok(lane.grow(request)?.or_else(|| lane.take(request))),
            LastTry::NewOnly => lane.grow(request),
        }
    }

    /// Takes a free block of a private pool with `use_on_oom` for a request to the default pool. Private pools are in
    /// the first lane. Their own requests are not served here, because they have tried their pool already.
    fn take_from_open_pools(&mut self, own: usize, request: &Request) -> Option<DeviceAddress> {
        let stream = self.lanes.lane(own).stream_of_default_pool(request)?;
        let found = self.lane_mut().take_from_open_pools(request, stream)?;
        self.sync_peaks();
        Some(found)
    }

    /// Returns the error for a request of lane `own` that no attempt served, and counts it.
    ///
    /// # Errors
    ///
    /// The driver's error for the query of free and total memory.
    fn out_of_memory(
        &mut self,
        own: usize,
        request: &Request,
        is_rejected: bool,
    ) -> Result<AllocError, DriverError> {
        let reserved_in_private = self.lane().reserved_in_private_pools();
        let active_in_private = self.lane().active_in_private_pools();
        let stats = self.stats();
        let holders = self.holders();
        // Private pools are all in the first lane.
        let paused = self.lane().heap.domains.paused_regions();
        let limit = self.limit();
        debug_assert!(active_in_private <= reserved_in_private);
        let lane = self.lanes.lane(own);
        let info = lane.memory_info()?;
        let heap = &lane.heap;
        let domain = heap.domains.domain(request.domain);
        let out_of_memory = OutOfMemory {
            device: lane.device,
            requested: request.requested,
            stream: domain.stream,
            pool: heap.domains.pool(domain.pool).id,
            segment_size: lane.segment_size(request),
            largest_free: lane.strategy.largest_free(heap, request.domain),
            allocated: stats.allocated(),
            reserved: stats.reserved(),
            limit,
            free_in_private_pools: reserved_in_private.saturating_sub(active_in_private),
            device_free: info.free,
            device_total: info.total,
            paused: paused.into_iter().collect(),
            details: lane.strategy.describe(heap, request),
            holders,
            is_rejected,
            expandable_segments: lane.config.options().expandable_segments(),
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

    /// Returns the number of allocated blocks by size, stream and region, the holders of the most memory first.
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
