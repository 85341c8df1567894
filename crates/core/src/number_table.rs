//! A hash table of numbers that stand for something kept elsewhere.

use std::hint::select_unpredictable;
use std::num::NonZeroU32;

/// The least number of slots: 128 bytes.
const SLOTS_MIN_LOG2: u32 = 4;

/// A set of numbers, found by the hash of what each stands for.
///
/// Open addressing with linear probing (Knuth, The Art of Computer Programming, volume 3, 6.4), with
/// no marks for what was removed: what follows moves up. A slot holds a number and the hash, which
/// decides what is compared at all, and where everything goes when the table doubles: what the numbers
/// stand for, likely to be in no cache, is looked at once for each search that finds something. At
/// most half of the slots are in use: most searches then end at the first, which is what a processor
/// predicts, and fuller tables lost more by that than they gained by being smaller.
#[derive(Debug)]
pub(crate) struct NumberTable {
    /// A power of two of them; zero where there is nothing.
    slots: Vec<u64>,
    /// What is left of a hash after this shift is its first slot.
    shift: u32,
    len: usize,
}

impl NumberTable {
    pub(crate) fn new() -> NumberTable {
        NumberTable {
            slots: vec![0; 1 << SLOTS_MIN_LOG2],
            shift: u32::BITS - SLOTS_MIN_LOG2,
            len: 0,
        }
    }

    /// Returns the number whose hash is `hash` and that `is_it` accepts. Constant time.
    #[inline]
    pub(crate) fn find(&self, hash: u32, is_it: impl Fn(NonZeroU32) -> bool) -> Option<NonZeroU32> {
        let slot = self.first_slot(hash);
        // One of two slots is chosen without a branch: which one holds the number cannot be predicted, and
        // would be known only once both came from a cache far away.
        let (first, second) = (self.slots[slot], self.slots[self.after(slot)]);
        let likely = select_unpredictable(parts(first).1 == hash, first, second);
        match parts(likely) {
            (Some(number), found) if found == hash && is_it(number) => Some(number),
            _ => self.find_from(slot, hash, is_it),
        }
    }

    /// Looks through the slots one by one.
    #[inline(never)]
    fn find_from(
        &self,
        mut slot: usize,
        hash: u32,
        is_it: impl Fn(NonZeroU32) -> bool,
    ) -> Option<NonZeroU32> {
        loop {
            let (number, found) = parts(self.slots[slot]);
            let number = number?;
            if found == hash && is_it(number) {
                return Some(number);
            }
            slot = self.after(slot);
        }
    }

    /// Adds a number that is not in the table, which never becomes smaller again. Constant time, but for
    /// the doubling.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u32, number: NonZeroU32) {
        debug_assert!(self.find(hash, |other| other == number).is_none());
        if self.len >= self.slots.len() / 2 {
            self.double();
        }
        self.len += 1;
        self.put(u64::from(hash) << u32::BITS | u64::from(number.get()));
    }

    /// Takes a number out. Constant time.
    ///
    /// # Panics
    ///
    /// If it is not in the table under that hash.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u32, number: NonZeroU32) {
        let mut hole = self.first_slot(hash);
        loop {
            let (found, _) = parts(self.slots[hole]);
            if found == Some(number) {
                break;
            }
            assert!(found.is_some(), "what is removed is in the table");
            hole = self.after(hole);
        }
        self.len -= 1;
        let mut slot = self.after(hole);
        while let (Some(_), hash) = parts(self.slots[slot]) {
            // A number must not come to lie in front of its first slot.
            let distance = slot.wrapping_sub(self.first_slot(hash)) & self.mask();
            if distance >= slot.wrapping_sub(hole) & self.mask() {
                self.slots[hole] = self.slots[slot];
                hole = slot;
            }
            slot = self.after(slot);
        }
        self.slots[hole] = 0;
    }

    #[cold]
    fn double(&mut self) {
        let doubled = vec![0; 2 * self.slots.len()];
        self.shift -= 1;
        for entry in std::mem::replace(&mut self.slots, doubled) {
            if entry != 0 {
                self.put(entry);
            }
        }
    }

    #[inline]
    fn put(&mut self, entry: u64) {
        let (_, hash) = parts(entry);
        let mut slot = self.first_slot(hash);
        while self.slots[slot] != 0 {
            slot = self.after(slot);
        }
        self.slots[slot] = entry;
    }

    #[inline]
    fn first_slot(&self, hash: u32) -> usize {
        (hash >> self.shift) as usize
    }

    #[inline]
    fn after(&self, slot: usize) -> usize {
        (slot + 1) & self.mask()
    }

    #[inline]
    fn mask(&self) -> usize {
        self.slots.len() - 1
    }
}

/// Returns the number in a slot, if there is one, and its hash.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
fn parts(entry: u64) -> (Option<NonZeroU32>, u32) {
    (NonZeroU32::new(entry as u32), (entry >> u32::BITS) as u32)
}

/// Returns a hash of a number whose lowest bits are often zero: what differs decides the upper bits,
/// and those choose the slot (multiplication by the golden ratio; Knuth, 6.4).
#[inline]
pub(crate) fn hash_of(number: u64) -> u32 {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> u32::BITS) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn number(index: usize) -> NonZeroU32 {
        NonZeroU32::new(u32::try_from(index).unwrap() + 1).unwrap()
    }

    proptest! {
        /// Against a map, with hashes that meet in the last slots and run over into the first.
        #[test]
        fn finds_what_a_map_finds(
            changes in prop::collection::vec((any::<bool>(), 0..60_usize), 1..300),
            hashes in prop::collection::vec(
                prop_oneof![Just(u32::MAX), Just(0), u32::MAX - 3..=u32::MAX, any::<u32>()], 60),
        ) {
            let mut table = NumberTable::new();
            let mut map = BTreeMap::new();
            for (add, index) in changes {
                if add && map.insert(index, hashes[index]).is_none() {
                    table.insert(hashes[index], number(index));
                } else if !add && map.remove(&index).is_some() {
                    table.remove(hashes[index], number(index));
                }
                for (other, &hash) in hashes.iter().enumerate() {
                    let found = table.find(hash, |found| found == number(other));
                    prop_assert_eq!(found.is_some(), map.contains_key(&other));
                }
                prop_assert_eq!(table.len, map.len());
            }
        }
    }

    #[test]
    fn a_hash_alone_finds_nothing() {
        let mut table = NumberTable::new();
        table.insert(7, number(0));
        table.insert(7, number(1));
        assert_eq!(table.find(7, |_| false), None);
        assert_eq!(table.find(8, |_| true), None);
        assert_eq!(table.find(7, |found| found == number(1)), Some(number(1)));
    }

    #[test]
    #[should_panic(expected = "what is removed is in the table")]
    fn what_is_not_there_is_not_removed() {
        NumberTable::new().remove(1, number(0));
    }

    #[test]
    fn addresses_a_power_of_two_apart_spread() {
        for log2 in [9, 10, 21, 24, 30] {
            let slots = (0..1_000_u64).map(|place| hash_of(place << log2) >> (u32::BITS - 12));
            let distinct: std::collections::BTreeSet<u32> = slots.collect();
            assert!(
                distinct.len() > 700,
                "{} of 1000, 2^{log2} apart",
                distinct.len()
            );
        }
    }
}
