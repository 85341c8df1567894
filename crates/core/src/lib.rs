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
//! let mut device = DeviceAllocator::new(driver, 0, &config);
//!
//! let first = device.allocate(Bytes::mib(3), Stream::DEFAULT)?;
//! device.free(first)?;
//! // The memory is still held, and serves the next request.
//! assert_eq!(device.allocate(Bytes::mib(2), Stream::DEFAULT)?, first);
//! assert_eq!(device.stats().num_device_alloc, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Device`] has one or more [lanes](Lane), each of which serves some of its streams. The device has the limit,
//! and the attempts to serve a request when a lane has no free block. A [`DeviceAllocator`] is a device with one
//! lane.
//!
//! # The path of a request
//!
//! Calls go downward only. A hit ends with `Lane::allocate`; everything below it is a miss.
//!
//! ```text
//! DeviceAllocator::allocate              device.rs
//! ├─ Lane::allocate                      lane.rs
//! │  ├─ route                            lane/pools.rs: which private pool, if any, serves the stream
//! │  ├─ reclaim_for                      lane/captures.rs: what other streams are done with is free again
//! │  ├─ Strategy::block_size             strategy/: the size, rounded up
//! │  ├─ Domains::find_or_insert          domain.rs: pool and stream as one small number
//! │  ├─ Strategy::take                   a free block, split in block.rs
//! │  └─ hand_out                         state, figures, event
//! └─ Device::serve_miss                  device/miss.rs: every attempt, a line each
//!    ├─ Strategy::release                releases memory, as the attempt says
//!    └─ Strategy::grow                   new memory: segment.rs, from physical.rs, which has the Driver
//! ```
//!
//! A freed block goes to `Strategy::put` at once. If other streams used it, it waits in `stream.rs` until they have
//! passed their events. If the streams are captured into a graph, `capture.rs` may find earlier that they are done.
//!
//! # What this crate does not do
//!
//! It calls no CUDA, reads no clock, file or environment variable, starts no thread and takes no lock. The device
//! is a type parameter, and options are passed in as values. A caller that shares an allocator between threads
//! locks it. The crate has no `unsafe` code.
#![forbid(unsafe_code)]

mod block;
mod capture;
mod check;
mod config;
mod device;
mod domain;
mod driver;
mod error;
mod event;
mod event_log;
mod figures;
mod fragmentation;
mod idle;
mod lane;
mod number_table;
mod pages;
mod peaks;
mod physical;
mod recent_events;
mod segment;
mod snapshot;
mod stats;
mod strategy;
mod stream;
mod units;

pub use check::CheckLevel;
pub use config::{Config, ConfigError, StrategyName};
pub use device::{Device, DeviceAllocator, DevicePast, DeviceState, Lanes, OneLane};
pub use domain::SegmentSource;
pub use driver::{CapturePoint, Driver, DriverError, EventHandle, GraphNode, Handle, MemoryInfo};
pub use error::{AllocError, Holder, OutOfMemory};
pub use event::{Action, Event};
pub use event_log::{EventLog, Observer};
pub use fragmentation::{Cause, Fragmentation, FreeBytes};
pub use idle::IdleRelease;
pub use lane::{
    Allocation, Checkpoint, Found, KeptPool, Lane, LaneNews, Pending, PoolSetting, PoolState,
    Request, Restored, RouteOrder,
};
pub use number_table::SearchHint;
pub use physical::{MappedRange, Memory, Owners, Physical, View};
pub use recent_events::{EventClock, RecentPast};
pub use snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
pub use stats::{PoolStats, Stat, Stats, StatsReset};
pub use strategy::FreeBlockOrder;
pub use strategy::options::*;
pub use units::{Bytes, Count, DeviceAddress, MempoolId, Stream, TorchRelease};
