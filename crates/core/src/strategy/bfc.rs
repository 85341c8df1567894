//! `bfc`: TensorFlow's best fit with coalescing.
//!
//! It keeps TensorFlow's words: a *region* is a segment, a *chunk* is a block, and free chunks are in 21 *bins*
//! by size.
//!
//! - A request takes the smallest free chunk that fits; of several, the one at the lowest address.
//! - The rest of the chunk is split off if it is at least as large as the request, or too large to waste.
//! - Free neighbours are merged.
//!
//! Source: `xla/tsl/framework/bfc_allocator.cc` of OpenXLA, 2026. This module makes its decisions in the same
//! order. The option for spatial partitioning is left out. One difference is intended: after free regions were
//! released, the next region is twice the largest remaining one. TensorFlow continues from the last size and
//! takes all the memory that there is.
//!
//! Memory is reused only within its domain, as in every strategy. So each pair of pool and stream is a BFC
//! allocator of its own; all share the limit. The limit is the one that the program set, otherwise all of the
//! device's memory. TensorFlow gets it as an argument.

mod frontier;
mod options;
mod regions;
mod report;
mod timing;

use std::collections::BTreeSet;

use super::free_blocks::{FreeBlock, FreeBlocks};
use super::{CheckpointBlock, Configured, Placement, Release, Request, Strategy};
use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::domain::DomainId;
use crate::driver::DriverError;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress};
pub use options::BfcConfig;
use timing::Timing;

/// Sizes are rounded up to this, and no chunk is smaller.
const ROUNDING: Bytes = Bytes(256);
/// A chunk may be larger than its request by less than this, unless a fraction of the limit is set.
const WASTE_MAX: Bytes = Bytes::mib(128);
/// Regions serve requests of every size, so all count for one of PyTorch's two size pools.
const KIND: SizeKind = SizeKind::Large;

/// The strategy.
#[derive(Debug)]
pub(crate) struct Bfc {
    config: BfcConfig,
    /// By [`DomainId::index`].
    domains: Vec<DomainChunks>,
    /// The device's memory, once the driver was asked for it.
    device_total: Option<Bytes>,
    /// Counts frees for the safe frontier; `None` without `safe_frontier_lag`.
    timing: Option<Timing>,
}

/// The free memory of one domain.
#[derive(Debug, Default)]
struct DomainChunks {
    /// Every free chunk of the domain.
    ///
    /// Each bin is a range of sizes. So the order by size and address is that of a search through the bins, and
    /// the bins themselves are needed only in reports.
    free: FreeBlocks,
    /// The free chunks that the safe frontier has not passed, by the count of their free. They are exactly the
    /// chunks of `free` whose mark is not zero.
    recent: BTreeSet<(u64, DeviceAddress)>,
    /// The size of the next region to request from the driver; `None` before the first region.
    next_region_size: Option<Bytes>,
}

/// The neighbours that a free chunk is merged with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Merge {
    /// Those that the safe frontier has passed.
    Safe,
    /// All free ones.
    All,
}

impl DomainChunks {
    /// Lists a free chunk. `chunk` and `mark` are its entries in the block table.
    #[inline(always)]
    fn insert(&mut self, id: BlockId, chunk: &Block, mark: u64) {
        debug_assert_eq!(chunk.state, BlockState::Free);
        self.free.insert(FreeBlock::of(id, chunk));
        if mark != 0 {
            let is_new = self.recent.insert((mark, chunk.address));
            debug_assert!(is_new, "a chunk is listed once");
        }
        debug_assert!(self.recent.len() <= self.free.len());
    }

    /// Undoes [`DomainChunks::insert`].
    #[inline(always)]
    fn remove(&mut self, id: BlockId, chunk: &Block, mark: u64) {
        self.free.remove(FreeBlock::of(id, chunk));
        self.forget(chunk, mark);
    }

    /// Removes a chunk from `recent`, after it was removed from `free`.
    #[inline(always)]
    fn forget(&mut self, chunk: &Block, mark: u64) {
        if mark != 0 {
            let was_listed = self.recent.remove(&(mark, chunk.address));
            debug_assert!(was_listed, "a chunk with a mark is among the recent ones");
        }
    }
}

impl Bfc {
    /// Returns whether regions may be released before a request fails, and whether that could help it.
    fn gains_by_release(&self, heap: &Heap, request: &Request) -> bool {
        self.config.garbage_collection && self.could_fit_after_release(heap, request)
    }

    /// Returns the free memory of a domain, creating its entry if needed.
    fn chunks_of(&mut self, domain: DomainId) -> &mut DomainChunks {
        if domain.index() >= self.domains.len() {
            self.domains
                .resize_with(domain.index() + 1, DomainChunks::default);
        }
        &mut self.domains[domain.index()]
    }

    /// Merges a freed chunk with the neighbours that it may be merged with, and lists it.
    #[inline(never)]
    fn merge_and_list(&mut self, heap: &mut Heap, id: BlockId) {
        let mark = self.timing.as_mut().map_or(0, Timing::count_free);
        heap.blocks.set_mark(id, mark);
        if mark == 0 {
            let whole = self.coalesce(heap, id, Merge::Safe);
            self.insert_free(heap, whole);
        } else {
            self.insert_free(heap, id);
            self.merge_passed(heap);
        }
    }

    /// Lists a free chunk.
    #[inline]
    fn insert_free(&mut self, heap: &Heap, id: BlockId) {
        let (chunk, mark) = (heap.blocks.get(id), heap.blocks.mark(id));
        self.domains[chunk.domain.index()].insert(id, &chunk, mark);
    }

    /// Undoes [`Bfc::insert_free`].
    #[inline]
    fn remove_free(&mut self, heap: &Heap, id: BlockId) {
        let (chunk, mark) = (heap.blocks.get(id), heap.blocks.mark(id));
        self.domains[chunk.domain.index()].remove(id, &chunk, mark);
    }

    /// Splits an unlisted chunk for a request if the rest is large enough, and lists the rest.
    #[inline]
    fn carve(&mut self, heap: &mut Heap, id: BlockId, request: &Request) {
        if self.should_split(heap, &heap.blocks.get(id), request.size) {
            let rest = heap.blocks.split(id, request.size);
            self.insert_free(heap, rest);
        }
    }

    /// Returns whether the rest of a chunk becomes a chunk of its own.
    #[inline]
    fn should_split(&self, heap: &Heap, chunk: &Block, size: Bytes) -> bool {
        let leaves_rest = leaves_rest(chunk.size, size, || self.waste_max(heap));
        leaves_rest && !heap.domains.is_no_split(chunk.domain)
    }

    /// Returns the size from which the rest of a chunk is always split off, also if the request is larger.
    fn waste_max(&self, heap: &Heap) -> Bytes {
        if self.config.fragmentation_fraction == 0.0 {
            return WASTE_MAX;
        }
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "rounded as TensorFlow rounds it: a float product, cut to a whole number of bytes"
        )]
        let part =
            |limit: Bytes| Bytes((self.config.fragmentation_fraction * limit.get() as f64) as u64);
        self.known_limit(heap).map_or(WASTE_MAX, part)
    }

    /// Merges an unlisted free chunk with its free neighbours and returns the whole. The neighbours are removed
    /// from their lists; the whole is not listed.
    #[inline(always)]
    fn coalesce(&mut self, heap: &mut Heap, id: BlockId, merge: Merge) -> BlockId {
        let chunk = heap.blocks.get(id);
        let merges = |&neighbour: &BlockId| {
            let is_safe = heap.blocks.mark(neighbour) == 0 || merge == Merge::All;
            is_safe && heap.blocks.state(neighbour) == BlockState::Free
        };
        // Both records are loaded first, because a free neighbour's record is likely not in the cache.
        let (next, previous) = (chunk.next.filter(merges), chunk.previous.filter(merges));
        if let Some(next) = next {
            self.remove_free(heap, next);
            merge_with_next(heap, id, next);
        }
        if let Some(previous) = previous {
            self.remove_free(heap, previous);
            merge_with_next(heap, previous, id);
        }
        previous.unwrap_or(id)
    }
}

#[inline]
fn rounded(requested: Bytes) -> Bytes {
    requested.round_up(ROUNDING)
}

/// Returns whether a chunk is split for a request of `size` bytes: the rest is at least as large as the request,
/// or at least `waste_max`.
#[inline]
fn leaves_rest(chunk: Bytes, size: Bytes, waste_max: impl FnOnce() -> Bytes) -> bool {
    let rest = chunk - size;
    !rest.is_zero() && (rest >= size || rest >= waste_max())
}

/// Returns twice a region's size, at most [`Bytes::REQUEST_MAX`].
fn doubled(size: Bytes) -> Bytes {
    size.saturating_add(size).min(Bytes::REQUEST_MAX)
}

impl Configured for Bfc {
    type Options = BfcConfig;

    fn new(options: &BfcConfig, _heap: &mut Heap) -> Bfc {
        Bfc {
            timing: options.safe_frontier_lag.map(Timing::new),
            config: options.clone(),
            domains: Vec::new(),
            device_total: None,
        }
    }

    /// `None` also if `fragmentation_fraction` is set: the size then depends on the limit.
    fn size_in(
        options: &Self::Options,
        requested: Bytes,
        free: Bytes,
        _segment: Bytes,
    ) -> Option<Bytes> {
        let size = rounded(requested);
        if options.fragmentation_fraction != 0.0 || free < size {
            return None;
        }
        Some(if leaves_rest(free, size, || WASTE_MAX) {
            size
        } else {
            free
        })
    }
}

impl Strategy for Bfc {
    #[inline]
    fn block_size(&self, requested: Bytes) -> Bytes {
        rounded(requested)
    }

    /// This is the smallest region that is tried. Larger ones are tried first.
    fn segment_size(&self, request: &Request) -> Bytes {
        request.size
    }

    #[inline(never)]
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        let chunks = self.domains.get_mut(request.domain.index())?;
        let best = chunks.free.take_first_at_least(request.size, |_| true)?;
        let (chunk, mark) = (heap.blocks.get(best.id), heap.blocks.mark(best.id));
        chunks.forget(&chunk, mark);
        self.carve(heap, best.id, request);
        Some(best.id)
    }

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        if self.extend(heap, memory, request)? {
            return Ok(self.take(heap, request));
        }
        // Before the request fails, chunks that the frontier has not passed are merged until one is large enough.
        if self.merge_recent(heap, request) {
            return Ok(self.take(heap, request));
        }
        Ok(None)
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
        let (pool, failing) = match wanted {
            Release::Pool(pool, failing) => (pool, failing),
            Release::Domain(domain) => {
                // Regions start small again, as for a new stream.
                self.chunks_of(domain).next_region_size = None;
                return Ok(true);
            }
            _ => return Ok(false),
        };
        if failing.is_some_and(|request| !self.gains_by_release(heap, request)) {
            return Ok(false);
        }
        let domains = heap.domains.of_pool(pool).into_iter();
        let regions: Vec<BlockId> = domains
            .flat_map(|domain| self.free_regions(heap, domain))
            .collect();
        let released = { regions.into_iter() }
            .try_for_each(|region| self.release_region(heap, memory, region));
        // Also if the driver refused one, because others may have been released before.
        self.double_from_what_is_left(heap, pool);
        released.map(|()| true)
    }

    fn largest_free(&self, _heap: &Heap, domain: DomainId) -> Bytes {
        let chunks = self.domains.get(domain.index());
        let largest = chunks.and_then(|chunks| chunks.free.last());
        largest.map_or(Bytes::ZERO, |chunk| chunk.size)
    }

    fn describe(&self, heap: &Heap, request: &Request) -> String {
        let largest_free = Strategy::largest_free(self, heap, request.domain);
        report::describe(heap, request, largest_free)
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        let mut free = Bytes::ZERO;
        for (id, chunk) in heap.blocks.iter() {
            check_links(heap, id, &chunk)?;
            if chunk.state == BlockState::Free {
                free += chunk.size;
            }
        }
        self.check_lists(heap)?;
        Ok(free)
    }
}

impl Placement for Bfc {
    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId {
        let mut id = around.expect("a region is covered by chunks");
        self.remove_free(heap, id);
        // Chunks that the frontier has not passed may not be merged yet.
        while heap.blocks.get(id).end() < wanted.address + wanted.size {
            let next = heap.blocks.get(id).next.expect("the region has the memory");
            self.remove_free(heap, next);
            merge_with_next(heap, id, next);
        }
        let before = wanted.address.offset_from(heap.blocks.get(id).address);
        if !before.is_zero() {
            let rest = heap.blocks.split(id, before);
            self.insert_free(heap, id);
            id = rest;
        }
        if wanted.size < heap.blocks.get(id).size {
            let rest = heap.blocks.split(id, wanted.size);
            self.insert_free(heap, rest);
        }
        id
    }
}

/// Checks, for tests and debugging only.
impl Bfc {
    /// Checks that `free` holds exactly the free chunks, and `recent` exactly those that the frontier has not
    /// passed.
    fn check_lists(&self, heap: &Heap) -> Result<(), String> {
        let mut listed_total = 0;
        for chunks in &self.domains {
            let mut recent = 0;
            for listed in chunks.free.iter() {
                let chunk = heap.blocks.get(listed.id);
                if chunk.state != BlockState::Free || FreeBlock::of(listed.id, &chunk) != listed {
                    return Err(format!("{} is listed as free but is not", chunk.address));
                }
                let mark = heap.blocks.mark(listed.id);
                if mark != 0 && !chunks.recent.contains(&(mark, chunk.address)) {
                    return Err(format!("{} waits for no frontier", chunk.address));
                }
                recent += usize::from(mark != 0);
            }
            if recent != chunks.recent.len() {
                return Err("a chunk that is not free waits for the frontier".to_owned());
            }
            listed_total += chunks.free.len();
        }
        let is_free = |(_, chunk): &(_, Block)| chunk.state == BlockState::Free;
        if listed_total != heap.blocks.iter().filter(is_free).count() {
            return Err("a free chunk is in no list".to_owned());
        }
        Ok(())
    }
}

fn check_links(heap: &Heap, id: BlockId, chunk: &Block) -> Result<(), String> {
    let region = heap.segments.get(heap.blocks.segment(id));
    let at = chunk.address;
    let is_safe = |id| heap.blocks.state(id) == BlockState::Free && heap.blocks.mark(id) == 0;
    let next = chunk.next.map(|next| (next, heap.blocks.get(next)));
    match next {
        None if chunk.end() != region.address + region.size => {
            Err(format!("nothing follows {at} in its region"))
        }
        Some((_, next)) if next.previous != Some(id) || next.address != chunk.end() => {
            Err(format!("{at} and the chunk behind it are not neighbours"))
        }
        Some((next, _)) if is_safe(id) && is_safe(next) => {
            Err(format!("{at} and the chunk behind it should be one"))
        }
        _ if chunk.previous.is_none() && at != region.address => {
            Err(format!("nothing precedes {at} in its region"))
        }
        _ => Ok(()),
    }
}

/// Merges a free chunk with the free one behind it. The whole gets the later of the two counts of frees.
#[inline]
fn merge_with_next(heap: &mut Heap, id: BlockId, next: BlockId) {
    let mark = heap.blocks.mark(id).max(heap.blocks.mark(next));
    heap.blocks.merge_with_next(id);
    heap.blocks.set_mark(id, mark);
}

#[cfg(test)]
mod tests;
