//! A lane: the memory of one or more streams of a device, and every step of serving their requests.
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

mod addresses;
mod captures;
mod checkpoint;
mod inspect;
mod pools;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::capture::CaptureOrder;
use crate::config::Config;
use crate::domain::{DomainId, PoolIndex};
use crate::driver::{Driver, DriverError, MemoryInfo};
use crate::error::AllocError;
use crate::event::Action;
use crate::number_table::SearchHint;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::snapshot::{BlockSnapshot, SegmentSnapshot};
pub use crate::strategy::Request;
use crate::strategy::{ActiveStrategy, PyTorchPlacement, Release, Strategy};
use crate::stream::StreamUses;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// Serves the requests of some streams of a device with one strategy.
///
/// Streams never share free memory, so a device can have several lanes. Outside private pools, a stream always uses the
/// same lane. The lanes' common state is in [`Device`](crate::Device). All private pools and their routes are in the
/// first lane.
///
/// A lane has no lock. A caller that shares it between threads locks it.
#[derive(Debug)]
pub struct Lane<M> {
    pub(crate) heap: Heap,
    pub(crate) memory: M,
    pub(crate) strategy: ActiveStrategy,
    pub(crate) uses: StreamUses,
    pub(crate) device: u32,
    /// The routes to private pools. The last one that accepts a stream decides.
    routes: Vec<Route>,
    /// The current strategy and options. Boxed, because a hit does not read them and they take two cache lines.
    pub(crate) config: Box<Config>,
    order: CaptureOrder,
    /// The addresses that [`Lane::watch`] watches.
    watched: HashSet<DeviceAddress>,
}

pub use checkpoint::{Checkpoint, Restored};
pub use inspect::LaneNews;
pub use pools::{KeptPool, Pending, PoolSetting, PoolState, RouteOrder};

/// A private pool, and the streams whose requests it serves.
struct Route {
    pool: PoolIndex,
    accepts: Box<dyn Fn(Stream) -> bool + Send>,
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Route")
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

/// An allocated block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocation {
    /// The address of its first byte.
    pub address: DeviceAddress,
    /// Its size, rounding included.
    pub size: Bytes,
    /// The requested size.
    pub requested: Bytes,
    /// Its stream.
    pub stream: Stream,
    /// Its pool.
    pub pool: MempoolId,
    /// Whether it lies in an expandable segment.
    pub is_expandable: bool,
    /// Whether [`Lane::watch`] watches it.
    pub is_watched: bool,
}

/// The result of a lane's search for a free block.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    /// The address of a block, which is now allocated.
    Block(DeviceAddress),
    /// No free block. [`Device::serve_miss`](crate::Device::serve_miss) serves the request if no other call has used
    /// the lane since.
    Nothing(Request),
}

impl<M: Memory> Lane<M> {
    /// Returns a lane without memory. `number` is its number on the device. `device` is the device's number in
    /// messages. The lane publishes in `hint` the address at which the search for a block begins, now and at every
    /// change.
    pub fn new(
        memory: M,
        number: u8,
        device: u32,
        config: &Config,
        hint: Option<&'static SearchHint>,
    ) -> Lane<M> {
        let mut heap = Heap::new(number);
        if let Some(hint) = hint {
            heap.blocks.keep_search_hint(hint);
        }
        let strategy = ActiveStrategy::new(config, &mut heap);
        Lane {
            heap,
            memory,
            strategy,
            uses: StreamUses::default(),
            device,
            routes: Vec::new(),
            config: Box::new(config.clone()),
            order: CaptureOrder::default(),
            watched: HashSet::new(),
        }
    }

    /// Returns a free block for a request of one or more bytes, or the request. Gets no memory from the driver.
    ///
    /// # Errors
    ///
    /// - [`AllocError::TooLarge`] above [`Bytes::REQUEST_MAX`].
    /// - [`AllocError::Paused`] if the pool is paused.
    /// - [`AllocError::TooManyStreams`] if 65,536 streams have memory already.
    /// - [`AllocError::Driver`] when the device fails.
    #[inline(always)]
    pub fn allocate(&mut self, requested: Bytes, stream: Stream) -> Result<Found, AllocError> {
        let request = self.request(requested, stream)?;
        Ok(self.find(request))
    }

    /// Allocates like [`Lane::allocate`], but from `pool`, whatever routes are set. Creates the pool if it does not
    /// exist. Its use count is then at least 1. An error undoes this.
    pub(crate) fn allocate_in(
        &mut self,
        pool: MempoolId,
        requested: Bytes,
        stream: Stream,
    ) -> Result<Found, AllocError> {
        // Otherwise the pool could be removed while its own request releases memory.
        let (index, held_before) = self.hold_pool(pool);
        match self.prepare(index, requested, stream) {
            Ok(request) => Ok(self.find(request)),
            Err(error) => {
                self.undo_hold(index, held_before);
                Err(error)
            }
        }
    }

    /// Returns a request of a stream, checked and rounded.
    #[inline(always)]
    fn request(&mut self, requested: Bytes, stream: Stream) -> Result<Request, AllocError> {
        let pool = self.route(stream);
        self.prepare(pool, requested, stream)
    }

    /// Returns a free block for a request, or the request.
    #[inline(always)]
    fn find(&mut self, request: Request) -> Found {
        match self.take(&request) {
            Some(address) => Found::Block(address),
            None => Found::Nothing(request),
        }
    }

    /// Checks and rounds a request before the search.
    #[inline(always)]
    fn prepare(
        &mut self,
        pool: PoolIndex,
        requested: Bytes,
        stream: Stream,
    ) -> Result<Request, AllocError> {
        if requested > Bytes::REQUEST_MAX {
            return Err(AllocError::TooLarge { requested });
        }
        if pool != PoolIndex::DEFAULT {
            self.refuse_paused(pool)?;
        }
        // Blocks that other streams are done with are free from here on.
        if self.heap.stats.waiting_blocks() > 0 {
            self.reclaim_for(stream)?;
        }
        let size = Strategy::block_size(&self.strategy, requested);
        debug_assert!(size >= requested, "a block has what is asked for");
        let domain = self.domain_of(pool, stream)?;
        Ok(Request {
            requested,
            size,
            domain,
        })
    }

    /// Returns the domain of a pool and a stream, created if needed.
    #[inline(always)]
    fn domain_of(&mut self, pool: PoolIndex, stream: Stream) -> Result<DomainId, AllocError> {
        match self.heap.domains.find_or_insert(pool, stream) {
            Some(domain) => Ok(domain),
            None => self.domain_after_release(pool, stream),
        }
    }

    /// Returns a new domain in place of others, mostly of destroyed streams. Removes them in this order: pools that
    /// nothing holds, domains without memory, domains whose memory is only cached.
    #[cold]
    fn domain_after_release(
        &mut self,
        pool: PoolIndex,
        stream: Stream,
    ) -> Result<DomainId, AllocError> {
        self.release_unused_pools(None)?;
        self.end_domains_without_memory()?;
        if let Some(domain) = self.heap.domains.find_or_insert(pool, stream) {
            return Ok(domain);
        }
        // During a capture, no more memory may be released.
        if self.heap.captures == 0 {
            self.release_cached(None)?;
            self.end_domains_without_memory()?;
        }
        let domain = self.heap.domains.find_or_insert(pool, stream);
        domain.ok_or(AllocError::TooManyStreams)
    }

    /// Removes every domain without memory, so that new domains can reuse its number.
    fn end_domains_without_memory(&mut self) -> Result<(), DriverError> {
        let ended = self.heap.domains_without_memory(&self.memory);
        if ended.is_empty() {
            return Ok(());
        }
        debug_assert!(!ended.contains(&DomainId::DEFAULT));
        for &domain in &ended {
            self.release(Release::Domain(domain))?;
        }
        self.heap.log.recent.forget();
        self.heap.domains.remove(&ended);
        Ok(())
    }

    /// Returns a free block for a request, if there is one. Never calls the driver.
    #[inline(always)]
    pub(crate) fn take(&mut self, request: &Request) -> Option<DeviceAddress> {
        let block = self.strategy.take(&mut self.heap, request)?;
        debug_assert!(self.serves(block, request));
        Some(self.hand_out(block, request.requested))
    }

    /// Returns new memory, or `None` if the driver or the limit refuses it.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device fails for another reason than lack of memory.
    pub(crate) fn grow(&mut self, request: &Request) -> Result<Option<DeviceAddress>, DriverError> {
        let block = self
            .strategy
            .grow(&mut self.heap, &mut self.memory, request)?;
        Ok(block.map(|block| self.hand_out(block, request.requested)))
    }

    /// Releases free memory to the driver as `wanted` says. Returns whether that was enough.
    ///
    /// # Errors
    ///
    /// The driver's error. Memory released before it stays released.
    pub(crate) fn release(&mut self, wanted: Release<'_>) -> Result<bool, DriverError> {
        self.strategy
            .release(&mut self.heap, &mut self.memory, wanted)
    }

    /// Returns how much memory the device has. One driver call.
    pub(crate) fn memory_info(&mut self) -> Result<MemoryInfo, DriverError> {
        self.memory.physical_mut().driver_mut().memory_info()
    }

    /// Returns how much memory a miss asks the driver for.
    pub(crate) fn segment_size(&self, request: &Request) -> Bytes {
        Strategy::segment_size(&self.strategy, request)
    }

    /// Returns the stream of a request to the default pool, or `None` for a private pool.
    pub(crate) fn stream_of_default_pool(&self, request: &Request) -> Option<Stream> {
        let domain = self.heap.domains.domain(request.domain);
        (domain.pool == PoolIndex::DEFAULT).then_some(domain.stream)
    }

    /// Takes a free block from a private pool with `use_on_oom`. The request is one of `stream` to the default pool, in
    /// this lane or another.
    pub(crate) fn take_from_open_pools(
        &mut self,
        request: &Request,
        stream: Stream,
    ) -> Option<DeviceAddress> {
        let pools = self.heap.domains.pools();
        let open: Vec<PoolIndex> = pools
            .filter(|(_, pool)| pool.use_on_oom && pool.paused.is_none())
            .map(|(index, _)| index)
            .collect();
        open.into_iter().find_map(|pool| {
            let domain = self.heap.domains.find_or_insert(pool, stream)?;
            self.take(&Request { domain, ..*request })
        })
    }

    /// Allocates a segment and splits it like `segment`, whose active blocks are then allocated. Replays of recordings
    /// that lost their beginning start this way. Only `caching` does this; for other strategies, returns `false`.
    /// Creates and holds the pool like [`Device::allocate_in`](crate::Device::allocate_in).
    ///
    /// # Errors
    ///
    /// - [`AllocError::TooLarge`] if a block is smaller than its request.
    /// - [`AllocError::TooManyStreams`], as [`Lane::allocate`].
    /// - [`AllocError::Driver`] if the driver refuses. The pool is then created and held, and addresses may be
    ///   reserved.
    pub fn adopt(&mut self, segment: &SegmentSnapshot) -> Result<bool, AllocError> {
        let is_too_small = |block: &&BlockSnapshot| block.requested > block.size;
        if let Some(block) = segment.blocks.iter().find(is_too_small) {
            let requested = block.requested;
            return Err(AllocError::TooLarge { requested });
        }
        // Otherwise the pool could be removed when its domain replaces others.
        let (pool, held_before) = self.hold_pool(segment.pool);
        let domain = match self.domain_of(pool, segment.stream) {
            Ok(domain) => domain,
            Err(error) => {
                self.undo_hold(pool, held_before);
                return Err(error);
            }
        };
        let Some(strategy) = self.strategy.as_pytorch_mut() else {
            return Ok(false);
        };
        let in_use = strategy.adopt(&mut self.heap, &mut self.memory, domain, segment)?;
        for (block, requested) in in_use {
            self.hand_out(block, requested);
        }
        Ok(true)
    }

    /// Allocates a free block. Returns its address.
    #[inline(always)]
    pub(crate) fn hand_out(&mut self, id: BlockId, requested: Bytes) -> DeviceAddress {
        let Block {
            address,
            size,
            kind,
            domain,
            ..
        } = self.heap.blocks.hand_out(id, requested);
        if !self.watched.is_empty() {
            self.watched.remove(&address);
        }
        self.heap.stats.count_allocated(kind, size, requested);
        if self.heap.is_oversize(size) {
            self.heap.stats.count_oversize_allocation();
        }
        self.heap.record(Action::Alloc, domain, address, requested);
        address
    }

    /// Frees a block. It is reused at once, or after the events of the other streams that used it.
    ///
    /// Constant time; `direct` calls the driver.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotAllocated`] if no allocated block begins at `address`. [`AllocError::Driver`] when the driver
    /// refuses a call; the block is then still allocated.
    #[inline(always)]
    pub fn free(&mut self, address: DeviceAddress) -> Result<(), AllocError> {
        if address == DeviceAddress::NULL {
            return Ok(());
        }
        let found = self.strategy.find(&self.heap.blocks, address);
        debug_assert!(found.is_none_or(|id| self.heap.blocks.get(id).address == address));
        let Some((id, block)) = found.and_then(|id| Some((id, self.heap.blocks.free_held(id)?)))
        else {
            return Err(AllocError::NotAllocated { address });
        };
        let Block {
            size,
            requested,
            kind,
            domain,
            ..
        } = block;
        let before = self.heap.log.mark();
        self.heap
            .record(Action::FreeRequested, domain, address, requested);
        let result = if block.used_elsewhere {
            self.suspend(id)
        } else {
            self.put(id, block)
        };
        if let Err(error) = result {
            self.heap.blocks.set_state(id, block.state);
            self.heap.log.undo(before);
            return Err(error.into());
        }
        if block.used_elsewhere {
            self.heap.stats.count_suspended(kind, size);
        } else {
            self.heap.stats.count_freed(kind, size, requested);
        }
        if self.heap.is_oversize(size) {
            self.heap.stats.count_oversize_freed();
        }
        Ok(())
    }

    /// Keeps a freed block until the other streams that used it are done.
    #[cold]
    fn suspend(&mut self, id: BlockId) -> Result<(), DriverError> {
        if self.heap.captures > 0 {
            self.defer(id);
        } else {
            self.uses
                .wait_for(self.memory.physical_mut().driver_mut(), id)?;
        }
        debug_assert!(self.uses.waiting().contains(&id), "what is suspended waits");
        self.heap.blocks.set_state(id, BlockState::Pending);
        self.heap.blocks.set_used_elsewhere(id, false);
        let block = self.heap.blocks.get(id);
        let (address, requested, domain) = (block.address, block.requested, block.domain);
        let recent = &mut self.heap.log.recent;
        recent.push(Action::FreeRequested, domain, address, requested);
        Ok(())
    }

    /// Puts a block that the table shows as free to the strategy. `block` is its record from before. On an error, the
    /// caller restores that record and takes the event back.
    #[expect(
        clippy::inline_always,
        reason = "a call costs a free a tenth of its time"
    )]
    #[inline(always)]
    fn put(&mut self, id: BlockId, block: Block) -> Result<(), DriverError> {
        debug_assert_eq!(self.heap.blocks.state(id), BlockState::Free);
        let (address, requested, domain) = (block.address, block.requested, block.domain);
        self.heap
            .record(Action::FreeCompleted, domain, address, requested);
        match self.strategy.put(&mut self.heap, id, block) {
            None => Ok(()),
            Some(segment) => self.release_at_once(id, segment),
        }
    }

    /// Releases a segment that one block fills.
    fn release_at_once(&mut self, id: BlockId, segment: SegmentId) -> Result<(), DriverError> {
        debug_assert_eq!(
            self.heap.segments.get(segment).size,
            self.heap.blocks.get(id).size
        );
        self.heap.free_segment(&mut self.memory, segment)?;
        self.heap.blocks.remove(id);
        Ok(())
    }

    /// Records that work in `stream` uses a block. After a free, the block is reused only after that work.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotAllocated`] if no allocated block begins at `address`.
    pub fn record_stream(
        &mut self,
        address: DeviceAddress,
        stream: Stream,
    ) -> Result<(), AllocError> {
        if address == DeviceAddress::NULL {
            return Ok(());
        }
        let id = self.find_allocated(address)?;
        // Work in the block's own stream is ordered already.
        let domain = self.heap.blocks.get(id).domain;
        if self.heap.domains.domain(domain).stream != stream {
            self.heap.blocks.set_used_elsewhere(id, true);
            let captured_in = self.capture_of(stream);
            self.uses.add(id, stream, captured_in);
        }
        Ok(())
    }

    /// Puts pending blocks whose events have passed to the strategy. Does nothing during a capture, in which no event
    /// may be queried. Every request does this first.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when an event cannot be queried. Its block stays pending.
    #[inline(never)]
    pub fn process_events(&mut self) -> Result<(), AllocError> {
        if self.heap.captures > 0 || self.uses.none_wait() {
            return Ok(());
        }
        self.uses
            .end_deferral(self.memory.physical_mut().driver_mut())?;
        self.uses.poll(self.memory.physical_mut().driver_mut())?;
        Ok(self.reclaim_passed()?)
    }

    fn reclaim_passed(&mut self) -> Result<(), DriverError> {
        while let Some(id) = self.uses.first_passed() {
            let block = self.heap.blocks.make_free(id);
            debug_assert_eq!(block.state, BlockState::Pending);
            debug_assert!(!block.used_elsewhere);
            let (size, kind, requested) = (block.size, block.kind, block.requested);
            let before = self.heap.log.mark();
            if let Err(error) = self.put(id, block) {
                self.heap.blocks.set_state(id, block.state);
                self.heap.log.undo(before);
                return Err(error);
            }
            self.heap.stats.count_resumed(kind, size, requested);
            self.uses.remove_first_passed();
        }
        Ok(())
    }

    /// Releases a private pool's free memory, unless the pool keeps it: it is paused, or held and not set to release.
    /// Unless a capture forbids it, first waits for the events of the pool's pending blocks, as PyTorch does, and for
    /// no others.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::Driver`] when the
    /// driver refuses a call.
    pub(crate) fn empty_pool(&mut self, pool: MempoolId) -> Result<(), AllocError> {
        let index = self.find_pool(pool)?;
        if self.keeps(index) {
            return Ok(());
        }
        if self.heap.captures == 0 {
            self.heap.stats.num_sync_all_streams += 1;
            self.reclaim_pending_of(index)?;
        }
        Ok(self.release_pool_segments(index, None)?)
    }

    /// Releases up to `most` bytes of memory that no work uses, the longest idle first. It has been idle since `since`,
    /// an earlier result of this function. Returns the current time. Never waits, and does nothing during a capture.
    /// Only `tide` has such memory.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the driver refuses a call; memory released before that stays released.
    pub fn release_unused(&mut self, since: u64, most: Bytes) -> Result<u64, AllocError> {
        self.release(Release::Unused { since, most })?;
        Ok(self.heap.pages.now())
    }

    /// Releases as much idle memory as is missing for `size` new bytes, the longest idle first. Waits for all work of the
    /// device, unless a capture forbids that. Returns whether some was missing, and there was so much. Only `tide` has
    /// such memory.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the driver refuses a call; memory released before that stays released.
    pub fn release_idle(&mut self, size: Bytes) -> Result<bool, AllocError> {
        Ok(self.release(Release::Idle(size))?)
    }

    /// Releases all free memory, except that of private pools that keep it.
    pub(crate) fn release_cached(&mut self, failing: Option<&Request>) -> Result<(), DriverError> {
        self.heap.release_spares(&mut self.memory)?;
        self.release_free(PoolIndex::DEFAULT, failing)?;
        self.release_unused_pools(failing)
    }

    /// Releases the free segments of unheld pools, and of held pools that are set to release them. Skips paused pools.
    fn release_unused_pools(&mut self, failing: Option<&Request>) -> Result<(), DriverError> {
        let pools = self.heap.domains.pools().map(|(index, _)| index);
        for index in pools.collect::<Vec<_>>() {
            if !self.keeps(index) {
                self.release_pool_segments(index, failing)?;
            }
        }
        Ok(())
    }

    /// Waits for the events of all pending blocks. Not allowed during a capture.
    pub(crate) fn reclaim_pending(&mut self) -> Result<(), DriverError> {
        self.uses
            .end_deferral(self.memory.physical_mut().driver_mut())?;
        self.uses
            .synchronize(self.memory.physical_mut().driver_mut(), |_| true)?;
        self.reclaim_passed()
    }

    /// Waits for the events of a pool's pending blocks. Not allowed during a capture.
    fn reclaim_pending_of(&mut self, pool: PoolIndex) -> Result<(), DriverError> {
        self.uses
            .end_deferral(self.memory.physical_mut().driver_mut())?;
        let (blocks, domains) = (&self.heap.blocks, &self.heap.domains);
        let is_of_pool = |id| domains.domain(blocks.get(id).domain).pool == pool;
        self.uses
            .synchronize(self.memory.physical_mut().driver_mut(), is_of_pool)?;
        self.reclaim_passed()
    }

    /// Releases the free segments of a private pool. Removes the pool if no segment is left and nothing holds it.
    fn release_pool_segments(
        &mut self,
        index: PoolIndex,
        failing: Option<&Request>,
    ) -> Result<(), DriverError> {
        self.release_free(index, failing)?;
        debug_assert_ne!(index, PoolIndex::DEFAULT, "the default pool does not end");
        if !self.is_held(index) && !self.heap.has_segments(index) {
            self.heap.log.recent.forget();
            self.heap.domains.remove_pool(index);
        }
        Ok(())
    }

    /// Releases the free segments of a pool. `failing` is the request that would otherwise fail, if any.
    fn release_free(
        &mut self,
        pool: PoolIndex,
        failing: Option<&Request>,
    ) -> Result<(), DriverError> {
        self.release(Release::Pool(pool, failing))?;
        Ok(())
    }

    /// Returns whether a pool keeps its free memory.
    fn keeps(&self, index: PoolIndex) -> bool {
        let pool = self.heap.domains.pool(index);
        let is_kept = self.is_held(index) && !pool.releases_free || pool.paused.is_some();
        is_kept || index == PoolIndex::DEFAULT
    }

    /// Returns whether something holds a pool, or requests are routed to it.
    fn is_held(&self, index: PoolIndex) -> bool {
        let is_routed = || self.routes.iter().any(|route| route.pool == index);
        self.heap.domains.pool(index).use_count > 0 || is_routed()
    }

    /// Counts allocated blocks by size, stream and region. Leaves out paused pools, which have no memory on the device.
    pub(crate) fn count_holders(
        &self,
        counts: &mut BTreeMap<(Bytes, Stream, Option<Arc<str>>), u64>,
    ) {
        let blocks = self.heap.blocks.iter().map(|(_, block)| block);
        for block in blocks.filter(|block| block.state == BlockState::Allocated) {
            let domain = self.heap.domains.domain(block.domain);
            if self.heap.domains.pool(domain.pool).paused.is_some() {
                continue;
            }
            let region = self.heap.domains.region(domain.pool).cloned();
            let kind = (block.size, domain.stream, region);
            *counts.entry(kind).or_insert(0) += 1;
        }
    }

    /// Returns the reserved bytes of private pools.
    pub(crate) fn reserved_in_private_pools(&self) -> Bytes {
        let pools = self.heap.domains.pools();
        let private = pools.filter(|&(index, _)| index != PoolIndex::DEFAULT);
        let reserved: i64 = private.map(|(_, pool)| pool.reserved_bytes.current()).sum();
        Bytes(reserved.unsigned_abs())
    }

    /// Returns the active bytes of private pools.
    pub(crate) fn active_in_private_pools(&self) -> Bytes {
        let blocks = self.heap.blocks.iter().map(|(_, block)| block);
        let private = blocks.filter(|block| {
            self.heap.domains.domain(block.domain).pool != PoolIndex::DEFAULT && block.is_active()
        });
        private.map(|block| block.size).sum()
    }

    /// Returns whether a block is free, large enough for a request, and of its domain.
    fn serves(&self, id: BlockId, request: &Request) -> bool {
        let block = self.heap.blocks.get(id);
        block.size >= request.size
            && block.domain == request.domain
            && block.state == BlockState::Free
    }

    fn allocation_of(&self, id: BlockId) -> Allocation {
        let block = self.heap.blocks.get(id);
        let domain = self.heap.domains.domain(block.domain);
        let segment = self.heap.segments.get(self.heap.blocks.segment(id));
        Allocation {
            address: block.address,
            size: block.size,
            requested: block.requested,
            stream: domain.stream,
            pool: self.heap.domains.pool(domain.pool).id,
            is_expandable: segment.is_expandable(),
            is_watched: self.watched.contains(&block.address),
        }
    }

    fn find_allocated(&self, address: DeviceAddress) -> Result<BlockId, AllocError> {
        match self.strategy.find(&self.heap.blocks, address) {
            Some(id) if self.heap.blocks.state(id) == BlockState::Allocated => Ok(id),
            _ => Err(AllocError::NotAllocated { address }),
        }
    }
}
