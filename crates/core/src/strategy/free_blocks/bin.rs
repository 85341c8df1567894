//! Free blocks of about the same size: a few in an unsorted vector, more in a sorted vector, many in a tree.

#![expect(
    clippy::inline_always,
    reason = "a free block passed to a call goes through memory, which costs as much as the call"
)]

use std::collections::BTreeMap;

use super::free_block::FreeBlock;
use crate::block::BlockId;

/// Up to this many blocks are unsorted. Reading all of them takes no longer than a binary search, and an
/// insertion needs no search.
pub(super) const FEW: usize = 12;

/// A bin is a vector up to this many blocks. With more, moving its elements would cost more than a tree.
pub(super) const SHORT_BIN_MAX: usize = 384;

/// Blocks of about the same size.
#[derive(Debug)]
pub(super) enum Bin {
    /// Up to [`FEW`] blocks are in any order. More are in descending order, because the smallest is taken most
    /// often, and removing the end of a vector is cheap.
    Short(Vec<FreeBlock>),
    /// By key.
    Long(BTreeMap<u128, BlockId>),
}

impl Default for Bin {
    fn default() -> Bin {
        Bin::Short(Vec::new())
    }
}

impl Bin {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Bin::Short(blocks) => blocks.is_empty(),
            Bin::Long(blocks) => blocks.is_empty(),
        }
    }

    #[inline(always)]
    pub(super) fn insert(&mut self, block: FreeBlock) {
        match self {
            Bin::Short(blocks) if blocks.len() < FEW => blocks.push(block),
            _ => self.insert_in_order(block.key(), block.id),
        }
    }

    /// The block is passed in two parts. A whole block would go through memory, also on the path without the
    /// call.
    #[inline(never)]
    fn insert_in_order(&mut self, key: u128, id: BlockId) {
        let block = FreeBlock::of_key(key, id);
        match self {
            Bin::Short(blocks) if blocks.len() < SHORT_BIN_MAX => {
                if blocks.len() == FEW {
                    blocks.sort_unstable_by(|first, second| second.cmp(first));
                }
                blocks.insert(count_from(blocks, block.key()), block);
            }
            Bin::Short(blocks) => {
                blocks.push(block);
                let long = blocks.iter().map(|block| (block.key(), block.id));
                *self = Bin::Long(long.collect());
            }
            Bin::Long(blocks) => {
                blocks.insert(key, id);
            }
        }
    }

    /// Removes a block. `position` is what the bin returned for it.
    #[inline(always)]
    pub(super) fn remove(&mut self, block: FreeBlock, position: usize) {
        match self {
            Bin::Short(blocks) if blocks.len() <= FEW => {
                let removed = blocks.swap_remove(position).key();
                assert!(removed == block.key(), "only free blocks are removed");
            }
            _ => self.remove_in_order(block.key(), position),
        }
    }

    /// Only the key is passed, for the reason given at [`Bin::insert_in_order`].
    #[inline(never)]
    fn remove_in_order(&mut self, key: u128, position: usize) {
        match self {
            Bin::Short(blocks) => {
                let removed = blocks.remove(position).key();
                assert!(removed == key, "only free blocks are removed");
            }
            Bin::Long(blocks) => {
                let removed = blocks.remove(&key);
                assert!(removed.is_some(), "only free blocks are removed");
                if blocks.is_empty() {
                    *self = Bin::default();
                }
            }
        }
    }

    /// Returns the position of a block. In a tree, blocks have no positions, and this is zero.
    #[inline(always)]
    pub(super) fn position_of(&self, block: FreeBlock) -> usize {
        match self {
            Bin::Short(blocks) if blocks.len() <= FEW => {
                let is_it = |other: &FreeBlock| other.rank == block.rank;
                let position = blocks.iter().position(is_it);
                position.expect("only free blocks are removed")
            }
            Bin::Short(blocks) => count_from(blocks, block.key()).saturating_sub(1),
            Bin::Long(_) => 0,
        }
    }

    pub(super) fn last(&self) -> Option<FreeBlock> {
        match self {
            Bin::Short(blocks) => blocks.iter().max().copied(),
            Bin::Long(blocks) => {
                let (&key, &id) = blocks.last_key_value()?;
                Some(FreeBlock::of_key(key, id))
            }
        }
    }

    /// Returns the first block of at least a key and its position.
    #[inline(always)]
    pub(super) fn first_from(&self, key: u128) -> Option<(FreeBlock, usize)> {
        match self {
            Bin::Short(blocks) if blocks.len() <= FEW => {
                let position = least_from(blocks, key)?;
                Some((blocks[position], position))
            }
            _ => self.first_in_order(key),
        }
    }

    #[inline(never)]
    fn first_in_order(&self, key: u128) -> Option<(FreeBlock, usize)> {
        match self {
            Bin::Short(blocks) => {
                // If each size has a bin of its own, the first block is large enough.
                let least = *blocks.last()?;
                if least.key() >= key {
                    return Some((least, blocks.len() - 1));
                }
                let position = count_from(blocks, key).checked_sub(1)?;
                Some((blocks[position], position))
            }
            Bin::Long(blocks) => {
                let (&key, &id) = blocks.range(key..).next()?;
                Some((FreeBlock::of_key(key, id), 0))
            }
        }
    }
}

/// Returns how many blocks, sorted in descending order, have at least a key.
///
/// A binary search without branches. [`slice::partition_point`] is compiled to branches here, and the processor
/// mispredicts half of them.
#[inline]
fn count_from(blocks: &[FreeBlock], key: u128) -> usize {
    let (mut base, mut len) = (0, blocks.len());
    while len > 1 {
        let half = len / 2;
        // All ones if the difference is negative.
        let below = (blocks[base + half].key().wrapping_sub(key).cast_signed() >> 127) as usize;
        base += half & !below;
        len -= half;
    }
    base + blocks
        .get(base)
        .map_or(0, |block| usize::from(block.key() >= key))
}

/// Returns the position of the smallest block that has at least a key. The blocks are in any order.
#[inline(always)]
fn least_from(blocks: &[FreeBlock], key: u128) -> Option<usize> {
    // Usually there is one block, and it fits: the processor continues with it before the comparison is done. The
    // difference of a block below the key wraps to more than any key.
    let (mut least, mut position) = (blocks.first()?.key().wrapping_sub(key), 0);
    for (index, block) in blocks.iter().enumerate().skip(1) {
        let above = block.key().wrapping_sub(key);
        position = if above < least { index } else { position };
        least = least.min(above);
    }
    (least.cast_signed() >= 0).then_some(position)
}
