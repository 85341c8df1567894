//! The reasons why the driver cannot be used.

use std::fmt;

use lowtide_core::DriverError;

/// The reason why [`Library::load`](crate::Library::load) failed. Its text is one line.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The library does not exist or cannot be opened.
    NotFound {
        /// The error message of the system's loader.
        message: String,
    },
    /// The driver is older than the oldest supported one.
    TooOld {
        /// The newest CUDA version that the driver supports.
        found: CudaVersion,
        /// The oldest CUDA version that lowtide supports.
        needed: CudaVersion,
    },
    /// The library lacks a function that every driver has, so it is not NVIDIA's driver.
    MissingFunction {
        /// The name of the function.
        name: &'static str,
    },
    /// There is no device, or none is visible to this process.
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

/// Has no source: the text says everything.
impl std::error::Error for LoadError {}

/// A CUDA version as the driver encodes it: 12080 is CUDA 12.8.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CudaVersion(pub i32);

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}
