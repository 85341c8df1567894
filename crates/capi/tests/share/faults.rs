//! Driver calls that fail once, in each of the processes.

use std::{ptr, thread};

use lowtide::*;

use super::common::{Fake, allocate, last_error};
use super::roles::*;

/// The driver calls of attaching and detaching.
const CALLS: [&str; 17] = [
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetUuid_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuMemAddressReserve",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSynchronize",
    "cuMemUnmap",
    "cuMemAddressFree",
];

/// Every call that attaching and detaching make fails once.
#[test]
fn a_call_that_fails_once_leaves_nothing_attached() {
    fn fails(fake: &Fake) {
        let bytes = received().unwrap();
        // The device is initialized first. The request makes a context current in its own thread, not in this
        // one.
        let request = thread::spawn(|| allocate(512, 0).unwrap().expose_provenance());
        let held = ptr::with_exposed_provenance_mut(request.join().unwrap());
        let before = described(&fake.live());
        while let Some(line) = received() {
            let (call, nth) = line.split_once(' ').unwrap();
            fake.fail(call, nth.parse().unwrap(), 999);
            let mut failures = 0;
            let start = match attach(&bytes, 0) {
                Ok(start) => start,
                Err(status) => {
                    assert_eq!(status, Status::Driver, "{}", last_error());
                    assert_eq!(described(&fake.live()), before, "{line}: {}", last_error());
                    failures += 1;
                    attach(&bytes, 0).unwrap()
                }
            };
            if lowtide_detach(start) != Status::Ok {
                failures += 1;
                assert_eq!(lowtide_detach(start), Status::Ok, "{}", last_error());
            }
            assert_eq!(described(&fake.live()), before, "{line}");
            assert!(failures <= 1);
            fake.fail_none();
            // Attaches and detaches again.
            let start = attach(&bytes, 0).unwrap();
            assert_eq!(lowtide_detach(start), Status::Ok);
            assert_eq!(described(&fake.live()), before, "{line}");
            say(&failures.to_string());
        }
        assert_eq!(lowtide_deallocate(held), Status::Ok);
    }
    let test = "faults::a_call_that_fails_once_leaves_nothing_attached";
    play(&[("export", export), ("fails", fails)], || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[30 * MIB]);
            let mut importer = Other::start(test, "fails", &[]);
            importer.send(&shared[0].0);
            let mut failed = Vec::new();
            for call in CALLS {
                for nth in 1..=8 {
                    if importer.ask(&format!("{call} {nth}")) == "1" {
                        failed.push(call);
                    }
                }
            }
            failed.dedup();
            // A handle that the driver refuses to release is released later with others, so no step fails because
            // of it.
            let made = |call: &&str| match *call {
                "cuIpcOpenMemHandle_v2" | "cuIpcCloseMemHandle" => kind == PLAIN,
                "cuMemRelease" => false,
                call => kind != PLAIN || !call.starts_with("cuMem"),
            };
            let expected: Vec<&str> = CALLS.into_iter().filter(made).collect();
            assert_eq!(failed, expected);
            importer.finish();
            exporter.finish();
        }
    });
}

/// Every driver call of sharing fails once, in the function and in the thread that answers.
#[test]
fn a_call_that_fails_once_keeps_nothing_from_being_shared() {
    fn fails(fake: &Fake) {
        let memory = allocate(30 << 20, 0).unwrap();
        while let Some(line) = received() {
            let (call, nth) = line.split_once(' ').unwrap();
            fake.fail(call, nth.parse().unwrap(), 999);
            let first = share(memory);
            if let Err(status) = first {
                assert_eq!(status, Status::Driver, "{line}");
                assert!(
                    last_error().contains("failed with error 999"),
                    "{}",
                    last_error()
                );
            }
            let (bytes, offset) = first.or_else(|_| share(memory)).unwrap();
            say(&format!("{bytes} {offset}"));
        }
    }
    let test = "faults::a_call_that_fails_once_keeps_nothing_from_being_shared";
    play(&[("fails", fails), ("import", import)], || {
        for kind in KINDS {
            let calls = if kind == PLAIN {
                ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle"]
            } else {
                ["cuDeviceGetUuid_v2", "cuMemExportToShareableHandle"]
            };
            let mut exporter = Other::start(test, "fails", &[kind]);
            let mut importer = importer(test, &[]);
            for (call, nth) in calls
                .map(|call| (call, 1))
                .into_iter()
                .chain([(calls[1], 2)])
            {
                let answer = exporter.ask(&format!("{call} {nth}"));
                let (bytes, _) = answer.split_once(' ').unwrap();
                let attach = format!("attach 0 {bytes}");
                let mut start = importer.ask(&attach);
                if call == "cuMemExportToShareableHandle" {
                    assert!(start.starts_with("Driver process "), "{start}");
                    assert!(start.contains("failed with error 999"), "{start}");
                    assert_eq!(importer.ask("live"), NOTHING);
                    start = importer.ask(&attach);
                }
                assert_eq!(importer.ask(&format!("detach {start}")), "ok");
                assert_eq!(importer.ask("live"), NOTHING);
            }
            importer.finish();
            exporter.finish();
        }
    });
}
