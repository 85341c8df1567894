//! Which of several free blocks of a size is taken, which PyTorch changed twice.

use super::options::FreeBlockOrder;
use crate::block::{Block, BlockId};
use crate::segment::Heap;
use crate::strategy::free_blocks::FreeBlock;

/// Gives free blocks their rank among those of the same size.
#[derive(Debug)]
pub(super) struct Ranks {
    order: FreeBlockOrder,
    /// By [`BlockId::index`]: when the block began, for [`FreeBlockOrder::BlockAge`].
    begun: Vec<u64>,
    /// How many blocks ever began.
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

    /// Returns what stands for a free block in the set of its pool.
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

    /// Notes that a block begins: a whole segment, or a part for which PyTorch makes a new block.
    #[inline(always)]
    pub(super) fn begin(&mut self, id: BlockId) {
        if self.order == FreeBlockOrder::BlockAge {
            self.begin_now(id);
        }
    }

    /// Notes that a block was cut in two: PyTorch makes a new one of the first part, and goes on with the rest.
    #[inline(always)]
    pub(super) fn cut(&mut self, first: BlockId, rest: BlockId) {
        if self.order == FreeBlockOrder::BlockAge {
            self.hand_on(first, rest);
            self.begin_now(first);
        }
    }

    /// Notes that a block is now called `to`.
    #[inline(always)]
    pub(super) fn rename(&mut self, from: BlockId, to: BlockId) {
        if self.order == FreeBlockOrder::BlockAge {
            self.hand_on(from, to);
        }
    }

    /// Returns a number that is lower for a block that began earlier, where blocks are ranked by that.
    pub(super) fn number(&self, id: BlockId) -> Option<u64> {
        (self.order == FreeBlockOrder::BlockAge).then(|| self.begun[id.index()])
    }

    /// Has all the blocks that there are, none of which is in a list, have begun in this order.
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
