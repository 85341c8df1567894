//! The addresses of memory and reserved ranges: first fit, or those of a recording that is replayed.

use std::collections::BTreeMap;
use std::ops::Range;

use lowtide_core::{Bytes, DeviceAddress, DriverError};

use crate::memory::{PAGE, footprint};

/// Chooses addresses for [`SimDriver`](crate::SimDriver).
///
/// The chosen addresses are checked: allocations must not overlap each other or mapped memory. Reserved ranges may
/// overlap, because a recording does not contain their sizes.
pub trait AddressSource {
    /// Returns the address of an allocation of `size` bytes.
    ///
    /// # Errors
    ///
    /// The error that the caller of [`lowtide_core::Driver::allocate`] is to get.
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError>;

    /// Frees an allocation that [`AddressSource::allocate`] placed.
    fn freed(&mut self, address: DeviceAddress, size: Bytes);

    /// Returns the address of a reserved range of `size` bytes.
    ///
    /// # Errors
    ///
    /// The error that the caller of [`lowtide_core::Driver::reserve`] is to get.
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError>;

    /// Frees a range that [`AddressSource::reserve`] placed.
    fn unreserved(&mut self, address: DeviceAddress, size: Bytes);

    /// Called before `size` bytes of physical memory are created.
    ///
    /// # Errors
    ///
    /// The error that the caller of [`lowtide_core::Driver::create`] is to get.
    fn create(&mut self, _size: Bytes) -> Result<(), DriverError> {
        Ok(())
    }

    /// Called when a range was mapped and made accessible.
    fn mapped(&mut self, _address: DeviceAddress, _size: Bytes) {}

    /// Called when a range was unmapped.
    fn unmapped(&mut self, _address: DeviceAddress, _size: Bytes) {}
}

/// Chooses the lowest free addresses, in units of 2 MiB; up to 1 MiB, in units of 512 bytes.
///
/// Free addresses are reused at once, so a stale address is likely to hit other memory. New allocations are
/// adjacent. Small allocations, large allocations and reserved ranges each have their own area.
#[derive(Debug)]
pub struct FirstFit {
    small: Area,
    large: Area,
    reserved: Area,
}

impl FirstFit {
    /// The addresses of reserved ranges. No allocation lies there.
    pub const RESERVED: Range<DeviceAddress> = DeviceAddress(1 << 48)..DeviceAddress(1 << 62);

    /// Returns a source whose addresses are all free.
    pub fn new() -> FirstFit {
        FirstFit {
            small: Area::new(1 << 40, 2 << 40),
            large: Area::new(16 << 40, 240 << 40),
            // Far larger than any device: a caching allocator reserves more than the device's memory for each of
            // its streams.
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

/// Free address ranges, from start to size. No two of them are adjacent.
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

    /// Returns the lowest range that fits. Linear in the number of free ranges below it.
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
