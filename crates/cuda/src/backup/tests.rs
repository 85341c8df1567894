//! Tests of backups on `fakecuda`, a stand-in for NVIDIA's driver whose device memory is host memory, so that every
//! byte can be compared.
//!
//! Not covered: speed, which `bench/gpu/saver.py` measures on a card.

#[path = "../../tests/fake/control.rs"]
#[expect(dead_code, reason = "other tests need the rest")]
mod control;
#[path = "../../tests/common/program.rs"]
#[expect(dead_code, reason = "other tests need the rest")]
mod program;

mod disk;
mod failures;
mod keeping;
mod region;

/// `control` finds `program` at this path.
mod common {
    pub(super) use super::program;
}

use std::ptr;
use std::sync::Mutex;
use std::thread;

use lowtide_core::{DeviceAddress, Driver};

use super::*;
use crate::driver::CudaDriver;
use control::Fake;

/// Small sizes, so that a few hundred KiB are many pieces, blocks and turns of the ring.
const SIZES: Sizes = Sizes {
    piece_bytes: 16 << 10,
    slots: 3,
    block_bytes: 64 << 10,
    step_bytes: 128 << 10,
    threads: 2,
};

const LONG: Duration = Duration::from_secs(3600);

/// Idle memory stays, and memory is page-locked at once.
const STAYS: Times = Times {
    idle: LONG,
    quiet: Duration::ZERO,
    patience: LONG,
};

/// Idle memory stays. It is not page-locked unless it is being copied or a caller waits for page-locking.
const QUIET: Times = Times {
    quiet: LONG,
    ..STAYS
};

/// Like `QUIET`, but copies that follow one another do not extend the quiet time for long.
const IMPATIENT: Times = Times {
    patience: Duration::from_millis(100),
    ..QUIET
};

/// Idle memory is released at once.
const GOES: Times = Times {
    idle: Duration::ZERO,
    ..STAYS
};

/// A device, memory on it, and the backups of its contents.
struct World {
    backups: CudaBackups,
    ranges: Vec<MemoryRange>,
    driver: CudaDriver,
    /// Dropped last, because it keeps other tests from running.
    fake: Fake,
}

impl World {
    fn new(times: Times, open_storage: OpenStorage) -> World {
        let fake = Fake::start();
        let mut driver = fake.driver();
        let context = Arc::new(PrimaryContext::retain(driver.device().clone()).unwrap());
        // Ranges within a piece, over several pieces, over blocks, and of exactly one piece and one block.
        let sizes = [512, 100, 16 << 10, 300_000, 64 << 10, 1, 40_000, 200_000];
        let ranges = sizes.map(|size| MemoryRange {
            address: driver.allocate(Bytes(size)).unwrap(),
            size: Bytes(size),
        });
        World {
            backups: CudaBackups::with(context, SIZES, times, open_storage),
            ranges: ranges.to_vec(),
            driver,
            fake,
        }
    }

    /// Fills the memory with contents that depend on the seed, and returns them.
    fn fill(&self, seed: u64) -> Vec<Vec<u8>> {
        let mut random = Random(seed);
        let fill = |range: &MemoryRange| {
            let content = content_mut(*range);
            content.fill_with(|| random.next().to_le_bytes()[0]);
            content.to_vec()
        };
        self.ranges.iter().map(fill).collect()
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        let read = |range: &MemoryRange| content_mut(*range).to_vec();
        self.ranges.iter().map(read).collect()
    }

    fn save(&mut self, kind: BackupKind) -> Result<CudaBackup, BackupError> {
        let ranges = self.ranges.clone();
        save(&mut self.backups, &ranges, kind)
    }

    fn restore(&mut self, backup: &mut CudaBackup) -> Result<(), BackupError> {
        let ranges = self.ranges.clone();
        self.backups.restore(backup, &ranges)
    }

    /// Drops everything, and checks that nothing is left.
    fn end(self) {
        let World {
            backups,
            ranges,
            mut driver,
            fake,
        } = self;
        drop(backups);
        for range in ranges {
            driver.free(range.address, range.size).unwrap();
        }
        drop(driver);
        assert_eq!(fake.live(), control::Live::default());
        // A joined thread may still be listed for a moment. A leaked thread would be listed forever.
        while !our_threads().is_empty() {
            thread::yield_now();
        }
    }
}

/// Saves some ranges completely.
fn save(
    backups: &mut CudaBackups,
    ranges: &[MemoryRange],
    kind: BackupKind,
) -> Result<CudaBackup, BackupError> {
    let mut backup = backups.begin(ranges, kind)?;
    let mut saved = 0;
    while saved < ranges.len() {
        let before = saved;
        saved = backups.save_next(&mut backup)?;
        assert!(saved > before, "each step saves more");
    }
    Ok(backup)
}

/// Returns a range of device memory as a slice: the stand-in's device memory is host memory.
fn content_mut<'a>(range: MemoryRange) -> &'a mut [u8] {
    let start = ptr::with_exposed_provenance_mut(host_address(range.address));
    // SAFETY: 1. the range is memory from the world's driver, and only the test uses it while no backup is in
    // progress. 2. No test keeps the returned slice.
    unsafe { std::slice::from_raw_parts_mut(start, usize::try_from(range.size.get()).unwrap()) }
}

/// Returns the host copy of a range in a backup.
fn copy_of(backup: &CudaBackup, range: MemoryRange) -> Vec<u8> {
    let copy = CudaBackups::host_copy(backup, range).unwrap();
    let at = MemoryRange {
        address: DeviceAddress(copy as u64),
        size: range.size,
    };
    content_mut(at).to_vec()
}

fn host_address(address: DeviceAddress) -> usize {
    usize::try_from(address.get()).unwrap()
}

/// Returns the names of the running threads that backups started.
fn our_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| {
        // A thread may end meanwhile.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    names.filter(|name| name.starts_with("lowtide ")).collect()
}

/// A pseudo-random sequence: splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }
}

const KINDS: [BackupKind; 2] = [BackupKind::Host, BackupKind::Disk];

#[test]
fn contents_come_back_bit_for_bit() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    for kind in KINDS {
        for round in 0..4 {
            let saved = world.fill(round);
            let mut backup = world.save(kind).unwrap();
            world.fill(round + 100);
            world.restore(&mut backup).unwrap();
            assert_eq!(world.contents(), saved, "{kind:?} {round}");
            // A restore leaves the backup complete.
            world.fill(round + 200);
            world.restore(&mut backup).unwrap();
            assert_eq!(world.contents(), saved, "{kind:?} {round}, again");
            world.backups.release(backup);
            world.backups.finish_locking();
        }
    }
    world.end();
}

#[test]
fn copies_go_directly_as_soon_as_memory_is_locked() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    world.fill(1);
    let first = world.save(BackupKind::Host).unwrap();
    world.backups.finish_locking();
    assert_eq!(first.locked(), Bytes(first.layout.bytes() as u64));
    world.backups.release(first);
    let before = world.fake.calls("cuMemcpyDtoHAsync_v2");
    let second = world.save(BackupKind::Host).unwrap();
    let blocks = second
        .layout
        .spans(0..second.layout.bytes(), SIZES.block_bytes);
    let copies = blocks
        .into_iter()
        .map(|span| second.layout.copies(span).count());
    let made = world.fake.calls("cuMemcpyDtoHAsync_v2") - before;
    assert_eq!(made, copies.sum::<usize>() as u64);
    world.backups.release(second);
    world.end();
}

#[test]
fn what_is_locked_goes_directly_and_the_rest_through_the_ring() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let warm = world.save(BackupKind::Disk).unwrap();
    // The ring has most of its slots by now. After two or three blocks, the driver refuses to page-lock.
    let refused = SIZES.slots as u64 - world.fake.calls("cuMemHostRegister_v2") + 3;
    world.fake.fail("cuMemHostRegister_v2", refused, 1);
    let saved = world.fill(3);
    let mut backup = world.save(BackupKind::Host).unwrap();
    world.backups.finish_locking();
    assert!(!backup.locked().is_zero() && backup.locked() < Bytes(backup.layout.bytes() as u64));
    for round in 0..2 {
        world.fill(round);
        world.restore(&mut backup).unwrap();
        assert_eq!(world.contents(), saved);
    }
    drop((warm, backup));
    world.end();
}

/// As if the keeper worked from the beginning and the ring from the end.
#[test]
fn what_is_locked_during_a_copy_goes_directly() {
    for way in [Way::ToHost, Way::ToDevice] {
        let mut world = World::new(STAYS, TemporaryFile::open);
        let saved = world.fill(1);
        let mut backup = world.save(BackupKind::Host).unwrap();
        let memory = Arc::new(unlocked_copy(&world, &backup));
        backup.contents = Contents::Host(Arc::clone(&memory));
        let new = world.fill(2);
        let staged = Mutex::new(0);
        let lock_all = || {
            // The second thread waits until everything is page-locked.
            let mut staged = staged.lock().unwrap();
            *staged += 1;
            if *staged == 1 {
                let mut blocks = 0..memory.locked_blocks().len();
                blocks.try_for_each(|block| memory.lock(block)).unwrap();
            }
        };
        let layout = &backup.layout;
        let mut spans = layout.spans(0..layout.bytes(), SIZES.piece_bytes);
        spans.reverse();
        let ringed = Staged::new(layout, &spans, Some(&memory));
        let copied = world
            .backups
            .with_link(Some(&memory), |link, sizes| match way {
                Way::ToHost => pipeline::load(link, sizes, &ringed, |span, content| {
                    // SAFETY: each span is given to one thread.
                    unsafe { memory.write(span.start, content) };
                    lock_all();
                    Ok(())
                }),
                Way::ToDevice => pipeline::store(link, sizes, &ringed, |span, content| {
                    // SAFETY: nothing writes to it.
                    unsafe { memory.read(span.start, content) };
                    lock_all();
                    Ok(())
                }),
            });
        copied.unwrap();
        let through_the_ring = staged.into_inner().unwrap();
        assert!(
            (1..=SIZES.slots).contains(&through_the_ring),
            "{through_the_ring} of {}",
            spans.len()
        );
        assert!(spans.len() > 4 * SIZES.slots);
        let now = if matches!(way, Way::ToHost) {
            new
        } else {
            saved
        };
        assert!(world.contents() == now, "{way:?}");
        let copies = world.ranges.iter().map(|&range| copy_of(&backup, range));
        assert!(copies.eq(now), "{way:?}");
        drop((memory, backup));
        world.end();
    }
}

/// Returns memory with the contents of a backup. None of it is page-locked, and the keeper does not know it.
fn unlocked_copy(world: &World, backup: &CudaBackup) -> HostMemory {
    let Contents::Host(memory) = &backup.contents else {
        panic!("it is in a file");
    };
    let mut content = vec![0; backup.layout.bytes()];
    let queue = Arc::clone(&world.backups.queue);
    let copy = HostMemory::map(queue, content.len(), SIZES.block_bytes).unwrap();
    // SAFETY: nothing writes to a backup.
    unsafe { memory.read(0, &mut content) };
    for (block, content) in content.chunks(SIZES.block_bytes).enumerate() {
        // SAFETY: no one else uses it.
        unsafe { copy.write(block * SIZES.block_bytes, content) };
    }
    copy
}

#[test]
fn parts_come_back_and_nothing_beside_them() {
    for kind in KINDS {
        let mut world = World::new(STAYS, TemporaryFile::open);
        let saved = world.fill(7);
        let mut backup = world.save(kind).unwrap();
        let now = world.fill(8);
        // All of one range, a part of another that spans pieces, and a range of one byte.
        let (whole, part, byte) = (world.ranges[1], world.ranges[3], world.ranges[5]);
        let part = MemoryRange {
            address: part.address + Bytes(70_000),
            size: Bytes(100_000),
        };
        world
            .backups
            .restore(&mut backup, &[part, whole, byte])
            .unwrap();
        let mut expected = now;
        expected[1].clone_from(&saved[1]);
        expected[3][70_000..170_000].copy_from_slice(&saved[3][70_000..170_000]);
        expected[5].clone_from(&saved[5]);
        assert!(world.contents() == expected, "{kind:?}");
        drop(backup);
        world.end();
    }
}

#[test]
fn the_host_copy_is_what_was_saved() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let saved = world.fill(11);
    let on_disk = world.save(BackupKind::Disk).unwrap();
    let on_host = world.save(BackupKind::Host).unwrap();
    world.fill(12);
    for (range, saved) in world.ranges.iter().zip(&saved) {
        assert!(copy_of(&on_host, *range) == *saved);
        assert_eq!(CudaBackups::host_copy(&on_disk, *range), None);
    }
    let live: u64 = world.ranges.iter().map(|range| range.size.get()).sum();
    let bytes = [&on_host, &on_disk].map(CudaBackups::bytes);
    let [(host, Bytes::ZERO), (Bytes::ZERO, disk)] = bytes else {
        panic!("{bytes:?}");
    };
    for bytes in [host, disk] {
        assert!((live..live + 8192).contains(&bytes.get()), "{bytes:?}");
    }
    drop((on_host, on_disk));
    world.end();
}

#[test]
fn backups_go_from_thread_to_thread() {
    fn is_send<T: Send>() {}
    is_send::<CudaBackups>();
    is_send::<CudaBackup>();
}

#[test]
fn nothing_can_be_saved_too() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    for kind in KINDS {
        let mut backup = save(&mut world.backups, &[], kind).unwrap();
        world.backups.restore(&mut backup, &[]).unwrap();
        world.backups.release(backup);
    }
    world.end();
}

/// Several backups of different sizes and kinds are released, dropped and partly restored, with occasional
/// failures.
#[test]
fn a_thousand_random_steps() {
    const CALLS: [&str; 6] = [
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemHostRegister_v2",
        "cuEventRecord",
        "cuStreamSynchronize",
        "cuEventSynchronize",
    ];
    let mut world = World::new(STAYS, TemporaryFile::open);
    let mut random = Random(2026);
    let mut held: Vec<(CudaBackup, Vec<MemoryRange>, Vec<Vec<u8>>)> = Vec::new();
    for step in 0..1000 {
        if random.below(10) == 0 {
            let call = CALLS[random.below(CALLS.len())];
            world.fake.fail(call, 1 + random.below(20) as u64, 999);
        }
        let number = random.below(held.len() + 1);
        match random.below(4) {
            0 | 1 if held.len() < 4 => {
                let contents = world.fill(step);
                let chosen: Vec<_> = (0..contents.len())
                    .filter(|_| random.below(3) > 0)
                    .collect();
                let ranges: Vec<_> = chosen.iter().map(|&index| world.ranges[index]).collect();
                let kind = KINDS[random.below(2)];
                let outcome = save(&mut world.backups, &ranges, kind);
                assert!(
                    world.contents() == contents,
                    "{step}: a save changes nothing"
                );
                if let Ok(backup) = outcome {
                    let contents = chosen.iter().map(|&index| contents[index].clone());
                    held.push((backup, ranges, contents.collect()));
                }
            }
            2 if number < held.len() => {
                let (backup, ..) = held.swap_remove(number);
                match random.below(3) {
                    0 => drop(backup),
                    _ => world.backups.release(backup),
                }
                world.backups.set_retain(random.below(2) == 0);
                if random.below(8) == 0 {
                    world.backups.release_retained();
                    assert_eq!(world.backups.kept().bytes(), Bytes::ZERO);
                }
            }
            _ if number < held.len() => {
                let (backup, ranges, contents) = &mut held[number];
                world.fill(step);
                // Each injected failure happens once, so a second or a third attempt works.
                let mut attempts = 1;
                while let Err(error) = world.backups.restore(backup, ranges) {
                    assert!(attempts < 20, "{step}: {error}");
                    attempts += 1;
                }
                let restored = ranges.iter().map(|range| content_mut(*range).to_vec());
                assert!(restored.eq(contents.iter().cloned()), "{step}");
            }
            _ => {}
        }
    }
    world.fake.fail_none();
    drop(held);
    world.end();
}
