//! The mappings of a device. They are tracked here, under the driver's lock, so that they can be shared with peers
//! and other processes.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress, Handle};

/// All mappings of a device by address. They do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    by_address: BTreeMap<DeviceAddress, Mapping>,
    /// The number of the newest mapping.
    last: u64,
}

#[derive(Debug)]
struct Mapping {
    size: Bytes,
    /// `None` for another process's memory, whose handle is not kept.
    handle: Option<Handle>,
    number: u64,
}

/// Handles of a device that are mapped at consecutive addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappedRange {
    /// The address of the first handle.
    pub address: DeviceAddress,
    /// The total size of the handles.
    pub size: Bytes,
    /// The number of the newest mapping among them. Numbers only grow, so the range differs from any that is mapped
    /// at the same addresses later.
    pub newest: u64,
}

impl Mappings {
    pub(crate) fn insert(&mut self, address: DeviceAddress, size: Bytes, handle: Option<Handle>) {
        self.last += 1;
        let number = self.last;
        let mapping = Mapping {
            size,
            handle,
            number,
        };
        self.by_address.insert(address, mapping);
    }

    /// Removes the mappings of a range. The range must not cut a mapping.
    pub(crate) fn remove(&mut self, address: DeviceAddress, size: Bytes) {
        let mapped = self.by_address.range(address..address + size);
        let starts: Vec<DeviceAddress> = mapped.map(|(&start, _)| start).collect();
        for start in starts {
            self.by_address.remove(&start);
        }
    }

    /// Returns the addresses and sizes of all mappings.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (DeviceAddress, Bytes)> {
        let mappings = self.by_address.iter();
        mappings.map(|(&address, mapping)| (address, mapping.size))
    }

    /// Returns the range of handles that contains a block. Returns `None` if part of it is not mapped or belongs to
    /// another process. Takes time linear in the number of handles.
    pub(crate) fn around(&self, address: DeviceAddress, size: Bytes) -> Option<MappedRange> {
        let end = address.get().checked_add(size.get())?;
        let (&start, _) = self.by_address.range(..=address).next_back()?;
        let mut range = MappedRange {
            address: start,
            size: Bytes::ZERO,
            newest: 0,
        };
        for (&next, mapping) in self.by_address.range(start..) {
            if next != range.address + range.size || mapping.handle.is_none() {
                break;
            }
            range.size += mapping.size;
            range.newest = range.newest.max(mapping.number);
            if (range.address + range.size).get() >= end {
                return Some(range);
            }
        }
        None
    }

    /// Returns the handles of a range from `offset` on, with their sizes. Returns `None` if the range is not mapped
    /// as it was, or `offset` is at its end or beyond.
    pub(crate) fn handles(
        &self,
        range: &MappedRange,
        offset: Bytes,
    ) -> Option<impl Iterator<Item = (Handle, Bytes)>> {
        let is_current = self.around(range.address, range.size)? == *range;
        if !is_current || offset >= range.size {
            return None;
        }
        let (start, end) = (range.address + offset, range.address + range.size);
        let mappings = self.by_address.range(start..end);
        Some(mappings.filter_map(|(_, mapping)| Some((mapping.handle?, mapping.size))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: DeviceAddress = DeviceAddress(0x7000_0000);

    fn at(offset: u64) -> DeviceAddress {
        START + Bytes(offset)
    }

    /// Handles 1 to 4 of 10 bytes each, with a gap of 10 bytes after the second.
    fn mappings() -> Mappings {
        let mut mappings = Mappings::default();
        for (offset, handle) in [(0, 1), (10, 2), (30, 3), (40, 4)] {
            mappings.insert(at(offset), Bytes(10), Some(Handle(handle)));
        }
        mappings
    }

    fn range(offset: u64, size: u64, newest: u64) -> Option<MappedRange> {
        let (address, size) = (at(offset), Bytes(size));
        Some(MappedRange {
            address,
            size,
            newest,
        })
    }

    #[test]
    fn a_block_is_held_by_whole_handles() {
        let mappings = mappings();
        for (offset, size, expected) in [
            (0, 10, range(0, 10, 1)),
            (9, 1, range(0, 10, 1)),
            (9, 2, range(0, 20, 2)),
            (41, 3, range(40, 10, 4)),
            (19, 2, None),
            (20, 1, None),
            (49, 2, None),
            (0, u64::MAX, None),
        ] {
            let found = mappings.around(at(offset), Bytes(size));
            assert_eq!(found, expected, "{offset} {size}");
        }
        let below = DeviceAddress(START.get() - 1);
        assert_eq!(mappings.around(below, Bytes(1)), None);
    }

    #[test]
    fn a_range_is_another_once_something_else_is_mapped_there() {
        let mut mappings = mappings();
        let known = mappings.around(START, Bytes(20)).unwrap();
        let handles = |mappings: &Mappings, offset| {
            let handles = mappings.handles(&known, Bytes(offset))?;
            Some(handles.collect::<Vec<_>>())
        };
        let both = vec![(Handle(1), Bytes(10)), (Handle(2), Bytes(10))];
        assert_eq!(handles(&mappings, 0).as_ref(), Some(&both));
        assert_eq!(handles(&mappings, 10), Some(both[1..].to_vec()));
        assert_eq!(handles(&mappings, 20), None);
        // The first of the two is replaced, so the last one keeps its number.
        mappings.remove(START, Bytes(10));
        assert_eq!(handles(&mappings, 0), None);
        mappings.insert(START, Bytes(10), Some(Handle(1)));
        assert_eq!(handles(&mappings, 0), None);
        assert_eq!(mappings.around(START, Bytes(20)), range(0, 20, 5));
    }

    #[test]
    fn what_another_process_shared_is_not_handed_on() {
        let mut mappings = mappings();
        mappings.insert(at(20), Bytes(10), None);
        assert_eq!(mappings.around(at(20), Bytes(1)), None);
        assert_eq!(mappings.around(at(10), Bytes(20)), None);
        assert_eq!(mappings.iter().count(), 5, "but peers are given it");
    }
}
