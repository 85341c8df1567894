//! Why a region was not paused or resumed.

use std::error::Error;
use std::fmt;
use std::sync::PoisonError;

use lowtide_core::{AllocError, Bytes, DriverError};

use crate::backup::BackupError;

/// Why a region was not paused or resumed. But for what three of these say, it is then as it was before the
/// call, contents included, and the call may be made again. Memory that copies may still use stays on the device until
/// a later call has waited for them.
#[derive(Debug)]
#[non_exhaustive]
pub enum RegionError {
    /// The device's driver refused a call.
    Driver(DriverError),
    /// The device has too little memory for what is to come back.
    NoRoom {
        /// How much of it is missing.
        needed: Bytes,
        /// What the device has left.
        free: Bytes,
    },
    /// The contents were not saved or not restored.
    Backup(BackupError),
    /// The allocator that the blocks are in refused a call.
    Pools(AllocError),
    /// A graph is captured, and blocks of the region that were freed wait for its end.
    PendingInCapture,
    /// The region is paused, but some of its memory is still on the device: it goes with the next pause.
    StillHeld {
        /// How much.
        size: Bytes,
        /// What the driver said.
        error: DriverError,
    },
    /// The region was not paused, and what had left it by then could not be put back: it is paused, with its contents
    /// kept. Resuming it brings the rest back; pausing it gives the rest away, after it was resumed where not all of it
    /// was saved and it is to be.
    NotPutBack {
        /// Why it was not paused.
        error: Box<RegionError>,
        /// Why it could not be put back.
        putting_back: Box<RegionError>,
    },
    /// The region is mapped with its contents, but the allocator that the blocks are in could not be told so
    /// and still refuses requests: it is told with the next resume.
    NotTold {
        /// What the allocator said.
        error: AllocError,
    },
    /// A thread panicked in the middle of a change.
    Stopped,
}

impl RegionError {
    /// Returns whether the device had too little memory left, so that the caller may free some and try
    /// again.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            RegionError::NoRoom { .. }
            | RegionError::Driver(DriverError::OutOfMemory)
            | RegionError::Backup(BackupError::Driver(DriverError::OutOfMemory)) => true,
            RegionError::NotPutBack { putting_back, .. } => putting_back.is_out_of_memory(),
            _ => false,
        }
    }

    /// Returns whether the host had too little memory for a backup, so that the caller may free some and try again.
    pub fn is_short_of_host(&self) -> bool {
        matches!(self, RegionError::Backup(BackupError::NoHostMemory { .. }))
    }

    /// Returns the error of a region that was not paused, and could not be put back.
    pub(crate) fn not_put_back(error: RegionError, putting_back: RegionError) -> RegionError {
        RegionError::NotPutBack {
            error: Box::new(error),
            putting_back: Box::new(putting_back),
        }
    }

    /// Returns whether the call that failed left the region paused that was to be paused.
    pub fn is_paused(&self) -> bool {
        matches!(
            self,
            RegionError::StillHeld { .. } | RegionError::NotPutBack { .. }
        )
    }
}

impl<T> From<PoisonError<T>> for RegionError {
    fn from(_: PoisonError<T>) -> RegionError {
        RegionError::Stopped
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
            RegionError::StillHeld { size, error } => write!(
                f,
                "it is paused, but the driver did not take {size} back ({error}): pause it again"
            ),
            RegionError::NotPutBack {
                error,
                putting_back,
            } => write!(
                f,
                "pausing failed ({error}), and so did putting its memory back ({putting_back}): its \
                 contents are kept, resume it"
            ),
            RegionError::NotTold { error } => write!(
                f,
                "its memory is back, but the allocator was not told so ({error}) and refuses requests: \
                 resume it again"
            ),
            RegionError::Stopped => {
                write!(f, "a thread panicked while the region was being changed")
            }
        }
    }
}

impl Error for RegionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            RegionError::Driver(error) | RegionError::StillHeld { error, .. } => Some(error),
            RegionError::NotPutBack { putting_back, .. } => Some(putting_back),
            RegionError::Backup(error) => Some(error),
            RegionError::Pools(error) | RegionError::NotTold { error } => Some(error),
            RegionError::NoRoom { .. } | RegionError::PendingInCapture | RegionError::Stopped => {
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
        assert!(!RegionError::Stopped.is_out_of_memory());
        let not_put_back = |then| RegionError::not_put_back(RegionError::Stopped, then);
        assert!(not_put_back(DriverError::OutOfMemory.into()).is_out_of_memory());
        assert!(!not_put_back(RegionError::Stopped).is_out_of_memory());
    }
}
