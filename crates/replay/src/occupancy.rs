//! Which recorded segments hold no block.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId};
use lowtide_trace::Trace;

use crate::pools::EventPools;

/// The recorded segments of the default pool, and how many blocks each holds. Of an expandable segment nothing is
/// known.
#[derive(Debug)]
pub(crate) struct Occupancy {
    segments: BTreeMap<DeviceAddress, Segment>,
    /// How many of them hold no block any more.
    vacant: usize,
}

#[derive(Debug)]
struct Segment {
    end: DeviceAddress,
    /// `None` before its first, for which it came.
    blocks: Option<usize>,
}

impl Occupancy {
    /// Returns what there is before the first event, each segment in its pool.
    pub(crate) fn new(trace: &Trace, pools: &EventPools<'_>) -> Occupancy {
        let mut occupancy = Occupancy {
            segments: BTreeMap::new(),
            vacant: 0,
        };
        for (index, segment) in trace.initial.segments.iter().enumerate() {
            if pools.of_initial(index).is_default() && !segment.is_expandable {
                occupancy.insert(segment.address, segment.size, Some(0));
                occupancy.vacant += 1;
            }
        }
        for block in &trace.initial.blocks {
            occupancy.occupy(block.address);
        }
        occupancy
    }

    /// Returns how many segments hold no block any more.
    pub(crate) fn vacant(&self) -> usize {
        self.vacant
    }

    /// Takes an event of a pool into account. O(log n) for n segments.
    pub(crate) fn apply(&mut self, event: Event, pool: MempoolId) {
        let start = event.address;
        match event.action {
            Action::SegmentAlloc if pool.is_default() => self.insert(start, event.size, None),
            Action::SegmentFree => self.remove(start),
            Action::Alloc => self.occupy(start),
            Action::FreeCompleted => self.vacate(start),
            _ => {}
        }
    }

    fn insert(&mut self, start: DeviceAddress, size: Bytes, blocks: Option<usize>) {
        let end = start + size;
        self.segments.insert(start, Segment { end, blocks });
    }

    fn remove(&mut self, start: DeviceAddress) {
        let removed = self.segments.remove(&start);
        let was_vacant = removed.is_some_and(|segment| segment.blocks == Some(0));
        self.vacant -= usize::from(was_vacant);
    }

    fn occupy(&mut self, address: DeviceAddress) {
        if let Some(segment) = self.segment_of(address) {
            let was_vacant = segment.blocks == Some(0);
            segment.blocks = Some(segment.blocks.unwrap_or_default() + 1);
            self.vacant -= usize::from(was_vacant);
        }
    }

    fn vacate(&mut self, address: DeviceAddress) {
        if let Some(segment) = self.segment_of(address)
            && let Some(blocks) = segment.blocks.filter(|&blocks| blocks > 0)
        {
            segment.blocks = Some(blocks - 1);
            self.vacant += usize::from(blocks == 1);
        }
    }

    fn segment_of(&mut self, address: DeviceAddress) -> Option<&mut Segment> {
        let (_, segment) = self.segments.range_mut(..=address).next_back()?;
        (address < segment.end).then_some(segment)
    }
}
