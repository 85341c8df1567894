//! Options that change while an allocator runs.

use lowtide_core::{
    Action, AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, Event, Stream,
};
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
    let checked = allocator.lane().check_invariants(CheckLevel::Everything);
    assert_eq!(checked, Ok(()));
}

#[test]
fn segments_of_both_kinds_coexist() -> Outcome {
    let mut config = Config::default();
    let mut allocator = allocator(&config);
    let mut blocks = Vec::new();
    // Each block is too large for the rest of the earlier segments.
    for (conf, mib) in [("True", 3), ("False", 18), ("True", 19), ("False", 19)] {
        let text = format!("expandable_segments:{conf}");
        config = config.reconfigured(&text, None).expect("an option");
        allocator.lane_mut().reconfigure(&config)?;
        let block = take(&mut allocator, mib)?;
        assert_eq!(
            allocator.lane().allocation(block)?.is_expandable,
            conf == "True"
        );
        check(&allocator);
        blocks.push(block);
    }
    for block in blocks {
        allocator.free(block)?;
        check(&allocator);
    }
    // With the option off, free blocks of expandable segments are skipped.
    let block = take(&mut allocator, 25)?;
    assert!(!allocator.lane().allocation(block)?.is_expandable);
    allocator.free(block)?;
    allocator.empty_cache(None)?;
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
    allocator.lane_mut().reconfigure(
        &config
            .reconfigured("max_split_size_mb:50", None)
            .expect("an option"),
    )?;
    let stats = allocator.stats();
    assert_eq!(stats.max_split_size, 50 << 20);
    assert_eq!(stats.oversize_allocations.current, 1);
    assert_eq!(stats.oversize_segments.current, 1);
    allocator.free(large)?;
    let other = take(&mut allocator, 20)?;
    assert_ne!(other, large, "the oversize block is not split");
    allocator.lane_mut().reconfigure(&config)?;
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
        let answer = allocator.lane_mut().reconfigure(&given);
        assert_eq!(answer, Err(AllocError::NotReconfigurable));
    }
}

#[test]
fn a_fraction_is_reported_before_it_is_a_limit() -> Outcome {
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

/// The oversize block of the expandable segment cannot be released on its own. PyTorch then releases smaller
/// ones.
#[test]
fn what_is_oversize_goes_back_beside_expandable_segments() -> Outcome {
    let config = Config::default().reconfigured("max_split_size_mb:20", None);
    let config = config.expect("an option");
    let mut allocator = allocator(&config);
    let mut blocks = vec![take(&mut allocator, 300)?, take(&mut allocator, 200)?];
    let expandable = config.reconfigured("expandable_segments:True,max_split_size_mb:20", None);
    allocator
        .lane_mut()
        .reconfigure(&expandable.expect("options"))?;
    blocks.push(take(&mut allocator, 500)?);
    allocator.lane_mut().reconfigure(&config)?;
    for block in blocks {
        allocator.free(block)?;
    }
    allocator.lane_mut().event_log().record(true);
    take(&mut allocator, 450)?;
    let is_of_segments = |event: &Event| event.action.is_segment();
    let events = allocator
        .lane_mut()
        .event_log()
        .take()
        .filter(is_of_segments);
    let seen: Vec<_> = events
        .map(|event| (event.action, event.size.get() >> 20))
        .collect();
    let (free, alloc) = (Action::SegmentFree, Action::SegmentAlloc);
    assert_eq!(seen, [(free, 300), (free, 200), (alloc, 450)]);
    assert_eq!(allocator.stats().num_alloc_retries, 0);
    check(&allocator);
    Ok(())
}
