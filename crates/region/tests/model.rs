//! Random programs over four regions on two devices, each with a shadow model of what the program holds. After every
//! step, states, contents, addresses and the memory of the devices are checked, whatever failed.
//!
//! A change of several regions has a thread for each device. The tests of the C interface have other threads.

mod common;

use std::ptr;
use std::sync::Arc;

use common::{Allocator, TestDevice, TestDriver, TestRegion, allocator_of, failed};
use lowtide_core::{AllocError, Bytes, CheckLevel, DriverError, SegmentSnapshot, Stream};
use lowtide_region::{
    BackupKind, Change, ChangeError, Copies, MemoryRange, RegionError, RegionMemory, RegionState,
    release_copies,
};
use lowtide_sim::program::configs;
use lowtide_sim::{Call, FaultPlan};
use proptest::prelude::*;

/// The memory of each device: little, so that programs run out of it.
const CAPACITIES: [Bytes; 2] = [Bytes::mib(256), Bytes::mib(96)];

/// Where each region's contents are kept.
const KINDS: [Option<BackupKind>; REGIONS] = [
    Some(BackupKind::Host),
    Some(BackupKind::Disk),
    None,
    Some(BackupKind::Host),
];
const REGIONS: usize = 4;

/// The device of each region, and then the devices of blocks in no region.
const DEVICES: [usize; REGIONS + 2] = [0, 0, 0, 1, 0, 1];

/// The unit of memory, to which segments are rounded.
const GRANULARITY: Bytes = Bytes::mib(2);

#[derive(Clone, Debug)]
enum Op {
    /// In a region, in its own pool or one that joined it. For the last two numbers, in no region.
    Allocate {
        region: usize,
        is_joined: bool,
        size: Bytes,
        stream: Stream,
    },
    Free(usize),
    /// Starts work that uses a block, and writes the block.
    Launch(usize),
    Pause(usize),
    Resume(usize),
    /// Changes one region, or all at once, with further attempts if memory is short.
    Change(Change, Option<usize>),
    Trim(usize),
    EmptyCache,
    /// Makes the n-th driver call of the next step fail, of any kind or of one kind.
    Fail(u64, Option<Call>, DriverError),
    /// Makes some driver calls of the next step fail.
    FailAtRandom(u64),
    /// Has a later call to the backups fail in the next step, and some after it, perhaps as the host has too little memory.
    FailBackup(u64, u64, bool),
    /// Makes a use of the allocator by regions find no pools in the next step.
    FailPools(u64),
    /// Sets whether backups in host memory are retained after a resume.
    Retain(bool),
    /// Releases the copy of one region, or all copies that the program does not read.
    ReleaseCopies(Option<usize>),
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![
        2 => (1..1_u64 << 20).prop_map(Bytes),
        3 => (1..1_u64 << 24).prop_map(Bytes),
        1 => (1..1_u64 << 26).prop_map(Bytes),
    ];
    let stream = (0..3_u64).prop_map(Stream);
    let calls = [
        Call::Create,
        Call::Map,
        Call::SetAccess,
        Call::Unmap,
        Call::Release,
    ];
    let call = prop::option::of(prop::sample::select(calls.to_vec()));
    let changes = [
        Change::Pause,
        Change::PauseAndDrop,
        Change::Resume,
        Change::Resume,
    ];
    let change = prop::sample::select(changes.to_vec());
    let chosen = prop::option::of(0..REGIONS);
    let error = prop_oneof![Just(DriverError::OutOfMemory), Just(failed())];
    prop_oneof![
        30 => (0..DEVICES.len(), prop::bool::weighted(0.2), size, stream).prop_map(
            |(region, is_joined, size, stream)| Op::Allocate { region, is_joined, size, stream }
        ),
        18 => any::<usize>().prop_map(Op::Free),
        10 => any::<usize>().prop_map(Op::Launch),
        11 => (0..REGIONS).prop_map(Op::Pause),
        11 => (0..REGIONS).prop_map(Op::Resume),
        9 => (change, chosen.clone()).prop_map(|(change, chosen)| Op::Change(change, chosen)),
        3 => (0..REGIONS).prop_map(Op::Trim),
        2 => Just(Op::EmptyCache),
        8 => (1..12_u64, call, error).prop_map(|(nth, call, error)| Op::Fail(nth, call, error)),
        3 => any::<u64>().prop_map(Op::FailAtRandom),
        3 => (0..5_u64, 0..3_u64, any::<bool>())
            .prop_map(|(after, more, is_short)| Op::FailBackup(after, more, is_short)),
        3 => (0..12_u64).prop_map(Op::FailPools),
        3 => any::<bool>().prop_map(Op::Retain),
        2 => chosen.prop_map(Op::ReleaseCopies),
    ]
}

/// A block that the program holds.
#[derive(Debug)]
struct Held {
    range: MemoryRange,
    /// An index into [`DEVICES`].
    region: usize,
    stream: Stream,
    /// What was written; `None` if that is lost.
    value: Option<u64>,
}

struct World {
    drivers: [TestDriver; 2],
    allocators: [Allocator; 2],
    regions: [TestRegion; REGIONS],
    states: [RegionState; REGIONS],
    /// Whether each region may refuse requests while it is mapped, because a call to its pools failed.
    may_refuse: [bool; REGIONS],
    /// How often each region found no pools before this step.
    refusals: [u64; REGIONS],
    /// Whether each region's last pause failed and left it paused: its copy may be partial.
    may_be_partial: [bool; REGIONS],
    /// Whether each region's last pause may have dropped its contents.
    may_be_dropped: [bool; REGIONS],
    held: Vec<Held>,
    last_value: u64,
    is_failing: bool,
}

impl World {
    fn new(config: usize) -> World {
        let configs = configs();
        let config = &configs[config % configs.len()];
        let drivers = CAPACITIES.map(TestDriver::new);
        let allocators = [0, 1].map(|device: u8| {
            let driver = &drivers[usize::from(device)];
            allocator_of(device, driver, config)
        });
        let regions = [0, 1, 2, 3].map(|index: usize| {
            let (driver, allocator) = (&drivers[DEVICES[index]], &allocators[DEVICES[index]]);
            TestRegion::new(index as u64 + 1, KINDS[index], driver, allocator)
        });
        World {
            drivers,
            allocators,
            regions,
            states: [RegionState::Mapped; REGIONS],
            may_refuse: [false; REGIONS],
            refusals: [0; REGIONS],
            may_be_partial: [false; REGIONS],
            may_be_dropped: [false; REGIONS],
            held: Vec::new(),
            last_value: 0,
            is_failing: false,
        }
    }

    fn step(&mut self, op: &Op) {
        let was_failing = self.is_failing;
        self.refusals = [0, 1, 2, 3].map(|number| self.regions[number].device().refusals());
        match op {
            Op::Allocate {
                region,
                is_joined,
                size,
                stream,
            } => self.allocate(*region, *is_joined, *size, *stream),
            Op::Free(index) => self.free(*index),
            Op::Launch(index) => {
                if !self.held.is_empty() {
                    let index = index % self.held.len();
                    self.write(index);
                }
            }
            Op::Pause(region) => self.pause(*region),
            Op::Resume(region) => self.resume(*region),
            Op::Change(change, chosen) => self.change(*change, *chosen),
            Op::Trim(region) => self.trim(*region),
            Op::EmptyCache => {
                for allocator in &self.allocators {
                    let emptied = allocator.empty_cache();
                    assert!(emptied.is_ok() || was_failing);
                }
            }
            Op::Fail(nth, call, error) => {
                let error = error.clone();
                self.fail(|| match call {
                    Some(call) => FaultPlan::nth(*call, *nth, error.clone()),
                    None => FaultPlan::nth_of_any(*nth, error.clone()),
                });
            }
            Op::FailAtRandom(seed) => self.fail(|| FaultPlan::random(*seed, 3, failed())),
            Op::FailBackup(after, more, is_short) => {
                for allocator in &self.allocators {
                    let mut backups = allocator.backups();
                    backups.fails_in = Some(*after);
                    backups.more_failures = *more;
                    backups.is_out_of_host_memory = *is_short;
                }
                self.is_failing = true;
            }
            Op::FailPools(after) => {
                for region in &self.regions {
                    region.device().refuse(1 << *after);
                }
                self.is_failing = true;
            }
            Op::Retain(retains) => {
                for allocator in &self.allocators {
                    allocator.backups().retains = *retains;
                }
            }
            Op::ReleaseCopies(chosen) => {
                let released = match chosen {
                    Some(number) => self.regions[*number].release_copy(Copies::All),
                    None => release_copies(&self.memories(), Copies::Unread),
                };
                released.expect("no call panics");
            }
        }
        if was_failing {
            self.fail_no_more();
        }
        if !self.is_failing {
            self.check();
        }
    }

    fn fail(&mut self, faults: impl Fn() -> FaultPlan) {
        for driver in &self.drivers {
            driver.set_faults(faults());
        }
        self.is_failing = true;
    }

    fn fail_no_more(&mut self) {
        for (driver, allocator) in self.drivers.iter().zip(&self.allocators) {
            driver.set_faults(FaultPlan::none());
            let mut backups = allocator.backups();
            backups.fails_in = None;
            backups.more_failures = 0;
        }
        for region in &self.regions {
            region.device().refuse(0);
        }
        self.is_failing = false;
    }

    fn allocate(&mut self, region: usize, is_joined: bool, size: Bytes, stream: Stream) {
        let device = DEVICES[region];
        let allocated = match self.regions.get(region) {
            Some(region) if is_joined => region.allocator.allocate_in(region.joined, size, stream),
            Some(region) => region.allocate(size, stream),
            None => {
                let address = self.allocators[device].allocate(size, stream);
                address.map(|address| MemoryRange { address, size })
            }
        };
        let is_away = self.states.get(region) == Some(&RegionState::Paused);
        match allocated {
            Ok(range) => {
                assert!(!is_away, "{range:?} is handed out");
                self.drivers[device].give(range, stream);
                self.held.push(Held {
                    range,
                    region,
                    stream,
                    value: None,
                });
                self.write(self.held.len() - 1);
            }
            Err(AllocError::Paused { .. }) => assert!(is_away || self.may_refuse[region]),
            Err(error) => {
                assert!(!is_away, "{error}");
                assert!(error.is_out_of_memory() || self.is_failing, "{error}");
            }
        }
    }

    /// Writes a block in its stream, if it is in a mapped region.
    fn write(&mut self, index: usize) {
        let held = &mut self.held[index];
        if self.states.get(held.region) == Some(&RegionState::Mapped) {
            self.last_value += 1;
            held.value = Some(self.last_value);
            let driver = &self.drivers[DEVICES[held.region]];
            driver.launch(held.range, held.stream);
            driver.write(held.range, self.last_value);
        }
    }

    fn free(&mut self, index: usize) {
        if self.held.is_empty() {
            return;
        }
        let index = index % self.held.len();
        let held = &self.held[index];
        let freed = self.allocators[DEVICES[held.region]].free(held.range.address);
        assert!(freed.is_ok() || self.is_failing, "{freed:?}");
        if freed.is_ok() {
            self.held.swap_remove(index);
        }
    }

    fn pause(&mut self, number: usize) {
        let before = self.states[number];
        // A partly saved region is resumed first.
        let may_be_mapped = before == RegionState::Mapped || self.may_be_partial[number];
        let region = &self.regions[number];
        let paused = region.pause();
        let state = region.memory.state().expect("no call panics");
        match &paused {
            Ok(()) => {
                assert_eq!(state, RegionState::Paused);
                self.may_be_partial[number] &= before == RegionState::Paused;
                self.may_be_dropped[number] &= before == RegionState::Paused;
            }
            Err(RegionError::NoRoom { needed, free }) => {
                assert!(self.may_be_partial[number]);
                assert_eq!((before, state), (RegionState::Paused, before));
                assert!(needed > free || self.is_failing, "{needed} {free}");
            }
            Err(RegionError::PoolsStillPaused { .. }) => {
                assert!(self.is_failing && self.may_be_partial[number]);
                assert_eq!(state, RegionState::Mapped);
                self.may_refuse[number] = true;
            }
            Err(error) => {
                assert!(self.is_failing, "{error}");
                self.may_be_partial[number] |= matches!(error, RegionError::NotUndone { .. });
                let may_be_away = before == RegionState::Paused || error.is_paused();
                match state {
                    RegionState::Paused => assert!(may_be_away, "{error}"),
                    _ => assert!(may_be_mapped && !error.is_paused(), "{error}"),
                }
            }
        }
        if paused.is_ok() {
            let mapped = region.memory.figures().expect("no call panics").mapped;
            assert_eq!(mapped, Bytes::ZERO, "all of it is gone");
        }
        if state == RegionState::Paused && region.kind.is_none() {
            self.lose(number);
        }
        self.states[number] = state;
    }

    /// Forgets the contents of a region's blocks.
    fn lose(&mut self, number: usize) {
        let lost = self.held.iter_mut().filter(|held| held.region == number);
        lost.for_each(|held| held.value = None);
    }

    fn memories(&self) -> Vec<Arc<RegionMemory<TestDevice>>> {
        let regions = self.regions.iter();
        regions.map(|region| Arc::clone(&region.memory)).collect()
    }

    fn change(&mut self, change: Change, chosen: Option<usize>) {
        let before = self.states;
        let memories = self.memories();
        let is_chosen = |memory: &RegionMemory<TestDevice>| {
            chosen.is_none_or(|number| ptr::eq(memory, &raw const *memories[number]))
        };
        let changed = change.apply(&memories, is_chosen);
        if let Err(ChangeError { region, error }) = &changed {
            assert!(is_chosen(region));
            let is_short_of_device = matches!(error, RegionError::NoRoom { .. });
            assert!(is_short_of_device || self.is_failing, "{error}");
        }
        for number in (0..REGIONS).filter(|&number| chosen.is_none_or(|one| one == number)) {
            self.check_changed(change, number, before[number], changed.is_ok());
        }
    }

    /// Checks a region after a change. Unless the change is done, this region may be one that failed.
    fn check_changed(&mut self, change: Change, number: usize, before: RegionState, is_done: bool) {
        let region = &self.regions[number];
        let figures = region.memory.figures().expect("no call panics");
        let state = figures.state;
        let may_be_mapped = before == RegionState::Mapped || self.may_be_partial[number];
        let is_expected = match (change, state) {
            (Change::Resume, RegionState::Mapped) => true,
            (Change::Resume, RegionState::Paused) => !is_done && before == RegionState::Paused,
            (_, RegionState::Mapped) => !is_done && may_be_mapped && self.is_failing,
            (_, RegionState::Paused) => true,
            (_, RegionState::Pausing | RegionState::Resuming) => false,
        };
        assert!(is_expected, "{change:?} {before:?} {state:?}");
        match change {
            Change::Resume if is_done => {
                self.may_refuse[number] = false;
                if !self.is_failing {
                    self.check_retained(number, before);
                }
            }
            Change::Resume => self.may_refuse[number] |= self.is_failing,
            Change::Pause | Change::PauseAndDrop => {
                let keeps = change == Change::Pause && region.kind.is_some();
                if state == RegionState::Paused && may_be_mapped && !keeps {
                    self.lose(number);
                }
                if is_done {
                    assert_eq!(figures.mapped, Bytes::ZERO, "all of it is gone");
                    self.may_be_partial[number] &= before == RegionState::Paused;
                    self.may_be_dropped[number] &= before == RegionState::Paused;
                } else {
                    self.may_be_partial[number] |= self.is_failing;
                    self.may_refuse[number] |= self.is_failing;
                }
                self.may_be_dropped[number] |= change == Change::PauseAndDrop;
            }
        }
        self.states[number] = state;
    }

    fn resume(&mut self, number: usize) {
        let before = self.states[number];
        let region = &self.regions[number];
        let figures = || region.memory.figures().expect("no call panics");
        // These calls would take the failure that is meant for the resume.
        let expected = (!self.is_failing).then(|| {
            let needed = region.memory.needed_to_resume();
            (needed.expect("no call panics"), figures().mapped)
        });
        let resumed = region.resume();
        let state = region.memory.state().expect("no call panics");
        match resumed {
            Ok(()) => {
                assert_eq!(state, RegionState::Mapped);
                if let Some((needed, Bytes::ZERO)) = expected {
                    assert_eq!(figures().mapped, needed, "nothing of it was there");
                }
                self.may_refuse[number] = false;
                self.check_retained(number, before);
            }
            Err(RegionError::PoolsStillPaused { .. }) => {
                assert!(self.is_failing);
                assert_eq!(state, RegionState::Mapped);
                self.may_refuse[number] = true;
                self.check_retained(number, before);
            }
            Err(RegionError::NoRoom { needed, free }) => {
                assert_eq!(state, before);
                assert!(needed > free || self.is_failing, "{needed} {free}");
                assert!(expected.is_none_or(|(expected, _)| expected == needed));
            }
            Err(error) => {
                assert!(self.is_failing, "{error}");
                assert_eq!(state, before, "{error}");
            }
        }
        self.states[number] = state;
    }

    fn trim(&mut self, number: usize) {
        let region = &self.regions[number];
        let figures = || region.memory.figures().expect("no call panics");
        let driver = &self.drivers[DEVICES[number]];
        let before = (figures().mapped, driver.physical_bytes());
        let trimmed = region.memory.trim();
        assert!(trimmed.is_ok() || self.is_failing, "{trimmed:?}");
        let figures = figures();
        let given_back = before.0 - figures.mapped;
        assert_eq!(before.1 - driver.physical_bytes(), given_back);
        let has_held = self.held.iter().any(|held| held.region == number);
        // Free segments of a pool that the program holds stay, too.
        if has_held || !region.joined_segments().is_empty() {
            assert_eq!(figures.state, self.states[number]);
        } else if trimmed.is_ok() && !self.is_failing {
            assert_eq!(figures.state, RegionState::Mapped);
            let rest = figures.mapped + figures.paused + figures.host + figures.disk;
            assert_eq!(rest, Bytes::ZERO, "{figures:?}");
        }
        self.states[number] = figures.state;
        match &trimmed {
            Ok(()) if figures.state == RegionState::Mapped => self.may_refuse[number] = false,
            Err(RegionError::PoolsStillPaused { .. }) => self.may_refuse[number] = true,
            _ => {}
        }
        if trimmed.is_ok() && !self.is_failing {
            self.check_trimmed(number);
        }
    }

    /// Checks that a region has no more on the device than its blocks use.
    fn check_trimmed(&self, number: usize) {
        let region = &self.regions[number];
        let figures = region.memory.figures().expect("no call panics");
        let is_used = |segment: &SegmentSnapshot| !segment.allocated_bytes().is_zero();
        assert!(region.segments().iter().all(is_used));
        let in_use = [region.segments(), region.joined_segments()].concat();
        let in_use: Vec<_> = in_use
            .iter()
            .map(|segment| MemoryRange {
                address: segment.address,
                size: segment.size,
            })
            .collect();
        match figures.state {
            RegionState::Mapped => {
                let driver = &self.drivers[DEVICES[number]];
                assert_eq!(figures.mapped, driver.mapped_around(&in_use));
            }
            _ => {
                let sizes: Bytes = in_use.iter().map(|range| range.size).sum();
                let units = Bytes(in_use.len() as u64 * GRANULARITY.get());
                assert!((sizes..=sizes + units).contains(&figures.paused));
            }
        }
    }

    /// Checks the copies of a mapped region. If it was just resumed and retains its copies, all of them are there.
    fn check_retained(&self, number: usize, before: RegionState) {
        let region = &self.regions[number];
        let host = region.memory.figures().expect("no call panics").host;
        let is_of_host = region.kind == Some(BackupKind::Host);
        assert!(host.is_zero() || is_of_host);
        let retains = self.allocators[DEVICES[number]].backups().retains;
        if before == RegionState::Paused {
            assert!(host.is_zero() || retains);
            let has_held = self.held.iter().any(|held| held.region == number);
            let is_whole = !self.may_be_partial[number] && !self.may_be_dropped[number];
            // Pools that could not be called do not watch blocks.
            let is_noted = region.device().refusals() == self.refusals[number];
            region.device().refuse(0);
            if has_held && is_of_host && is_whole && is_noted && retains {
                assert!(!host.is_zero());
                for held in self.held.iter().filter(|held| held.region == number) {
                    assert!(region.host_copy(held.range).is_some(), "{held:?}");
                }
            }
        }
    }

    /// Releases copies of regions without segments.
    fn release_ended(&mut self) {
        for region in &self.regions {
            let released = region.release_copy(Copies::Ended);
            released.expect("no call panics");
        }
    }

    fn check(&mut self) {
        self.release_ended();
        for held in &self.held {
            let driver = &self.drivers[DEVICES[held.region]];
            let is_there = self.states.get(held.region) != Some(&RegionState::Paused);
            match held.value {
                _ if !is_there => {}
                Some(value) => assert!(driver.check(held.range, value), "{held:?}"),
                None => assert!(driver.is_usable(held.range), "{held:?}"),
            }
        }
        for (driver, allocator) in self.drivers.iter().zip(&self.allocators) {
            assert_eq!(driver.violations(), [""; 0]);
            let checked = allocator.for_each_lane(|lane| {
                lane.check_invariants(CheckLevel::Everything)
                    .expect("no call breaks an invariant");
                Ok(())
            });
            assert_eq!(checked, Ok(()));
        }
        let mut kept = 0;
        for (region, state) in self.regions.iter().zip(self.states) {
            let figures = region.memory.figures().expect("no call panics");
            assert_eq!(figures.state, state);
            let in_use = region.held_blocks();
            let in_use: Bytes = in_use.iter().map(|block| block.size).sum();
            match state {
                RegionState::Mapped => assert!(figures.mapped >= in_use),
                _ => assert!(figures.paused >= in_use),
            }
            kept += usize::from(!(figures.host + figures.disk).is_zero());
        }
        assert_eq!(self.backups_count(), kept, "what is kept is known of");
    }

    fn backups_count(&self) -> usize {
        let allocators = self.allocators.iter();
        allocators
            .map(|allocator| allocator.backups().count())
            .sum()
    }

    /// Resumes everything that the program holds, and frees it.
    fn end(mut self) {
        self.fail_no_more();
        // Blocks in no region first, so that there is room.
        while let Some(index) = self.held.iter().position(|held| held.region >= REGIONS) {
            self.free(index);
        }
        // Free memory of a held pool would stay.
        for region in &self.regions {
            assert_eq!(region.allocator.release_pool(region.joined), Ok(()));
        }
        for number in 0..REGIONS {
            // There is room for one at a time: each is paused again after it was checked.
            for other in 0..REGIONS {
                self.pause(other);
            }
            self.empty_caches();
            self.resume(number);
            assert_eq!(self.states[number], RegionState::Mapped);
            self.check();
            self.trim(number);
            self.check();
            while let Some(index) = self.held.iter().position(|held| held.region == number) {
                self.free(index);
            }
        }
        for number in 0..REGIONS {
            self.resume(number);
        }
        for region in &self.regions {
            assert_eq!(region.allocator.release_pool(region.pool), Ok(()));
        }
        self.empty_caches();
        self.release_ended();
        for driver in &self.drivers {
            assert_eq!(driver.leaks(), [""; 0]);
            assert_eq!(driver.violations(), [""; 0]);
            assert_eq!(driver.physical_bytes(), Bytes::ZERO);
        }
        assert_eq!(self.backups_count(), 0);
    }

    fn empty_caches(&self) {
        for allocator in &self.allocators {
            allocator.empty_cache().expect("nothing fails");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_whatever_fails(
        config in any::<usize>(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut world = World::new(config);
        for op in &ops {
            world.step(op);
        }
        world.end();
    }
}
