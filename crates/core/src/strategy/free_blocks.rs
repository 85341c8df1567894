//! Free blocks ordered by size, then address: best fit in a few nanoseconds.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::block::{Block, BlockId};
use crate::units::{Bytes, DeviceAddress};

/// Sizes are looked at in units of this: no strategy's blocks are smaller.
const UNIT_BYTES_LOG2: u32 = 8;

/// Each power of two is divided into this many bins, so that a bin holds sizes at most 3 % apart, and
/// sizes below 16 KiB have a bin each.
const BINS_PER_OCTAVE_LOG2: u32 = 5;

/// A bin is a vector up to this many blocks. Beyond, moving its elements would cost more than a tree.
const SHORT_BIN_MAX: usize = 96;

/// A free block, ordered by size, then address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeBlock {
    pub(crate) size: Bytes,
    pub(crate) address: DeviceAddress,
    pub(crate) id: BlockId,
}

impl FreeBlock {
    /// Returns what stands for a block in a set.
    #[inline]
    pub(crate) fn of(id: BlockId, block: &Block) -> FreeBlock {
        FreeBlock {
            size: block.size,
            address: block.address,
            id,
        }
    }
}

impl FreeBlock {
    /// Returns size and address as one number: comparing two of them takes no branch, and which of two
    /// blocks is larger is what a processor cannot predict.
    #[inline]
    fn key(self) -> u128 {
        u128::from(self.size.get()) << 64 | u128::from(self.address.get())
    }
}

impl PartialEq for FreeBlock {
    fn eq(&self, other: &FreeBlock) -> bool {
        self.key() == other.key()
    }
}

impl Eq for FreeBlock {}

impl Ord for FreeBlock {
    #[inline]
    fn cmp(&self, other: &FreeBlock) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for FreeBlock {
    #[inline]
    fn partial_cmp(&self, other: &FreeBlock) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A set of [`FreeBlock`]s in order.
///
/// The order is divided into bins by size, each power of two in 32 steps, with a bit for each bin
/// that holds anything: finding the first block of at least a size looks at one bin and, if that has
/// none, at the next bin whose bit is set. Constant time while bins are short; a bin with many blocks
/// of about the same size is a tree, so that the worst case is logarithmic.
///
/// The block that was put in last is held apart from the bins: very often it is the next one that is
/// taken, or merged with what is freed next, and has then not been in a bin at all.
#[derive(Debug, Default)]
pub(crate) struct FreeBlocks {
    newest: Option<FreeBlock>,
    bins: Vec<Bin>,
    /// Bit `i % 64` of word `i / 64` is set exactly when bin `i` holds anything.
    occupied: Vec<u64>,
    len: usize,
}

impl FreeBlocks {
    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts a block in that is not in the set.
    #[inline]
    pub(crate) fn insert(&mut self, block: FreeBlock) {
        self.len += 1;
        if let Some(older) = self.newest.replace(block) {
            self.insert_in_bin(older);
        }
    }

    /// Takes a block out that is in the set.
    ///
    /// # Panics
    ///
    /// If it is not.
    #[inline]
    pub(crate) fn remove(&mut self, block: FreeBlock) {
        self.len -= 1;
        if self.newest == Some(block) {
            self.newest = None;
        } else {
            self.remove_from_bin(block);
        }
    }

    /// Returns the smallest block of at least `size`, of several the one at the lowest address.
    #[inline]
    pub(crate) fn first_at_least(&self, size: Bytes) -> Option<FreeBlock> {
        let newest = self.newest.filter(|newest| newest.size >= size);
        match (newest, self.first_in_bins(size)) {
            (Some(newest), Some(binned)) => Some(newest.min(binned)),
            (newest, binned) => newest.or(binned),
        }
    }

    /// Returns the blocks from the smallest of at least `size` on, in order.
    pub(crate) fn iter_from(&self, size: Bytes) -> impl Iterator<Item = FreeBlock> {
        let bins = self.bins_from(bin_of(size)).flat_map(Bin::iter);
        let mut binned = bins.skip_while(move |block| block.size < size).peekable();
        let mut newest = self.newest.filter(|newest| newest.size >= size);
        std::iter::from_fn(move || {
            let earlier = |next: &FreeBlock| newest.is_none_or(|newest| *next < newest);
            binned.next_if(earlier).or_else(|| newest.take())
        })
    }

    /// Returns every block in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = FreeBlock> {
        self.iter_from(Bytes::ZERO)
    }

    /// Returns the largest block, of several the one at the highest address.
    pub(crate) fn last(&self) -> Option<FreeBlock> {
        let word = self.occupied.iter().rposition(|&word| word != 0);
        let binned = word.and_then(|word| {
            let bit = 63 - self.occupied[word].leading_zeros() as usize;
            self.bins[word * 64 + bit].last()
        });
        self.newest.max(binned)
    }

    fn insert_in_bin(&mut self, block: FreeBlock) {
        let index = bin_of(block.size);
        if index >= self.bins.len() {
            self.bins.resize_with(index + 1, Bin::default);
            self.occupied.resize(index / 64 + 1, 0);
        }
        self.bins[index].insert(block);
        self.occupied[index / 64] |= 1 << (index % 64);
    }

    fn remove_from_bin(&mut self, block: FreeBlock) {
        let index = bin_of(block.size);
        let bin = &mut self.bins[index];
        bin.remove(block);
        if bin.is_empty() {
            self.occupied[index / 64] &= !(1 << (index % 64));
        }
    }

    fn first_in_bins(&self, size: Bytes) -> Option<FreeBlock> {
        let index = bin_of(size);
        let same_bin = self
            .bins
            .get(index)
            .and_then(|bin| bin.first_at_least(size));
        same_bin.or_else(|| self.bins[self.next_occupied(index + 1)?].first())
    }

    /// Returns the bins that hold anything, from one on. There are hundreds of others.
    fn bins_from(&self, index: usize) -> impl Iterator<Item = &Bin> {
        let next = |&index: &usize| self.next_occupied(index + 1);
        let occupied = std::iter::successors(self.next_occupied(index), next);
        occupied.map(|index| &self.bins[index])
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
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }
}

/// Returns the bin of a size: bins are ordered as the sizes in them are.
#[inline]
fn bin_of(size: Bytes) -> usize {
    let units = size.get() >> UNIT_BYTES_LOG2;
    let octave = (units | 1).ilog2().saturating_sub(BINS_PER_OCTAVE_LOG2);
    let step = (units >> octave) as usize;
    ((octave as usize) << BINS_PER_OCTAVE_LOG2) + step
}

/// Blocks of about the same size.
#[derive(Debug)]
enum Bin {
    /// In falling order, because the smallest is taken most often and the end of a vector is cheap.
    Short(Vec<FreeBlock>),
    Long(BTreeSet<FreeBlock>),
}

impl Default for Bin {
    fn default() -> Bin {
        Bin::Short(Vec::new())
    }
}

impl Bin {
    fn is_empty(&self) -> bool {
        match self {
            Bin::Short(blocks) => blocks.is_empty(),
            Bin::Long(blocks) => blocks.is_empty(),
        }
    }

    fn insert(&mut self, block: FreeBlock) {
        match self {
            Bin::Short(blocks) if blocks.len() < SHORT_BIN_MAX => {
                let key = block.key();
                let position = blocks.partition_point(|other| other.key() > key);
                blocks.insert(position, block);
            }
            Bin::Short(blocks) => {
                let mut long: BTreeSet<FreeBlock> = blocks.drain(..).collect();
                long.insert(block);
                *self = Bin::Long(long);
            }
            Bin::Long(blocks) => {
                blocks.insert(block);
            }
        }
    }

    fn remove(&mut self, block: FreeBlock) {
        match self {
            Bin::Short(blocks) => {
                let key = block.key();
                let position = blocks.partition_point(|other| other.key() > key);
                assert_eq!(blocks[position], block, "only free blocks are removed");
                blocks.remove(position);
            }
            Bin::Long(blocks) => {
                assert!(blocks.remove(&block), "only free blocks are removed");
                if blocks.is_empty() {
                    *self = Bin::default();
                }
            }
        }
    }

    fn first(&self) -> Option<FreeBlock> {
        match self {
            Bin::Short(blocks) => blocks.last().copied(),
            Bin::Long(blocks) => blocks.first().copied(),
        }
    }

    fn last(&self) -> Option<FreeBlock> {
        match self {
            Bin::Short(blocks) => blocks.first().copied(),
            Bin::Long(blocks) => blocks.last().copied(),
        }
    }

    fn first_at_least(&self, size: Bytes) -> Option<FreeBlock> {
        match self {
            Bin::Short(blocks) => {
                let fitting = blocks.partition_point(|block| block.size >= size);
                blocks[..fitting].last().copied()
            }
            Bin::Long(blocks) => {
                let id = blocks.first()?.id;
                let least = FreeBlock {
                    size,
                    address: DeviceAddress::NULL,
                    id,
                };
                blocks.range(least..).next().copied()
            }
        }
    }

    /// Returns the blocks in rising order.
    fn iter(&self) -> impl Iterator<Item = FreeBlock> {
        let (short, long) = match self {
            Bin::Short(blocks) => (Some(blocks.iter().rev()), None),
            Bin::Long(blocks) => (None, Some(blocks.iter())),
        };
        short
            .into_iter()
            .flatten()
            .chain(long.into_iter().flatten())
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block::tests::block_id;

    fn free_block(units: u64, place: u64) -> FreeBlock {
        FreeBlock {
            size: Bytes(units << 8),
            address: DeviceAddress(place << 8),
            id: block_id(1),
        }
    }

    proptest! {
        /// Everything that can be asked, after every change, against a sorted set.
        #[test]
        fn answers_as_a_sorted_set_does(
            changes in prop::collection::vec(
                (any::<bool>(), prop_oneof![1..70_u64, 1..5_000_u64, 1..1_u64 << 40], 1..200_u64), 1..400),
        ) {
            let mut set = BTreeSet::new();
            let mut blocks = FreeBlocks::default();
            for (add, units, place) in changes {
                let block = free_block(units, place);
                if add && set.insert(block) {
                    blocks.insert(block);
                } else if let Some(&present) = set.range(block..).next() {
                    set.remove(&present);
                    blocks.remove(present);
                }
                let from = free_block(units, 0);
                prop_assert_eq!(blocks.len(), set.len());
                prop_assert_eq!(blocks.first_at_least(from.size), set.range(from..).next().copied());
                prop_assert_eq!(blocks.last(), set.last().copied());
                prop_assert!(blocks.iter_from(from.size).eq(set.range(from..).copied()));
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

    #[test]
    fn bins_rise_with_sizes() {
        let mut sizes: Vec<u64> = (0..60)
            .flat_map(|bit| [1 << bit, (1 << bit) + (1 << bit) / 3])
            .collect();
        sizes.sort_unstable();
        assert!(sizes.is_sorted_by_key(|&size| bin_of(Bytes(size))));
    }
}
