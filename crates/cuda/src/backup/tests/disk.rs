//! Files whose operations fail, whose disk is full, or that return changed contents.

use std::sync::Mutex;

use super::*;
use crate::backup::file::Storage;
use std::io;
use std::path::Path;

/// The next fault of the storage: the operation, the countdown of its calls, and the kind of failure.
static FAULT: Mutex<Option<(Operation, usize, Fault)>> = Mutex::new(None);
/// How often each operation was called.
static COUNTS: Mutex<[usize; 4]> = Mutex::new([0; 4]);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Operation {
    Open,
    Write,
    Finish,
    Read,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    Error(i32),
    /// The directory is in host memory, and that is full.
    NoMemory,
    /// One bit is flipped in what is read.
    Damage,
    /// The thread panics.
    Panic,
}

const OPERATIONS: [Operation; 4] = [
    Operation::Open,
    Operation::Write,
    Operation::Finish,
    Operation::Read,
];

/// A file whose operations can be made to fail.
#[derive(Debug)]
struct FaultyFile(Box<dyn Storage>);

/// Counts a call of an operation, and returns its fault if one is due.
fn next_fault(operation: Operation) -> Option<Fault> {
    COUNTS.lock().unwrap()[operation as usize] += 1;
    let mut fault = FAULT.lock().unwrap();
    let (_, countdown, kind) = fault.as_mut().filter(|(which, ..)| *which == operation)?;
    *countdown -= 1;
    let kind = *kind;
    (*countdown == 0).then(|| {
        *fault = None;
        kind
    })
}

fn fail_if_due(operation: Operation) -> io::Result<()> {
    match next_fault(operation) {
        Some(Fault::Error(code)) => Err(io::Error::from_raw_os_error(code)),
        Some(Fault::Panic) => panic!("it was to panic"),
        _ => Ok(()),
    }
}

fn open_faulty(directory: &Path, bytes: Bytes) -> Result<Box<dyn Storage>, BackupError> {
    match next_fault(Operation::Open) {
        Some(Fault::Error(code)) => {
            let error = io::Error::from_raw_os_error(code);
            Err(BackupError::io(directory, "made", bytes, &error))
        }
        Some(Fault::NoMemory) => Err(BackupError::NoHostMemory {
            needed: bytes,
            message: "it was to fail".to_owned(),
            directory: Some(directory.to_path_buf()),
        }),
        _ => Ok(Box::new(FaultyFile(TemporaryFile::open(directory, bytes)?))),
    }
}

impl Storage for FaultyFile {
    fn write_all(&self, content: &[u8], offset: u64) -> io::Result<()> {
        fail_if_due(Operation::Write)?;
        self.0.write_all(content, offset)
    }

    fn read_all(&self, content: &mut [u8], offset: u64) -> io::Result<()> {
        let fault = next_fault(Operation::Read);
        match fault {
            Some(Fault::Error(code)) => return Err(io::Error::from_raw_os_error(code)),
            Some(Fault::Panic) => panic!("it was to panic"),
            _ => {}
        }
        self.0.read_all(content, offset)?;
        if fault == Some(Fault::Damage) {
            let middle = content.len() / 2;
            content[middle] ^= 0x10;
        }
        Ok(())
    }

    fn finish(&self) -> io::Result<()> {
        fail_if_due(Operation::Finish)?;
        self.0.finish()
    }

    fn link(&self, path: &Path) -> io::Result<()> {
        self.0.link(path)
    }
}

#[test]
fn a_backup_survives_every_failure_of_the_disk() {
    let counts = run(None).unwrap();
    for operation in OPERATIONS {
        let count = counts[operation as usize];
        assert!(count > 0, "{operation:?} was never asked for");
        for nth in 1..=count {
            let error = run(Some((operation, nth, Fault::Error(libc::EIO)))).unwrap_err();
            let is_io = matches!(&error, BackupError::Io { message, .. } if message.contains("Input/output"));
            assert!(is_io, "{operation:?} {nth}: {error}");
            if operation != Operation::Read {
                let full = run(Some((operation, nth, Fault::Error(libc::ENOSPC)))).unwrap_err();
                assert!(matches!(full, BackupError::NoRoom { .. }), "{full}");
            }
        }
    }
}

#[test]
fn damage_is_found_in_every_piece() {
    let counts = run(None).unwrap();
    for nth in 1..=counts[Operation::Read as usize] {
        let error = run(Some((Operation::Read, nth, Fault::Damage))).unwrap_err();
        assert!(matches!(error, BackupError::Corrupt { .. }), "{error}");
    }
}

/// Copies may be in progress at the panic. Their memory may be reused once the panic is caught further out.
#[test]
fn a_panic_waits_for_the_copies() {
    let mut world = World::new(STAYS, open_faulty);
    let saved = world.fill(1);
    let waits = |world: &World| world.fake.calls("cuStreamSynchronize");
    let fail = |operation| *FAULT.lock().unwrap() = Some((operation, 1, Fault::Panic));
    let before = waits(&world);
    fail(Operation::Write);
    let panicked = catch_unwind(AssertUnwindSafe(|| world.save(BackupKind::Disk).map(drop)));
    assert!(panicked.is_err());
    assert_eq!(waits(&world), before + 2, "of both streams");
    let mut backup = world.save(BackupKind::Disk).unwrap();
    world.fill(2);
    let before = waits(&world);
    fail(Operation::Read);
    let panicked = catch_unwind(AssertUnwindSafe(|| world.restore(&mut backup)));
    assert!(panicked.is_err());
    assert_eq!(waits(&world), before + 2, "of both streams");
    world.restore(&mut backup).unwrap();
    assert!(world.contents() == saved);
    world.backups.release(backup);
    world.end();
}

/// Saves and restores while one operation fails, and retries what failed. Returns how often each operation was
/// called, or the one error.
fn run(fault: Option<(Operation, usize, Fault)>) -> Result<[usize; 4], BackupError> {
    let mut world = World::new(STAYS, open_faulty);
    *COUNTS.lock().unwrap() = [0; 4];
    *FAULT.lock().unwrap() = fault;
    let mut errors = Vec::new();
    let saved = world.fill(1);
    let mut backup = world.save(BackupKind::Disk).unwrap_or_else(|error| {
        errors.push(error);
        world.save(BackupKind::Disk).unwrap()
    });
    assert!(world.contents() == saved, "{fault:?}");
    world.fill(2);
    if let Err(error) = world.restore(&mut backup) {
        errors.push(error);
        world.restore(&mut backup).unwrap();
    }
    assert!(world.contents() == saved, "{fault:?}");
    world.backups.release(backup);
    world.end();
    let counts = *COUNTS.lock().unwrap();
    assert!(errors.len() <= 1, "{fault:?}: {errors:?}");
    errors.pop().map_or(Ok(counts), Err)
}

/// A directory that is removed with the test.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        let name = format!("lowtide-backups-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn files(&self) -> usize {
        std::fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_file_has_no_name_and_its_room_goes_back() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let directory = Directory::new();
    world.backups.set_directory(directory.0.clone());
    let backup = world.save(BackupKind::Disk).unwrap();
    assert_eq!(directory.files(), 0);
    let open_files = || {
        let files = std::fs::read_dir("/proc/self/fd").unwrap();
        let targets = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        targets
            .filter(|path| path.starts_with(&directory.0))
            .count()
    };
    assert_eq!(open_files(), 1);
    world.backups.release(backup);
    assert_eq!(open_files(), 0);
    world.end();
}

#[test]
fn a_file_is_shown_by_a_name_for_each_range() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let directory = Directory::new();
    world.backups.set_directory(directory.0.clone());
    world.backups.set_shows_files(true);
    let saved = world.fill(1);
    for _ in 0..2 {
        let mut backup = world.save(BackupKind::Disk).unwrap();
        assert_eq!(directory.files(), world.ranges.len());
        let (_, size) = CudaBackups::bytes(&backup);
        for file in std::fs::read_dir(&directory.0).unwrap() {
            assert_eq!(file.unwrap().metadata().unwrap().len(), size.get());
        }
        world.fill(2);
        world.restore(&mut backup).unwrap();
        assert!(world.contents() == saved);
        world.backups.release(backup);
        assert_eq!(directory.files(), 0);
    }
    world.end();
}

/// Printed by the child process before it exits.
const SHOWN: &str = "its files are shown";

#[test]
fn no_file_outlives_its_process() {
    const CHILD: &str = "LOWTIDE_BACKUP_TEST_SHOWS";
    const TEST: &str = "backup::tests::disk::no_file_outlives_its_process";
    if let Some(directory) = std::env::var_os(CHILD) {
        end_with_files_shown(Directory(directory.into()));
    }
    let directory = Directory::new();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child
        .args([TEST, "--exact", "--nocapture"])
        .env(CHILD, &directory.0);
    let child = child.output().unwrap();
    let messages = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{messages}");
    assert!(messages.contains(SHOWN), "{messages}");
    assert_eq!(directory.files(), 0);
}

/// Exits the process while it has a backup, after a forked child without one has exited.
fn end_with_files_shown(directory: Directory) -> ! {
    let mut world = World::new(STAYS, TemporaryFile::open);
    world.backups.set_directory(directory.0.clone());
    world.backups.set_shows_files(true);
    let _backup = world.save(BackupKind::Disk).unwrap();
    // SAFETY: the child only exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::process::exit(0);
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((ended, status), (child, 0));
    assert_eq!(directory.files(), world.ranges.len());
    eprintln!("{SHOWN}");
    std::process::exit(0);
}

#[test]
fn a_directory_that_is_not_there_is_an_error() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let saved = world.fill(1);
    let missing = PathBuf::from("/nowhere/at/all");
    world.backups.set_directory(missing.clone());
    let error = world.save(BackupKind::Disk).unwrap_err();
    let expected = "a backup in \"/nowhere/at/all\" could not be made (No such file or directory (os error 2)): if this lasts, choose another directory with set_backup_directory, or with LOWTIDE_BACKUP_DIR where neither that nor TMS_DISK_BACKUP_DIR names one";
    assert_eq!(error.to_string(), expected);
    assert_eq!(world.contents(), saved);
    world.end();
}

/// Linux's in-memory file system, where reserving room for a file uses host memory.
const IN_MEMORY: &str = "/dev/shm";

#[test]
fn what_the_host_has_no_memory_for_is_refused_in_a_directory_too() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    world.backups.set_directory(IN_MEMORY.into());
    let range = MemoryRange {
        address: world.ranges[0].address,
        size: Bytes::gib(1 << 14),
    };
    let error = world.backups.begin(&[range], BackupKind::Disk).unwrap_err();
    let text = error.to_string();
    let expected = "\"/dev/shm\" is in the host's memory, which has no 16.00 TiB for a backup (";
    assert!(text.starts_with(expected), "{text}");
    world.end();
}

#[test]
fn a_file_in_memory_has_taken_what_it_was_promised() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    world.backups.set_directory(IN_MEMORY.into());
    let before = available::promised();
    let saved = world.fill(1);
    let ranges = world.ranges.clone();
    let begun = world.backups.begin(&ranges, BackupKind::Disk).unwrap();
    assert_eq!(available::promised(), before);
    drop(begun);
    let mut backup = world.save(BackupKind::Disk).unwrap();
    world.fill(2);
    world.restore(&mut backup).unwrap();
    assert!(world.contents() == saved);
    drop(backup);
    world.end();
}

#[test]
fn idle_memory_goes_back_for_a_file_in_memory() {
    let mut world = World::new(STAYS, open_faulty);
    let backup = world.save(BackupKind::Host).unwrap();
    world.backups.release(backup);
    assert!(!world.backups.kept().bytes().is_zero());
    *FAULT.lock().unwrap() = Some((Operation::Open, 1, Fault::NoMemory));
    let backup = world.backups.begin(&[], BackupKind::Disk).unwrap();
    assert!(world.backups.kept().bytes().is_zero());
    drop(backup);
    world.end();
}

/// The system would end a process by a signal if it wrote beyond the limit.
#[test]
fn a_limit_on_files_is_an_error() {
    let mut world = World::new(STAYS, TemporaryFile::open);
    let saved = world.fill(1);
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call writes `limit`, which outlives it.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    assert_eq!(result, 0);
    let small = libc::rlimit {
        rlim_cur: 64 << 10,
        ..limit
    };
    // SAFETY: reads the limit, which outlives the call. No other test writes files meanwhile.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const small) };
    assert_eq!(result, 0);
    let outcome = world.save(BackupKind::Disk);
    // SAFETY: as above.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
    assert_eq!(result, 0);
    let error = outcome.unwrap_err();
    assert!(matches!(error, BackupError::TooLarge { .. }), "{error}");
    assert_eq!(world.contents(), saved);
    drop(world.save(BackupKind::Disk).unwrap());
    world.end();
}
