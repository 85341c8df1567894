//! Every call of the driver fails once, at every point of a save and of a restore.

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
    // Of what is destroyed only at the end, no failure can lose anything; but that it is tried is seen.
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
        world.backups.discard(backup);
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
        // What failed once works when it is tried again.
        Err(_) => world.save(kind).expect(&context),
    };
    world.fill(2);
    if let Err(error) = world.restore(&mut backup) {
        assert!(failure.is_some(), "{error}");
        world.restore(&mut backup).expect(&context);
    }
    assert!(world.contents() == saved, "{context}");
    world.backups.finish_locking();
    world.backups.discard(backup);
    world.backups.release_retained();
    assert_eq!(world.backups.retained(), Bytes::ZERO, "{context}");
    let counts = std::array::from_fn(|index| world.fake.calls(CALLS[index]) - before[index]);
    world.fake.fail_none();
    world.end();
    counts
}

/// More than once in a row: the host locks no memory at all.
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
