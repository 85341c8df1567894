//! The device as NVIDIA's driver gives it: [`CudaDriver`] is a [`Driver`](lowtide_core::Driver) on
//! `libcuda.so.1`.
//!
//! The library is opened when the program runs, so this crate builds, links and starts where there is no
//! card and no driver, and [`Library::load`] says in one line what is missing:
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
//! ├─ Library::relax_capture          context.rs: the thread may make calls that a capture forbids
//! ├─ PrimaryContext::enter           context.rs: the device's context is the thread's current one
//! ├─ Functions                       functions.rs: the library's functions; their types are in sys.rs
//! └─ Library::check                  library.rs: what was returned becomes a Result
//! ```
//!
//! # What this crate does not do
//!
//! It keeps no books of what was allocated, which is the allocator's to know; only of what is mapped, as
//! peers and other processes are given that handle by handle. It does not use CUDA's
//! runtime, whose version would have to be the program's. It launches no kernels. It never unloads the
//! driver, and it does not survive a `fork`: neither does CUDA.
#![expect(unsafe_code, reason = "the driver's functions are C")]

// Tests that use what is private share helpers with those that use the crate from outside.
#[cfg(test)]
extern crate self as lowtide_cuda;

mod backup;
mod beside;
mod context;
mod device;
mod driver;
mod error;
mod functions;
mod held;
mod holding;
mod library;
mod mappings;
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
pub use held::HeldRange;
pub use library::Library;
pub use mappings::MappedRange;
pub use primary::PrimaryContexts;
pub use sharing::IpcHandle;
pub use signals::SignalsBlocked;
pub use streams::CaptureStatus;
