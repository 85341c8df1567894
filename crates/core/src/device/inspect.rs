//! Figures and pictures of a device, those of all lanes at one moment.

use super::{Device, Lanes};
use crate::event::{Action, Event};
use crate::figures::Figures;
use crate::lane::{KeptPool, Lane};
use crate::snapshot::SegmentSnapshot;
use crate::stats::Stats;
use crate::units::{Bytes, DeviceAddress, MempoolId};

/// What a device holds, and what led there.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DevicePast {
    /// What is held, by address.
    pub segments: Vec<SegmentSnapshot>,
    /// The last events, oldest first: some thousands of each lane, as far back as they are known of every lane, and
    /// none before they were kept. Those of several lanes take turns in dozens, but for what concerns
    /// the driver, which is in order. That a pool's memory left, or is back, is one event without an address.
    pub events: Vec<Event>,
    /// The pools whose memory is away.
    pub paused: Vec<MempoolId>,
    /// The private pools that keep what is free in them.
    pub kept: Vec<KeptPool>,
}

impl DevicePast {
    /// Returns this without the pools whose memory is away, as if it had never been on the device.
    #[must_use]
    pub fn on_device(mut self) -> DevicePast {
        let is_there = |pool: &MempoolId| !self.paused.contains(pool);
        self.segments.retain(|segment| is_there(&segment.pool));
        self.events
            .retain(|event| is_there(&event.pool) && !event.action.is_pause());
        self
    }
}

impl<L: Lanes> Device<L> {
    /// Returns the bytes of the blocks that the program holds: one of the figures, for less than all of them
    /// take.
    pub(super) fn allocated(&self) -> Bytes {
        self.sum(|lane| lane.heap.stats.allocated())
    }

    /// Returns the bytes held from the driver, as [`Device::allocated`] does.
    pub(super) fn reserved(&self) -> Bytes {
        self.sum(|lane| lane.heap.stats.reserved())
    }

    /// Returns the figures.
    pub fn stats(&self) -> Stats {
        let (state, lanes) = self.lanes.parts();
        let figures = lanes.map(|lane| lane.heap.stats.clone());
        let mut sum = figures.reduce(Figures::sum).expect("a device has a lane");
        if !self.has_one_lane() {
            state.peaks.write_to(&mut sum);
        }
        let stats = sum.stats();
        debug_assert!(stats.allocated() <= stats.reserved());
        stats
    }

    /// Returns every figure under the key that `torch.cuda.memory_stats` gives it, in the order of
    /// the keys: those of [`Stats::entries`], and the reserved bytes of each private pool.
    pub fn memory_stats(&self) -> Vec<(String, i64)> {
        let mut entries = self.stats().entries();
        self.lane().add_pools_to(&mut entries);
        entries.sort_unstable();
        entries
    }

    /// Sets every peak to its current value.
    pub fn reset_peak_stats(&mut self) {
        for lane in self.lanes.parts_mut().1 {
            lane.reset_peak_stats();
        }
        if self.has_one_lane() {
            return;
        }
        let (state, lanes) = self.lanes.parts_mut();
        state.peaks.reset(lanes.map(|lane| &mut lane.heap.stats));
    }

    /// Sets every sum and count to zero.
    pub fn reset_accumulated_stats(&mut self) {
        for lane in self.lanes.parts_mut().1 {
            lane.reset_accumulated_stats();
        }
    }

    /// Returns everything held, segment by segment in the order of their addresses. Takes
    /// O(n log n) for n blocks.
    pub fn segments(&self) -> Vec<SegmentSnapshot> {
        let lanes = self.lanes.parts().1;
        let mut segments: Vec<_> = lanes.flat_map(Lane::segments).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        let ends_before =
            |one: &SegmentSnapshot, next: &SegmentSnapshot| one.address + one.size <= next.address;
        debug_assert!(
            segments.is_sorted_by(ends_before),
            "segments of lanes do not overlap"
        );
        segments
    }

    /// Returns what [`Device::segments`] does, and writes a [`Action::Snapshot`] down.
    pub fn snapshot(&mut self) -> Vec<SegmentSnapshot> {
        let active = self.sum(|lane| lane.heap.stats.active());
        let segments = self.segments();
        let domain = crate::domain::DomainId::DEFAULT;
        self.lane_mut()
            .heap
            .record(Action::Snapshot, domain, DeviceAddress::NULL, active);
        segments
    }

    /// Returns the start of each segment, in the order of their addresses, and a number that grows with every segment
    /// that was ever taken; those of different lanes say nothing of each other. A segment whose pages come and go keeps
    /// its number.
    pub fn segment_numbers(&self) -> Vec<(DeviceAddress, u64)> {
        let lanes = self.lanes.parts().1;
        let segments = lanes.flat_map(|lane| lane.heap.segments.iter());
        let numbered = segments.map(|(_, segment)| (segment.address, segment.serial));
        let mut numbers: Vec<_> = numbered.collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the largest block that is free in any pool and stream, in bytes. Linear in the number of free blocks.
    pub fn largest_free(&self) -> Bytes {
        let lanes = self.lanes.parts().1;
        { lanes.map(Lane::largest_free).max() }.unwrap_or_default()
    }

    /// Returns what is held and the last events that led there.
    pub fn recent_past(&self) -> DevicePast {
        DevicePast {
            segments: self.segments(),
            events: self.recent_events(),
            // Private pools are all in the first lane.
            paused: self.lane().paused_pools(),
            kept: self.lane().kept_pools(),
        }
    }

    /// Returns the last events of all, oldest first, as far back as they are known of every lane.
    fn recent_events(&self) -> Vec<Event> {
        let lanes = self.lanes.parts().1;
        let pasts: Vec<_> = lanes.map(Lane::recent_past).collect();
        let start = { pasts.iter() }.map(|past| past.since).max();
        let start = start.unwrap_or_default();
        let events = pasts.into_iter().flat_map(|past| past.events);
        let mut events: Vec<_> = events.filter(|&(time, _)| time >= start).collect();
        // Those of one lane stay in their order, which their times do not contradict.
        events.sort_by_key(|&(time, _)| time);
        events.into_iter().map(|(_, event)| event).collect()
    }
}
