//! Restores a private pool to an earlier state. PyTorch's CUDA graph trees need this: they replay one graph and
//! then capture another in the memory that the first left free.
//!
//! **Invariant:** a pool is restored completely or not at all. Every step that can fail comes before the first
//! block is freed, such as the check that every segment of the checkpoint is still held.

use super::{Allocation, Lane};
use crate::block::{Block, BlockId, BlockState};
use crate::domain::PoolIndex;
use crate::driver::Driver;
use crate::error::AllocError;
use crate::event::Action;
use crate::physical::Memory;
use crate::strategy::{CheckpointBlock, Placement};
use crate::units::{DeviceAddress, MempoolId};

/// The allocated blocks of a private pool at one moment, for [`Lane::restore`]. It holds no memory itself.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pool: MempoolId,
    /// Sorted by address.
    blocks: Vec<CheckpointBlock>,
}

/// The result of [`Lane::restore`], each list sorted by address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Restored {
    /// The blocks of the pool that are no longer allocated.
    pub freed: Vec<Allocation>,
    /// The blocks of the pool that are newly allocated.
    pub allocated: Vec<Allocation>,
}

impl<M: Memory> Lane<M> {
    /// Returns the current state of a pool. O(n log n) for n blocks.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist.
    pub fn checkpoint(&self, pool: MempoolId) -> Result<Checkpoint, AllocError> {
        let index = self.find_pool(pool)?;
        let in_pool = self.blocks_of_pool(index);
        let has_memory = in_pool.filter(|(_, block)| block.state != BlockState::Unmapped);
        let mut blocks: Vec<CheckpointBlock> = has_memory
            .map(|(id, block)| {
                let number = self.heap.blocks.segment(id);
                let segment = self.heap.segments.get(number);
                CheckpointBlock {
                    address: block.address,
                    size: block.size,
                    segment: number,
                    serial: segment.serial,
                    offset: block.address.offset_from(segment.address),
                    domain: block.domain,
                    is_held: block.state == BlockState::Allocated,
                }
            })
            .collect();
        blocks.sort_unstable_by_key(|block| block.address);
        debug_assert!(blocks.is_sorted_by(|one, next| one.address + one.size <= next.address));
        Ok(Checkpoint { pool, blocks })
    }

    /// Frees every allocated block of the checkpoint's pool, and allocates the blocks of the checkpoint again, with
    /// the same addresses and sizes. Their requested size then equals their size. Memory that the pool has reserved
    /// since stays in it, free. Waits for blocks that other streams use.
    ///
    /// O(n log n) for n blocks. With `pool` and `slab`, multiply by the free blocks or objects of one size.
    ///
    /// The checkpoint must be this allocator's.
    ///
    /// # Errors
    ///
    /// The allocated blocks are then unchanged:
    /// - [`AllocError::NoSuchPool`] if the pool does not exist any more.
    /// - [`AllocError::Paused`] if the pool is paused.
    /// - [`AllocError::NotRestorable`] if a block's memory was released to the driver; `direct` does so as soon as
    ///   a block is freed. Also if other streams use a block during a capture, in which nothing may wait for them.
    /// - [`AllocError::Driver`] when a wait fails.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Restored, AllocError> {
        let pool = self.find_pool(checkpoint.pool)?;
        self.refuse_paused(pool)?;
        self.end_waits(pool, checkpoint.pool)?;
        let wanted = self.restorable_blocks(checkpoint)?;
        self.end_uses(pool)?;
        // From here on nothing can fail.
        let freed = self.free_pool(pool, &wanted);
        for domain in self.heap.domains.of_pool(pool) {
            self.strategy.merge_recent(&mut self.heap, domain);
        }
        let (held, free) = (self.held_in_pool(pool), self.free_in_pool(pool));
        let mut allocated = Vec::new();
        // Segment by segment, as in PyTorch, because the peaks include what is allocated on the way.
        for wanted in wanted.chunk_by(|block, next| block.segment == next.segment) {
            let taken = self.take_again(&held, &free, wanted);
            for &(block, id) in &taken {
                self.hand_out(id, block.size);
            }
            for (block, id) in taken {
                if block.is_held {
                    allocated.push(self.allocation_of(id));
                } else {
                    self.free_unused(id);
                }
            }
        }
        debug_assert_eq!(self.held_in_pool(pool).len(), allocated.len());
        Ok(Restored { freed, allocated })
    }

    /// Returns the blocks of a pool, in no order.
    pub(super) fn blocks_of_pool(&self, pool: PoolIndex) -> impl Iterator<Item = (BlockId, Block)> {
        let blocks = self.heap.blocks.iter();
        blocks.filter(move |(_, block)| self.heap.domains.domain(block.domain).pool == pool)
    }

    /// Returns the allocated blocks of a pool, sorted by address.
    pub(super) fn held_in_pool(&self, pool: PoolIndex) -> Vec<BlockId> {
        let held = self
            .blocks_of_pool(pool)
            .filter(|(_, block)| block.state == BlockState::Allocated);
        let mut held: Vec<_> = held.map(|(id, block)| (block.address, id)).collect();
        held.sort_unstable();
        held.into_iter().map(|(_, id)| id).collect()
    }

    /// Waits until no block of a pool is pending. In a capture, in which nothing may wait, returns an error if another
    /// stream uses one of the pool's blocks.
    fn end_waits(&mut self, pool: PoolIndex, name: MempoolId) -> Result<(), AllocError> {
        let is_pending = |block: &Block| block.state == BlockState::Pending;
        let mut blocks = self.blocks_of_pool(pool).map(|(_, block)| block);
        if self.heap.captures > 0 {
            let used = blocks.find(|block| block.used_elsewhere || is_pending(block));
            let used = used.map(|block| AllocError::NotRestorable {
                pool: name,
                address: block.address,
                reason: "other streams use it, which cannot be waited for during a graph capture",
            });
            return used.map_or(Ok(()), Err);
        }
        if blocks.any(|block| is_pending(&block)) {
            drop(blocks);
            self.heap.stats.num_sync_all_streams += 1;
            self.reclaim_pending()?;
        }
        Ok(())
    }

    /// Waits until no other stream uses a pool's allocated blocks.
    fn end_uses(&mut self, pool: PoolIndex) -> Result<(), AllocError> {
        let held = self.held_in_pool(pool);
        for &id in &held {
            for stream in self.uses.streams_of(id) {
                self.memory
                    .physical_mut()
                    .driver_mut()
                    .synchronize_stream(stream)?;
            }
        }
        for id in held {
            self.uses.forget(id);
            self.heap.blocks.set_used_elsewhere(id, false);
        }
        Ok(())
    }

    /// Returns the blocks of a checkpoint to allocate, or an error if an allocated one has lost its memory.
    fn restorable_blocks(
        &self,
        checkpoint: &Checkpoint,
    ) -> Result<Vec<CheckpointBlock>, AllocError> {
        // PyTorch allocates and frees the free blocks, too. Peaks and events are then PyTorch's.
        let shows_free = self.strategy.as_pytorch().is_some();
        let mut wanted = Vec::new();
        for block in &checkpoint.blocks {
            let segment = self.heap.segments.find(block.segment, block.serial);
            let has_memory = segment.is_some()
                && (self.heap).has_memory(block.segment, block.offset, block.size, &self.memory);
            if block.is_held && !has_memory {
                return Err(AllocError::NotRestorable {
                    pool: checkpoint.pool,
                    address: block.address,
                    reason: "its memory went back to the driver since",
                });
            }
            if has_memory && (block.is_held || shows_free) {
                wanted.push(*block);
            }
        }
        Ok(wanted)
    }

    /// Frees every allocated block of a pool and returns them. A wanted block that fills its segment is only counted as
    /// freed, because some strategies would release its memory.
    fn free_pool(&mut self, pool: PoolIndex, wanted: &[CheckpointBlock]) -> Vec<Allocation> {
        let mut freed = Vec::new();
        for id in self.held_in_pool(pool) {
            freed.push(self.allocation_of(id));
            let Block { address, size, .. } = self.heap.blocks.get(id);
            let found = wanted.binary_search_by_key(&address, |block| block.address);
            let is_wanted = found.is_ok_and(|index| wanted[index].size == size);
            if is_wanted && self.heap.segments.get(self.heap.blocks.segment(id)).size == size {
                self.count_unused(id);
            } else {
                self.free_unused(id);
            }
        }
        freed
    }

    /// Returns the free blocks of a pool, sorted by address.
    fn free_in_pool(&self, pool: PoolIndex) -> Vec<(DeviceAddress, BlockId)> {
        let free = self
            .blocks_of_pool(pool)
            .filter(|(_, block)| block.state == BlockState::Free);
        let mut free: Vec<_> = free.map(|(id, block)| (block.address, id)).collect();
        free.sort_unstable();
        free
    }

    /// Takes the wanted blocks of a segment from the strategy, except those that are still allocated. `held` and `free`
    /// must be up to date for that segment.
    fn take_again<'a>(
        &mut self,
        held: &[BlockId],
        free: &[(DeviceAddress, BlockId)],
        wanted: &'a [CheckpointBlock],
    ) -> Vec<(&'a CheckpointBlock, BlockId)> {
        let mut last: Option<BlockId> = None;
        let mut taken = Vec::with_capacity(wanted.len());
        for block in wanted {
            let address_of = |&id: &BlockId| self.heap.blocks.get(id).address;
            if let Ok(index) = held.binary_search_by_key(&block.address, address_of) {
                taken.push((block, held[index]));
                continue;
            }
            // `free` lacks the rest that was split off behind the last block.
            let before = free.partition_point(|&(address, _)| address <= block.address);
            let known = before.checked_sub(1).map(|index| free[index]);
            let rest = last.and_then(|last| self.heap.blocks.get(last).next);
            let rest = rest.map(|id| (address_of(&id), id));
            let around = known
                .into_iter()
                .chain(rest.filter(|&(address, _)| address <= block.address))
                .max_by_key(|&(address, _)| address);
            let around = around.map(|(_, id)| id);
            let id = self.strategy.take_again(&mut self.heap, block, around);
            let taken_block = self.heap.blocks.get(id);
            debug_assert_eq!(taken_block.address, block.address);
            debug_assert_eq!(taken_block.size, block.size);
            last = Some(id);
            taken.push((block, id));
        }
        taken
    }

    /// Frees a block that no other stream uses. If its memory cannot be released to the driver now, the next
    /// request tries again.
    pub(super) fn free_unused(&mut self, id: BlockId) {
        let block = self.heap.blocks.make_free(id);
        let (address, size, requested) = (block.address, block.size, block.requested);
        let (kind, domain) = (block.kind, block.domain);
        self.heap
            .record(Action::FreeRequested, domain, address, requested);
        let before = self.heap.log.mark();
        match self.put(id, block) {
            Ok(()) => self.heap.stats.count_freed(kind, size, requested),
            Err(_) => {
                self.heap.log.undo(before);
                self.uses.wait_no_more(id);
                self.heap.blocks.set_state(id, BlockState::Pending);
                self.heap.stats.count_suspended(kind, size);
            }
        }
        if self.heap.is_oversize(size) {
            self.heap.stats.count_oversize_freed();
        }
    }

    /// Counts a block as freed. It is about to be allocated again.
    fn count_unused(&mut self, id: BlockId) {
        let block = self.heap.blocks.get(id);
        let (address, size, requested) = (block.address, block.size, block.requested);
        let (kind, domain) = (block.kind, block.domain);
        for action in [Action::FreeRequested, Action::FreeCompleted] {
            self.heap.record(action, domain, address, requested);
        }
        self.heap.stats.count_freed(kind, size, requested);
        if self.heap.is_oversize(size) {
            self.heap.stats.count_oversize_freed();
        }
    }
}
