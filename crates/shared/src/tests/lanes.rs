//! Several streams in several threads, each served by its lane.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lowtide_core::{AllocError, Bytes, Stream};
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

use super::world::{Program, run};
use super::{check, explore, with_config};

#[test]
fn threads_do_anything() {
    explore(|| run(Program::default()));
}

#[test]
fn threads_do_anything_with_expandable_segments() {
    explore(|| {
        run(Program {
            config: "caching:expandable_segments:True",
            ..Program::default()
        });
    });
}

#[test]
fn threads_do_anything_with_other_strategies() {
    for config in [
        "tide",
        "slab:arena_size_mb:32",
        "buddy:arena_size_mb:32",
        "direct",
    ] {
        explore(move || {
            run(Program {
                config,
                ..Program::default()
            });
        });
    }
}

#[test]
fn a_limit_is_never_passed() {
    for config in ["caching", "tide"] {
        explore(move || {
            run(Program {
                config,
                limit: Some(Bytes::mib(64)),
                ..Program::default()
            });
        });
    }
}

#[test]
fn captures_and_routes_begin_and_end_at_any_moment() {
    for config in ["caching", "tide"] {
        explore(move || {
            run(Program {
                config,
                captures: true,
                observes: true,
                ..Program::default()
            });
        });
    }
}

#[test]
fn an_observer_hears_in_an_order_that_makes_sense() {
    for config in [
        "caching",
        "caching:expandable_segments:True",
        "direct",
        "tide",
    ] {
        explore(move || {
            run(Program {
                config,
                observes: true,
                ..Program::default()
            });
        });
    }
}

/// More streams than lanes, so that some share one.
#[test]
fn sixteen_threads_do_anything() {
    for config in ["caching", "tide"] {
        explore(move || {
            run(Program {
                config,
                threads: 16,
                steps: 4,
                streams: 40,
                capacity: Bytes::mib(256),
                limit: Some(Bytes::mib(192)),
                captures: true,
                observes: true,
            });
        });
    }
}

/// Memory that one lane caches serves another, so no request fails while cached memory would serve it.
#[test]
fn a_miss_takes_what_other_lanes_hold() {
    explore(|| {
        let allocator = with_config("caching", 40);
        let turn = Arc::new(Mutex::new(()));
        let threads = [1, 2, 3].map(|number| {
            let (allocator, turn) = (Arc::clone(&allocator), Arc::clone(&turn));
            thread::spawn(move || {
                let stream = Stream(number);
                for _ in 0..2 {
                    let turn = turn.lock().unwrap();
                    let block = allocator
                        .allocate(Bytes::mib(30), stream, || Ok(false))
                        .unwrap();
                    allocator
                        .with_block(block, |lane| lane.free(block))
                        .unwrap();
                    drop(turn);
                    let small = allocator.allocate(Bytes(1), stream, || Ok(false)).unwrap();
                    allocator
                        .with_block(small, |lane| lane.free(small))
                        .unwrap();
                }
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        check(&allocator);
        assert_eq!(
            allocator
                .with_all(|device| device.stats())
                .unwrap()
                .num_ooms,
            0
        );
    });
}

/// After a panic every call in every lane returns an error, and no thread waits forever.
#[test]
fn a_panic_stops_all_threads() {
    explore(|| a_panic_on_a_device_of(64));
}

/// The same while requests run out of memory, so that threads enter all lanes.
#[test]
fn a_panic_stops_threads_that_enter_all_lanes() {
    explore(|| a_panic_on_a_device_of(30));
}

fn a_panic_on_a_device_of(mib: u64) {
    let allocator = with_config("caching", mib);
    let address = allocator
        .allocate(Bytes(1), Stream(1), || Ok(false))
        .unwrap();
    let threads = [1, 2, 3].map(|number| {
        let allocator = Arc::clone(&allocator);
        thread::spawn(move || {
            for _ in 0..4 {
                let work = || {
                    let block =
                        allocator.allocate(Bytes::mib(number), Stream(number), || Ok(false))?;
                    allocator.with_all(|device| device.stats())?;
                    allocator.with_block(block, |lane| lane.free(block))
                };
                match work() {
                    Ok(()) => {}
                    Err(error) if error.is_out_of_memory() => {}
                    Err(error) => assert_eq!(error, AllocError::Poisoned),
                }
            }
        })
    });
    let panicking = AssertUnwindSafe(|| {
        let broken = || panic!("as a broken invariant would");
        allocator.with_block(address, |_| -> Result<(), AllocError> { broken() })
    });
    assert!(catch_unwind(panicking).is_err());
    for stream in [Stream::DEFAULT, Stream(1), Stream(2), Stream(9)] {
        let refused = allocator.allocate(Bytes(1), stream, || Ok(false));
        assert_eq!(refused, Err(AllocError::Poisoned));
    }
    assert_eq!(
        allocator.with_block(address, |lane| lane.free(address)),
        Err(AllocError::Poisoned)
    );
    assert_eq!(
        allocator.with_all(|device| device.empty_cache(None)),
        Err(AllocError::Poisoned)
    );
    for thread in threads {
        thread.join().unwrap();
    }
}
