//! Regions with these backups. Saved memory is released while the rest is being saved. Contents are restored
//! whichever driver call fails.

use std::collections::BTreeSet;
use std::sync::MutexGuard;

use lowtide_core::{MempoolId, RouteOrder, Stream};
use lowtide_region::{Device, RegionError, RegionMemory, RegionState};
use lowtide_shared::{LaneOf, OwnerTable, SharedAllocator};

use super::*;

/// The functions that a pause and a resume call.
const CALLS: [&str; 14] = [
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemCreate",
    "cuMemHostRegister_v2",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
];

const UNKNOWN: i32 = 999;

type Allocator = SharedAllocator<CudaDriver>;

struct Card {
    allocator: Arc<Allocator>,
    backups: Arc<Mutex<CudaBackups>>,
}

impl Device for Card {
    type Driver = CudaDriver;
    type Backups = CudaBackups;

    fn number(&self) -> u32 {
        0
    }

    fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    fn lock_backups(&self) -> Result<MutexGuard<'_, CudaBackups>, RegionError> {
        Ok(self.backups.lock()?)
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        synchronize(&self.allocator)
    }

    fn notify(&self, _tag: &Arc<str>, _is_leaving: bool, _has_pool: impl Fn(MempoolId) -> bool) {}
}

fn synchronize(allocator: &Allocator) -> Result<(), DriverError> {
    let device = allocator.physical().driver().device().clone();
    device.synchronize()
}

/// The pool of requests in the region.
const POOL: MempoolId = MempoolId(1, 1);

/// A region with a segment for each step of a backup, and a block in each.
struct Paused {
    memory: Arc<RegionMemory<Card>>,
    backups: Arc<Mutex<CudaBackups>>,
    /// What is left of the world without its backups.
    ranges: Vec<MemoryRange>,
    driver: CudaDriver,
    fake: Fake,
    allocator: Arc<Allocator>,
    held: Vec<MemoryRange>,
}

impl Paused {
    fn new(is_warm: bool) -> Paused {
        let World {
            backups,
            ranges,
            driver,
            fake,
        } = World::new(STAYS, TemporaryFile::open);
        let config = "caching".parse().unwrap();
        let owners = Arc::new(OwnerTable::default());
        let allocator = SharedAllocator::new(fake.driver(), 0, &config, owners, None);
        let allocator = Arc::new(allocator);
        let backups = Arc::new(Mutex::new(backups));
        let card = Card {
            allocator: Arc::clone(&allocator),
            backups: Arc::clone(&backups),
        };
        let kind = Some(BackupKind::Host);
        let memory = Arc::new(RegionMemory::new(card, "weights".into(), kind, POOL));
        let sizes = [
            SIZES.step_bytes,
            512,
            200_000,
            SIZES.step_bytes + 512,
            70_000,
        ];
        let pools = allocator.with_lane(LaneOf::Pools, |lane| {
            memory.create_pool(lane)?;
            lane.begin_allocate_to_pool(POOL, RouteOrder::AfterOthers, |_| true)
        });
        pools.unwrap();
        // Each in a segment of its own, as streams share none.
        let held = (0..).zip(sizes).map(|(number, size)| {
            let (stream, size) = (Stream(0x1000 + number), Bytes(size as u64));
            let address = allocator.allocate(size, stream, || Ok(false)).unwrap();
            MemoryRange { address, size }
        });
        let held: Vec<_> = held.collect();
        let released = allocator.with_lane(LaneOf::Pools, |lane| {
            lane.end_allocate_to_pool(POOL)?;
            lane.release_pool(POOL)
        });
        released.unwrap();
        if is_warm {
            // Without a resume: after one, segments share a piece.
            let mut backups = backups.lock().unwrap();
            let backup = save(&mut backups, &held, BackupKind::Host).unwrap();
            backups.finish_locking();
            backups.release(backup);
        }
        Paused {
            memory,
            backups,
            ranges,
            driver,
            fake,
            allocator,
            held,
        }
    }

    fn pause(&self) -> Result<(), RegionError> {
        let mut backups = self.memory.device().lock_backups()?;
        self.memory.pause(self.memory.kind(), &mut backups)
    }

    fn resume(&self) -> Result<(), RegionError> {
        let mut backups = self.memory.device().lock_backups()?;
        self.memory.resume(&mut backups)
    }

    fn state(&self) -> RegionState {
        self.memory.state().unwrap()
    }

    fn fill(&self) {
        let mut random = Random(7);
        for &range in &self.held {
            content_mut(range).fill_with(|| random.next().to_le_bytes()[0]);
        }
    }

    fn is_as_filled(&self) -> bool {
        let mut random = Random(7);
        let mut held = self.held.iter();
        let mut is_next = |byte: &u8| *byte == random.next().to_le_bytes()[0];
        held.all(|&range| content_mut(range).iter().all(&mut is_next))
    }

    /// Frees every block, and releases what that leaves free.
    fn free_all(&mut self) {
        for range in std::mem::take(&mut self.held) {
            self.allocator
                .with_block(range.address, |lane| lane.free(range.address))
                .unwrap();
        }
        let emptied = self.allocator.with_all(|device| device.empty_cache(None));
        emptied.unwrap().unwrap();
    }

    fn end(mut self) {
        self.free_all();
        self.memory.trim().unwrap();
        let released = self
            .allocator
            .with_lane(LaneOf::Pools, |lane| lane.release_pool(POOL));
        released.unwrap();
        // The pool ends, which has the region.
        self.free_all();
        let Paused {
            memory,
            backups,
            ranges,
            driver,
            fake,
            allocator,
            ..
        } = self;
        drop((memory, allocator));
        let backups = Arc::into_inner(backups).expect("its regions are gone");
        let world = World {
            backups: backups.into_inner().unwrap(),
            ranges,
            driver,
            fake,
        };
        world.end();
    }
}

/// Pauses and resumes while one or two calls fail. Returns how often each of [`CALLS`] was made, and whether the
/// pause failed.
fn run(is_warm: bool, failures: &[(&str, u64)]) -> ([u64; CALLS.len()], bool) {
    let region = Paused::new(is_warm);
    region.fill();
    let before = CALLS.map(|call| region.fake.calls(call));
    for &(call, nth) in failures {
        region.fake.fail(call, nth, UNKNOWN);
    }
    let paused = region.pause();
    let context = format!("{is_warm} {failures:?}: {paused:?}");
    let mut is_away = true;
    if let Err(error) = &paused {
        assert!(!failures.is_empty(), "{context}");
        is_away = region.state() == RegionState::Paused;
        assert_eq!(is_away, error.is_paused(), "{context}");
    }
    assert!(is_away || region.is_as_filled(), "{context}");
    if paused.is_err() && region.pause().is_err() {
        region.pause().expect(&context);
    }
    assert_eq!(region.state(), RegionState::Paused, "{context}");
    assert_eq!(
        region.memory.figures().unwrap().mapped,
        Bytes::ZERO,
        "{context}"
    );
    if region.resume().is_err() {
        assert_eq!(region.state(), RegionState::Paused, "{context}");
        region.resume().expect(&context);
    }
    assert!(region.is_as_filled(), "{context}");
    region.backups.lock().unwrap().finish_locking();
    let calls = std::array::from_fn(|index| region.fake.calls(CALLS[index]) - before[index]);
    region.fake.fail_none();
    region.end();
    (calls, paused.is_err())
}

#[test]
fn a_region_survives_every_failure_of_the_driver() {
    let mut struck = BTreeSet::new();
    let unmap = CALLS.iter().position(|&call| call == "cuMemUnmap").unwrap();
    let [unmaps_cold, unmaps_warm] = [false, true].map(|is_warm| run(is_warm, &[]).0[unmap]);
    assert!(unmaps_warm >= unmaps_cold + 2, "it leaves step by step");
    for is_warm in [false, true] {
        let (counts, _) = run(is_warm, &[]);
        for (call, count) in CALLS.into_iter().zip(counts) {
            for nth in 1..=count {
                run(is_warm, &[(call, nth)]);
                struck.insert(call);
            }
        }
    }
    for call in CALLS {
        assert!(struck.contains(call), "{call} was never made");
    }
}

/// The copy of a step fails, and then each call that would map and restore what had been released.
#[test]
fn a_region_survives_a_pause_that_cannot_be_undone() {
    const COPY: &str = "cuMemcpyDtoHAsync_v2";
    let copies = run(true, &[]).0[CALLS.iter().position(|&call| call == COPY).unwrap()];
    let mut count = 0;
    for nth in 1..=copies {
        for call in [
            "cuMemCreate",
            "cuMemMap",
            "cuMemSetAccess",
            "cuMemcpyHtoDAsync_v2",
        ] {
            for then in 1..=3 {
                let (_, has_failed) = run(true, &[(COPY, nth), (call, then)]);
                count += u32::from(has_failed);
            }
        }
    }
    assert!(count >= 20, "{count}");
}

/// The functions that wait for copies.
const WAITS: [&str; 3] = ["cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize"];

/// Pauses and resumes. Copies run as late as possible, and a number of consecutive waits fail, from one call on.
/// Returns how often each of [`WAITS`] was made by the pause, and by pause and resume.
fn run_waits(is_warm: bool, failure: Option<(&str, u64, u64)>) -> [[u64; WAITS.len()]; 2] {
    let region = Paused::new(is_warm);
    region.fake.set_lazy(true);
    region.fill();
    let before = WAITS.map(|call| region.fake.calls(call));
    let made = |region: &Paused| -> [u64; WAITS.len()] {
        std::array::from_fn(|index| region.fake.calls(WAITS[index]) - before[index])
    };
    if let Some((call, first, count)) = failure {
        let fake = &region.fake;
        (first..first + count).for_each(|nth| fake.fail(call, nth, UNKNOWN));
    }
    let context = format!("{is_warm} {failure:?}");
    let mut paused = region.pause();
    let by_pause = made(&region);
    if paused.is_ok() {
        paused = region.resume();
    }
    // Work that is still in progress after the failed call must not use released memory.
    region.fake.fail_none();
    assert_eq!(
        synchronize(&region.allocator),
        Ok(()),
        "{context}: {paused:?}"
    );
    if region.state() == RegionState::Mapped {
        assert!(region.is_as_filled(), "{context}: {paused:?}");
    }
    region.pause().expect(&context);
    region.resume().expect(&context);
    assert!(region.is_as_filled(), "{context}: {paused:?}");
    region.backups.lock().unwrap().finish_locking();
    let by_both = made(&region);
    region.end();
    [by_pause, by_both]
}

/// Each wait fails once, two or three times in a row, and from then on.
#[test]
fn a_region_survives_waits_that_fail() {
    let mut count = 0;
    for is_warm in [false, true] {
        let [_, counts] = run_waits(is_warm, None);
        for (call, made) in WAITS.into_iter().zip(counts) {
            for (nth, in_a_row) in (1..=made).flat_map(|nth| [1, 2, 3, 20].map(|row| (nth, row))) {
                run_waits(is_warm, Some((call, nth, in_a_row)));
                count += 1;
            }
        }
    }
    assert!(count >= 40, "{count}");
}

/// A segment is released while the copies of a failed pause still read it.
#[test]
fn what_goes_back_under_copies_stays_until_they_have_ended() {
    for is_warm in [false, true] {
        let mut region = Paused::new(is_warm);
        region.fake.set_lazy(true);
        region.fill();
        let waits = |region: &Paused| region.fake.calls("cuStreamSynchronize");
        let before = waits(&region);
        (1..20).for_each(|nth| region.fake.fail("cuStreamSynchronize", nth, UNKNOWN));
        assert!(region.pause().is_err());
        assert!(waits(&region) > before);
        assert_eq!(region.state(), RegionState::Mapped);
        let mapped = region.memory.figures().unwrap().mapped;
        region.free_all();
        assert_eq!(region.memory.figures().unwrap().mapped, mapped);
        region.fake.fail_none();
        assert_eq!(synchronize(&region.allocator), Ok(()));
        region.end();
    }
}
