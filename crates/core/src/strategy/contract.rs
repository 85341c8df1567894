//! The traits that a strategy implements, and what it may rely on.

use crate::block::{Block, BlockId, BlockTable, SegmentId};
use crate::config::Config;
use crate::config::options::Options;
use crate::domain::{DomainId, PoolIndex};
use crate::driver::DriverError;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::snapshot::SegmentSnapshot;
use crate::units::{Bytes, DeviceAddress};

/// A checked request for a strategy, from [`Lane::allocate`](crate::Lane::allocate).
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The requested bytes; never zero.
    pub(crate) requested: Bytes,
    /// The size of its block: [`Strategy::block_size`].
    pub(crate) size: Bytes,
    /// The domain whose memory may serve it.
    pub(crate) domain: DomainId,
}

/// The memory that a strategy is asked to release.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Release<'r> {
    /// Memory that has been idle for long, before new memory is allocated. Only `caching` with a
    /// `garbage_collection_threshold` has such memory.
    Garbage,
    /// Just enough memory for a request to fit. Only `caching` with `max_split_size_mb` does that, and `tide` for a request
    /// that idle frames cannot serve.
    For(&'r Request),
    /// The same, after a wait for all work of the device. Only `tide` does that.
    ForAfterWait(&'r Request),
    /// Memory that has been idle since a time of [`Pages::now`](crate::pages::Pages::now) and that no queued work uses, the
    /// longest idle first: as many bytes at most. Waits for nothing. Only `tide` has such memory.
    Unused { since: u64, most: Bytes },
    /// Just enough idle memory for so many new bytes, the longest idle first. Waits for all work of the device, unless a
    /// capture forbids that. Only `tide` has such memory.
    Idle(Bytes),
    /// The strategy's state of a domain that has no memory. Another domain may get its number.
    Domain(DomainId),
    /// Every wholly free segment of a pool. The request, if any, would fail otherwise; `bfc` keeps the segments
    /// if releasing them cannot help it, or if its options say so.
    Pool(PoolIndex, Option<&'r Request>),
}

/// A policy for one device.
///
/// A block that a strategy returns has at least [`Request::size`] bytes and is in the block table. The strategy
/// does not return it again until [`Strategy::put`] puts it back. Memory is reused only within its domain.
pub(crate) trait Strategy {
    /// Returns the size of a request's block: the request rounded up.
    fn block_size(&self, requested: Bytes) -> Bytes;

    /// Returns the size of the new segment if no free block serves a request.
    fn segment_size(&self, request: &Request) -> Bytes;

    /// Returns the block in use that starts at `address`, if there is one. By default it is looked up in the
    /// block table; a strategy may compute it from the address instead. Constant time.
    #[inline(always)]
    fn find(&self, blocks: &BlockTable, address: DeviceAddress) -> Option<BlockId> {
        blocks.find(address)
    }

    /// Returns a free block that serves the request, or `None`. Never calls the driver.
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId>;

    /// Returns a block from new memory, or `None` if the driver or the limit refuses it.
    ///
    /// # Errors
    ///
    /// The driver's error, unless it is out of memory.
    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError>;

    /// Takes a freed block back. `block` is its entry in the table, but with the state from before: in the table
    /// it is already [`Free`](crate::block::BlockState::Free). The id may be invalid afterwards.
    ///
    /// Returns the segment that the caller must release at once, from a strategy that caches nothing. The block
    /// fills the segment and is unchanged.
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId>;

    /// Releases free memory to the driver, as much as `wanted` says. Returns whether that was enough.
    ///
    /// # Errors
    ///
    /// The driver's error. Memory released before it stays released, and the rest is unchanged.
    fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError>;

    /// Returns the size of the largest free block of a domain. Linear time is acceptable: this is called when
    /// memory has run out.
    fn largest_free(&self, heap: &Heap, domain: DomainId) -> Bytes;

    /// Returns the size of the largest request of a domain that could be served if the driver has `new` free bytes. By
    /// default without regard to the limit, as in PyTorch.
    fn largest_request(&self, heap: &Heap, domain: DomainId, new: Bytes) -> Bytes {
        self.largest_free(heap, domain).max(new)
    }

    /// Returns a description of the strategy's state for an out-of-memory error; empty if it has none.
    fn describe(&self, _heap: &Heap, _request: &Request) -> String {
        String::new()
    }

    /// Checks every invariant of the strategy. Returns its free bytes that are mapped and can be allocated.
    /// Linear time.
    ///
    /// # Errors
    ///
    /// A sentence that says which invariant is broken, and where.
    fn check(&self, heap: &Heap) -> Result<Bytes, String>;
}

/// A strategy that is created from its options.
pub(crate) trait Configured: Placement + Sized {
    /// The options of the strategy.
    type Options: Options;

    /// Returns the strategy with these options. The heap must be empty.
    fn new(options: &Self::Options, heap: &mut Heap) -> Self;

    /// Returns the size of a request's block at the start of `free` free bytes in a segment of `segment` bytes.
    /// `None` if it depends on more than that and the options.
    fn size_in(
        _options: &Self::Options,
        _requested: Bytes,
        _free: Bytes,
        _segment: Bytes,
    ) -> Option<Bytes> {
        None
    }
}

/// Operations at addresses that the caller names: for checkpoints, and blocks that are resized in place.
pub(crate) trait Placement: Strategy {
    /// Takes a free block of the request's domain that contains the request's bytes from `address` on. If it
    /// begins at `address`, it is cut to the request's size. If it begins before, it is cut to end at `address`,
    /// so that the next free block begins there.
    ///
    /// Returns `None` if there is no such block, or if it may not be split. A strategy with fixed block addresses
    /// returns a block only if it serves the request at `address` anyway. Never calls the driver.
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

    /// Merges the recently freed blocks of a domain, if the strategy delays that. Returns whether there were any.
    fn merge_recent(&mut self, _heap: &mut Heap, _domain: DomainId) -> bool {
        false
    }

    /// Takes a block that was allocated at the time of a checkpoint. Its segment was not released since, and no block in
    /// use overlaps it. [`Placement::merge_recent`] was called for its domain. `around` is the free block in which it
    /// begins, for strategies whose free memory is in blocks. Never calls the driver.
    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId;
}

/// Operations of a strategy that places blocks as PyTorch's allocator does. With them, it continues from any state of
/// that allocator.
pub(crate) trait PyTorchPlacement: Placement {
    /// Takes exactly the first `size` bytes of a free block, even if a request of that size would go elsewhere.
    /// Returns whether it did. `size` is a multiple of 512.
    fn take_at(&mut self, heap: &mut Heap, block: BlockId, size: Bytes) -> bool;

    /// Allocates a segment and splits it into the blocks of a segment's snapshot. Returns the blocks that are in
    /// use there, each with its requested bytes.
    ///
    /// # Errors
    ///
    /// The driver's error. Nothing has then been allocated.
    fn adopt<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        domain: DomainId,
        segment: &SegmentSnapshot,
    ) -> Result<Vec<(BlockId, Bytes)>, DriverError>;

    /// Returns a number that is lower for an older block; `None` if free blocks are not ordered by their age.
    fn block_number(&self, id: BlockId) -> Option<u64>;

    /// Makes the blocks at the addresses in `oldest` older than all others, in that order.
    fn order_blocks(&mut self, heap: &Heap, oldest: &[DeviceAddress]);

    /// Applies other options while the strategy runs. Returns `false` if they are another strategy's; nothing has then
    /// changed.
    fn reconfigure(&mut self, config: &Config, heap: &mut Heap) -> bool;
}

/// A block as it was at a checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointBlock {
    pub(crate) address: DeviceAddress,
    pub(crate) size: Bytes,
    pub(crate) segment: SegmentId,
    /// The segment's serial number. Another segment may have its id by now.
    pub(crate) serial: u64,
    /// The bytes in front of it in the segment.
    pub(crate) offset: Bytes,
    /// The pool and stream that it belonged to.
    pub(crate) domain: DomainId,
    /// Whether it was allocated.
    pub(crate) is_held: bool,
}
