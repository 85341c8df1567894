//! Regions with these backups. Saved memory is released while the rest is being saved. Contents are restored
//! whichever driver call fails.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use lowtide_core::{SegmentSource, Stream};
use lowtide_region::{Pools, PoolsError, RegionError, RegionMemory, RegionSource, RegionState};

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

#[derive(Clone)]
struct Card(Arc<Mutex<CudaDriver>>);

impl Card {
    fn driver(&self) -> MutexGuard<'_, CudaDriver> {
        self.0.lock().unwrap()
    }
}

impl lowtide_region::Device for Card {
    type Driver = CudaDriver;

    fn with_driver<R>(&self, act: impl FnOnce(&mut CudaDriver) -> R) -> R {
        act(&mut self.driver())
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        let device = self.driver().device().clone();
        device.synchronize()
    }
}

/// Pools whose only blocks are these.
struct Held<'a>(&'a [MemoryRange]);

impl Pools for Held<'_> {
    fn set_paused(&mut self, _is_paused: bool) -> Result<(), PoolsError> {
        Ok(())
    }

    fn trim_and_list(&mut self) -> Result<Vec<MemoryRange>, PoolsError> {
        Ok(self.0.to_vec())
    }

    fn watch(&mut self, _ranges: &[MemoryRange], _is_watched: bool) {}

    fn notify(&mut self, _is_leaving: bool) {}
}

/// A region whose backup takes several steps. It has one segment for each block in `held`.
struct Paused {
    world: World,
    memory: Arc<RegionMemory<Card, CudaBackups>>,
    source: RegionSource<Card, CudaBackups>,
    card: Card,
    held: Vec<MemoryRange>,
}

const SEGMENT: Bytes = Bytes::mib(2);

impl Paused {
    fn new(is_warm: bool) -> Paused {
        let mut world = World::new(STAYS, TemporaryFile::open);
        let card = Card(Arc::new(Mutex::new(world.fake.driver())));
        let memory = Arc::new(RegionMemory::new(card.clone(), Some(BackupKind::Host)));
        let mut source = RegionSource::new(Arc::clone(&memory), "weights".into());
        let sizes = [
            SIZES.step_bytes,
            512,
            200_000,
            SIZES.step_bytes + 512,
            70_000,
        ];
        let held = sizes.map(|size| MemoryRange {
            address: source.allocate(SEGMENT, Stream::DEFAULT, false).unwrap(),
            size: Bytes(size as u64),
        });
        if is_warm {
            // Without a resume: after one, segments share a piece.
            let backup = save(&mut world.backups, &held, BackupKind::Host).unwrap();
            world.backups.finish_locking();
            world.backups.discard(backup);
        }
        Paused {
            world,
            memory,
            source,
            card,
            held: held.to_vec(),
        }
    }

    fn pause(&mut self) -> Result<(), RegionError> {
        let backups = &mut self.world.backups;
        self.memory.pause(&mut Held(&self.held), backups)
    }

    fn resume(&mut self) -> Result<(), RegionError> {
        let backups = &mut self.world.backups;
        self.memory.resume(&mut Held(&self.held), backups)
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

    fn end(self) {
        let Paused {
            mut world,
            memory,
            mut source,
            card,
            held,
        } = self;
        for range in held {
            source.release(range.address, SEGMENT);
        }
        let trimmed = memory.trim(&mut Held(&[]), &mut world.backups);
        trimmed.unwrap();
        drop((memory, source, card));
        world.end();
    }
}

/// Pauses and resumes while one or two calls fail. Returns how often each of [`CALLS`] was made, and whether the
/// pause failed.
fn run(is_warm: bool, failures: &[(&str, u64)]) -> ([u64; CALLS.len()], bool) {
    let mut region = Paused::new(is_warm);
    region.fill();
    let before = CALLS.map(|call| region.world.fake.calls(call));
    for &(call, nth) in failures {
        region.world.fake.fail(call, nth, UNKNOWN);
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
    region.world.backups.finish_locking();
    let calls = std::array::from_fn(|index| region.world.fake.calls(CALLS[index]) - before[index]);
    region.world.fake.fail_none();
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
    let mut region = Paused::new(is_warm);
    region.world.fake.set_lazy(true);
    region.fill();
    let before = WAITS.map(|call| region.world.fake.calls(call));
    let made = |region: &Paused| -> [u64; WAITS.len()] {
        std::array::from_fn(|index| region.world.fake.calls(WAITS[index]) - before[index])
    };
    if let Some((call, first, count)) = failure {
        let fake = &region.world.fake;
        (first..first + count).for_each(|nth| fake.fail(call, nth, UNKNOWN));
    }
    let context = format!("{is_warm} {failure:?}");
    let mut paused = region.pause();
    let by_pause = made(&region);
    if paused.is_ok() {
        paused = region.resume();
    }
    // Work that is still in progress after the failed call must not use released memory.
    region.world.fake.fail_none();
    let device = region.card.driver().device().clone();
    assert_eq!(device.synchronize(), Ok(()), "{context}: {paused:?}");
    if region.state() == RegionState::Mapped {
        assert!(region.is_as_filled(), "{context}: {paused:?}");
    }
    region.pause().expect(&context);
    region.resume().expect(&context);
    assert!(region.is_as_filled(), "{context}: {paused:?}");
    region.world.backups.finish_locking();
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
        region.world.fake.set_lazy(true);
        region.fill();
        let waits = |region: &Paused| region.world.fake.calls("cuStreamSynchronize");
        let before = waits(&region);
        (1..20).for_each(|nth| region.world.fake.fail("cuStreamSynchronize", nth, UNKNOWN));
        assert!(region.pause().is_err());
        assert!(waits(&region) > before);
        assert_eq!(region.state(), RegionState::Mapped);
        let mapped = region.memory.figures().unwrap().mapped;
        for range in std::mem::take(&mut region.held) {
            region.source.release(range.address, SEGMENT);
        }
        assert_eq!(region.memory.figures().unwrap().mapped, mapped);
        region.world.fake.fail_none();
        let device = region.card.driver().device().clone();
        assert_eq!(device.synchronize(), Ok(()));
        region.end();
    }
}
