//! Regions: how they are allocated, sized and released.

use super::{Bfc, KIND, ROUNDING, doubled};
use crate::block::{BlockId, BlockState, SegmentId};
use crate::domain::{DomainId, PoolIndex};
use crate::driver::{Driver, DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::Bytes;

impl Bfc {
    /// Allocates a region in which a request fits. Returns whether the driver and the limit allowed it.
    ///
    /// Each region is twice as large as the one before. If the driver refuses, nine tenths of the size are tried,
    /// and so on down to the request's size.
    pub(super) fn extend<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<bool, DriverError> {
        let limit = self.limit(heap, memory)?;
        let available = limit.saturating_sub(heap.limited());
        let available = available.round_down(ROUNDING);
        if request.size > available {
            return Ok(false);
        }
        let mut region_size = match self.chunks_of(request.domain).next_region_size {
            Some(size) => size,
            None => self.first_region_size(memory, limit)?,
        };
        let is_enough = region_size >= request.size;
        while region_size < request.size {
            region_size = doubled(region_size);
        }
        let size = region_size.min(available);
        let region = allocate_region(heap, memory, request, size)?;
        // The size doubles only if it was large enough and the driver had memory. A refused size is tried again
        // next time.
        let next_region_size = match region {
            Some(_) if is_enough => doubled(region_size),
            _ => region_size,
        };
        self.chunks_of(request.domain).next_region_size = Some(next_region_size);
        Ok(region
            .map(|region| self.insert_region(heap, region))
            .is_some())
    }

    /// Returns the size of a domain's first region. It is small if regions grow, otherwise all free memory within
    /// the limit: 64 TiB on a simulated device without a capacity. Without growth BFC has one region, so a second
    /// stream gets no memory.
    fn first_region_size<M: Memory>(
        &self,
        memory: &mut M,
        limit: Bytes,
    ) -> Result<Bytes, DriverError> {
        let size = if self.config.allow_growth {
            self.config.initial_region_size.min(limit)
        } else {
            memory
                .physical_mut()
                .driver_mut()
                .memory_info()?
                .free
                .min(limit)
        };
        Ok(size.round_down(ROUNDING).max(ROUNDING))
    }

    /// Returns the bytes that may be reserved.
    fn limit<M: Memory>(&mut self, heap: &Heap, memory: &mut M) -> Result<Bytes, DriverError> {
        if let Some(limit) = self.known_limit(heap) {
            return Ok(limit);
        }
        let total = memory.physical_mut().driver_mut().memory_info()?.total;
        self.device_total = Some(total);
        Ok(total)
    }

    /// Returns the bytes that may be reserved if this is known without a driver call. It is known once there is a
    /// region.
    #[inline]
    pub(super) fn known_limit(&self, heap: &Heap) -> Option<Bytes> {
        heap.limit.or(self.device_total)
    }

    /// Lists a new region as one free chunk.
    fn insert_region(&mut self, heap: &mut Heap, region: SegmentId) {
        let id = heap.insert_whole_block(region);
        debug_assert!((heap.blocks.get(id).size % ROUNDING).is_zero());
        self.insert_free(heap, id);
    }

    /// Returns whether the limit would allow a request if every free region were released.
    pub(super) fn could_fit_after_release(&self, heap: &Heap, request: &Request) -> bool {
        let Some(limit) = self.known_limit(heap) else {
            return false;
        };
        // Private pools in use keep their memory.
        let pools = heap.domains.pools();
        let pools =
            pools.filter(|&(index, pool)| index == PoolIndex::DEFAULT || pool.use_count == 0);
        let domains = pools.flat_map(|(pool, _)| heap.domains.of_pool(pool));
        let regions = domains.flat_map(|domain| self.free_regions(heap, domain));
        let free: Bytes = regions
            .map(|first| heap.segments.get(heap.blocks.segment(first)).size)
            .sum();
        !free.is_zero() && request.size <= limit.saturating_add(free).saturating_sub(heap.limited())
    }

    /// Returns the first chunk of each wholly free region of a domain, smallest chunk first. Linear in the free
    /// chunks.
    pub(super) fn free_regions(&self, heap: &Heap, domain: DomainId) -> Vec<BlockId> {
        let chunks = self.domains.get(domain.index());
        let free = chunks.into_iter().flat_map(|chunks| chunks.free.iter());
        free.map(|chunk| chunk.id)
            .filter(|&id| heap.blocks.get(id).previous.is_none())
            .filter(|&id| {
                let free = |&id: &BlockId| heap.blocks.state(id) == BlockState::Free;
                following(heap, id).all(|id| free(&id))
            })
            .collect()
    }

    /// Makes the next region of each domain of a pool twice its largest remaining region. If regions doubled from
    /// a released one, a program that often empties its cache would soon request more than any card has.
    /// TensorFlow has no such call. Linear in the domains and segments.
    pub(super) fn double_from_what_is_left(&mut self, heap: &Heap, pool: PoolIndex) {
        for domain in heap.domains.of_pool(pool) {
            self.chunks_of(domain).next_region_size = None;
        }
        for (_, region) in heap.segments.iter() {
            if heap.domains.domain(region.domain).pool == pool {
                let next = &mut self.chunks_of(region.domain).next_region_size;
                *next = (*next).max(Some(doubled(region.size)));
            }
        }
    }

    /// Releases a wholly free region. `first` is its first chunk.
    ///
    /// # Errors
    ///
    /// The driver's error. The region is then still free and listed.
    pub(super) fn release_region<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        first: BlockId,
    ) -> Result<(), DriverError> {
        let chunks: Vec<BlockId> = following(heap, first).collect();
        for &id in &chunks {
            self.remove_free(heap, id);
        }
        debug_assert!(
            heap.blocks.get(first).previous.is_none(),
            "it is the region's first chunk"
        );
        for &next in &chunks[1..] {
            super::merge_with_next(heap, first, next);
        }
        if let Err(error) = heap.free_segment(memory, heap.blocks.segment(first)) {
            self.insert_free(heap, first);
            return Err(error);
        }
        heap.blocks.remove(first);
        Ok(())
    }
}

/// Allocates a region of `size` bytes, or of the largest smaller size that the driver has and that holds the
/// request.
fn allocate_region<M: Memory>(
    heap: &mut Heap,
    memory: &mut M,
    request: &Request,
    mut size: Bytes,
) -> Result<Option<SegmentId>, DriverError> {
    while size >= request.size {
        let region = heap.allocate_segment(memory, request.domain, size, KIND);
        if let Some(region) = unless_out_of_memory(region)? {
            return Ok(Some(region));
        }
        size = nine_tenths(size);
    }
    Ok(None)
}

/// Returns a chunk and all chunks behind it in its region.
fn following(heap: &Heap, first: BlockId) -> impl Iterator<Item = BlockId> {
    std::iter::successors(Some(first), |&id| heap.blocks.get(id).next)
}

/// Returns the next size to try: nine tenths, rounded up, but always smaller than `size`.
fn nine_tenths(size: Bytes) -> Bytes {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rounded as TensorFlow rounds it: a product in single precision"
    )]
    let reduced = Bytes((size.get() as f32 * 0.9_f32) as u64).round_up(ROUNDING);
    reduced.min(size.saturating_sub(ROUNDING))
}
