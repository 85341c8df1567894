//! Limits, statistics and events: queries about memory, rather than requests for it.

use super::{Allocation, Lane};
use crate::config::Config;
use crate::domain::DomainId;
use crate::error::AllocError;
use crate::event_log::EventLog;
use crate::figures::gauge::Gauge;
use crate::physical::Memory;
use crate::recent_events::RecentPast;
use crate::snapshot::SegmentSnapshot;
use crate::stats::{PoolStats, StatsReset};
use crate::strategy::{Placement, PyTorchPlacement, Strategy};
use crate::units::{Bytes, DeviceAddress, MempoolId};

/// Changes in a lane that other threads must see.
#[derive(Clone, Copy, Debug)]
pub struct LaneNews {
    /// Whether freed blocks wait for other streams: requests in other lanes then check whether those streams are
    /// done.
    pub has_waiting_blocks: bool,
    /// Whether a peak rose since the device's peaks were updated, so that
    /// [`Device::sync_peaks`](crate::Device::sync_peaks) is due.
    pub has_new_peak: bool,
    /// Whether someone observes events, so that [`Lane::notify_and_clear_peak`] is due.
    pub is_observed: bool,
    /// Whether private pools serve some streams: their requests then go to the first lane.
    pub has_routes: bool,
}

impl<M: Memory> Lane<M> {
    /// Returns the reserved bytes of each private pool.
    pub(crate) fn reserved_by_private_pools(&self) -> Vec<(MempoolId, PoolStats)> {
        let pools = self.heap.domains.pools().map(|(_, pool)| pool);
        let private = pools.filter(|pool| !pool.id.is_default());
        let reserved = private.map(|pool| (pool.id, pool.reserved_bytes.stats()));
        reserved.collect()
    }

    /// Resets peaks or accumulated statistics.
    pub(crate) fn reset_stats(&mut self, reset: StatsReset) {
        let pools = self.heap.domains.pools_mut();
        let reserved = pools.map(|pool| &mut pool.reserved_bytes);
        match reset {
            StatsReset::Peaks => {
                reserved.for_each(Gauge::reset_peak);
                self.heap.stats.reset_peaks();
            }
            StatsReset::Accumulated => {
                reserved.for_each(Gauge::reset_accumulated);
                self.heap.stats.reset_accumulated();
            }
        }
    }

    /// Returns what other threads must see when a thread leaves the lane.
    #[inline]
    pub fn news(&self) -> LaneNews {
        LaneNews {
            has_waiting_blocks: self.heap.stats.waiting_blocks() > 0,
            has_new_peak: self.has_new_peak(),
            is_observed: self.is_observed(),
            has_routes: !self.routes.is_empty(),
        }
    }

    /// Notifies the observer, if any, of new events. If this is the only lane in use, a new peak needs no sync, because
    /// it already is the device's peak.
    pub fn notify_and_clear_peak(&mut self, is_only_lane: bool) {
        self.notify_observers();
        if is_only_lane {
            self.heap.stats.take_has_new_peak();
        }
    }

    /// Returns whether a peak rose since the device's peaks were updated.
    #[inline]
    pub(crate) fn has_new_peak(&self) -> bool {
        self.heap.stats.has_new_peak()
    }

    /// Returns the log of the lane's events.
    pub fn event_log(&mut self) -> &mut EventLog {
        &mut self.heap.log
    }

    /// Returns the last events, if they are kept.
    pub(crate) fn recent_past(&self) -> RecentPast {
        self.heap.log.recent.past(&self.heap.domains)
    }

    /// Returns whether there is an observer.
    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.heap.log.is_observed()
    }

    /// Notifies the observer, if any, of events that were not reported yet.
    pub(crate) fn notify_observers(&mut self) {
        if self.is_observed() {
            self.heap.log.notify();
            self.heap.log.take();
        }
    }

    /// Watches the allocated blocks at these addresses, or stops watching them if `is_watched` is false. Watching also
    /// ends when the address is allocated again. Constant time for each.
    ///
    /// While any is watched, each request takes one more look-up in a hash table.
    pub fn watch(&mut self, addresses: impl Iterator<Item = DeviceAddress>, is_watched: bool) {
        for address in addresses {
            if is_watched && self.find_allocated(address).is_ok() {
                self.watched.insert(address);
            } else {
                self.watched.remove(&address);
            }
        }
    }

    /// Returns the allocated block at `address`.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotAllocated`] if no allocated block begins at `address`.
    pub fn allocation(&self, address: DeviceAddress) -> Result<Allocation, AllocError> {
        Ok(self.allocation_of(self.find_allocated(address)?))
    }

    /// Returns all segments, sorted by address. Takes O(n log n) for n blocks.
    pub fn segments(&self) -> Vec<SegmentSnapshot> {
        crate::snapshot::of_heap(&self.heap)
    }

    /// Returns the start and the number of each block, allocated or free, and of each part of an expandable segment
    /// without memory, in no order. A block that began earlier has a lower number. When a block is split, the rest
    /// keeps the number. The result is empty unless the order of free blocks is
    /// [`FreeBlockOrder::BlockAge`](crate::FreeBlockOrder::BlockAge).
    pub fn block_numbers(&self) -> impl Iterator<Item = (DeviceAddress, u64)> {
        let blocks = self.heap.blocks.iter();
        let strategy = self.strategy.as_pytorch();
        blocks.filter_map(move |(id, block)| Some((block.address, strategy?.block_number(id)?)))
    }

    /// Makes the blocks that start at `oldest` older than all others, in that order. The replay of a recording that
    /// lost its beginning uses this to set the ages of blocks that it [adopted](Lane::adopt). Nothing changes
    /// unless the order of free blocks is [`FreeBlockOrder::BlockAge`](crate::FreeBlockOrder::BlockAge). Takes O(n
    /// log n) for n blocks.
    pub fn order_blocks(&mut self, oldest: &[DeviceAddress]) {
        if let Some(strategy) = self.strategy.as_pytorch_mut() {
            strategy.order_blocks(&self.heap, oldest);
        }
    }

    /// Returns the size of the largest request, of any pool and stream, that could be served if the driver has `new`
    /// free bytes. Linear in the number of free blocks.
    pub(crate) fn largest_request(&mut self, new: Bytes) -> Bytes {
        let domains: Vec<DomainId> = self.heap.domains.iter().collect();
        let largest = domains.into_iter().map(|domain| {
            self.strategy.merge_recent(&mut self.heap, domain);
            self.strategy.largest_request(&self.heap, domain, new)
        });
        largest.max().unwrap_or(new)
    }

    /// Changes the options of `caching` while it runs. Segments and blocks stay as they are, so some may be
    /// expandable and others not. The limit stays the same.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotReconfigurable`] if the strategy is not `caching`, or if the options are another strategy's.
    pub fn reconfigure(&mut self, config: &Config) -> Result<(), AllocError> {
        let strategy = self.strategy.as_pytorch_mut();
        if !strategy.is_some_and(|strategy| strategy.reconfigure(config, &mut self.heap)) {
            return Err(AllocError::NotReconfigurable);
        }
        *self.config = config.clone();
        Ok(())
    }
}
