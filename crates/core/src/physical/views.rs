//! Every address at which a handle is mapped.

use std::collections::BTreeMap;

use crate::driver::Handle;
use crate::units::{Bytes, DeviceAddress};

/// Where handles are mapped, by address. Views do not overlap. Several views may show the same handle.
#[derive(Debug, Default)]
pub(crate) struct Views {
    by_address: BTreeMap<DeviceAddress, View>,
    /// The number of the newest view.
    last: u64,
}

/// A handle that is mapped whole at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct View {
    /// The size of the handle.
    pub size: Bytes,
    /// The handle that the view shows.
    pub handle: Handle,
    /// Whether the device may read and write it.
    pub has_access: bool,
    /// A number that no other view of the device ever had. Later views have higher numbers.
    pub(crate) number: u64,
}

/// Handles of a device that are mapped at consecutive addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappedRange {
    /// The address of the first handle.
    pub address: DeviceAddress,
    /// The total size of the handles.
    pub size: Bytes,
    /// The number of the newest view among them. It tells the range from any that is mapped at the same addresses
    /// later.
    pub newest: u64,
}

impl Views {
    pub(crate) fn insert(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        handle: Handle,
        has_access: bool,
    ) {
        self.last += 1;
        let view = View {
            size,
            handle,
            has_access,
            number: self.last,
        };
        debug_assert!(self.overlapping(address, size).next().is_none());
        self.by_address.insert(address, view);
    }

    /// Notes that the device may read and write the views that begin in a range.
    pub(crate) fn allow_access(&mut self, address: DeviceAddress, size: Bytes) {
        for (_, view) in self.by_address.range_mut(address..address + size) {
            view.has_access = true;
        }
    }

    /// Removes the views of a range, which cuts none, and returns their handles by rising addresses.
    pub(crate) fn remove(&mut self, address: DeviceAddress, size: Bytes) -> Vec<Handle> {
        debug_assert!(self.covers_whole(address, size), "views are unmapped whole");
        let starts: Vec<DeviceAddress> =
            self.within(address, size).map(|(start, _)| start).collect();
        let removed = starts
            .iter()
            .filter_map(|start| self.by_address.remove(start));
        removed.map(|view| view.handle).collect()
    }

    /// Returns the view that begins at an address.
    pub(crate) fn at(&self, address: DeviceAddress) -> Option<&View> {
        self.by_address.get(&address)
    }

    /// Returns all views by rising addresses.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (DeviceAddress, &View)> {
        self.by_address
            .iter()
            .map(|(&address, view)| (address, view))
    }

    /// Returns the views that begin in a range, by rising addresses.
    pub(crate) fn within(
        &self,
        address: DeviceAddress,
        size: Bytes,
    ) -> impl Iterator<Item = (DeviceAddress, &View)> {
        let within = self.by_address.range(address..address + size);
        within.map(|(&start, view)| (start, view))
    }

    /// Returns whether each byte of a range is in a view. Linear in the views of the range.
    pub(crate) fn covers(&self, address: DeviceAddress, size: Bytes) -> bool {
        let mut end = address;
        for (start, view) in self.overlapping(address, size) {
            if start > end {
                return false;
            }
            end = start + view.size;
        }
        end >= address + size
    }

    /// Returns the range of handles that contains a block, or `None` if part of the block is not mapped. Linear in the
    /// views of the range.
    pub(crate) fn around(&self, address: DeviceAddress, size: Bytes) -> Option<MappedRange> {
        let end = address.get().checked_add(size.get())?;
        let (&start, _) = self.by_address.range(..=address).next_back()?;
        let mut range = MappedRange {
            address: start,
            size: Bytes::ZERO,
            newest: 0,
        };
        for (&next, view) in self.by_address.range(start..) {
            if next != range.address + range.size {
                break;
            }
            range.size += view.size;
            range.newest = range.newest.max(view.number);
            if (range.address + range.size).get() >= end {
                return Some(range);
            }
        }
        None
    }

    /// Returns the handles of a range from `offset` on, with their sizes. Returns `None` if the range is not mapped as
    /// it was, or if `offset` is at its end or beyond.
    pub(crate) fn handles(
        &self,
        range: &MappedRange,
        offset: Bytes,
    ) -> Option<impl Iterator<Item = (Handle, Bytes)>> {
        let is_current = self.around(range.address, range.size)? == *range;
        if !is_current || offset >= range.size {
            return None;
        }
        let views = self.within(range.address + offset, range.size - offset);
        Some(views.map(|(_, view)| (view.handle, view.size)))
    }

    /// Returns the views that have a byte in a range, by rising addresses.
    fn overlapping(
        &self,
        address: DeviceAddress,
        size: Bytes,
    ) -> impl Iterator<Item = (DeviceAddress, &View)> {
        let before = self.by_address.range(..address).next_back();
        let before = before.filter(|(start, view)| **start + view.size > address);
        let before = before.map(|(&start, view)| (start, view));
        before.into_iter().chain(self.within(address, size))
    }

    /// Returns whether no view crosses an end of a range.
    fn covers_whole(&self, address: DeviceAddress, size: Bytes) -> bool {
        let end = address + size;
        { self.overlapping(address, size) }
            .all(|(start, view)| start >= address && start + view.size <= end)
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
    fn views() -> Views {
        let mut views = Views::default();
        for (offset, handle) in [(0, 1), (10, 2), (30, 3), (40, 4)] {
            views.insert(at(offset), Bytes(10), Handle(handle), true);
        }
        views
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
        let views = views();
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
            let found = views.around(at(offset), Bytes(size));
            assert_eq!(found, expected, "{offset} {size}");
        }
        let below = DeviceAddress(START.get() - 1);
        assert_eq!(views.around(below, Bytes(1)), None);
    }

    #[test]
    fn a_range_is_covered_if_each_byte_is_in_a_view() {
        let views = views();
        for (offset, size, expected) in [
            (0, 20, true),
            (5, 15, true),
            (5, 16, false),
            (20, 1, false),
            (25, 10, false),
            (30, 20, true),
            (49, 1, true),
            (49, 2, false),
        ] {
            assert_eq!(
                views.covers(at(offset), Bytes(size)),
                expected,
                "{offset} {size}"
            );
        }
    }

    #[test]
    fn a_range_is_another_once_something_else_is_mapped_there() {
        let mut views = views();
        let known = views.around(START, Bytes(20)).unwrap();
        let handles = |views: &Views, offset| {
            let handles = views.handles(&known, Bytes(offset))?;
            Some(handles.collect::<Vec<_>>())
        };
        let both = vec![(Handle(1), Bytes(10)), (Handle(2), Bytes(10))];
        assert_eq!(handles(&views, 0).as_ref(), Some(&both));
        assert_eq!(handles(&views, 10), Some(both[1..].to_vec()));
        assert_eq!(handles(&views, 20), None);
        // The first of the two is replaced, so the last one keeps its number.
        assert_eq!(views.remove(START, Bytes(10)), [Handle(1)]);
        assert_eq!(handles(&views, 0), None);
        views.insert(START, Bytes(10), Handle(1), true);
        assert_eq!(handles(&views, 0), None);
        assert_eq!(views.around(START, Bytes(20)), range(0, 20, 5));
    }
}
