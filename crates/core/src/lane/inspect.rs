//! Limits, figures, events: what is asked about, rather than for, memory.

use std::sync::Arc;

use super::{Allocation, Lane};
use crate::config::Config;
use crate::driver::Driver;
use crate::error::AllocError;
use crate::event::Event;
use crate::event_log::Observer;
use crate::figures::gauge::Gauge;
use crate::number_table::SearchHint;
use crate::recent_events::{EventClock, RecentPast};
use crate::snapshot::SegmentSnapshot;
use crate::strategy::{Placement, Strategy};
use crate::units::{Bytes, DeviceAddress, MempoolId};

/// What has happened in a lane that others must be told of.
#[derive(Clone, Copy, Debug)]
pub struct LaneNews {
    /// Whether freed blocks wait for other streams: requests elsewhere in the device look whether they are done.
    pub has_waiting_blocks: bool,
    /// Whether a peak rose since the device's were brought up to date, so that [`Device::sync_peaks`](crate::Device::sync_peaks)
    /// is due.
    pub has_new_peak: bool,
    /// Whether someone observes events, so that [`Lane::settle`] is due.
    pub is_observed: bool,
}

impl<D: Driver> Lane<D> {
    /// Tells `hint` where in this process's memory the search for a block begins, now and whenever that
    /// changes, in place of any other hint.
    pub fn keep_search_hint(&mut self, hint: &'static SearchHint) {
        self.heap.blocks.keep_search_hint(hint);
    }

    /// Adds the reserved bytes of each private pool to figures by their keys.
    pub(crate) fn add_pools_to(&self, entries: &mut Vec<(String, i64)>) {
        let pools = self.heap.domains.pools().map(|(_, pool)| pool);
        for pool in pools.filter(|pool| !pool.id.is_default()) {
            let MempoolId(capture, user) = pool.id;
            let name = format!("reserved_bytes_by_private_pools.{capture}_{user}");
            pool.reserved_bytes.stats().push_entries(entries, &name);
        }
    }

    /// Sets every peak to its current value.
    pub(crate) fn reset_peak_stats(&mut self) {
        self.heap.stats.reset_peaks();
        let pools = self.heap.domains.pools_mut();
        pools
            .map(|pool| &mut pool.reserved_bytes)
            .for_each(Gauge::reset_peak);
    }

    /// Sets every sum and count to zero.
    pub(crate) fn reset_accumulated_stats(&mut self) {
        self.heap.stats.reset_accumulated();
        let pools = self.heap.domains.pools_mut();
        pools
            .map(|pool| &mut pool.reserved_bytes)
            .for_each(Gauge::reset_accumulated);
    }

    /// Returns what others must be told of, when whoever used the lane leaves it.
    #[inline]
    pub fn news(&self) -> LaneNews {
        LaneNews {
            has_waiting_blocks: self.heap.stats.waiting_blocks() > 0,
            has_new_peak: self.has_new_peak(),
            is_observed: self.is_observed(),
        }
    }

    /// Notifies the observer, if there is one, of what has happened since. `is_only_lane` says that no other lane is in
    /// use, so that new peaks are the device's: they are no news then.
    pub fn settle(&mut self, is_only_lane: bool) {
        self.notify_observers();
        if is_only_lane {
            self.heap.stats.take_has_new_peak();
        }
    }

    /// Returns whether a peak rose since the device's were brought up to date.
    #[inline]
    pub(crate) fn has_new_peak(&self) -> bool {
        self.heap.stats.has_new_peak()
    }

    /// Starts or stops writing events down.
    pub fn record_events(&mut self, enabled: bool) {
        self.heap.log.enabled = enabled;
    }

    /// Keeps the last events, some thousands, for [`Device::recent_past`](crate::Device::recent_past), while `clock` is running.
    /// Lanes of one device have one clock, which orders their events.
    pub fn keep_recent_events(&mut self, clock: Arc<EventClock>) {
        self.heap.log.recent.keep(clock);
    }

    /// Returns the last events, if they are kept.
    pub(crate) fn recent_past(&self) -> RecentPast {
        self.heap.log.recent.past(&self.heap.domains)
    }

    /// Returns the events since the last call and forgets them.
    pub fn take_events(&mut self) -> std::vec::Drain<'_, Event> {
        self.heap.log.take()
    }

    /// Has `observer` told of every event from now on, or nobody: of memory that goes back to the driver or
    /// to a pool's source just before it does, with all that happened until then, and of what else there is
    /// whenever [`Lane::settle`] or [`Device::sync_peaks`](crate::Device::sync_peaks) is called. If the driver then
    /// refuses, the observer is told of events that undo those of the call.
    pub fn observe_events(&mut self, observer: Option<Observer>) {
        self.heap.log.observe(observer);
    }

    /// Returns whether anybody is told of events.
    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.heap.log.is_observed()
    }

    /// Tells the observer, if there is one, what has happened that it was not told of yet.
    pub(crate) fn notify_observers(&mut self) {
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

    /// Returns the start of each block, in use or free, and of each part of an expandable segment that has no memory,
    /// and a number that is lower for those that began earlier, in no order. Of a block that is cut, the rest keeps the
    /// number. There are none unless the order of free blocks is
    /// [`FreeBlockOrder::BlockAge`](crate::FreeBlockOrder::BlockAge).
    pub fn block_numbers(&self) -> impl Iterator<Item = (DeviceAddress, u64)> {
        let blocks = self.heap.blocks.iter();
        blocks.filter_map(|(id, block)| Some((block.address, self.strategy.block_number(id)?)))
    }

    /// Has the blocks that start at `oldest` have begun before all others, in that order: how the replay of a recording
    /// that lost its beginning says how old what it [adopted](Lane::adopt) is. Nothing changes unless the
    /// order of free blocks is [`FreeBlockOrder::BlockAge`](crate::FreeBlockOrder::BlockAge). Takes O(n log n) for n
    /// blocks.
    pub fn order_blocks(&mut self, oldest: &[DeviceAddress]) {
        self.strategy.order_blocks(&self.heap, oldest);
    }

    /// Returns the largest block that is free in any pool and stream, in bytes. Linear in their number.
    pub(crate) fn largest_free(&self) -> Bytes {
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
