//! A simulated device: [`SimDriver`] implements [`lowtide_core::Driver`] as a GPU's driver would. It holds no
//! memory, and checks the rules that a real driver leaves to its caller.
//!
//! ```
//! use lowtide_core::{Bytes, Driver, DriverError, Stream};
//! use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};
//!
//! let mut driver = SimDriver::new(SimConfig {
//!     capacity: Some(Bytes::gib(1)),
//!     ..SimConfig::default()
//! });
//! let address = driver.allocate(Bytes::mib(20))?;
//! driver.launch(Stream::DEFAULT, 400_000_000);
//! driver.free(address, Bytes::mib(20))?;
//! // cudaFree waits for the device's work.
//! assert!(driver.now_ns() > 400_000_000);
//!
//! driver.set_faults(FaultPlan::nth(Call::Create, 1, DriverError::OutOfMemory));
//! assert_eq!(driver.create(Bytes::mib(2)), Err(DriverError::OutOfMemory));
//! assert!(driver.leaks().is_empty() && driver.violations().is_empty());
//! # Ok::<(), DriverError>(())
//! ```
//!
//! Not modelled: peers, sharing between processes, the execution of captured graphs, the contents of memory, and
//! the gaps by which a real driver aligns large allocations.
#![forbid(unsafe_code)]

mod addresses;
mod call;
mod clock;
mod cost;
mod driver;
mod fault;
mod graph;
mod memory;
pub mod program;
mod step;

pub use addresses::{AddressSource, FirstFit};
pub use call::{Call, CallStats};
pub use driver::{SimConfig, SimDriver};
pub use fault::FaultPlan;
pub use memory::footprint;
pub use step::{Step, StepKind};
