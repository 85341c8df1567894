//! A free block in a set, and the key that orders it.

use std::cmp::Ordering;

use crate::block::{Block, BlockId};
use crate::units::Bytes;

/// A free block, ordered by size, then rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeBlock {
    pub(crate) size: Bytes,
    /// The order of blocks of the same size: the lowest rank comes first. Ranks in a set are unique.
    pub(crate) rank: u64,
    pub(crate) id: BlockId,
}

impl FreeBlock {
    /// Returns the entry of a block in a set that is ordered by address.
    #[inline]
    pub(crate) fn of(id: BlockId, block: &Block) -> FreeBlock {
        FreeBlock {
            size: block.size,
            rank: block.address.get(),
            id,
        }
    }

    /// Returns size and rank as one number. Keys are compared without a branch, because the processor cannot
    /// predict which of two blocks is larger.
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
