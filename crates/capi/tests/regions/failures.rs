//! Regions when calls of the driver or the host fail.

use std::env;
use std::ffi::c_int;
use std::thread;

use lowtide::*;

use crate::common::{allocate, check, isolated, last_error};
use crate::{MIB, allocate_in, enter, host_copy, leave, pause, region, regions, resume};

/// The driver calls of pausing and resuming, directly or for backups.
const CALLS: [&str; 20] = [
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxSynchronize",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
];

/// Each driver call fails once, at each point of a pause and of a resume.
#[test]
fn a_call_that_fails_once_loses_nothing_of_a_region() {
    let test = "failures::a_call_that_fails_once_loses_nothing_of_a_region";
    isolated(test, &[], |fake| {
        let outside = allocate(MIB, 0).unwrap();
        let away = fake.used_bytes(0);
        let held: Vec<_> = [Backup::Host, Backup::Disk]
            .into_iter()
            .flat_map(|backup| (0..3).map(move |seed| (backup, seed)))
            .map(|(backup, seed)| (allocate_in("kv", backup, 5 * MIB, 0, seed), seed))
            .collect();
        let check_all = || {
            for &(memory, seed) in &held {
                check(memory, 5 * MIB, seed);
            }
        };
        let both = || [Backup::Host, Backup::Disk].map(|backup| region("kv", backup, 0));
        let mut errors = 0;
        for name in CALLS {
            for nth in 1..=10 {
                let before = fake.calls(name);
                fake.fail(name, nth, 999);
                let paused = pause("kv");
                fake.fail_none();
                errors += usize::from(paused != Status::Ok);
                let is_paused = both().map(|region| region.state == RegionState::Paused);
                if paused == Status::Ok {
                    assert_eq!(
                        (is_paused, fake.used_bytes(0)),
                        ([true; 2], away),
                        "{name} {nth}"
                    );
                }
                if is_paused == [false; 2] {
                    check_all();
                }
                assert_eq!(pause("kv"), Status::Ok, "{name} {nth}: {}", last_error());
                assert_eq!(fake.used_bytes(0), away, "{name} {nth}");
                fake.fail(name, nth, 999);
                let resumed = resume("kv");
                fake.fail_none();
                errors += usize::from(resumed != Status::Ok);
                assert_eq!(resume("kv"), Status::Ok, "{name} {nth}: {}", last_error());
                check_all();
                if fake.calls(name) < before + nth {
                    break;
                }
            }
        }
        assert!(errors >= 40, "{errors} steps failed");
        for (memory, _) in held {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(lowtide_deallocate(outside), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        let live = fake.live();
        assert_eq!((live.reservations, live.handles, live.mappings), (0, 0, 0));
        assert_eq!(fake.used_bytes(0), 0);
    });
}

/// The driver calls that wait for work of the device.
const WAITS: [&str; 4] = [
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamSynchronize",
];

/// Waits fail once, twice in a row, and permanently, at each point of a pause and of a resume. Copies run as late
/// as possible.
#[test]
fn waits_that_fail_lose_nothing_of_a_region() {
    let test = "failures::waits_that_fail_lose_nothing_of_a_region";
    isolated(test, &[], |fake| {
        let held: Vec<_> = [Backup::Host, Backup::Disk]
            .into_iter()
            .flat_map(|backup| (0..2).map(move |seed| (backup, seed)))
            .map(|(backup, seed)| (allocate_in("kv", backup, 2 * MIB, 0, seed), seed))
            .collect();
        fake.set_lazy(true);
        let mut errors = 0;
        for (name, in_a_row) in WAITS
            .into_iter()
            .flat_map(|name| [1, 2, 100].map(|row| (name, row)))
        {
            for nth in 1..=6 {
                let before = fake.calls(name);
                for change in [pause as fn(&str) -> Status, resume] {
                    (nth..nth + in_a_row).for_each(|nth| fake.fail(name, nth, 999));
                    errors += usize::from(change("kv") != Status::Ok);
                    fake.fail_none();
                    // Work that still runs does not access unmapped memory.
                    assert!(fake.synchronize_device(), "{name} {nth} {in_a_row}");
                    assert_eq!(change("kv"), Status::Ok, "{name} {nth}: {}", last_error());
                }
                for &(memory, seed) in &held {
                    check(memory, 2 * MIB, seed);
                }
                if fake.calls(name) < before + nth {
                    break;
                }
            }
        }
        assert!(errors >= 20, "{errors} steps failed");
        for (memory, _) in held {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(fake.used_bytes(0), 0);
    });
}

/// Limits the process's address space to `more` bytes above its current size.
fn limit_addresses(more: usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:"))
        .and_then(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let limit = libc::rlimit {
        rlim_cur: (size.unwrap() << 10) + more as u64,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the call only reads `limit`.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
    assert_eq!(result, 0);
}

/// If no more threads can be started, devices are handled one after the other.
#[test]
fn no_threads_are_needed_for_several_devices() {
    let test = "failures::no_threads_are_needed_for_several_devices";
    isolated(test, &[("FAKECUDA_DEVICES", "3")], |_| {
        let held = [0, 1, 2].map(|device| allocate_in("kv", Backup::None, 3 * MIB, device, 1));
        let all = |state| {
            let shown = regions();
            shown.len() == 3 && shown.values().all(|region| region.state == state)
        };
        // A thread needs megabytes of address space for its stack.
        limit_addresses(MIB);
        assert!(thread::Builder::new().spawn(|| {}).is_err());
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        assert!(all(RegionState::Paused));
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        assert!(all(RegionState::Mapped));
        for memory in held {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
    });
}

/// Host memory that is retained for one region's next backup is released for another region's first.
#[test]
fn a_backup_takes_the_place_of_memory_that_waits() {
    let test = "failures::a_backup_takes_the_place_of_memory_that_waits";
    isolated(test, &[("LOWTIDE_RETAIN_BACKUPS", "1")], |_| {
        let large = allocate_in("large", Backup::Host, 192 * MIB, 0, 1);
        let small = allocate_in("small", Backup::Host, 48 * MIB, 0, 2);
        assert_eq!(pause("large"), Status::Ok, "{}", last_error());
        assert_eq!(resume("large"), Status::Ok, "{}", last_error());
        limit_addresses(32 * MIB);
        assert!(region("large", Backup::Host, 0).host_bytes > 0);
        assert_eq!(pause("small"), Status::Ok, "{}", last_error());
        assert_eq!(region("large", Backup::Host, 0).host_bytes, 0);
        assert_eq!(resume("small"), Status::Ok, "{}", last_error());
        check(large, 192 * MIB, 1);
        check(small, 48 * MIB, 2);
    });
}

/// Idle or retained host memory of another device's backups is released for a backup.
#[test]
fn a_backup_takes_the_place_of_another_devices_memory() {
    let test = "failures::a_backup_takes_the_place_of_another_devices_memory";
    for retains in ["0", "1"] {
        let variables = [
            ("FAKECUDA_DEVICES", "2"),
            ("LOWTIDE_RETAIN_BACKUPS", retains),
        ];
        isolated(test, &variables, |_| {
            let large = allocate_in("large", Backup::Host, 192 * MIB, 1, 1);
            let small = allocate_in("small", Backup::Host, 48 * MIB, 0, 2);
            allocate_in("small", Backup::None, MIB, 1, 3);
            assert_eq!(pause("large"), Status::Ok, "{}", last_error());
            assert_eq!(resume("large"), Status::Ok, "{}", last_error());
            limit_addresses(32 * MIB);
            assert_eq!(pause("small"), Status::Ok, "{}", last_error());
            let away = [(Backup::Host, 0), (Backup::None, 1)];
            for (backup, device) in away {
                let shown = region("small", backup, device);
                assert_eq!((shown.state, shown.pauses), (RegionState::Paused, 1));
            }
            assert_eq!(region("large", Backup::Host, 1).host_bytes, 0);
            assert_eq!(resume("small"), Status::Ok, "{}", last_error());
            check(large, 192 * MIB, 1);
            check(small, 48 * MIB, 2);
        });
    }
}

/// A retained copy whose address was never returned is released for another region's backup. A copy that the
/// program may read is not, on any device.
#[test]
fn a_copy_that_may_be_read_is_not_taken_for_a_backup() {
    let test = "failures::a_copy_that_may_be_read_is_not_taken_for_a_backup";
    for devices in ["1", "2"] {
        let variables = [
            ("FAKECUDA_DEVICES", devices),
            ("LOWTIDE_RETAIN_BACKUPS", "1"),
        ];
        isolated(test, &variables, |_| {
            let devices: c_int = env::var("FAKECUDA_DEVICES").unwrap().parse().unwrap();
            let large = allocate_in("large", Backup::Host, 192 * MIB, devices - 1, 1);
            let small = allocate_in("small", Backup::Host, 48 * MIB, 0, 2);
            assert_eq!(pause("large"), Status::Ok, "{}", last_error());
            assert_eq!(resume("large"), Status::Ok, "{}", last_error());
            let (copy, size) = host_copy(large).unwrap();
            limit_addresses(32 * MIB);
            assert_eq!(pause("small"), Status::Backup);
            let text = last_error();
            let is_named = text.contains("release_backups") && text.contains("of region \"large\"");
            assert!(is_named, "{text}");
            assert_eq!(host_copy(large), Ok((copy, size)));
            check(copy, size, 1);

            assert_eq!(lowtide_release_backups(), Status::Ok);
            assert_eq!(host_copy(large), Err(Status::InvalidArgument));
            assert_eq!(pause("small"), Status::Ok, "{}", last_error());
            assert_eq!(resume("small"), Status::Ok, "{}", last_error());
            check(small, 48 * MIB, 2);
        });
    }
}

/// Makes a request that fails, and returns the last line of its error.
fn why_it_fails(size: usize) -> String {
    assert_eq!(allocate(size, 0), Err(Status::OutOfMemory));
    last_error().lines().last().unwrap().to_owned()
}

/// The error names the margin if only the margin refuses the request.
#[test]
fn a_request_that_the_margin_refuses_names_it() {
    let test = "failures::a_request_that_the_margin_refuses_names_it";
    isolated(test, &[("FAKECUDA_CAPACITY", "209715200")], |_| {
        allocate_in("kv", Backup::None, 60 * MIB, 0, 1);
        assert_eq!(lowtide_set_memory_margin(120 << 20), Status::Ok);
        enter("kv", Backup::None);
        assert_eq!(
            why_it_fails(40 * MIB),
            "Would have fitted: with a lower margin. Of what is free on the device, regions leave 120.00 MiB to \
             others (lowtide_set_memory_margin, or memory_margin_bytes of torch_memory_saver)."
        );
        let too_large = why_it_fails(150 * MIB);
        assert!(!too_large.contains("margin"), "{too_large}");
        // The request exceeds the process's limit, too.
        assert_eq!(lowtide_set_memory_fraction(0.4, 0), Status::Ok);
        let limited = why_it_fails(40 * MIB);
        assert!(!limited.contains("margin"), "{limited}");
        leave();
        let outside = why_it_fails(40 * MIB);
        assert!(!outside.contains("margin"), "{outside}");
        assert_eq!(lowtide_set_memory_fraction(1.0, 0), Status::Ok);
        assert!(allocate(40 * MIB, 0).is_ok(), "it is for regions");
    });
}
