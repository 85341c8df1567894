//! Private pools that are restored to a checkpoint.
//!
//! Random programs with checkpoints are in `programs.rs`; this file tests single cases.

use lowtide_core::{
    Action, AllocError, Allocation, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator,
    DirectConfig, DriverError, MempoolId, PoolSetting, Restored, StatsReset, StrategyName, Stream,
};
use lowtide_sim::program::configs;
use lowtide_sim::{FaultPlan, SimConfig, SimDriver};

const POOL: MempoolId = MempoolId(1, 0);
const OTHER: Stream = Stream(1);

type Allocator = DeviceAllocator<SimDriver>;
type Outcome = Result<(), AllocError>;

fn allocator(config: &Config) -> Allocator {
    let capacity = Some(Bytes::gib(1));
    let driver = SimDriver::new(SimConfig {
        capacity,
        ..SimConfig::default()
    });
    DeviceAllocator::new(driver, 0, config)
}

fn expandable() -> Config {
    "caching:expandable_segments:True".parse().expect("options")
}

fn check(allocator: &Allocator) {
    let checked = allocator.lane().check_invariants(CheckLevel::Everything);
    assert_eq!(checked, Ok(()));
}

fn addresses(blocks: &[Allocation]) -> Vec<DeviceAddress> {
    blocks.iter().map(|block| block.address).collect()
}

/// Allocates blocks of these sizes, in units of 128 KiB, from the pool and returns their addresses.
fn take(allocator: &mut Allocator, eighths: &[u64]) -> Result<Vec<DeviceAddress>, AllocError> {
    let take = |&eighths| allocator.allocate_in(POOL, Bytes::kib(128 * eighths), Stream::DEFAULT);
    eighths.iter().map(take).collect()
}

/// Sizes of objects, runs, small and large blocks, whole segments.
const SIZES: [u64; 8] = [1, 24, 3, 160, 24, 8, 400, 11];

#[test]
fn blocks_come_back_where_they_were() -> Outcome {
    let is_direct = |config: &Config| config.name() == StrategyName::Direct;
    let fits = |config: &Config| !config.to_conf().contains("allow_growth:False");
    for config in configs().into_iter().filter(fits) {
        let mut allocator = allocator(&config);
        let held = take(&mut allocator, &SIZES)?;
        allocator.free(held[3])?;
        let checkpoint = allocator.lane().checkpoint(POOL)?;
        let known: Vec<Allocation> = { held.iter() }
            .filter_map(|&address| allocator.lane().allocation(address).ok())
            .collect();
        assert_eq!(known.len(), held.len() - 1);

        // Other blocks overlap the earlier ones, or are in segments that are newer than the checkpoint.
        if !is_direct(&config) {
            for index in [1, 2, 4, 6, 7] {
                allocator.free(held[index])?;
            }
        }
        let others = take(&mut allocator, &[2, 2, 30, 1, 390, 7])?;
        let before = allocator.stats();
        let Restored { freed, allocated } = allocator.lane_mut().restore(&checkpoint)?;
        assert!(freed.len() >= others.len());
        let mut known: Vec<_> = { known.iter() }
            .map(|block| (block.address, block.size, block.stream))
            .collect();
        known.sort_unstable();
        let back = { allocated.iter() }.map(|block| (block.address, block.size, block.stream));
        assert!(back.eq(known), "{config}: {allocated:?}");
        check(&allocator);
        assert_eq!(allocator.lane().held_blocks(POOL), Ok(allocated.clone()));
        if !is_direct(&config) {
            assert_eq!(allocator.stats().reserved(), before.reserved(), "{config}");
        }

        // Again, with nothing changed.
        let again = allocator.lane_mut().restore(&checkpoint)?;
        assert_eq!(addresses(&again.freed), addresses(&allocated), "{config}");
        assert_eq!(
            addresses(&again.allocated),
            addresses(&allocated),
            "{config}"
        );
        check(&allocator);
        for address in addresses(&allocated) {
            allocator.free(address)?;
        }
        allocator.lane_mut().release_pool(POOL)?;
        allocator.empty_cache(None)?;
        assert_eq!(allocator.stats().reserved(), Bytes::ZERO, "{config}");
    }
    Ok(())
}

/// Objects of a slab whose place is now used by another class.
#[test]
fn slabs_come_back() -> Outcome {
    let mut allocator = allocator(&"slab".parse().expect("a strategy"));
    let take_many = |allocator: &mut Allocator, kib: u64| {
        let take = |_| allocator.allocate_in(POOL, Bytes::kib(kib), Stream::DEFAULT);
        (0..200).map(take).collect::<Result<Vec<_>, _>>()
    };
    let mut small = take_many(&mut allocator, 3)?;
    let checkpoint = allocator.lane().checkpoint(POOL)?;
    for &address in &small {
        allocator.free(address)?;
    }
    take_many(&mut allocator, 17)?;
    let restored = allocator.lane_mut().restore(&checkpoint)?;
    small.sort_unstable();
    assert_eq!(addresses(&restored.allocated), small);
    check(&allocator);
    Ok(())
}

/// PyTorch allocates every block of a restored segment, and frees the free ones again.
#[test]
fn the_events_are_those_of_pytorch() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let held = take(&mut allocator, &[1, 2, 3])?;
    allocator.free(held[1])?;
    let checkpoint = allocator.lane().checkpoint(POOL)?;
    allocator.free(held[0])?;
    allocator.reset_stats(StatsReset::Peaks);
    allocator.lane_mut().event_log().record(true);
    allocator.lane_mut().restore(&checkpoint)?;
    let kib = |event: lowtide_core::Event| {
        let offset = event.address.offset_from(held[0]);
        (event.action, offset.get() >> 10, event.size.get() >> 10)
    };
    let events: Vec<_> = allocator.lane_mut().event_log().take().map(kib).collect();
    let (alloc, requested, completed) =
        (Action::Alloc, Action::FreeRequested, Action::FreeCompleted);
    let expected = [
        (requested, 384, 384),
        (completed, 384, 384),
        (alloc, 0, 128),
        (alloc, 128, 256),
        (alloc, 384, 384),
        (alloc, 768, 1280),
        (requested, 128, 256),
        (completed, 128, 256),
        (requested, 768, 1280),
        (completed, 768, 1280),
    ];
    assert_eq!(events, expected);
    let stats = allocator.stats();
    assert_eq!(stats.allocated_bytes.all.peak, 2 << 20);
    assert_eq!(stats.allocated_bytes.all.current, 512 << 10);
    Ok(())
}

#[test]
fn an_expandable_segment_may_have_grown() -> Outcome {
    let mut allocator = allocator(&expandable());
    let held = take(&mut allocator, &[100, 30])?;
    let checkpoint = allocator.lane().checkpoint(POOL)?;
    allocator.free(held[0])?;
    let later = take(&mut allocator, &[800, 90])?;
    let restored = allocator.lane_mut().restore(&checkpoint)?;
    assert_eq!(addresses(&restored.allocated), held);
    assert!(addresses(&restored.freed).contains(&later[0]));
    check(&allocator);
    // Memory that the pool got after the checkpoint is now free in it.
    assert_eq!(take(&mut allocator, &[800])?, later[..1]);
    Ok(())
}

#[test]
fn what_went_back_to_the_driver_does_not_come_back() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        let held = take(&mut allocator, &[24, 400])?;
        let checkpoint = allocator.lane().checkpoint(POOL)?;
        allocator.free(held[1])?;
        allocator.free(held[0])?;
        allocator.lane_mut().release_pool(POOL)?;
        allocator.empty_cache(Some(POOL))?;
        let ended = allocator.lane_mut().restore(&checkpoint).unwrap_err();
        assert_eq!(ended, AllocError::NoSuchPool { pool: POOL }, "{config}");
        // Another pool with the same id, whose memory may be at the same addresses.
        let other = take(&mut allocator, &[24])?;
        let before = allocator.stats();
        let refused = allocator.lane_mut().restore(&checkpoint).unwrap_err();
        let is_expected = matches!(refused, AllocError::NotRestorable { pool: POOL, .. });
        assert!(is_expected, "{config}: {refused:?}");
        assert_eq!(allocator.stats(), before, "{config}");
        let held = allocator.lane().held_blocks(POOL)?;
        assert_eq!(addresses(&held), other, "{config}");
        check(&allocator);
    }
    Ok(())
}

#[test]
fn direct_restores_what_is_still_held() -> Outcome {
    let mut allocator = allocator(&Config::Direct(DirectConfig));
    let held = take(&mut allocator, &[24, 8])?;
    let checkpoint = allocator.lane().checkpoint(POOL)?;
    let later = take(&mut allocator, &[16])?;
    // The driver refuses to free the later block. It is freed with the next request.
    let lost = DriverError::Failed {
        call: "free",
        code: 1,
        message: "not now".to_owned(),
    };
    allocator
        .driver()
        .set_faults(FaultPlan::nth_of_any(1, lost));
    let restored = allocator.lane_mut().restore(&checkpoint)?;
    assert_eq!(addresses(&restored.allocated).len(), held.len());
    assert_eq!(allocator.stats().reserved(), Bytes::mib(6));
    check(&allocator);
    assert_eq!(allocator.free(later[0]), not_allocated(later[0]));
    allocator.lane_mut().process_events()?;
    assert_eq!(allocator.stats().reserved(), Bytes::mib(4));

    allocator.free(held[0])?;
    let before = allocator.stats();
    let refused = allocator.lane_mut().restore(&checkpoint).unwrap_err();
    assert!(matches!(refused, AllocError::NotRestorable { address, .. } if address == held[0]));
    assert_eq!(allocator.stats(), before);
    Ok(())
}

fn not_allocated(address: DeviceAddress) -> Outcome {
    Err(AllocError::NotAllocated { address })
}

#[test]
fn other_streams_are_waited_for_unless_a_capture_forbids_it() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let held = take(&mut allocator, &[8, 8])?;
    let checkpoint = allocator.lane().checkpoint(POOL)?;
    let done_ns = allocator.driver().now_ns() + 1_000_000;
    allocator.driver().launch(OTHER, 1_000_000);
    allocator.lane_mut().record_stream(held[0], OTHER)?;
    allocator.lane_mut().record_stream(held[1], OTHER)?;

    allocator.lane_mut().capture_begin();
    let refused = allocator.lane_mut().restore(&checkpoint).unwrap_err();
    assert!(matches!(refused, AllocError::NotRestorable { .. }));
    allocator.lane_mut().capture_end()?;
    allocator.free(held[1])?;
    assert!(allocator.driver().now_ns() < done_ns);
    let restored = allocator.lane_mut().restore(&checkpoint)?;
    assert!(allocator.driver().now_ns() >= done_ns);
    assert_eq!(addresses(&restored.allocated), held);
    // Restored blocks are used by no other stream, like new ones.
    allocator.free(held[0])?;
    assert_eq!(allocator.stats().active.all.current, 1);
    Ok(())
}

/// If a wait fails, the block's uses stay recorded, and the next free waits for them.
#[test]
fn a_wait_that_fails_changes_nothing() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let held = take(&mut allocator, &[8])?;
    let checkpoint = allocator.lane().checkpoint(POOL)?;
    allocator.lane_mut().record_stream(held[0], OTHER)?;
    let fault = DriverError::Unsupported { call: "wait" };
    allocator
        .driver()
        .set_faults(FaultPlan::nth_of_any(1, fault.clone()));
    let before = allocator.stats();
    assert_eq!(
        allocator.lane_mut().restore(&checkpoint),
        Err(AllocError::Driver(fault))
    );
    assert_eq!(allocator.stats(), before);
    allocator.driver().launch(OTHER, 1_000_000);
    allocator.free(held[0])?;
    assert_eq!(allocator.stats().active.all.current, 1);
    Ok(())
}

/// As in PyTorch: the free blocks of different segments are not allocated at the same time.
#[test]
fn segments_are_restored_one_after_the_other() -> Outcome {
    let mut allocator = allocator(&Config::default());
    // Each pair is a segment.
    let held = take(&mut allocator, &[8, 8, 8, 8])?;
    allocator.free(held[1])?;
    allocator.free(held[3])?;
    let checkpoint = allocator.lane().checkpoint(POOL)?;
    allocator.free(held[0])?;
    allocator.free(held[2])?;
    allocator.reset_stats(StatsReset::Peaks);
    allocator.lane_mut().restore(&checkpoint)?;
    let stats = allocator.stats();
    assert_eq!(stats.allocated_bytes.all.peak, 3 << 20);
    assert_eq!(stats.allocation.all.peak, 3);
    assert_eq!(stats.allocated_bytes.all.current, 2 << 20);
    check(&allocator);
    Ok(())
}

/// Blocks that share a segment of a device that cannot map memory come back, even if the pool splits no more.
#[test]
fn a_pool_that_splits_no_more_is_restored() -> Outcome {
    for config in ["tide", "caching"] {
        let driver = SimDriver::new(SimConfig {
            virtual_memory: false,
            ..SimConfig::default()
        });
        let mut allocator = DeviceAllocator::new(driver, 0, &config.parse().expect("a strategy"));
        let held = take(&mut allocator, &[1, 1])?;
        allocator.lane_mut().set_pool(POOL, PoolSetting::NoSplit)?;
        let checkpoint = allocator.lane().checkpoint(POOL)?;
        for &block in &held {
            allocator.free(block)?;
        }
        let restored = allocator.lane_mut().restore(&checkpoint)?;
        assert_eq!(addresses(&restored.allocated), held, "{config}");
        check(&allocator);
    }
    Ok(())
}
