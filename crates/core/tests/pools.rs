//! Private pools: routing, life cycle, sharing when memory runs out.

use lowtide_core::{
    Action, AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, DriverError,
    MempoolId, PoolSetting, RouteOrder, SegmentSnapshot, Stream,
};
use lowtide_sim::program::configs;
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};

const POOL: MempoolId = MempoolId(0, 1);
const CAPACITY: Bytes = Bytes::mib(128);
const ROUTED: Stream = Stream(1);
const OTHER: Stream = Stream(2);

type Outcome = Result<(), AllocError>;

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

fn use_count(allocator: &DeviceAllocator<SimDriver>) -> Result<u32, AllocError> {
    Ok(allocator.lane().pool(POOL)?.use_count)
}

fn pool_of(allocator: &DeviceAllocator<SimDriver>, address: DeviceAddress) -> MempoolId {
    allocator
        .lane()
        .allocation(address)
        .expect("the block is held")
        .pool
}

fn reserved_in(allocator: &mut DeviceAllocator<SimDriver>, pool: MempoolId) -> Bytes {
    let segments = allocator.segments();
    let in_pool = segments.iter().filter(|segment| segment.pool == pool);
    in_pool.map(|segment: &SegmentSnapshot| segment.size).sum()
}

#[test]
fn requests_go_where_they_are_routed() -> Outcome {
    // BFC without growth gives the first stream all memory.
    let grow = |config: &Config| config.to_conf() != "allow_growth:False";
    for config in configs().into_iter().filter(grow) {
        let mut allocator = allocator(&config);
        let before = allocator.allocate(Bytes::mib(3), ROUTED)?;
        allocator
            .lane_mut()
            .begin_allocate_to_pool(POOL, RouteOrder::BeforeOthers, |stream| stream == ROUTED)?;
        let inside = allocator.allocate(Bytes::mib(3), ROUTED)?;
        let beside = allocator.allocate(Bytes::mib(3), OTHER)?;
        allocator.lane_mut().end_allocate_to_pool(POOL)?;
        let after = allocator.allocate(Bytes::mib(3), ROUTED)?;
        let pools = [before, inside, beside, after].map(|address| pool_of(&allocator, address));
        let default = MempoolId::DEFAULT;
        assert_eq!(pools, [default, POOL, default, default], "{config}");
    }
    Ok(())
}

#[test]
fn a_freed_block_serves_only_its_pool() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let inside = allocator.allocate_in(POOL, Bytes::mib(3), ROUTED)?;
    allocator.free(inside)?;
    assert_ne!(allocator.allocate(Bytes::mib(3), ROUTED)?, inside);
    assert_eq!(allocator.allocate_in(POOL, Bytes::mib(3), ROUTED)?, inside);
    Ok(())
}

#[test]
fn a_pool_ends_when_nothing_holds_it_and_its_memory_is_back() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        allocator.lane_mut().create_or_retain_pool(POOL);
        allocator
            .lane_mut()
            .begin_allocate_to_pool(POOL, RouteOrder::BeforeOthers, |_| true)?;
        assert_eq!(use_count(&allocator), Ok(2));
        let block = allocator.allocate(Bytes::mib(3), ROUTED)?;
        allocator.lane_mut().end_allocate_to_pool(POOL)?;
        allocator.lane_mut().release_pool(POOL)?;
        allocator.empty_cache(None)?;
        assert_eq!(use_count(&allocator), Ok(1), "{config}");

        allocator.lane_mut().release_pool(POOL)?;
        assert_eq!(
            allocator.lane_mut().release_pool(POOL),
            Err(AllocError::PoolNotHeld { pool: POOL })
        );
        allocator.empty_cache(None)?;
        assert_eq!(
            use_count(&allocator),
            Ok(0),
            "{config}: a block is still held"
        );
        allocator.free(block)?;
        allocator.empty_cache(None)?;
        assert_eq!(
            use_count(&allocator),
            Err(AllocError::NoSuchPool { pool: POOL })
        );
        assert!(allocator.driver().leaks().is_empty(), "{config}");
    }
    Ok(())
}

/// The driver refuses to make mapped memory accessible and to unmap it.
#[test]
fn a_pool_ends_when_its_addresses_are_back() -> Outcome {
    let mut allocator = allocator(&"caching:expandable_segments:True".parse().unwrap());
    let error = DriverError::Unsupported { call: "told to" };
    let plan = FaultPlan::every(&[Call::SetAccess, Call::Unmap], error.clone());
    allocator.driver().set_faults(plan);
    let refused = allocator.allocate_in(POOL, Bytes::mib(3), ROUTED);
    assert_eq!(refused, Err(AllocError::Driver(error)));
    allocator.lane_mut().release_pool(POOL)?;
    allocator.empty_cache(None)?;
    assert_eq!(use_count(&allocator), Ok(0));
    // This call reads the pool of every block.
    assert_eq!(
        allocator.lane().held_blocks(MempoolId::DEFAULT),
        Ok(Vec::new())
    );
    allocator.driver().set_faults(FaultPlan::none());
    allocator.empty_cache(None)?;
    let absent = Err(AllocError::NoSuchPool { pool: POOL });
    assert_eq!(use_count(&allocator), absent);
    assert!(allocator.driver().leaks().is_empty());
    Ok(())
}

#[test]
fn a_held_pool_keeps_its_free_memory() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let block = allocator.allocate_in(POOL, Bytes::mib(3), ROUTED)?;
    allocator.free(block)?;
    allocator.empty_cache(None)?;
    assert_eq!(reserved_in(&mut allocator, POOL), Bytes::mib(20));
    allocator.lane_mut().release_pool(POOL)?;
    allocator.empty_cache(None)?;
    assert_eq!(reserved_in(&mut allocator, POOL), Bytes::ZERO);
    Ok(())
}

/// Found by a random program: requests were then routed to a removed pool, or to another.
#[test]
fn a_pool_that_requests_are_routed_to_does_not_end() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        allocator
            .lane_mut()
            .begin_allocate_to_pool(POOL, RouteOrder::BeforeOthers, |_| true)?;
        allocator.lane_mut().release_pool(POOL)?;
        allocator.empty_cache(None)?;
        let block = allocator.allocate(Bytes::mib(3), ROUTED)?;
        assert_eq!(pool_of(&allocator, block), POOL, "{config}");
    }
    Ok(())
}

/// Found by a random program: the default pool was removed.
#[test]
fn releasing_the_default_pool_changes_nothing() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        allocator.lane_mut().release_pool(MempoolId::DEFAULT)?;
        allocator.empty_cache(None)?;
        let block = allocator.allocate(Bytes::mib(3), ROUTED)?;
        assert_eq!(pool_of(&allocator, block), MempoolId::DEFAULT, "{config}");
    }
    Ok(())
}

/// Found by a random program: the pool was removed while its own request released memory.
#[test]
fn a_request_in_a_pool_holds_it() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        allocator.lane_mut().create_or_retain_pool(POOL);
        allocator.lane_mut().release_pool(POOL)?;
        let too_much = allocator.allocate_in(POOL, Bytes::gib(1), ROUTED);
        assert!(
            too_much.is_err_and(|error| error.is_out_of_memory()),
            "{config}"
        );
        assert_eq!(use_count(&allocator), Ok(1), "{config}");
    }
    Ok(())
}

/// Makes requests in a pool that are refused or need no memory.
fn ask_in_vain(allocator: &mut DeviceAllocator<SimDriver>) {
    let nothing = allocator.allocate_in(POOL, Bytes::ZERO, OTHER);
    assert_eq!(nothing, Ok(DeviceAddress::NULL));
    let requested = Bytes(Bytes::REQUEST_MAX.get() + 1);
    let too_large = allocator.allocate_in(POOL, requested, OTHER);
    assert_eq!(too_large, Err(AllocError::TooLarge { requested }));
    let error = DriverError::Unsupported {
        call: "query_event",
    };
    let plan = FaultPlan::nth(Call::QueryEvent, 1, error.clone());
    allocator.driver().set_faults(plan);
    let failed = allocator.allocate_in(POOL, Bytes(1), OTHER);
    assert_eq!(failed, Err(AllocError::Driver(error)));
}

#[test]
fn a_request_that_is_refused_up_front_leaves_its_pool_as_it_was() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        // A pending block, so that the driver is called before anything else.
        let block = allocator.allocate(Bytes::mib(3), ROUTED)?;
        allocator.lane_mut().record_stream(block, OTHER)?;
        allocator.driver().launch(OTHER, 1_000_000);
        allocator.free(block)?;

        ask_in_vain(&mut allocator);
        let absent = Err(AllocError::NoSuchPool { pool: POOL });
        assert_eq!(use_count(&allocator), absent, "{config}");

        allocator.lane_mut().create_or_retain_pool(POOL);
        allocator.lane_mut().release_pool(POOL)?;
        ask_in_vain(&mut allocator);
        assert_eq!(use_count(&allocator), Ok(0), "{config}");

        allocator
            .lane_mut()
            .set_pool(POOL, PoolSetting::Paused(Some("kv".into())))?;
        let region = "kv".into();
        let away = allocator.allocate_in(POOL, Bytes(1), OTHER);
        assert_eq!(away, Err(AllocError::Paused { region }), "{config}");
        assert_eq!(use_count(&allocator), Ok(0), "{config}");
    }
    Ok(())
}

#[test]
fn routing_twice_and_ending_twice_are_errors() -> Outcome {
    let mut allocator = allocator(&Config::default());
    allocator
        .lane_mut()
        .begin_allocate_to_pool(POOL, RouteOrder::BeforeOthers, |_| true)?;
    let again = allocator
        .lane_mut()
        .begin_allocate_to_pool(POOL, RouteOrder::BeforeOthers, |_| true);
    assert_eq!(again, Err(AllocError::PoolInUse { pool: POOL }));
    assert_eq!(
        use_count(&allocator),
        Ok(1),
        "what is refused holds nothing"
    );
    allocator.lane_mut().end_allocate_to_pool(POOL)?;
    let ended = Err(AllocError::PoolNotRouted { pool: POOL });
    assert_eq!(allocator.lane_mut().end_allocate_to_pool(POOL), ended);
    let unknown = MempoolId(9, 9);
    let absent = Err(AllocError::NoSuchPool { pool: unknown });
    assert_eq!(allocator.lane_mut().end_allocate_to_pool(unknown), absent);
    assert_eq!(allocator.lane_mut().release_pool(unknown), absent);
    assert_eq!(
        allocator
            .lane_mut()
            .set_pool(unknown, PoolSetting::UseOnOom(true)),
        absent
    );
    assert_eq!(
        allocator.lane_mut().set_pool(unknown, PoolSetting::NoSplit),
        absent
    );
    assert_eq!(allocator.empty_cache(Some(unknown)), absent);
    Ok(())
}

#[test]
fn the_latest_route_that_matches_decides() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let second = MempoolId(0, 2);
    allocator
        .lane_mut()
        .begin_allocate_to_pool(second, RouteOrder::BeforeOthers, |_| true)?;
    allocator
        .lane_mut()
        .begin_allocate_to_pool(POOL, RouteOrder::BeforeOthers, |stream| stream == ROUTED)?;
    let blocks = [
        allocator.allocate(Bytes(1), ROUTED)?,
        allocator.allocate(Bytes(1), OTHER)?,
    ];
    assert_eq!(
        blocks.map(|block| pool_of(&allocator, block)),
        [POOL, second]
    );
    Ok(())
}

/// Fills the device from a private pool, frees the blocks, and allocates some of that memory from another pool.
fn ask_from_outside(config: &Config, use_on_oom: bool) -> Result<DeviceAddress, AllocError> {
    let mut allocator = allocator(config);
    let inside = allocator.allocate_in(POOL, Bytes::mib(100), ROUTED)?;
    allocator
        .lane_mut()
        .set_pool(POOL, PoolSetting::UseOnOom(use_on_oom))?;
    allocator.free(inside)?;
    allocator.allocate(Bytes::mib(100), ROUTED)
}

#[test]
fn a_pool_serves_others_only_if_it_is_open_to_them() {
    for config in ["caching", "caching:expandable_segments:True"] {
        let config = config.parse().unwrap();
        assert!(ask_from_outside(&config, true).is_ok(), "{config}");
        let refused = ask_from_outside(&config, false);
        assert!(
            refused.is_err_and(|error| error.is_out_of_memory()),
            "{config}"
        );
    }
}

#[test]
fn a_pool_without_splitting_hands_blocks_out_whole() -> Outcome {
    for (config, sizes) in [("caching", [20, 20, 30]), ("tide", [4, 2, 30])] {
        let mut allocator = allocator(&config.parse().expect("the strategy exists"));
        allocator.lane_mut().create_or_retain_pool(POOL);
        allocator.lane_mut().set_pool(POOL, PoolSetting::NoSplit)?;
        let blocks = [Bytes::mib(3), Bytes::kib(1100), Bytes::mib(30)]
            .map(|size| allocator.allocate_in(POOL, size, ROUTED));
        let mut addresses = Vec::new();
        for (block, mib) in blocks.into_iter().zip(sizes) {
            let block = allocator.lane().allocation(block?)?;
            assert_eq!(block.size, Bytes::mib(mib), "{config}");
            addresses.push(block.address);
        }
        let segments = allocator.recent_past().segments;
        let starts: Vec<_> = segments.iter().map(|segment| segment.address).collect();
        assert!(addresses.iter().all(|address| starts.contains(address)));
        allocator.free(addresses[2])?;
        let again = allocator.allocate_in(POOL, Bytes::mib(25), ROUTED)?;
        assert_eq!(again, addresses[2], "{config}");
        assert_eq!(allocator.lane().allocation(again)?.size, Bytes::mib(30));
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .expect("all holds");
    }
    Ok(())
}

/// A captured graph needs this: between its replays, nothing else gets the addresses of its pool.
#[test]
fn a_graphs_memory_is_its_own_until_the_graph_is_gone() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        allocator
            .lane_mut()
            .begin_allocate_to_pool(POOL, RouteOrder::BeforeOthers, |stream| stream == ROUTED)?;
        allocator.lane_mut().capture_begin();
        let captured = allocator.allocate(Bytes::mib(5), ROUTED)?;
        allocator.free(captured)?;
        let reused = allocator.allocate(Bytes::mib(5), ROUTED)?;
        allocator.lane_mut().capture_end()?;
        allocator.lane_mut().end_allocate_to_pool(POOL)?;
        allocator.free(reused)?;
        let reserved = reserved_in(&mut allocator, POOL);
        allocator.empty_cache(None)?;
        assert_eq!(reserved_in(&mut allocator, POOL), reserved, "{config}");
        allocator.lane_mut().release_pool(POOL)?;
        allocator.empty_cache(None)?;
        assert_eq!(allocator.stats().reserved(), Bytes::ZERO, "{config}");
    }
    Ok(())
}

/// The numbers of pools and domains are reused, and no state of the previous ones remains.
#[test]
fn a_new_pool_takes_the_place_of_one_that_ended() -> Result<(), AllocError> {
    for config in configs() {
        let mut allocator = DeviceAllocator::new(SimDriver::default(), 0, &config);
        for number in 1..=3 {
            let pool = MempoolId(0, number);
            allocator.lane_mut().create_or_retain_pool(pool);
            let block = allocator.allocate_in(pool, Bytes::mib(3), Stream(7))?;
            allocator.free(block)?;
            allocator.lane_mut().release_pool(pool)?;
            allocator.empty_cache(None)?;
            assert_eq!(
                allocator.lane().check_invariants(CheckLevel::Everything),
                Ok(()),
                "{config}"
            );
        }
    }
    Ok(())
}

/// As in PyTorch, a wait happens, and is counted, only if there is memory to release.
#[test]
fn emptying_a_pool_that_is_held_does_nothing() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let block = allocator.allocate_in(POOL, Bytes::mib(3), ROUTED)?;
    allocator.free(block)?;
    allocator.empty_cache(Some(POOL))?;
    assert_eq!(allocator.stats().num_sync_all_streams, 0);
    assert_eq!(reserved_in(&mut allocator, POOL), Bytes::mib(20));
    allocator.lane_mut().release_pool(POOL)?;
    allocator.empty_cache(Some(POOL))?;
    assert_eq!(allocator.stats().num_sync_all_streams, 1);
    assert_eq!(allocator.stats().reserved(), Bytes::ZERO);
    Ok(())
}

/// PyTorch's order: large segments of the default pool are released first, but small ones of a private pool.
#[test]
fn small_segments_of_a_pool_go_first() -> Outcome {
    for (pool, expected) in [(MempoolId::DEFAULT, [20, 2]), (POOL, [2, 20])] {
        let mut allocator = allocator(&Config::default());
        for size in [Bytes::kib(1), Bytes::mib(5)] {
            let block = allocator.allocate_in(pool, size, ROUTED)?;
            allocator.free(block)?;
        }
        allocator.lane_mut().release_pool(pool)?;
        allocator.lane_mut().event_log().record(true);
        allocator.empty_cache(None)?;
        let events = allocator.lane_mut().event_log().take();
        let freed = events.filter(|event| event.action == Action::SegmentFree);
        let sizes: Vec<u64> = freed.map(|event| event.size.get() >> 20).collect();
        assert_eq!(sizes, expected, "{pool}");
    }
    Ok(())
}
