//! Requests for memory at a given address.

use lowtide_core::{
    Action, AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, StrategyName,
    Stream,
};
use lowtide_sim::program::configs;
use lowtide_sim::{SimConfig, SimDriver};

type Allocator = DeviceAllocator<SimDriver>;
type Outcome = Result<(), AllocError>;

const OTHER: Stream = Stream(1);

fn allocator(config: &Config) -> Allocator {
    DeviceAllocator::new(SimDriver::new(SimConfig::default()), 0, config)
}

fn caching(options: &str) -> Allocator {
    allocator(&options.parse().expect("options"))
}

/// Allocates and frees a block of `mib` MiB, and returns its address.
fn freed(allocator: &mut Allocator, mib: u64) -> Result<DeviceAddress, AllocError> {
    let address = allocator.allocate(Bytes::mib(mib), Stream::DEFAULT)?;
    allocator.free(address)?;
    Ok(address)
}

/// Checks that a request at an address is refused and changes nothing.
fn refused(allocator: &mut Allocator, address: DeviceAddress, size: Bytes, stream: Stream) {
    let before = allocator.stats();
    let answer = allocator.lane_mut().allocate_where(address, size, stream);
    assert_eq!(answer, Err(AllocError::NotFree { address, size }));
    assert_eq!(allocator.stats(), before);
    check(allocator);
}

fn check(allocator: &Allocator) {
    let checked = allocator.lane().check_invariants(CheckLevel::Everything);
    assert_eq!(checked, Ok(()));
}

#[test]
fn a_request_is_served_within_a_free_block() -> Outcome {
    for options in ["caching", "caching:expandable_segments:True"] {
        let mut allocator = caching(options);
        let start = freed(&mut allocator, 8)?;
        for (offset, size) in [(4, 2), (0, 2), (16, 2), (2, 2), (6, 10)] {
            let address = start + Bytes::mib(offset);
            let size = Bytes::mib(size);
            let served = allocator
                .lane_mut()
                .allocate_where(address, size, Stream::DEFAULT)?;
            assert_eq!(served, address, "{options}");
            assert_eq!(allocator.lane().allocation(address)?.size, size);
            check(&allocator);
        }
        assert_eq!(allocator.stats().num_device_alloc, 1);
        let rest = allocator.allocate(Bytes::mib(2), Stream::DEFAULT)?;
        assert_eq!(rest, start + Bytes::mib(18));
    }
    Ok(())
}

/// `tide` serves where memory is mapped, and asks the driver for none.
#[test]
fn tide_serves_where_memory_is_mapped() -> Outcome {
    let mut allocator = caching("tide");
    let start = freed(&mut allocator, 20)?;
    for (offset, size) in [(4, 3), (0, 2), (17, 3), (2, 2), (7, 10)] {
        let address = start + Bytes::mib(offset);
        let lane = allocator.lane_mut();
        let served = lane.allocate_where(address, Bytes::mib(size), Stream::DEFAULT)?;
        assert_eq!(served, address);
        assert_eq!(allocator.lane().allocation(address)?.size, Bytes::mib(size));
        check(&allocator);
        assert_eq!(allocator.stats().num_device_alloc, 1);
    }
    for offset in [0, 4, 17] {
        allocator.free(start + Bytes::mib(offset))?;
    }
    let (size, default) = (Bytes::mib(2), Stream::DEFAULT);
    refused(&mut allocator, start + Bytes::mib(2), size, default);
    refused(&mut allocator, start + Bytes(256), Bytes::mib(1), default);
    refused(&mut allocator, start, size, OTHER);
    refused(&mut allocator, start + Bytes::mib(19), size, default);
    refused(&mut allocator, DeviceAddress(u64::MAX - 511), size, default);
    Ok(())
}

/// Freed small blocks are merged before, and what lies before is more than any small request.
#[test]
fn tide_serves_small_requests_anywhere() -> Outcome {
    let mut allocator = caching("tide");
    let size = Bytes::kib(256);
    let blocks: Result<Vec<_>, _> = (0..16)
        .map(|_| allocator.allocate(size, Stream::DEFAULT))
        .collect();
    let blocks = blocks?;
    for &block in &blocks {
        allocator.free(block)?;
    }
    let address = blocks[12] + Bytes::kib(4);
    let lane = allocator.lane_mut();
    let served = lane.allocate_where(address, size, Stream::DEFAULT)?;
    assert_eq!(served, address);
    check(&allocator);
    assert_eq!(
        allocator.allocate(size, Stream::DEFAULT)?,
        blocks[13] + Bytes::kib(4)
    );
    check(&allocator);
    Ok(())
}

/// Frames that another stream took are missing there, and in what lies before.
#[test]
fn tide_refuses_addresses_without_memory() -> Outcome {
    let mut allocator = caching("tide");
    let start = freed(&mut allocator, 20)?;
    let taken = allocator.allocate(Bytes::mib(4), OTHER)?;
    let (size, default) = (Bytes::mib(2), Stream::DEFAULT);
    refused(&mut allocator, start, size, default);
    refused(&mut allocator, start + Bytes::mib(8), size, default);
    allocator.free(taken)?;
    let rest = allocator.allocate(Bytes::mib(16), default)?;
    assert_eq!(rest, start + Bytes::mib(4));
    allocator.free(rest)?;
    Ok(())
}

/// The statistics and events are those of PyTorch 2.13 and 2.15.
#[test]
fn what_lies_before_is_taken_for_the_moment() -> Outcome {
    let mut allocator = caching("caching");
    let start = freed(&mut allocator, 8)?;
    allocator.lane_mut().event_log().record(true);
    let address = start + Bytes::mib(4);
    allocator
        .lane_mut()
        .allocate_where(address, Bytes::mib(2), Stream::DEFAULT)?;
    let events = allocator.lane_mut().event_log().take();
    let seen: Vec<_> = events
        .map(|event| (event.action, event.address, event.size))
        .collect();
    let (before, size) = (Bytes::mib(4), Bytes::mib(2));
    let expected = [
        (Action::Alloc, start, before),
        (Action::Alloc, address, size),
        (Action::FreeRequested, start, before),
        (Action::FreeCompleted, start, before),
    ];
    assert_eq!(seen, expected);
    let figures = allocator.stats().entries();
    let figure = |name: &str| { figures.iter() }.find(|(key, _)| key == name).map(|f| f.1);
    assert_eq!(figure("allocation.large_pool.allocated"), Some(3));
    assert_eq!(figure("allocation.large_pool.peak"), Some(2));
    assert_eq!(figure("inactive_split.all.current"), Some(2));
    assert_eq!(
        figure("inactive_split_bytes.all.allocated"),
        Some(33_554_432)
    );
    assert_eq!(figure("inactive_split_bytes.all.peak"), Some(18_874_368));
    Ok(())
}

#[test]
fn memory_that_is_not_free_for_the_request_is_refused() -> Outcome {
    let mut allocator = caching("caching");
    let start = freed(&mut allocator, 8)?;
    let size = Bytes::mib(2);
    let held = allocator
        .lane_mut()
        .allocate_where(start + Bytes::mib(4), size, Stream::DEFAULT)?;
    let default = Stream::DEFAULT;
    refused(&mut allocator, held, size, default);
    refused(&mut allocator, held + Bytes(512), Bytes(512), default);
    refused(&mut allocator, start, Bytes::mib(5), default);
    refused(&mut allocator, start + Bytes(256), size, default);
    refused(&mut allocator, start, size, OTHER);
    // Small requests have segments of their own.
    refused(&mut allocator, start, Bytes(512), default);
    refused(&mut allocator, start + Bytes::mib(19), size, default);
    refused(&mut allocator, DeviceAddress(512), size, default);
    refused(&mut allocator, DeviceAddress(u64::MAX - 511), size, default);
    let too_large = allocator
        .lane_mut()
        .allocate_where(start, Bytes(u64::MAX), default);
    assert!(matches!(too_large, Err(AllocError::TooLarge { .. })));
    let nothing = allocator
        .lane_mut()
        .allocate_where(held, Bytes::ZERO, default)?;
    assert_eq!(nothing, DeviceAddress::NULL);
    Ok(())
}

/// A block that PyTorch would not split is not split here either.
#[test]
fn a_block_that_may_not_be_split_serves_from_its_start_only() -> Outcome {
    let mut allocator = caching("caching:max_split_size_mb:32");
    let start = freed(&mut allocator, 64)?;
    let (size, default) = (Bytes::mib(20), Stream::DEFAULT);
    refused(&mut allocator, start + Bytes::mib(40), size, default);
    assert_eq!(
        allocator
            .lane_mut()
            .allocate_where(start, Bytes::mib(40), default)?,
        start
    );
    assert_eq!(allocator.lane().allocation(start)?.size, Bytes::mib(64));
    Ok(())
}

#[test]
fn what_a_large_block_leaves_is_left_to_it() -> Outcome {
    let mut allocator = caching("caching");
    let start = freed(&mut allocator, 30)?;
    let address = start + Bytes::mib(2);
    allocator
        .lane_mut()
        .allocate_where(address, Bytes::mib(27), Stream::DEFAULT)?;
    assert_eq!(allocator.lane().allocation(address)?.size, Bytes::mib(28));
    Ok(())
}

#[test]
fn every_strategy_serves_a_request_that_would_go_there() -> Outcome {
    let keeps = |config: &Config| config.name() != StrategyName::Direct;
    for config in configs().into_iter().filter(keeps) {
        let mut allocator = allocator(&config);
        let size = Bytes::mib(3);
        let first = allocator.allocate(size, Stream::DEFAULT)?;
        let guard = allocator.allocate(size, Stream::DEFAULT)?;
        allocator.free(first)?;
        let elsewhere = allocator
            .lane_mut()
            .allocate_where(guard, size, Stream::DEFAULT);
        let address = guard;
        assert_eq!(elsewhere, Err(AllocError::NotFree { address, size }));
        check(&allocator);
        let served = allocator
            .lane_mut()
            .allocate_where(first, size, Stream::DEFAULT)?;
        assert_eq!(served, first, "{config:?}");
        check(&allocator);
    }
    Ok(())
}

/// Checks that a request for exactly `size` bytes at an address is refused and changes nothing.
fn not_free(allocator: &mut Allocator, address: DeviceAddress, size: Bytes) {
    let before = allocator.stats();
    let answer = allocator.lane_mut().allocate_at(address, size);
    assert_eq!(answer, Err(AllocError::NotFree { address, size }));
    assert_eq!(allocator.stats(), before);
    check(allocator);
}

#[test]
fn a_free_block_is_cut_to_exactly_what_is_wanted() -> Outcome {
    let mut allocator = caching("caching");
    let start = freed(&mut allocator, 8)?;
    assert_eq!(allocator.lane_mut().allocate_at(start, Bytes(700))?, start);
    assert_eq!(allocator.lane().allocation(start)?.size, Bytes(1024));
    check(&allocator);
    // The memory behind it is free, and can be taken as a whole.
    let rest = start + Bytes(1024);
    let size = Bytes::mib(20) - Bytes(1024);
    not_free(&mut allocator, rest, size + Bytes(1));
    not_free(&mut allocator, rest, Bytes::REQUEST_MAX);
    assert_eq!(allocator.lane_mut().allocate_at(rest, size)?, rest);
    assert_eq!(allocator.lane().allocation(rest)?.size, size);
    check(&allocator);
    assert_eq!(allocator.stats().inactive_split.all.current, 0);
    Ok(())
}

#[test]
fn exactly_some_bytes_are_taken_of_a_free_block_only() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        let held = allocator.allocate(Bytes::mib(8), Stream::DEFAULT)?;
        not_free(&mut allocator, held, Bytes::mib(8));
        allocator.free(held)?;
        not_free(&mut allocator, held + Bytes(512), Bytes(512));
        not_free(&mut allocator, held, Bytes::ZERO);
        let requested = Bytes::REQUEST_MAX + Bytes(1);
        let too_large = allocator.lane_mut().allocate_at(held, requested);
        assert_eq!(too_large, Err(AllocError::TooLarge { requested }));
        if config.name() != StrategyName::Caching {
            // The strategy has fixed block sizes.
            not_free(&mut allocator, held, Bytes::mib(8));
        }
    }
    Ok(())
}
