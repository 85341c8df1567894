//! `liblowtide.so`: the functions that PyTorch, Python and C call. It owns all allocators of a process.
//!
//! `cargo xtask header` generates `include/lowtide.h` from this crate. The comment of an exported function is its
//! contract.
//!
//! # The path of a call
//!
//! ```text
//! exported function     pluggable.rs: PyTorch's pluggable-allocator interface · one file for each other topic
//! ├─ boundary::run      stops panics; turns an error into a status and the thread's text; refuses forked children
//! ├─ start::device      the device's allocator, made at its first use
//! └─ devices            the allocator of a device in use, or of a block
//!    └─ SharedAllocator
//! ```
//!
//! # What this crate does not do
//!
//! It makes no decision about memory (`lowtide-core` does) and keeps no table of pointers. At the end of the
//! process it frees nothing, because the driver may be gone by that time and frees all memory itself. It only
//! stops sharing memory with other processes.
#![expect(unsafe_code, reason = "exports a C interface")]

mod boundary;
mod checkpoint;
mod control;
mod cuda;
mod devices;
mod dump;
mod environment;
mod error;
mod events;
mod exit;
mod explain;
mod exposition;
mod fork;
mod held;
mod idle;
mod metrics;
mod pauses;
mod peers;
mod pluggable;
mod pointers;
mod pools;
mod preload;
mod publish;
mod record;
mod regions;
mod settings;
mod share;
mod shortage;
mod sockets;
mod start;
mod switch;
mod threads;
mod tms;

pub use boundary::*;
pub use checkpoint::*;
pub use control::*;
pub use dump::*;
pub use error::*;
pub use events::*;
pub use held::*;
pub use peers::*;
pub use pluggable::*;
pub use pointers::*;
pub use pools::*;
pub use preload::*;
pub use record::*;
pub use regions::*;
pub use share::*;
pub use shortage::*;
pub use tms::*;
