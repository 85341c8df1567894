//! Every driver call of a small program fails once, each in a process of its own. The request returns an error,
//! the next one succeeds, and nothing is lost. Two failures in one run are not covered.
#![expect(unsafe_code, reason = "calls C functions")]

mod common;

use std::ops::RangeInclusive;
use std::ptr;

use common::{CACHING, Fake, allocate, check, fill, isolated, last_error, stat};
use lowtide::*;

/// The driver functions that the program calls, and which calls of each are made to fail. The first calls for
/// memory are for a test page, with which `lowtide-cuda` finds out what the device supports.
const CALLS: [(&str, RangeInclusive<u64>); 23] = [
    ("cuInit", 1..=1),
    ("cuDriverGetVersion", 1..=1),
    ("cuDeviceGetCount", 1..=1),
    ("cuDeviceGet", 1..=1),
    ("cuDeviceGetAttribute", 1..=3),
    ("cuDevicePrimaryCtxRetain", 1..=1),
    ("cuCtxGetCurrent", 1..=4),
    ("cuCtxPushCurrent_v2", 1..=4),
    ("cuThreadExchangeStreamCaptureMode", 1..=4),
    ("cuMemGetAllocationGranularity", 1..=1),
    ("cuMemAddressReserve", 1..=3),
    ("cuMemAddressFree", 1..=3),
    ("cuMemCreate", 1..=5),
    ("cuMemRelease", 1..=5),
    ("cuMemMap", 1..=5),
    ("cuMemUnmap", 1..=4),
    ("cuMemSetAccess", 1..=5),
    ("cuEventCreate", 1..=1),
    ("cuEventRecord", 1..=2),
    ("cuEventQuery", 1..=1),
    ("cuEventSynchronize", 1..=1),
    ("cuStreamSynchronize", 1..=3),
    ("cuMemGetInfo_v2", 1..=1),
];

#[test]
fn a_call_that_fails_once_loses_nothing_of_expandable_segments() {
    let test = "a_call_that_fails_once_loses_nothing_of_expandable_segments";
    for (name, calls) in CALLS {
        for nth in calls {
            let fault = format!("{name}:{nth}");
            let conf = ("LOWTIDE_CONF", "expandable_segments:True");
            isolated(test, &[conf, ("FAKECUDA_FAIL", &fault)], |fake| {
                program(fake)
            });
        }
    }
}

/// The calls that fail with `tide`: it creates and maps each page by itself, and waits for the whole device.
fn tide_calls() -> impl Iterator<Item = (&'static str, RangeInclusive<u64>)> {
    let own = [
        ("cuMemCreate", 1..=20),
        ("cuMemRelease", 1..=20),
        ("cuMemMap", 1..=20),
        ("cuMemUnmap", 1..=20),
        ("cuMemSetAccess", 1..=7),
        ("cuStreamSynchronize", 1..=1),
        ("cuCtxSynchronize", 1..=2),
    ];
    let is_own = own.clone().map(|(name, _)| name);
    let others = CALLS
        .into_iter()
        .filter(move |(name, _)| !is_own.contains(name));
    others.chain(own)
}

#[test]
fn a_call_that_fails_once_loses_nothing_of_segments() {
    let test = "a_call_that_fails_once_loses_nothing_of_segments";
    for name in ["cuMemAlloc_v2", "cuMemFree_v2"] {
        for nth in 1..=4 {
            let fault = format!("{name}:{nth}");
            isolated(test, &[CACHING, ("FAKECUDA_FAIL", &fault)], program);
        }
    }
}

#[test]
fn a_call_that_fails_once_loses_nothing_of_tide() {
    let test = "a_call_that_fails_once_loses_nothing_of_tide";
    for (name, calls) in tide_calls() {
        for nth in calls {
            let fault = format!("{name}:{nth}");
            let variables = [("LOWTIDE_STRATEGY", "tide"), ("FAKECUDA_FAIL", &fault)];
            isolated(test, &variables, program);
        }
    }
}

/// Runs the program. A step that fails is repeated once and must then succeed.
fn program(fake: &Fake) {
    let (name, nth) = fault();
    let mut failures = 0;
    let mut again = |status: &mut dyn FnMut() -> Status| {
        let first = status();
        if first == Status::Ok {
            return;
        }
        assert!(matches!(
            first,
            Status::Driver | Status::NoDriver | Status::OutOfMemory
        ));
        assert!(!last_error().is_empty());
        failures += 1;
        assert_eq!(status(), Status::Ok, "the next one works: {}", last_error());
    };
    let mut held = Vec::new();
    for (seed, size) in [1 << 10, 3 << 20, 30 << 20, 5 << 20]
        .into_iter()
        .enumerate()
    {
        again(&mut || match allocate(size, 0) {
            Ok(memory) => {
                fill(memory, size, seed);
                held.push((memory, size, seed));
                Status::Ok
            }
            Err(status) => status,
        });
    }
    // CUDA's value for the thread's own default stream, which differs from the stream of the requests.
    let stream = ptr::without_provenance_mut(2);
    again(&mut || lowtide_record_stream(held[1].0, stream));
    let (mut free, mut total) = (0, 0);
    // SAFETY: both may be written to.
    again(&mut || unsafe { lowtide_memory_info(0, &raw mut free, &raw mut total) });
    for (memory, size, seed) in held {
        check(memory, size, seed);
        again(&mut || lowtide_deallocate(memory));
        if seed == 1 {
            // This request queries the other stream's event.
            again(&mut || match allocate(1 << 10, 0) {
                Ok(memory) => lowtide_deallocate(memory),
                Err(status) => status,
            });
        }
    }
    restore_pool(&mut again);
    again(&mut || lowtide_reset());
    // Memory that the driver refused to release the first time is released now.
    assert_eq!(lowtide_reset(), Status::Ok, "{}", last_error());
    assert!(failures <= 1, "one call failed, {failures} steps did");
    assert!(
        fake.calls(&name) >= nth,
        "{name} was called {} times",
        fake.calls(&name)
    );
    assert_eq!(stat(0, "reserved_bytes.all.current"), 0);
    assert_eq!(stat(0, "active.all.current"), 0);
    let live = fake.live();
    assert_eq!(
        (live.allocations, live.handles, live.mappings),
        (0, 0, 0),
        "{live:?}"
    );
    assert_eq!(live.reservations, 0, "{live:?}");
    assert_eq!(fake.used_bytes(0), 0);
}

/// Restores a pool to a checkpoint, with blocks that another stream uses.
fn restore_pool(again: &mut dyn FnMut(&mut dyn FnMut() -> Status)) {
    let pool = Mempool {
        capture: 1,
        user: 0,
    };
    let stream = ptr::without_provenance_mut(2);
    again(&mut || lowtide_retain_pool(0, pool));
    // SAFETY: there is no filter.
    again(&mut || unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) });
    let (mut held, mut checkpoint) = (Vec::new(), ptr::null_mut());
    for size in [3 << 20, 7 << 20, 30 << 20] {
        again(&mut || match allocate(size, 0) {
            Ok(memory) => {
                held.push(memory);
                Status::Ok
            }
            Err(status) => status,
        });
        if held.len() == 2 {
            // SAFETY: it may be written to.
            again(&mut || unsafe { lowtide_checkpoint_pool(0, pool, &raw mut checkpoint) });
        }
    }
    again(&mut || lowtide_record_stream(held[0], stream));
    again(&mut || lowtide_record_stream(held[1], stream));
    again(&mut || lowtide_deallocate(held[1]));
    // SAFETY: the checkpoint is not released.
    again(&mut || unsafe { lowtide_restore_pool(0, checkpoint, None, None, ptr::null_mut()) });
    // SAFETY: as above, and it is no longer used.
    unsafe { lowtide_release_checkpoint(checkpoint) };
    let mut is_equal = false;
    // SAFETY: `held` has two pointers, and `is_equal` may be written to.
    again(&mut || unsafe { lowtide_check_live(0, pool, held.as_ptr(), 2, &raw mut is_equal) });
    assert!(is_equal);
    let mut size = 0;
    // SAFETY: it may be written to.
    again(&mut || unsafe { lowtide_largest_free(0, &raw mut size) });
    for &memory in &held[..2] {
        again(&mut || lowtide_deallocate(memory));
    }
    again(&mut || lowtide_end_allocate_to_pool(0, pool));
    again(&mut || lowtide_release_pool(0, pool));
    again(&mut || lowtide_release_pool(0, pool));
    again(&mut || lowtide_empty_pool(0, pool));
}

/// Returns the driver function and the number of its call that is to fail.
fn fault() -> (String, u64) {
    let fault = std::env::var("FAKECUDA_FAIL").expect("the test sets it");
    let (name, nth) = fault.split_once(':').expect("it has a number");
    (name.to_owned(), nth.parse().expect("it has a number"))
}
