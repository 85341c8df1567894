//! [`RegionError`]: why a region was not paused or resumed.

use std::error::Error;
use std::fmt;
use std::sync::PoisonError;

use lowtide_core::{AllocError, Bytes, DriverError};

use crate::backup::BackupError;

/// Why a region was not paused or resumed.
///
/// Except for [`RegionError::NotReleased`], [`RegionError::NotUndone`] and [`RegionError::PoolsStillPaused`], the region
/// is then as before the call, including its contents, and the call can be made again. Memory that copies may still use
/// stays on the device until a later call has waited for them.
#[derive(Debug)]
#[non_exhaustive]
pub enum RegionError {
    /// The device's driver refused a call.
    Driver(DriverError),
    /// The device has too little memory for the resume.
    NoRoom {
        /// The bytes that the resume needs from the device.
        needed: Bytes,
        /// The free bytes of the device.
        free: Bytes,
    },
    /// The contents could not be saved or restored.
    Backup(BackupError),
    /// The allocator of the region's pools returned an error.
    Pools(AllocError),
    /// A graph is being captured, and freed blocks of the region are pending until its end.
    PendingInCapture,
    /// The region is paused, but the driver did not release some of its memory. The next pause releases it.
    NotReleased {
        /// The bytes still on the device.
        size: Bytes,
        /// The driver's error.
        error: DriverError,
    },
    /// The pause failed, and its completed steps could not be undone. The region is paused, and its contents are kept.
    /// A resume completes the undoing. A pause releases the remaining memory; if some of that still has to be saved, it
    /// resumes the region first.
    NotUndone {
        /// Why the pause failed.
        error: Box<RegionError>,
        /// Why it could not be undone.
        undoing: Box<RegionError>,
    },
    /// The region is mapped with its contents, but its pools still refuse requests, because the allocator returned an
    /// error. The next resume tries again.
    PoolsStillPaused {
        /// The allocator's error.
        error: AllocError,
    },
    /// A thread panicked during a change.
    Poisoned,
}

impl RegionError {
    /// Returns whether the device had too little memory. The caller may free some and try again.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            RegionError::NoRoom { .. }
            | RegionError::Driver(DriverError::OutOfMemory)
            | RegionError::Backup(BackupError::Driver(DriverError::OutOfMemory)) => true,
            RegionError::NotUndone { undoing, .. } => undoing.is_out_of_memory(),
            _ => false,
        }
    }

    /// Returns whether the host had too little memory for a backup. The caller may free some and try again.
    pub fn is_out_of_host_memory(&self) -> bool {
        matches!(self, RegionError::Backup(BackupError::NoHostMemory { .. }))
    }

    /// Returns the error for a pause that failed and could not be undone.
    pub(crate) fn not_undone(error: RegionError, undoing: RegionError) -> RegionError {
        RegionError::NotUndone {
            error: Box::new(error),
            undoing: Box::new(undoing),
        }
    }

    /// Returns whether the region is paused although its pause failed.
    pub fn is_paused(&self) -> bool {
        matches!(
            self,
            RegionError::NotReleased { .. } | RegionError::NotUndone { .. }
        )
    }
}

impl<T> From<PoisonError<T>> for RegionError {
    fn from(_: PoisonError<T>) -> RegionError {
        RegionError::Poisoned
    }
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegionError::Driver(error) => error.fmt(f),
            RegionError::NoRoom { needed, free } => {
                write!(
                    f,
                    "it takes {needed} of memory, and the device has {free} free"
                )
            }
            RegionError::Backup(error) => error.fmt(f),
            RegionError::Pools(error) => error.fmt(f),
            RegionError::PendingInCapture => {
                write!(
                    f,
                    "a graph is captured, and memory that was freed waits for its end"
                )
            }
            RegionError::NotReleased { size, error } => write!(
                f,
                "it is paused, but the driver did not take {size} back ({error}): pause it again"
            ),
            RegionError::NotUndone { error, undoing } => write!(
                f,
                "pausing failed ({error}), and so did putting its memory back ({undoing}): its \
                 contents are kept, resume it"
            ),
            RegionError::PoolsStillPaused { error } => write!(
                f,
                "its memory is back, but its pools are still paused ({error}) and refuse requests: \
                 resume it again"
            ),
            RegionError::Poisoned => {
                write!(f, "a thread panicked while the region was being changed")
            }
        }
    }
}

impl Error for RegionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            RegionError::Driver(error) | RegionError::NotReleased { error, .. } => Some(error),
            RegionError::NotUndone { undoing, .. } => Some(undoing),
            RegionError::Backup(error) => Some(error),
            RegionError::Pools(error) | RegionError::PoolsStillPaused { error } => Some(error),
            RegionError::NoRoom { .. } | RegionError::PendingInCapture | RegionError::Poisoned => {
                None
            }
        }
    }
}

impl From<DriverError> for RegionError {
    fn from(error: DriverError) -> RegionError {
        RegionError::Driver(error)
    }
}

impl From<BackupError> for RegionError {
    fn from(error: BackupError) -> RegionError {
        RegionError::Backup(error)
    }
}

impl From<AllocError> for RegionError {
    fn from(error: AllocError) -> RegionError {
        RegionError::Pools(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_runs_out_in_a_copy_too() {
        let backup = |error| RegionError::from(BackupError::from(error));
        assert!(RegionError::from(DriverError::OutOfMemory).is_out_of_memory());
        assert!(backup(DriverError::OutOfMemory).is_out_of_memory());
        let refused = DriverError::Unsupported { call: "copy" };
        assert!(!backup(refused).is_out_of_memory());
        assert!(!RegionError::Poisoned.is_out_of_memory());
        let not_undone = |then| RegionError::not_undone(RegionError::Poisoned, then);
        assert!(not_undone(DriverError::OutOfMemory.into()).is_out_of_memory());
        assert!(!not_undone(RegionError::Poisoned).is_out_of_memory());
    }
}
