//! `liblowtide.so`: what PyTorch, Python and C call, and the one owner of a process's allocators.
//!
//! `include/lowtide.h` is generated from this crate by `cargo xtask header`: the comment of an exported
//! function is its contract.
//!
//! # The path of a call
//!
//! ```text
//! exported function     pluggable.rs: what PyTorch calls · peers.rs, share.rs: other devices, other
//!                       processes · control.rs: all else
//! ├─ boundary::run      no panic passes; an error becomes a status and the thread's text
//! └─ registry           the device's allocator, made at its first use
//!    └─ LockedAllocator
//! ```
//!
//! # What this crate does not do
//!
//! It decides nothing about memory, which is `lowtide-core`'s to do, and keeps no table of pointers of its
//! own. It ends nothing when the process ends, but that other processes get no more of its memory: the
//! driver may be gone by then, and takes all memory back itself.
#![expect(unsafe_code, reason = "exports a C interface")]

mod boundary;
mod control;
mod drivers;
mod error;
mod peers;
mod pluggable;
mod registry;
mod settings;
mod share;

pub use boundary::lowtide_last_error;
pub use control::{
    LOWTIDE_ABI_VERSION, MemoryStat, lowtide_abi_version, lowtide_configure, lowtide_device_of,
    lowtide_empty_cache, lowtide_get_memory_fraction, lowtide_memory_info, lowtide_memory_stats,
    lowtide_release_bytes, lowtide_reset_accumulated_stats, lowtide_reset_peak_stats,
    lowtide_snapshot, lowtide_version,
};
pub use error::Status;
pub use peers::lowtide_enable_peer_access;
pub use pluggable::{
    ContextEnd, Mempool, StreamFilter, lowtide_allocate, lowtide_base_alloc,
    lowtide_begin_allocate_to_pool, lowtide_deallocate, lowtide_end_allocate_to_pool, lowtide_free,
    lowtide_init, lowtide_malloc, lowtide_record_stream, lowtide_release_pool, lowtide_reset,
    lowtide_set_memory_fraction,
};
pub use share::{lowtide_attach, lowtide_detach, lowtide_share};
