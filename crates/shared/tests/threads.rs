//! Real threads, with the standard library's lock and clock.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use lowtide_core::{
    Action, AllocError, Bytes, CheckLevel, Config, DeviceAllocator, Event, Observer, Stream,
};
use lowtide_shared::SharedAllocator;
use lowtide_sim::{SimConfig, SimDriver};

fn driver(mib: u64) -> SimDriver {
    SimDriver::new(SimConfig {
        capacity: Some(Bytes::mib(mib)),
        ..SimConfig::default()
    })
}

fn parsed(config: &str) -> Config {
    config.parse().expect("a configuration")
}

fn allocator(config: &str, mib: u64) -> SharedAllocator<SimDriver> {
    SharedAllocator::new(driver(mib), 3, &parsed(config), Arc::default(), None)
}

fn is_out_of_memory<T>(result: Result<T, AllocError>) -> bool {
    matches!(result, Err(error) if error.is_out_of_memory())
}

#[test]
fn a_request_waits_for_another_thread_to_free() {
    let allocator = allocator("bfc:retry_ms:1000000000", 4);
    let first = allocator
        .allocate(Bytes::mib(3), Stream::DEFAULT, || Ok(false))
        .unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            allocator
                .allocate(Bytes::mib(4), Stream::DEFAULT, || Ok(false))
                .unwrap()
        });
        allocator
            .with_block(first, |lane| lane.free(first))
            .unwrap();
        assert_eq!(waiting.join().unwrap(), first);
    });
}

#[test]
fn a_wait_ends_and_then_the_failure_counts_once() {
    let allocator = allocator("bfc:retry_ms:20", 4);
    allocator
        .allocate(Bytes::mib(3), Stream::DEFAULT, || Ok(false))
        .unwrap();
    let result = allocator.allocate(Bytes::mib(4), Stream::DEFAULT, || Ok(false));
    assert!(is_out_of_memory(result));
    assert_eq!(
        allocator
            .with_all(|device| device.stats())
            .unwrap()
            .num_ooms,
        1
    );
}

/// A waiting request does not block requests that find memory.
#[test]
fn a_waiting_request_holds_up_no_other() {
    let allocator = allocator("bfc:retry_ms:1000000000", 4);
    let first = allocator
        .allocate(Bytes::mib(1), Stream::DEFAULT, || Ok(false))
        .unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            allocator
                .allocate(Bytes::mib(4), Stream::DEFAULT, || Ok(false))
                .unwrap()
        });
        for _ in 0..1000 {
            let address = allocator
                .allocate(Bytes::kib(4), Stream::DEFAULT, || Ok(false))
                .unwrap();
            allocator
                .with_block(address, |lane| lane.free(address))
                .unwrap();
        }
        allocator
            .with_block(first, |lane| lane.free(first))
            .unwrap();
        waiting.join().unwrap();
    });
}

#[test]
fn other_strategies_fail_at_once() {
    let allocator = allocator("caching", 4);
    let result = allocator.allocate(Bytes::mib(4), Stream::DEFAULT, || Ok(false));
    assert!(is_out_of_memory(result), "a segment has 20 MiB");
}

#[test]
fn a_refused_call_says_why() {
    let allocator = allocator("bfc:retry_ms:20", 4);
    let address = lowtide_core::DeviceAddress(512);
    let error = AllocError::NotAllocated { address };
    assert_eq!(
        allocator.with_block(address, |lane| lane.free(address)),
        Err(error)
    );
}

/// Uses the allocator in its destructor, like any owner of memory.
struct Ends<'a>(&'a SharedAllocator<SimDriver>);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        // Enters one lane, then all of them.
        let address = self
            .0
            .allocate(Bytes::mib(1), Stream::DEFAULT, || Ok(false));
        let freed =
            address.and_then(|address| self.0.with_block(address, |lane| lane.free(address)));
        assert_eq!(
            freed.and_then(|()| self.0.with_all(|device| device.empty_cache(None))),
            Ok(Ok(()))
        );
    }
}

/// The panic is the program's own; no thread panicked inside the allocator.
#[test]
fn a_thread_that_panicked_may_give_back_what_it_holds() {
    let allocator = allocator("caching", 40);
    let panicking = AssertUnwindSafe(|| {
        let _ends = Ends(&allocator);
        panic!("of the program");
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    let freed = allocator
        .with_all(|device| device.stats())
        .map(|stats| stats.allocation.all.freed);
    assert_eq!(freed, Ok(1));
}

#[test]
fn after_a_panic_every_thread_gets_an_error() {
    for config in ["bfc:retry_ms:20", "caching"] {
        let allocator = allocator(config, 64);
        let address = allocator
            .allocate(Bytes(1), Stream::DEFAULT, || Ok(false))
            .unwrap();
        let panicking = AssertUnwindSafe(|| {
            let broken = || panic!("as a broken invariant would");
            allocator.with_block(address, |_| -> Result<(), AllocError> { broken() })
        });
        assert!(std::panic::catch_unwind(panicking).is_err());
        thread::scope(|scope| {
            let other = scope.spawn(|| allocator.allocate(Bytes(1), Stream::DEFAULT, || Ok(false)));
            assert_eq!(other.join().unwrap(), Err(AllocError::Poisoned));
        });
        assert_eq!(
            allocator.with_block(address, |lane| lane.free(address)),
            Err(AllocError::Poisoned)
        );
        assert_eq!(allocator.with_all(|_| ()), Err(AllocError::Poisoned));
        let elsewhere = allocator.allocate(Bytes(1), Stream(7), || Ok(false));
        assert_eq!(elsewhere, Err(AllocError::Poisoned), "on every stream");
    }
}

/// Blocks are allocated by one thread and freed by another, with too little memory for all of them
/// at once.
#[test]
fn threads_hand_blocks_to_each_other() {
    let allocator = allocator("bfc:retry_ms:1000000000", 16);
    thread::scope(|scope| {
        for seed in 1..=2_u64 {
            let (sender, receiver) = mpsc::channel();
            let allocator = &allocator;
            scope.spawn(move || {
                for step in 0..2_000 {
                    let size = Bytes(step * seed * 7919 % (3 << 20) + 1);
                    let stream = Stream::DEFAULT;
                    sender
                        .send(allocator.allocate(size, stream, || Ok(false)).unwrap())
                        .unwrap();
                }
            });
            scope.spawn(move || {
                for address in receiver {
                    allocator
                        .with_block(address, |lane| lane.free(address))
                        .unwrap();
                }
            });
        }
    });
    assert_eq!(
        allocator
            .with_all(|device| device.stats())
            .unwrap()
            .allocated(),
        Bytes::ZERO
    );
    let checked = allocator.for_each_lane(|lane| {
        lane.check_invariants(CheckLevel::Everything).unwrap();
        Ok(())
    });
    assert_eq!(checked, Ok(()));
}

/// Every event is reported once, in order, by the thread that caused it, before its call returns.
#[test]
fn an_observer_hears_of_every_event() {
    let allocator = allocator("caching", 64);
    let unheard = allocator
        .allocate(Bytes::mib(1), Stream::DEFAULT, || Ok(false))
        .unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let observer = {
        let heard = Arc::clone(&heard);
        move |events: &[Event]| {
            let here = thread::current().id();
            let notified = events.iter().map(|event| (event.action, here));
            heard.lock().unwrap().extend(notified);
        }
    };
    let observer: Observer = Arc::new(observer);
    assert_eq!(allocator.observe_events(Some(&observer)), Ok(()));
    let take = || std::mem::take(&mut *heard.lock().unwrap());
    let here = thread::current().id();

    let block = allocator
        .allocate(Bytes::mib(3), Stream::DEFAULT, || Ok(false))
        .unwrap();
    assert_eq!(
        take(),
        [(Action::SegmentAlloc, here), (Action::Alloc, here)]
    );
    allocator
        .with_block(block, |lane| lane.free(block))
        .unwrap();
    assert_eq!(
        take(),
        [(Action::FreeRequested, here), (Action::FreeCompleted, here)]
    );
    assert_eq!(
        allocator.with_all(|device| device.empty_cache(None)),
        Ok(Ok(()))
    );
    assert_eq!(take(), [(Action::SegmentFree, here)]);
    assert!(is_out_of_memory(allocator.allocate(
        Bytes::gib(1),
        Stream::DEFAULT,
        || Ok(false)
    )));
    assert_eq!(take(), [(Action::OutOfMemory, here)]);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            allocator
                .with_block(unheard, |lane| lane.free(unheard))
                .unwrap();
            thread::current().id()
        });
        let other = other.join().unwrap();
        assert_eq!(
            take(),
            [
                (Action::FreeRequested, other),
                (Action::FreeCompleted, other)
            ]
        );
    });

    assert_eq!(allocator.observe_events(None), Ok(()));
    allocator
        .allocate(Bytes::mib(3), Stream::DEFAULT, || Ok(false))
        .unwrap();
    assert_eq!(take(), []);
    let kept = allocator.with_all(|lanes| lanes.lane_mut().event_log().take().count());
    assert_eq!(kept, Ok(0), "nobody is notified later");
}

/// The waits that BFC configures are reported as they happen, not at their end.
#[test]
fn an_observer_hears_of_a_request_that_waits() {
    let allocator = allocator("bfc:retry_ms:20", 4);
    allocator
        .allocate(Bytes::mib(3), Stream::DEFAULT, || Ok(false))
        .unwrap();
    let failures = Arc::new(AtomicU64::new(0));
    let observer = {
        let failures = Arc::clone(&failures);
        move |events: &[Event]| {
            let is_failure = |event: &&Event| event.action == Action::OutOfMemory;
            let count = events.iter().filter(is_failure).count() as u64;
            failures.fetch_add(count, Ordering::Relaxed);
        }
    };
    let observer: Observer = Arc::new(observer);
    assert_eq!(allocator.observe_events(Some(&observer)), Ok(()));
    assert!(is_out_of_memory(allocator.allocate(
        Bytes::mib(4),
        Stream::DEFAULT,
        || Ok(false)
    )));
    assert_eq!(failures.load(Ordering::Relaxed), 1);
}

#[test]
fn on_miss_is_called_before_the_driver() {
    let allocator = allocator("caching", 64);
    let spare = allocator
        .allocate(Bytes::mib(30), Stream::DEFAULT, || Ok(false))
        .unwrap();
    let spare = Mutex::new(Some(spare));
    let calls = AtomicU64::new(0);
    let on_miss = || {
        calls.fetch_add(1, Ordering::Relaxed);
        let spare = spare.lock().unwrap().take();
        Ok(spare.is_some_and(|spare| allocator.with_block(spare, |lane| lane.free(spare)).is_ok()))
    };
    let asked = || {
        allocator
            .with_all(|device| device.stats())
            .unwrap()
            .num_device_alloc
    };

    let block = allocator
        .allocate(Bytes::mib(28), Stream::DEFAULT, on_miss)
        .unwrap();
    assert_eq!(asked(), 1, "what was freed serves it");
    allocator
        .with_block(block, |lane| lane.free(block))
        .unwrap();
    allocator
        .allocate(Bytes::mib(28), Stream::DEFAULT, on_miss)
        .unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 1, "a hit is no shortage");

    allocator
        .allocate(Bytes::mib(20), Stream::DEFAULT, on_miss)
        .unwrap();
    assert_eq!((calls.load(Ordering::Relaxed), asked()), (2, 2));
    assert!(is_out_of_memory(allocator.allocate(
        Bytes::mib(20),
        Stream::DEFAULT,
        on_miss
    )));
    assert_eq!(calls.load(Ordering::Relaxed), 3);
    assert_eq!(
        allocator
            .with_all(|device| device.stats())
            .unwrap()
            .num_ooms,
        1
    );
}

#[test]
fn events_are_kept_once_less_than_a_quarter_of_the_memory_is_left() {
    let no_callback = || Ok(false);
    let allocator = allocator("tide", 100);
    let kept = |mib: u64| {
        let address = allocator.allocate(Bytes::mib(mib), Stream::DEFAULT, no_callback);
        address.expect("there is room");
        let past = allocator.with_all(|device| device.recent_past());
        past.expect("nothing panicked").events.len()
    };
    assert_eq!([kept(60), kept(14)], [0, 0], "26 MiB are left");
    assert_eq!(kept(10), 0, "the event before the clock started");
    assert_ne!(kept(2), 0);
}

/// The job held more before, so it reaches no new peak.
#[test]
fn events_are_kept_once_there_is_a_limit() {
    let no_callback = || Ok(false);
    let allocator = allocator("tide", 1000);
    let allocate = || {
        let address = allocator.allocate(Bytes::mib(10), Stream::DEFAULT, no_callback);
        address.expect("there is room")
    };
    let earlier = [(); 5].map(|()| allocate());
    for address in earlier {
        let freed = allocator.with_block(address, |lane| lane.free(address));
        assert_eq!(freed, Ok(()));
    }
    let limited = allocator.with_all(|device| {
        device.set_limit(Some(Bytes::mib(40)));
        device.empty_cache(None)
    });
    assert_eq!(limited, Ok(Ok(())));
    allocate();
    let past = || allocator.with_all(|device| device.recent_past());
    assert_eq!(past().expect("nothing panicked").events, []);
    allocate();
    assert_ne!(past().expect("nothing panicked").events, []);
}

/// A search that finds nothing ages the free blocks once, as with one allocator.
#[test]
fn a_miss_ages_what_is_free_once() {
    let conf = "caching:garbage_collection_threshold:0.1";
    let limit = Some(Bytes::mib(256));
    let shared = allocator(conf, 256);
    shared.with_all(|device| device.set_limit(limit)).unwrap();
    let mut single = DeviceAllocator::new(driver(256), 3, &parsed(conf));
    single.set_limit(limit);
    let take = |single: &mut DeviceAllocator<SimDriver>, mib| {
        let (size, stream) = (Bytes::mib(mib), Stream::DEFAULT);
        let taken = shared.allocate(size, stream, || Ok(false)).unwrap();
        assert_eq!(single.allocate(size, stream), Ok(taken));
        taken
    };
    let held = [12, 14, 16, 18].map(|mib| take(&mut single, mib));
    for block in held {
        shared.with_block(block, |lane| lane.free(block)).unwrap();
        assert_eq!(single.free(block), Ok(()));
        take(&mut single, 40);
    }
    assert_eq!(shared.with_all(|device| device.stats()), Ok(single.stats()));
}
