//! Options that change while an allocator runs.

use lowtide_core::{AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, Stream};
use lowtide_sim::{SimConfig, SimDriver};

type Allocator = DeviceAllocator<SimDriver>;
type Outcome = Result<(), AllocError>;

fn allocator(config: &Config) -> Allocator {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::gib(1)),
        ..SimConfig::default()
    });
    DeviceAllocator::new(driver, 0, config)
}

fn take(allocator: &mut Allocator, mib: u64) -> Result<DeviceAddress, AllocError> {
    allocator.allocate(Bytes::mib(mib), Stream::DEFAULT)
}

fn check(allocator: &Allocator) {
    let checked = allocator.check_invariants(CheckLevel::Everything);
    assert_eq!(checked, Ok(()));
}

#[test]
fn segments_of_both_kinds_coexist() -> Outcome {
    let mut config = Config::default();
    let mut allocator = allocator(&config);
    let mut blocks = Vec::new();
    // Each is too large for what the ones before it left.
    for (conf, mib) in [("True", 3), ("False", 18), ("True", 19), ("False", 19)] {
        let text = format!("expandable_segments:{conf}");
        config = config.reconfigured(&text).expect("an option");
        allocator.reconfigure(&config)?;
        let block = take(&mut allocator, mib)?;
        assert_eq!(allocator.allocation(block)?.is_expandable, conf == "True");
        check(&allocator);
        blocks.push(block);
    }
    for block in blocks {
        allocator.free(block)?;
        check(&allocator);
    }
    // With the option off, what is free in expandable segments is passed over.
    let block = take(&mut allocator, 25)?;
    assert!(!allocator.allocation(block)?.is_expandable);
    allocator.free(block)?;
    allocator.empty_cache()?;
    assert_eq!(allocator.stats().reserved(), Bytes::ZERO);
    Ok(())
}

#[test]
fn what_is_oversize_is_counted_anew() -> Outcome {
    let config = Config::default();
    let mut allocator = allocator(&config);
    let large = take(&mut allocator, 64)?;
    take(&mut allocator, 30)?;
    assert_eq!(allocator.stats().oversize_allocations.current, 0);
    allocator.reconfigure(
        &config
            .reconfigured("max_split_size_mb:50")
            .expect("an option"),
    )?;
    let stats = allocator.stats();
    assert_eq!(stats.max_split_size, 50 << 20);
    assert_eq!(stats.oversize_allocations.current, 1);
    assert_eq!(stats.oversize_segments.current, 1);
    allocator.free(large)?;
    let other = take(&mut allocator, 20)?;
    assert_ne!(other, large, "the oversize block is not split");
    allocator.reconfigure(&config)?;
    let stats = allocator.stats();
    assert_eq!(stats.max_split_size, -1);
    assert_eq!(stats.oversize_segments.current, 0);
    assert_eq!(take(&mut allocator, 20)?, large);
    check(&allocator);
    Ok(())
}

#[test]
fn only_caching_takes_others_over() {
    for (running, given) in [("bfc", "bfc"), ("bfc", "caching"), ("caching", "bfc")] {
        let [running, given] = [running, given].map(|text| text.parse().expect("a strategy"));
        let mut allocator = allocator(&running);
        let answer = allocator.reconfigure(&given);
        assert_eq!(answer, Err(AllocError::NotReconfigurable));
    }
}

#[test]
fn a_fraction_is_told_before_it_is_a_limit() -> Outcome {
    let config = "caching:per_process_memory_fraction:0.5";
    let mut allocator = allocator(&config.parse().expect("options"));
    assert_eq!(allocator.memory_fraction()?, 0.5);
    take(&mut allocator, 1)?;
    assert_eq!(allocator.limit(), Some(Bytes::mib(512)));
    assert_eq!(allocator.memory_fraction()?, 0.5);
    allocator.set_limit(None);
    assert_eq!(allocator.memory_fraction()?, 1.0);
    Ok(())
}
