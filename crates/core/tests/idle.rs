//! Releasing memory that has been idle for long, which `tide` can do while the job runs.

use lowtide_core::{AllocError, Bytes, DeviceAllocator, Stream};
use lowtide_sim::{SimConfig, SimDriver};

type Outcome = Result<(), AllocError>;

const SIZE: Bytes = Bytes::mib(8);

fn tide() -> DeviceAllocator<SimDriver> {
    let config = "tide".parse().expect("the strategy exists");
    DeviceAllocator::new(SimDriver::new(SimConfig::default()), 0, &config)
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
        assert_eq!(allocator.stats(), before, "{config}");
    }
    Ok(())
}
