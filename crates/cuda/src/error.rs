//! Why there is no driver to call.

use std::fmt;

use lowtide_core::DriverError;

/// Why [`Library::load`](crate::Library::load) found no driver that will do. Its text is one line.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The library is not there, or cannot be opened.
    NotFound {
        /// What the system's loader says.
        message: String,
    },
    /// The driver is older than the oldest that will do.
    TooOld {
        /// The newest CUDA that it supports.
        found: CudaVersion,
        /// The oldest that will do.
        needed: CudaVersion,
    },
    /// The library lacks a function that every driver has: it is something else.
    MissingFunction {
        /// The function.
        name: &'static str,
    },
    /// There is no device, or none that this process may use.
    NoDevice,
    /// The driver did not start.
    Start(DriverError),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::NotFound { message } => {
                write!(f, "NVIDIA's driver cannot be loaded: {message}")
            }
            LoadError::TooOld { found, needed } => {
                write!(
                    f,
                    "NVIDIA's driver is too old: it supports CUDA {found}, lowtide needs {needed}"
                )
            }
            LoadError::MissingFunction { name } => {
                write!(f, "what was loaded as NVIDIA's driver lacks {name}")
            }
            LoadError::NoDevice => {
                write!(
                    f,
                    "NVIDIA's driver shows this process no device: none is there, or \
                     CUDA_VISIBLE_DEVICES hides it"
                )
            }
            LoadError::Start(error) => write!(f, "NVIDIA's driver does not start: {error}"),
        }
    }
}

/// Without a source: the text says all of it.
impl std::error::Error for LoadError {}

/// A version of CUDA as the driver counts them: 12080 is CUDA 12.8.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CudaVersion(pub i32);

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}
