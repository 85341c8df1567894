//! Free blocks ordered by size, then rank: best fit in a few nanoseconds.

#![expect(
    clippy::inline_always,
    reason = "a free block passed to a call goes through memory, which costs as much as the call"
)]

mod bin;
mod free_block;

use bin::Bin;
pub(crate) use free_block::FreeBlock;
use free_block::{key_of, size_of_key};

use crate::units::Bytes;

/// Sizes are compared in units of 256 bytes: no strategy has smaller blocks.
const UNIT_BYTES_LOG2: u32 = 8;

/// Each power of two is divided into 64 bins. So the sizes in a bin differ by at most 2 %, and each size below 32
/// KiB has a bin of its own. Most bins of most jobs then hold one block or none.
const BINS_PER_OCTAVE_LOG2: u32 = 6;

/// A set of [`FreeBlock`]s in order.
///
/// The order is divided into bins by size, 64 for each power of two, with a bit for each bin that is not empty. A
/// search for the first block of at least a size looks at one bin and, if that has none, at the next bin whose bit
/// is set.
///
/// Constant time while bins are short. Most bins hold one block or none, so a bin is sorted only if it holds more
/// than a few. A bin with many blocks of about the same size is a tree, so the worst case is logarithmic.
#[derive(Debug, Default)]
pub(crate) struct FreeBlocks {
    bins: Vec<Bin>,
    /// Bit `i % 64` of word `i / 64` is set exactly if bin `i` is not empty.
    occupied: Vec<u64>,
    len: usize,
}

/// A block and its place in the bins.
#[derive(Clone, Copy, Debug)]
struct Found {
    block: FreeBlock,
    bin: usize,
    position: usize,
}

impl FreeBlocks {
    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a block that is not in the set.
    #[inline(always)]
    pub(crate) fn insert(&mut self, block: FreeBlock) {
        self.len += 1;
        let index = bin_of(block.size);
        if index >= self.bins.len() {
            self.bins.resize_with(index + 1, Bin::default);
            self.occupied.resize(index / 64 + 1, 0);
        }
        debug_assert!(!block.size.is_zero());
        self.bins[index].insert(block);
        self.occupied[index / 64] |= 1 << (index % 64);
        debug_assert_eq!(self.bins.len().div_ceil(64), self.occupied.len());
    }

    /// Removes a block that is in the set.
    ///
    /// # Panics
    ///
    /// If the block is not in the set.
    #[inline(always)]
    pub(crate) fn remove(&mut self, block: FreeBlock) {
        let bin = bin_of(block.size);
        let position = self.bins[bin].position_of(block);
        self.remove_found(Found {
            block,
            bin,
            position,
        });
    }

    /// Returns the smallest block of at least `size`; of several, the one with the lowest rank.
    #[inline]
    pub(crate) fn first_at_least(&self, size: Bytes) -> Option<FreeBlock> {
        self.find(key_of(size)).map(|found| found.block)
    }

    /// Returns the block that follows a given one in the order of the set. The given block need not be in the set.
    #[inline]
    pub(crate) fn next_after(&self, block: FreeBlock) -> Option<FreeBlock> {
        self.find(block.key() + 1).map(|found| found.block)
    }

    /// Removes the block that [`FreeBlocks::first_at_least`] returns, if `accepts` it.
    #[inline(always)]
    pub(crate) fn take_first_at_least(
        &mut self,
        size: Bytes,
        accepts: impl Fn(&FreeBlock) -> bool,
    ) -> Option<FreeBlock> {
        let found = self
            .find(key_of(size))
            .filter(|found| accepts(&found.block))?;
        self.remove_found(found);
        Some(found.block)
    }

    /// Returns the blocks from the smallest of at least `size` on, in order.
    pub(crate) fn iter_from(&self, size: Bytes) -> impl Iterator<Item = FreeBlock> {
        let next = |&block: &FreeBlock| self.next_after(block);
        std::iter::successors(self.first_at_least(size), next)
    }

    /// Returns every block in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = FreeBlock> {
        self.iter_from(Bytes::ZERO)
    }

    /// Returns the largest block; of several, the one with the highest rank.
    pub(crate) fn last(&self) -> Option<FreeBlock> {
        let word = self.occupied.iter().rposition(|&word| word != 0)?;
        let bit = 63 - self.occupied[word].leading_zeros() as usize;
        self.bins[word * 64 + bit].last()
    }

    #[inline(always)]
    fn remove_found(&mut self, found: Found) {
        debug_assert!(self.len > 0);
        debug_assert_eq!(bin_of(found.block.size), found.bin);
        self.len -= 1;
        let bin = &mut self.bins[found.bin];
        bin.remove(found.block, found.position);
        // Without a branch, because the processor cannot predict whether the bin is empty.
        let bit = u64::from(bin.is_empty()) << (found.bin % 64);
        self.occupied[found.bin / 64] &= !bit;
    }

    /// Returns the first block of at least a key.
    #[inline(always)]
    fn find(&self, key: u128) -> Option<Found> {
        let mut bin = bin_of(size_of_key(key));
        let mut first = self.bins.get(bin)?.first_from(key);
        if first.is_none() {
            bin = self.next_occupied(bin + 1)?;
            first = self.bins[bin].first_from(0);
        }
        let (block, position) = first?;
        debug_assert!(block.key() >= key, "what is found is large enough");
        Some(Found {
            block,
            bin,
            position,
        })
    }

    fn next_occupied(&self, from: usize) -> Option<usize> {
        let first = self.occupied.get(from / 64)? & (u64::MAX << (from % 64));
        if first != 0 {
            return Some(from / 64 * 64 + first.trailing_zeros() as usize);
        }
        let skipped = from / 64 + 1;
        let word = skipped
            + self.occupied[skipped..]
                .iter()
                .position(|&word| word != 0)?;
        debug_assert!(word < self.occupied.len());
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }
}

/// Returns the bin of a size. Bins are in the order of the sizes in them.
#[inline]
fn bin_of(size: Bytes) -> usize {
    let units = size.get() >> UNIT_BYTES_LOG2;
    let octave = (units | 1).ilog2().saturating_sub(BINS_PER_OCTAVE_LOG2);
    let step = (units >> octave) as usize;
    ((octave as usize) << BINS_PER_OCTAVE_LOG2) + step
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::bin::{FEW, SHORT_BIN_MAX};
    use super::*;
    use crate::block::BlockId;
    use crate::block::tests::block_id;

    fn free_block(units: u64, place: u64) -> FreeBlock {
        FreeBlock {
            size: Bytes(units << 8),
            rank: place << 8,
            id: block_id(u32::try_from(place + 1).unwrap()),
        }
    }

    /// Returns every part of a block, because two blocks are equal if only their ids differ.
    fn parts(block: Option<FreeBlock>) -> Option<(Bytes, u64, BlockId)> {
        block.map(|block| (block.size, block.rank, block.id))
    }

    /// Compares every answer for one size and for the block at one address.
    fn compare(blocks: &FreeBlocks, set: &BTreeSet<FreeBlock>, units: u64, place: u64) {
        let first = |from: FreeBlock| parts(set.range(from..).next().copied());
        let (size, block) = (Bytes(units << 8), free_block(units, place));
        assert_eq!(blocks.len(), set.len());
        assert_eq!(
            parts(blocks.first_at_least(size)),
            first(free_block(units, 0))
        );
        assert_eq!(
            parts(blocks.next_after(block)),
            first(free_block(units, place + 1))
        );
        assert_eq!(parts(blocks.last()), parts(set.last().copied()));
    }

    proptest! {
        /// Compares with a sorted set after every change.
        #[test]
        fn answers_as_a_sorted_set_does(
            changes in prop::collection::vec(
                (any::<bool>(), prop_oneof![1..4_u64, 1..70_u64, 1..5_000_u64, 1..1_u64 << 40], 1..200_u64),
                1..400,
            ),
        ) {
            let mut set = BTreeSet::new();
            let mut blocks = FreeBlocks::default();
            for (add, units, place) in changes {
                let block = free_block(units, place);
                let is_taken = set.iter().any(|other: &FreeBlock| other.rank == block.rank);
                if add && !is_taken {
                    set.insert(block);
                    blocks.insert(block);
                } else if let Some(&present) = set.range(block..).next() {
                    set.remove(&present);
                    blocks.remove(present);
                }
                compare(&blocks, &set, units, place);
                let from = free_block(units, 0);
                prop_assert!(blocks.iter_from(from.size).eq(set.range(from..).copied()));
                let accepts = |block: &FreeBlock| block.rank.is_multiple_of(512);
                let first = set.range(from..).next().copied().filter(accepts);
                if place % 3 == 0 {
                    prop_assert_eq!(parts(blocks.take_first_at_least(from.size, accepts)), parts(first));
                    first.map(|first| set.remove(&first));
                    prop_assert_eq!(blocks.len(), set.len());
                }
            }
            prop_assert!(blocks.iter().eq(set.iter().copied()));
        }
    }

    #[test]
    fn many_blocks_of_one_size_stay_in_order() {
        let mut blocks = FreeBlocks::default();
        for place in (1..=1000).rev() {
            blocks.insert(free_block(2, place));
        }
        for place in 1..=1000 {
            let first = blocks.first_at_least(Bytes(512)).unwrap();
            assert_eq!(first, free_block(2, place));
            blocks.remove(first);
        }
        assert_eq!(blocks.first_at_least(Bytes::ZERO), None);
    }

    /// For block counts around each at which a bin changes its form: removes each block and inserts it again. The
    /// two sizes share a bin.
    #[test]
    fn a_bin_answers_alike_in_each_of_its_forms() {
        assert_eq!(bin_of(Bytes(128 << 8)), bin_of(Bytes(129 << 8)));
        let around = |len: usize| len as u64 - 1..=len as u64 + 2;
        for count in around(FEW).chain(around(SHORT_BIN_MAX)) {
            let mut blocks = FreeBlocks::default();
            let mut set = BTreeSet::new();
            // In an order that is neither ascending nor descending.
            let block = |number: u64| free_block(128 + number % 2, number * 7919 % 10_007 + 1);
            let all: Vec<FreeBlock> = (0..count).map(block).collect();
            for &block in &all {
                blocks.insert(block);
                set.insert(block);
            }
            for &block in &all {
                blocks.remove(block);
                set.remove(&block);
                for units in [127, 128, 129, 130] {
                    compare(&blocks, &set, units, block.rank >> 8);
                }
                blocks.insert(block);
                set.insert(block);
                assert!(blocks.iter().eq(set.iter().copied()));
            }
            while let Some(first) = set.pop_first() {
                let taken = blocks.take_first_at_least(Bytes(512), |_| true);
                assert_eq!(parts(taken), parts(Some(first)));
            }
            assert_eq!((blocks.len(), blocks.last()), (0, None));
        }
    }

    /// Removes a block that is not in the set from a bin of `count` blocks.
    fn remove_absent(count: usize, absent: FreeBlock) {
        let mut blocks = FreeBlocks::default();
        for place in (1..=count as u64).map(|place| 2 * place) {
            blocks.insert(free_block(128, place));
        }
        blocks.remove(absent);
    }

    #[test]
    #[should_panic(expected = "only free blocks are removed")]
    fn what_is_not_among_few_is_not_removed() {
        remove_absent(FEW, free_block(128, 3));
    }

    #[test]
    #[should_panic(expected = "only free blocks are removed")]
    fn what_has_another_size_is_not_removed() {
        remove_absent(FEW, free_block(129, 2));
    }

    #[test]
    #[should_panic(expected = "only free blocks are removed")]
    fn what_is_not_among_more_is_not_removed() {
        remove_absent(FEW + 1, free_block(128, 3));
    }

    #[test]
    #[should_panic(expected = "only free blocks are removed")]
    fn what_is_not_among_many_is_not_removed() {
        remove_absent(SHORT_BIN_MAX + 1, free_block(128, 3));
    }

    #[test]
    fn bins_rise_with_sizes() {
        let mut sizes: Vec<u64> = (0..60)
            .flat_map(|bit| [1 << bit, (1 << bit) + (1 << bit) / 3])
            .collect();
        sizes.sort_unstable();
        assert!(sizes.is_sorted_by_key(|&size| bin_of(Bytes(size))));
    }
}
