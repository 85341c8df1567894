//! `caching`: PyTorch's own allocator, address for address.
//!
//! Small requests (up to 1 MiB) are split from segments of 2 MiB. Larger ones are split from segments of 20 MiB or,
//! from 10 MiB on, get segments of their own size. A request takes the smallest free block that fits; of several,
//! the one with the lowest rank ([`ranks`]). The rest becomes a free block, and free neighbours are merged. Source:
//! `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.11, whose decisions this file makes in the same order. If a
//! version differs, a comment says so.
//!
//! Two differences are intended. A pool with `use_on_oom` also serves other requests from its expandable segments
//! before they fail, which PyTorch skips. A job that lowtide serves searches the free blocks once more after a wait
//! ([`CachingConfig::search_after_wait`]).

mod expandable;
mod options;
mod ranks;

use std::collections::BTreeMap;

use super::free_blocks::{FreeBlock, FreeBlocks};
use super::{CheckpointBlock, Configured, Placement, PyTorchPlacement, Release, Request, Strategy};
use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::config::Config;
use crate::domain::{DomainId, PoolIndex};
use crate::driver::{Driver, DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress, signed};
pub use options::{CachingConfig, FreeBlockOrder};
use ranks::Ranks;

/// No block is smaller.
const BLOCK_MIN: Bytes = Bytes(512);
/// The largest request that small segments serve. The rest of a large block is split off only if it is larger.
const SMALL_REQUEST_MAX: Bytes = Bytes::mib(1);

/// The strategy.
#[derive(Debug)]
pub(crate) struct Caching {
    config: CachingConfig,
    ranks: Ranks,
    /// By [`DomainId::index`].
    domains: Vec<SizePools>,
    /// Searches for a free block among the default pool's large ones, counted only while garbage
    /// collection is on: the clock by which a free block has an age.
    large_searches: u64,
    /// Whether an expandable segment was ever created, so that other jobs skip the check.
    has_expandable: bool,
}

/// The free memory of one domain.
#[derive(Debug, Default)]
struct SizePools {
    small: SizePool,
    large: SizePool,
}

/// The free memory of one domain for small, or for large, requests.
#[derive(Debug, Default)]
struct SizePool {
    /// Every block of the domain and kind that is `Free`.
    free: FreeBlocks,
    /// Every block of the domain and kind that is `Unmapped`.
    unmapped: BTreeMap<DeviceAddress, BlockId>,
}

impl Caching {
    /// Returns the free memory that may serve a domain's requests of a kind.
    #[inline]
    fn pool_of(&mut self, domain: DomainId, kind: SizeKind) -> &mut SizePool {
        pool_of(&mut self.domains, domain, kind)
    }

    /// Lists a free block. `block` has the same address, size, domain and kind as the table.
    #[inline(always)]
    fn insert_free(&mut self, heap: &mut Heap, id: BlockId, block: &Block) {
        let ranked = self.ranks.ranked(heap, id, block);
        debug_assert_eq!(block.address, heap.blocks.get(id).address);
        debug_assert_eq!(ranked, self.ranks.ranked(heap, id, &heap.blocks.get(id)));
        debug_assert_eq!(heap.blocks.state(id), BlockState::Free);
        debug_assert_eq!(block.size, heap.blocks.get(id).size);
        heap.blocks.set_mark(id, self.large_searches);
        self.pool_of(block.domain, block.kind).free.insert(ranked);
    }

    #[inline]
    fn remove_free(&mut self, heap: &Heap, id: BlockId) {
        let block = heap.blocks.get(id);
        debug_assert_eq!(block.state, BlockState::Free);
        let ranked = self.ranks.ranked(heap, id, &block);
        self.pool_of(block.domain, block.kind).free.remove(ranked);
    }

    #[inline]
    fn is_expandable(&self, heap: &Heap, id: BlockId) -> bool {
        self.has_expandable && heap.segments.get(heap.blocks.segment(id)).is_expandable()
    }

    /// Merges an unlisted block with its free neighbours, and lists the whole.
    #[inline(never)]
    fn merge_and_list(&mut self, heap: &mut Heap, mut id: BlockId) {
        let mut whole = heap.blocks.get(id);
        let counts = !self.is_expandable(heap, id);
        let pool = pool_of(&mut self.domains, whole.domain, whole.kind);
        let (mut blocks, mut bytes) = (0, 0);
        // Both records are loaded first, because a free neighbour's record is likely not in the cache.
        let is_free = |&id: &BlockId| heap.blocks.state(id) == BlockState::Free;
        let (next, previous) = (whole.next.filter(is_free), whole.previous.filter(is_free));
        if let Some(next_id) = next {
            let next = heap.blocks.get(next_id);
            (blocks, bytes) = (blocks - 1, bytes - signed(next.size));
            pool.free.remove(self.ranks.ranked(heap, next_id, &next));
            heap.blocks.merge_with_next(id);
            (whole.size, whole.next) = (whole.size + next.size, next.next);
        }
        if let Some(previous_id) = previous {
            let previous = heap.blocks.get(previous_id);
            (blocks, bytes) = (blocks - 1, bytes - signed(previous.size));
            pool.free
                .remove(self.ranks.ranked(heap, previous_id, &previous));
            heap.blocks.merge_with_next(previous_id);
            self.ranks.rename(id, previous_id);
            (id, whole.address) = (previous_id, previous.address);
            (whole.size, whole.previous) = (whole.size + previous.size, previous.previous);
        }
        debug_assert_eq!(whole.size, heap.blocks.get(id).size);
        debug_assert_eq!(whole.address, heap.blocks.get(id).address);
        if whole.is_split() {
            (blocks, bytes) = (blocks + 1, bytes + signed(whole.size));
        }
        if counts {
            heap.stats.change_inactive_split(whole.kind, blocks, bytes);
        }
        self.insert_free(heap, id, &whole);
    }

    fn collects_garbage(&self, heap: &Heap) -> bool {
        heap.limit.is_some() && self.config.garbage_collection_threshold > 0.0
    }

    /// Splits an unlisted block for a request and returns it.
    #[inline(always)]
    fn carve(&mut self, heap: &mut Heap, id: BlockId, request: &Request) -> BlockId {
        let block = heap.blocks.get(id);
        let split = self.should_split(heap, &block, request.size);
        self.cut(heap, (id, &block), request.size, split);
        id
    }

    /// Puts an unlisted block into use: its first `wanted` bytes if `split` is set, otherwise all of it. Inlined,
    /// because a call would pass the block through memory.
    #[inline(always)]
    fn cut(&mut self, heap: &mut Heap, (id, block): (BlockId, &Block), wanted: Bytes, split: bool) {
        let counts = !self.is_expandable(heap, id);
        debug_assert!(wanted <= block.size && split <= (wanted < block.size));
        let rest = Block {
            address: block.address + wanted,
            size: block.size - wanted,
            ..*block
        };
        if split {
            let number = heap.blocks.split(id, wanted);
            self.ranks.cut(id, number);
            self.insert_free(heap, number, &rest);
        }
        if counts {
            let (blocks, bytes) = match (block.is_split(), split) {
                // A part of the segment was free, and some of it stays free.
                (true, true) => (0, -signed(wanted)),
                // A part of the segment was free, and all of it comes into use.
                (true, false) => (-1, -signed(block.size)),
                // The whole segment was free. Now a part is, and the segment cannot be released.
                (false, true) => (1, signed(rest.size)),
                (false, false) => (0, 0),
            };
            heap.stats.change_inactive_split(block.kind, blocks, bytes);
        }
    }

    /// Splits an unlisted free block: lists its first `size` bytes as free, and returns the rest, which is not
    /// listed.
    fn leave_free(&mut self, heap: &mut Heap, id: BlockId, size: Bytes) -> BlockId {
        let block = heap.blocks.get(id);
        let (kind, whole, was_split) = (block.kind, signed(block.size), block.is_split());
        let counts = !self.is_expandable(heap, id);
        let rest = heap.blocks.split(id, size);
        self.ranks.cut(id, rest);
        let free = heap.blocks.get(id);
        self.insert_free(heap, id, &free);
        if counts {
            let (blocks, bytes) = if was_split { (1, 0) } else { (2, whole) };
            heap.stats.change_inactive_split(kind, blocks, bytes);
        }
        rest
    }

    /// Returns whether the rest of a block becomes a block of its own.
    #[inline(always)]
    fn should_split(&self, heap: &Heap, block: &Block, size: Bytes) -> bool {
        let rest = block.size - size;
        if rest < BLOCK_MIN || heap.domains.is_no_split(block.domain) {
            return false;
        }
        block.kind == SizeKind::Small
            || (rest > SMALL_REQUEST_MAX && self.config.max_split_size.is_none_or(|max| size < max))
            || (self.config.expandable_segments && !heap.domains.has_source(block.domain))
    }

    /// Releases the segment of a free block that covers it.
    fn release_block<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        id: BlockId,
    ) -> Result<(), DriverError> {
        let block = heap.blocks.get(id);
        let ranked = self.ranks.ranked(heap, id, &block);
        heap.free_segment(memory, heap.blocks.segment(id))?;
        self.pool_of(block.domain, block.kind).free.remove(ranked);
        heap.blocks.remove(id);
        Ok(())
    }

    /// Returns whether a free block is a whole segment that can be released as it is.
    fn is_releasable(&self, heap: &Heap, id: BlockId) -> bool {
        !heap.blocks.get(id).is_split() && !self.is_expandable(heap, id)
    }

    /// Releases the free segments of a pool and kind, stream by stream, smallest first.
    fn release_kind<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        pool: PoolIndex,
        kind: SizeKind,
    ) -> Result<(), DriverError> {
        let (mut free, mut empty) = (Vec::new(), Vec::new());
        for domain in heap.domains.of_pool(pool) {
            free.extend(self.pool_of(domain, kind).free.iter().map(|block| block.id));
            if pool == PoolIndex::DEFAULT {
                empty.extend(self.whole_unmapped(heap, domain, kind));
            }
        }
        let (whole, others): (Vec<_>, Vec<_>) = free
            .into_iter()
            .partition(|&id| self.is_releasable(heap, id));
        for id in whole {
            self.release_block(heap, memory, id)?;
        }
        for id in others {
            if self.is_expandable(heap, id) {
                self.unmap_free_pages(heap, memory, id)?;
            }
        }
        for domain in heap.domains.of_pool(pool) {
            self.unreserve_unmapped(heap, memory, domain, kind, &empty)?;
        }
        Ok(())
    }

    /// Returns the large free segments of the default pool in PyTorch's order, with their ages.
    fn aged_segments(&mut self, heap: &Heap) -> Vec<(BlockId, u64)> {
        let mut aged = Vec::new();
        for domain in heap.domains.of_pool(PoolIndex::DEFAULT) {
            let now = self.large_searches;
            let free: Vec<_> = self.pool_of(domain, SizeKind::Large).free.iter().collect();
            let whole = free
                .into_iter()
                .filter(|block| self.is_releasable(heap, block.id));
            aged.extend(whole.map(|block| (block.id, now - heap.blocks.mark(block.id))));
        }
        aged
    }
}

/// Returns the blocks of a segment's snapshot. Memory beyond it, up to `size`, is added as free.
fn blocks_covering(segment: &SegmentSnapshot, size: Bytes) -> Vec<BlockSnapshot> {
    let mut blocks = segment.blocks.clone();
    let beyond = size - segment.size;
    match blocks.last_mut() {
        _ if beyond.is_zero() => {}
        Some(last) if last.status == BlockStatus::Inactive => last.size += beyond,
        _ => blocks.push(BlockSnapshot {
            address: segment.address + segment.size,
            size: beyond,
            requested: Bytes::ZERO,
            status: BlockStatus::Inactive,
        }),
    }
    blocks
}

/// Returns the free memory that may serve a domain's requests of a kind.
#[inline]
fn pool_of(domains: &mut Vec<SizePools>, domain: DomainId, kind: SizeKind) -> &mut SizePool {
    if domain.index() >= domains.len() {
        domains.resize_with(domain.index() + 1, SizePools::default);
    }
    let pools = &mut domains[domain.index()];
    match kind {
        SizeKind::Small => &mut pools.small,
        SizeKind::Large => &mut pools.large,
    }
}

/// Release of memory to the driver.
impl Caching {
    /// Releases free segments older than the average until reserved memory is under the threshold. Unlike
    /// [`Strategy::release`], it does not wait for events.
    fn collect_garbage<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
    ) -> Result<(), DriverError> {
        if !self.collects_garbage(heap) {
            return Ok(());
        }
        let threshold = heap
            .limit
            .unwrap_or_default()
            .scale(self.config.garbage_collection_threshold);
        let target = heap.limited().saturating_sub(threshold);
        if target.is_zero() {
            return Ok(());
        }
        let mut aged = self.aged_segments(heap);
        let mut total_age: u64 = aged.iter().map(|&(_, age)| age).sum();
        let mut reclaimed = Bytes::ZERO;
        while reclaimed < target && !aged.is_empty() {
            let count = aged.len() as u64;
            let (old, young): (Vec<_>, Vec<_>) = aged
                .into_iter()
                .partition(|&(_, age)| age * count >= total_age);
            for (id, age) in old {
                let size = heap.blocks.get(id).size;
                self.release_block(heap, memory, id)?;
                (reclaimed, total_age) = (reclaimed + size, total_age - age);
            }
            aged = young;
        }
        Ok(())
    }

    /// If blocks from some size on are not split, releases the smallest free block that is large enough. If there
    /// is none, releases the largest of the smaller ones until they suffice.
    fn release_for<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<bool, DriverError> {
        let Some(max) = self.config.max_split_size else {
            return Ok(false);
        };
        let size = request.size.max(max);
        let kind = SizeKind::of(request.size);
        let enough = self.pool_of(request.domain, kind).free.first_at_least(size);
        if let Some(enough) = enough.filter(|enough| self.is_releasable(heap, enough.id)) {
            self.release_block(heap, memory, enough.id)?;
            return Ok(true);
        }
        let free = &self.pool_of(request.domain, kind).free;
        let is_smaller = |block: &FreeBlock| enough.is_none_or(|enough| *block < enough);
        let oversize: Vec<FreeBlock> = free.iter_from(max).take_while(is_smaller).collect();
        let mut released = Bytes::ZERO;
        for block in oversize.into_iter().rev() {
            if released >= size {
                break;
            }
            if self.is_releasable(heap, block.id) {
                self.release_block(heap, memory, block.id)?;
                released += block.size;
            }
        }
        Ok(released >= size)
    }

    /// Releases every wholly free segment of a pool.
    fn release_pool<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        pool: PoolIndex,
    ) -> Result<(), DriverError> {
        let kinds = match pool {
            PoolIndex::DEFAULT => [SizeKind::Large, SizeKind::Small],
            _ => [SizeKind::Small, SizeKind::Large],
        };
        for kind in kinds {
            self.release_kind(heap, memory, pool, kind)?;
        }
        Ok(())
    }
}

impl Configured for Caching {
    type Options = CachingConfig;

    fn new(options: &CachingConfig, heap: &mut Heap) -> Caching {
        heap.set_max_split_size(options.max_split_size);
        // Few parts of a split block are ever looked up by address.
        heap.blocks.list_when_handed_out();
        Caching {
            config: options.clone(),
            ranks: Ranks::new(options.free_block_order.unwrap_or_default()),
            domains: Vec::new(),
            large_searches: 0,
            has_expandable: false,
        }
    }
}

impl Strategy for Caching {
    #[inline]
    fn block_size(&self, requested: Bytes) -> Bytes {
        self.config.block_size(requested)
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        self.config.segment_size(request.size)
    }

    #[inline(never)]
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        let &Request { size, domain, .. } = request;
        let kind = SizeKind::of(size);
        if kind == SizeKind::Large
            && self.collects_garbage(heap)
            && heap.domains.domain(domain).pool == PoolIndex::DEFAULT
        {
            self.large_searches += 1;
        }
        let best = if self.has_expandable {
            self.take_with_expandable(heap, request)?
        } else {
            let pool = pool_of(&mut self.domains, domain, kind);
            let serves = |best: &FreeBlock| self.config.block_serves(best.size, size);
            pool.free.take_first_at_least(size, serves)?
        };
        Some(self.carve(heap, best.id, request))
    }

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let size = Strategy::segment_size(self, request);
        // A device that cannot map memory gets plain segments.
        if self.config.expandable_segments
            && memory.physical_mut().driver_mut().supports_virtual_memory()
            && !heap.domains.has_source(request.domain)
        {
            // The limit is checked against the plain segment that the request would get otherwise.
            if heap.exceeds_limit(size) {
                return Ok(None);
            }
            return self.grow_expandable(heap, memory, request);
        }
        let kind = SizeKind::of(request.size);
        let segment = heap.allocate_segment(memory, request.domain, size, kind);
        let Some(segment) = unless_out_of_memory(segment)? else {
            return Ok(None);
        };
        let block = heap.insert_whole_block(segment);
        self.ranks.begin(block);
        Ok(Some(self.carve(heap, block, request)))
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, _block: Block) -> Option<SegmentId> {
        // The block is not passed on: a call would write it to memory, and the table has it.
        self.merge_and_list(heap, id);
        None
    }

    fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError> {
        match wanted {
            Release::Garbage => self.collect_garbage(heap, memory)?,
            Release::For(request) => return self.release_for(heap, memory, request),
            Release::Pool(pool, _) => self.release_pool(heap, memory, pool)?,
            Release::Domain(_) | Release::Unused { .. } => {}
            Release::ForAfterWait(_) | Release::Idle(_) => return Ok(false),
        }
        Ok(true)
    }

    fn largest_free(&self, _heap: &Heap, domain: DomainId) -> Bytes {
        let pools = self.domains.get(domain.index());
        let largest = |pools: &SizePools| pools.large.free.last().or(pools.small.free.last());
        pools
            .and_then(largest)
            .map_or(Bytes::ZERO, |block| block.size)
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        let (mut free, mut split, mut split_bytes) = (Bytes::ZERO, 0, Bytes::ZERO);
        for (id, block) in heap.blocks.iter() {
            self.check_links(heap, id, &block)?;
            if block.state == BlockState::Free {
                free += block.size;
                if block.is_split() && !self.is_expandable(heap, id) {
                    split += 1;
                    split_bytes += block.size;
                }
            }
        }
        let (blocks, bytes) = heap.stats.inactive_split();
        if (blocks, bytes) != (split, signed(split_bytes)) {
            return Err(format!(
                "{split} split free blocks of {split_bytes:?}, but the figures say {blocks} of {bytes}"
            ));
        }
        self.check_lists(heap)?;
        Ok(free)
    }
}

impl Placement for Caching {
    /// Linear in the free blocks of the request's domain and kind.
    fn take_around(
        &mut self,
        heap: &mut Heap,
        request: &Request,
        address: DeviceAddress,
    ) -> Option<BlockId> {
        let is_around = |free: &FreeBlock| {
            let start = heap.blocks.get(free.id).address;
            let before = address.get().checked_sub(start.get());
            before.is_some_and(|before| Bytes(before) <= free.size - request.size)
        };
        let pool = self.pool_of(request.domain, SizeKind::of(request.size));
        let free = pool.free.iter_from(request.size).find(is_around)?;
        let block = heap.blocks.get(free.id);
        let before = address.offset_from(block.address);
        let is_start = before.is_zero();
        let can_begin = (before % BLOCK_MIN).is_zero() && self.should_split(heap, &block, before);
        if !is_start && !can_begin {
            return None;
        }
        pool_of(&mut self.domains, block.domain, block.kind)
            .free
            .remove(free);
        let size = if is_start { request.size } else { before };
        let part = Request { size, ..*request };
        Some(self.carve(heap, free.id, &part))
    }

    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId {
        let mut id = around.expect("mapped memory is covered by blocks");
        self.remove_free(heap, id);
        let before = wanted.address.offset_from(heap.blocks.get(id).address);
        if !before.is_zero() {
            id = self.leave_free(heap, id, before);
        }
        let block = heap.blocks.get(id);
        self.cut(heap, (id, &block), wanted.size, wanted.size < block.size);
        id
    }
}

impl PyTorchPlacement for Caching {
    fn take_at(&mut self, heap: &mut Heap, id: BlockId, size: Bytes) -> bool {
        let block = heap.blocks.get(id);
        let fits = size <= block.size;
        if fits {
            self.remove_free(heap, id);
            self.cut(heap, (id, &block), size, size < block.size);
        }
        fits
    }

    fn adopt<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        domain: DomainId,
        segment: &SegmentSnapshot,
    ) -> Result<Vec<(BlockId, Bytes)>, DriverError> {
        let kind = if segment.is_large {
            SizeKind::Large
        } else {
            SizeKind::Small
        };
        let mut rest = if segment.is_expandable {
            self.adopt_expandable(heap, memory, domain, kind, segment)?
        } else {
            let id = heap.allocate_segment(memory, domain, segment.size, kind)?;
            let block = heap.insert_whole_block(id);
            self.ranks.begin(block);
            block
        };
        let mut in_use = Vec::new();
        for block in blocks_covering(segment, heap.blocks.get(rest).size) {
            let id = rest;
            if block.size < heap.blocks.get(id).size {
                rest = heap.blocks.split(id, block.size);
                self.ranks.cut(id, rest);
            }
            if block.status == BlockStatus::Inactive {
                let free = heap.blocks.get(id);
                self.insert_free(heap, id, &free);
                if free.is_split() && !segment.is_expandable {
                    let bytes = signed(block.size);
                    heap.stats.change_inactive_split(kind, 1, bytes);
                }
            } else {
                in_use.push((id, block.requested));
            }
        }
        Ok(in_use)
    }

    fn block_number(&self, id: BlockId) -> Option<u64> {
        self.ranks.number(id)
    }

    fn order_blocks(&mut self, heap: &Heap, oldest: &[DeviceAddress]) {
        if oldest.is_empty() {
            return;
        }
        let places: BTreeMap<DeviceAddress, usize> = oldest.iter().copied().zip(0..).collect();
        let mut blocks: Vec<(BlockId, Block)> = heap.blocks.iter().collect();
        blocks.sort_by_key(|(id, block)| {
            let place = places.get(&block.address).copied();
            (place.unwrap_or(usize::MAX), self.ranks.number(*id))
        });
        let is_free = |(_, block): &&(BlockId, Block)| block.state == BlockState::Free;
        // Otherwise two listed blocks could share a rank during the change.
        for &(id, _) in blocks.iter().filter(is_free) {
            self.remove_free(heap, id);
        }
        self.ranks.renumber(blocks.iter().map(|&(id, _)| id));
        for (id, block) in blocks.iter().filter(is_free) {
            let ranked = self.ranks.ranked(heap, *id, block);
            self.pool_of(block.domain, block.kind).free.insert(ranked);
        }
    }

    /// From then on there can be both plain and expandable segments.
    fn reconfigure(&mut self, config: &Config, heap: &mut Heap) -> bool {
        let Config::Caching(config) = config else {
            return false;
        };
        heap.set_max_split_size(config.max_split_size);
        self.config = config.clone();
        true
    }
}

/// Checks, for tests and debugging only.
impl Caching {
    fn check_links(&self, heap: &Heap, id: BlockId, block: &Block) -> Result<(), String> {
        let segment = heap.segments.get(heap.blocks.segment(id));
        let at = block.address;
        let end = segment.address + segment.size;
        match block.next.map(|next| heap.blocks.get(next)) {
            None if block.end() != end => Err(format!("nothing follows {at} in its segment")),
            Some(next) if next.previous != Some(id) || next.address != block.end() => {
                Err(format!("{at} and the block behind it are not neighbours"))
            }
            Some(next) if next.state == block.state && !block.is_active() => {
                Err(format!("{at} and the block behind it should be one"))
            }
            _ if block.previous.is_none() && at != segment.address => {
                Err(format!("nothing precedes {at} in its segment"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the lists hold exactly the free blocks and the unmapped blocks.
    fn check_lists(&self, heap: &Heap) -> Result<(), String> {
        let (mut free, mut unmapped) = (0, 0);
        for pool in self
            .domains
            .iter()
            .flat_map(|pools| [&pools.small, &pools.large])
        {
            for listed in pool.free.iter() {
                let block = heap.blocks.get(listed.id);
                let ranked = self.ranks.ranked(heap, listed.id, &block);
                if block.state != BlockState::Free || ranked != listed {
                    return Err(format!("{} is listed as free but is not", block.address));
                }
            }
            for (&address, &id) in &pool.unmapped {
                let block = heap.blocks.get(id);
                if block.state != BlockState::Unmapped || block.address != address {
                    return Err(format!("{address} is listed as unmapped but is not"));
                }
            }
            free += pool.free.len();
            unmapped += pool.unmapped.len();
        }
        let count = |state| {
            heap.blocks
                .iter()
                .filter(|(_, block)| block.state == state)
                .count()
        };
        if (free, unmapped) != (count(BlockState::Free), count(BlockState::Unmapped)) {
            return Err("a free or unmapped block is in no list".to_owned());
        }
        Ok(())
    }
}
