//! Which memory is kept between two backups, and for how long.

use std::time::Instant;

use super::*;
use crate::backup::keeper::Blocks;

fn address_of(backup: &CudaBackup) -> Option<usize> {
    let first = backup.layout.copies(0..1).next().unwrap();
    let range = MemoryRange {
        address: first.address,
        size: Bytes(1),
    };
    CudaBackups::host_copy(backup, range)
}

#[test]
fn memory_waits_for_the_next_backup_and_goes_when_it_is_released() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    for retain in [false, true] {
        world.backups.set_retain(retain);
        let first = world.save(BackupKind::Host).unwrap();
        let address = address_of(&first);
        world.backups.release(first);
        assert!(!world.backups.kept().bytes().is_zero());
        let second = world.save(BackupKind::Host).unwrap();
        assert_eq!(address_of(&second), address);
        // Memory that a backup uses is not released.
        world.backups.release_retained();
        assert_eq!(world.backups.kept().bytes(), Bytes::ZERO);
        let copy = copy_of(&second, world.ranges[0]);
        assert_eq!(copy, world.contents()[0]);
        world.backups.release(second);
        world.backups.release_retained();
        assert_eq!(world.backups.kept().bytes(), Bytes::ZERO);
        assert_eq!(world.fake.live().host_allocations, 0);
        assert_eq!(world.fake.live().streams, 0);
    }
    world.end();
}

#[test]
fn memory_that_is_not_retained_goes_by_itself() {
    let mut world = World::new(GOES, TemporaryFile::open);
    world.backups.set_retain(true);
    let backup = world.save(BackupKind::Host).unwrap();
    world.backups.finish_locking();
    world.backups.release(backup);
    assert!(!world.backups.kept().bytes().is_zero());
    assert_ne!(world.fake.live().host_allocations, 0);
    world.backups.set_retain(false);
    while world.fake.live().host_allocations > 0 || !world.backups.kept().bytes().is_zero() {
        thread::yield_now();
    }
    world.end();
}

/// Releasing memory calls the driver, and the copies would wait for that.
#[test]
fn memory_that_is_not_retained_stays_while_copies_are_under_way() {
    let mut world = World::new(GOES, TemporaryFile::open);
    let copied = new_memory(&world);
    let copying = world.backups.keeper.begin_copying(&copied);
    let backup = world.save(BackupKind::Host).unwrap();
    world.backups.release(backup);
    let_keeper_look(&mut world);
    assert!(!world.backups.kept().bytes().is_zero());
    drop(copying);
    while !world.backups.kept().bytes().is_zero() {
        thread::yield_now();
    }
    drop(copied);
    world.end();
}

/// A new backup of the same ranges keeps the address of the last one, even if another backup's memory is idle.
#[test]
fn a_backup_has_the_memory_again_that_it_had_just_now() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let [first, second] = [(); 2].map(|()| world.save(BackupKind::Host).unwrap());
    let addresses = [address_of(&first), address_of(&second)];
    world.backups.release(first);
    world.backups.release(second);
    let again = world.save(BackupKind::Host).unwrap();
    assert_eq!(address_of(&again), addresses[1]);
    world.backups.release(again);
    world.end();
}

#[test]
fn backups_in_the_hosts_memory_are_retained_if_that_was_asked_for() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let in_memory = world.save(BackupKind::Host).unwrap();
    let in_file = world.save(BackupKind::Disk).unwrap();
    for retain in [false, true, false] {
        world.backups.set_retain(retain);
        assert_eq!(world.backups.retains(&in_memory), retain);
        assert!(!world.backups.retains(&in_file));
    }
    world.backups.release(in_memory);
    world.backups.release(in_file);
    world.end();
}

/// A growing region must not leave behind memory that has become too small.
#[test]
fn growing_backups_keep_one_memory() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    world.backups.set_retain(true);
    let address = world.driver.allocate(Bytes::mib(40)).unwrap();
    let mut held_max = Bytes::ZERO;
    for size in 1..=40 {
        let size = Bytes::mib(size);
        let range = MemoryRange { address, size };
        let backup = save(&mut world.backups, &[range], BackupKind::Host).unwrap();
        world.backups.release(backup);
        held_max = held_max.max(world.backups.kept().bytes());
        assert!(
            held_max <= size + Bytes(size.get() / 4) + Bytes::mib(3),
            "{size}"
        );
    }
    world.driver.free(address, Bytes::mib(40)).unwrap();
    world.end();
}

#[test]
fn a_small_backup_leaves_the_memory_of_a_large_one_alone() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let address = world.driver.allocate(Bytes::mib(16)).unwrap();
    let save = |world: &mut World, mib| {
        let size = Bytes::mib(mib);
        let range = MemoryRange { address, size };
        save(&mut world.backups, &[range], BackupKind::Host).unwrap()
    };
    let large = save(&mut world, 16);
    let its_address = address_of(&large);
    world.backups.release(large);
    let small = save(&mut world, 1);
    assert_ne!(address_of(&small), its_address);
    let large = save(&mut world, 16);
    assert_eq!(address_of(&large), its_address);
    world.backups.release(small);
    world.backups.release(large);
    world.driver.free(address, Bytes::mib(16)).unwrap();
    world.end();
}

/// While its blocks are being page-locked, a backup is dropped; another is released, and so is its kept memory; a third
/// outlives its `CudaBackups`.
#[test]
fn locking_stops_wherever_it_is() {
    for _ in 0..20 {
        let mut world = World::new(STAYS, TemporaryFile::open);
        let dropped = world.save(BackupKind::Host).unwrap();
        let released = world.save(BackupKind::Host).unwrap();
        drop(dropped);
        world.backups.release(released);
        world.backups.release_retained();
        assert_eq!(world.backups.kept().bytes(), Bytes::ZERO);
        let outliving = world.save(BackupKind::Host).unwrap();
        let saved = world.contents();
        let context = Arc::clone(world.backups.queue.context());
        let other = CudaBackups::with(context, SIZES, STAYS, TemporaryFile::open);
        drop(std::mem::replace(&mut world.backups, other));
        assert_eq!(copy_of(&outliving, world.ranges[3]), saved[3]);
        drop(outliving);
        world.end();
    }
}

/// Right after a pause, the program has the driver to itself and queries the free memory. Page-locking takes device
/// memory and blocks other driver calls.
#[test]
fn nothing_is_page_locked_right_after_a_backup_unless_somebody_waits() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    let saved = world.fill(1);
    let mut backup = world.save(BackupKind::Host).unwrap();
    let Contents::Host(memory) = &backup.contents else {
        panic!("it is in memory");
    };
    let memory = Arc::clone(memory);
    let locked = memory.locked_blocks();
    let_keeper_look(&mut world);
    assert_eq!(memory.locked_blocks(), locked);
    let blocks = backup.layout.bytes().div_ceil(SIZES.block_bytes);
    assert!(locked[..blocks].contains(&false));
    world.backups.finish_locking();
    assert_eq!(backup.locked(), Bytes(backup.layout.bytes() as u64));
    // The memory after the backup's end is unused and not resident.
    assert!(!memory.locked_blocks()[blocks..].contains(&true));
    world.fill(2);
    world.restore(&mut backup).unwrap();
    assert_eq!(world.contents(), saved);
    world.backups.release(backup);
    drop(memory);
    world.end();
}

/// The copies would wait for the driver.
#[test]
fn nothing_else_is_page_locked_during_copies_unless_somebody_waits() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let [copied, first, second] = [(); 3].map(|()| new_memory(&world));
    let copying = world.backups.keeper.begin_copying(&copied);
    drop(world.backups.keeper.begin_copying(&copied));
    world.backups.keeper.lock_beside(&first, 1, Blocks::All);
    let_keeper_look(&mut world);
    assert!(!first.locked_blocks()[0]);
    world.backups.finish_locking();
    assert!(first.locked_blocks()[0]);
    world.backups.keeper.lock_beside(&second, 1, Blocks::All);
    drop(copying);
    wait_until_locked(&world, &second, || ());
    drop((copied, first, second));
    world.end();
}

/// Copies are in progress during each step and between two steps.
#[test]
fn the_copies_of_a_backup_end_with_its_last_step() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let backup = world.save(BackupKind::Host).unwrap();
    world.backups.finish_locking();
    world.backups.release(backup);
    let ranges = world.ranges.clone();
    let other = new_memory(&world);
    let mut backup = world.backups.begin(&ranges, BackupKind::Host).unwrap();
    let mut saved = world.backups.save_next(&mut backup).unwrap();
    assert!(saved < ranges.len());
    world.backups.keeper.lock_beside(&other, 1, Blocks::All);
    while saved < ranges.len() {
        let_keeper_look(&mut world);
        assert!(!other.locked_blocks()[0], "{saved}");
        saved = world.backups.save_next(&mut backup).unwrap();
    }
    wait_until_locked(&world, &other, || ());
    drop(other);
    world.backups.release(backup);
    world.end();
}

/// Page-locking makes these copies faster, so the quiet time does not apply to them.
#[test]
fn what_is_copied_is_page_locked_at_once_and_before_all_else() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    let [first, copied] = [(); 2].map(|()| new_memory(&world));
    drop(world.backups.keeper.begin_copying(&copied));
    world.backups.keeper.lock_beside(&first, 1, Blocks::All);
    world.backups.keeper.lock_beside(&copied, 1, Blocks::All);
    let_keeper_look(&mut world);
    let locked = || [&first, &copied].map(|memory| memory.locked_blocks()[0]);
    assert_eq!(locked(), [false, false]);
    let copying = world.backups.keeper.begin_copying(&copied);
    while locked() == [false, false] {
        thread::yield_now();
    }
    let_keeper_look(&mut world);
    assert_eq!(locked(), [false, true]);
    drop(copying);
    let_keeper_look(&mut world);
    assert_eq!(locked(), [false, true]);
    world.backups.finish_locking();
    assert_eq!(locked(), [true, true]);
    drop((first, copied));
    world.end();
}

/// The program has the driver to itself after a resume: two queries of the free memory, with no allocation between
/// them, return the same.
#[test]
fn no_block_is_under_way_when_copies_have_ended() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    let range = MemoryRange {
        address: world.driver.allocate(Bytes::mib(64)).unwrap(),
        size: Bytes::mib(64),
    };
    for _ in 0..3 {
        let memory = new_memory(&world);
        let is_locked = || memory.locked_blocks()[0];
        drop(world.backups.keeper.begin_copying(&memory));
        world.backups.keeper.lock_beside(&memory, 1, Blocks::All);
        let keeper = &world.backups.keeper;
        let before = thread::scope(|scope| {
            let copied = scope.spawn(|| {
                thread::sleep(Duration::from_millis(2));
                let copying = keeper.begin_copying(&memory);
                thread::sleep(Duration::from_millis(2));
                drop(copying);
                is_locked()
            });
            // The stand-in runs one call at a time, and this one takes a while.
            let mut content = vec![0; 64 << 20];
            world.driver.read(range.address, &mut content).unwrap();
            copied.join().unwrap()
        });
        let_keeper_look(&mut world);
        assert_eq!(is_locked(), before);
    }
    world.driver.free(range.address, range.size).unwrap();
    world.end();
}

/// The keeper wakes up by itself. A program that pauses and resumes without end does not keep other memory from
/// being page-locked.
#[test]
fn page_locking_goes_on_after_the_quiet_and_where_that_has_no_end() {
    let short = Times {
        quiet: Duration::from_millis(20),
        ..STAYS
    };
    for (times, again) in [(short, false), (IMPATIENT, false), (IMPATIENT, true)] {
        let mut world = World::new(times, TemporaryFile::open);
        let [copied, other] = [(); 2].map(|()| new_memory(&world));
        drop(world.backups.keeper.begin_copying(&copied));
        world.backups.keeper.lock_beside(&other, 1, Blocks::All);
        wait_until_locked(&world, &other, || {
            if again {
                drop(world.backups.keeper.begin_copying(&copied));
            }
        });
        drop((copied, other));
        world.end();
    }
}

/// The quiet time begins at the end of the copies: not at their start, not when the memory was listed, and not at
/// the end of an earlier quiet time.
#[test]
fn there_is_quiet_after_long_copies_of_what_was_listed_long_ago() {
    let quiet = IMPATIENT.patience;
    let mut world = World::new(Times { quiet, ..IMPATIENT }, TemporaryFile::open);
    for _ in 0..2 {
        let [copied, other] = [(); 2].map(|()| new_memory(&world));
        let copying = world.backups.keeper.begin_copying(&copied);
        world.backups.keeper.lock_beside(&other, 1, Blocks::All);
        thread::sleep(2 * quiet);
        let ended = Instant::now();
        drop(copying);
        thread::sleep(quiet / 10);
        let is_locked = other.locked_blocks()[0];
        assert!(!is_locked || ended.elapsed() >= quiet);
        wait_until_locked(&world, &other, || ());
    }
    world.end();
}

/// Restores run while the memory is still to be page-locked, and when it is.
#[test]
fn contents_come_back_while_memory_is_page_locked() {
    for quiet in [Duration::ZERO, LONG] {
        let mut world = World::new(Times { quiet, ..STAYS }, TemporaryFile::open);
        for round in 0..10 {
            let saved = world.fill(round);
            let mut backup = world.save(BackupKind::Host).unwrap();
            for restored in 0..3 {
                world.fill(100 + restored);
                world.restore(&mut backup).unwrap();
                assert!(world.contents() == saved, "{quiet:?} {round} {restored}");
            }
            match round % 2 {
                0 => world.backups.release(backup),
                _ => drop(backup),
            }
        }
        world.end();
    }
}

/// The next copies then go directly to and from the blocks.
#[test]
fn what_a_backup_has_written_to_is_page_locked_meanwhile() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    for is_saved in [true, false] {
        let block = SIZES.block_bytes;
        let queue = Arc::clone(&world.backups.queue);
        let memory = Arc::new(HostMemory::map(queue, 4 * block, block).unwrap());
        let written = 3 * block - 1;
        let copying = world.backups.keeper.begin_saving(&memory, written);
        // SAFETY: no one else uses it.
        let write = |part: Range<usize>| unsafe { copying.write(part.start, &vec![1; part.len()]) };
        let is_locked = |expected: [bool; 4]| memory.locked_blocks()[..4] == expected;
        write(block + 1..2 * block);
        write(2 * block..written);
        let_keeper_look(&mut world);
        assert!(is_locked([false; 4]));
        write(block..block + 1);
        while !is_locked([false, true, false, false]) {
            thread::yield_now();
        }
        write(block..2 * block);
        write(0..block);
        while !is_locked([true, true, false, false]) {
            thread::yield_now();
        }
        if is_saved {
            copying.end_saved()
        } else {
            // A block that is not resident would use host memory that no backup has asked for.
            drop(copying)
        }
        let_keeper_look(&mut world);
        assert!(is_locked([true, true, false, false]));
        world.backups.finish_locking();
        assert!(is_locked([true, true, is_saved, false]));
        // With nothing left to page-lock, `finish_locking` does not wait for the end of copies.
        let copying = world.backups.keeper.begin_saving(&memory, block);
        world.backups.finish_locking();
        drop(copying);
        // Writing half of a block twice does not fill the block.
        for _ in 0..2 {
            let copying = world.backups.keeper.begin_saving(&memory, 4 * block);
            // SAFETY: as above.
            unsafe { copying.write(3 * block, &vec![1; block / 2]) };
        }
        assert!(!memory.is_resident(3));
    }
    world.end();
}

/// The keeper's thread may not have run during a backup. A block that becomes resident last may be page-locked only
/// by the next one.
#[test]
fn most_of_a_first_backup_is_page_locked_before_its_end() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    let size = Bytes::mib(16);
    let address = world.driver.allocate(size).unwrap();
    let is_mostly_locked = |world: &mut World| {
        let range = MemoryRange { address, size };
        let backup = save(&mut world.backups, &[range], BackupKind::Host).unwrap();
        let locked = backup.locked();
        drop(backup);
        let_keeper_look(world);
        locked > Bytes::mib(8)
    };
    assert!((0..1_000).any(|_| is_mostly_locked(&mut world)));
    world.driver.free(address, size).unwrap();
    world.end();
}

/// Idle memory is still resident from the last backup.
#[test]
fn what_is_resident_already_is_page_locked_at_once() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    let block = SIZES.block_bytes;
    let queue = Arc::clone(&world.backups.queue);
    let memory = Arc::new(HostMemory::map(queue, 2 * block, block).unwrap());
    // SAFETY: no one else uses the memory.
    unsafe { memory.write(0, &vec![1; block]) };
    let copying = world.backups.keeper.begin_saving(&memory, 2 * block);
    while !memory.locked_blocks()[0] {
        thread::yield_now();
    }
    assert!(!memory.locked_blocks()[1]);
    drop((copying, memory));
    world.end();
}

/// A backup that failed leaves its memory in the list.
#[test]
fn the_end_of_a_backup_has_its_own_memory_page_locked() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    let [failed, saved] = [(); 2].map(|()| new_memory(&world));
    drop(world.backups.keeper.begin_saving(&failed, 1));
    let copying = world.backups.keeper.begin_saving(&saved, 1);
    copying.end_saved();
    world.backups.finish_locking();
    assert!(saved.locked_blocks()[0]);
    assert!(!failed.locked_blocks()[0]);
    drop((failed, saved));
    world.end();
}

/// Wakes the keeper repeatedly, so that it looks at its list.
fn let_keeper_look(world: &mut World) {
    for _ in 0..100 {
        world.backups.set_retain(true);
        world.backups.set_retain(false);
        thread::sleep(Duration::from_micros(50));
    }
}

/// Waits until the keeper has page-locked a block and no longer holds the memory. Calls `meanwhile` repeatedly.
fn wait_until_locked(world: &World, memory: &HostMemory, meanwhile: impl Fn()) {
    while !memory.locked_blocks()[0] {
        meanwhile();
        thread::yield_now();
    }
    world.backups.finish_locking();
}

/// Maps host memory that is not used yet.
fn new_memory(world: &World) -> Arc<HostMemory> {
    let queue = Arc::clone(&world.backups.queue);
    Arc::new(HostMemory::map(queue, 1, SIZES.block_bytes).unwrap())
}

/// A caller that waits for the keeper is notified, whatever both are doing when the keeper reaches the end of its
/// list.
#[test]
fn the_end_of_locking_is_always_reported() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let queue = Arc::clone(&world.backups.queue);
    let memory = HostMemory::map(queue, 1, SIZES.block_bytes).unwrap();
    let memory = Arc::new(memory);
    // All but the first time, the listed memory has nothing to lock.
    for _ in 0..20_000 {
        world.backups.keeper.lock_beside(&memory, 1, Blocks::All);
        world.backups.finish_locking();
        assert!(memory.locked_blocks()[0]);
    }
    drop(memory);
    world.end();
}

/// Page-locking a large backup's memory takes many seconds.
#[test]
fn what_is_released_does_not_wait_for_what_others_have_locked() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let idle = world.save(BackupKind::Host).unwrap();
    world.backups.finish_locking();
    world.backups.release(idle);
    let block_bytes = 4 << 10;
    let overtakes = |world: &mut World| {
        let queue = Arc::clone(&world.backups.queue);
        let large = HostMemory::map(queue, 16 << 20, block_bytes).unwrap();
        let large = Arc::new(large);
        world
            .backups
            .keeper
            .lock_beside(&large, 16 << 20, Blocks::All);
        while !large.locked_blocks()[0] {
            thread::yield_now();
        }
        world.backups.release_retained();
        large.locked_blocks().contains(&false)
    };
    // The test's own thread may not have run during all that time.
    assert!((0..20).any(|_| overtakes(&mut world)));
    world.end();
}

/// After the keeper's thread has ended, no caller waits for it, and the next backup starts another.
#[test]
fn a_keeper_that_panics_is_not_waited_for() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    for round in 0..3 {
        let saved = world.fill(round);
        let mut backup = world.save(BackupKind::Host).unwrap();
        let Contents::Host(memory) = &backup.contents else {
            panic!("it is in memory");
        };
        // A block beyond the last one makes the keeper panic.
        world
            .backups
            .keeper
            .lock_beside(memory, usize::MAX, Blocks::All);
        world.backups.finish_locking();
        while !our_threads().is_empty() {
            thread::yield_now();
        }
        // Without the thread, there is nothing to wait for.
        world.backups.finish_locking();
        world.fill(round + 100);
        world.restore(&mut backup).unwrap();
        assert_eq!(world.contents(), saved, "{round}");
        world.backups.release(backup);
        // Idle memory can be released without the thread.
        assert!(!world.backups.kept().bytes().is_zero());
        world.backups.release_retained();
        assert_eq!(world.backups.kept().bytes(), Bytes::ZERO);
        assert_eq!(world.fake.live().host_allocations, 0);
    }
    let backup = world.save(BackupKind::Host).unwrap();
    world.backups.finish_locking();
    assert_eq!(backup.locked(), Bytes(backup.layout.bytes() as u64));
    drop(backup);
    world.end();
}

/// When a process exits, the driver shuts down while other threads still run.
#[test]
fn no_keeper_calls_a_driver_that_is_gone() {
    const CHILD: &str = "LOWTIDE_BACKUP_TEST_ENDS";
    const TEST: &str = "backup::tests::keeping::no_keeper_calls_a_driver_that_is_gone";
    if std::env::var_os(CHILD).is_some() {
        end_while_memory_is_locked();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child.args([TEST, "--exact"]).env(CHILD, "1").output();
    let child = child.unwrap();
    let messages = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{messages}");
    assert!(
        !messages.contains("after the driver was gone"),
        "{messages}"
    );
}

/// Exits the process with thousands of blocks left to page-lock.
fn end_while_memory_is_locked() -> ! {
    extern "C" fn linger() {
        thread::sleep(Duration::from_millis(50));
    }
    // Registered before the driver's exit handler, so it runs after that one.
    // SAFETY: the function is ours.
    assert_eq!(unsafe { libc::atexit(linger) }, 0);
    let mut world = World::new(STAYS, TemporaryFile::open);
    let many = Sizes {
        piece_bytes: 4 << 10,
        block_bytes: 4 << 10,
        ..SIZES
    };
    let context = Arc::clone(world.backups.queue.context());
    world.backups = CudaBackups::with(context, many, STAYS, TemporaryFile::open);
    let size = Bytes::mib(16);
    let address = world.driver.allocate(size).unwrap();
    let range = MemoryRange { address, size };
    let _backup = save(&mut world.backups, &[range], BackupKind::Host).unwrap();
    std::process::exit(0);
}

/// The system would give out these addresses, and kill the process when it writes to them.
#[test]
fn what_the_host_has_no_memory_for_is_refused() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let saved = world.fill(1);
    // The request is refused before the device is used.
    let range = MemoryRange {
        address: world.ranges[0].address,
        size: Bytes::gib(1 << 14),
    };
    let error = save(&mut world.backups, &[range], BackupKind::Host).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("the host has no 16.00 TiB for a backup ("),
        "{text}"
    );
    assert_eq!(world.contents(), saved);
    world.end();
}

/// Devices that are paused at the same time: two backups, each of more than half of the host's memory, which have
/// not written anything yet.
#[test]
fn what_the_host_has_is_promised_to_one_backup() {
    let world = World::new(STAYS, TemporaryFile::open);
    let left = available::unpromised().unwrap();
    let most = usize::try_from(left.get() / 10 * 6).unwrap();
    let map = || HostMemory::map(Arc::clone(&world.backups.queue), most, SIZES.block_bytes);
    for _ in 0..2 {
        let first = map().unwrap();
        let refused = map().unwrap_err();
        assert!(
            matches!(refused, BackupError::NoHostMemory { .. }),
            "{refused}"
        );
        drop(first);
    }
    world.end();
}

/// Resident memory is not promised any more, whether it was written or page-locked.
#[test]
fn what_has_been_written_is_not_promised_any_more() {
    let world = World::new(STAYS, TemporaryFile::open);
    let queue = Arc::clone(&world.backups.queue);
    let bytes = 4 * SIZES.block_bytes;
    let before = available::promised();
    let memory = HostMemory::map(queue, bytes, SIZES.block_bytes).unwrap();
    assert_eq!(available::promised(), before + Bytes(bytes as u64));
    // SAFETY: no one else uses the memory.
    let write = |block| unsafe { memory.write(block * SIZES.block_bytes, &[1; SIZES.block_bytes]) };
    assert!(write(0));
    memory.lock(0).unwrap();
    memory.lock(1).unwrap();
    assert_eq!(available::promised(), before + Bytes(bytes as u64 / 2));
    assert!(!write(0));
    assert!(!write(1));
    assert_eq!(available::promised(), before + Bytes(bytes as u64 / 2));
    assert!((2..4).all(write));
    assert_eq!(available::promised(), before);
    drop(memory);
    assert_eq!(available::promised(), before);
    world.end();
}

/// Otherwise other devices' backups would get memory that this one is about to use.
#[test]
fn what_backups_that_failed_have_written_is_promised_again() {
    let mut world = World::new(QUIET, TemporaryFile::open);
    let block = SIZES.block_bytes;
    let queue = Arc::clone(&world.backups.queue);
    let before = available::promised();
    let memory = Arc::new(HostMemory::map(queue, 4 * block, block).unwrap());
    for _ in 0..8 {
        let copying = world.backups.keeper.begin_saving(&memory, 4 * block);
        // SAFETY: no one else uses the memory.
        unsafe { copying.write(0, &vec![1; block / 2]) };
    }
    let written = block / 2;
    let promised = Bytes((4 * block - written) as u64);
    assert_eq!(available::promised() - before, promised);
    drop(memory);
    assert_eq!(available::promised(), before);
    world.end();
}

/// Memory that an earlier backup listed may be page-locked while the next one begins.
#[test]
fn what_is_page_locked_is_resident_whenever_it_is_counted_anew() {
    let world = World::new(QUIET, TemporaryFile::open);
    let (block, blocks) = (4 << 10, 512);
    let before = available::promised();
    for _ in 0..50 {
        let queue = Arc::clone(&world.backups.queue);
        let memory = HostMemory::map(queue, blocks * block, block).unwrap();
        for number in 0..blocks {
            // SAFETY: no one else uses the memory.
            unsafe { memory.write(number * block, &[1]) };
        }
        thread::scope(|scope| {
            scope.spawn(|| (0..blocks).for_each(|number| memory.lock(number).unwrap()));
            scope.spawn(|| (0..200).for_each(|_| memory.count_anew()));
        });
        assert!((0..blocks).all(|number| memory.is_resident(number)));
        assert_eq!(available::promised(), before, "all of it is");
    }
    world.end();
}

/// Contents can be restored however little memory the host has left. A ring that is too small is not kept.
#[test]
fn a_host_without_memory_for_the_whole_ring_has_a_smaller_one() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let context = Arc::clone(world.backups.queue.context());
    // The full ring would take 16 TiB.
    let sizes = Sizes {
        slots: 1 << 30,
        ..SIZES
    };
    world.backups = CudaBackups::with(context, sizes, STAYS, TemporaryFile::open);
    for kind in KINDS {
        let saved = world.fill(1);
        let mut backup = world.save(kind).unwrap();
        world.fill(2);
        world.restore(&mut backup).unwrap();
        assert_eq!(world.contents(), saved, "{kind:?}");
        drop(backup);
        assert_eq!(world.fake.live().streams, 0, "{kind:?}");
        assert_eq!(world.backups.kept().bytes(), Bytes::ZERO, "{kind:?}");
    }
    world.end();
}
