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
mod drivers;
mod dump;
mod environment;
mod error;
mod events;
mod explain;
mod exposition;
mod fork;
mod held;
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

pub use boundary::{Mempool, lowtide_last_error};
pub use checkpoint::{
    BlockVisitor, Checkpoint, lowtide_check_live, lowtide_checkpoint_pool,
    lowtide_release_checkpoint, lowtide_restore_pool,
};
pub use control::{
    CachingSettings, LOWTIDE_ABI_VERSION, MemoryStat, lowtide_abi_version, lowtide_config,
    lowtide_configure, lowtide_current_device, lowtide_empty_cache, lowtide_get_memory_fraction,
    lowtide_memory_info, lowtide_memory_stats, lowtide_memory_usage, lowtide_reconfigure,
    lowtide_release_bytes, lowtide_reset_accumulated_stats, lowtide_reset_peak_stats,
    lowtide_set_torch_version, lowtide_settings_in_force, lowtide_snapshot, lowtide_version,
};
pub use dump::{SnapshotWriter, lowtide_on_dump};
pub use error::{OutOfMemory, Status};
pub use events::{Action, Event, EventObserver, lowtide_observe_events};
pub use held::{
    Allocation, Block, BlockState, Segment, SegmentVisitor, lowtide_find_allocation,
    lowtide_largest_free, lowtide_visit_segments,
};
pub use peers::lowtide_enable_peer_access;
pub use pluggable::{
    lowtide_allocate, lowtide_allocate_at, lowtide_base_alloc, lowtide_deallocate, lowtide_free,
    lowtide_hook_record_stream, lowtide_hook_set_memory_fraction, lowtide_init, lowtide_malloc,
    lowtide_record_stream, lowtide_reset, lowtide_set_memory_fraction,
};
pub use pools::{
    ContextEnd, SegmentAllocate, SegmentRelease, StreamFilter, lowtide_begin_allocate_to_pool,
    lowtide_capture_begin, lowtide_capture_end, lowtide_empty_pool, lowtide_end_allocate_to_pool,
    lowtide_pool_use_count, lowtide_release_pool, lowtide_retain_pool, lowtide_set_no_split,
    lowtide_set_pool_source, lowtide_set_use_on_oom,
};
pub use preload::*;
pub use record::{lowtide_record_start, lowtide_record_stop};
pub use regions::{
    Backup, Region, RegionState, RegionVisitor, lowtide_backup_find, lowtide_is_away,
    lowtide_is_in_region, lowtide_kept_host_bytes, lowtide_page_lock_backups, lowtide_pause,
    lowtide_pause_and_drop, lowtide_region_enter, lowtide_region_leave, lowtide_region_pool,
    lowtide_region_trim, lowtide_release_backups, lowtide_release_idle_backups, lowtide_resume,
    lowtide_retain_backups, lowtide_set_backup_directory, lowtide_set_memory_margin,
    lowtide_visit_regions,
};
pub use share::{lowtide_attach, lowtide_detach, lowtide_share};
pub use shortage::{ShortageCallback, lowtide_last_out_of_memory, lowtide_on_shortage};
pub use tms::*;
