//! Private pools whose segments come from a source of their own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use lowtide_core::{
    Action, AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, Event,
    EventClock, MempoolId, PoolSetting, RouteOrder, SegmentSnapshot, SegmentSource, Stream,
};
use lowtide_sim::program::configs;
use lowtide_sim::{Call, SimConfig, SimDriver};

const POOL: MempoolId = MempoolId(0, 1);
/// An address at which the simulated driver has no memory.
const START: u64 = 1 << 50;

type Outcome = Result<(), AllocError>;

/// The calls of a source that a test can read.
#[derive(Default)]
struct Seen {
    given: AtomicU64,
    taken: AtomicU64,
    has_ended: AtomicU64,
    held: Mutex<Vec<(DeviceAddress, Bytes)>>,
}

/// Allocates consecutive addresses until its bytes are used up.
struct Source {
    seen: Arc<Seen>,
    left: Bytes,
    next: DeviceAddress,
}

impl Seen {
    fn held(&self) -> MutexGuard<'_, Vec<(DeviceAddress, Bytes)>> {
        self.held.lock().expect("no test panics while it looks")
    }
}

impl SegmentSource for Source {
    fn allocate(
        &mut self,
        size: Bytes,
        _stream: Stream,
        _is_limited: bool,
    ) -> Option<DeviceAddress> {
        if size > self.left {
            return None;
        }
        self.left -= size;
        let address = self.next;
        self.next = address + size;
        self.seen.given.fetch_add(1, Ordering::Relaxed);
        self.seen.held().push((address, size));
        Some(address)
    }

    fn release(&mut self, address: DeviceAddress, size: Bytes) {
        let mut held = self.seen.held();
        let known = held.iter().position(|&known| known == (address, size));
        held.remove(known.expect("it was handed out so"));
        self.left += size;
        self.seen.taken.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        assert!(self.seen.held().is_empty(), "it ends last");
        self.seen.has_ended.fetch_add(1, Ordering::Relaxed);
    }
}

fn source(bytes: Bytes) -> (Arc<Seen>, Box<Source>) {
    let seen = Arc::new(Seen::default());
    let source = Source {
        seen: Arc::clone(&seen),
        left: bytes,
        next: DeviceAddress(START),
    };
    (seen, Box::new(source))
}

fn allocator(config: &Config) -> DeviceAllocator<SimDriver> {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::mib(256)),
        ..SimConfig::default()
    });
    DeviceAllocator::new(driver, 0, config)
}

#[test]
fn segments_come_from_the_source_and_go_back_to_it() -> Outcome {
    // BFC without growth gives the first stream all memory.
    let grow = |config: &Config| config.to_conf() != "allow_growth:False";
    for config in configs().into_iter().filter(grow) {
        let mut allocator = allocator(&config);
        let (seen, source) = source(Bytes::mib(256));
        allocator.lane_mut().create_or_retain_pool(POOL);
        allocator
            .lane_mut()
            .set_pool(POOL, PoolSetting::Source(source))?;
        let sizes = [3, 30, 1].map(Bytes::mib);
        let mut blocks = Vec::new();
        for size in sizes {
            let block = allocator.allocate_in(POOL, size, Stream::DEFAULT)?;
            assert!(block.get() >= START, "{config}");
            assert!(!allocator.lane().allocation(block)?.is_expandable);
            blocks.push(block);
        }
        let from_driver = [Call::Allocate, Call::Reserve, Call::Create];
        let calls = from_driver.map(|call| allocator.driver().stats(call).count);
        assert_eq!(calls, [0; 3], "{config}");
        let other = allocator.allocate(Bytes::mib(1), Stream::DEFAULT)?;
        assert!(
            other.get() < START,
            "{config}: others' come from the driver"
        );
        let held = seen.held().clone();
        let held: Bytes = held.iter().map(|&(_, size)| size).sum();
        let segments = allocator.segments();
        let in_pool = segments.iter().filter(|segment| segment.pool == POOL);
        assert_eq!(in_pool.map(|segment| segment.size).sum::<Bytes>(), held);
        for block in blocks {
            allocator.free(block)?;
        }
        let checked = allocator.lane().check_invariants(CheckLevel::Everything);
        assert_eq!(checked, Ok(()), "{config}");
        allocator.empty_cache(None)?;
        assert_eq!(seen.has_ended.load(Ordering::Relaxed), 0, "it is held");
        allocator.lane_mut().release_pool(POOL)?;
        allocator.empty_cache(Some(POOL))?;
        let counts = [&seen.taken, &seen.given].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(counts[0], counts[1], "{config}");
        assert_eq!(seen.has_ended.load(Ordering::Relaxed), 1, "{config}");
        allocator.free(other)?;
    }
    Ok(())
}

/// Observers must deregister the memory first. Only then is it released to the source.
#[test]
fn the_source_holds_its_memory_still_when_its_release_is_notified() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        let (seen, source) = source(Bytes::mib(64));
        allocator.lane_mut().create_or_retain_pool(POOL);
        allocator
            .lane_mut()
            .set_pool(POOL, PoolSetting::Source(source))?;
        let notified = Arc::new(AtomicU64::new(0));
        let (count, held) = (Arc::clone(&notified), Arc::clone(&seen));
        allocator
            .lane_mut()
            .event_log()
            .observe(Some(Arc::new(move |events: &[Event]| {
                let leaves = |event: &&Event| event.action == Action::SegmentFree;
                for event in events.iter().filter(leaves) {
                    let memory = (event.address, event.size);
                    assert!(held.held().contains(&memory), "{event:?}");
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })));
        let block = allocator.allocate_in(POOL, Bytes::mib(3), Stream::DEFAULT)?;
        allocator.free(block)?;
        allocator.lane_mut().release_pool(POOL)?;
        allocator.empty_cache(Some(POOL))?;
        let taken = seen.taken.load(Ordering::Relaxed);
        assert!(taken > 0, "{config}");
        assert_eq!(notified.load(Ordering::Relaxed), taken, "{config}");
    }
    Ok(())
}

#[test]
fn a_source_without_memory_is_a_pool_without_memory() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let (seen, source) = source(Bytes::mib(20));
    allocator.lane_mut().create_or_retain_pool(POOL);
    allocator
        .lane_mut()
        .set_pool(POOL, PoolSetting::Source(source))?;
    let block = allocator.allocate_in(POOL, Bytes::mib(3), Stream::DEFAULT)?;
    let error = allocator.allocate_in(POOL, Bytes::mib(18), Stream::DEFAULT);
    assert!(error.unwrap_err().is_out_of_memory());
    allocator.allocate(Bytes::mib(18), Stream::DEFAULT)?;
    allocator.free(block)?;
    // The pool is in use: none of its memory is released, and it serves only the pool.
    let again = allocator.allocate_in(POOL, Bytes::mib(17), Stream::DEFAULT)?;
    assert_eq!(again, block);
    assert_eq!(seen.taken.load(Ordering::Relaxed), 0);
    allocator.free(again)?;
    allocator.lane_mut().release_pool(POOL)?;
    allocator.empty_cache(None)?;
    assert_eq!(seen.has_ended.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn a_source_comes_before_the_first_segment_and_once() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let in_use = Err(AllocError::PoolHasSource { pool: POOL });
    let no_such_pool = Err(AllocError::NoSuchPool { pool: POOL });
    assert_eq!(
        allocator
            .lane_mut()
            .set_pool(POOL, PoolSetting::Source(source(Bytes::ZERO).1)),
        no_such_pool
    );
    let default = MempoolId::DEFAULT;
    let refused = allocator
        .lane_mut()
        .set_pool(default, PoolSetting::Source(source(Bytes::ZERO).1));
    assert_eq!(refused, Err(AllocError::PoolHasSource { pool: default }));

    allocator.lane_mut().create_or_retain_pool(POOL);
    allocator
        .lane_mut()
        .set_pool(POOL, PoolSetting::Source(source(Bytes::mib(2)).1))?;
    let (seen, second) = source(Bytes::mib(2));
    assert_eq!(
        allocator
            .lane_mut()
            .set_pool(POOL, PoolSetting::Source(second)),
        in_use
    );
    assert_eq!(seen.has_ended.load(Ordering::Relaxed), 1, "it is of no use");

    let later = MempoolId(0, 2);
    allocator.allocate_in(later, Bytes::mib(1), Stream::DEFAULT)?;
    let refused = allocator
        .lane_mut()
        .set_pool(later, PoolSetting::Source(source(Bytes::mib(2)).1));
    assert_eq!(refused, Err(AllocError::PoolHasSource { pool: later }));
    Ok(())
}

fn bytes_of(segments: &[(DeviceAddress, Bytes)]) -> Bytes {
    segments.iter().map(|&(_, size)| size).sum()
}

fn set(allocator: &mut DeviceAllocator<SimDriver>, setting: PoolSetting) {
    assert_eq!(allocator.lane_mut().set_pool(POOL, setting), Ok(()));
}

/// Returns the bytes of the pool's segments, and of those that have a block in use.
fn bytes_in_pool(allocator: &DeviceAllocator<SimDriver>) -> [Bytes; 2] {
    let mut segments = allocator.segments();
    segments.retain(|segment| segment.pool == POOL);
    let is_used = |segment: &&SegmentSnapshot| segment.active_bytes() > Bytes::ZERO;
    [
        segments.iter().map(|segment| segment.size).sum(),
        segments
            .iter()
            .filter(is_used)
            .map(|segment| segment.size)
            .sum(),
    ]
}

/// While a pool is paused, no block is allocated in it and no memory is released automatically. The limit does
/// not count its memory. Blocks can be freed as usual.
#[test]
fn a_paused_pool_stays_as_it_is() {
    for config in configs() {
        let mut allocator = allocator(&config);
        let (seen, source) = source(Bytes::gib(8));
        allocator.lane_mut().create_or_retain_pool(POOL);
        set(&mut allocator, PoolSetting::Source(source));
        set(&mut allocator, PoolSetting::ReleasesFree);
        let allocate = |allocator: &mut DeviceAllocator<SimDriver>, size| {
            allocator.allocate_in(POOL, size, Stream::DEFAULT)
        };
        let blocks = [Bytes::mib(30), Bytes::mib(3)]
            .map(|size| allocate(&mut allocator, size).expect("the source has it"));
        let held = allocator.lane().held_blocks(POOL).expect("it is there");
        let mut addresses = blocks;
        addresses.sort_unstable();
        assert!(held.iter().map(|block| block.address).eq(addresses));
        let checkpoint = allocator.lane().checkpoint(POOL).expect("it is there");
        set(&mut allocator, PoolSetting::Paused(Some("kv".into())));
        let away = || AllocError::Paused {
            region: "kv".into(),
        };
        assert_eq!(allocate(&mut allocator, Bytes(1)), Err(away()));
        assert_eq!(allocator.lane_mut().restore(&checkpoint), Err(away()));
        set(&mut allocator, PoolSetting::UseOnOom(true));
        allocator.set_limit(Some(Bytes::gib(6)));
        let outside = allocator.allocate(Bytes::mib(1), Stream::DEFAULT);
        let outside = outside.unwrap_or_else(|error| panic!("{config:?}: {error}"));
        assert!(!blocks.contains(&outside));
        assert_eq!(allocator.free(blocks[0]), Ok(()));
        let [all, used] = bytes_in_pool(&allocator);
        assert_eq!(all, bytes_of(&seen.held()), "it is held");
        let (given, taken) = (&seen.given, &seen.taken);
        let taken_before = taken.load(Ordering::Relaxed);
        assert_eq!(allocator.empty_cache(None), Ok(()));
        assert_eq!(taken.load(Ordering::Relaxed), taken_before, "{config:?}");
        assert_eq!(
            allocator.lane_mut().trim_pool(POOL),
            Ok(()),
            "but when it is asked for"
        );
        assert_eq!(used, bytes_of(&seen.held()), "{config:?}");
        set(&mut allocator, PoolSetting::Paused(None));
        assert_eq!(allocator.free(blocks[1]), Ok(()));
        assert_eq!(allocator.empty_cache(None), Ok(()));
        let count = given.load(Ordering::Relaxed);
        assert_eq!(
            taken.load(Ordering::Relaxed),
            count,
            "it gives back though it is held"
        );
        let again = allocate(&mut allocator, Bytes::mib(3)).expect("it is there");
        assert_eq!(allocator.free(again), Ok(()));
        let checked = allocator.lane().check_invariants(CheckLevel::Everything);
        assert_eq!(checked, Ok(()));
        assert_eq!(allocator.empty_cache(None), Ok(()));
    }
}

#[test]
fn the_last_events_have_the_pauses_of_pools() {
    let mut allocator = allocator(&Config::default());
    let clock = Arc::new(EventClock::default());
    clock.start();
    allocator.lane_mut().event_log().keep_recent(clock);
    let (_seen, source) = source(Bytes::gib(8));
    allocator.lane_mut().create_or_retain_pool(POOL);
    set(&mut allocator, PoolSetting::Source(source));
    set(&mut allocator, PoolSetting::Paused(Some("kv".into())));
    assert_eq!(allocator.recent_past().paused, [POOL]);
    set(&mut allocator, PoolSetting::Paused(None));
    let pauses = |allocator: &DeviceAllocator<SimDriver>| -> Vec<Action> {
        let past = allocator.recent_past().events.into_iter();
        let pauses = past.filter(|event| event.action.is_pause());
        let of_pool = pauses.map(|event| {
            assert_eq!(
                (event.pool, event.address, event.size),
                (POOL, DeviceAddress::NULL, Bytes::ZERO)
            );
            event.action
        });
        of_pool.collect()
    };
    assert_eq!(pauses(&allocator), [], "it has no memory");
    let block = allocator.allocate_in(POOL, Bytes::mib(60), Stream::DEFAULT);
    let block = block.expect("there is room");
    // Pausing twice counts as one pause.
    for region in [Some("kv".into()), Some("kv".into()), None, None] {
        set(&mut allocator, PoolSetting::Paused(region));
    }
    assert_eq!(allocator.recent_past().paused, []);
    assert_eq!(
        pauses(&allocator),
        [Action::SegmentPaused, Action::SegmentResumed]
    );
    assert_eq!(allocator.free(block), Ok(()));
    assert_eq!(allocator.lane_mut().release_pool(POOL), Ok(()));
    assert_eq!(allocator.empty_cache(None), Ok(()));
}

#[test]
fn the_limit_does_not_count_what_is_away() {
    let mut allocator = allocator(&Config::default());
    let (_seen, source) = source(Bytes::gib(8));
    allocator.lane_mut().create_or_retain_pool(POOL);
    set(&mut allocator, PoolSetting::Source(source));
    let block = allocator.allocate_in(POOL, Bytes::mib(60), Stream::DEFAULT);
    let block = block.expect("there is room");
    allocator.set_limit(Some(Bytes::mib(100)));
    assert!(allocator.allocate(Bytes::mib(60), Stream::DEFAULT).is_err());
    set(&mut allocator, PoolSetting::Paused(Some("kv".into())));
    let outside = allocator.allocate(Bytes::mib(60), Stream::DEFAULT);
    assert!(outside.is_ok());
    assert!(allocator.allocate(Bytes::mib(60), Stream::DEFAULT).is_err());
    set(&mut allocator, PoolSetting::Paused(None));
    assert_eq!(allocator.free(outside.expect("as above")), Ok(()));
    assert_eq!(allocator.empty_cache(None), Ok(()));
    assert!(allocator.allocate(Bytes::mib(60), Stream::DEFAULT).is_err());
    assert_eq!(allocator.free(block), Ok(()));
    assert_eq!(allocator.lane_mut().release_pool(POOL), Ok(()));
    assert_eq!(allocator.empty_cache(None), Ok(()));
    assert_eq!(
        allocator
            .lane_mut()
            .set_pool(MempoolId(0, 7), PoolSetting::Paused(None)),
        Err(AllocError::NoSuchPool {
            pool: MempoolId(0, 7)
        })
    );
}

/// A region's route is tried after all others, whenever it began.
#[test]
fn a_route_that_is_to_be_last_is() {
    let mut allocator = allocator(&Config::default());
    let pool = MempoolId(0, 2);
    assert_eq!(
        allocator.lane_mut().begin_allocate_to_pool(
            pool,
            RouteOrder::BeforeOthers,
            |stream| stream == Stream(7)
        ),
        Ok(())
    );
    assert_eq!(
        allocator
            .lane_mut()
            .begin_allocate_to_pool(POOL, RouteOrder::AfterOthers, |_| true),
        Ok(())
    );
    let mut pool_of = |stream| {
        let address = allocator.allocate(Bytes(1), stream).expect("there is room");
        allocator
            .lane()
            .allocation(address)
            .expect("it is held")
            .pool
    };
    assert_eq!(pool_of(Stream(7)), pool);
    assert_eq!(pool_of(Stream(8)), POOL);
    let again = allocator
        .lane_mut()
        .begin_allocate_to_pool(POOL, RouteOrder::AfterOthers, |_| true);
    assert_eq!(again, Err(AllocError::PoolInUse { pool: POOL }));
}

/// PyTorch uses no expandable segments in such a pool, whatever the option says.
#[test]
fn its_blocks_are_split_as_those_of_plain_segments() -> Outcome {
    let config = "caching:expandable_segments:True".parse().expect("options");
    let mut allocator = allocator(&config);
    let (_seen, source) = source(Bytes::mib(256));
    allocator.lane_mut().create_or_retain_pool(POOL);
    allocator
        .lane_mut()
        .set_pool(POOL, PoolSetting::Source(source))?;
    let block = allocator.allocate_in(POOL, Bytes::mib(11), Stream::DEFAULT)?;
    assert_eq!(allocator.lane().allocation(block)?.size, Bytes::mib(12));
    assert_eq!(allocator.stats().inactive_split.all.current, 0);
    allocator.free(block)?;
    allocator.lane_mut().release_pool(POOL)?;
    allocator.empty_cache(Some(POOL))
}
