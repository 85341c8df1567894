//! Expandable segments: one address range for each domain and size pool. Memory is mapped into it page by page,
//! so the free rest at its end can grow instead of being stranded.

use super::Caching;
use super::options::CachingConfig;
use crate::block::{BlockId, BlockState};
use crate::domain::DomainId;
use crate::driver::{Driver, DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::{Heap, Segment};
use crate::snapshot::SegmentSnapshot;
use crate::stats::SizeKind;
use crate::strategy::Request;
use crate::strategy::free_blocks::FreeBlock;
use crate::units::Bytes;

/// The page size of expandable segments for small requests. For large requests it is
/// [`CachingConfig::large_segment_size`].
const SMALL_PAGE: Bytes = Bytes::mib(2);

impl Caching {
    /// Takes the free block that serves a request, if some blocks are in expandable segments.
    #[inline(never)]
    pub(super) fn take_with_expandable(
        &mut self,
        heap: &Heap,
        request: &Request,
    ) -> Option<FreeBlock> {
        let pool = self.pool_of(request.domain, SizeKind::of(request.size));
        let first = pool.free.first_at_least(request.size)?;
        let best = self.best_with_expandable(heap, first, request)?;
        if !self.config.block_serves(best.size, request.size) {
            return None;
        }
        let pool = self.pool_of(request.domain, SizeKind::of(request.size));
        pool.free.remove(best);
        Some(best)
    }

    /// Returns the free block to take. `first`, the first that fits, may be in an expandable segment: such blocks
    /// are compared by the size that they can grow to. If `expandable_segments` is off, they are skipped, because
    /// a program may have switched it off to get memory that it can share.
    fn best_with_expandable(
        &mut self,
        heap: &Heap,
        first: FreeBlock,
        request: &Request,
    ) -> Option<FreeBlock> {
        let is_expandable = |block: &FreeBlock| {
            heap.segments
                .get(heap.blocks.segment(block.id))
                .is_expandable()
        };
        if !is_expandable(&first) {
            return Some(first);
        }
        let wants_expandable = self.config.expandable_segments;
        let pool = self.pool_of(request.domain, SizeKind::of(request.size));
        if !wants_expandable {
            let mut candidates = pool.free.iter_from(request.size);
            return candidates.find(|block| !is_expandable(block));
        }
        let grown_size = |block: &FreeBlock| {
            let next = heap
                .blocks
                .get(block.id)
                .next
                .map(|next| heap.blocks.get(next));
            let unmapped = next.filter(|next| next.state == BlockState::Unmapped);
            block.size + unmapped.map_or(Bytes::ZERO, |next| next.size)
        };
        // A block that cannot grow is not larger than the next one, so the search ends there.
        let mut best = first;
        while let Some(next) = pool.free.next_after(best)
            && grown_size(&next) < grown_size(&best)
        {
            best = next;
        }
        Some(best)
    }

    /// Maps memory at the lowest addresses where the request fits, and returns its block. `None` if the driver
    /// has no memory.
    pub(super) fn grow_expandable<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let size = request.size;
        let found = self.find_room(heap, memory, request);
        let mut candidate = match found {
            Some(candidate) => candidate,
            None => {
                match unless_out_of_memory(self.reserve_room(
                    heap,
                    memory,
                    request.domain,
                    SizeKind::of(size),
                ))? {
                    Some(candidate) => candidate,
                    None => return Ok(None),
                }
            }
        };
        if heap.blocks.state(candidate) == BlockState::Unmapped {
            match self.map_some(heap, memory, candidate, size)? {
                Some(mapped) => candidate = mapped,
                None => return Ok(None),
            }
        }
        // The mapped memory is now a free block. It grows into the unmapped block behind it.
        while heap.blocks.get(candidate).size < size {
            let missing = size - heap.blocks.get(candidate).size;
            let next = heap
                .blocks
                .get(candidate)
                .next
                .expect("there is room behind the block");
            match self.map_some(heap, memory, next, missing)? {
                Some(mapped) => candidate = mapped,
                None => return Ok(None),
            }
        }
        self.remove_free(heap, candidate);
        Ok(Some(self.carve(heap, candidate, request)))
    }

    /// Returns the block at the lowest address from which free and unmapped blocks have room for the request. It
    /// is an unmapped block, or the free block right before one. Segments in which the driver refuses to undo a
    /// failed mapping are skipped.
    fn find_room<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Option<BlockId> {
        let has_room = |heap: &Heap, first: BlockId| {
            let usable = |&id: &BlockId| !heap.blocks.get(id).is_active();
            let (mut room, mut at) = (Bytes::ZERO, Some(first));
            while room < request.size
                && let Some(id) = at.filter(usable)
            {
                room += heap.blocks.get(id).size;
                at = heap.blocks.get(id).next;
            }
            room >= request.size
        };
        let pool = self.pool_of(request.domain, SizeKind::of(request.size));
        pool.unmapped.values().find_map(|&id| {
            let before = heap.blocks.get(id).previous;
            let first = before.filter(|&id| !heap.blocks.get(id).is_active());
            let first = first.unwrap_or(id);
            let segment = heap.blocks.segment(id);
            let is_room = has_room(heap, first)
                && memory
                    .physical_mut()
                    .unmap_half_mapped(heap.segments.get(segment).address)
                    .is_ok();
            is_room.then_some(first)
        })
    }

    /// Maps memory for a segment's snapshot and returns its block, which is not listed. If the domain has
    /// reserved the snapshot's addresses, they are used; otherwise a new address range is reserved. If the driver
    /// reserved other addresses, the memory begins at their start.
    pub(super) fn adopt_expandable<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        domain: DomainId,
        kind: SizeKind,
        segment: &SegmentSnapshot,
    ) -> Result<BlockId, DriverError> {
        let page_size = self.page_size(memory, kind);
        let size = segment.size.round_up(page_size);
        let pool = self.pool_of(domain, kind);
        let around = pool
            .unmapped
            .range(..=segment.address)
            .next_back()
            .map(|(_, &id)| id);
        let offset_in = |heap: &Heap, id: BlockId| {
            let room = heap.blocks.get(id);
            let is_within = room.address <= segment.address && segment.address + size <= room.end();
            let offset = is_within.then(|| segment.address.offset_from(room.address));
            offset.filter(|&offset| (offset % page_size).is_zero())
        };
        let mut id = match around.filter(|&id| offset_in(heap, id).is_some()) {
            Some(id) => id,
            None => self.reserve_room(heap, memory, domain, kind)?,
        };
        let start = heap.blocks.get(id).address;
        let before = offset_in(heap, id).unwrap_or_default();
        heap.map(memory, heap.blocks.segment(id), start + before, size)?;
        if before.is_zero() {
            self.remove_unmapped(heap, id);
        } else {
            id = heap.blocks.split(id, before);
            self.ranks.begin(id);
        }
        if size < heap.blocks.get(id).size {
            let rest = heap.blocks.split(id, size);
            self.ranks.begin(rest);
            self.insert_unmapped(heap, rest);
        }
        heap.blocks.set_state(id, BlockState::Free);
        Ok(id)
    }

    /// Returns the page size of an expandable segment: the unit in which it grows.
    fn page_size<M: Memory>(&self, memory: &M, kind: SizeKind) -> Bytes {
        let page_size = match kind {
            SizeKind::Small => SMALL_PAGE,
            SizeKind::Large => self.config.large_segment_size,
        };
        page_size.round_up(memory.physical().driver().granularity())
    }

    /// Reserves the addresses of a new segment and returns the unmapped block that covers them.
    fn reserve_room<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        domain: DomainId,
        kind: SizeKind,
    ) -> Result<BlockId, DriverError> {
        let page_size = self.page_size(memory, kind);
        let total = memory.physical_mut().driver_mut().memory_info()?.total;
        let size = CachingConfig::expandable_segment_size(total, page_size);
        let segment = heap.reserve_segment(memory, domain, size, page_size, kind)?;
        self.has_expandable = true;
        let id = heap.insert_whole_block(segment);
        self.ranks.begin(id);
        self.insert_unmapped(heap, id);
        Ok(id)
    }

    /// Maps memory to the first `size` bytes of an unmapped block, or to all of a smaller one. Returns the free
    /// block that now contains them; `None` if the driver has no memory.
    fn map_some<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        mut id: BlockId,
        size: Bytes,
    ) -> Result<Option<BlockId>, DriverError> {
        let (segment, address) = (heap.blocks.segment(id), heap.blocks.get(id).address);
        let size = size.min(heap.blocks.get(id).size);
        let Some(mapped) = unless_out_of_memory(heap.map(memory, segment, address, size))? else {
            return Ok(None);
        };
        debug_assert!(mapped >= size && mapped <= heap.blocks.get(id).size);
        self.remove_unmapped(heap, id);
        if mapped < heap.blocks.get(id).size {
            let rest = heap.blocks.split(id, mapped);
            self.ranks.begin(rest);
            self.insert_unmapped(heap, rest);
        }
        heap.blocks.set_state(id, BlockState::Free);
        if let Some(previous) = self.neighbour(heap, heap.blocks.get(id).previous, BlockState::Free)
        {
            self.remove_free(heap, previous);
            heap.blocks.merge_with_next(previous);
            self.ranks.rename(id, previous);
            id = previous;
        }
        if let Some(next) = self.neighbour(heap, heap.blocks.get(id).next, BlockState::Free) {
            self.remove_free(heap, next);
            heap.blocks.merge_with_next(id);
        }
        let free = heap.blocks.get(id);
        self.insert_free(heap, id, &free);
        Ok(Some(id))
    }

    /// Unmaps and releases the whole pages in a free block.
    pub(super) fn unmap_free_pages<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        id: BlockId,
    ) -> Result<(), DriverError> {
        let block = heap.blocks.get(id);
        let (segment, block_address, block_size) =
            (heap.blocks.segment(id), block.address, block.size);
        let page_size = heap.segments.get(segment).page_size;
        let page_size = page_size.expect("the caller looks for expandable segments");
        let offset = block_address.offset_from(heap.segments.get(segment).address);
        let first = offset.round_up(page_size);
        let end = (offset + block_size).round_down(page_size);
        if first >= end {
            return Ok(());
        }
        let (before, size) = (first - offset, end - first);
        debug_assert!(before + size <= block_size);
        debug_assert_eq!(block.state, BlockState::Free);
        heap.unmap(memory, segment, block_address + before, size)?;
        self.remove_free(heap, id);
        let middle = if before.is_zero() {
            id
        } else {
            let middle = heap.blocks.split(id, before);
            self.ranks.cut(id, middle);
            let free = heap.blocks.get(id);
            self.insert_free(heap, id, &free);
            middle
        };
        if size < heap.blocks.get(middle).size {
            let after = heap.blocks.split(middle, size);
            self.ranks.begin(after);
            let free = heap.blocks.get(after);
            self.insert_free(heap, after, &free);
        }
        self.merge_unmapped(heap, middle);
        Ok(())
    }

    /// Returns the segments in which nothing is mapped, each as the block that covers it.
    pub(super) fn whole_unmapped(
        &mut self,
        heap: &Heap,
        domain: DomainId,
        kind: SizeKind,
    ) -> Vec<BlockId> {
        let unmapped = self.pool_of(domain, kind).unmapped.values().copied();
        unmapped
            .filter(|&id| !heap.blocks.get(id).is_split())
            .collect()
    }

    /// Releases the addresses of the segments in which nothing is mapped. The segments in `empty` keep theirs as
    /// long as memory is mapped in another segment.
    ///
    /// PyTorch does so for segments of its default pool into which nothing was mapped yet, because the driver had
    /// no memory when they were reserved. If such a segment is at the lowest address, the next memory is mapped
    /// there.
    pub(super) fn unreserve_unmapped<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        domain: DomainId,
        kind: SizeKind,
        empty: &[BlockId],
    ) -> Result<(), DriverError> {
        let is_of_both = |segment: &Segment| {
            segment.domain == domain && segment.kind == kind && segment.is_expandable()
        };
        let has_memory = !empty.is_empty() && { heap.segments.iter() }
            .any(|(_, segment)| is_of_both(segment) && !segment.mapped_bytes(memory).is_zero());
        let mut whole = self.whole_unmapped(heap, domain, kind);
        whole.retain(|id| !(has_memory && empty.contains(id)));
        for id in whole {
            let segment = heap.blocks.segment(id);
            // If the driver refuses to undo a failed mapping, the segment is tried again at the next release.
            if memory
                .physical_mut()
                .unmap_half_mapped(heap.segments.get(segment).address)
                .is_err()
            {
                continue;
            }
            heap.unreserve_segment(memory, segment)?;
            self.remove_unmapped(heap, id);
            heap.blocks.remove(id);
        }
        Ok(())
    }

    /// Merges a block whose pages were unmapped with unmapped neighbours, and lists the whole.
    fn merge_unmapped(&mut self, heap: &mut Heap, mut id: BlockId) {
        heap.blocks.set_state(id, BlockState::Unmapped);
        if let Some(next) = self.neighbour(heap, heap.blocks.get(id).next, BlockState::Unmapped) {
            self.remove_unmapped(heap, next);
            heap.blocks.merge_with_next(id);
        }
        if let Some(previous) =
            self.neighbour(heap, heap.blocks.get(id).previous, BlockState::Unmapped)
        {
            self.remove_unmapped(heap, previous);
            heap.blocks.merge_with_next(previous);
            self.ranks.rename(id, previous);
            id = previous;
        }
        self.insert_unmapped(heap, id);
    }

    fn neighbour(&self, heap: &Heap, id: Option<BlockId>, state: BlockState) -> Option<BlockId> {
        id.filter(|&id| heap.blocks.state(id) == state)
    }

    fn insert_unmapped(&mut self, heap: &mut Heap, id: BlockId) {
        heap.blocks.set_state(id, BlockState::Unmapped);
        let block = heap.blocks.get(id);
        let (domain, kind, address) = (block.domain, block.kind, block.address);
        let before = self.pool_of(domain, kind).unmapped.insert(address, id);
        debug_assert_eq!(before, None, "a block is listed once");
    }

    fn remove_unmapped(&mut self, heap: &Heap, id: BlockId) {
        let block = heap.blocks.get(id);
        let pool = self.pool_of(block.domain, block.kind);
        let removed = pool.unmapped.remove(&block.address);
        debug_assert_eq!(removed, Some(id), "the block was listed");
    }
}
