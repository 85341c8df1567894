//! What is given back where memory is short, before a region is paused or resumed a second time.

mod common;

use std::sync::Arc;

use common::{Allocator, TestBackups, TestDevice, TestDriver, TestRegion, allocator};
use lowtide_core::{Bytes, Config, Stream};
use lowtide_region::{BackupKind, Change, MemoryRange, RegionError, RegionMemory, RegionState};

const BLOCK: Bytes = Bytes::mib(40);

/// Two regions of one device, a block in each.
struct World {
    driver: TestDriver,
    allocator: Allocator,
    regions: [TestRegion; 2],
    blocks: [MemoryRange; 2],
    backups: TestBackups,
}

impl World {
    fn new() -> World {
        let driver = TestDriver::new(Bytes::mib(128));
        let allocator = allocator(&driver, &Config::default());
        let kind = Some(BackupKind::Host);
        let regions = [1, 2].map(|number| TestRegion::new(number, kind, &driver, &allocator));
        let allocate = |region: &TestRegion| region.allocate(BLOCK, Stream(0));
        let blocks = [0, 1].map(|index| allocate(&regions[index]).expect("there is room"));
        for (value, block) in (1..).zip(blocks) {
            driver.write(block, value);
        }
        World {
            backups: TestBackups::new(&driver),
            driver,
            allocator,
            regions,
            blocks,
        }
    }

    fn change(&mut self, change: Change, index: usize) -> Result<(), RegionError> {
        let memories = self.regions.iter().map(|region| Arc::clone(&region.memory));
        let memories: Vec<Arc<RegionMemory<TestDevice, TestBackups>>> = memories.collect();
        change.apply(&memories[index], &memories, &mut self.backups)
    }

    fn state(&self, index: usize) -> RegionState {
        let state = self.regions[index].memory.state();
        state.expect("no call panics")
    }

    /// Returns a world whose first region has a copy that is retained, and in which the next backup finds too little of
    /// the host's memory.
    fn short_of_host() -> World {
        let mut world = World::new();
        world.backups.retains = true;
        for change in [Change::Pause, Change::Resume] {
            world.change(change, 0).expect("nothing fails");
        }
        assert_eq!(world.backups.count(), 1);
        world.backups.is_short_of_host = true;
        world.backups.fails_in = Some(0);
        world
    }

    /// Caches memory that a region needs.
    fn cache(&self) {
        let address = self.allocator.allocate(Bytes::mib(80), Stream(0));
        let freed = self.allocator.free(address.expect("there is room"));
        freed.expect("it is held");
    }
}

#[test]
fn copies_of_other_regions_go_where_the_host_is_short() {
    let mut world = World::short_of_host();
    let paused = world.change(Change::Pause, 1);
    paused.expect("the second attempt has memory");
    assert_eq!(world.backups.failures, 1);
    assert_eq!(
        (world.state(0), world.state(1)),
        (RegionState::Mapped, RegionState::Paused)
    );
    assert_eq!(world.regions[0].host_copy(world.blocks[0]), None);
    world.change(Change::Resume, 1).expect("nothing fails");
    assert!(world.driver.check(world.blocks[1], 2));
}

#[test]
fn a_copy_that_someone_may_read_stays() {
    let mut world = World::short_of_host();
    world.backups.more_failures = 1;
    assert!(world.regions[0].host_copy(world.blocks[0]).is_some());
    let paused = world.change(Change::Pause, 1);
    let error = paused.expect_err("both attempts fail");
    assert!(error.is_short_of_host(), "{error}");
    assert_eq!(world.backups.failures, 2);
    assert_eq!(world.state(1), RegionState::Mapped);
    assert!(world.regions[0].host_copy(world.blocks[0]).is_some());
}

#[test]
fn what_is_cached_goes_where_the_device_is_short() {
    let mut world = World::new();
    for index in [0, 1] {
        world.change(Change::Pause, index).expect("nothing fails");
    }
    world.cache();
    let resumed = world.regions[0].memory.resume(&mut world.backups);
    resumed.expect("it fits beside that");
    let refused = world.regions[1].memory.resume(&mut world.backups);
    assert!(
        matches!(refused, Err(RegionError::NoRoom { .. })),
        "{refused:?}"
    );
    world
        .change(Change::Resume, 1)
        .expect("what is cached goes");
    for (value, block) in (1..).zip(world.blocks) {
        assert!(world.driver.check(block, value));
    }
}

/// Another failure is the answer at once.
#[test]
fn nothing_else_is_tried_again() {
    let mut world = World::short_of_host();
    world.backups.is_short_of_host = false;
    let paused = world.change(Change::Pause, 1);
    assert!(matches!(paused, Err(RegionError::Backup(_))), "{paused:?}");
    assert_eq!((world.backups.failures, world.backups.count()), (1, 1));
}
