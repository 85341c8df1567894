//! Decides which bytes of device memory satisfy a request.
#![forbid(unsafe_code)]

mod allocator;
mod block;
mod check;
mod config;
mod domain;
mod driver;
mod error;
mod event;
mod figures;
mod segment;
mod snapshot;
mod stats;
mod strategy;
mod stream;
mod units;

pub use allocator::{Allocation, DeviceAllocator};
pub use check::CheckLevel;
pub use config::{
    BfcConfig, BuddyConfig, CachingConfig, Config, ConfigError, PoolConfig, SlabConfig,
    StrategyName,
};
pub use driver::{Driver, DriverError, EventHandle, Handle, MemoryInfo};
pub use error::{AllocError, OutOfMemory};
pub use event::{Action, Event};
pub use snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
pub use stats::{PoolStats, Stat, Stats};
pub use units::{Bytes, DeviceAddress, MempoolId, Stream};
