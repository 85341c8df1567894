//! Memory that other processes use. Each test has two or three processes, each with a stand-in driver, that
//! follow the test's commands. Not covered: on a card, another process's memory is device memory and not a file.
#![expect(unsafe_code, reason = "calls C functions")]
#![expect(
    clippy::unwrap_used,
    reason = "a step that fails is where the test ends"
)]

#[path = "../common/mod.rs"]
mod common;

mod faults;
mod roles;

use std::ffi::c_void;
use std::process::exit;
use std::{ptr, thread};

use common::{Fake, TIDE, allocate, allocate_on, check, last_error};
use lowtide::*;
use roles::*;

#[test]
fn contents_cross_processes_both_ways() {
    let test = "contents_cross_processes_both_ways";
    play(&ROLES, || {
        for kind in KINDS {
            // Two blocks in one page, and one in pages of its own.
            let sizes = [64 << 10, 5 << 10, 30 * MIB];
            let (mut exporter, shared) = exporter(test, kind, &sizes);
            assert_eq!(shared[0].0, shared[1].0, "one segment, the same bytes");
            assert_ne!(shared[0].1, shared[1].1);
            assert_ne!(shared[0].0, shared[2].0);
            let mut importer = importer(test, &[]);
            let mut addresses = Vec::new();
            for (seed, ((bytes, offset), size)) in shared.iter().zip(sizes).enumerate() {
                let start: usize = importer.ask(&format!("attach 0 {bytes}")).parse().unwrap();
                let (address, size) = (start + offset, size.min(MIB));
                assert_eq!(
                    importer.ask(&format!("check {address} {size} {seed}")),
                    "ok"
                );
                let new = seed + 100;
                assert_eq!(importer.ask(&format!("fill {address} {size} {new}")), "ok");
                addresses.push(start);
            }
            assert_eq!(addresses[0], addresses[1], "attached once");
            assert_ne!(addresses[0], addresses[2]);
            assert_eq!(exporter.ask("check"), "ok");

            for start in addresses {
                assert_eq!(importer.ask(&format!("detach {start}")), "ok");
            }
            assert_eq!(importer.ask("live"), NOTHING);
            assert_eq!(importer.finish(), "");
            assert_eq!(exporter.ask("free"), "ok");
            assert_eq!(
                exporter.finish(),
                "",
                "nothing is called after the driver is gone"
            );
        }
    });
}

#[test]
fn the_same_bytes_are_attached_once_and_counted() {
    let test = "the_same_bytes_are_attached_once_and_counted";
    play(&ROLES, || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB]);
            let (bytes, offset) = &shared[0];
            let mut importer = importer(test, &[]);
            let attach = format!("attach 0 {bytes}");
            let address: usize = importer.ask(&attach).parse().unwrap();
            assert_eq!(importer.ask(&attach), address.to_string());
            let detach = format!("detach {address}");
            assert_eq!(importer.ask(&detach), "ok");
            let check = format!("check {} {MIB} 0", address + offset);
            assert_eq!(importer.ask(&check), "ok", "it is still there");
            assert_eq!(importer.ask(&attach), address.to_string());
            assert_eq!(importer.ask(&detach), "ok");
            assert_eq!(importer.ask(&detach), "ok");
            assert_eq!(importer.ask("live"), NOTHING);
            let answer = importer.ask(&detach);
            assert!(answer.starts_with("NotAllocated"), "{answer}");
            let again: usize = importer.ask(&attach).parse().unwrap();
            let check = format!("check {} {MIB} 0", again + offset);
            assert_eq!(importer.ask(&check), "ok");
            assert_eq!(importer.ask(&format!("detach {again}")), "ok");
            importer.finish();
            exporter.finish();
        }
    });
}

/// The block has more handles than fit in one message.
#[test]
fn a_large_block_crosses_in_several_messages() {
    let test = "a_large_block_crosses_in_several_messages";
    play(&ROLES, || {
        for (kind, handles) in [(EXPANDABLE, 70), (TIDE, 700)] {
            let size = 1400 * MIB;
            let (exporter, shared) = exporter(test, kind, &[size]);
            let mut importer = importer(test, &[]);
            let start: usize = importer
                .ask(&format!("attach 0 {}", shared[0].0))
                .parse()
                .unwrap();
            let address = start + shared[0].1;
            // The last handle is mapped and accessible, too.
            for address in [address, address + size - MIB] {
                assert_eq!(importer.ask(&format!("check {address} {MIB} 0")), "ok");
                assert_eq!(importer.ask(&format!("fill {address} {MIB} 7")), "ok");
            }
            assert_eq!(
                importer.ask("live"),
                format!("0 allocations, 1 reservations, 0 handles, {handles} mappings")
            );
            assert_eq!(importer.ask(&format!("detach {start}")), "ok");
            assert_eq!(importer.ask("live"), NOTHING);
            importer.finish();
            exporter.finish();
        }
    });
}

#[test]
fn pages_outlive_the_process_that_shared_them() {
    let test = "pages_outlive_the_process_that_shared_them";
    play(&ROLES, || {
        for kind in MAPPED {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB, 40 * MIB]);
            let mut importer = importer(test, &[]);
            let start: usize = importer
                .ask(&format!("attach 0 {}", shared[0].0))
                .parse()
                .unwrap();
            exporter.kill();
            let address = start + shared[0].1;
            assert_eq!(importer.ask(&format!("check {address} {MIB} 0")), "ok");
            let late = importer.ask(&format!("attach 0 {}", shared[1].0));
            assert!(late.starts_with("InvalidArgument process "), "{late}");
            assert!(late.contains("has ended"), "{late}");
            assert_eq!(importer.ask(&format!("detach {start}")), "ok");
            assert_eq!(importer.ask("live"), NOTHING);
            importer.finish();
        }
    });
}

#[test]
fn pages_that_went_back_are_refused() {
    let test = "pages_that_went_back_are_refused";
    play(&ROLES, || {
        for kind in MAPPED {
            let (mut exporter, shared) = exporter(test, kind, &[3 * MIB]);
            assert_eq!(exporter.ask("free"), "ok");
            let mut importer = importer(test, &[]);
            let answer = importer.ask(&format!("attach 0 {}", shared[0].0));
            assert!(answer.contains("has given it back since"), "{answer}");
            assert_eq!(importer.ask("live"), NOTHING);
            importer.finish();
            exporter.finish();
        }
    });
}

#[test]
fn bytes_that_are_not_right_are_refused() {
    let test = "bytes_that_are_not_right_are_refused";
    play(&ROLES, || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB]);
            let bytes = &shared[0].0;
            let mut importer = importer(test, &[]);
            let start = importer.ask(&format!("attach 0 {bytes}"));
            assert_eq!(importer.ask(&format!("detach {start}")), "ok", "these are");
            let mut refused = |bytes: &str, status: &str| {
                let answer = importer.ask(&format!("attach 0 {bytes}"));
                assert!(answer.starts_with(status), "{bytes}: {answer}");
                assert_eq!(importer.ask("live"), NOTHING);
            };
            for length in (0..bytes.len()).step_by(2) {
                refused(&bytes[..length], "InvalidArgument");
            }
            refused(&format!("{bytes}00"), "InvalidArgument");
            // Each byte is changed once. Excluded are the exporter's process number, which is only shown to
            // users, and the part of an allocation's handle that only the driver reads.
            let all = bytes.len() / 2;
            let end = if kind != PLAIN { all } else { 41 + 16 };
            for index in (0..end).filter(|index| kind == PLAIN || !(41..45).contains(index)) {
                let digit = 2 * index;
                let flipped = if &bytes[digit..=digit] == "0" {
                    "8"
                } else {
                    "0"
                };
                let other = format!("{}{flipped}{}", &bytes[..digit], &bytes[digit + 1..]);
                let answer = importer.ask(&format!("attach 0 {other}"));
                let is_refused =
                    answer.starts_with("InvalidArgument") || answer.starts_with("Driver");
                // A changed name of the exporter may be accepted: an allocation is found without it.
                let is_name = kind == PLAIN && (9..25).contains(&index);
                assert!(is_refused || is_name, "byte {index}: {answer}");
                if let Ok(address) = answer.parse::<usize>() {
                    assert_eq!(importer.ask(&format!("detach {address}")), "ok");
                }
                assert_eq!(importer.ask("live"), NOTHING);
            }
            importer.finish();
            exporter.finish();
        }
    });
}

#[test]
fn a_process_does_not_attach_its_own_memory() {
    let test = "a_process_does_not_attach_its_own_memory";
    for kind in KINDS {
        common::isolated(test, &[kind], |_| {
            let memory = allocate(3 << 20, 0).unwrap();
            let (bytes, _) = share(memory).unwrap();
            assert_eq!(attach(&bytes, 0), Err(Status::InvalidArgument));
            assert!(last_error().contains("of this process"), "{}", last_error());
            let inside = behind(memory, 512);
            assert_eq!(share(inside), Err(Status::NotAllocated));
            assert_eq!(share(ptr::null_mut()), Err(Status::NotAllocated));
            assert_eq!(lowtide_detach(memory), Status::NotAllocated);
        });
    }
}

/// Detaches in a thread of its own while the device's work is held, and runs `meanwhile` during the wait. The
/// work continues only afterwards, so `meanwhile` must not wait for it.
fn while_detaching(fake: &Fake, start: *mut c_void, meanwhile: impl FnOnce()) {
    let stream = fake.stream();
    fake.hold(stream, true);
    let memory = allocate_on(MIB, 0, stream).unwrap();
    fake.set_bytes(memory, MIB, stream);
    let start = start.expose_provenance();
    let waits = fake.calls("cuCtxSynchronize");
    let detached = thread::spawn(move || lowtide_detach(ptr::with_exposed_provenance_mut(start)));
    while fake.calls("cuCtxSynchronize") == waits {
        thread::yield_now();
    }
    meanwhile();
    fake.hold(stream, false);
    assert_eq!(detached.join().unwrap(), Status::Ok);
    assert_eq!(lowtide_deallocate(memory), Status::Ok);
}

/// If this test fails, it does not end.
#[test]
fn detaching_keeps_nobody_waiting() {
    fn detaches(fake: &Fake) {
        let bytes = received().unwrap();
        let attach = || attach(&bytes, 0).unwrap();
        let start = attach();
        while_detaching(fake, start, || {
            let memory = allocate(100 * MIB, 0).unwrap();
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        });
        assert_eq!(lowtide_detach(start), Status::NotAllocated);

        // If the memory is attached meanwhile, it stays attached.
        let start = attach();
        while_detaching(fake, start, || assert_eq!(attach(), start));
        check(start, 512, 0);
        // Work that was queued before the second detach is waited for, too.
        let waits = fake.calls("cuCtxSynchronize");
        while_detaching(fake, start, || {
            assert_eq!(attach(), start);
            assert_eq!(lowtide_detach(start), Status::Ok);
        });
        assert_eq!(fake.calls("cuCtxSynchronize"), waits + 2);
        assert_eq!(lowtide_detach(start), Status::NotAllocated);
    }
    let test = "detaching_keeps_nobody_waiting";
    play(&[("export", export), ("detaches", detaches)], || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB]);
            assert_eq!(shared[0].1, 0, "the block is at the start");
            let mut importer = Other::start(test, "detaches", &[]);
            importer.send(&shared[0].0);
            assert_eq!(importer.finish(), "");
            exporter.finish();
        }
    });
}

/// The exporter forks and is killed. Its child has the socket's number, but no thread that answers.
#[test]
fn the_child_of_a_fork_neither_shares_nor_answers() {
    fn forks(_: &Fake) {
        let memory = allocate(3 << 20, 0).unwrap();
        let (bytes, _) = share(memory).unwrap();
        let in_child = || {
            assert_eq!(share(memory), Err(Status::Forked));
            assert_eq!(attach(&bytes, 0), Err(Status::Forked));
            assert_eq!(lowtide_detach(memory), Status::Forked);
            assert_eq!(lowtide_enable_peer_access(0, 1), Status::Forked);
        };
        // SAFETY: the child calls only the functions below.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(std::panic::catch_unwind(in_child).is_err());
            say(&format!("child {} {code}", std::process::id()));
            // The child lives until the test kills it.
            std::thread::sleep(std::time::Duration::from_secs(600));
            exit(1);
        }
        say(&bytes);
        let mut status = -1;
        // SAFETY: `status` may be written to.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
    }
    let test = "the_child_of_a_fork_neither_shares_nor_answers";
    play(&[("forks", forks), ("import", import)], || {
        let mut exporter = Other::start(test, "forks", &[EXPANDABLE]);
        let mut said = [exporter.hear(), exporter.hear()];
        said.sort_by_key(|line| !line.starts_with("child "));
        let [child, bytes] = said;
        let (number, code) = child["child ".len()..].split_once(' ').unwrap();
        assert_eq!(code, "0");
        let mut importer = importer(test, &[]);
        let start: usize = importer.ask(&format!("attach 0 {bytes}")).parse().unwrap();
        assert_eq!(importer.ask(&format!("detach {start}")), "ok");
        exporter.kill();
        let answer = importer.ask(&format!("attach 0 {bytes}"));
        // SAFETY: the child is this test's.
        let killed = unsafe { libc::kill(number.parse().unwrap(), libc::SIGKILL) };
        assert_eq!(killed, 0);
        assert!(answer.contains("has ended"), "{answer}");
        importer.finish();
    });
}

/// A child ends normally, with its exit handlers, while a thread of its parent is working.
#[test]
fn the_child_of_a_fork_ends() {
    fn forks(_: &Fake) {
        say(&share(allocate(3 << 20, 0).unwrap()).unwrap().0);
        received();
        for _ in 0..100 {
            // SAFETY: the child only ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe { libc::exit(0) };
            }
            let mut status = -1;
            // SAFETY: `status` may be written to.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
        say("all ended");
        received();
    }
    fn attaches(_: &Fake) {
        let bytes = received().unwrap();
        for round in 0..300 {
            let start = attach(&bytes, 0).unwrap();
            assert_eq!(lowtide_detach(start), Status::Ok);
            if round == 0 {
                say("begun");
            }
        }
    }
    let test = "the_child_of_a_fork_ends";
    play(&[("forks", forks), ("attaches", attaches)], || {
        let mut exporter = Other::start(test, "forks", &[EXPANDABLE]);
        let bytes = exporter.hear();
        let mut importer = Other::start(test, "attaches", &[]);
        assert_eq!(importer.ask(&bytes), "begun");
        assert_eq!(exporter.ask("fork"), "all ended");
        importer.finish();
        exporter.finish();
    });
}

#[test]
fn the_card_is_found_by_its_identity() {
    let test = "the_card_is_found_by_its_identity";
    play(&ROLES, || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB]);
            let (bytes, offset) = &shared[0];
            let visible = |list: &'static str| importer(test, &[("FAKECUDA_VISIBLE", list)]);

            // The exporter's first device is the importer's second.
            for device in [1, 0] {
                let mut importer = visible("1,0");
                let start: usize = importer
                    .ask(&format!("attach {device} {bytes}"))
                    .parse()
                    .unwrap();
                let check = format!("check {} {MIB} 0", start + offset);
                assert_eq!(importer.ask(&check), "ok");
                assert_eq!(importer.ask(&format!("detach {start}")), "ok");
                importer.finish();
            }
            let mut importer = visible("1");
            let answer = importer.ask(&format!("attach 0 {bytes}"));
            assert!(
                answer.starts_with("InvalidArgument the memory is on GPU-"),
                "{answer}"
            );
            assert!(answer.contains("CUDA_VISIBLE_DEVICES"), "{answer}");
            importer.finish();
            exporter.finish();
        }
    });
}
