//! Where memory and reserved ranges lie: first fit, or whatever a replay was recorded with.

use std::collections::BTreeMap;
use std::ops::Range;

use lowtide_core::{Bytes, DeviceAddress, DriverError};

use crate::memory::{PAGE, footprint};

/// Chooses addresses for [`SimDriver`](crate::SimDriver).
///
/// What an implementation answers is checked: allocations may not overlap each other or mapped memory.
/// Reserved ranges may overlap, because a recording does not tell how far they went.
pub trait AddressSource {
    /// Returns where `size` bytes of memory lie.
    ///
    /// # Errors
    ///
    /// Whatever the caller of [`lowtide_core::Driver::allocate`] shall see.
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError>;

    /// Takes memory back that [`AddressSource::allocate`] placed.
    fn freed(&mut self, address: DeviceAddress, size: Bytes);

    /// Returns where a reserved range of `size` bytes lies.
    ///
    /// # Errors
    ///
    /// Whatever the caller of [`lowtide_core::Driver::reserve`] shall see.
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError>;

    /// Takes a range back that [`AddressSource::reserve`] placed.
    fn unreserved(&mut self, address: DeviceAddress, size: Bytes);

    /// Is asked before `size` bytes of physical memory are created.
    ///
    /// # Errors
    ///
    /// Whatever the caller of [`lowtide_core::Driver::create`] shall see.
    fn create(&mut self, _size: Bytes) -> Result<(), DriverError> {
        Ok(())
    }

    /// Hears of a range that was mapped and made accessible.
    fn mapped(&mut self, _address: DeviceAddress, _size: Bytes) {}

    /// Hears of a range that was unmapped.
    fn unmapped(&mut self, _address: DeviceAddress, _size: Bytes) {}
}

/// The lowest free addresses, in units of 2 MiB; up to 1 MiB, in units of 512 bytes.
///
/// Addresses are used again as soon as they are free, so that a stale one is likely to hit something.
/// Fresh allocations are adjacent. Small allocations, large allocations and reserved ranges each have
/// an area of their own.
#[derive(Debug)]
pub struct FirstFit {
    small: Area,
    large: Area,
    reserved: Area,
}

impl FirstFit {
    /// The addresses that reserved ranges have. No allocation lies there.
    pub const RESERVED: Range<DeviceAddress> = DeviceAddress(1 << 48)..DeviceAddress(1 << 62);

    /// Returns a source that has given out nothing.
    pub fn new() -> FirstFit {
        FirstFit {
            small: Area::new(1 << 40, 2 << 40),
            large: Area::new(16 << 40, 240 << 40),
            // Far larger than any device: a caching allocator reserves more than the device's memory for
            // each of its streams.
            reserved: Area::new(FirstFit::RESERVED.start.get(), FirstFit::RESERVED.end.get()),
        }
    }

    fn area(&mut self, footprint: Bytes) -> &mut Area {
        if footprint < PAGE {
            &mut self.small
        } else {
            &mut self.large
        }
    }
}

impl Default for FirstFit {
    fn default() -> FirstFit {
        FirstFit::new()
    }
}

impl AddressSource for FirstFit {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let footprint = footprint(size);
        self.area(footprint).take(footprint)
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        let footprint = footprint(size);
        self.area(footprint).give(address, footprint);
    }

    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.reserved.take(size)
    }

    fn unreserved(&mut self, address: DeviceAddress, size: Bytes) {
        self.reserved.give(address, size);
    }
}

/// Free address ranges, from start to size. No two of them touch.
#[derive(Debug)]
struct Area {
    free: BTreeMap<u64, u64>,
}

impl Area {
    fn new(start: u64, end: u64) -> Area {
        Area {
            free: BTreeMap::from([(start, end - start)]),
        }
    }

    /// Linear in the number of free ranges below the one that fits.
    fn take(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let size = size.get();
        let fit = self.free.iter().find(|&(_, &free)| free >= size);
        let (&start, &free) = fit.ok_or(DriverError::OutOfMemory)?;
        self.free.remove(&start);
        if free > size {
            self.free.insert(start + size, free - size);
        }
        Ok(DeviceAddress(start))
    }

    fn give(&mut self, address: DeviceAddress, size: Bytes) {
        let (mut start, mut size) = (address.get(), size.get());
        if let Some(after) = self.free.remove(&(start + size)) {
            size += after;
        }
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            start = before;
            size += free;
        }
        self.free.insert(start, size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_allocations_are_adjacent_and_holes_are_filled_from_below() {
        let mut source = FirstFit::new();
        let [a, b, c, d] = [3, 20, 2, 4].map(|mib| source.allocate(Bytes::mib(mib)).unwrap());
        assert_eq!(b, a + Bytes::mib(4), "3 MiB take two units of 2 MiB");
        assert_eq!(c, b + Bytes::mib(20));
        assert_eq!(d, c + Bytes::mib(2));

        source.freed(a, Bytes::mib(3));
        source.freed(c, Bytes::mib(2));
        assert_eq!(source.allocate(Bytes::mib(2)), Ok(a));
        assert_eq!(source.allocate(Bytes::mib(2)), Ok(a + Bytes::mib(2)));
        assert_eq!(source.allocate(Bytes::mib(2)), Ok(c));
        assert_eq!(source.allocate(Bytes::mib(2)), Ok(d + Bytes::mib(4)));
    }

    #[test]
    fn free_neighbours_become_one_range() {
        let mut source = FirstFit::new();
        let addresses: Vec<_> = (0..4).map(|_| source.allocate(PAGE).unwrap()).collect();
        for index in [0, 2, 1] {
            source.freed(addresses[index], PAGE);
        }
        assert_eq!(source.allocate(Bytes::mib(6)), Ok(addresses[0]));
        source.freed(addresses[0], Bytes::mib(6));
        source.freed(addresses[3], PAGE);
        assert_eq!(source.large.free.len(), 1);
    }

    #[test]
    fn small_allocations_lie_together() {
        let mut source = FirstFit::new();
        let a = source.allocate(Bytes(1)).unwrap();
        assert_eq!(source.allocate(Bytes::mib(1)), Ok(a + Bytes(512)));
        assert_eq!(
            source.allocate(Bytes(513)),
            Ok(a + Bytes(512) + Bytes::mib(1))
        );
    }

    #[test]
    fn the_address_space_ends() {
        let mut source = FirstFit::new();
        assert_eq!(
            source.reserve(Bytes(1 << 62)),
            Err(DriverError::OutOfMemory)
        );
        let all = source.reserve(Bytes((1 << 62) - (1 << 48))).unwrap();
        assert_eq!(source.reserve(PAGE), Err(DriverError::OutOfMemory));
        source.unreserved(all, Bytes((1 << 62) - (1 << 48)));
        assert_eq!(source.reserve(PAGE), Ok(all));
    }
}
