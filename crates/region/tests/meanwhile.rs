//! What other threads do at the worst moments of a pause and a resume.

mod common;

use common::{TestBackups, TestDriver, TestRegion, allocator, failed};
use lowtide_core::{AllocError, Bytes, Config, Stream};
use lowtide_region::{
    BackupError, BackupKind, Copies, MemoryRange, Pools, PoolsError, RegionError, RegionState,
};
use lowtide_sim::{Call, FaultPlan};

/// A region's pool, around whose calls another thread does something.
struct Busy<'a> {
    region: &'a TestRegion,
    /// Before the pool is told that its memory is away or back.
    before_set_paused: &'a mut dyn FnMut(&TestRegion),
    after_settle: &'a mut dyn FnMut(&TestRegion),
}

impl Pools for Busy<'_> {
    fn set_paused(&mut self, is_paused: bool) -> Result<(), PoolsError> {
        (self.before_set_paused)(self.region);
        self.region.pools().set_paused(is_paused)
    }

    fn trim_and_list(&mut self) -> Result<Vec<MemoryRange>, PoolsError> {
        let settled = self.region.pools().trim_and_list();
        (self.after_settle)(self.region);
        settled
    }

    fn watch(&mut self, ranges: &[MemoryRange], is_watched: bool) {
        self.region.pools().watch(ranges, is_watched);
    }

    fn notify(&mut self, is_leaving: bool) {
        self.region.pools().notify(is_leaving);
    }
}

fn region(strategy: &str, kind: BackupKind) -> (TestDriver, TestRegion) {
    let driver = TestDriver::new(Bytes::gib(4));
    let config = Config::parse(strategy, "").expect("it is valid");
    let allocator = allocator(&driver, &config);
    let region = TestRegion::new(1, Some(kind), &driver, &allocator);
    (driver, region)
}

/// With strategies whose large blocks go back as soon as they are freed.
#[test]
fn a_block_that_is_freed_while_its_region_is_resumed_is_not_restored() {
    for strategy in ["direct", "buddy", "slab"] {
        let (driver, region) = region(strategy, BackupKind::Host);
        let mut backups = TestBackups::new(&driver);
        let allocate = |value| {
            let range = region.allocate(Bytes::mib(40), Stream(0));
            let range = range.expect("there is room");
            driver.write(range, value);
            range
        };
        let (kept, freed) = (allocate(1), allocate(2));
        region.pause(&mut backups).expect("nothing fails");
        let mut busy = Busy {
            region: &region,
            before_set_paused: &mut |_| {},
            after_settle: &mut |region| {
                assert_eq!(region.lane().free(freed.address), Ok(()));
            },
        };
        let resumed = region.memory.resume(&mut busy, &mut backups);
        resumed.expect("nothing fails");
        assert!(driver.check(kept, 1), "{strategy}");
        assert_eq!(driver.wrongs(), [""; 0]);
    }
}

/// Its piece may have left by then, and comes back with no segment. Each step of the backup saves two blocks.
#[test]
fn a_pause_that_fails_is_undone_without_what_was_freed_meanwhile() {
    for (strategy, steps_before) in [("direct", 1), ("direct", 2), ("buddy", 3), ("slab", 2)] {
        let (driver, region) = region(strategy, BackupKind::Host);
        let mut backups = TestBackups::new(&driver);
        let blocks = [1, 2, 3, 4, 5, 6, 7, 8].map(|value| {
            let range = region.allocate(Bytes::mib(40), Stream(0));
            let range = range.expect("there is room");
            driver.write(range, value);
            (range, value)
        });
        let [(freed, _), kept @ ..] = blocks;
        // Its beginning is a call, too.
        backups.fails_in = Some(1 + steps_before);
        let mut busy = Busy {
            region: &region,
            before_set_paused: &mut |_| {},
            after_settle: &mut |region| {
                assert_eq!(region.lane().free(freed.address), Ok(()));
            },
        };
        let paused = region.memory.pause(&mut busy, &mut backups);
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
        assert_eq!(backups.count(), 0);
        assert_eq!(driver.wrongs(), [""; 0]);
    }
}

#[test]
fn a_request_meets_a_region_that_serves_it_or_says_that_it_is_paused() {
    let (driver, region) = region("caching", BackupKind::Host);
    let mut backups = TestBackups::new(&driver);
    let mut answers = Vec::new();
    let mut request = |region: &TestRegion| {
        answers.push(region.allocate(Bytes::mib(40), Stream(0)).map(drop));
    };
    let mut pause_and_resume = || -> Result<(), RegionError> {
        let mut busy = Busy {
            region: &region,
            before_set_paused: &mut request,
            after_settle: &mut |_| {},
        };
        region.memory.pause(&mut busy, &mut backups)?;
        region.memory.resume(&mut busy, &mut backups)
    };
    pause_and_resume().expect("nothing fails");
    let paused = AllocError::Paused {
        region: "kv".into(),
    };
    assert_eq!(answers, [Ok(()), Err(paused)]);
}

/// The thread that gives the last segment back holds the lock of the pools, and no backups to give the copy to.
#[test]
fn a_retained_copy_outlives_the_last_segment_until_someone_has_the_backups() {
    // What the driver refuses to take back then has no contents.
    let refused = [Call::Release, Call::Unreserve].map(|call| FaultPlan::nth(call, 1, failed()));
    for faults in refused.into_iter().chain([FaultPlan::none()]) {
        outlive_the_last_segment(faults);
    }
}

fn outlive_the_last_segment(faults: FaultPlan) {
    let (driver, region) = region("caching", BackupKind::Host);
    let mut backups = TestBackups::new(&driver);
    backups.retains = true;
    let range = region.allocate(Bytes::mib(4), Stream(1)).expect("room");
    region.pause(&mut backups).expect("nothing fails");
    region.resume(&mut backups).expect("nothing fails");
    region.lane().free(range.address).expect("it is held");
    driver.set_faults(faults);
    region.lane().empty_cache().expect("nothing fails");
    assert_eq!((backups.count(), backups.discards), (1, 0));
    assert_eq!(region.memory.figures().expect("no panic").host, Bytes::ZERO);
    // It is nobody's copy, not even that of a block at the same address.
    let later = region.allocate(Bytes::mib(4), Stream(1)).expect("room");
    assert_eq!(region.memory.host_copy(later).expect("no panic"), None);
    let released = region
        .memory
        .release_retained(Copies::Ended, &mut region.pools(), &mut backups);
    released.expect("no panic");
    assert_eq!((backups.count(), backups.discards), (0, 1));
}

/// A copy ends with its block, whatever lies at the address later.
#[test]
fn what_is_handed_out_where_a_copy_is_of_is_noted() {
    let (driver, region) = region("caching", BackupKind::Host);
    let mut backups = TestBackups::new(&driver);
    backups.retains = true;
    let [one, other] = [0, 1].map(|_| region.allocate(Bytes::mib(4), Stream(1)).expect("room"));
    region.pause(&mut backups).expect("nothing fails");
    assert!(!region.lane().lane().is_watched(one.address));
    region.resume(&mut backups).expect("nothing fails");
    region.lane().free(one.address).expect("it is held");
    let later = region.allocate(Bytes::mib(4), Stream(1)).expect("room");
    assert_eq!(later, one, "the address is used again");
    let is_watched = [one, other].map(|range| region.lane().lane().is_watched(range.address));
    assert_eq!(is_watched, [false, true]);
    region.pause(&mut backups).expect("nothing fails");
    region.resume(&mut backups).expect("nothing fails");
    assert!(region.lane().lane().is_watched(one.address));
    let pools = &mut region.pools();
    let released = region
        .memory
        .release_retained(Copies::All, pools, &mut backups);
    released.expect("no panic");
    assert!(!region.lane().lane().is_watched(one.address));
}
