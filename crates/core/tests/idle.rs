//! Releasing memory that has been idle for long, which `tide` can do while the job runs.

use lowtide_core::{AllocError, Bytes, DeviceAllocator, MempoolId, PoolSetting, Stream};
use lowtide_sim::{SimConfig, SimDriver};

type Outcome = Result<(), AllocError>;

const SIZE: Bytes = Bytes::mib(8);

fn tide() -> DeviceAllocator<SimDriver> {
    let config = "tide".parse().expect("the strategy exists");
    DeviceAllocator::new(SimDriver::new(SimConfig::default()), 0, &config)
}

/// Returns an allocator of a device with 100 MiB.
fn small_tide(virtual_memory: bool) -> DeviceAllocator<SimDriver> {
    let sim = SimConfig {
        capacity: Some(Bytes::mib(100)),
        virtual_memory,
        ..SimConfig::default()
    };
    let config = "tide".parse().expect("the strategy exists");
    DeviceAllocator::new(SimDriver::new(sim), 0, &config)
}

fn reserved(allocator: &DeviceAllocator<SimDriver>) -> Bytes {
    allocator.stats().reserved()
}

#[test]
fn what_was_idle_at_a_time_is_released_and_no_more_than_is_asked_for() -> Outcome {
    let mut allocator = tide();
    let (old, young) = (
        allocator.allocate(SIZE, Stream::DEFAULT)?,
        allocator.allocate(SIZE, Stream::DEFAULT)?,
    );
    allocator.free(old)?;
    let time = allocator.lane_mut().release_unused(0, Bytes::ZERO)?;
    allocator.free(young)?;
    for (most, left) in [
        (Bytes::mib(1), 16),
        (Bytes::mib(5), 12),
        (Bytes::gib(1), 8),
        (Bytes::gib(1), 8),
    ] {
        allocator.lane_mut().release_unused(time, most)?;
        assert_eq!(reserved(&allocator), Bytes::mib(left));
    }
    assert_eq!(allocator.driver().created_bytes(), SIZE);
    // What is left serves at the address where it was.
    assert_eq!(allocator.allocate(SIZE, Stream::DEFAULT)?, young);
    assert_eq!(allocator.driver().created_bytes(), SIZE);
    Ok(())
}

#[test]
fn what_work_uses_stays_and_nothing_waits_for_it() -> Outcome {
    let mut allocator = tide();
    let block = allocator.allocate(SIZE, Stream::DEFAULT)?;
    allocator.driver().launch(Stream::DEFAULT, 1_000_000_000);
    allocator.free(block)?;
    let start = allocator.driver().now_ns();
    allocator.lane_mut().release_unused(u64::MAX, SIZE)?;
    assert_eq!(reserved(&allocator), SIZE);
    assert!(allocator.driver().now_ns() - start < 1_000_000);
    allocator.driver().advance(1_000_000_000);
    allocator.lane_mut().release_unused(u64::MAX, SIZE)?;
    assert_eq!(reserved(&allocator), Bytes::ZERO);
    Ok(())
}

/// Returns the time of a release of [`SIZE`] idle bytes for all of the device, a second of work after their use, and
/// whether they went.
fn release_idle(is_captured: bool) -> Result<(u64, bool), AllocError> {
    let mut allocator = small_tide(true);
    let block = allocator.allocate(SIZE, Stream::DEFAULT)?;
    allocator.driver().launch(Stream::DEFAULT, 1_000_000_000);
    allocator.free(block)?;
    if is_captured {
        allocator.lane_mut().capture_begin();
    }
    let start = allocator.driver().now_ns();
    let has_gone = allocator.lane_mut().release_idle(Bytes::mib(100))?;
    assert_eq!(
        reserved(&allocator),
        if has_gone { Bytes::ZERO } else { SIZE }
    );
    Ok((allocator.driver().now_ns() - start, has_gone))
}

#[test]
fn idle_memory_is_released_after_the_work_that_uses_it() -> Outcome {
    let (time, has_gone) = release_idle(false)?;
    assert!(time > 500_000_000 && has_gone);
    let (time, has_gone) = release_idle(true)?;
    assert!(time < 1_000_000 && !has_gone, "a capture forbids the wait");
    Ok(())
}

#[test]
fn other_strategies_keep_what_they_have() -> Outcome {
    for config in lowtide_sim::program::configs() {
        if config.name() == lowtide_core::StrategyName::Tide {
            continue;
        }
        let driver = SimDriver::new(SimConfig::default());
        let mut allocator = DeviceAllocator::new(driver, 0, &config);
        let block = allocator.allocate(SIZE, Stream::DEFAULT)?;
        allocator.free(block)?;
        let before = allocator.stats();
        allocator
            .lane_mut()
            .release_unused(u64::MAX, Bytes::gib(1))?;
        assert_eq!(
            allocator.lane_mut().release_idle(Bytes::gib(1000)),
            Ok(false)
        );
        assert_eq!(allocator.stats(), before, "{config}");
    }
    Ok(())
}

/// A pool without splitting takes whole segments, so idle frames do not serve its requests.
#[test]
fn as_much_is_released_for_a_segment_as_is_missing() -> Outcome {
    let mut allocator = small_tide(true);
    let pool = MempoolId(0, 1);
    for waits in [false, true] {
        allocator.lane_mut().create_or_retain_pool(pool);
        allocator.lane_mut().set_pool(pool, PoolSetting::NoSplit)?;
        let blocks = [40, 40].map(|mib| allocator.allocate(Bytes::mib(mib), Stream::DEFAULT));
        let work = if waits { 1_000_000_000 } else { 0 };
        allocator.driver().launch(Stream::DEFAULT, work);
        for block in blocks {
            allocator.free(block?)?;
        }
        let start = allocator.driver().now_ns();
        let whole = allocator.allocate_in(pool, Bytes::mib(51), Stream::DEFAULT)?;
        assert_eq!(
            reserved(&allocator),
            Bytes::mib(48 + 52),
            "32 MiB were missing"
        );
        assert_eq!(allocator.driver().now_ns() - start > 500_000_000, waits);
        allocator.free(whole)?;
        allocator.lane_mut().release_pool(pool)?;
        allocator.empty_cache(None)?;
    }
    Ok(())
}

/// A device that cannot map memory has whole segments. Free ones are released for a request that fits in none.
#[test]
fn segments_are_released_for_a_request_that_would_fail() -> Outcome {
    let mut allocator = small_tide(false);
    let blocks = [40, 40].map(|mib| allocator.allocate(Bytes::mib(mib), Stream::DEFAULT));
    for block in blocks {
        allocator.free(block?)?;
    }
    allocator.allocate(Bytes::mib(90), Stream::DEFAULT)?;
    assert_eq!(reserved(&allocator), Bytes::mib(90));
    Ok(())
}
