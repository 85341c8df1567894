//! What is asked of a strategy, and what it may rely on.

use crate::block::{Block, BlockId, BlockTable, SegmentId};
use crate::config::options::Options;
use crate::domain::{DomainId, PoolIndex};
use crate::driver::DriverError;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::snapshot::SegmentSnapshot;
use crate::units::{Bytes, DeviceAddress};

/// What a strategy is asked to serve: from [`Lane::request`](crate::Lane::request).
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What the program asked for; never zero.
    pub(crate) requested: Bytes,
    /// The size of the block that it is to get: [`Strategy::block_size`].
    pub(crate) size: Bytes,
    /// Whose memory may serve it.
    pub(crate) domain: DomainId,
}

/// What a strategy is to release.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Release<'r> {
    /// What has been idle for long, before new memory is taken. Only `caching` with a threshold has such memory.
    Idle,
    /// Just enough for a request to fit. Only `caching` with `max_split_size_mb` does that.
    For(&'r Request),
    /// What the strategy knows of a domain that has no memory: the domain's number may be given to another.
    Domain(DomainId),
    /// Every wholly free segment of a pool. BFC may be told to keep them where they do not help a request that would
    /// fail otherwise.
    Pool(PoolIndex, Option<&'r Request>),
}

/// A policy for one device.
///
/// Blocks that a strategy returns are of [`Request::size`] or more, are in the block table, and are
/// no longer among those it may return again; it gets them back by [`Strategy::put`]. Memory is
/// reused only within its domain.
pub(crate) trait Strategy {
    /// Returns the size of the block that a request is answered with: the request rounded up.
    fn block_size(&self, requested: Bytes) -> Bytes;

    /// Returns the size that the driver will be asked for when nothing free serves a request.
    fn segment_size(&self, request: &Request) -> Bytes;

    /// Returns the block in use that starts at `address`, if there is one. A strategy whose addresses say which block
    /// they are in looks it up by arithmetic; others have it found in the table's map. Constant time.
    #[inline(always)]
    fn find(&self, blocks: &BlockTable, address: DeviceAddress) -> Option<BlockId> {
        blocks.find(address)
    }

    /// Returns a free block that serves the request, or `None`. Never calls the driver.
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId>;

    /// Returns a block from new memory, or `None` where the driver or the limit refuses it.
    ///
    /// # Errors
    ///
    /// What the driver said, unless it is out of memory.
    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError>;

    /// Takes a block back. `block` is what the table says of it, but for its state, which there is already
    /// [`Free`](crate::block::BlockState::Free) and here still its holder's; its number may be invalid
    /// afterwards.
    ///
    /// Returns the segment that goes back to the driver at once, from a strategy that keeps nothing: the block fills
    /// it, and is as it was.
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId>;

    /// Releases free memory to the driver, as much as `wanted` says, and returns whether enough went for what it names.
    ///
    /// # Errors
    ///
    /// What the driver said; what went back before that is gone, the rest is as it was.
    fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError>;

    /// Returns the size of the largest free block of a domain. Linear time is fine: this is asked
    /// when memory has run out.
    fn largest_free(&self, heap: &Heap, domain: DomainId) -> Bytes;

    /// Returns a description of the strategy's state for an out-of-memory error, or nothing.
    fn describe(&self, _heap: &Heap, _request: &Request) -> String {
        String::new()
    }

    /// Checks everything that the strategy promises itself, and returns the bytes that it holds free,
    /// mapped and ready to be handed out. Linear time.
    ///
    /// # Errors
    ///
    /// A sentence that says which promise is broken, and where.
    fn check(&self, heap: &Heap) -> Result<Bytes, String>;
}

/// A strategy that is made from its options.
pub(crate) trait Configured: Placement + Sized {
    /// What can be set.
    type Options: Options;

    /// Returns the strategy with these options, on a heap that is empty.
    fn new(options: &Self::Options, heap: &mut Heap) -> Self;

    /// Returns how long the block of a request was at the start of `free` bytes in a segment of `segment` bytes, or
    /// `None` where more than the options decides that.
    fn size_in(
        _options: &Self::Options,
        _requested: Bytes,
        _free: Bytes,
        _segment: Bytes,
    ) -> Option<Bytes> {
        None
    }
}

/// Blocks at addresses that the caller names: checkpoints, recordings, and requests that resize where they are.
pub(crate) trait Placement: Strategy {
    /// Takes a free block cut to exactly `size` bytes, wherever a request of that size would go, and returns
    /// whether it did. The size is a multiple of 512. A strategy whose blocks have sizes of their own returns
    /// `false`.
    fn take_at(&mut self, _heap: &mut Heap, _block: BlockId, _size: Bytes) -> bool {
        false
    }

    /// Takes a free block of the request's domain that lies around its bytes from `address` on. It is cut down
    /// to the request, or, where it begins before the address, to what lies before: then the next one begins
    /// there. `None` where there is no such block, or none that may be cut. From a strategy whose blocks have
    /// places of their own, only where the request would go by itself. Never calls the driver.
    fn take_around(
        &mut self,
        heap: &mut Heap,
        request: &Request,
        address: DeviceAddress,
    ) -> Option<BlockId> {
        let found = self.take(heap, request)?;
        let block = heap.blocks.get(found);
        if block.address == address {
            return Some(found);
        }
        let released = self.put(heap, found, block);
        debug_assert!(
            released.is_none(),
            "a strategy that keeps nothing finds nothing"
        );
        None
    }

    /// Takes a block that this strategy had handed out at the time of a checkpoint. Its segment has been
    /// held since, and nothing in use overlaps it. `around` is the free block in which it begins, for
    /// strategies whose free space is in blocks. Never calls the driver.
    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId;

    /// Returns whether a restored pool's free blocks are handed out too, and taken back, as PyTorch does
    /// it: peaks and events are then PyTorch's.
    fn restores_free_blocks(&self) -> bool {
        false
    }

    /// Takes a segment from the driver and cuts it into blocks as a picture of one shows it, and
    /// returns the blocks that are in use there, each with what was asked for. `None` from a strategy
    /// that lays segments out in its own way, which then has done nothing.
    ///
    /// # Errors
    ///
    /// What the driver said; nothing has then been taken.
    fn adopt<M: Memory>(
        &mut self,
        _heap: &mut Heap,
        _memory: &mut M,
        _domain: DomainId,
        _segment: &SegmentSnapshot,
    ) -> Result<Option<Vec<(BlockId, Bytes)>>, DriverError> {
        Ok(None)
    }

    /// Returns when a block began, beside others of this strategy; `None` where that decides nothing.
    fn block_number(&self, _id: BlockId) -> Option<u64> {
        None
    }

    /// Makes the blocks that begin at these addresses the oldest, in this order. Most strategies have no ages.
    fn order_blocks(&mut self, _heap: &Heap, _oldest: &[DeviceAddress]) {}
}

/// A block as it was at a checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointBlock {
    pub(crate) address: DeviceAddress,
    pub(crate) size: Bytes,
    pub(crate) segment: SegmentId,
    /// Of the segment, whose number another may have by now.
    pub(crate) serial: u64,
    /// What lies in front of it in the segment.
    pub(crate) offset: Bytes,
    /// The pool and stream that it belonged to.
    pub(crate) domain: DomainId,
    /// Whether the program held it.
    pub(crate) is_held: bool,
}
