//! Implements the allocator's [`Driver`](lowtide_core::Driver) with NVIDIA's driver, `libcuda.so.1`:
//! [`CudaDriver`].
//!
//! The library is opened at run time. This crate therefore builds, links and starts on machines without a card or a
//! driver. [`Library::load`] reports in one line what is missing:
//!
//! ```
//! use lowtide_core::{Config, DeviceAllocator};
//! use lowtide_cuda::{CudaDriver, Library};
//!
//! match Library::load() {
//!     Ok(library) => {
//!         let device = library.device(0)?;
//!         println!("{}, {}", device.name()?, device.total_memory()?);
//!         // SAFETY: only this allocator uses the driver, and on the default stream alone.
//!         let driver = unsafe { CudaDriver::new(device) }?;
//!         let allocator = DeviceAllocator::new(driver, 0, &Config::default());
//!     }
//!     Err(missing) => println!("{missing}"),
//! }
//! # Ok::<(), lowtide_core::DriverError>(())
//! ```
//!
//! # The path of a call
//!
//! ```text
//! Driver for CudaDriver              driver.rs
//! ├─ Library::relax_capture          context.rs: allows calls that a graph capture in progress forbids
//! ├─ PrimaryContext::enter           context.rs: makes the device's primary context current
//! ├─ Functions                       functions.rs: the library's functions; their types are in sys.rs
//! └─ Library::check                  library.rs: converts the returned CUresult to a Result
//! ```
//!
//! # What this crate does not do
//!
//! It does not track allocations, handles and mappings: the allocator does. It does not use the CUDA runtime, whose version would have to match the
//! program's. It launches no kernels. It never unloads the driver. Like CUDA, it does not survive a `fork`.
#![expect(unsafe_code, reason = "the driver's functions are C")]

// The unit tests of private items share helpers with the integration tests, which name this crate `lowtide_cuda`.
#[cfg(test)]
extern crate self as lowtide_cuda;

mod backup;
mod beside;
mod context;
mod device;
mod driver;
mod error;
mod exit;
mod functions;
mod held;
mod holding;
mod library;
mod physical;
mod primary;
mod probe;
mod scrubbing;
mod sharing;
mod signals;
mod streams;
mod sys;

pub use backup::{CudaBackup, CudaBackups, KeptMemory};
pub use beside::{DriverCall, start_beside};
pub use context::RelaxedCapture;
pub use device::{Attribute, Device, Uuid};
pub use driver::CudaDriver;
pub use error::{CudaVersion, LoadError};
pub use exit::call_at_exit;
pub use held::HeldRange;
pub use library::Library;
pub use primary::PrimaryContexts;
pub use sharing::IpcHandle;
pub use signals::SignalsBlocked;
pub use streams::CaptureStatus;
