//! Requests through the exported functions, on the stand-in driver: contents, devices, threads, streams, pools.
//! Kernels are not covered: the stand-in has none.
#![expect(unsafe_code, reason = "calls C functions")]
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

mod common;

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, ptr, thread};

use common::{Fake, TIDE, allocate, allocate_on, check, fill, is_tide, isolated, last_error, stat};
use lowtide::*;

const STRATEGIES: [(&str, &str); 8] = [
    ("direct", ""),
    ("pool", ""),
    ("buddy", ""),
    ("slab", ""),
    ("bfc", ""),
    ("caching", ""),
    ("caching", "expandable_segments:True"),
    ("tide", ""),
];

#[test]
fn contents_stay_whatever_the_strategy() {
    for (strategy, conf) in STRATEGIES {
        let variables = [("LOWTIDE_STRATEGY", strategy), ("LOWTIDE_CONF", conf)];
        isolated("contents_stay_whatever_the_strategy", &variables, |fake| {
            let size_of = |step: usize| 8 * (step * step * 37 % 400_000 + 1);
            let mut held: Vec<(*mut c_void, usize)> = Vec::new();
            for step in 0..400 {
                let memory = lowtide_malloc(size_of(step), 0, ptr::null_mut());
                assert!(!memory.is_null(), "{}", last_error());
                fill(memory, size_of(step), step);
                held.push((memory, step));
                if step % 3 > 0 {
                    let (memory, step) = held.swap_remove(step * 7 % held.len());
                    check(memory, size_of(step), step);
                    lowtide_free(memory, size_of(step), 0, ptr::null_mut());
                }
            }
            for (memory, step) in held.drain(..) {
                check(memory, size_of(step), step);
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
            }
            assert_eq!(stat(0, "allocated_bytes.all.current"), 0);
            assert_eq!(lowtide_reset(), Status::Ok);
            assert_eq!(fake.used_bytes(0), 0, "all of it went back");
        });
    }
}

/// Another program takes nearly all that is free. What is missing in 1/32 of the device then goes back, after 10 s, also
/// while a library captures a stream.
#[test]
fn memory_that_was_idle_for_long_goes_back_where_little_is_free() {
    let variables = [TIDE, ("FAKECUDA_CAPACITY", "268435456")];
    let test = "memory_that_was_idle_for_long_goes_back_where_little_is_free";
    isolated(test, &variables, |fake| {
        let reserved = || stat(0, "reserved_bytes.all.current");
        let held = allocate(64 << 20, 0).unwrap();
        fill(held, 64 << 20, 1);
        let idle = allocate(100 << 20, 0).unwrap();
        assert_eq!(lowtide_deallocate(idle), Status::Ok);
        assert_eq!(reserved(), 164 << 20);
        fake.allocate(92 << 20).unwrap();
        let captured = fake.stream();
        fake.begin_capture(captured);
        let start = Instant::now();
        while reserved() == 164 << 20 && start.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(500));
        // Nothing was free, and 8 MiB are kept free: four frames went.
        assert_eq!(reserved(), 156 << 20);
        fake.end_capture(captured);
        check(held, 64 << 20, 1);
    });
}

#[test]
fn a_request_may_say_where_its_memory_is() {
    isolated("a_request_may_say_where_its_memory_is", &[], |fake| {
        let start = allocate(8 << 20, 0).unwrap();
        lowtide_free(start, 8 << 20, 0, ptr::null_mut());
        let within = start.wrapping_byte_add(4 << 20);
        let take = |memory, size| lowtide_allocate_at(memory, size, 0, ptr::null_mut());
        assert_eq!(take(within, 2 << 20), Status::Ok);
        fill(within, 2 << 20, 1);
        assert_eq!(common::find(within).unwrap().size, 2 << 20);
        assert_eq!(stat(0, "allocated_bytes.all.current"), 2 << 20);
        assert_eq!(take(within, 2 << 20), Status::NotFree);
        let text = format!("no free memory of 2097152 bytes begins at {within:p}");
        assert_eq!(last_error(), text);
        assert_eq!(take(start, 5 << 20), Status::NotFree);
        assert_eq!(take(within, usize::MAX), Status::OutOfMemory);
        assert_eq!(take(within, 0), Status::Ok);
        // Memory of one stream does not serve another, as for every request.
        let elsewhere = fake.stream();
        let answer = lowtide_allocate_at(start, 2 << 20, 0, elsewhere);
        assert_eq!(answer, Status::NotFree);
        assert_eq!(
            lowtide_allocate_at(start, 1, 9, ptr::null_mut()),
            Status::InvalidArgument
        );
        check(within, 2 << 20, 1);
        assert_eq!(lowtide_deallocate(within), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(stat(0, "reserved_bytes.all.current"), 0);
    });
}

/// Runs `body` in a new thread without a current context.
fn in_new_thread(fake: &Fake, body: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(fake.current_device(), None);
            body();
        });
    });
}

#[test]
fn a_miss_makes_a_context_current_where_none_is() {
    let test = "a_miss_makes_a_context_current_where_none_is";
    for (strategy, conf) in STRATEGIES {
        let variables = [
            ("FAKECUDA_DEVICES", "5"),
            ("LOWTIDE_STRATEGY", strategy),
            ("LOWTIDE_CONF", conf),
        ];
        isolated(test, &variables, |fake| {
            assert_eq!(lowtide_init(5), Status::Ok);
            // The first request of each device is a miss in every strategy.
            for [first, second] in [[0, 1], [3, 2]] {
                in_new_thread(fake, || {
                    allocate(1 << 20, first).unwrap();
                    assert_eq!(fake.current_device(), Some(first));
                    allocate(1 << 20, second).unwrap();
                    assert_eq!(fake.current_device(), Some(first), "it stays");
                });
            }
            in_new_thread(fake, || {
                fake.use_device(0);
                allocate(1 << 20, 4).unwrap();
                assert_eq!(fake.current_device(), Some(0));
            });
        });
    }
}

#[test]
fn other_calls_leave_a_thread_without_a_context() {
    isolated(
        "other_calls_leave_a_thread_without_a_context",
        &[],
        |fake| {
            assert_eq!(lowtide_init(1), Status::Ok);
            let allocate_here = || allocate(64 << 20, 0).unwrap();
            let addresses = [fake.stream(), allocate_here(), allocate_here()]
                .map(<*mut c_void>::expose_provenance);
            in_new_thread(fake, || {
                let [stream, kept, freed] = addresses.map(ptr::with_exposed_provenance_mut);
                assert_eq!(lowtide_deallocate(freed), Status::Ok);
                assert_eq!(allocate(64 << 20, 0), Ok(freed), "a hit");
                assert_eq!(lowtide_record_stream(kept, stream), Status::Ok);
                assert_eq!(lowtide_deallocate(kept), Status::Ok);
                assert_eq!(lowtide_deallocate(freed), Status::Ok);
                assert_eq!(lowtide_reset(), Status::Ok);
                assert_eq!(fake.current_device(), None);
            });
        },
    );
}

#[test]
fn a_request_fails_where_no_context_can_be_made_current() {
    isolated(
        "a_request_fails_where_no_context_can_be_made_current",
        &[],
        |fake| {
            allocate(1, 0).unwrap();
            in_new_thread(fake, || {
                let used = fake.used_bytes(0);
                fake.fail("cuCtxPushCurrent_v2", 1, 999);
                assert_eq!(allocate(64 << 20, 0), Err(Status::Driver));
                assert_eq!((fake.current_device(), fake.used_bytes(0)), (None, used));
                allocate(64 << 20, 0).unwrap();
            });
        },
    );
}

#[test]
fn each_device_has_its_own_memory() {
    isolated(
        "each_device_has_its_own_memory",
        &[("FAKECUDA_DEVICES", "3")],
        |fake| {
            let segment = if is_tide() { 4 << 20 } else { 20 << 20 };
            let blocks = [2, 0].map(|device| (device, allocate(3 << 20, device).unwrap()));
            assert_eq!(fake.used_bytes(1), 0, "what is not used is not touched");
            for (device, memory) in blocks {
                let found = common::find(memory).unwrap();
                assert_eq!(found.device, device);
                assert_eq!(stat(device, "allocated_bytes.all.current"), 3 << 20);
                assert_eq!(fake.used_bytes(device), segment);
                let mut size = 0;
                // SAFETY: `size` may be written to.
                assert_eq!(unsafe { lowtide_base_alloc(memory, &raw mut size) }, memory);
                assert_eq!(size as u64, segment);
                lowtide_free(memory, 3 << 20, device, ptr::null_mut());
            }
            assert_eq!(lowtide_empty_cache(2), Status::Ok);
            assert_eq!((fake.used_bytes(2), fake.used_bytes(0)), (0, segment));
            assert_eq!(lowtide_reset(), Status::Ok);
            assert_eq!(fake.used_bytes(0), 0);
            for device in [3, -1, 1000] {
                assert_eq!(allocate(1, device), Err(Status::InvalidArgument));
                let text = format!("there is no device {device}: the driver shows 3");
                assert_eq!(last_error(), text);
            }
        },
    );
}

#[test]
fn threads_share_a_device() {
    isolated("threads_share_a_device", &[], |fake| {
        thread::scope(|scope| {
            for number in 0..8_usize {
                scope.spawn(move || work(number));
            }
        });
        assert_eq!(stat(0, "allocation.all.allocated"), 80_000);
        assert_eq!(stat(0, "allocation.all.current"), 0);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(fake.used_bytes(0), 0);
    });
}

/// Allocates and frees 10,000 blocks, and holds some of them for a while.
fn work(number: usize) {
    let mut held = [None; 16];
    for step in 0..10_000 {
        let slot = &mut held[step * 5 % 16];
        if let Some((memory, seed)) = slot.take() {
            check(memory, 64, seed);
            lowtide_free(memory, 0, 0, ptr::null_mut());
        }
        let memory = lowtide_malloc(64 << (step % 11), 0, ptr::null_mut());
        let seed = number * 10_000 + step;
        fill(memory, 64, seed);
        *slot = Some((memory, seed));
    }
    for (memory, seed) in held.into_iter().flatten() {
        check(memory, 64, seed);
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
    }
}

#[test]
fn memory_waits_for_the_streams_that_use_it() {
    isolated("memory_waits_for_the_streams_that_use_it", &[], |fake| {
        let first = allocate(1 << 20, 0).unwrap();
        let other = fake.stream();
        fake.hold(other, true);
        put_work(fake, other);
        assert_eq!(lowtide_record_stream(first, other), Status::Ok);
        lowtide_free(first, 1 << 20, 0, ptr::null_mut());
        let second = allocate(1 << 20, 0).unwrap();
        assert_ne!(second, first, "the other stream still uses it");
        assert_eq!(stat(0, "active.all.current"), 2);
        fake.hold(other, false);
        assert_eq!(lowtide_empty_cache(0), Status::Ok, "waits for the stream");
        assert_eq!(stat(0, "active.all.current"), 1);
        assert_eq!(lowtide_record_stream(ptr::null_mut(), other), Status::Ok);
        assert_eq!(lowtide_record_stream(first, other), Status::NotAllocated);
    });
}

/// PyTorch refuses such a request (pytorch#189504).
#[test]
fn what_a_request_waited_for_serves_it() {
    let test = "what_a_request_waited_for_serves_it";
    for conf in ["", "search_after_wait:False"] {
        let variables = [("FAKECUDA_CAPACITY", "52428800"), ("LOWTIDE_CONF", conf)];
        isolated(test, &variables, |fake| {
            let (served, waited_for) = request_while_another_stream_works(fake);
            let as_pytorch = env::var("LOWTIDE_CONF").is_ok_and(|conf| !conf.is_empty());
            let expected = if as_pytorch {
                Err(Status::OutOfMemory)
            } else {
                Ok(waited_for)
            };
            assert_eq!(served, expected);
        });
    }
}

/// Fills the device. Then requests the size of a pending block, whose stream continues once the request waits.
/// Returns the result of the request, and the pending block's address. Its segment also has a block in use, so it
/// cannot be released.
fn request_while_another_stream_works(
    fake: &common::Fake,
) -> (Result<*mut c_void, Status>, *mut c_void) {
    const FREED: usize = 18 << 20;
    let whole = allocate(40 << 20, 0).unwrap();
    assert_eq!(lowtide_deallocate(whole), Status::Ok);
    allocate(22 << 20, 0).unwrap();
    let freed = allocate(FREED, 0).unwrap();
    let other = fake.stream();
    fake.hold(other, true);
    put_work(fake, other);
    assert_eq!(lowtide_record_stream(freed, other), Status::Ok);
    assert_eq!(lowtide_deallocate(freed), Status::Ok);
    let waits = || fake.calls("cuEventSynchronize");
    let before = waits();
    let served = thread::scope(|scope| {
        let other = other.addr();
        scope.spawn(move || {
            while waits() == before {
                thread::yield_now();
            }
            fake.hold(ptr::without_provenance_mut(other), false);
        });
        allocate(FREED, 0)
    });
    (served, freed)
}

/// Queues work in a stream, because an event of a stream without work passes at once.
fn put_work(fake: &common::Fake, stream: *mut c_void) {
    let scratch = allocate(512, 0).expect("there is room");
    fake.set_bytes(scratch, 512, stream);
    assert_eq!(lowtide_deallocate(scratch), Status::Ok);
}

#[test]
fn a_pool_has_its_own_memory() {
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn accepts(context: *mut c_void, stream: *mut c_void) -> bool {
        context == stream
    }
    unsafe extern "C" fn end(_context: *mut c_void) {
        ENDED.fetch_add(1, Ordering::Relaxed);
    }
    isolated("a_pool_has_its_own_memory", &[], |fake| {
        assert_eq!(lowtide_init(1), Status::Ok);
        let pool = Mempool {
            capture: 0,
            user: 7,
        };
        let stream = fake.stream();
        // SAFETY: the context is compared only.
        let begin =
            || unsafe { lowtide_begin_allocate_to_pool(0, pool, Some(accepts), stream, Some(end)) };
        assert_eq!(begin(), Status::Ok);
        let routed = allocate_on(1 << 20, 0, stream).unwrap();
        let plain = allocate(1 << 20, 0).unwrap();
        assert_eq!(
            stat(0, "reserved_bytes_by_private_pools.0_7.all.current"),
            2 << 20
        );
        assert_eq!(begin(), Status::Pool);
        assert_eq!(ENDED.load(Ordering::Relaxed), 1, "of the second begin");
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        assert_eq!(ENDED.load(Ordering::Relaxed), 2);
        for memory in [routed, plain] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(fake.used_bytes(0), 2 << 20, "the pool is held");
        assert_eq!(lowtide_release_pool(0, pool), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(fake.used_bytes(0), 0);
        assert_eq!(lowtide_release_pool(0, pool), Status::Pool);
    });
}

#[test]
fn what_is_not_held_is_not_taken_back() {
    isolated("what_is_not_held_is_not_taken_back", &[], |_| {
        assert_eq!(lowtide_deallocate(ptr::null_mut()), Status::Ok);
        assert!(lowtide_malloc(0, 0, ptr::null_mut()).is_null());
        assert_eq!(last_error(), "", "no bytes are no error");
        let unknown = ptr::without_provenance_mut(0x1000);
        assert_eq!(lowtide_deallocate(unknown), Status::NotAllocated);
        let memory = allocate(100, 0).unwrap();
        assert_eq!(
            lowtide_deallocate(memory.wrapping_byte_add(8)),
            Status::NotAllocated
        );
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
        assert_eq!(lowtide_deallocate(memory), Status::NotAllocated);
        assert!(
            last_error().contains("is not an allocated block"),
            "{}",
            last_error()
        );
        lowtide_free(memory, 100, 0, ptr::null_mut());
        assert_eq!(stat(0, "allocation.all.freed"), 1);
        // SAFETY: null is refused.
        let status = unsafe { lowtide_allocate(1, 0, ptr::null_mut(), ptr::null_mut()) };
        assert_eq!(status, Status::InvalidArgument);
        assert_eq!(last_error(), "`memory` must not be null");
        assert_eq!(stat(0, "allocation.all.allocated"), 1);
    });
}

/// Where no event shows how far a stream is, its memory serves others only after a wait for all work of the device.
#[test]
fn memory_of_a_stream_that_the_driver_does_not_know_serves_others() {
    let variables = [TIDE, ("FAKECUDA_CAPACITY", "134217728")];
    let test = "memory_of_a_stream_that_the_driver_does_not_know_serves_others";
    isolated(test, &variables, |fake| {
        assert_eq!(lowtide_init(1), Status::Ok);
        let ends = fake.stream();
        // The number of a thread's own default stream, which the driver would take for a pointer.
        let of_thread = ptr::without_provenance_mut(3);
        for (stream, ended) in [(ends, true), (of_thread, false)] {
            let calls = |name| fake.calls(name);
            let [before, recorded] = ["cuCtxSynchronize", "cuEventRecord"].map(calls);
            let freed = allocate_on(80 << 20, 0, stream).unwrap();
            assert_eq!(lowtide_deallocate(freed), Status::Ok);
            if ended {
                fake.destroy_stream(stream);
            }
            let beside = allocate(40 << 20, 0).unwrap();
            fill(beside, 40 << 20, 1);
            assert_eq!(calls("cuEventRecord"), recorded);
            assert_eq!(calls("cuCtxSynchronize"), before);
            let after = allocate(60 << 20, 0).unwrap();
            fill(after, 60 << 20, 2);
            assert_eq!(calls("cuCtxSynchronize") - before, 1);
            check(beside, 40 << 20, 1);
            check(after, 60 << 20, 2);
            for memory in [beside, after] {
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
            }
            assert_eq!(lowtide_reset(), Status::Ok);
        }
    });
}

#[test]
fn idle_memory_of_a_stream_that_is_kept_serves_others() {
    let variables = [TIDE];
    let test = "idle_memory_of_a_stream_that_is_kept_serves_others";
    isolated(test, &variables, |fake| {
        assert_eq!(lowtide_init(1), Status::Ok);
        let (kept, other) = (fake.stream(), fake.stream());
        let reserved = || stat(0, "reserved_bytes.all.current");
        for (stream, grown) in [(other, 40 << 20), (kept, 0)] {
            assert_eq!(lowtide_keep_stream(0, kept), Status::Ok);
            let freed = allocate_on(80 << 20, 0, stream).unwrap();
            assert_eq!(lowtide_deallocate(freed), Status::Ok);
            // A request that needs the driver records an event.
            let first = allocate(2 << 20, 0).unwrap();
            assert!(fake.synchronize_device());
            let before = reserved();
            let memory = allocate(40 << 20, 0).unwrap();
            assert_eq!(reserved() - before, grown);
            fill(memory, 40 << 20, 1);
            check(memory, 40 << 20, 1);
            for memory in [first, memory] {
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
            }
            assert_eq!(lowtide_reset(), Status::Ok);
        }
        assert_eq!(lowtide_keep_stream(9, kept), Status::InvalidArgument);
        for number in [2, 3] {
            let of_thread = ptr::without_provenance_mut(number);
            let status = lowtide_keep_stream(0, of_thread);
            assert_eq!(status, Status::InvalidArgument);
            assert!(last_error().contains("cannot be kept"), "{}", last_error());
        }
    });
}

/// As many events wait for the stream as there may be, so that none was refused before it is needed.
#[test]
fn memory_of_a_destroyed_stream_with_many_events_serves_others() {
    let variables = [TIDE, ("FAKECUDA_CAPACITY", "536870912")];
    let test = "memory_of_a_destroyed_stream_with_many_events_serves_others";
    isolated(test, &variables, |fake| {
        assert_eq!(lowtide_init(1), Status::Ok);
        let ends = fake.stream();
        let large = allocate_on(300 << 20, 0, ends).unwrap();
        fake.hold(ends, true);
        for _ in 0..70 {
            let freed = allocate_on(2 << 20, 0, ends).unwrap();
            assert_eq!(lowtide_deallocate(freed), Status::Ok);
            allocate(2 << 20, 0).unwrap();
        }
        assert_eq!(lowtide_deallocate(large), Status::Ok);
        fake.hold(ends, false);
        assert!(fake.synchronize(ends));
        fake.destroy_stream(ends);
        let before = fake.calls("cuCtxSynchronize");
        let after = allocate(340 << 20, 0).unwrap();
        fill(after, 340 << 20, 1);
        check(after, 340 << 20, 1);
        assert_eq!(fake.calls("cuCtxSynchronize") - before, 1);
    });
}
