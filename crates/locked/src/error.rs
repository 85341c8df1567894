//! Why a shared allocator did not do what it was asked.

use std::fmt;
use std::sync::PoisonError;

use lowtide_core::AllocError;

/// Why a [`LockedAllocator`](crate::LockedAllocator) did not do what it was asked.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum LockedError {
    /// The allocator refused.
    Alloc(AllocError),
    /// A thread panicked while it worked on the allocator, whose state cannot be trusted since.
    Poisoned,
}

impl From<AllocError> for LockedError {
    fn from(error: AllocError) -> LockedError {
        LockedError::Alloc(error)
    }
}

impl<T> From<PoisonError<T>> for LockedError {
    fn from(_: PoisonError<T>) -> LockedError {
        LockedError::Poisoned
    }
}

impl fmt::Display for LockedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockedError::Alloc(error) => error.fmt(f),
            LockedError::Poisoned => write!(
                f,
                "the allocator stopped: a thread panicked while it was being changed"
            ),
        }
    }
}

impl std::error::Error for LockedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            LockedError::Alloc(error) => Some(error),
            LockedError::Poisoned => None,
        }
    }
}
