//! Regions: how they are asked of the driver, extended, and given back.

use super::{Bfc, KIND, ROUNDING, doubled};
use crate::block::{BlockId, BlockState, SegmentId};
use crate::domain::{DomainId, PoolIndex};
use crate::driver::{Driver, DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::Bytes;

impl Bfc {
    /// Takes a region that a request fits in from the driver, and returns whether it did.
    ///
    /// Each region is asked to be twice as large as the one before; where the driver refuses, nine
    /// tenths of the size are tried, and so on down to the request.
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
        // What was refused is asked for again next time; what was enough doubles.
        let next_region_size = match region {
            Some(_) if is_enough => doubled(region_size),
            _ => region_size,
        };
        self.chunks_of(request.domain).next_region_size = Some(next_region_size);
        Ok(region
            .map(|region| self.insert_region(heap, region))
            .is_some())
    }

    /// Returns the size of a domain's first region: small where regions grow, otherwise all that the
    /// limit and the device leave. On a simulated device without a capacity that is 64 TiB, and a
    /// second stream gets nothing on any device: without growth, BFC has one region.
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

    /// Returns the bytes that may be held from the driver.
    fn limit<M: Memory>(&mut self, heap: &Heap, memory: &mut M) -> Result<Bytes, DriverError> {
        if let Some(limit) = self.known_limit(heap) {
            return Ok(limit);
        }
        let total = memory.physical_mut().driver_mut().memory_info()?.total;
        self.device_total = Some(total);
        Ok(total)
    }

    /// Returns the bytes that may be held from the driver, as far as that is known without asking:
    /// always, once there is a region.
    #[inline]
    pub(super) fn known_limit(&self, heap: &Heap) -> Option<Bytes> {
        heap.limit.or(self.device_total)
    }

    /// Makes a free chunk of a new region.
    fn insert_region(&mut self, heap: &mut Heap, region: SegmentId) {
        let id = heap.insert_whole_block(region);
        debug_assert!((heap.blocks.get(id).size % ROUNDING).is_zero());
        self.insert_free(heap, id);
    }

    /// Returns whether the driver could have enough for a request if every free region went back.
    pub(super) fn could_fit_after_release(&self, heap: &Heap, request: &Request) -> bool {
        let Some(limit) = self.known_limit(heap) else {
            return false;
        };
        // Private pools that are held keep what they have.
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

    /// Returns the first chunks of a domain's regions in which nothing is in use, smallest chunk
    /// first. Linear in the free chunks.
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

    /// Makes the next region of each domain of a pool twice the largest that is left. If regions doubled from one that
    /// was released, a program that empties its cache often would soon ask for more than any card has. TensorFlow's
    /// programs have no such call. Linear in the domains and segments.
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

    /// Gives a region in which nothing is in use back, by its first chunk.
    ///
    /// # Errors
    ///
    /// What the driver said; the region is then still free.
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

/// Takes up to `size` bytes from the driver, as many as it has but at least what a request needs.
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

/// Returns a chunk and those behind it in its region.
fn following(heap: &Heap, first: BlockId) -> impl Iterator<Item = BlockId> {
    std::iter::successors(Some(first), |&id| heap.blocks.get(id).next)
}

/// Returns the next smaller size to try: nine tenths, rounded up, but always less than before.
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
