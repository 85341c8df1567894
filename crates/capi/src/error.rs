//! What an exported function says when it did not do what it was asked.

use std::ffi::c_int;
use std::fmt;

use lowtide_core::{AllocError, ConfigError, DriverError};
use lowtide_cuda::LoadError;
use lowtide_region::RegionError;

/// What became of a call. `lowtide_last_error` has the words for everything but `OK`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
#[must_use]
pub enum Status {
    /// It was done.
    Ok = 0,
    /// No memory is left, after everything that could be given back was. The text is PyTorch's.
    OutOfMemory = 1,
    /// An argument is not what the function takes: a null pointer, a device that is not there.
    InvalidArgument = 2,
    /// The pointer is not that of a block that the program holds.
    NotAllocated = 3,
    /// There is no such memory pool, or it is not in a state for this: requests are being routed to it
    /// already or none are, nothing holds it, it has segments already, its checkpoint is lost; or more streams
    /// use pools than can be told apart.
    Pool = 4,
    /// A call to the device, or to the system for it, failed. Nothing was lost by it, and the next call may
    /// work.
    Driver = 5,
    /// NVIDIA's driver is not there, does not start, or is too old.
    NoDriver = 6,
    /// A strategy or an option is unknown, or an option's value is refused.
    Config = 7,
    /// It is too late for this: a device is in use.
    Started = 8,
    /// The process was forked from one that used CUDA, and CUDA does not work in it.
    Forked = 9,
    /// What the caller gave has too little room.
    TooSmall = 10,
    /// A defect of lowtide: it panicked, in this call or before on this device.
    Internal = 11,
    /// The region whose memory the request is for, or whose block is to be shared, is paused.
    Paused = 12,
    /// A region's contents could not be kept, or what was kept could not be read. Nothing was lost by it.
    Backup = 13,
    /// The file of a recording could not be created or written to.
    File = 14,
    /// The memory that was named is not free.
    NotFree = 15,
}

/// What there was when a request ran out of memory, in bytes. `lowtide_last_error` says it in words.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct OutOfMemory {
    /// The device.
    pub device: c_int,
    /// What was asked for.
    pub requested: u64,
    /// What the driver would have been asked for: PyTorch's messages name this size.
    pub segment_size: u64,
    /// The largest block that is free in the request's memory pool and stream.
    pub largest_free: u64,
    /// What the program holds.
    pub allocated: u64,
    /// What is held from the driver.
    pub reserved: u64,
    /// What may be held from the driver; 0 where there is no limit.
    pub limit: u64,
    /// What was free on the device, as its driver says.
    pub device_free: u64,
    /// All of the device's memory.
    pub device_total: u64,
    /// Whether the request was rejected without asking the driver (`throw_on_cudamalloc_oom`).
    pub is_rejected: bool,
}

/// A status and its words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Error {
    pub(crate) status: Status,
    pub(crate) text: String,
    /// After [`Status::OutOfMemory`]: what there was.
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

    /// Returns the error of whoever finds a lock that a panic has poisoned: `when` says where that was.
    pub(crate) fn stopped(when: &str) -> Error {
        let text = format_args!("lowtide stopped: it panicked {when}");
        Error::new(Status::Internal, text)
    }

    /// Returns the error for an argument that must point to something.
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
            error => Error::new(status_of(&error), error),
        }
    }
}

fn status_of(error: &RegionError) -> Status {
    match error {
        _ if error.is_out_of_memory() => Status::OutOfMemory,
        RegionError::Backup(_) => Status::Backup,
        // What is in the way of the resume that is next.
        RegionError::NotPutBack { putting_back, .. } => status_of(putting_back),
        RegionError::NotTold { .. } | RegionError::PendingInCapture | RegionError::Stopped => {
            Status::Internal
        }
        _ => Status::Driver,
    }
}

impl OutOfMemory {
    /// Returns the figures of an error of the allocator's.
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
