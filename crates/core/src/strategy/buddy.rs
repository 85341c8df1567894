//! `buddy`: powers of two from 1 KiB. Arenas are halved until a part is as small as the request, and halves are
//! merged when both are free (Knuth, The Art of Computer Programming, volume 1, 2.5).
//!
//! A request takes a recently freed block of its order. Otherwise it takes the smallest free part of an arena
//! that is large enough; of several, the one at the lowest address. A request over the arena's size gets a
//! segment of its own, rounded up to 2 MiB. Bits ([`forest`]) show which parts are free, not lists through the
//! blocks, so a request accesses only its own block's record.

pub(super) mod arenas;
pub(super) mod forest;

pub(super) mod options;

use arenas::{Arenas, GRANULE, size_in};
use forest::Run;

use super::free_blocks::FreeBlock;
use super::recent_blocks::RecentBlocks;
use super::{CheckpointBlock, Configured, Placement, Release, Request, Strategy};
use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::domain::DomainId;
use crate::driver::DriverError;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::strategy::shared_segment::SEGMENT_ROUNDING;
use crate::units::Bytes;
pub use options::BuddyConfig;

/// The strategy.
#[derive(Debug)]
pub(crate) struct Buddy {
    arenas: Arenas,
    /// By order.
    recent: RecentBlocks,
}

impl Buddy {
    /// Cuts a block out of an arena. If none has room, recently freed blocks are merged first.
    #[inline(never)]
    fn cut_out(&mut self, heap: &mut Heap, domain: DomainId, run: Run) -> Option<BlockId> {
        let block = self.arenas.take_block(heap, domain, run);
        if block.is_none() && self.merge_recent(heap, domain) {
            return self.arenas.take_block(heap, domain, run);
        }
        block
    }

    #[inline]
    fn has_own_segment(&self, size: Bytes) -> bool {
        size > self.arenas.arena_size()
    }
}

/// Returns the size of a request's block with arenas of `arena_size`. A cached segment of its own may be larger.
#[inline]
fn rounded(requested: Bytes, arena_size: Bytes) -> Bytes {
    if requested > arena_size {
        requested.round_up(SEGMENT_ROUNDING)
    } else {
        Bytes(requested.get().next_power_of_two()).max(GRANULE)
    }
}

impl Configured for Buddy {
    type Options = BuddyConfig;

    fn new(options: &BuddyConfig, _heap: &mut Heap) -> Buddy {
        Buddy {
            arenas: Arenas::new(options.arena_size),
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

impl Strategy for Buddy {
    #[inline]
    fn block_size(&self, requested: Bytes) -> Bytes {
        rounded(requested, self.arenas.arena_size())
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        request.size.max(self.arenas.arena_size())
    }

    #[inline(always)]
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        let &Request { size, domain, .. } = request;
        if self.has_own_segment(size) {
            return self.arenas.take_own_segment(request);
        }
        let recent = self.recent.take((domain, class_of(size)));
        recent.or_else(|| self.cut_out(heap, domain, run_of(size)))
    }

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        if self.has_own_segment(request.size) {
            return self.arenas.grow_own_segment(heap, memory, request);
        }
        let run = run_of(request.size);
        if !self.arenas.grow(heap, memory, request.domain, run)? {
            return Ok(None);
        }
        Ok(self.arenas.take_block(heap, request.domain, run))
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId> {
        let arenas = &mut self.arenas;
        if arenas.is_own_segment(heap, id, block.size) {
            arenas.put_own_segment(block.domain, FreeBlock::of(id, &block));
        } else {
            let place = (block.domain, class_of(block.size));
            if let Some(id) = self.recent.put(place, (id, block.size)) {
                arenas.put_block(heap, id, run_of);
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
        self.arenas.release(heap, memory, pool)?;
        Ok(true)
    }

    fn largest_free(&self, _heap: &Heap, domain: DomainId) -> Bytes {
        self.arenas.largest_free(domain)
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        let runs = (heap.blocks.iter())
            .filter(|&(id, block)| !self.arenas.is_own_segment(heap, id, block.size));
        let taken = runs.map(|(_, block)| (block.address, block.size));
        let in_arenas = self.arenas.check(heap, taken)?;
        Ok(in_arenas + self.recent.check(heap, BlockState::Free, class_of)?)
    }
}

impl Placement for Buddy {
    fn merge_recent(&mut self, heap: &mut Heap, domain: DomainId) -> bool {
        let mut any = false;
        while let Some(id) = self.recent.pop(domain) {
            self.arenas.put_block(heap, id, run_of);
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
        let own = self.arenas.take_own_segment_again(domain, wanted);
        own.unwrap_or_else(|| {
            let place = (wanted.segment, wanted.offset);
            (self.arenas).take_block_at(heap, domain, place, run_of(wanted.size))
        })
    }
}

/// Returns the run of a block: a single node.
#[inline]
fn run_of(size: Bytes) -> Run {
    Run {
        units: 1,
        order: order_of(size),
    }
}

#[inline]
fn class_of(size: Bytes) -> usize {
    order_of(size) as usize
}

#[inline]
fn order_of(size: Bytes) -> u32 {
    (size.get() / GRANULE.get()).ilog2()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;
    use crate::device::DeviceAllocator;
    use crate::strategy::test_driver::{TestDriver, programs, run};
    use crate::units::{DeviceAddress, Stream};

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn allocator(capacity: Bytes, arena_size: Bytes) -> DeviceAllocator<TestDriver> {
        let config = Config::Buddy(BuddyConfig { arena_size });
        DeviceAllocator::new(TestDriver::new(capacity), 0, &config)
    }

    fn allocate(allocator: &mut DeviceAllocator<TestDriver>, size: u64) -> DeviceAddress {
        allocator.allocate(Bytes(size), Stream::DEFAULT).unwrap()
    }

    proptest! {
        #[test]
        fn keeps_its_promises(
            program in programs(prop_oneof![1..4 * KIB, 1..MIB, 1..64 * MIB], 200),
            arena_mib in prop::sample::select(vec![1, 2, 3, 4, 16, 128, 1024]),
        ) {
            let config = Config::Buddy(BuddyConfig { arena_size: Bytes::mib(arena_mib) });
            run(&config, TestDriver::new(Bytes::mib(256)), &program);
        }
    }

    #[test]
    fn the_lowest_address_is_taken_and_halves_merge() {
        let mut allocator = allocator(Bytes::gib(80), Bytes::gib(1));
        let first = allocate(&mut allocator, 1);
        let second = allocate(&mut allocator, 3 * KIB);
        let third = allocate(&mut allocator, 1000);
        assert_eq!(
            (second, third),
            (first + Bytes::kib(4), first + Bytes::kib(1))
        );
        // The free rest is 2 KiB, and one part of each size from 8 KiB to 512 MiB.
        let orders = std::iter::once(1).chain(3..20);
        let parts: Vec<_> = orders.map(|order| KIB << order).collect();
        let mut blocks = vec![first, second, third];
        for size in parts {
            let part = allocate(&mut allocator, size);
            assert_eq!(part, first + Bytes(size));
            blocks.push(part);
        }
        assert_eq!(allocator.stats().allocated(), Bytes::gib(1));
        for address in blocks {
            allocator.free(address).unwrap();
        }
        assert_eq!(allocate(&mut allocator, GIB), first);
        assert_eq!(allocator.stats().reserved(), Bytes::gib(1));
    }

    #[test]
    fn full_arenas_get_another_and_large_requests_their_own_segment() {
        let mut allocator = allocator(Bytes::gib(80), Bytes::mib(4));
        let blocks: Vec<_> = (0..9).map(|_| allocate(&mut allocator, MIB)).collect();
        assert_eq!(allocator.stats().segment.all.current, 3);
        let large = allocate(&mut allocator, 5 * MIB);
        assert_eq!(
            allocator.lane().allocation(large).unwrap().size,
            Bytes::mib(6)
        );
        assert_eq!(allocator.stats().reserved(), Bytes::mib(18));
        // The segment stays cached. It serves requests if at most an eighth of it is wasted.
        allocator.free(large).unwrap();
        let small = allocate(&mut allocator, 4 * MIB + 1);
        assert_eq!(small, large);
        for address in blocks {
            allocator.free(address).unwrap();
        }
        allocator.empty_cache(None).unwrap();
        assert_eq!(allocator.stats().reserved(), Bytes::mib(6));
    }

    #[test]
    fn sizes_past_32_bits_are_exact() {
        let mut allocator = allocator(Bytes::gib(4096), Bytes::gib(1024));
        let first = allocate(&mut allocator, 5 * GIB);
        assert_eq!(
            allocator.lane().allocation(first).unwrap().size,
            Bytes::gib(8)
        );
        assert_eq!(allocate(&mut allocator, 1), first + Bytes::gib(8));
        assert_eq!(allocate(&mut allocator, 512 * GIB), first + Bytes::gib(512));
        assert_eq!(allocator.stats().reserved(), Bytes::gib(1024));
    }

    #[test]
    fn arenas_shrink_to_what_there_is_and_running_out_is_an_answer() {
        let mut allocator = allocator(Bytes::mib(12), Bytes::gib(1));
        for _ in 0..12 {
            allocate(&mut allocator, MIB);
        }
        let error = allocator.allocate(Bytes(1), Stream::DEFAULT).unwrap_err();
        assert!(error.is_out_of_memory());
        let error = allocator
            .allocate(Bytes::REQUEST_MAX, Stream::DEFAULT)
            .unwrap_err();
        assert!(error.is_out_of_memory());
    }
}
