//! Statistics and snapshots of a device: those of all lanes at one moment.

use super::{Device, Lanes};
use crate::event::{Action, Event};
use crate::figures::Figures;
use crate::lane::{KeptPool, Lane};
use crate::snapshot::SegmentSnapshot;
use crate::stats::{Stats, StatsReset};
use crate::units::{Bytes, DeviceAddress, MempoolId};

/// The memory of a device, and the events that led to it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DevicePast {
    /// All segments, by address.
    pub segments: Vec<SegmentSnapshot>,
    /// The last events, oldest first: some thousands of each lane. They begin where the events of every lane are known,
    /// and not before recording began. Events of several lanes are interleaved in batches of some dozens, but driver
    /// events are in order. A pause or resume of a pool is one event without an address.
    pub events: Vec<Event>,
    /// The pools that are paused.
    pub paused: Vec<MempoolId>,
    /// The private pools that keep their free memory.
    pub kept: Vec<KeptPool>,
}

impl DevicePast {
    /// Returns this without the paused pools, as if they had never been on the device.
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
    /// Returns the statistics. Peaks are as of the last [`Device::sync_peaks`].
    pub fn stats(&self) -> Stats {
        let (state, lanes) = self.lanes.parts();
        let figures = lanes.map(|lane| lane.heap.stats.clone());
        let mut sum = figures.reduce(Figures::sum).expect("a device has a lane");
        if !self.has_one_lane() {
            state.peaks.write_to(&mut sum);
        }
        let stats = Stats {
            // Private pools are all in the first lane.
            reserved_bytes_by_private_pools: self.lane().reserved_by_private_pools(),
            ..sum.stats()
        };
        debug_assert!(stats.allocated() <= stats.reserved());
        stats
    }

    /// Resets peaks or accumulated statistics.
    pub fn reset_stats(&mut self, reset: StatsReset) {
        for lane in self.lanes.parts_mut().1 {
            lane.reset_stats(reset);
        }
        if reset == StatsReset::Peaks && !self.has_one_lane() {
            let (state, lanes) = self.lanes.parts_mut();
            state.peaks.reset(lanes.map(|lane| &mut lane.heap.stats));
        }
    }

    /// Returns all segments, sorted by address. Takes O(n log n) for n blocks.
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

    /// Returns all segments without the events that led to them, and records an [`Action::Snapshot`].
    pub fn snapshot(&mut self) -> DevicePast {
        let active = self.sum(|lane| lane.heap.stats.active());
        let domain = crate::domain::DomainId::DEFAULT;
        self.lane_mut()
            .heap
            .record(Action::Snapshot, domain, DeviceAddress::NULL, active);
        self.present()
    }

    /// Returns the start and the number of each segment, sorted by address. A lane's numbers grow with every new
    /// segment; numbers of different lanes cannot be compared. An expandable segment keeps its number while its
    /// pages are mapped and unmapped.
    pub fn segment_numbers(&self) -> Vec<(DeviceAddress, u64)> {
        let lanes = self.lanes.parts().1;
        let segments = lanes.flat_map(|lane| lane.heap.segments.iter());
        let numbered = segments.map(|(_, segment)| (segment.address, segment.serial));
        let mut numbers: Vec<_> = numbered.collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the size of the largest request, of any pool and stream, that could be served if the driver has `new`
    /// free bytes. With zero, of the largest free block. Linear in the number of free blocks.
    pub fn largest_request(&mut self, new: Bytes) -> Bytes {
        let lanes = self.lanes.parts_mut().1;
        let largest = lanes.map(|lane| lane.largest_request(new));
        largest.max().unwrap_or(new)
    }

    /// Returns all segments and the last events that led to them.
    pub fn recent_past(&self) -> DevicePast {
        DevicePast {
            events: self.recent_events(),
            ..self.present()
        }
    }

    /// Returns all segments without events.
    fn present(&self) -> DevicePast {
        DevicePast {
            segments: self.segments(),
            events: Vec::new(),
            // Private pools are all in the first lane.
            paused: self.lane().paused_pools(),
            kept: self.lane().kept_pools(),
        }
    }

    /// Returns the last events of all lanes, oldest first, as far back as they are known for every lane.
    fn recent_events(&self) -> Vec<Event> {
        let lanes = self.lanes.parts().1;
        let pasts: Vec<_> = lanes.map(Lane::recent_past).collect();
        let start = { pasts.iter() }.map(|past| past.since).max();
        let start = start.unwrap_or_default();
        let events = pasts.into_iter().flat_map(|past| past.events);
        let mut events: Vec<_> = events.filter(|&(time, _)| time >= start).collect();
        // The sort is stable, so the events of one lane keep their order.
        events.sort_by_key(|&(time, _)| time);
        events.into_iter().map(|(_, event)| event).collect()
    }
}
