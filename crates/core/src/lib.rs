//! Decides which bytes of device memory satisfy a request.
#![forbid(unsafe_code)]

mod driver;
mod event;
mod snapshot;
mod units;

pub use driver::{Driver, DriverError, EventHandle, Handle, MemoryInfo};
pub use event::{Action, Event};
pub use snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
pub use units::{Bytes, DeviceAddress, MempoolId, Stream};
