//! A free block in a set, and the number that orders it.

use std::cmp::Ordering;

use crate::block::{Block, BlockId};
use crate::units::Bytes;

/// A free block, ordered by size, then rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeBlock {
    pub(crate) size: Bytes,
    /// Which of several blocks of a size comes first: the one with the lowest. No two in a set share one.
    pub(crate) rank: u64,
    pub(crate) id: BlockId,
}

impl FreeBlock {
    /// Returns what stands for a block in a set where the lowest address comes first.
    #[inline]
    pub(crate) fn of(id: BlockId, block: &Block) -> FreeBlock {
        FreeBlock {
            size: block.size,
            rank: block.address.get(),
            id,
        }
    }

    /// Returns size and rank as one number: comparing two of them takes no branch, and which of two
    /// blocks is larger is what a processor cannot predict.
    #[inline]
    pub(super) fn key(self) -> u128 {
        key_of(self.size) | u128::from(self.rank)
    }

    /// Returns the block that has a key.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
    #[inline]
    pub(super) fn of_key(key: u128, id: BlockId) -> FreeBlock {
        FreeBlock {
            size: size_of_key(key),
            rank: key as u64,
            id,
        }
    }
}

/// Returns the least key of a block of at least a size.
#[inline]
pub(super) fn key_of(size: Bytes) -> u128 {
    u128::from(size.get()) << 64
}

/// Returns the size of a key's block.
#[inline]
pub(super) fn size_of_key(key: u128) -> Bytes {
    Bytes((key >> 64) as u64)
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
