//! Why a shared allocator did not do what it was asked.

use std::fmt;
use std::sync::PoisonError;

use lowtide_core::AllocError;

/// Why a [`SharedAllocator`](crate::SharedAllocator) did not do what it was asked.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum SharedError {
    /// The allocator refused.
    Alloc(AllocError),
    /// A thread panicked while it worked on the allocator, whose state cannot be trusted since.
    Poisoned,
}

impl From<AllocError> for SharedError {
    fn from(error: AllocError) -> SharedError {
        SharedError::Alloc(error)
    }
}

impl<T> From<PoisonError<T>> for SharedError {
    fn from(_: PoisonError<T>) -> SharedError {
        SharedError::Poisoned
    }
}

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SharedError::Alloc(error) => error.fmt(f),
            SharedError::Poisoned => write!(
                f,
                "the allocator stopped: a thread panicked while it was being changed"
            ),
        }
    }
}

impl std::error::Error for SharedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SharedError::Alloc(error) => Some(error),
            SharedError::Poisoned => None,
        }
    }
}
