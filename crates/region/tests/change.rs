//! Pauses and resumes several regions: on several devices at once, and again if memory is short.

mod common;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use common::{TestDevice, TestDriver, TestRegion, allocator_of};
use lowtide_core::{Bytes, Config, Stream};
use lowtide_region::{
    BackupKind, Change, ChangeError, Copies, Device, MemoryRange, RegionError, RegionMemory,
    RegionState, release_copies,
};

const BLOCK: Bytes = Bytes::mib(40);

type Memories = Vec<Arc<RegionMemory<TestDevice>>>;

/// Two regions with a block in each, on one device or on two.
struct World {
    regions: [TestRegion; 2],
    drivers: [TestDriver; 2],
    blocks: [MemoryRange; 2],
}

impl World {
    fn on_one_device() -> World {
        let driver = TestDriver::new(Bytes::mib(128));
        let allocator = allocator_of(0, &driver, &Config::default());
        let kind = Some(BackupKind::Host);
        let regions = [1, 2].map(|number| TestRegion::new(number, kind, &driver, &allocator));
        World::with(regions, [driver.clone(), driver])
    }

    fn on_two_devices() -> World {
        let drivers = [0, 1].map(|_| TestDriver::new(Bytes::mib(128)));
        let regions = [0, 1].map(|device| {
            let driver = &drivers[usize::from(device)];
            let allocator = allocator_of(device, driver, &Config::default());
            TestRegion::new(1, Some(BackupKind::Host), driver, &allocator)
        });
        World::with(regions, drivers)
    }

    fn with(regions: [TestRegion; 2], drivers: [TestDriver; 2]) -> World {
        let blocks = [0, 1].map(|index: usize| {
            let block = regions[index].allocate(BLOCK, Stream(0));
            let block = block.expect("there is room");
            drivers[index].write(block, index as u64);
            block
        });
        World {
            regions,
            drivers,
            blocks,
        }
    }

    fn memories(&self) -> Memories {
        let regions = self.regions.iter();
        regions.map(|region| Arc::clone(&region.memory)).collect()
    }

    fn change(&self, change: Change, index: usize) -> Result<(), ChangeError<TestDevice>> {
        let is_chosen = |region: &_| self.is(index, region);
        change.apply(&self.memories(), is_chosen)
    }

    fn change_both(&self, change: Change) -> Result<(), ChangeError<TestDevice>> {
        change.apply(&self.memories(), |_| true)
    }

    fn is(&self, index: usize, region: &RegionMemory<TestDevice>) -> bool {
        std::ptr::eq(&raw const *self.regions[index].memory, region)
    }

    fn states(&self) -> [RegionState; 2] {
        [0, 1].map(|index: usize| {
            let state = self.regions[index].memory.state();
            state.expect("no call panics")
        })
    }

    fn check_contents(&self) {
        for (index, &block) in self.blocks.iter().enumerate() {
            assert!(self.drivers[index].check(block, index as u64));
            assert_eq!(self.drivers[index].violations(), [""; 0]);
        }
    }

    /// Pauses and resumes the first region, whose copy is retained. Then makes calls to the second region's backups fail so
    /// many times for lack of host memory.
    fn make_host_short(&self, failures: u64) {
        self.regions[0].backups().retains = true;
        for change in [Change::Pause, Change::Resume] {
            self.change(change, 0).expect("nothing fails");
        }
        assert_eq!(self.regions[0].backups().count(), 1);
        let mut backups = self.regions[1].backups();
        backups.is_out_of_host_memory = true;
        backups.fails_in = Some(0);
        backups.more_failures = failures - 1;
    }

    /// Caches memory that a resume needs.
    fn cache(&self) {
        let allocator = &self.regions[0].allocator;
        let address = allocator.allocate(Bytes::mib(80), Stream(0));
        let freed = allocator.free(address.expect("there is room"));
        freed.expect("it is held");
    }
}

#[test]
fn copies_of_other_regions_go_where_the_host_is_short() {
    let world = World::on_one_device();
    world.make_host_short(1);
    let paused = world.change(Change::Pause, 1);
    paused.expect("the second attempt has memory");
    assert_eq!(world.regions[1].backups().failures, 1);
    assert_eq!(world.states(), [RegionState::Mapped, RegionState::Paused]);
    assert_eq!(world.regions[0].host_copy(world.blocks[0]), None);
    world.change(Change::Resume, 1).expect("nothing fails");
    world.check_contents();
}

/// Copies of the same device are released first, then those of every device, with the memory that is kept.
#[test]
fn copies_of_other_devices_go_where_the_host_is_short() {
    let world = World::on_two_devices();
    world.make_host_short(2);
    let paused = world.change(Change::Pause, 1);
    paused.expect("the third attempt has memory");
    assert_eq!(world.regions[1].backups().failures, 2);
    assert_eq!(world.states(), [RegionState::Mapped, RegionState::Paused]);
    assert_eq!(world.regions[0].host_copy(world.blocks[0]), None);
    for region in &world.regions {
        assert_eq!(region.backups().releases, 1);
    }
    world.change(Change::Resume, 1).expect("nothing fails");
    world.check_contents();
}

#[test]
fn a_copy_that_someone_may_read_stays() {
    // Two attempts for the device, and two after copies were released everywhere.
    for (world, device) in [(World::on_one_device(), 0), (World::on_two_devices(), 1)] {
        world.make_host_short(4);
        assert!(world.regions[0].host_copy(world.blocks[0]).is_some());
        let paused = world.change(Change::Pause, 1);
        let failure = paused.expect_err("all attempts fail");
        assert!(failure.error.is_out_of_host_memory(), "{failure:?}");
        assert_eq!(failure.region.device().number(), device);
        assert_eq!(world.regions[1].backups().failures, 4);
        assert_eq!(world.states(), [RegionState::Mapped; 2]);
        assert!(world.regions[0].host_copy(world.blocks[0]).is_some());
    }
}

#[test]
fn what_is_cached_goes_where_the_device_is_short() {
    let world = World::on_one_device();
    world.change_both(Change::Pause).expect("nothing fails");
    world.cache();
    world.regions[0].resume().expect("it fits beside that");
    let refused = world.regions[1].resume();
    assert!(
        matches!(refused, Err(RegionError::NoRoom { .. })),
        "{refused:?}"
    );
    let resumed = world.change(Change::Resume, 1);
    resumed.expect("what is cached goes");
    world.check_contents();
}

/// Other failures are returned at once.
#[test]
fn nothing_else_is_tried_again() {
    let world = World::on_one_device();
    world.make_host_short(1);
    world.regions[1].backups().is_out_of_host_memory = false;
    let failure = world.change(Change::Pause, 1).expect_err("it fails");
    assert!(
        matches!(failure.error, RegionError::Backup(_)),
        "{failure:?}"
    );
    let backups = world.regions[1].backups();
    assert_eq!((backups.failures, backups.count()), (1, 1));
}

/// Whichever device fails, its failure is returned.
#[test]
fn a_device_that_fails_keeps_the_other_from_nothing() {
    let (mapped, paused) = (RegionState::Mapped, RegionState::Paused);
    for (failing, states) in [(0, [mapped, paused]), (1, [paused, mapped])] {
        let world = World::on_two_devices();
        world.regions[failing].backups().fails_in = Some(0);
        let failure = world.change_both(Change::Pause).expect_err("one fails");
        assert!(world.is(failing, &failure.region), "{failure:?}");
        assert!(matches!(failure.error, RegionError::Backup(_)));
        assert_eq!(world.states(), states);
        world.change_both(Change::Pause).expect("nothing fails");
        assert_eq!(world.states(), [paused; 2]);

        world.regions[failing].backups().fails_in = Some(0);
        let failure = world.change_both(Change::Resume).expect_err("one fails");
        assert!(world.is(failing, &failure.region), "{failure:?}");
        assert_eq!(world.states(), [states[1], states[0]]);
        world.change_both(Change::Resume).expect("nothing fails");
        assert_eq!(world.states(), [mapped; 2]);
        world.check_contents();
    }
}

#[test]
fn the_answer_is_the_failure_of_the_first_device() {
    for is_reversed in [false, true] {
        let world = World::on_two_devices();
        for region in &world.regions {
            region.backups().fails_in = Some(0);
        }
        let mut memories = world.memories();
        if is_reversed {
            memories.reverse();
        }
        let paused = Change::Pause.apply(&memories, |_| true);
        let failure = paused.expect_err("both fail");
        assert!(world.is(0, &failure.region), "{failure:?}");
        assert_eq!(world.states(), [RegionState::Mapped; 2]);
    }
}

/// Each device waits for the other in the middle of its change.
#[test]
fn devices_are_changed_at_the_same_time() {
    let world = World::on_two_devices();
    for (change, is_leaving) in [(Change::Pause, true), (Change::Resume, false)] {
        let (to_first, first) = mpsc::channel();
        let (to_second, second) = mpsc::channel();
        let ends = [(to_second, first), (to_first, second)];
        for (region, (other, own)) in world.regions.iter().zip(ends) {
            region.device().when_notified(is_leaving, move || {
                other.send(()).expect("the other device is there");
                let met = own.recv_timeout(Duration::from_secs(60));
                met.expect("the other device is changed, too");
            });
        }
        world.change_both(change).expect("nothing fails");
    }
    world.check_contents();
}

#[test]
fn a_panic_stops_its_device_alone() {
    let world = World::on_two_devices();
    world.regions[1]
        .device()
        .when_notified(true, || panic!("it was to panic"));
    for _ in 0..2 {
        let failure = world.change_both(Change::Pause).expect_err("one panics");
        assert!(world.is(1, &failure.region), "{failure:?}");
        assert!(matches!(failure.error, RegionError::Poisoned));
        let state = world.regions[0].memory.state();
        assert_eq!(state.expect("this one did not"), RegionState::Paused);
    }
    assert!(release_copies(&world.memories(), Copies::All).is_err());
}

/// The sum over the regions of a device, although one failed.
#[test]
fn a_device_learns_how_much_has_moved() {
    let world = World::on_one_device();
    let mapped = |index: usize| {
        let figures = world.regions[index].memory.figures();
        figures.expect("no call panics").mapped
    };
    let moved = || {
        let regions = world.regions.iter();
        regions.map(|region| region.device().moved()).sum::<Bytes>()
    };
    let [first, second] = [0, 1].map(mapped);
    world.regions[0].backups().fails_in = Some(0);
    let paused = world.change_both(Change::Pause);
    paused.expect_err("the first fails");
    assert_eq!(moved(), second);
    world.change(Change::Pause, 0).expect("nothing fails");
    assert_eq!(moved(), first + second);
    world.change_both(Change::Resume).expect("nothing fails");
    assert_eq!(moved(), first + second + mapped(0) + mapped(1));
}
