//! The trait [`Backups`]: keeps the contents of a device's memory while regions are paused.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use lowtide_core::{Bytes, DeviceAddress, DriverError};

/// Keeps the contents of one device's memory while regions are paused.
///
/// A backup is [begun](Backups::begin) and then saved in steps. Ranges that are saved may be unmapped before the others
/// are saved.
///
/// After an error:
/// - Ranges that a backup had saved stay saved. After an error of [`restore`](Backups::restore) the backup is complete,
///   and the call can be made again. The same holds after a panic, which the region treats as an error.
/// - Copies may still be in progress, until [`finish`](Backups::finish) succeeds. Until then the ranges of the failed
///   call stay mapped, and nothing else writes to them.
///
/// No file is left behind by a panic or when the process ends. A process that is killed leaves only files that the
/// implementation was asked to show.
pub trait Backups: Send + 'static {
    /// The contents of some ranges. It ends with [`release`](Backups::release) or when it is dropped.
    type Backup: Send;

    /// Returns a backup for some ranges, none of which is saved yet. The ranges are sorted by address; none overlap, and
    /// none is empty.
    ///
    /// # Errors
    ///
    /// [`BackupError`] if there is no room for them.
    fn begin(
        &mut self,
        ranges: &[MemoryRange],
        kind: BackupKind,
    ) -> Result<Self::Backup, BackupError>;

    /// Saves the next ranges of a backup. Returns how many of its ranges are saved. Each step saves at least one more.
    ///
    /// The ranges that are not saved are mapped, and no work in progress writes to them. Memory between ranges is not
    /// touched. The time depends on the bytes; a range adds a few microseconds, a step about ten.
    ///
    /// # Errors
    ///
    /// [`BackupError`] if the copy or its storage fails. The contents of the ranges are unchanged then.
    fn save_next(&mut self, backup: &mut Self::Backup) -> Result<usize, BackupError>;

    /// Copies ranges back to their addresses, and returns when that is done. The backup stays complete.
    ///
    /// Each range lies within one that was saved. It is mapped, and nothing uses it.
    ///
    /// # Errors
    ///
    /// [`BackupError`] if the copy fails or the backup cannot be read. The contents of the ranges are undefined then, and
    /// the backup can be restored again.
    ///
    /// # Panics
    ///
    /// If a range was not saved.
    fn restore(
        &mut self,
        backup: &mut Self::Backup,
        ranges: &[MemoryRange],
    ) -> Result<(), BackupError>;

    /// Waits for copies of failed calls.
    ///
    /// # Errors
    ///
    /// [`BackupError`] if they may still be in progress.
    fn finish(&mut self) -> Result<(), BackupError>;

    /// Ends a backup. Its host memory is kept for the next one or released, as configured.
    fn release(&mut self, backup: Self::Backup);

    /// Releases the host memory that is kept for later backups. Returns when it is released.
    fn release_retained(&mut self);

    /// Returns whether a backup is retained after the resume so that the program can read it. It is retained until its
    /// region is paused again or has no segments left.
    fn retains(&mut self, backup: &Self::Backup) -> bool;

    /// Returns the address of the copy of a range, if the backup is in host memory. The address is valid until the backup
    /// is released. The range lies within one that was saved.
    fn host_copy(backup: &Self::Backup, range: MemoryRange) -> Option<usize>;

    /// Returns the bytes that the backup keeps in host memory, and those on disk.
    fn bytes(backup: &Self::Backup) -> (Bytes, Bytes);
}

/// A range of device memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemoryRange {
    /// The start address.
    pub address: DeviceAddress,
    /// The size.
    pub size: Bytes,
}

impl MemoryRange {
    /// Returns the address after the last byte.
    pub fn end(self) -> DeviceAddress {
        self.address + self.size
    }

    /// Returns whether all of `other` lies within `self`.
    pub fn contains(self, other: MemoryRange) -> bool {
        self.address <= other.address && other.end() <= self.end()
    }
}

/// Where the contents of a paused region are kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BackupKind {
    /// In host memory.
    Host,
    /// In a file.
    Disk,
}

/// Why contents could not be saved or restored.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BackupError {
    /// The device's driver refused a call.
    Driver(DriverError),
    /// The host has too little memory.
    NoHostMemory {
        /// The requested bytes.
        needed: Bytes,
        /// The system's message.
        message: String,
        /// The directory of backups, if files in it are in host memory.
        directory: Option<PathBuf>,
    },
    /// The file system has too little room.
    NoRoom {
        /// The directory of backups.
        directory: PathBuf,
        /// The requested bytes.
        needed: Bytes,
    },
    /// The file would exceed the limit on the size of files.
    TooLarge {
        /// The directory of backups.
        directory: PathBuf,
        /// The requested bytes.
        needed: Bytes,
    },
    /// A file could not be created, written or read.
    Io {
        /// The directory of backups.
        directory: PathBuf,
        /// What failed: "written", "read", …
        action: &'static str,
        /// The system's message.
        message: String,
    },
    /// A file's checksum is not that of the contents written to it.
    Corrupt {
        /// The directory of backups.
        directory: PathBuf,
        /// The device address of the contents.
        address: DeviceAddress,
    },
    /// A thread could not be started.
    NoThread {
        /// The system's message.
        message: String,
    },
    /// The implementation panicked, which is a bug in it.
    Panicked {
        /// The panic's message.
        message: String,
    },
}

impl BackupError {
    /// Returns the error for a file in `directory` that could not be `action`: "written", "read".
    ///
    /// `needed` is the size of the whole backup, for errors about room and about the limit on the size of files.
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

/// How to choose another directory. The program's setting takes precedence over the variable.
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

// The text includes the cause. With a source, the cause would be printed twice.
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
