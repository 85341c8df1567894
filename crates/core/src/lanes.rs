//! A device's lanes: what concerns all of it where several allocators serve its streams between them.
//!
//! Free memory is never shared between streams, so a device's streams can be served by several
//! allocators, its *lanes*, on one driver, each stream by the same one always. What is left in common
//! is here: the limit, what is tried when the driver has no more memory, and figures and pictures of
//! the whole. An allocator by itself is a device of one lane.
//!
//! Private pools are all in the first lane.

mod alone;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use crate::allocator::{DeviceAllocator, Request};
use crate::config::LastTry;
use crate::driver::{Driver, DriverError};
use crate::error::{AllocError, Holder, OutOfMemory};
use crate::event::{Action, Event};
use crate::figures::Figures;
use crate::peaks::Peaks;
use crate::snapshot::SegmentSnapshot;
use crate::stats::Stats;
use crate::strategy::{Release, Strategy};
use crate::units::{Bytes, DeviceAddress, TorchRelease};

/// All lanes of a device, which no other thread can use meanwhile.
pub struct Lanes<'a, D> {
    lanes: Vec<&'a mut DeviceAllocator<D>>,
    /// `None` where there is but one lane, whose own peaks are the device's.
    peaks: Option<&'a mut Peaks>,
    /// Bytes that all of them together may hold from the driver.
    limit: Option<Bytes>,
}

impl<D: fmt::Debug> fmt::Debug for Lanes<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lanes = f.debug_struct("Lanes");
        lanes
            .field("lanes", &self.lanes)
            .field("limit", &self.limit);
        lanes.finish_non_exhaustive()
    }
}

impl<'a, D: Driver> Lanes<'a, D> {
    /// Returns the lanes of a device: at least one, always in the same order. `limit` is what they may
    /// hold from the driver together.
    pub fn new(
        lanes: Vec<&'a mut DeviceAllocator<D>>,
        peaks: &'a mut Peaks,
        limit: Option<Bytes>,
    ) -> Lanes<'a, D> {
        debug_assert!(!lanes.is_empty(), "a device has a lane");
        let has_several = lanes.len() > 1;
        Lanes {
            lanes,
            peaks: has_several.then_some(peaks),
            limit,
        }
    }

    /// Returns one of them.
    pub fn lane(&mut self, index: usize) -> &mut DeviceAllocator<D> {
        self.lanes[index]
    }

    /// Returns an allocator as the only lane of its device.
    pub(crate) fn alone(lane: &'a mut DeviceAllocator<D>) -> Lanes<'a, D> {
        Lanes {
            limit: lane.limit(),
            lanes: vec![lane],
            peaks: None,
        }
    }

    /// Returns what may serve a request of lane `own` once [`DeviceAllocator::grow`] has found the driver
    /// exhausted, in order; `None` where nothing does.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the device fails otherwise.
    pub fn grow_after_release(
        &mut self,
        own: usize,
        request: &Request,
    ) -> Result<Option<DeviceAddress>, AllocError> {
        self.sync_peaks();
        // What private pools hold free, where their owners allow that.
        let stream = self.lanes[own].stream_of_default_pool(request);
        if let Some(stream) = stream
            && let Some(address) = self.lanes[0].take_from_open_pools(request, stream)
        {
            self.sync_peaks();
            return Ok(Some(address));
        }
        // Just enough cached memory goes back for the driver to have what is missing.
        let lane = &mut *self.lanes[own];
        let wanted = Release::For(request);
        if lane
            .strategy
            .release(&mut lane.heap, &mut lane.physical, wanted)?
        {
            self.share_limit();
            let lane = &mut *self.lanes[own];
            if let Some(block) = lane
                .strategy
                .grow(&mut lane.heap, &mut lane.physical, request)?
            {
                return Ok(Some(lane.hand_out(block, request.requested)));
            }
        }
        // Everything cached goes back; waiting for events is not allowed in a capture.
        if self.is_capturing() {
            return Ok(None);
        }
        self.reclaim_pending()?;
        self.release_cached(Some(request))?;
        self.share_limit();
        let lane = &mut *self.lanes[own];
        lane.heap.stats.num_alloc_retries += 1;
        if let Some(address) = lane.try_again(request)? {
            return Ok(Some(address));
        }
        // Private pools that serve others may have more free, too.
        let stream = stream.filter(|_| lane.config.last_try() != LastTry::NewOnly);
        self.sync_peaks();
        Ok(stream.and_then(|stream| self.lanes[0].take_from_open_pools(request, stream)))
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
        let reserved_in_private = self.sum(DeviceAllocator::reserved_in_private_pools);
        let active_in_private = self.sum(DeviceAllocator::active_in_private_pools);
        let (allocated, reserved) = (self.allocated(), self.reserved());
        let holders = self.holders();
        // Private pools are all in the first lane.
        let paused = self.lanes[0].heap.domains.paused_regions();
        debug_assert!(allocated <= reserved);
        debug_assert!(active_in_private <= reserved_in_private);
        let lane = &mut *self.lanes[own];
        let is_rejected = lane.is_rejected(request)?;
        let info = lane.physical.driver.memory_info()?;
        let heap = &lane.heap;
        let domain = heap.domains.domain(request.domain);
        let out_of_memory = OutOfMemory {
            device: lane.device,
            requested: request.requested,
            stream: domain.stream,
            pool: heap.domains.pool(domain.pool).id,
            segment_size: Strategy::segment_size(&lane.strategy, request),
            largest_free: lane.strategy.largest_free(heap, request.domain),
            allocated,
            reserved,
            limit: self.limit,
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

    /// As [`DeviceAllocator::empty_cache`], for all of the device.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::empty_cache`].
    pub fn empty_cache(&mut self) -> Result<(), AllocError> {
        self.reclaim_pending()?;
        Ok(self.release_cached(None)?)
    }

    /// Waits for every event that a freed block waits for; during a capture, in which that is not
    /// allowed, for none.
    pub(crate) fn reclaim_pending(&mut self) -> Result<(), DriverError> {
        if self.is_capturing() {
            return Ok(());
        }
        self.sync_peaks();
        self.lanes[0].heap.stats.num_sync_all_streams += 1;
        self.for_each(DeviceAllocator::reclaim_pending)
    }

    fn release_cached(&mut self, failing: Option<&Request>) -> Result<(), DriverError> {
        self.for_each(|lane| lane.release_cached(failing))
    }

    /// Allows each lane to hold from the driver what the others leave of the device's limit.
    pub fn share_limit(&mut self) {
        let limited = self.sum(|lane| lane.heap.limited());
        for lane in &mut self.lanes {
            debug_assert!(lane.heap.limited() <= limited);
            let others = limited - lane.heap.limited();
            lane.set_limit(self.limit.map(|limit| limit.saturating_sub(others)));
        }
    }

    /// Returns the bytes of the blocks that the program holds: one of the figures, for less than all of them
    /// take.
    pub fn allocated(&self) -> Bytes {
        self.sum(|lane| lane.heap.stats.allocated())
    }

    /// Returns the bytes held from the driver, as [`Lanes::allocated`] does.
    pub fn reserved(&self) -> Bytes {
        self.sum(|lane| lane.heap.stats.reserved())
    }

    /// Returns the figures of the device.
    pub fn stats(&mut self) -> Stats {
        self.figures().stats()
    }

    /// Returns every figure of the device as [`DeviceAllocator::memory_stats`] does.
    pub fn memory_stats(&mut self) -> Vec<(String, i64)> {
        let stats = self.stats();
        self.lanes[0].add_pools_to(stats)
    }

    /// Sets every peak to its current value.
    pub fn reset_peak_stats(&mut self) {
        for lane in &mut self.lanes {
            lane.reset_peak_stats();
        }
        if let Some(peaks) = &mut self.peaks {
            peaks.reset(&mut figures_of(&mut self.lanes));
        }
    }

    /// Sets every sum and count to zero.
    pub fn reset_accumulated_stats(&mut self) {
        for lane in &mut self.lanes {
            lane.reset_accumulated_stats();
        }
    }

    /// Returns everything held, segment by segment in the order of their addresses. Takes
    /// O(n log n) for n blocks.
    pub fn segments(&self) -> Vec<SegmentSnapshot> {
        let lanes = self.lanes.iter();
        let mut segments: Vec<_> = lanes.flat_map(|lane| lane.segments()).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        segments
    }

    /// Returns the last events of all, oldest first, as far back as they are known of every lane.
    pub fn recent_events(&self) -> Vec<Event> {
        let pasts: Vec<_> = self.lanes.iter().map(|lane| lane.recent_past()).collect();
        let start = { pasts.iter() }.map(|past| past.since).max();
        let start = start.unwrap_or_default();
        let events = pasts.into_iter().flat_map(|past| past.events);
        let mut events: Vec<_> = events.filter(|&(time, _)| time >= start).collect();
        // Those of one lane stay in their order, which their times do not contradict.
        events.sort_by_key(|&(time, _)| time);
        events.into_iter().map(|(_, event)| event).collect()
    }

    /// Returns what [`DeviceAllocator::segment_numbers`] does, in the order of the addresses. The numbers of
    /// a pool's segments say which came first; those of different lanes say nothing of each other.
    pub fn segment_numbers(&self) -> Vec<(DeviceAddress, u64)> {
        let lanes = self.lanes.iter();
        let mut numbers: Vec<_> = lanes.flat_map(|lane| lane.segment_numbers()).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the largest block that is free in any pool and stream, in bytes.
    pub fn largest_free(&self) -> Bytes {
        let lanes = self.lanes.iter();
        lanes
            .map(|lane| lane.largest_free())
            .max()
            .unwrap_or_default()
    }

    /// Returns what [`Lanes::segments`] does, and writes a [`Action::Snapshot`] down.
    pub fn snapshot(&mut self) -> Vec<SegmentSnapshot> {
        let active = self.sum(|lane| lane.heap.stats.active());
        let segments = self.segments();
        let domain = crate::domain::DomainId::DEFAULT;
        self.lanes[0]
            .heap
            .record(Action::Snapshot, domain, DeviceAddress::NULL, active);
        segments
    }

    /// Tells observers what happened, and brings the device's peaks up to date where any lane's have
    /// risen. What one lane has done must be settled before another does something.
    pub fn sync_peaks(&mut self) {
        for lane in &mut self.lanes {
            lane.notify_observers();
        }
        let mut lanes = self.lanes.iter();
        if lanes.any(|lane| lane.heap.stats.has_new_peak()) {
            self.sync_all_peaks();
        }
    }

    /// Brings the device's peaks up to date, whether any have risen or not: when another lane comes into use.
    pub fn sync_all_peaks(&mut self) {
        if let Some(peaks) = &mut self.peaks {
            peaks.sync(&mut figures_of(&mut self.lanes));
        }
    }

    fn figures(&mut self) -> Figures {
        self.sync_peaks();
        let (first, others) = self.lanes.split_first().expect("a device has a lane");
        let mut sum = first.heap.stats.clone();
        for lane in others {
            sum.add(lane.heap.stats.clone());
        }
        if let Some(peaks) = &self.peaks {
            peaks.write_to(&mut sum);
        }
        sum
    }

    fn for_each(
        &mut self,
        act: impl Fn(&mut DeviceAllocator<D>) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        for index in 0..self.lanes.len() {
            let result = act(self.lanes[index]);
            self.sync_peaks();
            result?;
        }
        Ok(())
    }

    /// Returns how many blocks of which size the program holds on the device, on which stream and in which region, those
    /// that take the most first.
    fn holders(&self) -> Vec<Holder> {
        let mut counts = BTreeMap::new();
        let lanes = self.lanes.iter();
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

    fn is_capturing(&self) -> bool {
        self.lanes[0].captures > 0
    }

    fn sum(&self, bytes: impl Fn(&DeviceAllocator<D>) -> Bytes) -> Bytes {
        self.lanes.iter().map(|lane| bytes(lane)).sum()
    }
}

fn figures_of<'b, D>(lanes: &'b mut [&mut DeviceAllocator<D>]) -> Vec<&'b mut Figures> {
    let figures = lanes.iter_mut().map(|lane| &mut lane.heap.stats);
    figures.collect()
}
