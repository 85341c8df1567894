//! Two devices in one process.
#![expect(unsafe_code, reason = "calls C functions")]

mod common;

use std::ffi::c_void;

use common::{Fake, TIDE, allocate, allocate_on, check, fill, isolated, last_error, stat};
use lowtide::*;

const TWO: (&str, &str) = ("FAKECUDA_DEVICES", "2");
const EXPANDABLE: (&str, &str) = ("LOWTIDE_CONF", "expandable_segments:True");

/// Returns whether work of a stream may write to memory. If not, the stream's context is lost.
fn can_write(fake: &Fake, memory: *mut c_void, stream: *mut c_void) -> bool {
    fake.set_bytes(memory, 4096, stream);
    fake.synchronize(stream)
}

#[test]
fn a_peer_uses_what_there_is_and_what_comes() {
    let test = "a_peer_uses_what_there_is_and_what_comes";
    for variables in [&[TWO][..], &[TWO, EXPANDABLE]] {
        isolated(test, variables, |fake| {
            let before = allocate(3 << 20, 0).unwrap();
            for _ in 0..2 {
                let status = lowtide_enable_peer_access(0, 1);
                assert_eq!(status, Status::Ok, "{}", last_error());
            }
            let stream = fake.stream_of(1);
            assert!(can_write(fake, before, stream));
            let after = allocate(100 << 20, 0).unwrap();
            assert!(can_write(fake, after, stream));
            // Each call enables one direction.
            let other = allocate(3 << 20, 1).unwrap();
            assert!(!can_write(fake, other, fake.stream_of(0)));
        });
    }
}

/// Allocates 20 frames, 15 of which move from the addresses of a freed block.
fn move_frames(fake: &Fake) -> *mut c_void {
    let [freed, _behind] =
        [30 << 20, 2 << 20].map(|size| allocate(size, 0).expect("there is memory"));
    assert_eq!(lowtide_deallocate(freed), Status::Ok);
    let created = fake.calls("cuMemCreate");
    let memory = allocate(40 << 20, 0).expect("there is memory");
    assert_eq!(fake.calls("cuMemCreate"), created + 5);
    memory
}

/// A frame that moves is mapped at another address, and stays mapped where it was.
#[test]
fn a_peer_uses_memory_that_moved_and_that_moves_later() {
    let test = "a_peer_uses_memory_that_moved_and_that_moves_later";
    isolated(test, &[TWO, TIDE], |fake| {
        let moved = move_frames(fake);
        assert_eq!(lowtide_enable_peer_access(0, 1), Status::Ok);
        let stream = fake.stream_of(1);
        let can_write_all = |memory, size| {
            fake.set_bytes(memory, size, stream);
            fake.synchronize(stream)
        };
        assert!(can_write_all(moved, 40 << 20));
        assert_eq!(lowtide_deallocate(moved), Status::Ok);
        let maps = fake.calls("cuMemMap");
        let old = allocate(30 << 20, 0).unwrap();
        assert_eq!(fake.calls("cuMemMap"), maps, "it is where it was");
        assert!(can_write_all(old, 30 << 20));
        let moved = move_frames(fake);
        assert!(can_write_all(moved, 40 << 20));
    });
}

#[test]
fn what_cannot_be_a_peer_is_an_error() {
    isolated("what_cannot_be_a_peer_is_an_error", &[TWO], |_| {
        assert_eq!(lowtide_enable_peer_access(0, 0), Status::Ok, "it is anyway");
        for (device, peer) in [(0, 2), (2, 0), (-1, 0)] {
            let status = lowtide_enable_peer_access(device, peer);
            assert_eq!(status, Status::InvalidArgument, "{device} {peer}");
        }
    });
}

#[test]
fn a_call_that_fails_once_does_not_keep_peers_apart() {
    let test = "a_call_that_fails_once_does_not_keep_peers_apart";
    for options in [EXPANDABLE, TIDE] {
        isolated(test, &[TWO, options], |fake| {
            let memory = allocate(3 << 20, 0).unwrap();
            assert_eq!(lowtide_enable_peer_access(1, 0), Status::Ok);
            for call in [
                "cuDeviceCanAccessPeer",
                "cuDevicePrimaryCtxRetain",
                "cuCtxEnablePeerAccess",
                "cuMemSetAccess",
            ] {
                fake.fail(call, 1, 999);
                assert_eq!(lowtide_enable_peer_access(0, 1), Status::Driver, "{call}");
                assert!(last_error().contains(call), "{}", last_error());
            }
            let contexts = fake.live().contexts;
            assert_eq!(lowtide_enable_peer_access(0, 1), Status::Ok);
            assert_eq!(fake.live().contexts, contexts);
            assert!(can_write(fake, memory, fake.stream_of(1)));
        });
    }
}

/// A block that another device's stream used is not reused before that stream's work is done.
#[test]
fn a_block_is_recorded_on_another_devices_stream() {
    let test = "a_block_is_recorded_on_another_devices_stream";
    isolated(test, &[TWO], |fake| {
        assert_eq!(lowtide_enable_peer_access(0, 1), Status::Ok);
        let stream = fake.stream_of(1);
        let own = fake.stream_of(0);
        let memory = allocate_on(3 << 20, 0, own).unwrap();
        fake.hold(stream, true);
        fake.set_bytes(memory, 3 << 20, stream);
        let status = lowtide_record_stream(memory, stream);
        assert_eq!(status, Status::Ok, "{}", last_error());
        assert_eq!(lowtide_deallocate(memory), Status::Ok, "{}", last_error());
        let other = allocate_on(3 << 20, 0, own).unwrap();
        assert_ne!(other, memory, "the other device still uses it");
        fill(other, 3 << 20, 7);
        fake.hold(stream, false);
        assert!(fake.synchronize(stream));
        let again = allocate_on(3 << 20, 0, own).unwrap();
        assert_eq!(again, memory);
        check(other, 3 << 20, 7);
        for memory in [other, again] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(stat(0, "active.all.current"), 0);
        // The event belonged to another context, and is not reused.
        assert_eq!(fake.live().events, 1);
    });
}

/// A process that uses one of eight devices must not create contexts, which take memory, on the others.
#[test]
fn a_device_that_nothing_was_asked_of_is_not_started_by_questions() {
    let test = "a_device_that_nothing_was_asked_of_is_not_started_by_questions";
    let options = (
        "LOWTIDE_CONF",
        "per_process_memory_fraction:0.5,max_split_size_mb:64",
    );
    isolated(test, &[TWO, options], |fake| {
        // The driver is not started either, because a forked child could not use it then.
        assert_eq!(lowtide_empty_cache(1), Status::Ok);
        assert_eq!(lowtide_reset_peak_stats(1), Status::Ok);
        assert_eq!(stat(1, "reserved_bytes.all.peak"), 0);
        assert_eq!(fake.calls("cuInit"), 0);
        let memory = allocate(3 << 20, 0).unwrap();
        assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), 1);
        let pool = Mempool {
            capture: 0,
            user: 1,
        };
        assert_eq!(lowtide_empty_cache(1), Status::Ok);
        assert_eq!(lowtide_empty_pool(1, pool), Status::Pool);
        assert_eq!(lowtide_reset_peak_stats(1), Status::Ok);
        assert_eq!(lowtide_reset_accumulated_stats(1), Status::Ok);
        let figures = ["max_split_size", "reserved_bytes.all.peak"];
        assert_eq!(figures.map(|key| stat(1, key)), [64 << 20, 0]);
        let mut fraction = 0.0;
        // SAFETY: it may be written to.
        let status = unsafe { lowtide_get_memory_fraction(1, &raw mut fraction) };
        assert_eq!((status, fraction), (Status::Ok, 0.5));
        assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), 1);
        // -1 means every device in use. There is one.
        assert_eq!(lowtide_empty_cache(-1), Status::Ok);
        assert_eq!(lowtide_reset_peak_stats(-1), Status::InvalidArgument);
        assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), 1);
        for device in [-2, 2, 128] {
            assert_eq!(lowtide_empty_cache(device), Status::InvalidArgument);
            assert_eq!(lowtide_reset_peak_stats(device), Status::InvalidArgument);
        }
        // The device has the same statistics once it is in use.
        let names = || [0, 1].map(count_stats);
        let before = names();
        lowtide_free(memory, 0, 0, std::ptr::null_mut());
        allocate(3 << 20, 1).unwrap();
        assert_eq!(figures.map(|key| stat(1, key)), [64 << 20, 20 << 20]);
        assert_eq!(names(), before);
    });
}

/// Each thread has a current context of its own, and the query creates none.
#[test]
fn a_thread_works_on_the_device_whose_context_it_has() {
    let test = "a_thread_works_on_the_device_whose_context_it_has";
    isolated(test, &[TWO], |fake| {
        assert_eq!(lowtide_init(2), Status::Ok);
        assert_eq!(lowtide_current_device(), -1);
        assert_eq!(fake.live().contexts, 0);
        for device in [1, 0, 1] {
            fake.use_device(device);
            assert_eq!(lowtide_current_device(), device);
            let other = std::thread::spawn(|| lowtide_current_device());
            assert_eq!(other.join().unwrap(), -1);
        }
        let counts =
            || ["cuCtxGetCurrent", "cuDevicePrimaryCtxRetain"].map(|name| fake.calls(name));
        let [asked, retained] = counts();
        assert_eq!(lowtide_current_device(), 1);
        assert_eq!(
            counts(),
            [asked + 1, retained],
            "a context that was met is known"
        );
        fake.reset(1);
        fake.use_device(1);
        assert_eq!(lowtide_current_device(), -1, "that one was not met");
        let retains = fake.calls("cuDevicePrimaryCtxRetain");
        assert_eq!(retains, retained + 1, "the program's own");
    });
}

#[test]
fn a_call_that_fails_once_does_not_hide_the_device_for_long() {
    let test = "a_call_that_fails_once_does_not_hide_the_device_for_long";
    isolated(test, &[TWO], |fake| {
        assert_eq!(lowtide_init(2), Status::Ok);
        fake.use_device(1);
        for call in [
            "cuDeviceGetCount",
            "cuCtxGetCurrent",
            "cuCtxGetDevice",
            "cuDevicePrimaryCtxGetState",
            "cuDevicePrimaryCtxRetain",
        ] {
            fake.fail(call, 1, 999);
            assert_eq!(lowtide_current_device(), -1, "{call}");
            assert!(last_error().contains(call), "{}", last_error());
            fake.fail_none();
        }
        assert_eq!(lowtide_current_device(), 1);
    });
}

/// Returns the number of a device's statistics.
fn count_stats(device: i32) -> usize {
    let mut count = 0;
    // SAFETY: with a capacity of 0, only the count is written.
    let status = unsafe { lowtide_memory_stats(device, std::ptr::null_mut(), 0, &raw mut count) };
    assert_eq!(status, Status::TooSmall);
    count
}
