//! Free blocks of about the same size: a few in no order, more in a sorted vector, many in a tree.

#![expect(
    clippy::inline_always,
    reason = "a free block passed to a call goes through memory, which costs as much as the call"
)]

use std::collections::BTreeMap;

use super::free_block::FreeBlock;
use crate::block::BlockId;

/// Up to this many blocks of a bin are in no order: all of them are looked at in the time of a search, and a
/// block is put in without one.
pub(super) const FEW: usize = 12;

/// A bin is a vector up to this many blocks. Beyond, moving its elements would cost more than a tree.
pub(super) const SHORT_BIN_MAX: usize = 384;

/// Blocks of about the same size.
#[derive(Debug)]
pub(super) enum Bin {
    /// Up to [`FEW`] blocks in any order, more in falling order, because the smallest is taken most often and the
    /// end of a vector is cheap.
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

    /// Takes the parts of a block. One that is passed to a call goes through memory, and then even where it is not
    /// passed.
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

    /// Takes out a block that is at a position, as the bin has told it.
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

    /// Takes a block's key, as [`Bin::insert_in_order`].
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

    /// Returns where a block is; in a tree, blocks have no positions, and this is zero.
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
                // Where sizes have a bin each, the first is large enough.
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

/// Returns the position of the least of some blocks in any order that has at least a key.
#[inline(always)]
fn least_from(blocks: &[FreeBlock], key: u128) -> Option<usize> {
    // Most often there is one block, and it fits: a processor goes on with it before it has compared. What is
    // below the key wraps to more than any key.
    let (mut least, mut position) = (blocks.first()?.key().wrapping_sub(key), 0);
    for (index, block) in blocks.iter().enumerate().skip(1) {
        let above = block.key().wrapping_sub(key);
        position = if above < least { index } else { position };
        least = least.min(above);
    }
    (least.cast_signed() >= 0).then_some(position)
}
