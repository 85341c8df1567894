//! Which lane holds an address: a table of the address space, read without a lock.

use std::sync::OnceLock;

use lowtide_core::{Bytes, DeviceAddress};

use crate::sync::atomic::{AtomicU32, Ordering};

/// The unit of the table: 2 MiB, in which drivers map memory.
const PAGE_LOG2: u32 = 21;
/// The end of the table. No driver has returned a higher address so far.
const ADDRESSES_LOG2: u32 = 49;
/// A leaf of the table covers 16 GiB in 32 KiB.
const LEAF_PAGES_LOG2: u32 = 13;
const LEAVES: usize = 1 << (ADDRESSES_LOG2 - PAGE_LOG2 - LEAF_PAGES_LOG2);

/// The lower half of an entry counts the pieces of memory in its page; the upper half says which lane holds them.
const COUNT_BITS: u32 = 16;
const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;
/// The upper half of an entry for a page that holds memory of several lanes, or did since the page was last empty.
const SEVERAL: u32 = u32::MAX >> COUNT_BITS;

/// A lane of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneId {
    /// The device's number.
    pub device: u8,
    /// The lane's number.
    pub lane: u8,
}

/// The table's answer about an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FoundLane {
    /// No lane holds it.
    Nobody,
    /// This lane holds it, or no lane does.
    One(LaneId),
    /// Any lane may hold it: it shares its page with other lanes' memory, or is beyond the table.
    Any,
}

/// Which lane of which device holds the memory in each page of the address space that devices and hosts share. A
/// lane adds an entry when it gets memory from the driver and removes it when it releases the memory.
#[derive(Debug)]
pub struct OwnerTable {
    leaves: Box<[OnceLock<Box<[AtomicU32]>>]>,
}

impl Default for OwnerTable {
    fn default() -> OwnerTable {
        let leaves = (0..LEAVES).map(|_| OnceLock::new());
        OwnerTable {
            leaves: leaves.collect(),
        }
    }
}

impl OwnerTable {
    /// Returns which lane holds `address`. Constant time; two loads. For an allocated block the result is its lane
    /// or [`FoundLane::Any`]; for any other address it may be out of date.
    #[inline]
    pub fn find(&self, address: DeviceAddress) -> FoundLane {
        let page = address.get() >> PAGE_LOG2;
        let Some(leaf) = self.leaves.get(leaf_of(page)) else {
            return FoundLane::Any;
        };
        // The entry was written before the block was returned to the program.
        let entry = leaf
            .get()
            .map_or(0, |leaf| leaf[place_in_leaf(page)].load(Ordering::Relaxed));
        match entry >> COUNT_BITS {
            _ if entry == 0 => FoundLane::Nobody,
            SEVERAL => FoundLane::Any,
            number => FoundLane::One(LaneId::from_number(number)),
        }
    }

    /// Records that `owner` holds a piece of memory, before any of it is allocated.
    pub(crate) fn add(&self, owner: LaneId, address: DeviceAddress, size: Bytes) {
        self.for_each_page(address, size, |entry| {
            let (number, count) = (entry >> COUNT_BITS, entry & COUNT_MASK);
            let is_shared = count > 0 && number != owner.number();
            let number = if is_shared { SEVERAL } else { owner.number() };
            debug_assert!(count < COUNT_MASK, "a page has room for fewer pieces");
            number << COUNT_BITS | (count + 1)
        });
    }

    /// Removes a piece of memory, or several adjacent ones, that were released to the driver.
    pub(crate) fn remove(&self, address: DeviceAddress, size: Bytes) {
        self.for_each_page(address, size, |entry| {
            debug_assert!(entry & COUNT_MASK > 0, "what goes back was noted");
            // Removing the last piece clears the entry, so that one lane can own the page again.
            if entry & COUNT_MASK <= 1 {
                0
            } else {
                entry - 1
            }
        });
    }

    fn for_each_page(&self, address: DeviceAddress, size: Bytes, change: impl Fn(u32) -> u32) {
        let last = address.get().saturating_add(size.get().max(1) - 1);
        for page in address.get() >> PAGE_LOG2..=last >> PAGE_LOG2 {
            let Some(leaf) = self.leaves.get(leaf_of(page)) else {
                return;
            };
            let leaf = leaf.get_or_init(|| {
                let entries = (0..1 << LEAF_PAGES_LOG2).map(|_| AtomicU32::new(0));
                entries.collect()
            });
            let entry = &leaf[place_in_leaf(page)];
            let _ = entry.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |entry| {
                Some(change(entry))
            });
        }
    }
}

impl LaneId {
    /// Returns a number that is at least 1 and below [`SEVERAL`].
    fn number(self) -> u32 {
        (u32::from(self.device) << 6 | u32::from(self.lane)) + 1
    }

    #[inline]
    fn from_number(number: u32) -> LaneId {
        let number = number - 1;
        LaneId {
            device: (number >> 6 & 0xff) as u8,
            lane: (number & 0x3f) as u8,
        }
    }
}

#[inline]
fn leaf_of(page: u64) -> usize {
    usize::try_from(page >> LEAF_PAGES_LOG2).unwrap_or(usize::MAX)
}

#[inline]
fn place_in_leaf(page: u64) -> usize {
    (page & ((1 << LEAF_PAGES_LOG2) - 1)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::alone;

    const MIB: u64 = 1 << 20;

    fn owner(device: u8, lane: u8) -> LaneId {
        LaneId { device, lane }
    }

    fn find(table: &OwnerTable, address: u64) -> FoundLane {
        table.find(DeviceAddress(address))
    }

    #[test]
    fn a_page_is_its_holders_until_it_goes_back() {
        alone(|| {
            let table = OwnerTable::default();
            let (address, size) = (DeviceAddress(6 * MIB), Bytes::mib(4));
            table.add(owner(127, 31), address, size);
            assert_eq!(find(&table, 6 * MIB - 1), FoundLane::Nobody);
            assert_eq!(find(&table, 6 * MIB), FoundLane::One(owner(127, 31)));
            assert_eq!(find(&table, 10 * MIB - 1), FoundLane::One(owner(127, 31)));
            assert_eq!(find(&table, 10 * MIB), FoundLane::Nobody);
            table.remove(address, Bytes::mib(2));
            assert_eq!(find(&table, 7 * MIB), FoundLane::Nobody);
            assert_eq!(find(&table, 9 * MIB), FoundLane::One(owner(127, 31)));
        });
    }

    #[test]
    fn a_shared_page_could_be_anybodys_until_it_is_empty() {
        alone(|| {
            let table = OwnerTable::default();
            let piece = |place| (DeviceAddress(2 * MIB + place), Bytes(512));
            let [first, second] = [piece(0), piece(512)];
            table.add(owner(0, 0), first.0, first.1);
            table.add(owner(0, 1), second.0, second.1);
            assert_eq!(find(&table, 2 * MIB), FoundLane::Any);
            table.remove(first.0, first.1);
            assert_eq!(find(&table, 2 * MIB + 512), FoundLane::Any);
            table.remove(second.0, second.1);
            assert_eq!(find(&table, 2 * MIB), FoundLane::Nobody);
            table.add(owner(0, 1), second.0, second.1);
            assert_eq!(find(&table, 2 * MIB), FoundLane::One(owner(0, 1)));
        });
    }

    #[test]
    fn beyond_the_table_anybody_could_hold_an_address() {
        alone(|| {
            let table = OwnerTable::default();
            let last = (1 << ADDRESSES_LOG2) - 2 * MIB;
            table.add(owner(1, 2), DeviceAddress(last), Bytes::mib(4));
            assert_eq!(find(&table, last), FoundLane::One(owner(1, 2)));
            assert_eq!(find(&table, last + 2 * MIB), FoundLane::Any);
            assert_eq!(find(&table, u64::MAX), FoundLane::Any);
        });
    }
}
