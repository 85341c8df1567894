//! The device's memory and the rules of its use: allocations, reservations, handles and mappings.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress, DriverError, Handle};

use crate::call::Call;
use crate::cost::cost_ns;

/// The unit of physical memory and of mapping.
pub(crate) const PAGE: Bytes = Bytes::mib(2);

/// Returns the size of the address range that an allocation of `size` occupies.
///
/// A real driver packs requests of up to 1 MiB into shared pages in units of 512 bytes, and gives larger ones whole
/// pages (measured on an H200: 64 allocations of each of 18 sizes).
pub fn footprint(size: Bytes) -> Bytes {
    let unit = if size <= Bytes::mib(1) {
        Bytes(512)
    } else {
        PAGE
    };
    size.round_up(unit)
}

/// The reason why the device refuses a call.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// The call was valid.
    Driver(DriverError),
    /// The call broke a rule.
    Rule { code: i32, message: String },
}

impl From<DriverError> for Refusal {
    fn from(error: DriverError) -> Refusal {
        Refusal::Driver(error)
    }
}

/// Returns the refusal with CUDA's code for an invalid value.
pub(crate) fn broken_rule<T>(message: String) -> Result<T, Refusal> {
    Err(Refusal::Rule { code: 1, message })
}

/// The state of the device's memory. A method that fails has changed nothing.
#[derive(Debug)]
pub(crate) struct Memory {
    capacity: Bytes,
    /// Physical memory of the allocations, in whole pages.
    allocated: Bytes,
    /// Physical memory of the handles, mapped or not.
    created: Bytes,
    physical_max: Bytes,
    /// The requested size of each allocation, by address. Footprints do not overlap each other or any mapping.
    allocations: BTreeMap<u64, Bytes>,
    /// The number of small allocations in each page, by the page's number. None is zero.
    shared_pages: BTreeMap<u64, u32>,
    /// The number of reservations of each range, by start and end. None is zero.
    reservations: BTreeMap<(u64, u64), u32>,
    handles: BTreeMap<Handle, Physical>,
    /// Sorted by address. They do not overlap, and each lies within a reservation.
    mappings: BTreeMap<u64, Mapping>,
    handles_ever: u64,
}

/// Physical memory from `create`. It is removed once it is released and mapped nowhere.
#[derive(Debug)]
struct Physical {
    size: Bytes,
    released: bool,
    mappings: u32,
}

#[derive(Debug)]
struct Mapping {
    size: Bytes,
    handle: Handle,
    accessible: bool,
}

impl Memory {
    pub(crate) fn new(capacity: Bytes) -> Memory {
        Memory {
            capacity,
            allocated: Bytes::ZERO,
            created: Bytes::ZERO,
            physical_max: Bytes::ZERO,
            allocations: BTreeMap::new(),
            shared_pages: BTreeMap::new(),
            reservations: BTreeMap::new(),
            handles: BTreeMap::new(),
            mappings: BTreeMap::new(),
            handles_ever: 0,
        }
    }

    pub(crate) fn capacity(&self) -> Bytes {
        self.capacity
    }

    pub(crate) fn allocated(&self) -> Bytes {
        self.allocated
    }

    pub(crate) fn created(&self) -> Bytes {
        self.created
    }

    pub(crate) fn physical(&self) -> Bytes {
        self.allocated + self.created
    }

    pub(crate) fn physical_max(&self) -> Bytes {
        self.physical_max
    }

    /// Refuses sizes that cannot succeed at any address.
    pub(crate) fn check_size(&self, size: Bytes) -> Result<(), Refusal> {
        if size.is_zero() {
            return broken_rule("the size is zero".into());
        }
        if size > self.capacity {
            return Err(DriverError::OutOfMemory.into());
        }
        Ok(())
    }

    /// Adds an allocation at `address`. Returns how much physical memory it took, which is zero if it lies in
    /// shared pages that exist.
    pub(crate) fn allocate(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<Bytes, Refusal> {
        let footprint = footprint(size);
        let end = range_end(address, footprint)?;
        self.check_vacant(address.get(), end)?;
        let pages = pages(address.get(), footprint);
        let taken = match &pages {
            Some(pages) => {
                let fresh = pages
                    .clone()
                    .filter(|page| !self.shared_pages.contains_key(page));
                Bytes(fresh.count() as u64 * PAGE.get())
            }
            None => footprint,
        };
        self.check_room(taken)?;

        for page in pages.into_iter().flatten() {
            *self.shared_pages.entry(page).or_default() += 1;
        }
        self.allocations.insert(address.get(), size);
        self.allocated += taken;
        self.note_peak();
        Ok(taken)
    }

    /// Removes an allocation. Returns how much physical memory was released.
    pub(crate) fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<Bytes, Refusal> {
        match self.allocations.get(&address.get()) {
            None => return broken_rule(format!("nothing is allocated at {address}")),
            Some(&allocated) if allocated != size => {
                return broken_rule(format!("{address} holds {allocated:?}, not {size:?}"));
            }
            Some(_) => {}
        }
        self.allocations.remove(&address.get());
        let footprint = footprint(size);
        let returned = match pages(address.get(), footprint) {
            Some(pages) => {
                Bytes(pages.filter(|&page| self.leave_page(page)).count() as u64 * PAGE.get())
            }
            None => footprint,
        };
        self.allocated -= returned;
        Ok(returned)
    }

    /// Removes one small allocation from a page. Returns whether it was the last.
    fn leave_page(&mut self, page: u64) -> bool {
        let Some(users) = self.shared_pages.get_mut(&page) else {
            return false;
        };
        *users -= 1;
        let last = *users == 0;
        if last {
            self.shared_pages.remove(&page);
        }
        last
    }

    pub(crate) fn reserve(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), Refusal> {
        let end = range_end(address, size)?;
        *self.reservations.entry((address.get(), end)).or_default() += 1;
        Ok(())
    }

    pub(crate) fn unreserve(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), Refusal> {
        let key = (address.get(), range_end(address, size)?);
        let Some(times) = self.reservations.get(&key).copied() else {
            return broken_rule(format!(
                "{size:?} at {address} were never reserved as one range"
            ));
        };
        // Another reservation of the same addresses may still contain the mapping.
        let mapped = self
            .mappings
            .range(key.0..key.1)
            .find(|&(&start, mapping)| {
                let end = start + mapping.size.get();
                self.reservations_around(start, end) == 1
            });
        if let Some((&start, _)) = mapped {
            return broken_rule(format!(
                "memory is still mapped at {}",
                DeviceAddress(start)
            ));
        }
        if times == 1 {
            self.reservations.remove(&key);
        } else {
            self.reservations.insert(key, times - 1);
        }
        Ok(())
    }

    pub(crate) fn create(&mut self, size: Bytes) -> Result<Handle, Refusal> {
        self.check_room(size)?;
        let handle = Handle(self.handles_ever);
        self.handles_ever += 1;
        self.handles.insert(
            handle,
            Physical {
                size,
                released: false,
                mappings: 0,
            },
        );
        self.created += size;
        self.note_peak();
        Ok(handle)
    }

    /// Releases a handle. Returns the cost in nanoseconds.
    pub(crate) fn release(&mut self, handle: Handle) -> Result<u64, Refusal> {
        let physical = self
            .handles
            .get_mut(&handle)
            .filter(|physical| !physical.released);
        let Some(physical) = physical else {
            return broken_rule(format!("{handle:?} does not exist or was released before"));
        };
        physical.released = true;
        // Memory that is still mapped stays on the device, and the last unmap pays the cost.
        Ok(self
            .collect(handle)
            .unwrap_or(cost_ns(Call::Release, Bytes::ZERO)))
    }

    pub(crate) fn map(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        handle: Handle,
    ) -> Result<(), Refusal> {
        if !(address.get()).is_multiple_of(PAGE.get()) {
            return broken_rule(format!("{address} is not a multiple of {PAGE}"));
        }
        let end = range_end(address, size)?;
        let known = self
            .handles
            .get_mut(&handle)
            .filter(|physical| !physical.released);
        let Some(physical) = known else {
            return broken_rule(format!("{handle:?} does not exist or was released"));
        };
        let whole = physical.size;
        if whole != size {
            return broken_rule(format!(
                "{handle:?} is {whole:?} and maps whole, not {size:?}"
            ));
        }
        if self.reservations_around(address.get(), end) == 0 {
            return broken_rule(format!(
                "{size:?} at {address} are not within a reserved range"
            ));
        }
        self.check_vacant(address.get(), end)?;

        if let Some(physical) = self.handles.get_mut(&handle) {
            physical.mappings += 1;
        }
        self.mappings.insert(
            address.get(),
            Mapping {
                size,
                handle,
                accessible: false,
            },
        );
        Ok(())
    }

    /// Gives the device access to a range. Returns the cost in nanoseconds.
    pub(crate) fn set_access(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<u64, Refusal> {
        let mut cost = 0;
        for start in self.whole_mappings(address, size)? {
            if let Some(mapping) = self.mappings.get_mut(&start) {
                mapping.accessible = true;
                cost += cost_ns(Call::SetAccess, mapping.size);
            }
        }
        Ok(cost)
    }

    /// Unmaps a range. Returns the cost in nanoseconds.
    pub(crate) fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<u64, Refusal> {
        let mut cost = 0;
        for start in self.whole_mappings(address, size)? {
            let Some(Mapping { handle, size, .. }) = self.mappings.remove(&start) else {
                continue;
            };
            cost += cost_ns(Call::Unmap, size);
            if let Some(physical) = self.handles.get_mut(&handle) {
                physical.mappings -= 1;
            }
            cost += self.collect(handle).unwrap_or(0);
        }
        Ok(cost)
    }

    /// Removes physical memory that is released and mapped nowhere. Returns the cost in nanoseconds if it was
    /// removed.
    fn collect(&mut self, handle: Handle) -> Option<u64> {
        let physical = self.handles.get(&handle)?;
        if !physical.released || physical.mappings > 0 {
            return None;
        }
        let size = physical.size;
        self.handles.remove(&handle);
        self.created -= size;
        Some(cost_ns(Call::Release, size))
    }

    /// Checks that the device may read and write a range.
    pub(crate) fn check_access(&self, address: DeviceAddress, size: Bytes) -> Result<(), Refusal> {
        let illegal = |at: u64, what: &str| {
            let message = format!("{size:?} at {address}: {what} at {}", DeviceAddress(at));
            Err(Refusal::Rule {
                code: ILLEGAL_ADDRESS,
                message,
            })
        };
        let end = range_end(address, size)?;
        let mut at = address.get();
        while at < end {
            if let Some((&start, mapping)) = self.mappings.range(..=at).next_back()
                && at < start + mapping.size.get()
            {
                if !mapping.accessible {
                    return illegal(at, "no access was set");
                }
                at = start + mapping.size.get();
            } else if let Some((&start, size)) = self.allocations.range(..=at).next_back()
                && at < start + size.get()
            {
                at = start + size.get();
            } else {
                return illegal(at, "there is no memory");
            }
        }
        Ok(())
    }

    /// Returns one line for each resource that was not released.
    pub(crate) fn leaks(&self) -> impl Iterator<Item = String> {
        let allocations = self
            .allocations
            .iter()
            .map(|(&start, size)| format!("{size:?} are allocated at {}", DeviceAddress(start)));
        let mappings = self.mappings.iter().map(|(&start, mapping)| {
            format!("{:?} is mapped at {}", mapping.handle, DeviceAddress(start))
        });
        let handles = self
            .handles
            .iter()
            .filter(|(_, physical)| !physical.released);
        let handles = handles
            .map(|(handle, physical)| format!("{handle:?} of {:?} is not released", physical.size));
        let reservations = self.reservations.keys().map(|&(start, end)| {
            format!(
                "{:?} are reserved at {}",
                Bytes(end - start),
                DeviceAddress(start)
            )
        });
        allocations
            .chain(mappings)
            .chain(handles)
            .chain(reservations)
    }

    /// Returns the starts of the mappings that fill a range exactly.
    fn whole_mappings(&self, address: DeviceAddress, size: Bytes) -> Result<Vec<u64>, Refusal> {
        let end = range_end(address, size)?;
        let mut starts = Vec::new();
        let mut at = address.get();
        while at < end {
            let Some(mapping) = self.mappings.get(&at) else {
                return broken_rule(format!("no mapping starts at {}", DeviceAddress(at)));
            };
            starts.push(at);
            at += mapping.size.get();
        }
        if at > end {
            return broken_rule(format!("{} is inside a mapping", DeviceAddress(end)));
        }
        Ok(starts)
    }

    /// Returns how many reservations contain the whole range.
    fn reservations_around(&self, start: u64, end: u64) -> u32 {
        let below = self.reservations.range(..=(start, u64::MAX));
        below
            .filter(|&(&(_, reserved_end), _)| reserved_end >= end)
            .map(|(_, times)| times)
            .sum()
    }

    /// Checks that nothing is allocated or mapped in a range.
    fn check_vacant(&self, start: u64, end: u64) -> Result<(), Refusal> {
        let allocation = self.allocations.range(..end).next_back();
        let mapping = self.mappings.range(..end).next_back();
        let neighbours = [
            allocation.map(|(&at, &size)| (at, footprint(size))),
            mapping.map(|(&at, mapping)| (at, mapping.size)),
        ];
        match neighbours
            .into_iter()
            .flatten()
            .find(|(at, size)| at + size.get() > start)
        {
            None => Ok(()),
            Some((at, size)) => broken_rule(format!(
                "{} to {} overlap {size:?} at {}",
                DeviceAddress(start),
                DeviceAddress(end),
                DeviceAddress(at)
            )),
        }
    }

    fn check_room(&self, size: Bytes) -> Result<(), Refusal> {
        if self.physical().saturating_add(size) > self.capacity {
            return Err(DriverError::OutOfMemory.into());
        }
        Ok(())
    }

    fn note_peak(&mut self) {
        self.physical_max = self.physical_max.max(self.physical());
    }
}

/// CUDA's error code for an illegal memory access.
const ILLEGAL_ADDRESS: i32 = 700;

/// Returns the numbers of the pages that a small allocation lies in. Returns `None` for a large one, which shares
/// no pages.
fn pages(start: u64, footprint: Bytes) -> Option<std::ops::RangeInclusive<u64>> {
    let page = |address: u64| address / PAGE.get();
    (footprint < PAGE).then(|| page(start)..=page(start + footprint.get() - 1))
}

fn range_end(address: DeviceAddress, size: Bytes) -> Result<u64, Refusal> {
    match address.get().checked_add(size.get()) {
        Some(end) if !size.is_zero() => Ok(end),
        Some(_) => broken_rule("the size is zero".into()),
        None => broken_rule(format!(
            "{size:?} at {address} pass the end of the address space"
        )),
    }
}
