//! Sets of small numbers whose smallest member is found with a few loads.

use std::iter::successors;

/// A set of numbers, stored as a bit tree.
///
/// The lowest level has a bit for each number. Each level above has a bit for each word below that is not zero,
/// up to a single word. So the first member takes one load per level: two for 4,096 numbers, four for 16 million.
/// A change writes the level above only if a word became empty or stopped being empty.
#[derive(Clone, Debug, Default)]
pub(super) struct BitSet {
    /// A bit for each word of `levels[0]` that is not zero. Without levels, the members themselves.
    root: u64,
    /// The levels below the root, from the top down. The last one holds the members.
    levels: Vec<Vec<u64>>,
}

impl BitSet {
    /// Returns an empty set of numbers below `capacity`.
    pub(super) fn with_capacity(capacity: usize) -> BitSet {
        let mut set = BitSet::default();
        set.reserve(capacity);
        set
    }

    /// Makes room for numbers below `capacity`. Linear in `capacity`; every set has room for 64.
    pub(super) fn reserve(&mut self, capacity: usize) {
        let words_of_level = |level: u32| capacity.div_ceil(64_usize.saturating_pow(level));
        while words_of_level(1 + self.depth()) > 1 {
            self.levels.insert(0, vec![self.root]);
            self.root = u64::from(self.root != 0);
        }
        for (level, words) in (1..).zip(self.levels.iter_mut().rev()) {
            let count = words_of_level(level).max(words.len());
            if words.iter().all(|&word| word == 0) {
                // The system zeroes a large vector lazily, page by page at the first access.
                *words = vec![0; count];
            } else {
                words.resize(count, 0);
            }
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.root == 0
    }

    /// Returns the smallest member.
    #[inline]
    pub(super) fn first(&self) -> Option<usize> {
        if self.root == 0 {
            return None;
        }
        let mut index = self.root.trailing_zeros() as usize;
        for words in &self.levels {
            debug_assert_ne!(words[index], 0, "a summary says that there is a member");
            index = index * 64 + words[index].trailing_zeros() as usize;
        }
        debug_assert!(self.contains(index));
        Some(index)
    }

    /// Returns whether a number is in the set.
    ///
    /// # Panics
    ///
    /// If there is no room for `number`.
    pub(super) fn contains(&self, number: usize) -> bool {
        self.words()[number / 64] >> (number % 64) & 1 == 1
    }

    /// Adds a number. It may be in the set already.
    ///
    /// # Panics
    ///
    /// If there is no room for `number`.
    #[inline]
    pub(super) fn insert(&mut self, number: usize) {
        debug_assert!(number < 64 * self.words().len(), "there is room");
        let mut index = number;
        for words in self.levels.iter_mut().rev() {
            let word = &mut words[index / 64];
            let was_empty = *word == 0;
            *word |= 1 << (index % 64);
            if !was_empty {
                return;
            }
            index /= 64;
        }
        debug_assert!(index < 64);
        self.root |= 1 << index;
    }

    /// Removes a number and returns whether it was in the set.
    ///
    /// # Panics
    ///
    /// If there is no room for `number`.
    #[inline]
    pub(super) fn remove(&mut self, number: usize) -> bool {
        let mut index = number;
        for (depth, words) in self.levels.iter_mut().rev().enumerate() {
            let word = &mut words[index / 64];
            let bit = 1 << (index % 64);
            if depth == 0 && *word & bit == 0 {
                return false;
            }
            *word &= !bit;
            if *word != 0 {
                return true;
            }
            index /= 64;
        }
        debug_assert!(index < 64);
        let had = self.root >> index & 1 == 1;
        self.root &= !(1 << index);
        had
    }

    /// Returns the members in ascending order. Linear in the capacity.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        let bits = |(index, &word): (usize, &u64)| {
            let unless_empty = |word: u64| (word != 0).then_some(word);
            let rests = successors(unless_empty(word), move |&word| {
                unless_empty(word & (word - 1))
            });
            rests.map(move |word| index * 64 + word.trailing_zeros() as usize)
        };
        self.words().iter().enumerate().flat_map(bits)
    }

    /// Checks that each bit of an upper level is set exactly if the word below is not zero.
    ///
    /// # Errors
    ///
    /// The first wrong bit, as a sentence.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut above = std::slice::from_ref(&self.root);
        for words in &self.levels {
            for (index, &word) in words.iter().enumerate() {
                if (above[index / 64] >> (index % 64) & 1 == 1) != (word != 0) {
                    return Err(format!("the summary of word {index} of a set is wrong"));
                }
            }
            above = words;
        }
        Ok(())
    }

    /// Returns the bits of the members.
    fn words(&self) -> &[u64] {
        let members = self.levels.last();
        members.map_or(std::slice::from_ref(&self.root), Vec::as_slice)
    }

    fn depth(&self) -> u32 {
        u32::try_from(self.levels.len()).expect("a set has at most eleven levels")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares every answer after every change with a sorted set. Sets grow meanwhile, so that levels are
        /// added above members.
        #[test]
        fn answers_as_a_sorted_set_does(
            changes in prop::collection::vec(
                (any::<bool>(), prop_oneof![0..70_usize, 0..5_000_usize, 0..300_000_usize]), 1..100),
        ) {
            let mut model = BTreeSet::new();
            let mut set = BitSet::default();
            let mut capacity = 64;
            for (add, number) in changes {
                if number >= capacity {
                    capacity = number + 1;
                    set.reserve(capacity);
                }
                if add {
                    set.insert(number);
                    model.insert(number);
                } else {
                    prop_assert_eq!(set.remove(number), model.remove(&number));
                    if let Some(first) = model.pop_first() {
                        prop_assert!(set.remove(first));
                    }
                }
                prop_assert_eq!(set.first(), model.first().copied());
                prop_assert_eq!(set.is_empty(), model.is_empty());
                prop_assert_eq!(set.contains(number), model.contains(&number));
                prop_assert_eq!(set.check(), Ok(()));
            }
            prop_assert!(set.iter().eq(model));
        }
    }

    #[test]
    fn levels_are_as_many_as_a_capacity_needs() {
        for (capacity, levels) in [
            (0, 0),
            (64, 0),
            (65, 1),
            (4_096, 1),
            (4_097, 2),
            (262_145, 3),
        ] {
            let mut set = BitSet::with_capacity(capacity);
            assert_eq!(set.levels.len(), levels, "{capacity}");
            if let Some(last) = capacity.checked_sub(1) {
                set.insert(last);
                assert_eq!(set.first(), Some(last));
            }
        }
    }
}
