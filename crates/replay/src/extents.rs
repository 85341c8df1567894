//! The address ranges that the recorded driver allocated or mapped.

use std::collections::BTreeMap;

use lowtide_core::{Action, DeviceAddress, Event};
use lowtide_trace::Trace;

/// The recorded segments, and the mapped parts of expandable ones, each from start to end.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    segments: BTreeMap<DeviceAddress, DeviceAddress>,
    /// No two of them are adjacent: adjacent ranges are merged.
    mapped: BTreeMap<DeviceAddress, DeviceAddress>,
}

impl Extents {
    /// Returns the ranges before the first event.
    pub(crate) fn new(trace: &Trace) -> Extents {
        let mut extents = Extents::default();
        for segment in &trace.initial.segments {
            let (start, end) = (segment.address, segment.address + segment.size);
            if segment.is_expandable {
                extents.map(start, end);
            } else {
                extents.segments.insert(start, end);
            }
        }
        extents
    }

    /// Applies an event by which memory is allocated, freed, mapped or unmapped.
    pub(crate) fn apply(&mut self, event: Event) {
        let (start, end) = (event.address, event.address + event.size);
        match event.action {
            Action::SegmentAlloc => drop(self.segments.insert(start, end)),
            Action::SegmentFree => drop(self.segments.remove(&start)),
            Action::SegmentMap => self.map(start, end),
            Action::SegmentUnmap => self.unmap(start, end),
            _ => {}
        }
    }

    /// Returns the start and end of the range that contains an address.
    pub(crate) fn around(&self, address: DeviceAddress) -> Option<(DeviceAddress, DeviceAddress)> {
        let before = [&self.segments, &self.mapped];
        let before = before.map(|extents| extents.range(..=address).next_back());
        let around = before
            .into_iter()
            .flatten()
            .find(|&(_, &end)| address < end);
        around.map(|(&start, &end)| (start, end))
    }

    /// Returns whether a mapped range begins at `start`: memory that was mapped page by page.
    pub(crate) fn is_mapped(&self, start: DeviceAddress) -> bool {
        self.mapped.contains_key(&start)
    }

    /// Returns whether any memory is mapped between `start` and `end`.
    pub(crate) fn is_mapped_within(&self, start: DeviceAddress, end: DeviceAddress) -> bool {
        let before = self.mapped.range(..end).next_back();
        before.is_some_and(|(_, &mapped_end)| start < mapped_end)
    }

    /// Adds a range that was mapped. It must not overlap mapped memory.
    pub(crate) fn map(&mut self, mut start: DeviceAddress, mut end: DeviceAddress) {
        let before = self.mapped.range(..start).next_back();
        if let Some((&before, _)) = before.filter(|&(_, &before_end)| before_end == start) {
            start = before;
        }
        if let Some(after_end) = self.mapped.remove(&end) {
            end = after_end;
        }
        self.mapped.insert(start, end);
    }

    /// Removes memory that was unmapped, from at most one range.
    pub(crate) fn unmap(&mut self, start: DeviceAddress, end: DeviceAddress) {
        let around = self.mapped.range(..=start).next_back();
        let Some((&first, &last)) = around.filter(|&(_, &last)| end <= last) else {
            return;
        };
        self.mapped.remove(&first);
        let rest = [(first, start), (end, last)];
        self.mapped
            .extend({ rest.into_iter() }.filter(|(from, to)| from < to));
    }
}

#[cfg(test)]
mod tests {
    use lowtide_core::{Bytes, MempoolId, Stream};

    use super::*;

    fn apply(extents: &mut Extents, action: Action, mib: u64, size_mib: u64) {
        extents.apply(Event {
            action,
            pool: MempoolId::DEFAULT,
            address: DeviceAddress(mib << 20),
            size: Bytes::mib(size_mib),
            stream: Stream::DEFAULT,
        });
    }

    fn end_of(extents: &Extents, mib: u64) -> Option<u64> {
        let start = DeviceAddress(mib << 20);
        let around = extents.around(start).filter(|&(first, _)| first == start);
        around.map(|(_, end)| end.get() >> 20)
    }

    #[test]
    fn mapped_memory_is_one_as_long_as_it_is_adjacent() {
        let mut extents = Extents::new(&Trace::default());
        for mib in [10, 14, 12] {
            apply(&mut extents, Action::SegmentMap, mib, 2);
        }
        assert_eq!(end_of(&extents, 10), Some(16));
        assert_eq!(end_of(&extents, 12), None);
        let around = |mib: u64| extents.around(DeviceAddress(mib << 20));
        let whole = (DeviceAddress(10 << 20), DeviceAddress(16 << 20));
        assert_eq!([10, 15].map(around), [Some(whole); 2]);
        assert_eq!([9, 16].map(around), [None; 2]);
        apply(&mut extents, Action::SegmentUnmap, 12, 2);
        assert_eq!(
            [10, 12, 14].map(|mib| end_of(&extents, mib)),
            [Some(12), None, Some(16)]
        );
        apply(&mut extents, Action::SegmentUnmap, 10, 2);
        apply(&mut extents, Action::SegmentUnmap, 15, 1);
        assert_eq!([10, 14].map(|mib| end_of(&extents, mib)), [None, Some(15)]);
    }

    #[test]
    fn adjacent_segments_are_several() {
        let mut extents = Extents::new(&Trace::default());
        apply(&mut extents, Action::SegmentAlloc, 10, 2);
        apply(&mut extents, Action::SegmentAlloc, 12, 2);
        assert_eq!(end_of(&extents, 10), Some(12));
        apply(&mut extents, Action::SegmentFree, 10, 2);
        assert_eq!([10, 12].map(|mib| end_of(&extents, mib)), [None, Some(14)]);
    }
}
