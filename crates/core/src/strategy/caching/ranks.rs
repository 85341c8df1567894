//! The order among free blocks of the same size. PyTorch changed it twice.

use super::options::FreeBlockOrder;
use crate::block::{Block, BlockId};
use crate::segment::Heap;
use crate::strategy::free_blocks::FreeBlock;

/// The ranks of free blocks among those of the same size.
#[derive(Debug)]
pub(super) struct Ranks {
    order: FreeBlockOrder,
    /// By [`BlockId::index`]: the number of the block in the order of their creation, for
    /// [`FreeBlockOrder::BlockAge`].
    begun: Vec<u64>,
    /// How many blocks were ever created.
    count: u64,
}

impl Ranks {
    pub(super) fn new(order: FreeBlockOrder) -> Ranks {
        Ranks {
            order,
            begun: Vec::new(),
            count: 0,
        }
    }

    /// Returns the entry of a free block in the set of its size pool.
    #[inline(always)]
    pub(super) fn ranked(&self, heap: &Heap, id: BlockId, block: &Block) -> FreeBlock {
        let by_address = FreeBlock::of(id, block);
        if self.order == FreeBlockOrder::Address {
            return by_address;
        }
        FreeBlock {
            rank: self.rank_by_age(heap, id),
            ..by_address
        }
    }

    #[inline(never)]
    fn rank_by_age(&self, heap: &Heap, id: BlockId) -> u64 {
        match self.order {
            FreeBlockOrder::BlockAge => {
                debug_assert_ne!(self.begun[id.index()], 0, "a block has begun");
                self.begun[id.index()]
            }
            FreeBlockOrder::Address | FreeBlockOrder::SegmentAge => {
                let segment = heap.segments.get(heap.blocks.segment(id));
                segment.rank_of(heap.blocks.get(id).address)
            }
        }
    }

    /// Records that a block was created: a whole segment, or a part for which PyTorch creates a block.
    #[inline(always)]
    pub(super) fn begin(&mut self, id: BlockId) {
        if self.order == FreeBlockOrder::BlockAge {
            self.begin_now(id);
        }
    }

    /// Records that a block was split. PyTorch creates a block for the first part; the rest is the old block.
    #[inline(always)]
    pub(super) fn cut(&mut self, first: BlockId, rest: BlockId) {
        if self.order == FreeBlockOrder::BlockAge {
            self.hand_on(first, rest);
            self.begin_now(first);
        }
    }

    /// Records that a block's id changed to `to`.
    #[inline(always)]
    pub(super) fn rename(&mut self, from: BlockId, to: BlockId) {
        if self.order == FreeBlockOrder::BlockAge {
            self.hand_on(from, to);
        }
    }

    /// Returns a number that is lower for an older block; `None` if blocks are not ranked by their age.
    pub(super) fn number(&self, id: BlockId) -> Option<u64> {
        (self.order == FreeBlockOrder::BlockAge).then(|| self.begun[id.index()])
    }

    /// Makes this the order in which blocks were created. `blocks` has all blocks; none of the free ones may be
    /// listed.
    pub(super) fn renumber(&mut self, blocks: impl Iterator<Item = BlockId>) {
        for (number, id) in (1..).zip(blocks) {
            *self.place_of(id) = number;
        }
    }

    #[inline(never)]
    fn begin_now(&mut self, id: BlockId) {
        self.count += 1;
        *self.place_of(id) = self.count;
    }

    #[inline(never)]
    fn hand_on(&mut self, from: BlockId, to: BlockId) {
        debug_assert_ne!(from, to);
        *self.place_of(to) = self.begun[from.index()];
    }

    fn place_of(&mut self, id: BlockId) -> &mut u64 {
        if id.index() >= self.begun.len() {
            self.begun.resize(id.index() + 1, 0);
        }
        &mut self.begun[id.index()]
    }
}
