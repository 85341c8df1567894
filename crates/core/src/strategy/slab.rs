//! `slab`: size classes on top of buddies (Bonwick, The Slab Allocator, 1994).
//!
//! Requests up to 64 KiB are objects of slabs. A slab is a run of an arena that holds up to 64 objects of one
//! class. It returns to the arena as soon as none of them is in use. Larger requests are runs of their own, and
//! requests over the arena's size are segments of their own.
//!
//! Each power of two is divided into eight classes ([`size_class`]). So above 4 KiB at most an eighth of a block
//! is lost to rounding. No other part of an arena is lost. The cost is that a run of nine sixteenths leaves seven
//! that only smaller requests can use. If sizes change at random, arenas stay less full than those of `buddy`.
//!
//! The slab with the lowest number serves, among the slabs of a class that have a free object, so that later slabs
//! become empty.

mod options;
mod size_class;

use size_class::{OBJECT_CLASSES, SizeClass};

use super::bit_set::BitSet;
use super::buddy::arenas::{Arenas, GRANULE, Place, size_in};
use super::free_blocks::FreeBlock;
use super::recent_blocks::RecentBlocks;
use super::{CheckpointBlock, Configured, Placement, Release, Request, Strategy};
use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::domain::DomainId;
use crate::driver::DriverError;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::strategy::shared_segment::SEGMENT_ROUNDING;
use crate::units::{Bytes, DeviceAddress};
pub use options::SlabConfig;

/// The strategy.
#[derive(Debug)]
pub(crate) struct Slabs {
    layers: Layers,
    /// By [`SizeClass::index`].
    recent: RecentBlocks,
}

/// The layers below the recently freed blocks.
#[derive(Debug)]
struct Layers {
    arenas: Arenas,
    /// By [`DomainId::index`], then by [`SizeClass::index`].
    domains: Vec<[SlabList; OBJECT_CLASSES]>,
}

/// The slabs of one class in one domain.
#[derive(Debug, Default)]
struct SlabList {
    /// By number; entries of slabs that returned to the arena are stale.
    slabs: Vec<Slab>,
    /// The numbers of the slabs with a free object.
    with_free: BitSet,
    /// The numbers that no slab has.
    vacant: BitSet,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    place: Place,
    class: SizeClass,
    /// Bit `n` is set exactly when object `n` is free. They are never all set.
    free: u64,
}

impl Slabs {
    /// Cuts a block out of a slab or an arena. If none has room, recently freed blocks are merged first; then a
    /// cached segment is tried.
    #[inline(never)]
    fn cut_out(&mut self, heap: &mut Heap, request: &Request, class: SizeClass) -> Option<BlockId> {
        let domain = request.domain;
        let mut block = self.layers.take(heap, domain, class);
        if block.is_none() && self.merge_recent(heap, domain) {
            block = self.layers.take(heap, domain, class);
        }
        block.or_else(|| self.layers.arenas.take_own_segment(request))
    }

    #[inline]
    fn has_own_segment(&self, size: Bytes) -> bool {
        size > self.layers.arenas.arena_size()
    }
}

/// Returns the size of a request's block with arenas of `arena_size`. A cached segment of its own may be larger.
#[inline]
fn rounded(requested: Bytes, arena_size: Bytes) -> Bytes {
    let size = SizeClass::of(requested).size();
    if requested > arena_size {
        size.min(requested.round_up(SEGMENT_ROUNDING))
    } else {
        size
    }
}

impl Configured for Slabs {
    type Options = SlabConfig;

    fn new(options: &SlabConfig, _heap: &mut Heap) -> Slabs {
        Slabs {
            layers: Layers {
                arenas: Arenas::new(options.arena_size),
                domains: Vec::new(),
            },
            recent: RecentBlocks::default(),
        }
    }

    fn size_in(
        options: &Self::Options,
        requested: Bytes,
        _free: Bytes,
        segment: Bytes,
    ) -> Option<Bytes> {
        let in_arena = rounded(requested, options.arena_size);
        Some(size_in(segment, options.arena_size, in_arena))
    }
}

impl Strategy for Slabs {
    #[inline]
    fn block_size(&self, requested: Bytes) -> Bytes {
        rounded(requested, self.layers.arenas.arena_size())
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        request.size.max(self.layers.arenas.arena_size())
    }

    #[inline(always)]
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        let &Request { size, domain, .. } = request;
        if self.has_own_segment(size) {
            return self.layers.arenas.take_own_segment(request);
        }
        let class = SizeClass::of(size);
        let recent = self.recent.take((domain, class.index()));
        recent.or_else(|| self.cut_out(heap, request, class))
    }

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let &Request { size, domain, .. } = request;
        let class = SizeClass::of(size);
        if self.has_own_segment(size) {
            return self.layers.arenas.grow_own_segment(heap, memory, request);
        }
        if self.layers.arenas.grow(heap, memory, domain, class.run())? {
            return Ok(self.layers.take(heap, domain, class));
        }
        // There may be memory for the block, though not for the power of two that contains it.
        if (size % SEGMENT_ROUNDING).is_zero() {
            return self.layers.arenas.grow_own_segment(heap, memory, request);
        }
        Ok(None)
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId> {
        let layers = &mut self.layers;
        if layers.arenas.is_own_segment(heap, id, block.size) {
            layers
                .arenas
                .put_own_segment(block.domain, FreeBlock::of(id, &block));
        } else {
            let place = (block.domain, SizeClass::of(block.size).index());
            if let Some(id) = self.recent.put(place, (id, block.size)) {
                layers.put(heap, id);
            }
        }
        None
    }

    fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError> {
        let Release::Pool(pool, _) = wanted else {
            return Ok(false);
        };
        for domain in heap.domains.of_pool(pool) {
            self.merge_recent(heap, domain);
        }
        self.layers.arenas.release(heap, memory, pool)?;
        Ok(true)
    }

    fn largest_free(&self, _heap: &Heap, domain: DomainId) -> Bytes {
        let lists = self.layers.domains.get(domain.index());
        let slabs = lists.into_iter().flatten().flat_map(SlabList::iter);
        let objects = slabs
            .filter(|(_, slab)| slab.free != 0)
            .map(|(_, slab)| slab.class.size());
        let object = objects.max().unwrap_or(Bytes::ZERO);
        object.max(self.layers.arenas.largest_free(domain))
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        let slabs = self.layers.check_slabs(heap)?;
        let arenas = &self.layers.arenas;
        let is_run = |&(id, ref block): &(BlockId, Block)| {
            !arenas.is_own_segment(heap, id, block.size) && !is_object(block)
        };
        let runs = heap.blocks.iter().filter(is_run);
        let runs = runs.map(|(_, block)| (block.address, block.size));
        let in_arenas = arenas.check(heap, runs.chain(slabs.runs))?;
        let class_of = |size| SizeClass::of(size).index();
        Ok(in_arenas + slabs.free_bytes + self.recent.check(heap, BlockState::Free, class_of)?)
    }
}

impl Placement for Slabs {
    fn merge_recent(&mut self, heap: &mut Heap, domain: DomainId) -> bool {
        let mut any = false;
        while let Some(id) = self.recent.pop(domain) {
            self.layers.put(heap, id);
            any = true;
        }
        any
    }

    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        _around: Option<BlockId>,
    ) -> BlockId {
        let domain = wanted.domain;
        let own = self.layers.arenas.take_own_segment_again(domain, wanted);
        own.unwrap_or_else(|| self.layers.take_at(heap, domain, wanted))
    }
}

impl Layers {
    /// Takes a block that was not freed recently: an object of a slab, or a run.
    #[inline]
    fn take(&mut self, heap: &mut Heap, domain: DomainId, class: SizeClass) -> Option<BlockId> {
        if class.has_slabs() {
            self.take_object(heap, domain, class)
        } else {
            self.arenas.take_block(heap, domain, class.run())
        }
    }

    /// Puts a free block back into its slab or arena, and removes it from the table.
    #[inline]
    fn put(&mut self, heap: &mut Heap, id: BlockId) {
        if is_object(&heap.blocks.get(id)) {
            self.put_object(heap, id);
        } else {
            let run_of = |size| SizeClass::of(size).run();
            self.arenas.put_block(heap, id, run_of);
        }
    }

    /// Takes the block of a checkpoint at its place, all of which is free.
    fn take_at(&mut self, heap: &mut Heap, domain: DomainId, wanted: &CheckpointBlock) -> BlockId {
        let class = SizeClass::of(wanted.size);
        if !class.has_slabs() {
            let place = (wanted.segment, wanted.offset);
            return self.arenas.take_block_at(heap, domain, place, class.run());
        }
        // A slab starts where a node that holds it starts, so its place follows from the object's.
        let node = Bytes(GRANULE.get() << class.run().enclosing_order());
        let start = wanted.offset.round_down(node);
        let object = (wanted.offset - start).get() / class.size().get();
        let list = &mut self.domains[domain.index()][class.index()];
        let is_it =
            |slab: &Slab| (slab.place.segment, slab.place.offset) == (wanted.segment, start);
        let found = list.iter().find(|(_, slab)| is_it(slab));
        let number = found.map(|(number, _)| number).unwrap_or_else(|| {
            let place = (wanted.segment, start);
            let place = self.arenas.take_at(domain, place, class.run());
            list.insert(place, class)
        });
        let object = u32::try_from(object).expect("a slab has at most 64 objects");
        self.hand_out(heap, domain, (class, number, object))
    }

    #[inline]
    fn take_object(
        &mut self,
        heap: &mut Heap,
        domain: DomainId,
        class: SizeClass,
    ) -> Option<BlockId> {
        if domain.index() >= self.domains.len() {
            let no_slabs = || std::array::from_fn(|_| SlabList::default());
            self.domains.resize_with(domain.index() + 1, no_slabs);
        }
        let list = &mut self.domains[domain.index()][class.index()];
        let number = match list.with_free.first() {
            Some(number) => number,
            None => {
                let place = self.arenas.take(domain, class.run())?;
                list.insert(place, class)
            }
        };
        let object = list.slabs[number].free.trailing_zeros();
        Some(self.hand_out(heap, domain, (class, number, object)))
    }

    /// Takes a free object of a slab.
    #[inline]
    fn hand_out(
        &mut self,
        heap: &mut Heap,
        domain: DomainId,
        (class, number, object): (SizeClass, usize, u32),
    ) -> BlockId {
        let list = &mut self.domains[domain.index()][class.index()];
        let slab = &mut list.slabs[number];
        debug_assert!(slab.free >> object & 1 == 1, "the object is free");
        slab.free &= !(1 << object);
        if slab.free == 0 {
            list.with_free.remove(number);
        }
        let Place {
            segment, offset, ..
        } = slab.place;
        let offset = offset + Bytes(u64::from(object) * class.size().get());
        let id = heap.insert_block(segment, offset, class.size());
        heap.blocks.set_mark(id, mark(number, object));
        id
    }

    #[inline]
    fn put_object(&mut self, heap: &mut Heap, id: BlockId) {
        let Block { size, domain, .. } = heap.blocks.get(id);
        let mark = heap.blocks.mark(id);
        heap.blocks.remove(id);
        let (number, object) = slab_and_object(mark);
        let class = SizeClass::of(size);
        let list = &mut self.domains[domain.index()][class.index()];
        let slab = &mut list.slabs[number];
        debug_assert!(slab.free >> object & 1 == 0, "the object is in use");
        debug_assert_eq!(list.with_free.contains(number), slab.free != 0);
        if slab.free == 0 {
            list.with_free.insert(number);
        }
        slab.free |= 1 << object;
        if slab.free == all_free(class) {
            let Place { arena, offset, .. } = slab.place;
            let was_listed = list.with_free.remove(number);
            debug_assert!(was_listed, "a slab with free objects is listed");
            debug_assert!(!list.vacant.contains(number));
            list.vacant.insert(number);
            self.arenas.put(domain, (arena, offset), class.run());
        }
    }
}

impl SlabList {
    /// Adds a slab of free objects and returns its number.
    fn insert(&mut self, place: Place, class: SizeClass) -> usize {
        let slab = Slab {
            place,
            class,
            free: all_free(class),
        };
        let number = match self.vacant.first() {
            Some(number) => {
                debug_assert!(!self.with_free.contains(number));
                self.vacant.remove(number);
                self.slabs[number] = slab;
                number
            }
            None => {
                self.slabs.push(slab);
                self.with_free.reserve(self.slabs.len());
                self.vacant.reserve(self.slabs.len());
                self.slabs.len() - 1
            }
        };
        self.with_free.insert(number);
        number
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &Slab)> {
        let numbered = self.slabs.iter().enumerate();
        numbered.filter(|&(number, _)| !self.vacant.contains(number))
    }
}

/// What [`Layers::check_slabs`] counted.
#[derive(Default)]
struct CountedSlabs {
    runs: Vec<(DeviceAddress, Bytes)>,
    free_bytes: Bytes,
}

/// Checks, for tests and debugging only.
impl Layers {
    /// Checks that the objects in use are exactly the blocks of their classes.
    fn check_slabs(&self, heap: &Heap) -> Result<CountedSlabs, String> {
        let mut counted = CountedSlabs::default();
        let mut used = 0;
        for list in self.domains.iter().flatten() {
            for (number, slab) in list.iter() {
                if list.with_free.contains(number) != (slab.free != 0) {
                    return Err(format!("slab {number} is in the wrong set"));
                }
                let start = heap.segments.get(slab.place.segment).address + slab.place.offset;
                let (size, objects) = (slab.class.size(), 1 << slab.class.objects_log2());
                counted.runs.push((start, Bytes(size.get() * objects)));
                for object in 0..objects {
                    if slab.free >> object & 1 == 1 {
                        counted.free_bytes += size;
                        continue;
                    }
                    used += 1;
                    let address = start + Bytes(size.get() * object);
                    let block = heap.blocks.find(address).map(|id| heap.blocks.get(id));
                    if block.is_none_or(|block| block.size != size) {
                        return Err(format!("no object in use starts at {address}"));
                    }
                }
            }
        }
        let is_it = |&(id, ref block): &(BlockId, Block)| {
            !self.arenas.is_own_segment(heap, id, block.size) && is_object(block)
        };
        let objects = heap.blocks.iter().filter(is_it).count();
        if used != objects {
            return Err(format!(
                "{objects} blocks are objects, {used} objects are in use"
            ));
        }
        Ok(counted)
    }
}

/// Returns whether a block that is not a whole segment is an object.
#[inline]
fn is_object(block: &Block) -> bool {
    SizeClass::of(block.size).has_slabs()
}

/// Returns the bits of a slab in which every object is free.
#[inline]
fn all_free(class: SizeClass) -> u64 {
    u64::MAX >> (u64::BITS - (1 << class.objects_log2()))
}

/// Returns the mark of an object's block.
#[inline]
fn mark(number: usize, object: u32) -> u64 {
    (number as u64) << u64::BITS.ilog2() | u64::from(object)
}

/// Returns the numbers of slab and object from a [`mark`].
#[inline]
fn slab_and_object(mark: u64) -> (usize, u64) {
    let bits = u64::BITS.ilog2();
    let number = usize::try_from(mark >> bits).expect("the number of slabs fits a usize");
    (number, mark & ((1 << bits) - 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;
    use crate::device::DeviceAllocator;
    use crate::strategy::test_driver::{TestDriver, programs, run};
    use crate::units::Stream;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn allocator(capacity: Bytes, arena_size: Bytes) -> DeviceAllocator<TestDriver> {
        let config = Config::Slab(SlabConfig { arena_size });
        DeviceAllocator::new(TestDriver::new(capacity), 0, &config)
    }

    fn allocate(allocator: &mut DeviceAllocator<TestDriver>, size: u64) -> DeviceAddress {
        allocator.allocate(Bytes(size), Stream::DEFAULT).unwrap()
    }

    proptest! {
        #[test]
        fn keeps_its_promises(
            program in programs(prop_oneof![1..4 * KIB, 1..MIB, 1..64 * MIB], 300),
            arena_mib in prop::sample::select(vec![1, 2, 3, 4, 16, 128, 1024]),
        ) {
            let config = Config::Slab(SlabConfig { arena_size: Bytes::mib(arena_mib) });
            run(&config, TestDriver::new(Bytes::mib(256)), &program);
        }

        /// Many blocks of few sizes, so that slabs fill, become empty and return to the arena.
        #[test]
        fn slabs_come_and_go(program in programs(prop::sample::select(vec![900, 1_000, 3_000]), 400)) {
            let config = Config::Slab(SlabConfig::default());
            run(&config, TestDriver::new(Bytes::mib(256)), &program);
        }
    }

    #[test]
    fn no_block_is_more_than_an_eighth_too_large() {
        for arena_mib in [1, 16, 1024] {
            let mut allocator = allocator(Bytes::gib(1024), Bytes::mib(arena_mib));
            let sizes =
                (12..35).flat_map(|bit| (8..16_u64).map(move |eighths| (eighths << bit >> 3) + 1));
            for size in sizes {
                let address = allocate(&mut allocator, size);
                let block = allocator.lane().allocation(address).unwrap().size.get();
                assert!((block - size) * 8 <= size, "{block} for {size}");
                allocator.free(address).unwrap();
            }
        }
    }

    #[test]
    fn empty_slabs_serve_other_sizes() {
        let mut allocator = allocator(Bytes::mib(2), Bytes::gib(1));
        let blocks: Vec<_> = (0..2048).map(|_| allocate(&mut allocator, KIB)).collect();
        for address in blocks {
            allocator.free(address).unwrap();
        }
        allocate(&mut allocator, 2 * MIB);
        assert_eq!(allocator.stats().num_device_alloc, 1);
    }

    #[test]
    fn what_is_behind_a_run_serves_others() {
        let mut allocator = allocator(Bytes::mib(2), Bytes::gib(1));
        // 9/16 of 2 MiB, then 1/16, 2/16 and 4/16.
        let blocks = [1100 * KIB, 128 * KIB, 256 * KIB, 512 * KIB]
            .map(|size| allocate(&mut allocator, size));
        let offsets = blocks.map(|address| address.offset_from(blocks[0]));
        assert_eq!(offsets, [0, 1152, 1280, 1536].map(Bytes::kib));
        assert_eq!(allocator.stats().allocated(), Bytes::mib(2));
    }

    #[test]
    fn a_device_without_room_for_the_power_of_two_has_some_for_the_block() {
        let mut allocator = allocator(Bytes::mib(700), Bytes::gib(1));
        let address = allocate(&mut allocator, 600 * MIB);
        assert_eq!(allocator.stats().reserved(), Bytes::mib(640));
        allocator.free(address).unwrap();
        assert_eq!(allocate(&mut allocator, 630 * MIB), address);
        let error = allocator
            .allocate(Bytes::REQUEST_MAX, Stream::DEFAULT)
            .unwrap_err();
        assert!(error.is_out_of_memory());
    }
}
