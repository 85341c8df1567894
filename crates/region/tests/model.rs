//! Random programs over three regions, each beside a shadow of what the program holds: after every step, states,
//! contents, addresses and the memory of the device are what they must be, whatever failed.
//!
//! One thread. Threads are in the tests of the C interface.

mod common;

use common::{Allocator, TestBackups, TestDriver, TestRegion, allocator, failed};
use lowtide_core::{
    AllocError, Bytes, CheckLevel, DeviceAddress, DriverError, SegmentSnapshot, Stream,
};
use lowtide_region::{BackupKind, Copies, MemoryRange, RegionError, RegionState};
use lowtide_sim::program::configs;
use lowtide_sim::{Call, FaultPlan};
use proptest::prelude::*;

/// Little, so that programs run out of it.
const CAPACITY: Bytes = Bytes::mib(256);

/// The unit of memory, to which segments are rounded.
const GRANULARITY: Bytes = Bytes::mib(2);

#[derive(Clone, Debug)]
enum Op {
    /// In a region, in its own pool or one that joined it, or in none for the last number.
    Allocate {
        region: usize,
        is_joined: bool,
        size: Bytes,
        stream: Stream,
    },
    Free(usize),
    /// Work that uses a block, and writes it.
    Launch(usize),
    Pause(usize),
    Resume(usize),
    Trim(usize),
    EmptyCache,
    /// Has a later call of the driver fail in the next step: the n-th of any kind, or of one kind.
    Fail(u64, Option<Call>, DriverError),
    /// Has some calls of the driver fail in the next step.
    FailAtRandom(u64),
    /// Has a later call to the backups fail in the next step, and some after it.
    FailBackup(u64, u64),
    /// Has a later use of the allocator by regions find no pools in the next step.
    FailPools(u64),
    /// Whether backups in the host's memory stay after a resume from now on.
    Retain(bool),
    ReleaseRetained(usize),
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
    let error = prop_oneof![Just(DriverError::OutOfMemory), Just(failed())];
    prop_oneof![
        30 => (0..4_usize, prop::bool::weighted(0.2), size, stream).prop_map(
            |(region, is_joined, size, stream)| Op::Allocate { region, is_joined, size, stream }
        ),
        18 => any::<usize>().prop_map(Op::Free),
        10 => any::<usize>().prop_map(Op::Launch),
        14 => (0..3_usize).prop_map(Op::Pause),
        14 => (0..3_usize).prop_map(Op::Resume),
        3 => (0..3_usize).prop_map(Op::Trim),
        2 => Just(Op::EmptyCache),
        8 => (1..12_u64, call, error).prop_map(|(nth, call, error)| Op::Fail(nth, call, error)),
        3 => any::<u64>().prop_map(Op::FailAtRandom),
        3 => (0..5_u64, 0..2_u64).prop_map(|(after, more)| Op::FailBackup(after, more)),
        3 => (0..12_u64).prop_map(Op::FailPools),
        3 => any::<bool>().prop_map(Op::Retain),
        2 => (0..3_usize).prop_map(Op::ReleaseRetained),
    ]
}

/// A block that the program holds.
#[derive(Debug)]
struct Held {
    range: MemoryRange,
    /// Three for none.
    region: usize,
    stream: Stream,
    /// What was written; `None` where that is lost.
    value: Option<u64>,
}

struct World {
    driver: TestDriver,
    allocator: Allocator,
    regions: Vec<TestRegion>,
    states: [RegionState; 3],
    /// Which regions may refuse requests while they are mapped, as a call to their pools failed.
    may_refuse: [bool; 3],
    /// How often regions found no pools before this step.
    refusals: [u64; 3],
    /// Which regions' last pause failed and left them paused: their copies may be of a part.
    may_be_partial: [bool; 3],
    backups: TestBackups,
    held: Vec<Held>,
    last_value: u64,
    is_failing: bool,
}

impl World {
    fn new(config: usize) -> World {
        let configs = configs();
        let driver = TestDriver::new(CAPACITY);
        let allocator = allocator(&driver, &configs[config % configs.len()]);
        let kinds = [Some(BackupKind::Host), Some(BackupKind::Disk), None];
        let regions = (1..).zip(kinds);
        World {
            backups: TestBackups::new(&driver),
            regions: regions
                .map(|(number, kind)| TestRegion::new(number, kind, &driver, &allocator))
                .collect(),
            driver,
            allocator,
            states: [RegionState::Mapped; 3],
            may_refuse: [false; 3],
            refusals: [0; 3],
            may_be_partial: [false; 3],
            held: Vec::new(),
            last_value: 0,
            is_failing: false,
        }
    }

    fn step(&mut self, op: &Op) {
        let was_failing = self.is_failing;
        self.refusals = [0, 1, 2].map(|number| self.regions[number].device().refusals());
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
            Op::Trim(region) => self.trim(*region),
            Op::EmptyCache => {
                let emptied = self.allocator.empty_cache();
                assert!(emptied.is_ok() || was_failing);
            }
            Op::Fail(nth, call, error) => {
                let error = error.clone();
                self.fail(match call {
                    Some(call) => FaultPlan::nth(*call, *nth, error),
                    None => FaultPlan::nth_of_any(*nth, error),
                });
            }
            Op::FailAtRandom(seed) => self.fail(FaultPlan::random(*seed, 3, failed())),
            Op::FailBackup(after, more) => {
                self.backups.fails_in = Some(*after);
                self.backups.more_failures = *more;
                self.is_failing = true;
            }
            Op::FailPools(after) => {
                for region in &self.regions {
                    region.device().refuse(1 << *after);
                }
                self.is_failing = true;
            }
            Op::Retain(retains) => self.backups.retains = *retains,
            Op::ReleaseRetained(number) => {
                let region = &self.regions[*number];
                let memory = &region.memory;
                memory
                    .release_retained(Copies::All, &mut self.backups)
                    .expect("no call panics");
            }
        }
        if was_failing {
            self.fail_no_more();
        }
        if !self.is_failing {
            self.check();
        }
    }

    fn fail(&mut self, faults: FaultPlan) {
        self.driver.set_faults(faults);
        self.is_failing = true;
    }

    fn fail_no_more(&mut self) {
        self.driver.set_faults(FaultPlan::none());
        self.backups.fails_in = None;
        self.backups.more_failures = 0;
        for region in &self.regions {
            region.device().refuse(0);
        }
        self.is_failing = false;
    }

    fn allocate(&mut self, region: usize, is_joined: bool, size: Bytes, stream: Stream) {
        let allocated = match self.regions.get(region) {
            Some(region) if is_joined => region.allocator.allocate_in(region.joined, size, stream),
            Some(region) => region.allocate(size, stream),
            None => {
                let address = self.allocator.allocate(size, stream);
                address.map(|address| MemoryRange { address, size })
            }
        };
        let is_away = self.states.get(region) == Some(&RegionState::Paused);
        match allocated {
            Ok(range) => {
                assert!(!is_away, "{range:?} is handed out");
                self.driver.give(range, stream);
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

    /// Has the block's stream write it, where it is in a region and that is mapped.
    fn write(&mut self, index: usize) {
        let held = &mut self.held[index];
        if self.states.get(held.region) == Some(&RegionState::Mapped) {
            self.last_value += 1;
            held.value = Some(self.last_value);
            self.driver.launch(held.range, held.stream);
            self.driver.write(held.range, self.last_value);
        }
    }

    fn free(&mut self, index: usize) {
        if self.held.is_empty() {
            return;
        }
        let index = index % self.held.len();
        let address = self.held[index].range.address;
        let freed = self.allocator.free(address);
        assert!(freed.is_ok() || self.is_failing, "{freed:?}");
        if freed.is_ok() {
            self.held.swap_remove(index);
        }
    }

    fn pause(&mut self, number: usize) {
        let before = self.states[number];
        // It is resumed first then.
        let may_be_mapped = before == RegionState::Mapped || self.may_be_partial[number];
        let region = &self.regions[number];
        let paused = region.pause(&mut self.backups);
        let state = region.memory.state().expect("no call panics");
        match &paused {
            Ok(()) => {
                assert_eq!(state, RegionState::Paused);
                self.may_be_partial[number] &= before == RegionState::Paused;
            }
            Err(RegionError::NoRoom { needed, free }) => {
                assert!(self.may_be_partial[number]);
                assert_eq!((before, state), (RegionState::Paused, before));
                assert!(needed > free || self.is_failing, "{needed} {free}");
            }
            Err(RegionError::NotTold { .. }) => {
                assert!(self.is_failing && self.may_be_partial[number]);
                assert_eq!(state, RegionState::Mapped);
                self.may_refuse[number] = true;
            }
            Err(error) => {
                assert!(self.is_failing, "{error}");
                self.may_be_partial[number] |= matches!(error, RegionError::NotPutBack { .. });
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
            let lost = self.held.iter_mut().filter(|held| held.region == number);
            lost.for_each(|held| held.value = None);
        }
        self.states[number] = state;
    }

    fn resume(&mut self, number: usize) {
        let before = self.states[number];
        let region = &self.regions[number];
        let figures = || region.memory.figures().expect("no call panics");
        // A call that is to fail is not to be made before.
        let expected = (!self.is_failing).then(|| {
            let needed = region.memory.needed_to_resume();
            (needed.expect("no call panics"), figures().mapped)
        });
        let resumed = region.resume(&mut self.backups);
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
            Err(RegionError::NotTold { .. }) => {
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
        let before = (figures().mapped, self.driver.physical_bytes());
        let trimmed = region.memory.trim(&mut self.backups);
        assert!(trimmed.is_ok() || self.is_failing, "{trimmed:?}");
        let figures = figures();
        let given_back = before.0 - figures.mapped;
        assert_eq!(before.1 - self.driver.physical_bytes(), given_back);
        let has_held = self.held.iter().any(|held| held.region == number);
        // What is free in a pool that the program holds stays, too.
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
            Err(RegionError::NotTold { .. }) => self.may_refuse[number] = true,
            _ => {}
        }
        if trimmed.is_ok() && !self.is_failing {
            self.check_trimmed(number);
        }
    }

    /// Looks at a region that has on the device what its blocks use, and not more.
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
                assert_eq!(figures.mapped, self.driver.mapped_around(&in_use));
            }
            _ => {
                let sizes: Bytes = in_use.iter().map(|range| range.size).sum();
                let units = Bytes(in_use.len() as u64 * GRANULARITY.get());
                assert!((sizes..=sizes + units).contains(&figures.paused));
            }
        }
    }

    /// Looks at the copies of a region that is mapped: all are there of one that was just resumed and is to
    /// keep them, if any were.
    fn check_retained(&self, number: usize, before: RegionState) {
        let region = &self.regions[number];
        let host = region.memory.figures().expect("no call panics").host;
        let is_of_host = region.kind == Some(BackupKind::Host);
        assert!(host.is_zero() || is_of_host);
        if before == RegionState::Paused {
            assert!(host.is_zero() || self.backups.retains);
            let has_held = self.held.iter().any(|held| held.region == number);
            let is_whole = !self.may_be_partial[number];
            // Pools that could not be called do not note which blocks the copies are of.
            let is_noted = region.device().refusals() == self.refusals[number];
            region.device().refuse(0);
            if has_held && is_of_host && is_whole && is_noted && self.backups.retains {
                assert!(!host.is_zero());
                for held in self.held.iter().filter(|held| held.region == number) {
                    assert!(region.host_copy(held.range).is_some(), "{held:?}");
                }
            }
        }
    }

    /// Copies that outlived their region's last segment go.
    fn release_ended(&mut self) {
        for region in &self.regions {
            let released = region
                .memory
                .release_retained(Copies::Ended, &mut self.backups);
            released.expect("no call panics");
        }
    }

    fn check(&mut self) {
        self.release_ended();
        assert_eq!(self.driver.wrongs(), [""; 0]);
        for held in &self.held {
            let is_there = self.states.get(held.region) != Some(&RegionState::Paused);
            match held.value {
                _ if !is_there => {}
                Some(value) => assert!(self.driver.check(held.range, value), "{held:?}"),
                None => assert!(self.driver.is_usable(held.range), "{held:?}"),
            }
        }
        let checked = self.allocator.check_invariants(CheckLevel::Everything);
        assert_eq!(checked, Ok(()));
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
        assert_eq!(self.backups.count(), kept, "what is kept is known of");
    }

    /// Everything that the program holds comes back and is given back.
    fn end(mut self) {
        self.fail_no_more();
        // Of what is in none, so that there is room.
        let others = self.held.extract_if(.., |held| held.region == 3);
        let others: Vec<DeviceAddress> = others.map(|held| held.range.address).collect();
        for address in others {
            let freed = self.allocator.free(address);
            assert_eq!(freed, Ok(()));
        }
        // What is free in them would stay.
        for region in &self.regions {
            assert_eq!(self.allocator.release_pool(region.joined), Ok(()));
        }
        for number in 0..3 {
            // Room for one after the other: each goes again when it has been looked at.
            for other in 0..3 {
                self.pause(other);
            }
            self.allocator.empty_cache().expect("nothing fails");
            self.resume(number);
            assert_eq!(self.states[number], RegionState::Mapped);
            self.check();
            self.trim(number);
            self.check();
            while let Some(index) = self.held.iter().position(|held| held.region == number) {
                self.free(index);
            }
        }
        for number in 0..3 {
            self.resume(number);
        }
        for region in &self.regions {
            assert_eq!(self.allocator.release_pool(region.pool), Ok(()));
        }
        self.allocator.empty_cache().expect("nothing fails");
        self.release_ended();
        assert_eq!(self.driver.leaks(), [""; 0]);
        assert_eq!(self.driver.wrongs(), [""; 0]);
        assert_eq!(self.driver.physical_bytes(), Bytes::ZERO);
        assert_eq!(self.backups.count(), 0);
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
