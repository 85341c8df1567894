//! `pool`: a free list for each size, as textbooks and early GPU memory pools have it.
//!
//! Requests are rounded up to 1 KiB. A block serves requests of exactly its size while its slab is held: it is
//! never split or merged. If a size has no free block, one is split from the *rest* of a slab, which no block has
//! covered yet. Slabs are large, so that driver calls are rare. The cost is memory that stays with sizes that are
//! no longer requested.

mod options;

use std::num::NonZeroU32;

use super::free_blocks::{FreeBlock, FreeBlocks};
use super::{CheckpointBlock, Configured, Placement, Release, Request, Strategy};
use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::domain::DomainId;
use crate::driver::DriverError;
use crate::number_table::{NumberTable, hash_of};
use crate::physical::Memory;
use crate::segment::{Heap, Segment};
use crate::strategy::shared_segment::{SEGMENT_ROUNDING, allocate_shared_segment};
use crate::units::{Bytes, DeviceAddress};
pub use options::PoolConfig;

/// Sizes are rounded up to this.
const ROUNDING: Bytes = Bytes::kib(1);

/// Sizes of at most this many times [`ROUNDING`], 1 MiB, find their list by an index, in 24 KiB for each domain.
/// Most requests are that small, and an index is faster than a search. Operations on all lists, such as finding the
/// largest free block, visit this many for each domain.
const INDEXED_SIZES: usize = 1 << 10;

/// The strategy.
#[derive(Debug)]
pub(crate) struct PoolStrategy {
    slab_size: Bytes,
    /// By [`DomainId::index`].
    domains: Vec<SizeLists>,
}

/// The free memory of one domain.
#[derive(Debug)]
struct SizeLists {
    /// The lists of sizes up to [`INDEXED_SIZES`], by the size in units of [`ROUNDING`]. Empty before the first
    /// request of such a size.
    indexed: Vec<List>,
    /// The lists of larger sizes, in the order of their first requests.
    others: Vec<OtherList>,
    /// The numbers of `others`, counted from one, by size.
    by_size: NumberTable,
    /// The rest of each slab, which no block has covered yet.
    rests: FreeBlocks,
}

/// The free blocks of one size, the newest last: a stack, because the record of the newest is likeliest
/// to be in cache.
type List = Vec<BlockId>;

/// A list of a size that is too large for the index.
#[derive(Debug)]
struct OtherList {
    size: Bytes,
    blocks: List,
}

impl PoolStrategy {
    #[inline]
    fn domain(&mut self, domain: DomainId) -> &mut SizeLists {
        if domain.index() >= self.domains.len() {
            self.domains.resize_with(domain.index() + 1, SizeLists::new);
        }
        &mut self.domains[domain.index()]
    }

    /// Cuts a request's block from the rest of a slab. `None` if no rest is large enough.
    #[inline(never)]
    fn take_rest(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        let domain = self.domain(request.domain);
        let rest = domain.rests.take_first_at_least(request.size, |_| true)?;
        Some(domain.carve(heap, rest.id, request.size))
    }

    /// Removes free blocks, sorted by number, from the table and from the lists of their domains, which are among
    /// `domains`.
    fn forget(&mut self, heap: &mut Heap, domains: &[DomainId], gone: &[BlockId]) {
        for domain in domains {
            let domain = self.domains.get_mut(domain.index());
            let Some(domain) = domain else {
                continue;
            };
            let is_gone = |id: &BlockId| gone.binary_search(id).is_ok();
            for list in domain.lists_mut() {
                list.retain(|id| !is_gone(id));
            }
            let rests = domain.rests.iter();
            let gone_rests: Vec<FreeBlock> = rests.filter(|rest| is_gone(&rest.id)).collect();
            for rest in gone_rests {
                domain.rests.remove(rest);
            }
        }
        for &id in gone {
            debug_assert_eq!(heap.blocks.state(id), BlockState::Free);
            heap.blocks.remove(id);
        }
    }
}

/// Returns the size of a request's block.
#[inline]
fn rounded(requested: Bytes) -> Bytes {
    requested.round_up(ROUNDING)
}

impl Configured for PoolStrategy {
    type Options = PoolConfig;

    fn new(options: &PoolConfig, _heap: &mut Heap) -> PoolStrategy {
        PoolStrategy {
            slab_size: options.slab_size,
            domains: Vec::new(),
        }
    }

    fn size_in(
        _options: &Self::Options,
        requested: Bytes,
        _free: Bytes,
        _segment: Bytes,
    ) -> Option<Bytes> {
        Some(rounded(requested))
    }
}

impl Strategy for PoolStrategy {
    #[inline]
    fn block_size(&self, requested: Bytes) -> Bytes {
        rounded(requested)
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        request.size.round_up(SEGMENT_ROUNDING).max(self.slab_size)
    }

    #[inline(always)]
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        let domain = self.domains.get_mut(request.domain.index());
        let Some(id) = domain.and_then(|domain| domain.list_of(request.size).pop()) else {
            return self.take_rest(heap, request);
        };
        debug_assert_eq!(heap.blocks.get(id).size, request.size);
        Some(id)
    }

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let least = request.size.round_up(SEGMENT_ROUNDING);
        let slab = allocate_shared_segment(heap, memory, request.domain, least, self.slab_size)?;
        let Some(slab) = slab else {
            return Ok(None);
        };
        let rest = heap.insert_whole_block(slab);
        debug_assert!(
            heap.blocks.get(rest).size >= least,
            "a slab has what is needed"
        );
        let domain = self.domain(request.domain);
        Ok(Some(domain.carve(heap, rest, request.size)))
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId> {
        let domain = &mut self.domains[block.domain.index()];
        debug_assert_eq!(heap.blocks.get(id).size, block.size);
        debug_assert_eq!(heap.blocks.state(id), BlockState::Free);
        domain.list_of(block.size).push(id);
        None
    }

    /// Linear in the pool's blocks: slabs do not count their allocated blocks, because every request would pay for
    /// that. This is called only when memory has run out.
    fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError> {
        let Release::Pool(pool, _) = wanted else {
            return Ok(false);
        };
        let domains = heap.domains.of_pool(pool);
        let in_pool = |(_, slab): &(SegmentId, &Segment)| domains.contains(&slab.domain);
        let mut slabs: Vec<(DeviceAddress, SegmentId)> = (heap.segments.iter().filter(in_pool))
            .map(|(id, slab)| (slab.address, id))
            .collect();
        slabs.sort_unstable();
        let mut gone = Vec::new();
        let mut result = Ok(());
        for (address, slab) in slabs {
            let blocks: Vec<BlockId> = blocks_of(heap, address).collect();
            if blocks.iter().any(|&id| heap.blocks.get(id).is_active()) {
                continue;
            }
            result = heap.free_segment(memory, slab);
            if result.is_err() {
                break;
            }
            gone.extend(blocks);
        }
        gone.sort_unstable();
        debug_assert!(
            gone.is_sorted_by(|one, next| one < next),
            "a block is in one slab"
        );
        self.forget(heap, &domains, &gone);
        result.map(|()| true)
    }

    fn largest_free(&self, _heap: &Heap, domain: DomainId) -> Bytes {
        let Some(domain) = self.domains.get(domain.index()) else {
            return Bytes::ZERO;
        };
        let rest = domain.rests.last().map(|rest| rest.size);
        let lists = domain.lists().filter(|(_, list)| !list.is_empty());
        let sizes = lists.map(|(size, _)| size).chain(rest);
        sizes.max().unwrap_or(Bytes::ZERO)
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        let (mut free, mut free_bytes) = (0, Bytes::ZERO);
        for (_, block) in heap.blocks.iter() {
            if block.state == BlockState::Free {
                free += 1;
                free_bytes += block.size;
            }
        }
        let listed: usize = (self.domains.iter())
            .map(|domain| domain.check(heap))
            .sum::<Result<usize, String>>()?;
        if listed != free {
            return Err(format!("{free} blocks are free, {listed} are listed"));
        }
        check_slabs(heap)?;
        Ok(free_bytes)
    }
}

impl Placement for PoolStrategy {
    /// Blocks are unchanged as long as their slab is not released. Linear in the free blocks of the size.
    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId {
        let id = around.expect("a slab is covered by blocks");
        let block = heap.blocks.get(id);
        let is_it = (block.address, block.size) == (wanted.address, wanted.size);
        let domain = &mut self.domains[block.domain.index()];
        let list = domain.list_of(block.size);
        let position = list.iter().position(|&listed| listed == id);
        let position = position.filter(|_| is_it);
        list.remove(position.expect("no block was merged"));
        id
    }
}

impl SizeLists {
    fn new() -> SizeLists {
        SizeLists {
            indexed: Vec::new(),
            others: Vec::new(),
            by_size: NumberTable::new(),
            rests: FreeBlocks::default(),
        }
    }

    /// Returns the list of a size, created if needed. Constant time.
    #[inline(always)]
    fn list_of(&mut self, size: Bytes) -> &mut List {
        let place = index(size);
        if place < self.indexed.len() {
            return &mut self.indexed[place];
        }
        self.list_out_of_index(size)
    }

    /// Returns the list of a size that is too large for the index, or of the first size in the index, which is
    /// created then.
    #[inline(never)]
    fn list_out_of_index(&mut self, size: Bytes) -> &mut List {
        if index(size) <= INDEXED_SIZES {
            self.indexed.resize_with(INDEXED_SIZES + 1, List::new);
            return &mut self.indexed[index(size)];
        }
        let number = self.find_other(size);
        let number = number.unwrap_or_else(|| self.insert_other(size));
        &mut self.others[list_index(number)].blocks
    }

    /// Returns the number of the list of a size that is too large for the index.
    fn find_other(&self, size: Bytes) -> Option<NonZeroU32> {
        let is_it = |number| self.others[list_index(number)].size == size;
        self.by_size.find(hash_of(size.get()), is_it)
    }

    #[cold]
    fn insert_other(&mut self, size: Bytes) -> NonZeroU32 {
        self.others.push(OtherList {
            size,
            blocks: List::new(),
        });
        let number = u32::try_from(self.others.len())
            .ok()
            .and_then(NonZeroU32::new);
        let number = number.expect("fewer than 2^32 sizes");
        let others = &self.others;
        let hash_of_number = |number| hash_of(others[list_index(number)].size.get());
        self.by_size
            .insert(hash_of(size.get()), number, hash_of_number);
        number
    }

    /// Returns every list with the size of its blocks.
    fn lists(&self) -> impl Iterator<Item = (Bytes, &List)> {
        let sizes = (0..).map(|roundings| Bytes(roundings * ROUNDING.get()));
        let others = self.others.iter().map(|other| (other.size, &other.blocks));
        sizes.zip(&self.indexed).chain(others)
    }

    fn lists_mut(&mut self) -> impl Iterator<Item = &mut List> {
        let others = self.others.iter_mut().map(|other| &mut other.blocks);
        self.indexed.iter_mut().chain(others)
    }

    /// Cuts a block of `size` from a rest that is not in `rests`, and inserts the remaining rest there.
    fn carve(&mut self, heap: &mut Heap, id: BlockId, size: Bytes) -> BlockId {
        debug_assert!(size <= heap.blocks.get(id).size);
        if size < heap.blocks.get(id).size {
            let rest = heap.blocks.split(id, size);
            self.rests
                .insert(FreeBlock::of(rest, &heap.blocks.get(rest)));
        }
        id
    }

    /// Checks that every listed block is free and in the right list. Returns the number of listed blocks.
    fn check(&self, heap: &Heap) -> Result<usize, String> {
        for (place, &OtherList { size, .. }) in self.others.iter().enumerate() {
            if self.find_other(size).map(list_index) != Some(place) {
                return Err(format!("the list of {size} is not found"));
            }
        }
        for (size, list) in self.lists() {
            for block in list.iter().map(|&id| heap.blocks.get(id)) {
                if block.state != BlockState::Free || block.size != size {
                    return Err(format!("{} is in the wrong list", block.address));
                }
            }
        }
        for rest in self.rests.iter() {
            let block = heap.blocks.get(rest.id);
            if block.state != BlockState::Free || FreeBlock::of(rest.id, &block) != rest {
                return Err(format!("{} is no rest", block.address));
            }
        }
        let listed = self.lists().map(|(_, list)| list.len());
        Ok(self.rests.len() + listed.sum::<usize>())
    }
}

/// Returns the blocks of the slab that starts at `address`, rests included, in order.
fn blocks_of(heap: &Heap, address: DeviceAddress) -> impl Iterator<Item = BlockId> {
    let first = heap.blocks.find(address);
    std::iter::successors(first, |&id| heap.blocks.get(id).next)
}

/// Checks that blocks cover every slab.
fn check_slabs(heap: &Heap) -> Result<(), String> {
    for (_, slab) in heap.segments.iter() {
        let mut end = slab.address;
        for block in blocks_of(heap, slab.address).map(|id| heap.blocks.get(id)) {
            if block.address != end {
                return Err(format!("{end} and {} are not neighbours", block.address));
            }
            end = block.end();
        }
        if end != slab.address + slab.size {
            return Err(format!("nothing covers {end}"));
        }
    }
    Ok(())
}

/// Returns the index in `others` of the list with this number.
#[inline]
fn list_index(number: NonZeroU32) -> usize {
    number.get() as usize - 1
}

/// Returns a size in units of [`ROUNDING`].
#[inline]
fn index(size: Bytes) -> usize {
    usize::try_from(size.get() / ROUNDING.get()).expect("a usize has 64 bits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::driver::Driver;

    use super::*;
    use crate::config::Config;
    use crate::device::DeviceAllocator;
    use crate::strategy::test_driver::{TestDriver, programs, run};
    use crate::units::Stream;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn pool(slab_size: Bytes) -> Config {
        Config::Pool(PoolConfig { slab_size })
    }

    fn allocate(allocator: &mut DeviceAllocator<TestDriver>, size: u64) -> DeviceAddress {
        allocator.allocate(Bytes(size), Stream::DEFAULT).unwrap()
    }

    proptest! {
        #[test]
        fn keeps_its_promises(
            program in programs(prop_oneof![1..4 * KIB, 1..MIB, 1..64 * MIB], 200),
            slab_mib in prop_oneof![Just(1), Just(7), Just(16), Just(5 << 10)],
        ) {
            run(&pool(Bytes::mib(slab_mib)), TestDriver::new(Bytes::mib(256)), &program);
        }
    }

    #[test]
    fn a_block_serves_its_own_size_only_and_the_newest_first() {
        let driver = TestDriver::new(Bytes::gib(80));
        let mut allocator = DeviceAllocator::new(driver, 0, &Config::Pool(PoolConfig::default()));
        let first = allocate(&mut allocator, 10 * KIB - 100);
        let second = allocate(&mut allocator, 10 * KIB);
        assert_eq!(second, first + Bytes::kib(10));
        assert_eq!(allocator.stats().reserved(), Bytes::gib(5));
        allocator.free(first).unwrap();
        allocator.free(second).unwrap();
        assert_eq!(allocate(&mut allocator, 9 * KIB), first + Bytes::kib(20));
        assert_eq!(allocate(&mut allocator, 10 * KIB), second);
        assert_eq!(allocate(&mut allocator, 10 * KIB), first);
    }

    /// Covers the largest size in the index and the smallest beyond it.
    #[test]
    fn the_largest_free_block_is_that_of_either_kind_of_list_or_a_rest() {
        let driver = TestDriver::new(Bytes::gib(80));
        let mut allocator = DeviceAllocator::new(driver, 0, &pool(Bytes::mib(4)));
        let largest =
            |allocator: &mut DeviceAllocator<TestDriver>| allocator.largest_request(Bytes::ZERO);
        let indexed = allocate(&mut allocator, MIB);
        let other = allocate(&mut allocator, MIB + 1);
        allocate(&mut allocator, 2 * MIB - 2 * KIB);
        assert_eq!(
            largest(&mut allocator),
            Bytes::kib(1),
            "what is left of the slab"
        );
        allocator.free(indexed).unwrap();
        assert_eq!(largest(&mut allocator), Bytes::mib(1));
        allocator.free(other).unwrap();
        assert_eq!(largest(&mut allocator), Bytes::kib(1025));
        assert_eq!(allocate(&mut allocator, MIB + KIB), other);
        assert_eq!(largest(&mut allocator), Bytes::mib(1));
        assert_eq!(allocate(&mut allocator, MIB), indexed);
        assert_eq!(largest(&mut allocator), Bytes::kib(1));
    }

    #[test]
    fn the_newest_is_still_first_after_a_slab_went_back() {
        let driver = TestDriver::new(Bytes::gib(80));
        let mut allocator = DeviceAllocator::new(driver, 0, &pool(Bytes::mib(2)));
        let blocks: Vec<_> = (0..5)
            .map(|_| allocate(&mut allocator, 512 * KIB))
            .collect();
        // The last block is alone in the second slab.
        for index in [1, 4, 2] {
            allocator.free(blocks[index]).unwrap();
        }
        allocator.empty_cache(None).unwrap();
        assert_eq!(allocator.stats().reserved(), Bytes::mib(2));
        assert_eq!(allocate(&mut allocator, 512 * KIB), blocks[2]);
        assert_eq!(allocate(&mut allocator, 512 * KIB), blocks[1]);
    }

    #[test]
    fn slabs_shrink_to_what_a_device_has() {
        let driver = TestDriver::new(Bytes::gib(4));
        let mut allocator = DeviceAllocator::new(driver, 0, &Config::Pool(PoolConfig::default()));
        // Half of the remaining memory, so that some is left for another stream.
        allocate(&mut allocator, MIB);
        assert_eq!(allocator.stats().reserved(), Bytes::mib(1280));
        allocator.allocate(Bytes(1), Stream(7)).unwrap();
        // All of the remaining memory for a request that needs it.
        let left = allocator.driver().memory_info().unwrap().free;
        allocate(&mut allocator, left.get());
        assert_eq!(allocator.stats().reserved(), Bytes::gib(4));
        assert!(allocator.allocate(Bytes::gib(2), Stream::DEFAULT).is_err());
    }

    #[test]
    fn a_limit_below_a_slab_still_serves() {
        let driver = TestDriver::new(Bytes::gib(80));
        let mut allocator = DeviceAllocator::new(driver, 0, &Config::Pool(PoolConfig::default()));
        allocator.set_limit(Some(Bytes::mib(7)));
        allocate(&mut allocator, 6 * MIB);
        assert!(allocator.allocate(Bytes::mib(2), Stream::DEFAULT).is_err());
        assert_eq!(allocator.stats().reserved(), Bytes::mib(6));
    }

    #[test]
    fn the_largest_request_is_refused_and_nothing_else_happens() {
        let driver = TestDriver::new(Bytes::gib(80));
        let mut allocator = DeviceAllocator::new(driver, 0, &Config::Pool(PoolConfig::default()));
        let error = allocator
            .allocate(Bytes::REQUEST_MAX, Stream::DEFAULT)
            .unwrap_err();
        assert!(error.is_out_of_memory());
        assert_eq!(allocator.stats().reserved(), Bytes::ZERO);
    }
}
