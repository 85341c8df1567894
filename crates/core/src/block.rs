//! The table of blocks: every part of a segment that a strategy keeps track of.
#![expect(
    clippy::inline_always,
    reason = "a record passed to a call goes through memory"
)]

use std::num::NonZeroU32;
use std::ops::{Index, IndexMut};

use crate::domain::DomainId;
use crate::figures::SizeKind;
use crate::number_table::{NumberTable, hash_of};
use crate::segment::SegmentId;
use crate::units::{Bytes, DeviceAddress};

/// The number of a block in the [`BlockTable`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct BlockId(NonZeroU32);

impl BlockId {
    fn index(self) -> usize {
        self.0.get() as usize
    }
}

/// What a block is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BlockState {
    /// The strategy may hand it out.
    Free,
    /// The program holds it.
    Allocated,
    /// The program let go of it; a stream that used it has not passed its event yet.
    Pending,
    /// Addresses of an expandable segment with no memory behind them.
    Unmapped,
}

/// A range of device addresses inside one segment.
///
/// One cache line: a request that hits touches one or two of these and nothing else that is cold.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Block {
    pub(crate) address: DeviceAddress,
    pub(crate) size: Bytes,
    /// What the program asked for; stale in a block that is not active.
    pub(crate) requested: Bytes,
    pub(crate) segment: SegmentId,
    /// The pool and stream that may use the block.
    pub(crate) domain: DomainId,
    /// The block that ends where this one starts, in strategies that link the blocks of a segment.
    pub(crate) previous: Option<BlockId>,
    /// The block that starts where this one ends, likewise.
    pub(crate) next: Option<BlockId>,
    /// The block beneath this one, in strategies that stack free blocks.
    pub(crate) below: Option<BlockId>,
    /// A number for the strategy's own use: an order, a size class, an age.
    pub(crate) mark: u64,
    pub(crate) state: BlockState,
    /// Which of PyTorch's two size pools the block counts for: the same as its segment's.
    pub(crate) kind: SizeKind,
    /// Whether streams besides its own have used it since it was handed out.
    pub(crate) used_elsewhere: bool,
    /// Whether the block can be found by its address.
    pub(crate) is_listed: bool,
}

impl Block {
    /// Returns the address behind the block's last byte.
    pub(crate) fn end(&self) -> DeviceAddress {
        self.address + self.size
    }

    /// Returns whether the block shares its segment with others.
    pub(crate) fn is_split(&self) -> bool {
        self.previous.is_some() || self.next.is_some()
    }

    /// Returns whether the program, or work it queued, may still touch the block.
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.state, BlockState::Allocated | BlockState::Pending)
    }
}

/// Every block, by number and by address.
///
/// Numbers are used again, last freed first: the newest record is likeliest to be in cache; a record
/// that holds no block has no segment. The map from addresses compares through the table.
#[derive(Debug)]
pub(crate) struct BlockTable {
    /// Slot 0 is never used, so that `Option<BlockId>` takes four bytes.
    blocks: Vec<Block>,
    /// Slots that hold no block.
    vacant: Vec<BlockId>,
    by_address: NumberTable,
    lists_when_handed_out: bool,
}

impl BlockTable {
    pub(crate) fn new() -> BlockTable {
        let unused = Block {
            address: DeviceAddress::NULL,
            size: Bytes::ZERO,
            requested: Bytes::ZERO,
            segment: SegmentId::NONE,
            domain: DomainId::DEFAULT,
            previous: None,
            next: None,
            below: None,
            mark: 0,
            state: BlockState::Free,
            kind: SizeKind::Small,
            used_elsewhere: false,
            is_listed: false,
        };
        BlockTable {
            blocks: vec![unused],
            vacant: Vec::new(),
            by_address: NumberTable::new(),
            lists_when_handed_out: false,
        }
    }

    /// Puts blocks into the map from addresses only when they are handed out. What is left of a block
    /// that was cut is often merged again before anyone asks for it by its address, and a strategy that
    /// never does need not pay for that.
    pub(crate) fn list_when_handed_out(&mut self) {
        self.lists_when_handed_out = true;
    }

    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len() - 1 - self.vacant.len()
    }

    /// Puts a block in and returns its number. Constant time.
    #[inline(always)]
    pub(crate) fn insert(&mut self, block: Block) -> BlockId {
        let id = match self.vacant.pop() {
            Some(id) => {
                self.blocks[id.index()] = block;
                id
            }
            None => self.push(block),
        };
        if !self.lists_when_handed_out {
            self.list(id);
        }
        id
    }

    #[cold]
    fn push(&mut self, block: Block) -> BlockId {
        let number = u32::try_from(self.blocks.len())
            .ok()
            .and_then(NonZeroU32::new);
        self.blocks.push(block);
        BlockId(number.expect("fewer than 2^32 blocks: their records alone are 256 GiB"))
    }

    /// Makes a block found by its address, if it is not already. Constant time.
    #[inline]
    pub(crate) fn list(&mut self, id: BlockId) {
        let block = &mut self[id];
        if !std::mem::replace(&mut block.is_listed, true) {
            let address = block.address;
            debug_assert!(self.find(address).is_none(), "two blocks at {address}");
            self.by_address.insert(hash_of(address.get()), id.0);
        }
    }

    /// Takes a block out. Its number may be given to another. Constant time.
    #[inline]
    pub(crate) fn remove(&mut self, id: BlockId) {
        let block = &mut self[id];
        block.segment = SegmentId::NONE;
        if std::mem::replace(&mut block.is_listed, false) {
            let hash = hash_of(block.address.get());
            self.by_address.remove(hash, id.0);
        }
        self.vacant.push(id);
    }

    /// Returns the block that starts at `address`, if it is listed: a block that is in use is. Constant
    /// time.
    #[inline]
    pub(crate) fn find(&self, address: DeviceAddress) -> Option<BlockId> {
        let is_it = |number| self[BlockId(number)].address == address;
        self.by_address
            .find(hash_of(address.get()), is_it)
            .map(BlockId)
    }

    /// Returns every block, in the order of their numbers. Linear time.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        let numbered = (1..).filter_map(NonZeroU32::new).zip(&self.blocks[1..]);
        let present = numbered.filter(|(_, block)| block.segment != SegmentId::NONE);
        present.map(|(number, block)| (BlockId(number), block))
    }

    /// Cuts a block after its first `size` bytes and returns the number of the new second part, which
    /// has the state of the first. Constant time.
    #[inline]
    pub(crate) fn split(&mut self, id: BlockId, size: Bytes) -> BlockId {
        let first = &mut self[id];
        debug_assert!(!size.is_zero() && size < first.size);
        let next = first.next;
        let rest = Block {
            address: first.address + size,
            size: first.size - size,
            previous: Some(id),
            is_listed: false,
            ..*first
        };
        first.size = size;
        let rest = self.insert(rest);
        self[id].next = Some(rest);
        if let Some(next) = next {
            self[next].previous = Some(rest);
        }
        rest
    }

    /// Joins a block with the one behind it, whose number becomes invalid. Constant time.
    ///
    /// # Panics
    ///
    /// If there is none behind it.
    #[inline]
    pub(crate) fn merge_with_next(&mut self, id: BlockId) {
        let next = self[id].next.expect("a block to merge with");
        debug_assert_eq!(self[id].end(), self[next].address);
        let (size, after) = (self[next].size, self[next].next);
        self.remove(next);
        self[id].size += size;
        self[id].next = after;
        if let Some(after) = after {
            self[after].previous = Some(id);
        }
    }
}

impl Index<BlockId> for BlockTable {
    type Output = Block;
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }
}

impl IndexMut<BlockId> for BlockTable {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.index()]
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a block's number for tests that need one and no table.
    pub(crate) fn block_id(number: u32) -> BlockId {
        BlockId(NonZeroU32::new(number).unwrap())
    }
}
