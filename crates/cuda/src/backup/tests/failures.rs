//! Fails every driver call once, at every point of a save and of a restore.

use super::*;

/// The functions that backups call.
const CALLS: [&str; 14] = [
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuThreadExchangeStreamCaptureMode",
];

const OUT_OF_MEMORY: i32 = 2;
const UNKNOWN: i32 = 999;

#[test]
fn a_backup_survives_every_failure_of_the_driver() {
    let mut struck = std::collections::BTreeSet::new();
    for kind in KINDS {
        for is_warm in [false, true] {
            let counts = run(kind, is_warm, None);
            for (call, count) in CALLS.into_iter().zip(counts) {
                for nth in 1..=count {
                    let code = if nth % 2 == 0 { UNKNOWN } else { OUT_OF_MEMORY };
                    run(kind, is_warm, Some((call, nth, code)));
                    struck.insert(call);
                }
            }
        }
    }
    // These calls also destroy resources at the end. A failure there loses nothing, but the calls must be made.
    for call in CALLS {
        assert!(struck.contains(call), "{call} was never made");
    }
}

/// Saves and restores while one call fails. Returns how often each of [`CALLS`] was made.
fn run(kind: BackupKind, is_warm: bool, failure: Option<(&str, u64, i32)>) -> [u64; CALLS.len()] {
    let mut world = World::new(STAYS, TemporaryFile::open);
    if is_warm {
        let backup = world.save(kind).unwrap();
        world.backups.finish_locking();
        world.backups.release(backup);
    }
    let before = CALLS.map(|call| world.fake.calls(call));
    if let Some((call, nth, code)) = failure {
        world.fake.fail(call, nth, code);
    }
    let saved = world.fill(1);
    let outcome = world.save(kind);
    let context = format!(
        "{kind:?} {is_warm} {failure:?}: {:?}",
        outcome.as_ref().err()
    );
    assert!(world.contents() == saved, "{context}");
    let mut backup = match outcome {
        Ok(backup) => backup,
        // After one failure, the next attempt works.
        Err(_) => world.save(kind).expect(&context),
    };
    world.fill(2);
    if let Err(error) = world.restore(&mut backup) {
        assert!(failure.is_some(), "{error}");
        world.restore(&mut backup).expect(&context);
    }
    assert!(world.contents() == saved, "{context}");
    world.backups.finish_locking();
    world.backups.release(backup);
    world.backups.release_retained();
    assert_eq!(world.backups.kept().bytes(), Bytes::ZERO, "{context}");
    let counts = std::array::from_fn(|index| world.fake.calls(CALLS[index]) - before[index]);
    world.fake.fail_none();
    world.end();
    counts
}

/// The host page-locks no memory: the failure repeats.
#[test]
fn without_page_locked_memory_there_is_an_error_and_no_loss() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let saved = world.fill(1);
    world.fake.fail("cuMemHostRegister_v2", 1, OUT_OF_MEMORY);
    let error = world.save(BackupKind::Host).unwrap_err();
    assert_eq!(error, BackupError::Driver(DriverError::OutOfMemory));
    assert_eq!(world.contents(), saved);
    // One slot is enough.
    for nth in 2..40 {
        world.fake.fail("cuMemHostRegister_v2", nth, OUT_OF_MEMORY);
    }
    let mut backup = world.save(BackupKind::Host).unwrap();
    world.backups.finish_locking();
    assert_eq!(backup.locked(), Bytes::ZERO);
    world.fill(2);
    world.restore(&mut backup).unwrap();
    assert_eq!(world.contents(), saved);
    world.fake.fail_none();
    drop(backup);
    world.end();
}

/// Each call is refused several times in a row.
#[test]
fn what_the_driver_refuses_to_take_back_goes_back_later() {
    for call in [
        "cuCtxPushCurrent_v2",
        "cuEventDestroy_v2",
        "cuMemHostUnregister",
        "cuStreamDestroy_v2",
    ] {
        let mut world = World::new(STAYS, TemporaryFile::open);
        let backup = world.save(BackupKind::Host).unwrap();
        world.backups.finish_locking();
        world.backups.release(backup);
        (1..20).for_each(|nth| world.fake.fail(call, nth, UNKNOWN));
        world.backups.release_retained();
        world.fake.fail_none();
        let held = |world: &World| {
            let live = world.fake.live();
            [live.host_allocations, live.events, live.streams]
        };
        assert_ne!(held(&world), [0; 3], "{call}");
        let is_counted = !world.backups.kept().bytes().is_zero();
        assert_eq!(is_counted, held(&world)[0] > 0, "{call}");
        // Any other release retries it.
        let backup = world.save(BackupKind::Disk).unwrap();
        world.backups.release(backup);
        world.backups.release_retained();
        assert_eq!(held(&world), [0; 3], "{call}");
        assert_eq!(world.backups.kept().bytes(), Bytes::ZERO, "{call}");
        world.end();
    }
}

/// Makes every wait for copies fail.
fn fail_waits(world: &World) {
    for call in ["cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize"] {
        (1..40).for_each(|nth| world.fake.fail(call, nth, UNKNOWN));
    }
}

/// The wait for the copies of a save fails for good, and the copies run as late as possible.
#[test]
fn memory_that_copies_write_to_is_nobody_elses() {
    for times in [STAYS, GOES] {
        for is_released in [false, true] {
            let mut world = World::new(times, TemporaryFile::open);
            world.fake.set_lazy(true);
            world.fill(1);
            fail_waits(&world);
            let ranges = world.ranges.clone();
            let mut backup = world.backups.begin(&ranges, BackupKind::Host).unwrap();
            assert!(world.backups.save_next(&mut backup).is_err());
            if is_released {
                world.backups.release(backup)
            } else {
                drop(backup)
            }
            world.backups.release_retained();
            assert!(world.backups.finish().is_err());
            let other = world.save(BackupKind::Host);
            assert!(other.is_err(), "it would use what those copies use");
            world.fake.fail_none();
            let saved = world.fill(2);
            let mut backup = world.save(BackupKind::Host).unwrap();
            world.fill(3);
            let device = world.driver.device().clone();
            assert_eq!(device.synchronize(), Ok(()));
            let copies = world.ranges.iter().map(|&range| copy_of(&backup, range));
            assert!(copies.eq(saved.iter().cloned()));
            world.restore(&mut backup).unwrap();
            assert_eq!(world.contents(), saved);
            drop(backup);
            world.end();
        }
    }
}

/// Backups that are dropped while it is unknown whether their copies have ended.
#[test]
fn copies_outlive_their_backups() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    world.fake.set_lazy(true);
    let saved = world.fill(1);
    let mut backup = world.save(BackupKind::Host).unwrap();
    fail_waits(&world);
    assert!(world.restore(&mut backup).is_err());
    drop(backup);
    let context = Arc::clone(world.backups.queue.context());
    let other = CudaBackups::with(context, SIZES, STAYS, TemporaryFile::open);
    drop(std::mem::replace(&mut world.backups, other));
    world.fake.fail_none();
    let device = world.driver.device().clone();
    assert_eq!(device.synchronize(), Ok(()));
    assert_eq!(world.contents(), saved);
    // The memory of these copies stays for the rest of the process.
    assert_ne!(world.fake.live().host_allocations, 0);
}
