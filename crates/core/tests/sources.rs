//! Pools whose segments come from elsewhere than the driver.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use lowtide_core::{
    Action, AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, Event,
    MempoolId, SegmentSource, Stream,
};
use lowtide_sim::program::configs;
use lowtide_sim::{Call, SimConfig, SimDriver};

const POOL: MempoolId = MempoolId(0, 1);
/// Where the simulated driver has nothing.
const START: u64 = 1 << 50;

type Outcome = Result<(), AllocError>;

/// What a test sees of its source.
#[derive(Default)]
struct Seen {
    given: AtomicU64,
    taken: AtomicU64,
    has_ended: AtomicU64,
    held: Mutex<Vec<(DeviceAddress, Bytes)>>,
}

/// Hands out addresses as long as it has some bytes.
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
    fn allocate(&mut self, size: Bytes, _stream: Stream) -> Option<DeviceAddress> {
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
        joins_allocations: true,
        ..SimConfig::default()
    });
    DeviceAllocator::new(driver, 0, config)
}

#[test]
fn segments_come_from_the_source_and_go_back_to_it() -> Outcome {
    // BFC without growth gives the first stream all memory there is.
    let grow = |config: &Config| config.to_conf() != "allow_growth:False";
    for config in configs().into_iter().filter(grow) {
        let mut allocator = allocator(&config);
        let (seen, source) = source(Bytes::mib(256));
        allocator.create_or_retain_pool(POOL);
        allocator.set_pool_source(POOL, source)?;
        let sizes = [3, 30, 1].map(Bytes::mib);
        let mut blocks = Vec::new();
        for size in sizes {
            let block = allocator.allocate_in(POOL, size, Stream::DEFAULT)?;
            assert!(block.get() >= START, "{config}");
            assert!(!allocator.allocation(block)?.is_expandable);
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
        let checked = allocator.check_invariants(CheckLevel::Everything);
        assert_eq!(checked, Ok(()), "{config}");
        allocator.empty_cache()?;
        assert_eq!(seen.has_ended.load(Ordering::Relaxed), 0, "it is held");
        allocator.release_pool(POOL)?;
        allocator.empty_pool(POOL)?;
        let counts = [&seen.taken, &seen.given].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(counts[0], counts[1], "{config}");
        assert_eq!(seen.has_ended.load(Ordering::Relaxed), 1, "{config}");
        allocator.free(other)?;
    }
    Ok(())
}

/// Whoever is told has to let go of the memory first, and it is the source's own afterwards.
#[test]
fn the_source_holds_its_memory_still_when_its_end_is_told() -> Outcome {
    for config in configs() {
        let mut allocator = allocator(&config);
        let (seen, source) = source(Bytes::mib(64));
        allocator.create_or_retain_pool(POOL);
        allocator.set_pool_source(POOL, source)?;
        let told = Arc::new(AtomicU64::new(0));
        let (count, held) = (Arc::clone(&told), Arc::clone(&seen));
        allocator.observe_events(Some(Arc::new(move |event: &Event| {
            if event.action == Action::SegmentFree {
                let memory = (event.address, event.size);
                assert!(held.held().contains(&memory), "{event:?}");
                count.fetch_add(1, Ordering::Relaxed);
            }
        })));
        let block = allocator.allocate_in(POOL, Bytes::mib(3), Stream::DEFAULT)?;
        allocator.free(block)?;
        allocator.release_pool(POOL)?;
        allocator.empty_pool(POOL)?;
        let taken = seen.taken.load(Ordering::Relaxed);
        assert!(taken > 0, "{config}");
        assert_eq!(told.load(Ordering::Relaxed), taken, "{config}");
    }
    Ok(())
}

#[test]
fn a_source_without_memory_is_a_pool_without_memory() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let (seen, source) = source(Bytes::mib(20));
    allocator.create_or_retain_pool(POOL);
    allocator.set_pool_source(POOL, source)?;
    let block = allocator.allocate_in(POOL, Bytes::mib(3), Stream::DEFAULT)?;
    let error = allocator.allocate_in(POOL, Bytes::mib(18), Stream::DEFAULT);
    assert!(error.unwrap_err().is_out_of_memory());
    allocator.allocate(Bytes::mib(18), Stream::DEFAULT)?;
    allocator.free(block)?;
    // The pool is held: nothing of it goes back, and its own memory serves it.
    let again = allocator.allocate_in(POOL, Bytes::mib(17), Stream::DEFAULT)?;
    assert_eq!(again, block);
    assert_eq!(seen.taken.load(Ordering::Relaxed), 0);
    allocator.free(again)?;
    allocator.release_pool(POOL)?;
    allocator.empty_cache()?;
    assert_eq!(seen.has_ended.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn a_source_comes_before_the_first_segment_and_once() -> Outcome {
    let mut allocator = allocator(&Config::default());
    let in_use = Err(AllocError::PoolInUse { pool: POOL });
    let no_such_pool = Err(AllocError::NoSuchPool { pool: POOL });
    assert_eq!(
        allocator.set_pool_source(POOL, source(Bytes::ZERO).1),
        no_such_pool
    );
    let default = MempoolId::DEFAULT;
    let refused = allocator.set_pool_source(default, source(Bytes::ZERO).1);
    assert_eq!(refused, Err(AllocError::PoolInUse { pool: default }));

    allocator.create_or_retain_pool(POOL);
    allocator.set_pool_source(POOL, source(Bytes::mib(2)).1)?;
    let (seen, second) = source(Bytes::mib(2));
    assert_eq!(allocator.set_pool_source(POOL, second), in_use);
    assert_eq!(seen.has_ended.load(Ordering::Relaxed), 1, "it is of no use");

    let later = MempoolId(0, 2);
    allocator.allocate_in(later, Bytes::mib(1), Stream::DEFAULT)?;
    let refused = allocator.set_pool_source(later, source(Bytes::mib(2)).1);
    assert_eq!(refused, Err(AllocError::PoolInUse { pool: later }));
    Ok(())
}
