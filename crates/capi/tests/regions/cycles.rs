//! Many cycles of pausing and resuming: by several threads at once, at random, and whether they leak.

use std::ffi::{c_int, c_void};
use std::sync::Barrier;
use std::thread;

use lowtide::*;

use crate::common::{allocate, check, fill, isolated, last_error};
use crate::{
    MIB, allocate_in, enter, leave, pause, pause_all, region, regions, resume, resume_all,
};

#[test]
fn two_threads_pause_and_resume_at_once() {
    let test = "cycles::two_threads_pause_and_resume_at_once";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |_| {
        let held: Vec<_> = (0..8)
            .map(|seed| {
                let backup = [Backup::Host, Backup::Disk][seed % 2];
                allocate_in("kv", backup, 3 * MIB, c_int::from(seed >= 4), seed)
            })
            .collect();
        for _ in 0..20 {
            for change in [pause as fn(&str) -> Status, resume] {
                let start = Barrier::new(4);
                thread::scope(|scope| {
                    for number in 0..4 {
                        let start = &start;
                        scope.spawn(move || {
                            start.wait();
                            if number == 0 {
                                // Requests outside the region are served.
                                let memory = allocate(5 * MIB, 0).unwrap();
                                assert_eq!(lowtide_deallocate(memory), Status::Ok);
                            } else {
                                assert_eq!(change("kv"), Status::Ok, "{}", last_error());
                            }
                        });
                    }
                });
            }
            for (seed, &memory) in held.iter().enumerate() {
                check(memory, 3 * MIB, seed);
            }
        }
        assert_eq!(region("kv", Backup::Host, 1).pauses, 20);
        // One thread pauses while the other resumes. The result is either state, and nothing is lost.
        thread::scope(|scope| {
            for change in [pause as fn(&str) -> Status, resume] {
                scope.spawn(move || {
                    for _ in 0..50 {
                        assert_eq!(change("kv"), Status::Ok, "{}", last_error());
                    }
                });
            }
        });
        assert_eq!(resume("kv"), Status::Ok);
        for (seed, &memory) in held.iter().enumerate() {
            check(memory, 3 * MIB, seed);
        }
    });
}

/// A thousand random cycles: two tags, three kinds of backup, two devices, three threads.
#[test]
fn contents_survive_a_thousand_random_cycles() {
    let test = "cycles::contents_survive_a_thousand_random_cycles";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        for device in 0..2 {
            let memory = allocate(1000, device).unwrap();
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(lowtide_reset(), Status::Ok);
        let before = [fake.used_bytes(0), fake.used_bytes(1)];
        let start = Barrier::new(3);
        thread::scope(|scope| {
            for number in 0..3 {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    cycles(number, 340);
                });
            }
        });
        assert_eq!(pause_all(), Status::Ok);
        assert_eq!([fake.used_bytes(0), fake.used_bytes(1)], before);
        assert_eq!(resume_all(), Status::Ok);
        let shown = regions();
        let pauses: u64 = shown.values().map(|region| region.pauses).sum();
        assert!(pauses >= 1000, "{pauses}");
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!([fake.used_bytes(0), fake.used_bytes(1)], before);
    });
}

/// One thread's cycles, over regions of its own.
fn cycles(number: usize, count: usize) {
    let mut state = number as u64 + 1;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) as usize % below
    };
    const KINDS: [Backup; 3] = [Backup::Host, Backup::Disk, Backup::None];
    let tags = [format!("weights {number}"), format!("cache {number}")];
    for tag in &tags {
        enter(tag, Backup::None);
        leave();
    }
    let mut held: Vec<(*mut c_void, usize, usize, usize, bool)> = Vec::new();
    for round in 0..count {
        let tag = random(2);
        for _ in 0..random(3) {
            let (kind, size) = (KINDS[random(3)], 1 + random(3 * MIB));
            let tag = random(2);
            let device = c_int::from(random(2) == 1);
            let memory = allocate_in(&tags[tag], kind, size, device, round);
            held.push((memory, size, round, tag, kind != Backup::None));
        }
        assert_eq!(pause(&tags[tag]), Status::Ok, "{}", last_error());
        while held.len() > 20 || (!held.is_empty() && random(3) == 0) {
            let (memory, ..) = held.swap_remove(random(held.len()));
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(resume(&tags[tag]), Status::Ok, "{}", last_error());
        for (memory, size, seed, in_tag, is_kept) in &mut held {
            if !*is_kept && *in_tag == tag {
                fill(*memory, *size, *seed);
            }
            check(*memory, *size, *seed);
        }
    }
    for (memory, ..) in held {
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
    }
}

#[test]
fn a_hundred_cycles_hold_no_more_than_one() {
    let test = "cycles::a_hundred_cycles_hold_no_more_than_one";
    isolated(test, &[], |fake| {
        let held: Vec<_> = (0..4)
            .map(|seed| allocate_in("kv", Backup::Host, 3 * MIB, 0, seed))
            .collect();
        let mut seen = Vec::new();
        for _ in 0..100 {
            assert_eq!(pause("kv"), Status::Ok);
            let away = (fake.used_bytes(0), fake.live().reservations);
            assert_eq!(resume("kv"), Status::Ok);
            let live = fake.live();
            seen.push((
                away,
                fake.used_bytes(0),
                live.handles,
                live.mappings,
                live.reservations,
                live.streams,
                live.events,
            ));
        }
        seen.dedup();
        assert!(seen.len() <= 2, "after the first all are alike: {seen:?}");
        for (seed, &memory) in held.iter().enumerate() {
            check(memory, 3 * MIB, seed);
        }
    });
}
