//! Decides which bytes of device memory satisfy a request.
//!
//! A [`DeviceAllocator`] serves one device by one strategy ([`Config`]) through one [`Driver`]:
//!
//! ```
//! use lowtide_core::{Bytes, Config, DeviceAllocator, Stream};
//! use lowtide_sim::{SimConfig, SimDriver};
//!
//! let driver = SimDriver::new(SimConfig { capacity: Some(Bytes::gib(1)), ..SimConfig::default() });
//! let config: Config = "caching:max_split_size_mb:64".parse()?;
//! let mut allocator = DeviceAllocator::new(driver, 0, &config);
//!
//! let first = allocator.allocate(Bytes::mib(3), Stream::DEFAULT)?;
//! allocator.free(first)?;
//! // The memory is still held, and serves the next request.
//! assert_eq!(allocator.allocate(Bytes::mib(2), Stream::DEFAULT)?, first);
//! assert_eq!(allocator.stats().num_device_alloc, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The path of a request
//!
//! Downward only. A hit ends with the first attempt; everything below it is a miss.
//!
//! ```text
//! DeviceAllocator::allocate              lanes/alone.rs, each step in allocator.rs
//! ├─ request
//! │  ├─ route                            which private pool, if any, serves the stream
//! │  ├─ reclaim_for                      stream.rs: what other streams are done with is free again
//! │  ├─ Strategy::block_size             strategy/: the size, rounded up
//! │  └─ Domains::find_or_insert          domain.rs: pool and stream as one small number
//! ├─ take
//! │  └─ Strategy::take                   a free block, split in block.rs
//! ├─ grow                                where there is none
//! │  ├─ Strategy::release                memory long idle goes back
//! │  ├─ is_rejected                      more than the device is to hold, where that fails at once
//! │  └─ Strategy::grow                   new memory: segment.rs, from physical.rs, which has the Driver
//! ├─ Lanes::grow_after_release           lanes.rs: where the driver has no more
//! │  ├─ take_from_open_pools             free blocks of pools that allow it
//! │  ├─ Strategy::release, grow          just enough goes back, then new memory
//! │  └─ reclaim_pending, release_cached, try_again
//! │                                      everything goes back, then the last try
//! └─ hand_out                            state, figures, event
//! ```
//!
//! A block that is freed goes to `Strategy::put` at once or, where other streams used it, by way of
//! `stream.rs` once they have passed their events; of a graph that is being captured, `capture.rs` can
//! tell earlier.
//!
//! # What this crate does not do
//!
//! It calls no CUDA, reads no clock, file or environment variable, starts no thread and locks nothing:
//! the device is a type parameter, options come in as values, and whoever shares an allocator between
//! threads locks it. It has no `unsafe` code.
#![forbid(unsafe_code)]

mod allocator;
mod block;
mod capture;
mod check;
mod config;
mod domain;
mod driver;
mod error;
mod event;
mod event_log;
mod figures;
mod gap;
mod lanes;
mod number_table;
mod peaks;
mod physical;
mod recent_events;
mod segment;
mod snapshot;
mod stats;
mod strategy;
mod stream;
mod units;

pub use allocator::{
    Allocation, Checkpoint, DeviceAllocator, Growth, KeptPool, Request, Restored, limit_of_fraction,
};
pub use check::CheckLevel;
pub use config::{
    BfcConfig, BuddyConfig, CachingConfig, Config, ConfigError, FreeBlockOrder, PoolConfig,
    SlabConfig, StrategyName,
};
pub use domain::SegmentSource;
pub use driver::{CapturePoint, Driver, DriverError, EventHandle, GraphNode, Handle, MemoryInfo};
pub use error::{AllocError, Holder, OutOfMemory};
pub use event::{Action, Event};
pub use event_log::Observer;
pub use gap::{Cause, FreeBytes, Gap};
pub use lanes::Lanes;
pub use number_table::SearchHint;
pub use peaks::Peaks;
pub use recent_events::{EventClock, RecentPast};
pub use snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
pub use stats::{PoolStats, Stat, Stats};
pub use units::{Bytes, Count, DeviceAddress, MempoolId, Stream, TorchRelease};
