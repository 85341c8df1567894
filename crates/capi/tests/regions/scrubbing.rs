//! Scrubbing: driver work that is postponed after much memory was released or mapped, and done in a thread beside
//! the job.

use std::cell::Cell;
use std::ffi::c_int;
use std::fs;
use std::process::exit;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use lowtide::*;

use crate::common::{Fake, allocate_on, command, isolated, last_error};
use crate::{MIB, enter, leave, pause, pause_all, resume};

/// The least memory for which a thread is started.
const MUCH: usize = 1 << 30;

/// Makes a region of one block, without a backup.
fn make(tag: &str, size: usize, device: c_int) {
    enter(tag, Backup::None);
    let _ = allocate_on(size, device, ptr::null_mut()).unwrap();
    leave();
}

/// Returns the number of scrubbing threads.
fn threads() -> usize {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    // A thread may end meanwhile.
    let names = threads.filter_map(|thread| fs::read(thread.ok()?.path().join("comm")).ok());
    names
        .into_iter()
        .filter(|name| name == b"lowtide scrubs\n")
        .count()
}

/// Waits until `is_so` returns true. Fails after 60 seconds.
fn wait_until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "never");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Calls `act`, after which scrubbing must start, and waits until it ends.
fn scrubbing_after(fake: &Fake, act: impl FnOnce()) {
    let created = fake.calls("cuMemCreate");
    act();
    // A resume itself creates memory, and a thread has its name only once it runs.
    thread::sleep(Duration::from_millis(100));
    wait_until(|| threads() == 0);
    assert!(fake.calls("cuMemCreate") > created);
}

fn used(fake: &Fake) -> (u64, u64) {
    (fake.used_bytes(0), fake.live().handles)
}

#[test]
fn the_driver_is_called_after_much_has_moved() {
    let test = "scrubbing::the_driver_is_called_after_much_has_moved";
    isolated(test, &[], |fake| {
        make("outside", MIB, 0);
        let outside = used(fake);
        make("much", MUCH, 0);
        let mapped = used(fake);
        for round in 0..2 {
            let created = fake.calls("cuMemCreate");
            scrubbing_after(fake, || {
                assert_eq!(pause("much"), Status::Ok, "{}", last_error())
            });
            let created_since = fake.calls("cuMemCreate") - created;
            assert_eq!(created_since, 20, "{round}");
            assert_eq!(used(fake), outside, "{round}");
            scrubbing_after(fake, || {
                assert_eq!(resume("much"), Status::Ok, "{}", last_error())
            });
            assert_eq!(used(fake), mapped, "{round}");
        }
    });
}

#[test]
fn a_device_has_one_thread_for_it() {
    let test = "scrubbing::a_device_has_one_thread_for_it";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        // The other device has no memory in use yet.
        make("much", MUCH, 1);
        scrubbing_after(fake, || {
            assert_eq!(pause("much"), Status::Ok, "{}", last_error());
        });
        assert_eq!(resume("much"), Status::Ok, "{}", last_error());
        make("much", MUCH, 0);
        for _ in 0..3 {
            assert_eq!(pause("much"), Status::Ok, "{}", last_error());
            assert_eq!(resume("much"), Status::Ok, "{}", last_error());
        }
        let created = fake.calls("cuMemCreate");
        let most = Cell::new(0);
        wait_until(|| {
            most.set(most.get().max(threads()));
            most.get() > 0 && threads() == 0
        });
        assert_eq!(most.get(), 2);
        // Each thread ends, however often it was started.
        let created_since = fake.calls("cuMemCreate") - created;
        assert!((1..=40).contains(&created_since), "{created_since}");
    });
}

/// Memory that several regions move on a device counts together. Memory that did not move does not count.
#[test]
fn what_moves_at_once_counts_together() {
    let test = "scrubbing::what_moves_at_once_counts_together";
    isolated(test, &[], |fake| {
        let is_quiet_after = |act: &dyn Fn() -> Status| {
            assert_eq!(act(), Status::Ok, "{}", last_error());
            let created = fake.calls("cuMemCreate");
            thread::sleep(Duration::from_millis(100));
            assert_eq!(fake.calls("cuMemCreate"), created);
        };
        make("little", MIB, 0);
        is_quiet_after(&|| pause("little"));
        is_quiet_after(&|| resume("little"));
        for tag in ["first", "second", "third", "fourth"] {
            make(tag, MUCH / 4, 0);
        }
        is_quiet_after(&|| resume("first"));
        scrubbing_after(fake, || {
            assert_eq!(pause_all(), Status::Ok, "{}", last_error())
        });
        is_quiet_after(&pause_all);
    });
}

/// The program did not request the scrubbing: a driver error is not reported, and no memory stays allocated.
#[test]
fn what_the_driver_refuses_is_lost_to_nobody() {
    let test = "scrubbing::what_the_driver_refuses_is_lost_to_nobody";
    isolated(test, &[], |fake| {
        make("outside", MIB, 0);
        let outside = used(fake);
        make("much", MUCH, 0);
        for (call, nth, code) in [
            ("cuMemCreate", 1, 2),
            ("cuMemCreate", 2, 999),
            ("cuMemRelease", 1, 999),
            ("cuMemGetInfo_v2", 1, 999),
        ] {
            scrubbing_after(fake, || {
                assert_eq!(pause("much"), Status::Ok, "{}", last_error());
                fake.fail(call, nth, code);
            });
            fake.fail_none();
            assert_eq!(used(fake), outside, "{call} {nth}");
            scrubbing_after(fake, || {
                assert_eq!(resume("much"), Status::Ok, "{}", last_error())
            });
        }
    });
}

/// The variable that is set in a process that ends during scrubbing.
const ENDS: &str = "LOWTIDE_SCRUBBING_TEST_ENDS";

/// At the end of a process the driver shuts down while other threads still run.
#[test]
fn no_driver_is_called_that_is_gone() {
    let test = "scrubbing::no_driver_is_called_that_is_gone";
    if std::env::var_os(ENDS).is_some() {
        end_meanwhile(&Fake::load());
    }
    let child = command(test).env(ENDS, "1").output().unwrap();
    let messages = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{messages}");
    let is_right = messages.contains("lingers") && !messages.contains("after the driver was gone");
    assert!(is_right, "{messages}");
}

fn end_meanwhile(fake: &Fake) -> ! {
    extern "C" fn linger() {
        eprintln!("lingers");
        thread::sleep(Duration::from_millis(100));
    }
    // Registered before the driver's handler, so it runs after it.
    // SAFETY: the function exists until the process ends.
    assert_eq!(unsafe { libc::atexit(linger) }, 0);
    make("much", MUCH, 0);
    let created = fake.calls("cuMemCreate");
    assert_eq!(pause("much"), Status::Ok, "{}", last_error());
    wait_until(|| fake.calls("cuMemCreate") > created);
    exit(0);
}

/// A thread that waits for a kernel while it holds the driver's lock blocks all others from the driver.
#[test]
fn no_end_waits_for_who_has_the_driver_s_lock() {
    let test = "scrubbing::no_end_waits_for_who_has_the_driver_s_lock";
    if std::env::var_os(ENDS).is_some() {
        end_beside_one_that_waits(&Fake::load());
    }
    let child = command(test).env(ENDS, "1").output().unwrap();
    assert!(child.status.success(), "{child:?}");
}

fn end_beside_one_that_waits(fake: &Fake) -> ! {
    make("much", MUCH, 0);
    let stream = fake.stream();
    let cached = allocate_on(MIB, 0, ptr::null_mut()).unwrap();
    assert_eq!(pause("much"), Status::Ok, "{}", last_error());
    assert_eq!(lowtide_record_stream(cached, stream), Status::Ok);
    fake.hold(stream, true);
    fake.set_bytes(cached, MIB, stream);
    assert_eq!(lowtide_deallocate(cached), Status::Ok);
    thread::spawn(|| lowtide_empty_cache(0));
    // After this time one thread has the lock, and the other waits for it.
    thread::sleep(Duration::from_millis(200));
    // Kills the process if its end waits that long.
    // SAFETY: the signal has no handler.
    unsafe { libc::alarm(8) };
    exit(0);
}
