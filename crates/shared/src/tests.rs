//! What must hold under every schedule. Waits have no time limit here, so a missed wake-up is a deadlock, which
//! shuttle reports.

mod lanes;
mod shadow;
mod world;

use std::collections::BTreeMap;
use std::env;
use std::sync::atomic::{AtomicI64, Ordering};

use lowtide_core::{Action, Bytes, CheckLevel, Config, DeviceAddress, Event, Observer, Stream};
use lowtide_sim::{SimConfig, SimDriver};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::{Arc, Mutex};
use shuttle::{Runner, thread};

use crate::SharedAllocator;

/// How many schedules each scheduler tries if `LOWTIDE_SCHEDULES` is not set.
const SCHEDULES: usize = 250;
/// At how many points the second scheduler changes priorities.
const PASSES_MAX: usize = 4;

/// Runs a test under two schedulers. One picks any thread at each step. The other gives threads priorities that
/// change at a few points; it finds bugs that need one thread to be far behind.
fn explore(test: impl Fn() + Copy + Send + Sync + 'static) {
    let schedules =
        env::var("LOWTIDE_SCHEDULES").map_or(SCHEDULES, |text| text.parse().expect("a number"));
    Runner::new(RandomScheduler::new(schedules), config()).run(test);
    Runner::new(PctScheduler::new(PASSES_MAX, schedules), config()).run(test);
}

/// Runs a single-threaded test. It needs a scheduler because the tables' atomics are shuttle's.
pub(crate) fn alone(test: impl Fn() + Send + Sync + 'static) {
    Runner::new(RandomScheduler::new(1), config()).run(test);
}

fn config() -> shuttle::Config {
    let mut config = shuttle::Config::new();
    config.stack_size = 256 << 10;
    // shuttle treats every ordering as the strongest. Real threads must test the weaker ones.
    config.silence_warnings = true;
    config
}

/// Returns an allocator on a device of `mib` MiB whose requests wait for longer than any test takes.
fn allocator(mib: u64) -> Arc<SharedAllocator<SimDriver>> {
    with_config("bfc:retry_ms:1000000000", mib)
}

fn with_config(config: &str, mib: u64) -> Arc<SharedAllocator<SimDriver>> {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::mib(mib)),
        ..SimConfig::default()
    });
    let config: Config = config.parse().unwrap();
    Arc::new(SharedAllocator::new(
        driver,
        0,
        &config,
        std::sync::Arc::default(),
        None,
    ))
}

fn check(allocator: &SharedAllocator<SimDriver>) {
    let checked = allocator.for_each_lane(|lane| {
        lane.check_invariants(CheckLevel::Everything).unwrap();
        Ok(())
    });
    checked.unwrap();
}

/// Three threads each need the whole device. Each gets it in turn, from the thread that had it before.
#[test]
fn no_wake_up_is_missed() {
    let test = || {
        let allocator = allocator(4);
        let threads = [0, 1, 2].map(|_| {
            let allocator = Arc::clone(&allocator);
            thread::spawn(move || {
                for _ in 0..2 {
                    let address = allocator
                        .allocate(Bytes::mib(3), Stream::DEFAULT, || Ok(false))
                        .unwrap();
                    thread::yield_now();
                    allocator
                        .with_block(address, |lane| lane.free(address))
                        .unwrap();
                }
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        check(&allocator);
        let failures = allocator
            .with_all(|device| device.stats())
            .unwrap()
            .num_ooms;
        assert_eq!(failures, 0, "what was served later did not fail");
    };
    explore(test);
}

/// One thread's free is too small for the first waiting thread, and large enough for the second.
#[test]
fn every_waiting_thread_is_woken() {
    let test = || {
        let allocator = allocator(6);
        let [small, large] = [2, 4].map(|mib| {
            let address = allocator.allocate(Bytes::mib(mib), Stream::DEFAULT, || Ok(false));
            address.unwrap()
        });
        let threads = [6, 2].map(|mib| {
            let allocator = Arc::clone(&allocator);
            thread::spawn(move || {
                let address = allocator
                    .allocate(Bytes::mib(mib), Stream::DEFAULT, || Ok(false))
                    .unwrap();
                allocator
                    .with_block(address, |lane| lane.free(address))
                    .unwrap();
            })
        });
        let [waits_for_all, waits_for_small] = threads;
        allocator
            .with_block(small, |lane| lane.free(small))
            .unwrap();
        waits_for_small.join().unwrap();
        // Any use of the allocator may free memory.
        let freed = allocator.with_all(|lanes| lanes.lane_mut().free(large));
        assert_eq!(freed, Ok(Ok(())));
        waits_for_all.join().unwrap();
        check(&allocator);
    };
    explore(test);
}

/// No two threads ever hold the same bytes.
#[test]
fn blocks_of_different_threads_do_not_overlap() {
    let test = || {
        let allocator = allocator(8);
        let held: Arc<Mutex<BTreeMap<DeviceAddress, Bytes>>> = Arc::default();
        let threads = [1_u64, 2, 3].map(|number| {
            let (allocator, held) = (Arc::clone(&allocator), Arc::clone(&held));
            thread::spawn(move || {
                for step in 1..4 {
                    let size = Bytes::kib(700 * number * step % 2000 + 1);
                    let address = allocator
                        .allocate(size, Stream(number % 2), || Ok(false))
                        .unwrap();
                    hold(&mut held.lock().unwrap(), address, size);
                    thread::yield_now();
                    held.lock().unwrap().remove(&address);
                    allocator
                        .with_block(address, |lane| lane.free(address))
                        .unwrap();
                }
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        check(&allocator);
    };
    explore(test);
}

/// A callback that is notified of a shortage frees memory that others wait for. No event is reported twice.
#[test]
fn on_miss_is_called_without_the_lock() {
    let test = || {
        let allocator = with_config("caching", 40);
        let spare: Arc<Mutex<Vec<DeviceAddress>>> = Arc::default();
        let active = std::sync::Arc::new(AtomicI64::new(0));
        let counted = std::sync::Arc::clone(&active);
        let observer = move |events: &[Event]| {
            for event in events {
                let change = match event.action {
                    Action::Alloc => 1,
                    Action::FreeCompleted => -1,
                    _ => 0,
                };
                counted.fetch_add(change, Ordering::Relaxed);
            }
        };
        let observer: Observer = std::sync::Arc::new(observer);
        let observed = allocator.observe_events(Some(&observer));
        assert_eq!(observed, Ok(()));
        // Each thread frees a block that the others need.
        let threads = [0, 1, 2].map(|_| {
            let (allocator, spare) = (Arc::clone(&allocator), Arc::clone(&spare));
            thread::spawn(move || {
                for _ in 0..2 {
                    let on_miss = || {
                        let spare = std::mem::take(&mut *spare.lock().unwrap());
                        let freed = { spare.iter() }.filter(|&&block| {
                            allocator.with_block(block, |lane| lane.free(block)) == Ok(())
                        });
                        Ok(freed.count() > 0)
                    };
                    let block = allocator.allocate(Bytes::mib(12), Stream::DEFAULT, on_miss);
                    spare.lock().unwrap().extend(block);
                }
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        check(&allocator);
        let held = allocator
            .with_all(|device| device.stats())
            .unwrap()
            .active
            .all
            .current;
        assert_eq!(held, active.load(Ordering::Relaxed));
    };
    explore(test);
}

/// Streams in different lanes share memory for only a few segments, so each takes memory that others have cached.
/// No two blocks overlap, whichever thread frees them, and no memory is lost.
#[test]
fn lanes_take_memory_from_each_other() {
    let test = || {
        let allocator = with_config("caching", 46);
        let held: Arc<Mutex<BTreeMap<DeviceAddress, Bytes>>> = Arc::default();
        let threads = [0_u64, 1, 2].map(|number| {
            let (allocator, held) = (Arc::clone(&allocator), Arc::clone(&held));
            thread::spawn(move || {
                for step in 1..4 {
                    let size = Bytes::kib(700 * (number + 1) * step % 2000 + 1);
                    // The device may be full of other threads' blocks.
                    if let Ok(address) = allocator.allocate(size, Stream(number), || Ok(false)) {
                        let other = Stream((number + 1) % 3);
                        let recorded = allocator
                            .with_block(address, |lane| lane.record_stream(address, other));
                        assert_eq!(recorded, Ok(()));
                        hold(&mut held.lock().unwrap(), address, size);
                    }
                    thread::yield_now();
                    // Any thread's block.
                    let freed = held.lock().unwrap().pop_first();
                    if let Some((address, _)) = freed {
                        assert_eq!(
                            allocator.with_block(address, |lane| lane.free(address)),
                            Ok(())
                        );
                    }
                }
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        for &address in held.lock().unwrap().keys() {
            assert_eq!(
                allocator.with_block(address, |lane| lane.free(address)),
                Ok(())
            );
        }
        check(&allocator);
        assert_eq!(
            allocator.with_all(|device| device.empty_cache(None)),
            Ok(Ok(()))
        );
        let stats = allocator.with_all(|device| device.stats()).unwrap();
        assert_eq!(stats.active.all.current, 0);
        assert_eq!(stats.reserved(), Bytes::ZERO);
        assert!(stats.allocated_bytes.all.peak <= 46 << 20);
    };
    shuttle::check_random(test, SCHEDULES);
}

fn hold(held: &mut BTreeMap<DeviceAddress, Bytes>, address: DeviceAddress, size: Bytes) {
    let before = held.range(..=address).next_back();
    let after = held.range(address..).next();
    assert!(before.is_none_or(|(&start, &size)| start + size <= address));
    assert!(after.is_none_or(|(&start, _)| address + size <= start));
    held.insert(address, size);
}

/// The request is compared with what all streams reserve, cached memory included, and releases none of it.
#[test]
fn a_rejected_request_leaves_what_is_cached() {
    alone(|| {
        let allocator = with_config("caching:throw_on_cudamalloc_oom:True", 64);
        let cached = allocator
            .allocate(Bytes::mib(10), Stream(1), || Ok(false))
            .unwrap();
        allocator
            .with_block(cached, |lane| lane.free(cached))
            .unwrap();
        let refused = allocator.allocate(Bytes::mib(60), Stream::DEFAULT, || Ok(false));
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("preemptively rejected")
        );
        let stats = allocator.with_all(|device| device.stats()).unwrap();
        assert_eq!((stats.num_oom_rejections, stats.num_ooms), (1, 0));
        assert_eq!(stats.num_device_free, 0);
    });
}
