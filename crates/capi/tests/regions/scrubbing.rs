//! What the driver puts off after much memory has moved, done beside the job.

use std::fs;
use std::process::exit;
use std::thread;
use std::time::Duration;

use lowtide::*;

use crate::common::{Fake, allocate, command, isolated, last_error};
use crate::{MIB, enter, leave, pause, resume};

/// So much that it is worth a thread.
const MUCH: usize = 1 << 30;

/// Has a region of one block, whose contents are dropped.
fn make(tag: &str, size: usize) {
    enter(tag, Backup::None);
    let _ = allocate(size, 0).unwrap();
    leave();
}

fn is_scrubbing() -> bool {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    // A thread may end meanwhile.
    let names = threads.filter_map(|thread| fs::read(thread.ok()?.path().join("comm")).ok());
    names.into_iter().any(|name| name == b"lowtide scrubs\n")
}

/// Waits until the thread has made a call, after so many, and ended.
fn wait_for_end(fake: &Fake, created: u64) {
    // It has its name once it runs.
    while fake.calls("cuMemCreate") == created || is_scrubbing() {
        thread::sleep(Duration::from_millis(1));
    }
}

fn used(fake: &Fake) -> (u64, u64) {
    (fake.used_bytes(0), fake.live().handles)
}

#[test]
fn the_driver_is_called_after_much_has_moved() {
    let test = "scrubbing::the_driver_is_called_after_much_has_moved";
    isolated(test, &[], |fake| {
        let _ = allocate(MIB, 0).unwrap();
        let outside = used(fake);
        make("much", MUCH);
        let calls = || (fake.calls("cuMemCreate"), fake.calls("cuMemRelease"));
        for round in 0..2 {
            let mapped = used(fake);
            assert_eq!(pause("much"), Status::Ok, "{}", last_error());
            let (created, released) = calls();
            // Paused already: nobody else begins.
            assert_eq!(pause("much"), Status::Ok, "{}", last_error());
            wait_for_end(fake, created);
            let (created_since, released_since) = (calls().0 - created, calls().1 - released);
            assert!(
                (1..=40).contains(&created_since),
                "{created_since}, {round}"
            );
            assert_eq!(created_since, released_since, "{round}");
            assert_eq!(used(fake), outside, "{round}");

            assert_eq!(resume("much"), Status::Ok, "{}", last_error());
            wait_for_end(fake, calls().0);
            assert_eq!(used(fake), mapped, "{round}");
        }
    });
}

#[test]
fn little_is_not_worth_a_thread() {
    isolated("scrubbing::little_is_not_worth_a_thread", &[], |fake| {
        make("little", MIB);
        assert_eq!(pause("little"), Status::Ok, "{}", last_error());
        assert_eq!(resume("little"), Status::Ok, "{}", last_error());
        let created = fake.calls("cuMemCreate");
        thread::sleep(Duration::from_millis(100));
        assert_eq!(fake.calls("cuMemCreate"), created);
    });
}

/// Nobody has asked for the page: what the driver refuses is nobody's error, and it keeps nothing.
#[test]
fn what_the_driver_refuses_is_lost_to_nobody() {
    let test = "scrubbing::what_the_driver_refuses_is_lost_to_nobody";
    isolated(test, &[], |fake| {
        let _ = allocate(MIB, 0).unwrap();
        let outside = used(fake);
        make("much", MUCH);
        for (call, nth, code) in [
            ("cuMemCreate", 1, 2),
            ("cuMemCreate", 2, 999),
            ("cuMemRelease", 1, 999),
            ("cuMemGetInfo_v2", 1, 999),
        ] {
            assert_eq!(pause("much"), Status::Ok, "{}", last_error());
            fake.fail(call, nth, code);
            wait_for_end(fake, fake.calls("cuMemCreate"));
            fake.fail_none();
            assert_eq!(used(fake), outside, "{call} {nth}");
            assert_eq!(resume("much"), Status::Ok, "{}", last_error());
            wait_for_end(fake, fake.calls("cuMemCreate"));
        }
    });
}

/// At the end of a process the driver goes while other threads still run.
#[test]
fn no_driver_is_called_that_is_gone() {
    const ENDS: &str = "LOWTIDE_SCRUBBING_TEST_ENDS";
    let test = "scrubbing::no_driver_is_called_that_is_gone";
    if std::env::var_os(ENDS).is_some() {
        end_meanwhile();
    }
    let child = command(test).env(ENDS, "1").output().unwrap();
    let messages = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{messages}");
    assert!(
        messages.contains("lingers") && !messages.contains("after the driver was gone"),
        "{messages}"
    );
}

fn end_meanwhile() -> ! {
    extern "C" fn linger() {
        eprintln!("lingers");
        thread::sleep(Duration::from_millis(100));
    }
    // Registered before the driver's, so it runs after that.
    // SAFETY: the function is ours.
    assert_eq!(unsafe { libc::atexit(linger) }, 0);
    let fake = Fake::load();
    make("much", MUCH);
    let created = fake.calls("cuMemCreate");
    assert_eq!(pause("much"), Status::Ok, "{}", last_error());
    while fake.calls("cuMemCreate") == created {
        thread::sleep(Duration::from_millis(1));
    }
    exit(0);
}
