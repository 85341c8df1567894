//! Calls of other threads at the worst moments of a pause and a resume.

mod common;

use std::sync::{Arc, Mutex};

use common::{TestDriver, TestRegion, allocator, failed};
use lowtide_core::{AllocError, Bytes, Config, Stream};
use lowtide_region::{BackupError, BackupKind, Copies, RegionError, RegionState};
use lowtide_sim::{Call, FaultPlan};

fn region(strategy: &str, kind: BackupKind) -> (TestDriver, TestRegion) {
    let driver = TestDriver::new(Bytes::gib(4));
    let config = Config::parse(strategy, "").expect("it is valid");
    let allocator = allocator(&driver, &config);
    let region = TestRegion::new(1, Some(kind), &driver, &allocator);
    (driver, region)
}

/// With strategies that release large blocks as soon as they are freed.
#[test]
fn a_block_that_is_freed_while_its_region_is_resumed_is_not_restored() {
    for strategy in ["direct", "buddy", "slab"] {
        let (driver, region) = region(strategy, BackupKind::Host);
        let allocate = |value| {
            let range = region.allocate(Bytes::mib(40), Stream(0));
            let range = range.expect("there is room");
            driver.write(range, value);
            range
        };
        let (kept, freed) = (allocate(1), allocate(2));
        region.pause().expect("nothing fails");
        let allocator = region.allocator.clone();
        // After the blocks of the region's own pool were listed, before those of the other.
        region.device().before_use(1, move || {
            assert_eq!(allocator.free(freed.address), Ok(()));
        });
        let resumed = region.resume();
        resumed.expect("nothing fails");
        assert!(driver.check(kept, 1), "{strategy}");
        assert_eq!(driver.violations(), [""; 0]);
    }
}

/// Its piece may have been released, and is mapped again without a segment. Each step of the backup saves two blocks.
#[test]
fn a_pause_that_fails_is_undone_without_what_was_freed_meanwhile() {
    for (strategy, steps_before) in [("direct", 1), ("direct", 2), ("buddy", 3), ("slab", 2)] {
        let (driver, region) = region(strategy, BackupKind::Host);
        let blocks = [1, 2, 3, 4, 5, 6, 7, 8].map(|value| {
            let range = region.allocate(Bytes::mib(40), Stream(0));
            let range = range.expect("there is room");
            driver.write(range, value);
            (range, value)
        });
        let [(freed, _), kept @ ..] = blocks;
        // `begin` is a call, too.
        region.backups().fails_in = Some(1 + steps_before);
        let allocator = region.allocator.clone();
        region.device().when_notified(true, move || {
            assert_eq!(allocator.free(freed.address), Ok(()));
        });
        let paused = region.pause();
        assert!(
            matches!(
                paused,
                Err(RegionError::Backup(BackupError::NoThread { .. }))
            ),
            "{strategy}: {paused:?}"
        );
        let state = region.memory.state().expect("no panic");
        assert_eq!(state, RegionState::Mapped, "{strategy}");
        for (range, value) in kept {
            assert!(driver.check(range, value), "{strategy}");
        }
        assert_eq!(region.backups().count(), 0);
        assert_eq!(driver.violations(), [""; 0]);
    }
}

#[test]
fn a_request_meets_a_region_that_serves_it_or_says_that_it_is_paused() {
    let (_, region) = region("caching", BackupKind::Host);
    let answers = Arc::new(Mutex::new(Vec::new()));
    let request = || {
        let (allocator, pool, answers) = (region.allocator.clone(), region.pool, answers.clone());
        move || {
            let answer = allocator.allocate_in(pool, Bytes::mib(40), Stream(0));
            answers.lock().expect("no panic").push(answer.map(drop));
        }
    };
    // Before the pools are set to refuse requests, and before they are set to serve them.
    region.device().before_use(0, request());
    region.pause().expect("nothing fails");
    region.device().when_notified(false, request());
    region.resume().expect("nothing fails");
    let paused = AllocError::Paused {
        region: "kv".into(),
    };
    let answers = answers.lock().expect("no panic");
    assert_eq!(*answers, [Ok(()), Err(paused)]);
}

/// The thread that releases the last segment holds the lock of the pools, so it cannot lock the backups.
#[test]
fn a_retained_copy_outlives_the_last_segment_until_someone_has_the_backups() {
    // Memory that the driver refuses to release has no contents then.
    let refused = [Call::Release, Call::Unreserve].map(|call| FaultPlan::nth(call, 1, failed()));
    for faults in refused.into_iter().chain([FaultPlan::none()]) {
        outlive_the_last_segment(faults);
    }
}

fn outlive_the_last_segment(faults: FaultPlan) {
    let (driver, region) = region("caching", BackupKind::Host);
    region.backups().retains = true;
    let copies = || {
        let backups = region.backups();
        (backups.count(), backups.released_backups)
    };
    let range = region.allocate(Bytes::mib(4), Stream(1)).expect("room");
    region.pause().expect("nothing fails");
    region.resume().expect("nothing fails");
    region.allocator.free(range.address).expect("it is held");
    driver.set_faults(faults);
    region.allocator.empty_cache().expect("nothing fails");
    assert_eq!(copies(), (1, 0));
    assert_eq!(region.memory.figures().expect("no panic").host, Bytes::ZERO);
    // It is not the copy of any block, even of one at the same address.
    let later = region.allocate(Bytes::mib(4), Stream(1)).expect("room");
    assert_eq!(region.host_copy(later), None);
    let released = region.release_copy(Copies::Ended);
    released.expect("no panic");
    assert_eq!(copies(), (0, 1));
}

/// A copy ends with its block, whatever is allocated at the address later.
#[test]
fn what_is_handed_out_where_a_copy_is_of_is_noted() {
    let (_, region) = region("caching", BackupKind::Host);
    region.backups().retains = true;
    let [one, other] = [0, 1].map(|_| region.allocate(Bytes::mib(4), Stream(1)).expect("room"));
    region.pause().expect("nothing fails");
    assert!(!region.allocator.is_watched(one.address));
    region.resume().expect("nothing fails");
    region.allocator.free(one.address).expect("it is held");
    let later = region.allocate(Bytes::mib(4), Stream(1)).expect("room");
    assert_eq!(later, one, "the address is used again");
    let is_watched = [one, other].map(|range| region.allocator.is_watched(range.address));
    assert_eq!(is_watched, [false, true]);
    region.pause().expect("nothing fails");
    region.resume().expect("nothing fails");
    assert!(region.allocator.is_watched(one.address));
    let released = region.release_copy(Copies::All);
    released.expect("no panic");
    assert!(!region.allocator.is_watched(one.address));
}
