//! Each call of a pause and a resume fails once. That gives an error, all contents are still there, the next attempt
//! completes, and nothing leaks.

mod common;

use std::sync::MutexGuard;

use common::{Allocator, TestBackups, TestDriver, TestRegion, allocator, failed};
use lowtide_core::{AllocError, Bytes, Config, DriverError, Stream};
use lowtide_region::{BackupKind, MemoryRange, RegionError, RegionState};
use lowtide_sim::{Call, FaultPlan};

const KINDS: [Option<BackupKind>; 3] = [Some(BackupKind::Host), Some(BackupKind::Disk), None];

/// A region with blocks in several runs of memory and holes between them.
struct World {
    driver: TestDriver,
    allocator: Allocator,
    region: TestRegion,
    held: Vec<(MemoryRange, u64)>,
}

impl World {
    fn new(kind: Option<BackupKind>) -> World {
        let driver = TestDriver::new(Bytes::gib(4));
        let allocator = allocator(&driver, &Config::default());
        let region = TestRegion::new(1, kind, &driver, &allocator);
        let mut world = World {
            driver,
            allocator,
            region,
            held: Vec::new(),
        };
        let mut holes = Vec::new();
        for number in 0..12 {
            let size = Bytes::mib(24 + 2 * number);
            let range = world
                .region
                .allocate(size, Stream(number % 2))
                .expect("there is room");
            if number % 3 == 1 {
                holes.push(range);
            } else {
                world.driver.write(range, number);
                world.held.push((range, number));
            }
            world.driver.launch(range, Stream(number % 2));
        }
        for hole in holes {
            assert_eq!(world.region.allocator.free(hole.address), Ok(()));
        }
        assert_eq!(world.region.allocator.empty_cache(), Ok(()));
        world
    }

    fn backups(&self) -> MutexGuard<'_, TestBackups> {
        self.region.backups()
    }

    fn state(&self) -> RegionState {
        self.region.memory.state().expect("no call panics")
    }

    fn mapped(&self) -> Bytes {
        self.region.memory.figures().expect("no call panics").mapped
    }

    fn pause(&self) -> Result<(), RegionError> {
        self.region.pause()
    }

    fn resume(&self) -> Result<(), RegionError> {
        self.region.resume()
    }

    /// Checks the contents, except those that may be lost because the region has no backup.
    fn check_contents(&self, may_be_lost: bool) {
        for &(range, value) in &self.held {
            if may_be_lost && self.region.kind.is_none() {
                assert!(self.driver.is_usable(range), "{range:?}");
            } else {
                assert!(self.driver.check(range, value), "{range:?}");
            }
        }
        assert_eq!(self.driver.violations(), [""; 0]);
    }

    fn end(self) {
        for (range, _) in self.held {
            assert_eq!(self.region.allocator.free(range.address), Ok(()));
        }
        self.region.release_pools();
        assert_eq!(self.allocator.empty_cache(), Ok(()));
        assert_eq!(self.driver.leaks(), [""; 0]);
        assert_eq!(self.driver.violations(), [""; 0]);
        assert_eq!(self.region.backups().count(), 0);
    }
}

/// Runs a test that fails the first call, then the second and so on, until it returns that no call failed.
fn for_each_call(mut test: impl FnMut(u64) -> bool) -> u64 {
    (1..).find(|&nth| !test(nth)).expect("calls are finite") - 1
}

#[test]
fn a_call_that_fails_while_pausing_loses_nothing() {
    for kind in KINDS {
        for error in [failed(), DriverError::OutOfMemory] {
            let mut failures = 0;
            let count = for_each_call(|nth| {
                let world = World::new(kind);
                let before = (world.driver.failures(), world.mapped());
                world
                    .driver
                    .set_faults(FaultPlan::nth_of_any(nth, error.clone()));
                let paused = world.pause();
                world.driver.set_faults(FaultPlan::none());
                let has_failed = world.driver.failures() > before.0;
                // A release that the driver refuses during the saving is tried again.
                let refused = world.driver.failures_of([Call::Unmap, Call::Release]);
                let may_be_offered_again = kind.is_some() && refused > 0;
                assert!(
                    paused.is_err() == has_failed || may_be_offered_again,
                    "{nth}: {paused:?}"
                );
                failures += u32::from(paused.is_err());
                match &paused {
                    Err(RegionError::NotReleased { size, .. }) => {
                        assert_eq!(
                            (world.state(), world.mapped()),
                            (RegionState::Paused, *size)
                        );
                    }
                    Err(_) => {
                        assert_eq!(
                            (world.state(), world.mapped()),
                            (RegionState::Mapped, before.1)
                        );
                        world.check_contents(false);
                        assert!(world.region.allocate(Bytes::kib(1), Stream(0)).is_ok());
                    }
                    Ok(()) => assert_eq!(world.state(), RegionState::Paused),
                }
                world.pause().expect("nothing fails any more");
                assert_eq!(
                    (world.state(), world.mapped()),
                    (RegionState::Paused, Bytes::ZERO)
                );
                world.resume().expect("nothing fails any more");
                world.check_contents(true);
                let extra = world.region.held_blocks();
                for block in extra
                    .iter()
                    .filter(|block| block.requested == Bytes::kib(1))
                {
                    assert_eq!(world.region.allocator.free(block.address), Ok(()));
                }
                world.end();
                has_failed
            });
            // The wait, an unmap for each run, a release for each piece.
            assert!(count >= 8, "{count} calls failed");
            assert!(failures >= 3, "{failures} of {count} pauses failed");
        }
    }
}

#[test]
fn a_call_that_fails_while_resuming_loses_nothing() {
    for kind in KINDS {
        for error in [failed(), DriverError::OutOfMemory] {
            let count = for_each_call(|nth| {
                let world = World::new(kind);
                world.pause().expect("nothing fails yet");
                let failures = world.driver.failures();
                world
                    .driver
                    .set_faults(FaultPlan::nth_of_any(nth, error.clone()));
                let resumed = world.resume();
                world.driver.set_faults(FaultPlan::none());
                let has_failed = world.driver.failures() > failures;
                assert_eq!(resumed.is_err(), has_failed, "{nth}: {resumed:?}");
                if has_failed {
                    assert_eq!(
                        (world.state(), world.mapped()),
                        (RegionState::Paused, Bytes::ZERO)
                    );
                    let refused = world.region.allocate(Bytes::kib(1), Stream(0));
                    assert!(matches!(refused, Err(AllocError::Paused { .. })));
                }
                world.resume().expect("nothing fails any more");
                world.check_contents(true);
                world.end();
                has_failed
            });
            // A create, a map and an access for each run.
            assert!(count >= 12, "{count} calls failed");
        }
    }
}

/// The calls that a pause makes to the backups: one to begin, and one for each two of the eight blocks.
const BACKUP_CALLS: u64 = 1 + 4;

#[test]
fn a_backup_that_fails_loses_nothing() {
    for kind in [BackupKind::Host, BackupKind::Disk] {
        for (panics, nth) in (0..BACKUP_CALLS).flat_map(|nth| [(false, nth), (true, nth)]) {
            let world = World::new(Some(kind));
            let mapped = world.mapped();
            world.backups().panics = panics;
            world.backups().fails_in = Some(nth);
            assert!(matches!(world.pause(), Err(RegionError::Backup(_))));
            assert_eq!(world.state(), RegionState::Mapped);
            // Room for segments to come does not come back, where it had left.
            assert!(world.mapped() <= mapped && (nth > 2 || world.mapped() == mapped));
            world.check_contents(false);
            world.pause().expect("nothing fails any more");
            world.backups().fails_in = Some(0);
            assert!(matches!(world.resume(), Err(RegionError::Backup(_))));
            assert_eq!(
                (world.state(), world.mapped()),
                (RegionState::Paused, Bytes::ZERO)
            );
            world.resume().expect("nothing fails any more");
            world.check_contents(true);
            world.end();
        }
    }
}

#[test]
fn what_is_saved_leaves_before_the_rest_is() {
    let world = World::new(Some(BackupKind::Host));
    world.pause().expect("nothing fails");
    let in_use = world.backups().in_use.clone();
    assert_eq!(in_use.len() as u64, BACKUP_CALLS - 1);
    assert!(
        in_use.windows(2).all(|pair| pair[1] < pair[0]),
        "{in_use:?}"
    );
    world.resume().expect("nothing fails");
    world.check_contents(false);
    world.end();
}

/// Two failures: a step of the backup, and any call of the driver before or after.
#[test]
fn a_backup_and_a_call_that_fail_lose_nothing() {
    for (nth_step, way_out) in (0..BACKUP_CALLS)
        .flat_map(|nth| [(nth, World::resume as fn(&World) -> _), (nth, World::pause)])
    {
        let mut kept_away = 0;
        let count = for_each_call(|nth| {
            let world = World::new(Some(BackupKind::Host));
            let failures = world.driver.failures();
            world.backups().fails_in = Some(nth_step);
            world
                .driver
                .set_faults(FaultPlan::nth_of_any(nth, failed()));
            let error = world.pause().expect_err("the backup fails");
            world.driver.set_faults(FaultPlan::none());
            world.backups().fails_in = None;
            let is_away = world.state() == RegionState::Paused;
            assert_eq!(is_away, error.is_paused(), "{error}");
            kept_away += u32::from(is_away);
            let has_failed = world.driver.failures() > failures;
            way_out(&world).expect("nothing fails any more");
            world.resume().expect("nothing fails any more");
            world.check_contents(true);
            world.end();
            has_failed
        });
        // A create, a map and an access to put back what has left.
        assert!(
            nth_step < 2 || kept_away >= 3,
            "{nth_step}: {kept_away} of {count}"
        );
    }
}

/// Copies go on after their call has failed, and so many waits for them fail.
#[test]
fn what_copies_may_use_stays_mapped() {
    let ways_out = [World::resume as fn(&World) -> _, World::pause];
    let mut kept = 0;
    for (nth, failing_waits, panics) in (1..=2 * BACKUP_CALLS)
        .flat_map(|nth| (1..4).map(move |waits| (nth, waits, false)))
        .chain([(2, 2, true), (BACKUP_CALLS, 2, true)])
    {
        for (way_out, more_failures) in ways_out.into_iter().zip([0, 1]) {
            let mut world = World::new(Some(BackupKind::Host));
            world.backups().panics = panics;
            world.backups().fails_in = Some(nth);
            world.backups().more_failures = more_failures;
            world.backups().failing_waits = failing_waits;
            if world.pause().is_ok() && world.resume().is_err() {
                kept += u32::from(!world.mapped().is_zero());
            }
            // Memory of a removed segment stays, too.
            if let Some((range, _)) = world.held.pop() {
                assert_eq!(world.region.allocator.free(range.address), Ok(()));
                assert_eq!(world.region.allocator.empty_cache(), Ok(()));
            }
            assert_eq!(world.driver.violations(), [""; 0], "{nth} {failing_waits}");
            world.backups().fails_in = None;
            world.backups().failing_waits = 0;
            way_out(&world).expect("nothing fails any more");
            world.resume().expect("nothing fails any more");
            world.check_contents(false);
            world.end();
        }
    }
    assert!(kept >= 3, "{kept} resumes left their memory where it was");
}

/// A wait fails once. After the failed pause the region can allocate new memory.
#[test]
fn requests_are_served_once_the_copies_of_a_failed_pause_have_ended() {
    let world = World::new(Some(BackupKind::Host));
    world.backups().fails_in = Some(1);
    world.backups().failing_waits = 1;
    assert!(world.pause().is_err());
    assert_eq!(world.backups().failing_waits, 0);
    let request = world.region.allocate(Bytes::mib(24), Stream(0));
    let block = request.expect("nothing fails any more");
    assert_eq!(world.region.allocator.free(block.address), Ok(()));
    world.check_contents(false);
    world.end();
}

/// Until the copies have ended, the region does not change. The next call releases what is unused.
#[test]
fn a_region_whose_copies_have_not_ended_stays_as_it_is() {
    let mut world = World::new(Some(BackupKind::Host));
    let mapped = world.mapped();
    world.backups().fails_in = Some(1);
    world.backups().failing_waits = 8;
    assert!(world.pause().is_err());
    assert!(world.pause().is_err() && world.pause().is_err());
    assert_eq!(
        (world.state(), world.mapped()),
        (RegionState::Mapped, mapped)
    );
    for (range, _) in std::mem::take(&mut world.held) {
        assert_eq!(world.region.allocator.free(range.address), Ok(()));
    }
    assert_eq!(world.region.allocator.empty_cache(), Ok(()));
    let trim = |world: &World| world.region.memory.trim();
    trim(&world).expect("what cannot go stays");
    assert_eq!(world.mapped(), mapped);
    let request = |world: &World| world.region.allocate(Bytes::mib(24), Stream(0));
    assert!(request(&world).is_err(), "copies may use it");
    world.backups().failing_waits = 0;
    trim(&world).expect("nothing fails any more");
    assert_eq!(world.mapped(), Bytes::ZERO);
    let served = request(&world).expect("the copies have ended");
    assert_eq!(world.region.allocator.free(served.address), Ok(()));
    world.end();
}

/// Two failures: a step of the backup, and then the copy that would restore what had been released.
#[test]
fn what_is_saved_by_a_pause_that_fails_is_kept_if_it_cannot_be_put_back() {
    for kind in [BackupKind::Host, BackupKind::Disk] {
        let mut count = 0;
        for nth in 0..BACKUP_CALLS {
            for way_out in [World::resume, World::pause] {
                let world = World::new(Some(kind));
                world.backups().fails_in = Some(nth);
                world.backups().more_failures = 1;
                let paused = world.pause();
                if matches!(paused, Err(RegionError::NotUndone { .. })) {
                    assert_eq!(world.state(), RegionState::Paused);
                    count += 1;
                } else {
                    assert!(matches!(paused, Err(RegionError::Backup(_))), "{paused:?}");
                    assert_eq!(world.state(), RegionState::Mapped);
                    world.backups().fails_in = None;
                }
                world.backups().more_failures = 0;
                way_out(&world).expect("nothing fails any more");
                world.resume().expect("nothing fails any more");
                world.check_contents(true);
                world.end();
            }
        }
        assert!(count >= 4, "{count} pauses could not be undone");
    }
}

impl World {
    /// Returns a world whose pause failed twice: at an unmap, and then at the first call of another kind. Unmaps that are
    /// refused during the saving do not fail the pause.
    fn not_undone(kind: Option<BackupKind>, then: Call) -> World {
        let mut worlds = (1..16).map(|nth| {
            let world = World::new(kind);
            world.driver.fail_unmap_then(nth, then);
            world
        });
        let is_it = |world: &World| matches!(world.pause(), Err(RegionError::NotUndone { .. }));
        let world = worlds.find(is_it);
        world.expect("an unmap fails after everything is saved")
    }
}

/// Two failures: an unmap, and then the mapping that would undo the unmaps before it.
#[test]
fn what_cannot_be_put_back_is_kept() {
    for kind in KINDS {
        for then in [Call::Map, Call::SetAccess] {
            for way_out in [World::resume, World::pause] {
                let world = World::not_undone(kind, then);
                assert_eq!(world.state(), RegionState::Paused);
                world.driver.set_faults(FaultPlan::none());
                way_out(&world).expect("nothing fails any more");
                world.resume().expect("nothing fails any more");
                world.check_contents(true);
                world.end();
            }
        }
    }
}

/// Without a backup, the contents are only in that memory.
#[test]
fn what_cannot_be_put_back_outlives_a_resume_that_fails() {
    for kind in KINDS {
        let count = for_each_call(|nth| {
            let world = World::not_undone(kind, Call::Map);
            let failures = world.driver.failures();
            world
                .driver
                .set_faults(FaultPlan::nth_of_any(nth, failed()));
            let resumed = world.resume();
            world.driver.set_faults(FaultPlan::none());
            let has_failed = world.driver.failures() > failures;
            assert_eq!(resumed.is_err(), has_failed, "{nth}: {resumed:?}");
            world.resume().expect("nothing fails any more");
            world.check_contents(false);
            world.end();
            has_failed
        });
        // A map and an access at least.
        assert!(count >= 2, "{count} calls failed");
    }
}

impl World {
    /// Returns a world whose pause failed at a step of the backup, and then at the restore that would undo it.
    fn partly_saved() -> World {
        let world = World::new(Some(BackupKind::Host));
        world.backups().fails_in = Some(3);
        world.backups().more_failures = 1;
        assert!(matches!(world.pause(), Err(RegionError::NotUndone { .. })));
        let figures = world.region.memory.figures().expect("no call panics");
        assert!(!figures.mapped.is_zero() && !figures.host.is_zero());
        world
    }
}

/// Half of the contents are in the backup, and half only on the device.
#[test]
fn what_is_partly_saved_outlives_a_resume_and_a_pause_that_fail() {
    for act in [World::resume, World::pause] {
        let count = for_each_call(|nth| {
            let world = World::partly_saved();
            let failures = world.driver.failures();
            world
                .driver
                .set_faults(FaultPlan::nth_of_any(nth, failed()));
            let _ = act(&world);
            world.driver.set_faults(FaultPlan::none());
            let has_failed = world.driver.failures() > failures;
            world.resume().expect("nothing fails any more");
            world.check_contents(false);
            world.end();
            has_failed
        });
        // A create, a map and an access at least.
        assert!(count >= 3, "{count} calls failed");
    }
}

/// Contents that are dropped need no memory to be resumed into.
#[test]
fn what_is_partly_saved_can_be_dropped_without_room() {
    let world = World::partly_saved();
    let calls = [Call::Create, Call::Map].map(|call| world.driver.calls(call));
    let paused = world.region.pause_and_drop();
    paused.expect("it takes no memory");
    assert_eq!(
        calls,
        [Call::Create, Call::Map].map(|call| world.driver.calls(call))
    );
    assert_eq!(
        (world.state(), world.mapped()),
        (RegionState::Paused, Bytes::ZERO)
    );
    assert_eq!(world.backups().count(), 0);
    world.resume().expect("nothing fails");
    for &(range, _) in &world.held {
        assert!(world.driver.is_usable(range));
    }
    world.end();
}

/// A pause without a backup could not be undone. The next pause saves the contents.
#[test]
fn what_a_drop_could_not_put_back_is_saved_by_the_next_pause() {
    let world = World::new(Some(BackupKind::Host));
    world.driver.fail_unmap_then(2, Call::Map);
    let dropped = world.region.pause_and_drop();
    assert!(matches!(dropped, Err(RegionError::NotUndone { .. })));
    world.driver.set_faults(FaultPlan::none());
    world.pause().expect("nothing fails any more");
    assert_eq!(
        (world.state(), world.mapped()),
        (RegionState::Paused, Bytes::ZERO)
    );
    world.resume().expect("nothing fails any more");
    world.check_contents(false);
    world.end();
}

#[test]
fn blocks_of_what_is_partly_saved_may_go() {
    for is_trimmed in [false, true] {
        let mut world = World::partly_saved();
        let freed: Vec<_> = world
            .held
            .extract_if(.., |(_, value)| *value % 2 == 0)
            .collect();
        assert!(!freed.is_empty() && !world.held.is_empty());
        for (range, _) in freed {
            assert_eq!(world.region.allocator.free(range.address), Ok(()));
        }
        if is_trimmed {
            let trimmed = world.region.memory.trim();
            trimmed.expect("nothing fails");
        }
        world.resume().expect("nothing fails");
        world.check_contents(false);
        world.end();
    }
}

/// A segment that was released before the resume needs no memory. What the pause left of it can be used by others.
#[test]
fn what_a_pause_left_of_a_segment_that_is_gone_makes_room_for_the_others() {
    let driver = TestDriver::new(Bytes::mib(256));
    let config: Config = "direct".parse().expect("there is such a strategy");
    let allocator = allocator(&driver, &config);
    let region = TestRegion::new(1, Some(BackupKind::Host), &driver, &allocator);
    let [gone, kept] = [96, 64].map(|mib| {
        let range = region.allocate(Bytes::mib(mib), Stream(0));
        range.expect("there is room")
    });
    driver.write(kept, 7);
    driver.set_faults(FaultPlan::nth(Call::Release, 1, failed()));
    let paused = region.pause();
    assert!(
        matches!(paused, Err(RegionError::NotReleased { size, .. }) if size >= gone.size),
        "{paused:?}"
    );
    assert_eq!(region.allocator.free(gone.address), Ok(()));
    let other = region.allocator.allocate(Bytes::mib(128), Stream(0));
    other.expect("there is room");
    let waits = driver.calls(Call::SynchronizeDevice);
    region.resume().expect("there is room");
    assert_eq!(driver.calls(Call::SynchronizeDevice), waits);
    assert!(driver.check(kept, 7));
    assert_eq!(driver.violations(), [""; 0]);
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Act {
    Pause,
    Resume,
    Trim,
    /// Trims a paused region.
    TrimPaused,
}

impl World {
    /// Makes some of the next uses of the allocator find no pools: the first if the lowest bit is set, and so on. Also
    /// returns how many did.
    fn act(&self, act: Act, refused: u64) -> (Result<(), RegionError>, u64) {
        let before = self.region.device().refusals();
        self.region.device().refuse(refused);
        let outcome = match act {
            Act::Pause => self.region.pause(),
            Act::Resume => self.region.resume(),
            Act::Trim | Act::TrimPaused => self.region.memory.trim(),
        };
        self.region.device().refuse(0);
        (outcome, self.region.device().refusals() - before)
    }
}

/// Whichever calls to the pools fail: after a resume, or the same call and a resume, the pools serve requests again.
#[test]
fn pools_that_fail_do_not_refuse_requests_for_good() {
    // Each of the first uses of the allocator alone, and the first several together. A driver call is a use, too.
    let refusals = (0..40).map(|nth| 1 << nth).chain(1..16);
    let refusals: Vec<u64> = refusals.collect();
    for act in [Act::Pause, Act::Resume, Act::Trim, Act::TrimPaused] {
        let (mut failures, mut still_paused) = (0, 0);
        for (kind, is_retried) in KINDS
            .into_iter()
            .flat_map(|kind| [(kind, false), (kind, true)])
        {
            for &refused in &refusals {
                let outcome = refuse_and_go_on(act, kind, is_retried, refused);
                failures += u32::from(outcome.is_err());
                still_paused +=
                    u32::from(matches!(outcome, Err(RegionError::PoolsStillPaused { .. })));
            }
        }
        // A region has two pools.
        assert!(failures >= 12, "{act:?}: {failures}");
        assert!(
            act == Act::Trim || still_paused >= 12 || act == Act::Pause,
            "{act:?}: {still_paused}"
        );
    }
}

/// Returns the result of the call whose pools failed.
fn refuse_and_go_on(
    act: Act,
    kind: Option<BackupKind>,
    is_retried: bool,
    refused: u64,
) -> Result<(), RegionError> {
    let mut world = World::new(kind);
    if matches!(act, Act::Resume | Act::TrimPaused) {
        world.pause().expect("nothing fails yet");
    }
    if act == Act::TrimPaused {
        for (range, _) in world.held.drain(..) {
            assert_eq!(world.region.allocator.free(range.address), Ok(()));
        }
    }
    let (outcome, failures) = world.act(act, refused);
    let context = format!("{act:?} {kind:?} {is_retried} {refused:b} {outcome:?}");
    assert!(outcome.is_ok() || failures > 0, "{context}");
    if matches!(outcome, Err(RegionError::PoolsStillPaused { .. })) {
        assert_eq!(world.state(), RegionState::Mapped, "{context}");
        world.check_contents(true);
    }
    if is_retried {
        let (outcome, _) = world.act(act, 0);
        outcome.expect("nothing fails any more");
    }
    world.resume().expect("nothing fails any more");
    assert_eq!(world.state(), RegionState::Mapped, "{context}");
    world.check_contents(true);
    for pool in [world.region.pool, world.region.joined] {
        let range = world.allocator.allocate_in(pool, Bytes::kib(1), Stream(0));
        let range = range.unwrap_or_else(|error| panic!("{context}: {error}"));
        world.held.push((range, 0));
    }
    world.end();
    outcome
}
