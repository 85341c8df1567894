//! Sets of small numbers that answer "which is the first?" in a few loads.

use std::iter::successors;

/// A set of numbers, as bits under summaries.
///
/// Above the bits stands a level with a bit for each of their words that is not zero, above that
/// another, up to a single word. So the first member is found by one load for each level, two for
/// 4,096 numbers and four for 16 million, and a change goes up only while it fills an empty word or
/// empties one.
#[derive(Clone, Debug, Default)]
pub(super) struct BitSet {
    /// A bit for each word of the first of `levels` that is not zero; the members themselves where
    /// there are no levels.
    root: u64,
    /// From the root down. The last one holds the members.
    levels: Vec<Vec<u64>>,
}

impl BitSet {
    /// Returns an empty set of numbers below `capacity`.
    pub(super) fn with_capacity(capacity: usize) -> BitSet {
        let mut set = BitSet::default();
        set.reserve(capacity);
        set
    }

    /// Makes room for numbers below `capacity`. Linear in it; every set has room for 64.
    pub(super) fn reserve(&mut self, capacity: usize) {
        let words_of_level = |level: u32| capacity.div_ceil(64_usize.saturating_pow(level));
        while words_of_level(1 + self.depth()) > 1 {
            self.levels.insert(0, vec![self.root]);
            self.root = u64::from(self.root != 0);
        }
        for (level, words) in (1..).zip(self.levels.iter_mut().rev()) {
            let count = words_of_level(level).max(words.len());
            if words.iter().all(|&word| word == 0) {
                // Zeroed by the system, page by page as it is touched, where the set is large.
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
    /// If there is no room for it.
    pub(super) fn contains(&self, number: usize) -> bool {
        self.words()[number / 64] >> (number % 64) & 1 == 1
    }

    /// Puts a number in that may be in the set already.
    ///
    /// # Panics
    ///
    /// If there is no room for it.
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

    /// Takes a number out and returns whether it was in the set.
    ///
    /// # Panics
    ///
    /// If there is no room for it.
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

    /// Returns the members in rising order. Linear in the capacity.
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

    /// Checks that each bit of a summary is set exactly where the word below is not zero.
    ///
    /// # Errors
    ///
    /// A sentence that says which is not.
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
        /// Everything that can be asked, after every change, against a sorted set. Sets grow as
        /// they go, so that levels are added above members.
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
