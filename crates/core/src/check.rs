//! The invariants that hold between any two calls.

use std::collections::BTreeMap;

use crate::block::{Block, BlockId, BlockState};
use crate::lane::Lane;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::stats::{PoolStats, Stat};
use crate::strategy::Strategy;
use crate::units::Bytes;

/// How much [`Lane::check_invariants`] checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CheckLevel {
    /// The statistics only. Constant time.
    Figures,
    /// Also every block, segment and list of the strategy. O(n log n) for n blocks.
    Everything,
}

impl<M: Memory> Lane<M> {
    /// Checks that the statistics add up. At [`CheckLevel::Everything`] it also checks that no two blocks
    /// overlap, that every block lies in its segment, and that `reserved = allocated + pending + free + spare`.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong.
    pub fn check_invariants(&self, level: CheckLevel) -> Result<(), String> {
        check_figures(&self.heap)?;
        if level == CheckLevel::Everything {
            check_blocks(&self.heap)?;
            let free = self.strategy.check(&self.heap)?;
            check_sums(&self.heap, &self.memory, free)?;
            self.heap.check_pages(&self.memory)?;
            ensure(self.memory.physical().counts_views(), || {
                "a handle is mapped at more or fewer addresses than it counts".to_owned()
            })?;
            self.check_waiting()?;
        }
        Ok(())
    }

    fn check_waiting(&self) -> Result<(), String> {
        let waiting = self.uses.waiting();
        let strays = waiting
            .iter()
            .filter(|&&id| self.heap.blocks.state(id) != BlockState::Pending);
        ensure_equal(
            "blocks that wait but are not pending",
            strays.count() as u64,
            0,
        )?;
        let blocks = self.heap.blocks.iter();
        let pending = blocks
            .filter(|(_, block)| block.state == BlockState::Pending)
            .count();
        ensure_equal(
            "pending blocks and waiting ones",
            pending as u64,
            waiting.len() as u64,
        )?;
        let is_stray = |&id: &BlockId| {
            let is_held = self.heap.blocks.state(id) == BlockState::Allocated;
            !is_held && !waiting.contains(&id)
        };
        let strays = self.uses.used().filter(is_stray).count();
        ensure_equal("blocks that are used but free", strays as u64, 0)?;
        let counted = self.heap.stats.waiting_blocks();
        ensure_equal("blocks that wait", counted as u64, waiting.len() as u64)
    }
}

fn check_figures(heap: &Heap) -> Result<(), String> {
    let stats = heap.stats.stats();
    for (name, pools) in stats.pool_stats() {
        check_pool_stats(name, pools)?;
    }
    let chain = [
        ("requested bytes", stats.requested_bytes.all.current),
        ("active bytes", stats.active_bytes.all.current),
        ("reserved bytes", stats.reserved_bytes.all.current),
    ];
    for pair in chain.windows(2) {
        let [(low, low_bytes), (high, high_bytes)] = [pair[0], pair[1]];
        ensure(low_bytes <= high_bytes, || {
            format!("{low} ({low_bytes}) exceed {high} ({high_bytes})")
        })?;
    }
    let (allocated, active) = (
        stats.allocated_bytes.all.current,
        stats.active_bytes.all.current,
    );
    ensure(allocated <= active, || {
        format!("allocated bytes {allocated} exceed active {active}")
    })
}

fn check_pool_stats(name: &str, pools: &PoolStats) -> Result<(), String> {
    let &PoolStats {
        all,
        large_pool,
        small_pool,
    } = pools;
    for stat in [all, large_pool, small_pool] {
        let Stat {
            current,
            peak,
            allocated,
            freed,
        } = stat;
        ensure(0 <= current && current <= peak, || {
            format!("{name}: current {current} is not between 0 and its peak {peak}")
        })?;
        ensure(0 <= allocated && 0 <= freed, || {
            format!("{name}: {allocated} were allocated, {freed} freed")
        })?;
    }
    let sums = [
        (all.current, large_pool.current + small_pool.current),
        (all.allocated, large_pool.allocated + small_pool.allocated),
        (all.freed, large_pool.freed + small_pool.freed),
    ];
    ensure(sums.iter().all(|(all, sum)| all == sum), || {
        format!("{name}: the small and the large pool do not add up to all: {pools:?}")
    })
}

/// Checks that every block lies in its segment and that no two overlap.
fn check_blocks(heap: &Heap) -> Result<(), String> {
    let mut blocks: Vec<(BlockId, Block)> = heap.blocks.iter().collect();
    blocks.sort_unstable_by_key(|(_, block)| block.address);
    for pair in blocks.windows(2) {
        let (first, second) = (&pair[0].1, &pair[1].1);
        ensure(first.end() <= second.address, || {
            format!(
                "the blocks at {} and {} overlap",
                first.address, second.address
            )
        })?;
    }
    for (id, block) in blocks {
        let segment = heap.segments.get(heap.blocks.segment(id));
        let end = segment.address + segment.size;
        ensure(
            segment.address <= block.address && block.end() <= end,
            || {
                format!(
                    "the block at {} leaves its segment at {}",
                    block.address, segment.address
                )
            },
        )?;
        ensure(block.kind == segment.kind, || {
            format!("the block at {} disagrees with its segment", block.address)
        })?;
    }
    Ok(())
}

/// Checks that the statistics equal the sums over blocks and segments, and that every reserved byte is in one of
/// them.
fn check_sums<M: Memory>(heap: &Heap, memory: &M, free: Bytes) -> Result<(), String> {
    let sum = |counts: &dyn Fn(&Block) -> bool, bytes: &dyn Fn(&Block) -> Bytes| -> Bytes {
        let blocks = heap.blocks.iter().map(|(_, block)| block);
        blocks.filter(counts).map(|block| bytes(&block)).sum()
    };
    let allocated = sum(&|block| block.state == BlockState::Allocated, &|block| {
        block.size
    });
    let pending = sum(&|block| block.state == BlockState::Pending, &|block| {
        block.size
    });
    let requested = sum(&Block::is_active, &|block| block.requested);
    let mapped: Bytes = heap
        .segments
        .iter()
        .map(|(id, segment)| heap.mapped_bytes(id, segment, memory))
        .sum();
    let spare = heap.spare_bytes(memory);
    let reserved = mapped + spare;
    let figure = |stats: &PoolStats| stats.all.current.unsigned_abs();
    let stats = heap.stats.stats();
    ensure_equal(
        "allocated bytes",
        figure(&stats.allocated_bytes),
        allocated.get(),
    )?;
    ensure_equal(
        "active bytes",
        figure(&stats.active_bytes),
        (allocated + pending).get(),
    )?;
    ensure_equal(
        "requested bytes",
        figure(&stats.requested_bytes),
        requested.get(),
    )?;
    ensure_equal(
        "reserved bytes",
        figure(&stats.reserved_bytes),
        reserved.get(),
    )?;
    let parts = allocated + pending + free + spare;
    ensure(reserved == parts, || {
        format!(
            "reserved {reserved:?} is not allocated {allocated:?} + pending {pending:?} + free \
             {free:?} + spare {spare:?}"
        )
    })?;
    let pools = heap
        .domains
        .pools()
        .map(|(_, pool)| pool.reserved_bytes.current());
    ensure_equal(
        "reserved bytes of the pools",
        figure(&stats.reserved_bytes),
        pools.sum::<i64>().unsigned_abs(),
    )?;
    check_segments_of_pools(heap)
}

/// Checks each pool's count of segments.
fn check_segments_of_pools(heap: &Heap) -> Result<(), String> {
    let mut counted = BTreeMap::new();
    for (_, segment) in heap.segments.iter() {
        let pool = heap.domains.domain(segment.domain).pool;
        *counted.entry(pool).or_insert(0) += 1;
    }
    for (index, pool) in heap.domains.pools() {
        let count = counted.remove(&index).unwrap_or_default();
        let what = format!("segments of pool {:?}", pool.id);
        ensure_equal(&what, pool.segment_count as u64, count)?;
    }
    Ok(())
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn ensure_equal(what: &str, figure: u64, counted: u64) -> Result<(), String> {
    ensure(figure == counted, || {
        format!("{what}: the figure is {figure}, the count {counted}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::device::DeviceAllocator;
    use crate::stats::SizeKind;
    use crate::strategy::test_driver::TestDriver;
    use crate::units::Stream;

    /// The statistics contradict each other, or the blocks.
    #[test]
    fn what_cannot_be_is_found() {
        let allocator = || {
            let driver = TestDriver::new(Bytes::mib(64));
            let mut allocator = DeviceAllocator::new(driver, 0, &Config::default());
            let block = allocator.allocate(Bytes::mib(3), Stream::DEFAULT);
            assert!(block.is_ok());
            allocator
        };
        let wrongs = |allocator: &DeviceAllocator<TestDriver>| {
            let levels = [CheckLevel::Figures, CheckLevel::Everything];
            levels.map(|level| allocator.lane().check_invariants(level).err())
        };
        assert_eq!(wrongs(&allocator()), [None, None]);
        let (kind, size) = (SizeKind::Large, Bytes::mib(30));
        let mut counts = allocator();
        counts
            .lane_mut()
            .heap
            .stats
            .count_allocated(kind, size, size);
        let text = "active bytes (34603008) exceed reserved bytes (20971520)";
        assert_eq!(wrongs(&counts), [(); 2].map(|()| Some(text.to_owned())));
        // An error that the statistics alone do not show.
        let mut counts = allocator();
        counts
            .lane_mut()
            .heap
            .stats
            .count_allocated(kind, Bytes(512), Bytes(512));
        let [figures, everything] = wrongs(&counts);
        assert!(figures.is_none() && everything.is_some(), "{everything:?}");
    }
}
