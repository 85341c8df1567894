//! Every driver call of a small program fails once, each in a process of its own. The request returns an error,
//! the next one succeeds, and nothing is lost. Two failures in one run are not covered.
#![expect(unsafe_code, reason = "calls C functions")]

mod common;

use std::ffi::c_void;
use std::io::Write;
use std::ptr;

use common::{CACHING, Fake, TIDE, allocate, check, fill, last_error, output_of, stat};
use lowtide::*;

/// The driver functions that the program calls with one strategy or another.
const CALLS: [&str; 28] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
];

/// What the program prints if a call failed.
const FAILED: &str = "the call failed";

#[test]
fn a_call_that_fails_once_loses_nothing_of_expandable_segments() {
    let test = "a_call_that_fails_once_loses_nothing_of_expandable_segments";
    let conf = ("LOWTIDE_CONF", "expandable_segments:True");
    let never = [
        "cuCtxSynchronize",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuStreamIsCapturing",
    ];
    fail_each_call(test, conf, &never);
}

#[test]
fn a_call_that_fails_once_loses_nothing_of_segments() {
    let test = "a_call_that_fails_once_loses_nothing_of_segments";
    fail_each_call(test, CACHING, &["cuCtxSynchronize", "cuStreamIsCapturing"]);
}

#[test]
fn a_call_that_fails_once_loses_nothing_of_tide() {
    let test = "a_call_that_fails_once_loses_nothing_of_tide";
    fail_each_call(test, TIDE, &["cuMemAlloc_v2", "cuMemFree_v2"]);
}

/// Runs the program once for each of its calls, which fails. The last run of each function makes all its calls, none of
/// which failed. `never` are those of [`CALLS`] that the strategy does not make.
fn fail_each_call(test: &str, variable: (&str, &str), never: &[&str]) {
    let mut uncalled = Vec::new();
    for name in CALLS {
        let has_failed = |nth: &u64| {
            let fault = format!("{name}:{nth}");
            let variables = [variable, ("FAKECUDA_FAIL", &fault)];
            output_of(test, &variables, program).contains(FAILED)
        };
        let failed = (1..).take_while(has_failed).count();
        if failed == 0 {
            uncalled.push(name);
        }
    }
    assert_eq!(uncalled, never);
}

/// Runs the program. A step that fails is repeated once and must then succeed. Prints [`FAILED`] if a call failed.
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
                for (part, size, seed) in parts(memory, size, seed) {
                    fill(part, size, seed);
                }
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
        for (part, size, seed) in parts(memory, size, seed) {
            check(part, size, seed);
        }
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
    if fake.calls(&name) >= nth {
        writeln!(std::io::stdout(), "{FAILED}").expect("the test reads it");
    } else {
        let calls: u64 = CALLS.iter().map(|name| fake.calls(name)).sum();
        assert_eq!(calls, fake.calls(""), "each function is listed");
    }
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

/// Returns the start of each MiB of a block, its size and a seed of its own. To fill whole blocks takes most of the time.
fn parts(
    memory: *mut c_void,
    size: usize,
    seed: usize,
) -> impl Iterator<Item = (*mut c_void, usize, usize)> {
    (0..size).step_by(1 << 20).map(move |offset| {
        let part = memory.wrapping_byte_add(offset);
        (part, (size - offset).min(1 << 10), seed + offset)
    })
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
