//! The statuses and errors of exported functions.

use std::ffi::c_int;
use std::fmt;

use lowtide_core::{AllocError, ConfigError, DriverError};
use lowtide_cuda::LoadError;
use lowtide_region::RegionError;

/// The result of a call. `lowtide_last_error` returns the text for every status except `OK`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
#[must_use]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// No memory is left, after everything that could be released was released. The text is PyTorch's.
    OutOfMemory = 1,
    /// An argument is invalid, such as a null pointer or a device that does not exist.
    InvalidArgument = 2,
    /// The pointer is not the start of a block that the program holds.
    NotAllocated = 3,
    /// The memory pool does not exist or is in the wrong state. Requests are routed to it already, or none are;
    /// nothing holds it; it has segments already; or its checkpoint is lost. Also returned if more streams use
    /// pools than can be told apart.
    Pool = 4,
    /// A call to the driver, or to the system on the driver's behalf, failed. Nothing was lost, and the next call
    /// may succeed.
    Driver = 5,
    /// NVIDIA's driver is missing, does not start, or is too old.
    NoDriver = 6,
    /// A strategy or an option is unknown, or an option's value is refused.
    Config = 7,
    /// Too late: a device is in use already.
    Started = 8,
    /// The process was forked from one that had started CUDA, and CUDA does not work in the child.
    Forked = 9,
    /// The caller's buffer is too small.
    TooSmall = 10,
    /// A bug in lowtide: it panicked, in this call or in an earlier one on this device.
    Internal = 11,
    /// The region is paused: the one that the request is for, or the one that holds the block to be shared.
    Paused = 12,
    /// A region's contents could not be saved, or the saved contents could not be read. Nothing was lost.
    Backup = 13,
    /// A recording's file could not be created or written.
    File = 14,
    /// The requested memory is not free.
    NotFree = 15,
}

/// The memory figures of the moment when a request ran out of memory, in bytes. `lowtide_last_error` has them as
/// text.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct OutOfMemory {
    /// The device.
    pub device: c_int,
    /// The requested bytes.
    pub requested: u64,
    /// The size that the driver would have been asked for. PyTorch's messages name this size.
    pub segment_size: u64,
    /// The largest free block of the request's memory pool and stream.
    pub largest_free: u64,
    /// The allocated bytes: what the program holds.
    pub allocated: u64,
    /// The reserved bytes: what is held from the driver.
    pub reserved: u64,
    /// The limit on reserved bytes; 0 if there is none.
    pub limit: u64,
    /// The bytes that were free on the device according to the driver.
    pub device_free: u64,
    /// The device's total memory.
    pub device_total: u64,
    /// Whether the request was rejected without asking the driver (`throw_on_cudamalloc_oom`).
    pub is_rejected: bool,
}

/// A status and its text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Error {
    pub(crate) status: Status,
    pub(crate) text: String,
    /// For [`Status::OutOfMemory`]: the memory figures.
    pub(crate) out_of_memory: Option<Box<OutOfMemory>>,
}

impl Error {
    pub(crate) fn new(status: Status, text: impl fmt::Display) -> Error {
        let text = text.to_string();
        Error {
            status,
            text,
            out_of_memory: None,
        }
    }

    /// Returns the error for a lock that a panic has poisoned; `when` says what the panic interrupted.
    pub(crate) fn stopped(when: &str) -> Error {
        let text = format_args!("lowtide stopped: it panicked {when}");
        Error::new(Status::Internal, text)
    }

    /// Returns the error for an argument that must not be null.
    pub(crate) fn null(argument: &str) -> Error {
        Error::new(
            Status::InvalidArgument,
            format_args!("`{argument}` must not be null"),
        )
    }
}

impl From<AllocError> for Error {
    fn from(error: AllocError) -> Error {
        let status = match &error {
            AllocError::OutOfMemory(_) | AllocError::TooLarge { .. } => Status::OutOfMemory,
            AllocError::NotAllocated { .. } => Status::NotAllocated,
            AllocError::NotFree { .. } => Status::NotFree,
            AllocError::NoSuchPool { .. }
            | AllocError::PoolNotRouted { .. }
            | AllocError::PoolNotHeld { .. }
            | AllocError::PoolInUse { .. }
            | AllocError::PoolHasSource { .. }
            | AllocError::NotRestorable { .. }
            | AllocError::TooManyStreams => Status::Pool,
            AllocError::Paused { .. } => Status::Paused,
            AllocError::NotReconfigurable => Status::Config,
            AllocError::Driver(_) => Status::Driver,
            AllocError::Poisoned => Status::Internal,
            _ => Status::InvalidArgument,
        };
        let figures = match &error {
            AllocError::OutOfMemory(figures) => Some(OutOfMemory::of(figures)),
            AllocError::TooLarge { requested } => Some(OutOfMemory {
                requested: requested.get(),
                ..OutOfMemory::default()
            }),
            _ => None,
        };
        Error {
            out_of_memory: figures.map(Box::new),
            ..Error::new(status, error)
        }
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Error {
        Error::new(Status::Driver, error)
    }
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Error {
        Error::new(Status::NoDriver, error)
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Error {
        Error::new(Status::Config, error)
    }
}

impl From<RegionError> for Error {
    fn from(error: RegionError) -> Error {
        match error {
            RegionError::Pools(error) => error.into(),
            RegionError::Poisoned => Error::stopped("while a region was entered or changed"),
            error => Error::new(status_of(&error), error),
        }
    }
}

fn status_of(error: &RegionError) -> Status {
    match error {
        _ if error.is_out_of_memory() => Status::OutOfMemory,
        RegionError::Backup(_) => Status::Backup,
        // The status of the failure that blocks the next resume.
        RegionError::NotUndone { undoing, .. } => status_of(undoing),
        RegionError::PoolsStillPaused { .. }
        | RegionError::PendingInCapture
        | RegionError::Poisoned => Status::Internal,
        _ => Status::Driver,
    }
}

impl OutOfMemory {
    /// Returns the memory figures of an error of the allocator's.
    pub(crate) fn of(error: &lowtide_core::OutOfMemory) -> OutOfMemory {
        OutOfMemory {
            device: c_int::try_from(error.device).unwrap_or(-1),
            requested: error.requested.get(),
            segment_size: error.segment_size.get(),
            largest_free: error.largest_free.get(),
            allocated: error.allocated.get(),
            reserved: error.reserved.get(),
            limit: error.limit.map_or(0, |limit| limit.get()),
            device_free: error.device_free.get(),
            device_total: error.device_total.get(),
            is_rejected: error.is_rejected,
        }
    }
}
