//! Regions: device memory that can be paused and resumed. A pause releases the physical memory and keeps the addresses.
//! A resume maps new memory at the same addresses and restores the contents, if they were saved.
//!
//! # Call tree
//!
//! ```text
//! RegionSource::allocate, release        memory/source.rs: the segments of the region's pools
//! ├─ Reservation::reuse, grow            reservation.rs: the place of a segment in the region's addresses
//! └─ Backing::supply                     backing.rs: physical memory, in pieces that segments share
//! Change::apply                          change.rs: several regions and devices, further attempts if memory is short
//! RegionMemory::pause                    memory/pausing.rs: if a step fails, the steps before it are undone
//! ├─ RegionPools::set_paused             pools.rs: the pools refuse requests
//! ├─ Device::synchronize                 device.rs: work in any stream may use the memory
//! ├─ RegionPools::trim_and_list          free segments are released, allocated blocks are listed
//! ├─ Backups::begin                      backup.rs: room for the contents of those blocks
//! ├─ Device::notify                      observers, which may have registered the memory elsewhere
//! ├─ Backups::save_next                  memory/saved.rs: some of the blocks, until all are saved
//! │  └─ Backing::release_until             the pieces that are saved completely are released
//! └─ Backing::unmap_all, release_except       the others: one call for each run of them, then one for each
//! RegionMemory::resume                   memory.rs
//! ├─ Backing::supply                     as few pieces as possible for each run of segments
//! ├─ Backups::restore
//! └─ Device::notify, RegionPools::set_paused
//! RegionMemory::trim                     what no block uses is released; its copy with the last of it
//! ```
//!
//! # What this crate does not do
//!
//! It decides nothing about blocks: a region's pools are ordinary pools, and the region is the source of their segments.
//! It calls the driver only through [`lowtide_core::Driver`]. It copies nothing itself.
#![forbid(unsafe_code)]

mod backing;
mod backup;
mod change;
mod device;
mod error;
mod figures;
mod memory;
mod pools;
mod reservation;
mod state;

pub use backup::{BackupError, BackupKind, Backups, MemoryRange};
pub use change::{Change, ChangeError, release_copies};
pub use device::Device;
pub use error::RegionError;
pub use figures::RegionFigures;
pub use memory::{Copies, RegionMemory};
pub use state::RegionState;
