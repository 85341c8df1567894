//! The statistics: PyTorch's keys, their values, and the effect of resets.

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAllocator, PoolStats, Stat, Stats, StrategyName, Stream,
};
use lowtide_sim::program::{CAPACITY, Op, Runner, configs, random_program};
use lowtide_sim::{SimConfig, SimDriver};

/// The keys of `torch.cuda.memory_stats()` in PyTorch 2.12 and later, without the keys of single private pools.
fn pytorch_keys() -> BTreeSet<String> {
    let by_pool = [
        "active",
        "active_bytes",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    ];
    let pools = ["all", "large_pool", "small_pool"];
    let by_pool = by_pool
        .iter()
        .flat_map(|name| pools.map(|pool| format!("{name}.{pool}")));
    let alone = ["oversize_allocations", "oversize_segments"].map(str::to_owned);
    let kinds = ["current", "peak", "allocated", "freed"];
    let stats = by_pool
        .chain(alone)
        .flat_map(|name| kinds.map(|kind| format!("{name}.{kind}")));
    let numbers = [
        "max_split_size",
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
        "num_ooms",
        "num_sync_all_streams",
    ];
    stats.chain(numbers.map(str::to_owned)).collect()
}

#[test]
fn the_keys_are_pytorchs_in_order() {
    let entries = Stats::default().entries();
    let keys: Vec<&String> = entries.iter().map(|(key, _)| key).collect();
    let expected = pytorch_keys();
    assert_eq!(keys, expected.iter().collect::<Vec<_>>());
}

/// Each entry has the value that its key names. Every field has another value, so a mix-up would show.
#[test]
fn entries_are_the_fields_they_are_named_after() {
    let mut stats = Stats::default();
    stats.allocation.all = Stat {
        current: 1,
        peak: 2,
        allocated: 3,
        freed: 4,
    };
    stats.segment.large_pool.peak = 5;
    stats.active.small_pool.freed = 6;
    stats.inactive_split.all.allocated = 7;
    stats.allocated_bytes.all.current = 8;
    stats.reserved_bytes.small_pool.current = 9;
    stats.active_bytes.all.peak = 10;
    stats.inactive_split_bytes.large_pool.freed = 11;
    stats.requested_bytes.all.allocated = 12;
    stats.oversize_allocations.current = 13;
    stats.oversize_segments.peak = 14;
    stats.num_alloc_retries = 15;
    stats.num_ooms = 16;
    stats.num_sync_all_streams = 17;
    stats.num_device_alloc = 18;
    stats.num_device_free = 19;
    stats.num_oom_rejections = 20;
    stats.max_split_size = 21;
    let mut set: Vec<_> = stats
        .entries()
        .into_iter()
        .filter(|&(_, value)| value != 0)
        .collect();
    set.sort_by_key(|&(_, value)| value);
    let keys: Vec<&str> = set.iter().map(|(key, _)| key.as_str()).collect();
    let expected = [
        "allocation.all.current",
        "allocation.all.peak",
        "allocation.all.allocated",
        "allocation.all.freed",
        "segment.large_pool.peak",
        "active.small_pool.freed",
        "inactive_split.all.allocated",
        "allocated_bytes.all.current",
        "reserved_bytes.small_pool.current",
        "active_bytes.all.peak",
        "inactive_split_bytes.large_pool.freed",
        "requested_bytes.all.allocated",
        "oversize_allocations.current",
        "oversize_segments.peak",
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
        "max_split_size",
    ];
    assert_eq!(keys, expected);
}

fn allocator(config: &Config) -> DeviceAllocator<SimDriver> {
    let capacity = Some(CAPACITY);
    DeviceAllocator::new(
        SimDriver::new(SimConfig {
            capacity,
            ..SimConfig::default()
        }),
        0,
        config,
    )
}

/// The values are those of PyTorch 2.11 for the same calls.
#[test]
fn the_figures_of_a_small_job() -> Result<(), AllocError> {
    let mut allocator = allocator(&"caching:max_split_size_mb:30".parse().unwrap());
    let small = allocator.allocate(Bytes(1000), Stream::DEFAULT)?;
    let large = allocator.allocate(Bytes::mib(3), Stream::DEFAULT)?;
    let oversize = allocator.allocate(Bytes::mib(40), Stream::DEFAULT)?;
    allocator.free(large)?;
    let stats = allocator.stats();
    let bytes = |mib: i64| mib << 20;
    let figure = |current, peak, allocated, freed| Stat {
        current,
        peak,
        allocated,
        freed,
    };
    assert_eq!(stats.allocation.all, figure(2, 3, 3, 1));
    assert_eq!(stats.segment.all, figure(3, 3, 3, 0));
    let rounded = bytes(43) + 1024;
    assert_eq!(
        stats.allocated_bytes.all,
        figure(bytes(40) + 1024, rounded, rounded, bytes(3))
    );
    assert_eq!(
        stats.requested_bytes.small_pool,
        figure(1000, 1000, 1000, 0)
    );
    assert_eq!(stats.reserved_bytes.all.current, bytes(2 + 20 + 40));
    assert_eq!(
        stats.inactive_split.all.current, 1,
        "the large segment is whole again"
    );
    assert_eq!(
        stats.inactive_split_bytes.small_pool.current,
        bytes(2) - 1024
    );
    assert_eq!(stats.oversize_allocations, figure(1, 1, 1, 0));
    assert_eq!(stats.oversize_segments, figure(1, 1, 1, 0));
    assert_eq!(stats.max_split_size, bytes(30));
    assert_eq!(stats.num_device_alloc, 3);

    allocator.free(small)?;
    allocator.free(oversize)?;
    allocator.empty_cache(None)?;
    let stats = allocator.stats();
    assert_eq!(
        stats.reserved_bytes.all,
        figure(0, bytes(62), bytes(62), bytes(62))
    );
    assert_eq!(stats.oversize_segments, figure(0, 1, 1, 1));
    assert_eq!(stats.num_device_free, 3);
    assert_eq!(stats.num_sync_all_streams, 1);
    Ok(())
}

#[test]
fn only_caching_counts_free_blocks_that_share_their_segment() -> Result<(), AllocError> {
    for name in StrategyName::ALL {
        let mut allocator = allocator(&name.as_str().parse().expect("a strategy"));
        let size = Bytes::mib(3);
        let freed = allocator.allocate(size, Stream::DEFAULT)?;
        allocator.allocate(size, Stream::DEFAULT)?;
        allocator.free(freed)?;
        let stats = allocator.stats();
        let figures = [stats.inactive_split, stats.inactive_split_bytes];
        let counts = figures.iter().all(|figure| figure.all.allocated > 0);
        let is_zero = figures == [PoolStats::default(); 2];
        let is_caching = name == StrategyName::Caching;
        assert_eq!((counts, is_zero), (is_caching, !is_caching), "{name}");
    }
    Ok(())
}

/// Reused memory does not raise a peak.
#[test]
fn a_peak_rises_only_above_the_last_one() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default());
    let size = Bytes::mib(3);
    let [first, _] = [
        allocator.allocate(size, Stream::DEFAULT)?,
        allocator.allocate(size, Stream::DEFAULT)?,
    ];
    for has_new_peak in [true, false] {
        // The first time, there are more free blocks than before.
        allocator.free(first)?;
        assert_eq!(allocator.allocate(size, Stream::DEFAULT)?, first);
        assert_eq!(allocator.lane().news().has_new_peak, has_new_peak);
        allocator.lane_mut().notify_and_clear_peak(true);
    }
    allocator.allocate(size, Stream::DEFAULT)?;
    assert!(allocator.lane().news().has_new_peak);
    Ok(())
}

/// A block is watched until it is freed. Other blocks are not watched.
#[test]
fn blocks_are_noted_one_by_one() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default());
    let mut blocks = Vec::new();
    for _ in 0..3 {
        blocks.push(allocator.allocate(Bytes::mib(3), Stream::DEFAULT)?);
    }
    let noted = |allocator: &DeviceAllocator<SimDriver>| {
        let noted = blocks
            .iter()
            .map(|&block| allocator.lane().allocation(block))
            .map(|block| block.is_ok_and(|block| block.is_watched));
        noted.collect::<Vec<_>>()
    };
    assert_eq!(noted(&allocator), [false; 3]);
    allocator
        .lane_mut()
        .watch(blocks[..2].iter().copied(), true);
    assert_eq!(noted(&allocator), [true, true, false]);
    allocator
        .lane_mut()
        .watch(blocks[..2].iter().copied(), true);
    assert_eq!(noted(&allocator), [true, true, false]);
    allocator
        .lane_mut()
        .watch(blocks[1..].iter().copied(), false);
    assert_eq!(noted(&allocator), [true, false, false]);
    allocator.free(blocks[0])?;
    assert_eq!(noted(&allocator), [false; 3], "it is not held");
    let again = allocator.allocate(Bytes::mib(3), Stream::DEFAULT)?;
    assert_eq!(again, blocks[0]);
    assert_eq!(noted(&allocator), [false; 3]);
    Ok(())
}

const OPERATIONS: usize = 300;

#[test]
#[cfg_attr(miri, ignore = "formats 50,000 keys, which takes miri minutes")]
fn resets_change_only_what_they_name() {
    for config in configs() {
        let mut runner = Runner::new(&config, CAPACITY);
        let program = random_program(3).filter(|op| *op != Op::ResetSums);
        for op in program.take(OPERATIONS) {
            runner.apply(&op).unwrap();
        }
        let before = figures(&runner);
        assert_ne!(before["num_device_alloc"], 0);
        runner.apply(&Op::ResetPeaks).unwrap();
        let after = figures(&runner);
        for (key, &value) in &before {
            let expected = match key.strip_suffix(".peak") {
                Some(name) => before[&format!("{name}.current")],
                None => value,
            };
            assert_eq!(after[key], expected, "{config}: {key}");
        }

        runner.apply(&Op::ResetSums).unwrap();
        let last = figures(&runner);
        for (key, &value) in &after {
            let is_sum = key.ends_with(".allocated") || key.ends_with(".freed");
            let is_count = key.starts_with("num_");
            let expected = if is_sum || is_count { 0 } else { value };
            assert_eq!(last[key], expected, "{config}: {key}");
        }
    }
}

fn figures(runner: &Runner) -> BTreeMap<String, i64> {
    runner.allocator().stats().entries().into_iter().collect()
}
