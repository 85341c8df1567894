//! The offset of each range of device memory in its backup: ranges follow one another by address.

use std::ops::Range;

use lowtide_core::{Bytes, DeviceAddress};
use lowtide_region::MemoryRange;

use crate::driver::host_size;

/// Ranges of device memory, and the offset of each in the backup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// Sorted by address, and so by offset. None overlap, none is empty.
    parts: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    range: MemoryRange,
    offset: usize,
}

/// A copy between the device and the backup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Copy {
    pub(super) address: DeviceAddress,
    /// The offset in the backup.
    pub(super) offset: usize,
    pub(super) size: usize,
}

/// Each range begins at a multiple of this, as the device's blocks do. A tensor over the host's copy is then
/// aligned for every type.
const ALIGNMENT: usize = 512;

impl Layout {
    /// Returns the layout of the ranges. Empty ranges are left out.
    pub(super) fn new(ranges: &[MemoryRange]) -> Layout {
        let mut end = 0_usize;
        Layout::at_offsets(ranges, |range| {
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + host_size(range.size);
            offset
        })
    }

    /// Returns a layout of some of the ranges or parts of them, with their offsets in `self`.
    ///
    /// # Panics
    ///
    /// If a range is not in the layout.
    pub(super) fn select(&self, ranges: &[MemoryRange]) -> Layout {
        Layout::at_offsets(ranges, |range| {
            let offset = self.offset_of(range);
            offset.unwrap_or_else(|| panic!("{range:?} was not saved"))
        })
    }

    /// Returns a layout of the ranges that are not empty, in the order of their addresses.
    fn at_offsets(
        ranges: &[MemoryRange],
        mut offset_of: impl FnMut(MemoryRange) -> usize,
    ) -> Layout {
        let mut ranges = ranges.to_vec();
        ranges.retain(|range| !range.size.is_zero());
        ranges.sort_unstable();
        let parts = ranges.into_iter().map(|range| Part {
            range,
            offset: offset_of(range),
        });
        Layout {
            parts: parts.collect(),
        }
    }

    /// Returns the offset of a range or of a part of one, or `None` if the layout does not contain it.
    pub(super) fn offset_of(&self, range: MemoryRange) -> Option<usize> {
        let behind = self
            .parts
            .partition_point(|part| part.range.address <= range.address);
        let part = self.parts[..behind].last()?;
        let is_inside = part.range.contains(range);
        let distance = || range.address.offset_from(part.range.address);
        is_inside.then(|| part.offset + host_size(distance()))
    }

    /// Returns the length of the backup in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.parts.last().map_or(0, Part::end)
    }

    /// Returns the start addresses of the ranges.
    pub(super) fn addresses(&self) -> impl Iterator<Item = DeviceAddress> {
        self.parts.iter().map(|part| part.range.address)
    }

    /// Returns how many ranges lie within the first `bytes` of the backup.
    pub(super) fn ranges_within(&self, bytes: usize) -> usize {
        self.parts.partition_point(|part| part.end() <= bytes)
    }

    /// Returns the next step of the backup, from `start`. It has at least `step_bytes` bytes and contains the end
    /// of at least one more range, as far as there are any. It ends at the end of a unit or of the backup.
    pub(super) fn step(&self, start: usize, step_bytes: usize, unit_bytes: usize) -> Range<usize> {
        let next = self.parts.get(self.ranges_within(start));
        let end = next.map_or(start, Part::end).max(start + step_bytes);
        start..end.next_multiple_of(unit_bytes).min(self.bytes())
    }

    /// Divides a part of the backup into units and returns one span for each unit that contains bytes of ranges:
    /// from the first to the last such byte. The part must begin with a unit.
    pub(super) fn spans(&self, within: Range<usize>, unit_bytes: usize) -> Vec<Range<usize>> {
        let mut spans: Vec<Range<usize>> = Vec::new();
        for copy in self.copies(within) {
            let mut start = copy.offset;
            let copy_end = start + copy.size;
            while start < copy_end {
                let unit_end = (start / unit_bytes + 1) * unit_bytes;
                let end = copy_end.min(unit_end);
                match spans.last_mut() {
                    Some(last) if last.start / unit_bytes == start / unit_bytes => last.end = end,
                    _ => spans.push(start..end),
                }
                start = end;
            }
        }
        spans
    }

    /// Returns the copies that a span of the backup consists of, ordered by offset.
    pub(super) fn copies(&self, span: Range<usize>) -> impl Iterator<Item = Copy> {
        let first = self.parts.partition_point(|part| part.end() <= span.start);
        let parts = self.parts[first..].iter();
        let parts = parts.take_while(move |part| part.offset < span.end);
        parts.map(move |part| {
            let start = part.offset.max(span.start);
            Copy {
                address: part.range.address + Bytes((start - part.offset) as u64),
                offset: start,
                size: part.end().min(span.end) - start,
            }
        })
    }
}

impl Part {
    fn end(&self) -> usize {
        self.offset + host_size(self.range.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, size: u64) -> MemoryRange {
        MemoryRange {
            address: DeviceAddress(start),
            size: Bytes(size),
        }
    }

    fn copy(start: u64, offset: usize, size: usize) -> Copy {
        Copy {
            address: DeviceAddress(start),
            offset,
            size,
        }
    }

    #[test]
    fn ranges_lie_by_address_and_aligned() {
        let layout = Layout::new(&[range(0x9000, 100), range(0x2000, 513), range(0x5000, 0)]);
        assert_eq!(layout.bytes(), 1124);
        assert_eq!(layout.offset_of(range(0x2000, 513)), Some(0));
        assert_eq!(layout.offset_of(range(0x9001, 99)), Some(1025));
        assert_eq!(layout.offset_of(range(0x9001, 100)), None);
        assert_eq!(layout.offset_of(range(0x1fff, 1)), None);
        assert_eq!(layout.offset_of(range(0x5000, 1)), None);
        assert_eq!(Layout::new(&[]).bytes(), 0);
    }

    #[test]
    fn a_span_holds_all_of_a_unit_and_its_copies_all_of_a_span() {
        let layout = Layout::new(&[range(0x2000, 513), range(0x9000, 4000)]);
        assert_eq!(
            layout.spans(0..5024, 2048),
            [0..2048, 2048..4096, 4096..5024]
        );
        assert_eq!(layout.spans(2048..4096, 1024), [2048..3072, 3072..4096]);
        let copies: Vec<_> = layout.copies(0..2048).collect();
        assert_eq!(copies, [copy(0x2000, 0, 513), copy(0x9000, 1024, 1024)]);
        let copies: Vec<_> = layout.copies(4096..5024).collect();
        assert_eq!(copies, [copy(0x9c00, 4096, 928)]);
    }

    #[test]
    fn each_step_has_a_range_more_and_ends_with_a_unit() {
        let layout = Layout::new(&[
            range(0x2000, 512),
            range(0x9000, 5000),
            range(0x20000, 2000),
        ]);
        assert_eq!(layout.bytes(), 7632);
        assert_eq!(layout.step(0, 1024, 1024), 0..1024);
        assert_eq!(layout.ranges_within(1024), 1);
        // The second range ends at 5512.
        assert_eq!(layout.step(1024, 1024, 1024), 1024..6144);
        assert_eq!(layout.ranges_within(6144), 2);
        assert_eq!(layout.step(6144, 1024, 1024), 6144..7632);
        assert_eq!(layout.ranges_within(7632), 3);
    }

    #[test]
    fn what_is_selected_keeps_its_place() {
        let layout = Layout::new(&[range(0x2000, 512), range(0x9000, 4096)]);
        let selected = layout.select(&[range(0x9100, 256)]);
        assert_eq!(selected.spans(0..1 << 20, 1 << 20), vec![768..1024]);
        let copies: Vec<_> = selected.copies(0..1 << 20).collect();
        assert_eq!(copies, [copy(0x9100, 768, 256)]);
    }

    #[test]
    #[should_panic(expected = "was not saved")]
    fn what_was_not_saved_cannot_be_selected() {
        Layout::new(&[range(0x2000, 512)]).select(&[range(0x2001, 512)]);
    }
}
