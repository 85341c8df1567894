//! Contents of device memory that are kept elsewhere while the memory is away: the trait [`Backups`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use lowtide_core::{Bytes, DeviceAddress, DriverError};

/// What keeps the contents of one device's memory while that memory is away.
///
/// A backup is [begun](Backups::begin), and then saved step by step: what lies in ranges that are saved may leave the
/// device before the others are. After an error of a step, what was saved by then still is; after one of
/// [`restore`](Backups::restore) the backup is as whole as before, and the call may be made again. So it is after a
/// panic, which the region takes for an error. Copies may still be under way after either, until
/// [`finish`](Backups::finish) says that they are not: what was given to the call stays mapped until then, and what was to
/// be written is written by no one else. A panic leaves no file behind, and neither does the process when it ends;
/// one that is killed leaves those that the implementation was told to show.
pub trait Backups: Send + 'static {
    /// The contents of some ranges. It is given back by [`discard`](Backups::discard), or when it is dropped.
    type Backup: Send;

    /// Returns a backup that is to hold some ranges, none of which is saved yet.
    ///
    /// The ranges are by rising addresses, none overlap, and none is empty.
    ///
    /// # Errors
    ///
    /// [`BackupError`] where there is no room for them.
    fn begin(
        &mut self,
        ranges: &[MemoryRange],
        kind: BackupKind,
    ) -> Result<Self::Backup, BackupError>;

    /// Copies the next of a backup's ranges away, and returns how many of them are saved by now once that is done: each
    /// step saves more, until all of them are.
    ///
    /// Those that are not saved are mapped, and no work that writes to them is under way; memory between them is not
    /// touched. The time taken is that of the bytes: a range costs a few microseconds more, a step some ten.
    ///
    /// # Errors
    ///
    /// [`BackupError`] where the copy or what keeps it fails; the ranges' contents are untouched then.
    fn save_next(&mut self, backup: &mut Self::Backup) -> Result<usize, BackupError>;

    /// Copies the ranges back to where they came from, and returns when that is done. The backup stays whole.
    ///
    /// Each range is one of those that were saved, or lies within one; it is mapped, and in no one's use.
    ///
    /// # Errors
    ///
    /// [`BackupError`] where the copy fails or the backup cannot be read; what the ranges hold is undefined
    /// then, and the backup can be restored again.
    ///
    /// # Panics
    ///
    /// If a range was not saved.
    fn restore(
        &mut self,
        backup: &mut Self::Backup,
        ranges: &[MemoryRange],
    ) -> Result<(), BackupError>;

    /// Waits for the copies of calls that failed.
    ///
    /// # Errors
    ///
    /// [`BackupError`] where nobody can tell whether they have ended.
    fn finish(&mut self) -> Result<(), BackupError>;

    /// Ends a backup. What kept it stays for the next one, or goes back to the system, as the
    /// implementation was told.
    fn discard(&mut self, backup: Self::Backup);

    /// Releases the host memory that is kept for later backups.
    fn release_retained(&mut self);

    /// Returns whether a backup that was restored is kept as it is, to be read, and not discarded with the
    /// resume: until its region is paused again, or has no segment any more.
    fn retains(&mut self, backup: &Self::Backup) -> bool;

    /// Returns the address of the host's copy of a range, where that is in the host's memory: valid until
    /// the backup is discarded. The range is one of those that were saved, or lies within one.
    fn host_copy(backup: &Self::Backup, range: MemoryRange) -> Option<usize>;

    /// Returns how many bytes the backup keeps in the host's memory, and how many on disk.
    fn bytes(backup: &Self::Backup) -> (Bytes, Bytes);
}

/// A range of device memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemoryRange {
    /// Where it begins.
    pub address: DeviceAddress,
    /// How long it is.
    pub size: Bytes,
}

impl MemoryRange {
    /// Returns the address behind the range's last byte.
    pub fn end(self) -> DeviceAddress {
        self.address + self.size
    }

    /// Returns whether all of `other` lies within `self`.
    pub fn contains(self, other: MemoryRange) -> bool {
        self.address <= other.address && other.end() <= self.end()
    }
}

/// Where contents are kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BackupKind {
    /// In the host's memory.
    Host,
    /// In a file.
    Disk,
}

/// Why contents were not saved or not restored.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BackupError {
    /// The device's driver refused a call.
    Driver(DriverError),
    /// The host has too little memory.
    NoHostMemory {
        /// How much was asked for.
        needed: Bytes,
        /// The system's words.
        message: String,
        /// The directory of backups, where the host's memory is what files in it take.
        directory: Option<PathBuf>,
    },
    /// The file system has too little room.
    NoRoom {
        /// The directory of backups.
        directory: PathBuf,
        /// How much was asked for.
        needed: Bytes,
    },
    /// A file may not be that large, whatever room there is.
    TooLarge {
        /// The directory of backups.
        directory: PathBuf,
        /// How much was asked for.
        needed: Bytes,
    },
    /// A file could not be made, written or read.
    Io {
        /// The directory of backups.
        directory: PathBuf,
        /// What was tried: "written", "read", …
        action: &'static str,
        /// The system's words.
        message: String,
    },
    /// A file does not hold what was written to it.
    Corrupt {
        /// The directory of backups.
        directory: PathBuf,
        /// Where in the device's memory the contents belong.
        address: DeviceAddress,
    },
    /// A thread could not be started.
    NoThread {
        /// The system's words.
        message: String,
    },
    /// What was to copy panicked, which is a bug of its own.
    Panicked {
        /// The panic's words.
        message: String,
    },
}

impl BackupError {
    /// Returns the error of a file in `directory` that could not be *action*: "written", "read".
    ///
    /// `needed` is what the whole backup takes, for the cases that there is no room, or a limit on files.
    pub fn io(
        directory: &Path,
        action: &'static str,
        needed: Bytes,
        error: &io::Error,
    ) -> BackupError {
        let directory = directory.to_path_buf();
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                BackupError::NoRoom { directory, needed }
            }
            io::ErrorKind::FileTooLarge => BackupError::TooLarge { directory, needed },
            _ => BackupError::Io {
                directory,
                action,
                message: error.to_string(),
            },
        }
    }
}

impl From<DriverError> for BackupError {
    fn from(error: DriverError) -> BackupError {
        BackupError::Driver(error)
    }
}

/// How files come to be elsewhere: what the program sets goes before the variable.
const OTHER_DIRECTORY: &str = "choose another directory with set_backup_directory, or with LOWTIDE_BACKUP_DIR where \
                               neither that nor TMS_DISK_BACKUP_DIR names one";

impl fmt::Display for BackupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackupError::Driver(error) => write!(f, "the device's memory was not copied: {error}"),
            BackupError::NoHostMemory {
                needed,
                message,
                directory: None,
            } => write!(
                f,
                "the host has no {needed} for a backup ({message}): back up to disk, or free memory"
            ),
            BackupError::NoHostMemory {
                needed,
                message,
                directory: Some(directory),
            } => write!(
                f,
                "{directory:?} is in the host's memory, which has no {needed} for a backup ({message}): free \
                 some, or {OTHER_DIRECTORY}"
            ),
            BackupError::NoRoom { directory, needed } => write!(
                f,
                "{directory:?} has no room for a backup of {needed}: free some, or {OTHER_DIRECTORY}"
            ),
            BackupError::TooLarge { directory, needed } => write!(
                f,
                "no file in {directory:?} may be as large as a backup of {needed}: raise the limit on files \
                 (`ulimit -f`), or where it is that of the file system, {OTHER_DIRECTORY}"
            ),
            BackupError::Io {
                directory,
                action,
                message,
            } => write!(
                f,
                "a backup in {directory:?} could not be {action} ({message}): if this lasts, \
                 {OTHER_DIRECTORY}"
            ),
            BackupError::Corrupt { directory, address } => write!(
                f,
                "the backup of {address} in {directory:?} is damaged: its checksum is not that of what \
                 was written, so check the disk"
            ),
            BackupError::NoThread { message } => write!(
                f,
                "no thread could be started for a backup ({message}): raise the limit on processes"
            ),
            BackupError::Panicked { message } => {
                write!(f, "the copy panicked, which is a bug of lowtide: {message}")
            }
        }
    }
}

// It says its cause itself, which a source would have printed twice.
impl std::error::Error for BackupError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_line_and_say_what_to_do() {
        let directory = Path::new("/scratch\nhere");
        let needed = Bytes::gib(8);
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let full = BackupError::io(directory, "written", needed, &full);
        assert_eq!(
            full.to_string(),
            r#""/scratch\nhere" has no room for a backup of 8.00 GiB: free some, or choose another directory with set_backup_directory, or with LOWTIDE_BACKUP_DIR where neither that nor TMS_DISK_BACKUP_DIR names one"#
        );
        let limited = io::Error::from(io::ErrorKind::FileTooLarge);
        let limited = BackupError::io(directory, "written", needed, &limited);
        assert_eq!(
            limited.to_string(),
            r#"no file in "/scratch\nhere" may be as large as a backup of 8.00 GiB: raise the limit on files (`ulimit -f`), or where it is that of the file system, choose another directory with set_backup_directory, or with LOWTIDE_BACKUP_DIR where neither that nor TMS_DISK_BACKUP_DIR names one"#
        );
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let denied = BackupError::io(directory, "written", needed, &denied);
        assert_eq!(
            denied.to_string(),
            r#"a backup in "/scratch\nhere" could not be written (permission denied): if this lasts, choose another directory with set_backup_directory, or with LOWTIDE_BACKUP_DIR where neither that nor TMS_DISK_BACKUP_DIR names one"#
        );
        let no_memory = |directory| BackupError::NoHostMemory {
            needed,
            message: "2.00 GiB is available".to_owned(),
            directory,
        };
        assert_eq!(
            no_memory(None).to_string(),
            "the host has no 8.00 GiB for a backup (2.00 GiB is available): back up to disk, or free memory"
        );
        assert_eq!(
            no_memory(Some("/dev/shm".into())).to_string(),
            r#""/dev/shm" is in the host's memory, which has no 8.00 GiB for a backup (2.00 GiB is available): free some, or choose another directory with set_backup_directory, or with LOWTIDE_BACKUP_DIR where neither that nor TMS_DISK_BACKUP_DIR names one"#
        );
        assert_eq!(
            BackupError::from(DriverError::OutOfMemory).to_string(),
            "the device's memory was not copied: the device is out of memory"
        );
    }

    #[test]
    fn a_range_contains_itself_and_what_lies_in_it() {
        let range = |start, size| MemoryRange {
            address: DeviceAddress(start),
            size: Bytes(size),
        };
        let whole = range(100, 50);
        assert!(whole.contains(whole) && whole.contains(range(149, 1)));
        assert!(!whole.contains(range(99, 2)) && !whole.contains(range(149, 2)));
    }
}
