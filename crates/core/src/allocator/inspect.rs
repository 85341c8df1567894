//! Limits, figures, events: what is asked about, rather than for, memory.

use std::sync::Arc;

use super::{Allocation, DeviceAllocator};
use crate::config::Config;
use crate::driver::Driver;
use crate::error::AllocError;
use crate::event::Event;
use crate::event_log::Observer;
use crate::figures::gauge::Gauge;
use crate::number_table::SearchHint;
use crate::recent_events::{EventClock, RecentPast};
use crate::snapshot::SegmentSnapshot;
use crate::stats::Stats;
use crate::strategy::{Placement, Strategy};
use crate::units::{Bytes, DeviceAddress, MempoolId};

/// Returns the limit that a part of a device's memory is, in bytes; `None` for all of it.
///
/// # Errors
///
/// [`AllocError::NotAFraction`] for what is not from 0 to 1, such as NaN.
pub fn limit_of_fraction(fraction: f64, total: Bytes) -> Result<Option<Bytes>, AllocError> {
    if !(0.0..=1.0).contains(&fraction) {
        return Err(AllocError::NotAFraction);
    }
    Ok((fraction < 1.0).then(|| total.scale(fraction)))
}

impl<D: Driver> DeviceAllocator<D> {
    /// Sets or removes the most bytes that may be held from the driver. What is held above it stays.
    pub fn set_limit(&mut self, limit: Option<Bytes>) {
        self.fraction = None;
        self.heap.limit = limit;
    }

    /// Returns the most bytes that may be held from the driver, where there is a limit.
    pub fn limit(&self) -> Option<Bytes> {
        self.heap.limit
    }

    /// Returns the part of the device's memory that may be held from the driver: 1.0 where there is no
    /// limit.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the device does not say how much memory it has.
    pub fn memory_fraction(&mut self) -> Result<f64, AllocError> {
        let Some(limit) = self.heap.limit else {
            // What is configured becomes a limit at the first request for new memory.
            return Ok(self.fraction.unwrap_or(1.0));
        };
        let total = self.physical.driver.memory_info()?.total;
        #[expect(clippy::cast_precision_loss, reason = "a fraction is not exact")]
        let fraction = limit.get() as f64 / total.get() as f64;
        Ok(fraction)
    }

    /// Limits what may be held from the driver to a part of the device's memory, from 0 to 1. As in PyTorch
    /// 2.10 and newer, 1 removes the limit.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotAFraction`] for what is not from 0 to 1, which changes nothing;
    /// [`AllocError::Driver`] when the device does not say how much memory it has.
    pub fn set_memory_fraction(&mut self, fraction: f64) -> Result<(), AllocError> {
        let total = self.physical.driver.memory_info()?.total;
        self.set_limit(limit_of_fraction(fraction, total)?);
        Ok(())
    }

    /// Tells `hint` where in this process's memory the search for a block begins, now and whenever that
    /// changes, in place of any other hint.
    pub fn keep_search_hint(&mut self, hint: &'static SearchHint) {
        self.heap.blocks.keep_search_hint(hint);
    }

    /// Returns the figures.
    pub fn stats(&self) -> Stats {
        self.heap.stats.stats()
    }

    /// Returns every figure under the key that `torch.cuda.memory_stats` gives it, in the order of
    /// the keys: those of [`Stats::entries`], and the reserved bytes of each private pool.
    pub fn memory_stats(&self) -> Vec<(String, i64)> {
        self.add_pools_to(self.stats())
    }

    /// Returns figures by their keys, and the reserved bytes of each private pool.
    pub(crate) fn add_pools_to(&self, stats: Stats) -> Vec<(String, i64)> {
        let mut entries = stats.entries();
        let pools = self.heap.domains.pools().map(|(_, pool)| pool);
        for pool in pools.filter(|pool| !pool.id.is_default()) {
            let MempoolId(capture, user) = pool.id;
            let name = format!("reserved_bytes_by_private_pools.{capture}_{user}");
            pool.reserved_bytes
                .stats()
                .push_entries(&mut entries, &name);
        }
        entries.sort_unstable();
        entries
    }

    /// Sets every peak to its current value.
    pub fn reset_peak_stats(&mut self) {
        self.heap.stats.reset_peaks();
        let pools = self.heap.domains.pools_mut();
        pools
            .map(|pool| &mut pool.reserved_bytes)
            .for_each(Gauge::reset_peak);
    }

    /// Sets every sum and count to zero.
    pub fn reset_accumulated_stats(&mut self) {
        self.heap.stats.reset_accumulated();
        let pools = self.heap.domains.pools_mut();
        pools
            .map(|pool| &mut pool.reserved_bytes)
            .for_each(Gauge::reset_accumulated);
    }

    /// Returns whether any freed block waits for other streams.
    #[inline]
    pub fn has_waiting_blocks(&self) -> bool {
        self.heap.stats.waiting_blocks() > 0
    }

    /// Returns whether a peak rose since this was last asked. With several lanes, [`Lanes::sync_peaks`](crate::Lanes::sync_peaks) is
    /// then due.
    #[inline]
    pub fn has_new_peak(&self) -> bool {
        self.heap.stats.has_new_peak()
    }

    /// Says that the peaks of this allocator are the device's, as it is the only lane in use.
    pub fn keep_new_peak(&mut self) {
        self.heap.stats.take_has_new_peak();
    }

    /// Starts or stops writing events down.
    pub fn record_events(&mut self, enabled: bool) {
        self.heap.log.enabled = enabled;
    }

    /// Keeps the last events, some thousands, for [`DeviceAllocator::recent_past`], while `clock` is running.
    /// Allocators of one device have one clock, by which [`Lanes::recent_events`](crate::Lanes::recent_events) orders them.
    pub fn keep_recent_events(&mut self, clock: Arc<EventClock>) {
        self.heap.log.recent.keep(clock);
    }

    /// Returns the last events, if they are kept.
    pub fn recent_past(&self) -> RecentPast {
        self.heap.log.recent.past(&self.heap.domains)
    }

    /// Returns the events since the last call and forgets them.
    pub fn take_events(&mut self) -> std::vec::Drain<'_, Event> {
        self.heap.log.take()
    }

    /// Has `observer` told of every event from now on, or nobody: of memory that goes back to the driver or
    /// to a pool's source just before it does, with all that happened until then, and of what else there is
    /// whenever [`DeviceAllocator::notify_observers`] is called. If the driver then
    /// refuses, the observer is told of events that undo those of the call.
    pub fn observe_events(&mut self, observer: Option<Observer>) {
        self.heap.log.observe(observer);
    }

    /// Returns whether anybody is told of events.
    #[inline]
    pub fn is_observed(&self) -> bool {
        self.heap.log.is_observed()
    }

    /// Tells the observer, if there is one, what has happened that it was not told of yet.
    pub fn notify_observers(&mut self) {
        if self.is_observed() {
            self.heap.log.notify();
            self.heap.log.take();
        }
    }

    /// Notes the blocks that the program holds at some addresses, each until a block is handed out there, or
    /// (`is_watched` false) forgets that they were noted. Constant time for each; requests and frees take no longer
    /// for it.
    pub fn watch(&mut self, addresses: impl Iterator<Item = DeviceAddress>, is_watched: bool) {
        for address in addresses {
            if let Ok(id) = self.find_allocated(address) {
                self.heap.blocks.set_watched(id, is_watched);
            }
        }
    }

    /// Returns whether the block that the program holds at `address` was noted. Constant time.
    pub fn is_watched(&self, address: DeviceAddress) -> bool {
        let found = self.find_allocated(address);
        found.is_ok_and(|id| self.heap.blocks.is_watched(id))
    }

    /// Returns whether the program holds a block at `address`. Constant time.
    #[inline]
    pub fn holds(&self, address: DeviceAddress) -> bool {
        self.find_allocated(address).is_ok()
    }

    /// Returns the block that the program holds at `address`.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotAllocated`] for an address that is not that of a held block.
    pub fn allocation(&self, address: DeviceAddress) -> Result<Allocation, AllocError> {
        Ok(self.allocation_of(self.find_allocated(address)?))
    }

    /// Returns everything held, segment by segment in the order of their addresses. Takes
    /// O(n log n) for n blocks.
    pub fn segments(&self) -> Vec<SegmentSnapshot> {
        crate::snapshot::of_heap(&self.heap)
    }

    /// Returns the start of each segment and a number that grows with every segment that was ever taken,
    /// in no order. A segment whose pages come and go keeps its number.
    pub fn segment_numbers(&self) -> impl Iterator<Item = (DeviceAddress, u64)> {
        let segments = self.heap.segments.iter();
        segments.map(|(_, segment)| (segment.address, segment.serial))
    }

    /// Returns the start of each block, in use or free, and of each part of an expandable segment that has no memory,
    /// and a number that is lower for those that began earlier, in no order. Of a block that is cut, the rest keeps the
    /// number. There are none unless the order of free blocks is
    /// [`FreeBlockOrder::BlockAge`](crate::FreeBlockOrder::BlockAge).
    pub fn block_numbers(&self) -> impl Iterator<Item = (DeviceAddress, u64)> {
        let blocks = self.heap.blocks.iter();
        blocks.filter_map(|(id, block)| Some((block.address, self.strategy.block_number(id)?)))
    }

    /// Has the blocks that start at `oldest` have begun before all others, in that order: how the replay of a recording
    /// that lost its beginning says how old what it [adopted](DeviceAllocator::adopt) is. Nothing changes unless the
    /// order of free blocks is [`FreeBlockOrder::BlockAge`](crate::FreeBlockOrder::BlockAge). Takes O(n log n) for n
    /// blocks.
    pub fn order_blocks(&mut self, oldest: &[DeviceAddress]) {
        self.strategy.order_blocks(&self.heap, oldest);
    }

    /// Returns the largest block that is free in any pool and stream, in bytes. Linear in their number.
    pub fn largest_free(&self) -> Bytes {
        let domains = self.heap.domains.iter();
        let largest = domains.map(|domain| self.strategy.largest_free(&self.heap, domain));
        largest.max().unwrap_or_default()
    }

    /// Takes over other options of `caching` while it runs. Segments and blocks stay as they are, so that
    /// some may be expandable and others not, and the limit stays what it is.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotReconfigurable`] from another strategy, or for another's options.
    pub fn reconfigure(&mut self, config: &Config) -> Result<(), AllocError> {
        if !self.strategy.reconfigure(config, &mut self.heap) {
            return Err(AllocError::NotReconfigurable);
        }
        *self.config = config.clone();
        Ok(())
    }

    /// Returns the driver.
    pub fn driver(&self) -> &D {
        &self.physical.driver
    }

    /// Returns the driver, to be changed.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.physical.driver
    }
}
