//! Decides which bytes of device memory satisfy a request.
#![forbid(unsafe_code)]

mod config;
mod driver;
mod event;
mod snapshot;
mod units;

pub use config::{
    BfcConfig, BuddyConfig, CachingConfig, Config, ConfigError, PoolConfig, SlabConfig,
    StrategyName,
};
pub use driver::{Driver, DriverError, EventHandle, Handle, MemoryInfo};
pub use event::{Action, Event};
pub use snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
pub use units::{Bytes, DeviceAddress, MempoolId, Stream};
