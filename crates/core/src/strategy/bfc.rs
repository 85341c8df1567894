//! `bfc`: TensorFlow's best fit with coalescing.
//!
//! Its own words are kept: memory comes from the driver in *regions* (segments), which are divided
//! into *chunks* (blocks); free chunks lie in 21 *bins* by size. A request takes the smallest free
//! chunk that fits, of several the one at the lowest address; what is left over is split off if it is
//! at least as large as the request, or too large to waste; free neighbours are merged. Source:
//! `xla/tsl/framework/bfc_allocator.cc` of OpenXLA, 2026, whose decisions are made here in the same
//! order. Of its options, spatial partitioning is left out. One difference is meant: once free regions went back,
//! regions double from the largest that is left, where TensorFlow's go on from the last and take all that there is.
//!
//! As everywhere, memory is reused within its domain only: each pair of pool and stream is a BFC
//! allocator of its own, and the limit is shared. Where TensorFlow is told the limit, this takes the
//! limit that the program set or, without one, all of the device's memory.

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
/// What a chunk may be larger than its request, unless a fraction of the limit is set.
const WASTE_MAX: Bytes = Bytes::mib(128);
/// Regions serve requests of every size, so all of them count for one of PyTorch's two size pools.
const KIND: SizeKind = SizeKind::Large;

/// The strategy.
#[derive(Debug)]
pub(crate) struct Bfc {
    config: BfcConfig,
    /// By [`DomainId::index`].
    domains: Vec<DomainChunks>,
    /// The device's memory, once it has been asked for.
    device_total: Option<Bytes>,
    /// How frees are counted, where the device lags behind them.
    timing: Option<Timing>,
}

/// The free memory of one domain.
#[derive(Debug, Default)]
struct DomainChunks {
    /// Every free chunk of the domain.
    ///
    /// The order by size and address is that of a search through the bins from the request's on:
    /// each bin is a range of sizes. So the bins themselves are needed only where they are shown.
    free: FreeBlocks,
    /// The free chunks that the safe frontier has not passed, by when they were freed: exactly those
    /// of `free` whose mark is not zero.
    recent: BTreeSet<(u64, DeviceAddress)>,
    /// What the driver is asked for next; `None` before the first region.
    next_region_size: Option<Bytes>,
}

/// Which neighbours a free chunk is merged with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Merge {
    /// Those that the safe frontier has passed.
    Safe,
    /// Every free one.
    All,
}

impl DomainChunks {
    /// Makes a free chunk, of which the table has `chunk` and `mark`, findable.
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

    /// Does what follows when a chunk is taken out of `free`.
    #[inline(always)]
    fn forget(&mut self, chunk: &Block, mark: u64) {
        if mark != 0 {
            let was_listed = self.recent.remove(&(mark, chunk.address));
            debug_assert!(was_listed, "a chunk with a mark is among the recent ones");
        }
    }
}

impl Bfc {
    /// Returns whether releasing regions before a request fails is allowed, and helps it.
    fn gains_by_release(&self, heap: &Heap, request: &Request) -> bool {
        self.config.garbage_collection && self.could_fit_after_release(heap, request)
    }

    /// Returns the free memory of a domain that may have none yet.
    fn chunks_of(&mut self, domain: DomainId) -> &mut DomainChunks {
        if domain.index() >= self.domains.len() {
            self.domains
                .resize_with(domain.index() + 1, DomainChunks::default);
        }
        &mut self.domains[domain.index()]
    }

    /// Merges a chunk that was freed with those neighbours that it may be merged with, and makes it findable.
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

    /// Makes a chunk that is free findable.
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

    /// Takes what a request needs from a chunk that is in no list.
    #[inline]
    fn carve(&mut self, heap: &mut Heap, id: BlockId, request: &Request) {
        if self.should_split(heap, &heap.blocks.get(id), request.size) {
            let rest = heap.blocks.split(id, request.size);
            self.insert_free(heap, rest);
        }
    }

    /// Returns whether what a request leaves of a chunk becomes a chunk of its own.
    #[inline]
    fn should_split(&self, heap: &Heap, chunk: &Block, size: Bytes) -> bool {
        let leaves_rest = leaves_rest(chunk.size, size, || self.waste_max(heap));
        leaves_rest && !heap.domains.is_no_split(chunk.domain)
    }

    /// Returns the size from which on the rest of a chunk is split off, even from a larger request.
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

    /// Merges a free chunk that is in no list with its free neighbours, which leave theirs, and
    /// returns the whole, which is in none either.
    #[inline(always)]
    fn coalesce(&mut self, heap: &mut Heap, id: BlockId, merge: Merge) -> BlockId {
        let chunk = heap.blocks.get(id);
        let merges = |&neighbour: &BlockId| {
            let is_safe = heap.blocks.mark(neighbour) == 0 || merge == Merge::All;
            is_safe && heap.blocks.state(neighbour) == BlockState::Free
        };
        // Both neighbours are asked for first: those that are free have records that are likely far away.
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

/// Returns whether a request of a size leaves so much of a chunk that it is split, where a chunk may be larger than
/// its request by less than `waste_max`.
#[inline]
fn leaves_rest(chunk: Bytes, size: Bytes, waste_max: impl FnOnce() -> Bytes) -> bool {
    let rest = chunk - size;
    !rest.is_zero() && (rest >= size || rest >= waste_max())
}

/// Returns twice a region's size. Sizes stop growing where requests do.
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

    /// With a fraction, the limit decides that too.
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

    /// The driver is asked for more first, and for this before it is given up.
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
        // Rather than fail, what the frontier has not passed is merged, as far as it takes.
        if self.merge_recent(heap, request) {
            return Ok(self.take(heap, request));
        }
        Ok(None)
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, _block: Block) -> Option<SegmentId> {
        // A call to which a block is passed writes it to memory: there it is read again.
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
                // Regions start small again, as those of a new stream do.
                self.chunks_of(domain).next_region_size = None;
                return Ok(true);
            }
            Release::Idle | Release::For(_) => return Ok(false),
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
        // Also where the driver refused one: others went back before.
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
        // What the frontier has not passed need not be one chunk.
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

/// What is checked, and never needed otherwise.
impl Bfc {
    /// The lists hold exactly the free chunks, and exactly those that the frontier has not passed.
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

/// Joins a free chunk with the free one behind it: the whole was freed when the later part was.
#[inline]
fn merge_with_next(heap: &mut Heap, id: BlockId, next: BlockId) {
    let mark = heap.blocks.mark(id).max(heap.blocks.mark(next));
    heap.blocks.merge_with_next(id);
    heap.blocks.set_mark(id, mark);
}

#[cfg(test)]
mod tests;
