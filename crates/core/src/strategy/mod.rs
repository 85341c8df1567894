//! The policies that decide which bytes serve a request, and what is asked of each.
//!
//! A strategy decides; it does not account. Blocks, segments, figures and events are kept by
//! [`Heap`], and the order in which things are tried is that of
//! [`DeviceAllocator::allocate`](crate::DeviceAllocator::allocate).
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

mod bfc;
mod bit_set;
mod buddy;
mod caching;
mod direct;
mod free_blocks;
mod pool;
mod recent_blocks;
mod slab;

#[cfg(test)]
pub(crate) mod test_driver;

use crate::allocator::CheckpointBlock;
use crate::block::{Block, BlockId};
use crate::config::Config;
use crate::domain::{DomainId, PoolIndex};
use crate::driver::{Driver, DriverError};
use crate::figures::SizeKind;
use crate::segment::{Heap, SegmentId};
use crate::snapshot::SegmentSnapshot;
use crate::units::{Bytes, DeviceAddress};

/// Segments for many blocks, and for large ones, are multiples of this: the driver gives nothing less.
const SEGMENT_ROUNDING: Bytes = Bytes::mib(2);

/// What a strategy is asked to serve: from [`DeviceAllocator::request`](crate::DeviceAllocator::request).
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What the program asked for; never zero.
    pub(crate) requested: Bytes,
    /// The size of the block that it is to get: [`Strategy::block_size`].
    pub(crate) size: Bytes,
    /// Whose memory may serve it.
    pub(crate) domain: DomainId,
    /// A mark before which the memory that serves it must have been freed, where the program
    /// demands one; see [`DeviceAllocator::mark_frees`](crate::DeviceAllocator::mark_frees).
    pub(crate) freed_before: Option<u64>,
}

/// A policy for one device.
///
/// Blocks that a strategy returns are of [`Request::size`] or more, are in the block table, and are
/// no longer among those it may return again; it gets them back by [`Strategy::put`]. Memory is
/// reused only within its domain.
pub(crate) trait Strategy<D: Driver> {
    /// Returns the size of the block that a request is answered with: the request rounded up.
    fn block_size(&self, requested: Bytes) -> Bytes;

    /// Returns the size that the driver will be asked for when nothing free serves a request.
    fn segment_size(&self, request: &Request) -> Bytes;

    /// Returns a free block that serves the request, or `None`. Never calls the driver.
    fn take(&mut self, heap: &mut Heap<D>, request: &Request) -> Option<BlockId>;

    /// Returns a block from new memory, or `None` where the driver or the limit refuses it.
    ///
    /// # Errors
    ///
    /// What the driver said, unless it is out of memory.
    fn grow(
        &mut self,
        heap: &mut Heap<D>,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError>;

    /// Takes a block back. `block` is what the table says of it, but for its state, which there is already
    /// [`Free`](crate::block::BlockState::Free) and here still its holder's; its number may be invalid
    /// afterwards.
    ///
    /// # Errors
    ///
    /// What the driver said, from a strategy that gives memory back at once; the block is then still
    /// as it was.
    fn put(&mut self, heap: &mut Heap<D>, id: BlockId, block: Block) -> Result<(), DriverError>;

    /// Gives back, before new memory is taken, what has been idle for long. Most strategies do
    /// nothing.
    fn collect_garbage(
        &mut self,
        _heap: &mut Heap<D>,
        _request: &Request,
    ) -> Result<(), DriverError> {
        Ok(())
    }

    /// Gives back just enough free memory for the request to fit, and returns whether it did. Most
    /// strategies leave that to [`Strategy::release`].
    fn release_for(
        &mut self,
        _heap: &mut Heap<D>,
        _request: &Request,
    ) -> Result<bool, DriverError> {
        Ok(false)
    }

    /// Returns whether every wholly free segment is to go back before the request fails. Only BFC
    /// may be told not to.
    fn gains_by_release(&self, _heap: &Heap<D>, _request: &Request) -> bool {
        true
    }

    /// Gives back every wholly free segment of a pool.
    ///
    /// # Errors
    ///
    /// What the driver said; what went back before that is gone, the rest is as it was.
    fn release(&mut self, heap: &mut Heap<D>, pool: PoolIndex) -> Result<(), DriverError>;

    /// Forgets what it knows of a domain that has no memory: its number may be given to another. Most
    /// strategies know nothing of such a domain.
    fn forget_domain(&mut self, _domain: DomainId) {}

    /// Tries a request once more after everything that could go back did.
    fn retry(
        &mut self,
        heap: &mut Heap<D>,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        match self.take(heap, request) {
            Some(block) => Ok(Some(block)),
            None => self.grow(heap, request),
        }
    }

    /// Returns whether what a wait for other streams made free serves a request before it fails. Only `caching` may be
    /// told not to.
    fn searches_after_wait(&self) -> bool {
        true
    }

    /// Takes a free block cut to exactly `size` bytes, wherever a request of that size would go, and returns
    /// whether it did. The size is a multiple of 512. A strategy whose blocks have sizes of their own returns
    /// `false`.
    fn take_at(&mut self, _heap: &mut Heap<D>, _block: BlockId, _size: Bytes) -> bool {
        false
    }

    /// Takes a free block of the request's domain that lies around its bytes from `address` on. It is cut down
    /// to the request, or, where it begins before the address, to what lies before: then the next one begins
    /// there. `None` where there is no such block, or none that may be cut. From a strategy whose blocks have
    /// places of their own, only where the request would go by itself. Never calls the driver.
    ///
    /// # Errors
    ///
    /// As [`Strategy::put`], of what was found elsewhere.
    fn take_around(
        &mut self,
        heap: &mut Heap<D>,
        request: &Request,
        address: DeviceAddress,
    ) -> Result<Option<BlockId>, DriverError> {
        let Some(found) = self.take(heap, request) else {
            return Ok(None);
        };
        let block = heap.blocks.get(found);
        if block.address == address {
            return Ok(Some(found));
        }
        self.put(heap, found, block)?;
        Ok(None)
    }

    /// Takes a block that this strategy had handed out at the time of a checkpoint. Its segment has been
    /// held since, and nothing in use overlaps it. `around` is the free block in which it begins, for
    /// strategies whose free space is in blocks. Never calls the driver.
    fn take_again(
        &mut self,
        heap: &mut Heap<D>,
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
    fn adopt(
        &mut self,
        _heap: &mut Heap<D>,
        _domain: DomainId,
        _segment: &SegmentSnapshot,
    ) -> Result<Option<Vec<(BlockId, Bytes)>>, DriverError> {
        Ok(None)
    }

    /// Returns the size of the largest free block of a domain. Linear time is fine: this is asked
    /// when memory has run out.
    fn largest_free(&self, heap: &Heap<D>, domain: DomainId) -> Bytes;

    /// Returns the bytes of the segments that are neither in active blocks nor free for any request:
    /// what the strategy's layout cannot use. Linear time is fine.
    fn unusable_bytes(&self, _heap: &Heap<D>) -> Bytes {
        Bytes::ZERO
    }

    /// Returns a description of the strategy's state for an out-of-memory error, or nothing.
    fn describe(&self, _heap: &Heap<D>, _request: &Request) -> String {
        String::new()
    }

    /// Checks everything that the strategy promises itself, and returns the bytes that it holds free,
    /// mapped and ready to be handed out. Linear time.
    ///
    /// # Errors
    ///
    /// A sentence that says which promise is broken, and where.
    fn check(&self, heap: &Heap<D>) -> Result<Bytes, String>;
}

/// Returns how long a block was; see [`Config::block_size`].
pub(crate) fn block_size(
    config: &Config,
    requested: Bytes,
    free: Bytes,
    segment: Bytes,
) -> Option<Bytes> {
    match config {
        Config::Direct => Some(direct::rounded(requested)),
        Config::Pool(_) => Some(pool::rounded(requested)),
        Config::Buddy(options) => Some(buddy::size_in(options, requested, segment)),
        Config::Slab(options) => Some(slab::size_in(options, requested, segment)),
        Config::Bfc(options) => bfc::size_in(options, requested, free),
        Config::Caching(_) => None,
    }
}

/// The strategy in use: a closed set, chosen at run time.
///
/// No variant is boxed: one exists for each device, and a box would cost every request a load. Nor is the
/// variant hidden in a field's unused values, which every dispatch would have to decode.
#[derive(Debug)]
#[repr(u8)]
pub(crate) enum ActiveStrategy {
    Direct(direct::Direct),
    Pool(pool::Pool),
    Buddy(buddy::Buddy),
    Slab(slab::Slabs),
    Bfc(bfc::Bfc),
    Caching(caching::Caching),
}

/// Calls a method of whichever strategy is in use.
macro_rules! dispatch {
    ($active:expr, $strategy:ident => $call:expr) => {
        match $active {
            ActiveStrategy::Direct($strategy) => $call,
            ActiveStrategy::Pool($strategy) => $call,
            ActiveStrategy::Buddy($strategy) => $call,
            ActiveStrategy::Slab($strategy) => $call,
            ActiveStrategy::Bfc($strategy) => $call,
            ActiveStrategy::Caching($strategy) => $call,
        }
    };
}

impl ActiveStrategy {
    /// Returns the strategy that a configuration asks for, and tells the heap what it should know of
    /// it: the one option that `torch.cuda.memory_stats` reports, and who asks for blocks by address.
    pub(crate) fn new<D>(config: &Config, heap: &mut Heap<D>) -> ActiveStrategy {
        match config {
            Config::Direct => ActiveStrategy::Direct(direct::Direct),
            Config::Pool(config) => ActiveStrategy::Pool(pool::Pool::new(config)),
            Config::Buddy(config) => ActiveStrategy::Buddy(buddy::Buddy::new(config)),
            Config::Slab(config) => ActiveStrategy::Slab(slab::Slabs::new(config)),
            Config::Bfc(config) => ActiveStrategy::Bfc(bfc::Bfc::new(config.clone())),
            Config::Caching(config) => {
                heap.set_max_split_size(config.max_split_size);
                heap.blocks.list_when_handed_out();
                ActiveStrategy::Caching(caching::Caching::new(config.clone()))
            }
        }
    }

    /// Takes over other options while it runs, and returns whether it did: only `caching` can, and only
    /// its own.
    pub(crate) fn reconfigure<D>(&mut self, config: &Config, heap: &mut Heap<D>) -> bool {
        match (self, config) {
            (ActiveStrategy::Caching(caching), Config::Caching(config)) => {
                caching.reconfigure(config.clone());
                heap.set_max_split_size(config.max_split_size);
                true
            }
            _ => false,
        }
    }

    /// Returns the strategy if it is BFC, which alone has a safe frontier.
    pub(crate) fn as_bfc_mut(&mut self) -> Option<&mut bfc::Bfc> {
        match self {
            ActiveStrategy::Bfc(bfc) => Some(bfc),
            _ => None,
        }
    }

    /// Returns the strategy if it is PyTorch's, which alone may take blocks by their age.
    pub(crate) fn as_caching(&self) -> Option<&caching::Caching> {
        match self {
            ActiveStrategy::Caching(caching) => Some(caching),
            _ => None,
        }
    }

    /// Returns whether new segments grow by mapping memory.
    pub(crate) fn has_expandable_segments(&self) -> bool {
        let caching = self.as_caching();
        caching.is_some_and(caching::Caching::has_expandable_segments)
    }

    /// Returns how long a request is to be tried again before it fails, in milliseconds, if at all.
    pub(crate) fn retry_wait_ms(&self) -> Option<u64> {
        match self {
            ActiveStrategy::Bfc(bfc) => bfc.retry_wait_ms(),
            _ => None,
        }
    }
}

impl<D: Driver> Strategy<D> for ActiveStrategy {
    #[inline(always)]
    fn block_size(&self, requested: Bytes) -> Bytes {
        dispatch!(self, strategy => Strategy::<D>::block_size(strategy, requested))
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        dispatch!(self, strategy => Strategy::<D>::segment_size(strategy, request))
    }

    #[inline(always)]
    fn take(&mut self, heap: &mut Heap<D>, request: &Request) -> Option<BlockId> {
        dispatch!(self, strategy => strategy.take(heap, request))
    }

    fn grow(
        &mut self,
        heap: &mut Heap<D>,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        dispatch!(self, strategy => strategy.grow(heap, request))
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap<D>, id: BlockId, block: Block) -> Result<(), DriverError> {
        dispatch!(self, strategy => strategy.put(heap, id, block))
    }

    fn collect_garbage(
        &mut self,
        heap: &mut Heap<D>,
        request: &Request,
    ) -> Result<(), DriverError> {
        dispatch!(self, strategy => strategy.collect_garbage(heap, request))
    }

    fn release_for(&mut self, heap: &mut Heap<D>, request: &Request) -> Result<bool, DriverError> {
        dispatch!(self, strategy => strategy.release_for(heap, request))
    }

    fn gains_by_release(&self, heap: &Heap<D>, request: &Request) -> bool {
        dispatch!(self, strategy => strategy.gains_by_release(heap, request))
    }

    fn release(&mut self, heap: &mut Heap<D>, pool: PoolIndex) -> Result<(), DriverError> {
        dispatch!(self, strategy => strategy.release(heap, pool))
    }

    fn forget_domain(&mut self, domain: DomainId) {
        dispatch!(self, strategy => Strategy::<D>::forget_domain(strategy, domain));
    }

    fn retry(
        &mut self,
        heap: &mut Heap<D>,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        dispatch!(self, strategy => strategy.retry(heap, request))
    }

    fn searches_after_wait(&self) -> bool {
        dispatch!(self, strategy => Strategy::<D>::searches_after_wait(strategy))
    }

    fn take_at(&mut self, heap: &mut Heap<D>, block: BlockId, size: Bytes) -> bool {
        dispatch!(self, strategy => strategy.take_at(heap, block, size))
    }

    fn take_around(
        &mut self,
        heap: &mut Heap<D>,
        request: &Request,
        address: DeviceAddress,
    ) -> Result<Option<BlockId>, DriverError> {
        dispatch!(self, strategy => strategy.take_around(heap, request, address))
    }

    fn take_again(
        &mut self,
        heap: &mut Heap<D>,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId {
        dispatch!(self, strategy => strategy.take_again(heap, wanted, around))
    }

    fn restores_free_blocks(&self) -> bool {
        dispatch!(self, strategy => Strategy::<D>::restores_free_blocks(strategy))
    }

    fn adopt(
        &mut self,
        heap: &mut Heap<D>,
        domain: DomainId,
        segment: &SegmentSnapshot,
    ) -> Result<Option<Vec<(BlockId, Bytes)>>, DriverError> {
        dispatch!(self, strategy => strategy.adopt(heap, domain, segment))
    }

    fn largest_free(&self, heap: &Heap<D>, domain: DomainId) -> Bytes {
        dispatch!(self, strategy => strategy.largest_free(heap, domain))
    }

    fn unusable_bytes(&self, heap: &Heap<D>) -> Bytes {
        dispatch!(self, strategy => strategy.unusable_bytes(heap))
    }

    fn describe(&self, heap: &Heap<D>, request: &Request) -> String {
        dispatch!(self, strategy => strategy.describe(heap, request))
    }

    fn check(&self, heap: &Heap<D>) -> Result<Bytes, String> {
        dispatch!(self, strategy => strategy.check(heap))
    }
}

/// Returns `None` for a driver that is out of memory, which is an answer and not an error.
fn unless_out_of_memory<T>(result: Result<T, DriverError>) -> Result<Option<T>, DriverError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(DriverError::OutOfMemory) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes a segment for many blocks, of `most` bytes where that much can be had, but at least `least`;
/// `None` where the driver or the limit refuses even that. It counts as large.
///
/// More than half of what is left is taken only for a request that needs it, because other streams
/// and other libraries of the process use the same device. Each further attempt is for half of the
/// one before.
///
/// # Errors
///
/// What the driver said, unless it is out of memory.
fn allocate_shared_segment<D: Driver>(
    heap: &mut Heap<D>,
    domain: DomainId,
    least: Bytes,
    most: Bytes,
) -> Result<Option<SegmentId>, DriverError> {
    let half = |size: Bytes| {
        Bytes(size.get() / 2)
            .round_down(SEGMENT_ROUNDING)
            .max(least)
    };
    let in_limit = heap
        .limit
        .unwrap_or(Bytes(u64::MAX))
        .saturating_sub(heap.limited());
    let left = heap.driver.memory_info()?.free.min(in_limit);
    let mut size = most.max(least);
    while size > least && size > Bytes(left.get() / 2) {
        size = half(size);
    }
    loop {
        let segment = heap.allocate_segment(domain, size, SizeKind::Large);
        match unless_out_of_memory(segment)? {
            None if size > least => size = half(size),
            answer => return Ok(answer),
        }
    }
}

/// Returns which of PyTorch's two size pools a size belongs to: small up to 1 MiB.
fn kind_of(size: Bytes) -> SizeKind {
    if size <= Bytes::mib(1) {
        SizeKind::Small
    } else {
        SizeKind::Large
    }
}
