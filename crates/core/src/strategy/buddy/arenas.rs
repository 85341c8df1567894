//! Arenas, the segments that runs are cut from, and segments for single blocks that no arena can hold.

use super::forest::{Forest, Position, Run};
use crate::block::{BlockId, BlockState, SegmentId};
use crate::domain::{DomainId, PoolIndex};
use crate::driver::{DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::stats::SizeKind;
use crate::strategy::free_blocks::{FreeBlock, FreeBlocks};
use crate::strategy::shared_segment::{SEGMENT_ROUNDING, allocate_shared_segment};
use crate::strategy::{CheckpointBlock, Request};
use crate::units::{Bytes, DeviceAddress};

/// The unit of runs. No part of an arena is smaller.
pub(in crate::strategy) const GRANULE: Bytes = Bytes::kib(1);

/// The mark of a block that is a whole segment. The mark of a run is the number of its arena.
const OWN_SEGMENT: u64 = u64::MAX;

/// The arenas of every domain.
#[derive(Debug)]
pub(in crate::strategy) struct Arenas {
    /// A power of two. An arena is smaller only if the device or the limit has no more memory.
    arena_size: Bytes,
    /// By [`DomainId::index`].
    domains: Vec<DomainArenas>,
}

#[derive(Debug, Default)]
struct DomainArenas {
    forest: Forest,
    /// By the number of their tree. Entries of removed trees are stale.
    arenas: Vec<Arena>,
    /// Free segments of single blocks, cached until [`Arenas::release`].
    own_segments: FreeBlocks,
}

#[derive(Clone, Copy, Debug)]
struct Arena {
    segment: SegmentId,
    address: DeviceAddress,
    size: Bytes,
}

/// A part of an arena.
#[derive(Clone, Copy, Debug)]
pub(in crate::strategy) struct Place {
    /// The number of the arena in its domain.
    pub(in crate::strategy) arena: u64,
    pub(in crate::strategy) segment: SegmentId,
    /// The bytes in front of it in the segment.
    pub(in crate::strategy) offset: Bytes,
}

/// Returns the size of a block in a segment of `segment` bytes: `in_arena` if the segment is an arena, otherwise
/// all of it.
pub(in crate::strategy) fn size_in(segment: Bytes, arena_size: Bytes, in_arena: Bytes) -> Bytes {
    if is_arena(segment, arena_size) {
        in_arena
    } else {
        segment
    }
}

/// Returns whether a segment of `segment` bytes is an arena and not a single block. Arenas are powers of two of
/// at most `arena_size`; they are smaller if the device has no more memory.
fn is_arena(segment: Bytes, arena_size: Bytes) -> bool {
    segment <= arena_size && segment.get().is_power_of_two()
}

impl Arenas {
    /// Returns a set without arenas. `arena_size` is rounded down to a power of two.
    pub(in crate::strategy) fn new(arena_size: Bytes) -> Arenas {
        let order = arena_size.max(GRANULE).get().ilog2();
        Arenas {
            arena_size: Bytes(1 << order),
            domains: Vec::new(),
        }
    }

    /// Returns the size of an arena. Larger requests get segments of their own.
    #[inline]
    pub(in crate::strategy) fn arena_size(&self) -> Bytes {
        self.arena_size
    }

    /// Takes a run from the arenas of a domain. `None` if no arena has room. Constant time.
    #[inline]
    pub(in crate::strategy) fn take(&mut self, domain: DomainId, run: Run) -> Option<Place> {
        let domain = self.domains.get_mut(domain.index())?;
        let position = domain.forest.take(run)?;
        debug_assert!(
            bytes(position.granule + run.granules()) <= domain.arenas[position.tree].size
        );
        Some(Place {
            arena: position.tree as u64,
            segment: domain.arenas[position.tree].segment,
            offset: bytes(position.granule),
        })
    }

    /// Puts back a run that [`Arenas::take`] returned for the domain. Its place is its arena and the bytes in
    /// front of it there. Constant time.
    #[inline]
    pub(in crate::strategy) fn put(
        &mut self,
        domain: DomainId,
        (arena, offset): (u64, Bytes),
        run: Run,
    ) {
        let position = Position {
            tree: index(arena),
            granule: offset.get() / GRANULE.get(),
        };
        let domain = &mut self.domains[domain.index()];
        debug_assert!(offset + bytes(run.granules()) <= domain.arenas[position.tree].size);
        domain.forest.put(position, run);
    }

    /// Takes the run at a given place, all of which is free, and returns the place.
    pub(in crate::strategy) fn take_at(
        &mut self,
        domain: DomainId,
        (segment, offset): (SegmentId, Bytes),
        run: Run,
    ) -> Place {
        let domain = &mut self.domains[domain.index()];
        let mut trees = domain.forest.trees();
        let tree = trees.find(|&tree| domain.arenas[tree].segment == segment);
        let tree = tree.expect("the segment is an arena");
        drop(trees);
        let position = Position {
            tree,
            granule: offset.get() / GRANULE.get(),
        };
        domain.forest.take_at(position, run);
        Place {
            arena: tree as u64,
            segment,
            offset,
        }
    }

    /// Takes a run and inserts its block. `None` if no arena has room.
    #[inline]
    pub(in crate::strategy) fn take_block(
        &mut self,
        heap: &mut Heap,
        domain: DomainId,
        run: Run,
    ) -> Option<BlockId> {
        let place = self.take(domain, run)?;
        Some(insert_block(heap, place, run))
    }

    /// Takes the run at a given place, all of which is free, and inserts its block.
    pub(in crate::strategy) fn take_block_at(
        &mut self,
        heap: &mut Heap,
        domain: DomainId,
        place: (SegmentId, Bytes),
        run: Run,
    ) -> BlockId {
        let place = self.take_at(domain, place, run);
        insert_block(heap, place, run)
    }

    /// Puts back the run of a block and removes the block. `run_of` returns the run of a size.
    #[inline]
    pub(in crate::strategy) fn put_block(
        &mut self,
        heap: &mut Heap,
        id: BlockId,
        run_of: impl Fn(Bytes) -> Run,
    ) {
        let block = heap.blocks.get(id);
        let domain = &self.domains[block.domain.index()];
        let mark = heap.blocks.mark(id);
        let arena = domain.arenas[index(mark)];
        let place = (mark, block.address.offset_from(arena.address));
        let (domain, run) = (block.domain, run_of(block.size));
        debug_assert_eq!(bytes(run.granules()), block.size, "the run is the block");
        debug_assert_eq!(arena.segment, heap.blocks.segment(id));
        debug_assert_eq!(heap.blocks.state(id), BlockState::Free);
        self.put(domain, place, run);
        heap.blocks.remove(id);
    }

    /// Adds an arena that can hold `run`. Returns whether the driver and the limit allowed it.
    ///
    /// # Errors
    ///
    /// The driver's error, unless it is out of memory.
    pub(in crate::strategy) fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        domain: DomainId,
        run: Run,
    ) -> Result<bool, DriverError> {
        let least = bytes(1 << run.enclosing_order()).max(SEGMENT_ROUNDING.min(self.arena_size));
        let segment = allocate_shared_segment(heap, memory, domain, least, self.arena_size)?;
        let Some(segment) = segment else {
            return Ok(false);
        };
        let &crate::segment::Segment { address, size, .. } = heap.segments.get(segment);
        debug_assert!(size >= least && is_arena(size, self.arena_size));
        let arena = Arena {
            segment,
            address,
            size,
        };
        let domain = self.domain(domain);
        let number = domain
            .forest
            .insert_tree((size.get() / GRANULE.get()).ilog2());
        domain
            .arenas
            .resize(domain.arenas.len().max(number + 1), arena);
        domain.arenas[number] = arena;
        debug_assert!(
            domain.forest.is_free(number),
            "a new arena is free as a whole"
        );
        Ok(true)
    }

    /// Returns whether a block of `size` bytes is a whole segment and in no arena. Constant time.
    #[inline]
    pub(in crate::strategy) fn is_own_segment(
        &self,
        heap: &Heap,
        id: BlockId,
        size: Bytes,
    ) -> bool {
        // Most blocks are too small to be a segment, so their marks need not be read.
        let least = self.arena_size.min(SEGMENT_ROUNDING);
        size >= least && heap.blocks.mark(id) == OWN_SEGMENT
    }

    /// Takes a cached segment for a request. `None` if the best one is larger than the request's block and more
    /// than an eighth of it would be wasted.
    pub(in crate::strategy) fn take_own_segment(&mut self, request: &Request) -> Option<BlockId> {
        let own_segments = &mut self.domains.get_mut(request.domain.index())?.own_segments;
        let serves = |best: &FreeBlock| {
            let waste = best.size - request.requested;
            best.size == request.size || waste <= Bytes(best.size.get() / 8)
        };
        let best = own_segments.take_first_at_least(request.size, serves)?;
        debug_assert!(best.size >= request.size);
        Some(best.id)
    }

    /// Puts back a block that is a whole segment. It stays cached until [`Arenas::release`].
    #[inline(never)]
    pub(in crate::strategy) fn put_own_segment(&mut self, domain: DomainId, segment: FreeBlock) {
        debug_assert!(segment.size >= self.arena_size.min(SEGMENT_ROUNDING));
        let domain = &mut self.domains[domain.index()];
        domain.own_segments.insert(segment);
    }

    /// Takes the cached segment of a checkpoint's block again. `None` if that block is not a whole segment.
    pub(in crate::strategy) fn take_own_segment_again(
        &mut self,
        domain: DomainId,
        wanted: &CheckpointBlock,
    ) -> Option<BlockId> {
        let own_segments = &mut self.domains[domain.index()].own_segments;
        // The rank of these blocks is their address.
        let found = { own_segments.iter() }.find(|block| block.rank == wanted.address.get())?;
        debug_assert_eq!(found.size, wanted.size, "it was kept as it was");
        own_segments.remove(found);
        Some(found.id)
    }

    /// Allocates a segment of the request's size, all of it one block. `None` if the driver or the limit refuses
    /// it.
    ///
    /// # Errors
    ///
    /// The driver's error, unless it is out of memory.
    pub(in crate::strategy) fn grow_own_segment<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let segment = heap.allocate_segment(memory, request.domain, request.size, SizeKind::Large);
        let Some(segment) = unless_out_of_memory(segment)? else {
            return Ok(None);
        };
        // The block is put back there later.
        self.domain(request.domain);
        let id = heap.insert_whole_block(segment);
        heap.blocks.set_mark(id, OWN_SEGMENT);
        debug_assert!(self.is_own_segment(heap, id, request.size));
        Ok(Some(id))
    }

    /// Releases every wholly free segment of a pool, by ascending address.
    ///
    /// # Errors
    ///
    /// The driver's error. Segments released before it stay released, and the others are unchanged.
    pub(in crate::strategy) fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        pool: PoolIndex,
    ) -> Result<(), DriverError> {
        let mut free = Vec::new();
        for id in heap.domains.of_pool(pool) {
            let Some(domain) = self.domains.get(id.index()) else {
                continue;
            };
            let trees = domain.forest.trees();
            let trees = trees.filter(|&tree| domain.forest.is_free(tree));
            let address_of = |tree: usize| domain.arenas[tree].address.get();
            free.extend(trees.map(|tree| (address_of(tree), id, Idle::Arena(tree))));
            let own = domain.own_segments.iter();
            free.extend(own.map(|block| (block.rank, id, Idle::OwnSegment(block))));
        }
        free.sort_unstable_by_key(|&(address, ..)| address);
        for (_, id, idle) in free {
            let domain = &mut self.domains[id.index()];
            match idle {
                Idle::Arena(tree) => {
                    debug_assert!(domain.forest.is_free(tree));
                    heap.free_segment(memory, domain.arenas[tree].segment)?;
                    domain.forest.remove_tree(tree);
                }
                Idle::OwnSegment(block) => {
                    debug_assert_eq!(heap.blocks.state(block.id), BlockState::Free);
                    heap.free_segment(memory, heap.blocks.segment(block.id))?;
                    domain.own_segments.remove(block);
                    heap.blocks.remove(block.id);
                }
            }
        }
        Ok(())
    }

    /// Returns the size of a domain's largest free node or cached segment.
    pub(in crate::strategy) fn largest_free(&self, domain: DomainId) -> Bytes {
        let Some(domain) = self.domains.get(domain.index()) else {
            return Bytes::ZERO;
        };
        let own = domain
            .own_segments
            .last()
            .map_or(Bytes::ZERO, |block| block.size);
        own.max(bytes(domain.forest.largest_free()))
    }

    fn domain(&mut self, domain: DomainId) -> &mut DomainArenas {
        if domain.index() >= self.domains.len() {
            self.domains
                .resize_with(domain.index() + 1, DomainArenas::default);
        }
        &mut self.domains[domain.index()]
    }

    /// Checks that the free nodes and the runs in `taken` together cover each arena exactly. `taken` has every
    /// run that the strategy took. Returns the free bytes.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong.
    pub(in crate::strategy) fn check(
        &self,
        heap: &Heap,
        taken: impl Iterator<Item = (DeviceAddress, Bytes)>,
    ) -> Result<Bytes, String> {
        let mut parts: Vec<(DeviceAddress, Bytes)> = taken.collect();
        let mut free = Bytes::ZERO;
        for domain in &self.domains {
            domain.forest.check()?;
            for tree in domain.forest.trees() {
                for (granule, granules) in domain.forest.free_nodes(tree) {
                    let size = bytes(granules);
                    parts.push((domain.arenas[tree].address + bytes(granule), size));
                    free += size;
                }
            }
            for listed in domain.own_segments.iter() {
                let block = heap.blocks.get(listed.id);
                if block.state != BlockState::Free || FreeBlock::of(listed.id, &block) != listed {
                    return Err(format!("{} is listed as free but is not", block.address));
                }
                free += listed.size;
            }
        }
        parts.sort_unstable();
        self.check_tiling(&parts)?;
        Ok(free)
    }

    /// Checks that the parts, sorted by address, cover the arenas exactly.
    fn check_tiling(&self, mut parts: &[(DeviceAddress, Bytes)]) -> Result<(), String> {
        let arenas = self.domains.iter().flat_map(|domain| {
            let trees = domain.forest.trees();
            trees.map(|tree| &domain.arenas[tree])
        });
        let mut arenas: Vec<&Arena> = arenas.collect();
        arenas.sort_unstable_by_key(|arena| arena.address);
        for arena in arenas {
            let mut end = arena.address;
            while end < arena.address + arena.size {
                match parts.split_first() {
                    Some((&(start, size), rest)) if start == end => {
                        end = start + size;
                        parts = rest;
                    }
                    _ => return Err(format!("{end} is neither free nor taken, or twice so")),
                }
            }
        }
        match parts.first() {
            Some((address, _)) => Err(format!("{address} is in no arena")),
            None => Ok(()),
        }
    }
}

#[inline]
fn insert_block(heap: &mut Heap, place: Place, run: Run) -> BlockId {
    let id = heap.insert_block(place.segment, place.offset, bytes(run.granules()));
    heap.blocks.set_mark(id, place.arena);
    id
}

/// A wholly free segment.
enum Idle {
    Arena(usize),
    OwnSegment(FreeBlock),
}

fn bytes(granules: u64) -> Bytes {
    Bytes(granules * GRANULE.get())
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("the number of arenas fits a usize")
}
