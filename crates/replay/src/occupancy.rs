//! The recorded segments that hold no block.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId};
use lowtide_trace::Trace;

use crate::pages::Pages;
use crate::pools::EventPools;

/// The recorded segments of the default pool and the number of blocks in each; for expandable segments, their
/// pages.
#[derive(Debug)]
pub(crate) struct Occupancy {
    segments: BTreeMap<DeviceAddress, OccupiedSegment>,
    /// The number of segments that no longer hold a block.
    vacant: usize,
    pages: Pages,
}

#[derive(Debug)]
struct OccupiedSegment {
    end: DeviceAddress,
    /// `None` until the segment's first block, for which it was allocated.
    blocks: Option<usize>,
}

impl Occupancy {
    /// Returns the state before the first event, with each segment in its pool.
    pub(crate) fn new(trace: &Trace, pools: &EventPools<'_>) -> Occupancy {
        let mut occupancy = Occupancy {
            segments: BTreeMap::new(),
            vacant: 0,
            pages: Pages::new(trace, pools),
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

    /// Returns the number of segments that no longer hold a block.
    pub(crate) fn vacant(&self) -> usize {
        self.vacant
    }

    /// Returns whether a page of an expandable segment holds no block.
    pub(crate) fn has_vacant_page(&self) -> bool {
        self.pages.vacant() > 0
    }

    /// Applies an event of a pool. O(log n) for n segments.
    pub(crate) fn apply(&mut self, event: Event, pool: MempoolId) {
        let start = event.address;
        self.pages.apply(event, pool.is_default());
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
        self.segments.insert(start, OccupiedSegment { end, blocks });
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

    fn segment_of(&mut self, address: DeviceAddress) -> Option<&mut OccupiedSegment> {
        let (_, segment) = self.segments.range_mut(..=address).next_back()?;
        (address < segment.end).then_some(segment)
    }
}

#[cfg(test)]
mod tests {
    use lowtide_core::{BlockStatus, Stream};
    use lowtide_trace::{InitialBlock, InitialSegment, StackId};

    use super::*;

    const PRIVATE: MempoolId = MempoolId(0, 1);

    /// Applies events of a pool at these MiB, and returns the number of vacant segments after each.
    fn vacant_after(
        occupancy: &mut Occupancy,
        pool: MempoolId,
        events: &[(Action, u64)],
    ) -> Vec<usize> {
        let events = events.iter().map(|&(action, mib)| Event {
            action,
            pool,
            address: DeviceAddress(mib << 20),
            size: Bytes::mib(20),
            stream: Stream::DEFAULT,
        });
        events
            .map(|event| {
                occupancy.apply(event, pool);
                occupancy.vacant()
            })
            .collect()
    }

    /// Returns the state before the first event, with segments of 20 MiB and blocks at these MiB.
    fn occupancy(segments: &[(u64, MempoolId, bool)], blocks: &[(u64, BlockStatus)]) -> Occupancy {
        let mut trace = Trace::default();
        let segments = segments
            .iter()
            .map(|&(mib, pool, is_expandable)| InitialSegment {
                address: DeviceAddress(mib << 20),
                size: Bytes::mib(20),
                stream: Stream::DEFAULT,
                pool: Some(pool),
                is_large: true,
                is_expandable,
            });
        trace.initial.segments = segments.collect();
        let blocks = blocks.iter().map(|&(mib, status)| InitialBlock {
            address: DeviceAddress(mib << 20),
            size: Bytes::mib(2),
            requested: Bytes::mib(2),
            stream: Stream::DEFAULT,
            pool: None,
            status,
            stack: StackId::NONE,
        });
        trace.initial.blocks = blocks.collect();
        Occupancy::new(&trace, &EventPools::new(&trace))
    }

    #[test]
    fn a_segment_is_vacant_once_its_last_block_is_free() {
        let events = [
            // The segment was allocated for a request that has yet to be served.
            (Action::SegmentAlloc, 100),
            (Action::Alloc, 100),
            (Action::Alloc, 105),
            (Action::FreeRequested, 100),
            (Action::FreeCompleted, 100),
            (Action::FreeCompleted, 105),
            (Action::Alloc, 119),
            (Action::FreeCompleted, 119),
            (Action::SegmentFree, 100),
            // The segment is gone.
            (Action::Alloc, 105),
            (Action::FreeCompleted, 105),
        ];
        let vacant = vacant_after(&mut occupancy(&[], &[]), MempoolId::DEFAULT, &events);
        assert_eq!(vacant, [0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn segments_are_counted_each_for_itself() {
        let both = [
            (100, MempoolId::DEFAULT, false),
            (120, MempoolId::DEFAULT, false),
        ];
        let mut occupancy = occupancy(&both, &[]);
        assert_eq!(occupancy.vacant(), 2);
        let events = [
            // The first byte of the second segment.
            (Action::Alloc, 120),
            (Action::SegmentFree, 100),
            // Right before the second segment, and right behind it.
            (Action::Alloc, 119),
            (Action::Alloc, 140),
            (Action::FreeCompleted, 120),
        ];
        let vacant = vacant_after(&mut occupancy, MempoolId::DEFAULT, &events);
        assert_eq!(vacant, [1, 0, 0, 0, 1]);
    }

    #[test]
    fn a_segment_that_goes_with_blocks_was_not_vacant() {
        let mut occupancy = occupancy(&[(100, MempoolId::DEFAULT, false)], &[]);
        let events = [(Action::Alloc, 100), (Action::SegmentFree, 100)];
        let vacant = vacant_after(&mut occupancy, MempoolId::DEFAULT, &events);
        assert_eq!(vacant, [0, 0]);
    }

    #[test]
    fn blocks_of_before_the_first_event_count() {
        let segments = [100, 200, 300].map(|mib| (mib, MempoolId::DEFAULT, false));
        let blocks = [
            (110, BlockStatus::Allocated),
            (319, BlockStatus::PendingFree),
        ];
        let mut occupancy = occupancy(&segments, &blocks);
        assert_eq!(occupancy.vacant(), 1);
        let events = [(Action::FreeCompleted, 319), (Action::FreeCompleted, 110)];
        let vacant = vacant_after(&mut occupancy, MempoolId::DEFAULT, &events);
        assert_eq!(vacant, [2, 3]);
    }

    /// `empty_cache` releases segments of the default pool; of expandable segments, it releases pages.
    #[test]
    fn private_and_expandable_segments_are_not_counted() {
        let segments = [(100, PRIVATE, false), (200, MempoolId::DEFAULT, true)];
        let mut occupancy = occupancy(&segments, &[]);
        assert_eq!(occupancy.vacant(), 0);
        let events = [
            (Action::SegmentAlloc, 300),
            (Action::Alloc, 300),
            (Action::FreeCompleted, 300),
            (Action::Alloc, 100),
            (Action::FreeCompleted, 100),
            (Action::SegmentFree, 100),
        ];
        assert_eq!(vacant_after(&mut occupancy, PRIVATE, &events), [0; 6]);
        let events = [
            (Action::SegmentMap, 220),
            (Action::Alloc, 200),
            (Action::FreeCompleted, 200),
        ];
        let vacant = vacant_after(&mut occupancy, MempoolId::DEFAULT, &events);
        assert_eq!(vacant, [0; 3]);
    }
}
