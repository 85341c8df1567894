//! Free blocks ordered by size, then address: best fit in a few nanoseconds.

#![expect(
    clippy::inline_always,
    reason = "a free block passed to a call goes through memory, which costs as much as the call"
)]

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::block::{Block, BlockId};
use crate::units::{Bytes, DeviceAddress};

/// Sizes are looked at in units of this: no strategy's blocks are smaller.
const UNIT_BYTES_LOG2: u32 = 8;

/// Each power of two is divided into this many bins, so that a bin holds sizes at most 1 % apart, and
/// sizes below 64 KiB have a bin each: the first of a bin is then most often what is looked for.
const BINS_PER_OCTAVE_LOG2: u32 = 7;

/// A bin is a vector up to this many blocks. Beyond, moving its elements would cost more than a tree.
const SHORT_BIN_MAX: usize = 384;

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
/// The order is divided into bins by size, each power of two in 128 steps, with a bit for each bin
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

/// Where a block is in the bins.
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
        let binned = self.first_in_bins(size);
        let newest = self.newest_before(size, binned);
        newest.or(binned.map(|found| found.block))
    }

    /// Takes the block out that [`FreeBlocks::first_at_least`] returns, if `accepts` it.
    #[inline]
    pub(crate) fn take_first_at_least(
        &mut self,
        size: Bytes,
        accepts: impl Fn(&FreeBlock) -> bool,
    ) -> Option<FreeBlock> {
        let binned = self.first_in_bins(size);
        let newest = self.newest_before(size, binned);
        let first = newest.or(binned.map(|found| found.block));
        let first = first.filter(accepts)?;
        self.len -= 1;
        match (newest, binned) {
            (None, Some(found)) => self.remove_found(found),
            _ => self.newest = None,
        }
        Some(first)
    }

    /// Returns the newest block if it has at least `size` and comes before `binned`.
    #[inline]
    fn newest_before(&self, size: Bytes, binned: Option<Found>) -> Option<FreeBlock> {
        let newest = self.newest.filter(|newest| newest.size >= size);
        newest.filter(|newest| binned.is_none_or(|found| *newest < found.block))
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

    #[inline(always)]
    fn insert_in_bin(&mut self, block: FreeBlock) {
        let index = bin_of(block.size);
        if index >= self.bins.len() {
            self.bins.resize_with(index + 1, Bin::default);
            self.occupied.resize(index / 64 + 1, 0);
        }
        self.bins[index].insert(block);
        self.occupied[index / 64] |= 1 << (index % 64);
    }

    #[inline(always)]
    fn remove_from_bin(&mut self, block: FreeBlock) {
        let bin = bin_of(block.size);
        let position = self.bins[bin].position_of(block);
        self.remove_found(Found {
            block,
            bin,
            position,
        });
    }

    #[inline(always)]
    fn remove_found(&mut self, found: Found) {
        let bin = &mut self.bins[found.bin];
        bin.remove(found.block, found.position);
        // Whether the bin is empty is what a processor cannot predict.
        let bit = u64::from(bin.is_empty()) << (found.bin % 64);
        self.occupied[found.bin / 64] &= !bit;
    }

    #[inline(always)]
    fn first_in_bins(&self, size: Bytes) -> Option<Found> {
        let same_bin = bin_of(size);
        let found = self.bins.get(same_bin);
        if let Some((block, position)) = found.and_then(|bin| bin.first_at_least(size)) {
            return Some(Found {
                block,
                bin: same_bin,
                position,
            });
        }
        let bin = self.next_occupied(same_bin + 1)?;
        let (block, position) = self.bins[bin].first()?;
        Some(Found {
            block,
            bin,
            position,
        })
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

/// Returns how many of some blocks in falling order have at least a key.
///
/// A binary search whose steps are sums: [`slice::partition_point`] is compiled to branches here, half
/// of which a processor takes wrongly.
#[inline]
fn count_from(blocks: &[FreeBlock], key: u128) -> usize {
    let (mut base, mut len) = (0, blocks.len());
    while len > 1 {
        let half = len / 2;
        // All ones where the difference is negative.
        let below = (blocks[base + half].key().wrapping_sub(key).cast_signed() >> 127) as usize;
        base += half & !below;
        len -= half;
    }
    base + blocks
        .get(base)
        .map_or(0, |block| usize::from(block.key() >= key))
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

    #[inline(always)]
    fn insert(&mut self, block: FreeBlock) {
        match self {
            Bin::Short(blocks) if blocks.len() < SHORT_BIN_MAX => {
                blocks.insert(count_from(blocks, block.key()), block);
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

    /// Takes out a block that is at a position, as the bin has told it.
    #[inline(always)]
    fn remove(&mut self, block: FreeBlock, position: usize) {
        match self {
            Bin::Short(blocks) => {
                assert_eq!(blocks[position], block, "only free blocks are removed");
                if position + 1 == blocks.len() {
                    blocks.pop();
                } else {
                    blocks.remove(position);
                }
            }
            Bin::Long(blocks) => {
                assert!(blocks.remove(&block), "only free blocks are removed");
                if blocks.is_empty() {
                    *self = Bin::default();
                }
            }
        }
    }

    /// Returns where a block is; in a tree, blocks have no positions, and this is zero.
    #[inline]
    fn position_of(&self, block: FreeBlock) -> usize {
        match self {
            Bin::Short(blocks) => count_from(blocks, block.key()).saturating_sub(1),
            Bin::Long(_) => 0,
        }
    }

    /// Returns the first block and its position.
    #[inline(always)]
    fn first(&self) -> Option<(FreeBlock, usize)> {
        match self {
            Bin::Short(blocks) => Some((*blocks.last()?, blocks.len() - 1)),
            Bin::Long(blocks) => Some((*blocks.first()?, 0)),
        }
    }

    fn last(&self) -> Option<FreeBlock> {
        match self {
            Bin::Short(blocks) => blocks.first().copied(),
            Bin::Long(blocks) => blocks.last().copied(),
        }
    }

    /// Returns the first block of at least `size` and its position.
    #[inline(always)]
    fn first_at_least(&self, size: Bytes) -> Option<(FreeBlock, usize)> {
        match self {
            Bin::Short(blocks) => {
                // Where sizes have a bin each, the first is large enough.
                let least = *blocks.last()?;
                if least.size >= size {
                    return Some((least, blocks.len() - 1));
                }
                let fitting = count_from(blocks, u128::from(size.get()) << 64);
                let position = fitting.checked_sub(1)?;
                Some((blocks[position], position))
            }
            Bin::Long(blocks) => {
                let id = blocks.first()?.id;
                let least = FreeBlock {
                    size,
                    address: DeviceAddress::NULL,
                    id,
                };
                Some((*blocks.range(least..).next()?, 0))
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
                let accepts = |block: &FreeBlock| block.address.get().is_multiple_of(512);
                let first = set.range(from..).next().copied().filter(accepts);
                if place % 3 == 0 {
                    prop_assert_eq!(blocks.take_first_at_least(from.size, accepts), first);
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

    #[test]
    fn bins_rise_with_sizes() {
        let mut sizes: Vec<u64> = (0..60)
            .flat_map(|bit| [1 << bit, (1 << bit) + (1 << bit) / 3])
            .collect();
        sizes.sort_unstable();
        assert!(sizes.is_sorted_by_key(|&size| bin_of(Bytes(size))));
    }
}
