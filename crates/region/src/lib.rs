//! Regions: device memory whose physical pages leave the card while its addresses stay, and come back with
//! what was in them where that was asked for.
//!
//! # What happens, in order
//!
//! ```text
//! RegionSource::allocate, release        memory/source.rs: segments for the pools whose blocks are in the region
//! ├─ Reservation::reuse, grow            reservation.rs: where in the region's addresses
//! └─ Backing::supply                     backing.rs: physical memory, in pieces larger than a segment
//! Change::apply                          change.rs: what is tried again where memory is short
//! RegionMemory::pause                    memory/leaving.rs: the state, and every step back where one fails
//! ├─ RegionPools::set_paused             pools.rs: the pools' allocator hands out nothing more
//! ├─ Device::synchronize                 device.rs: any stream may use the memory, so all are waited for
//! ├─ RegionPools::trim_and_list          what is free goes back; what the program holds is to be kept
//! ├─ Backups::begin                      backup.rs: room for the contents of those blocks
//! ├─ Device::notify                      who registered the memory elsewhere lets go of it first
//! ├─ Backups::save_next                  memory/saved.rs: some of them, and so on until all are saved
//! │  └─ Backing::reduce_from             the pieces of which all is saved go back
//! └─ Backing::unmap_all, reduce_to       the others: one call for each run of them, then one for each
//! RegionMemory::resume
//! ├─ Backing::supply                     as few pieces as possible for each run of segments
//! ├─ Backups::restore
//! └─ Device::notify, RegionPools::set_paused
//! RegionMemory::trim                     what no block uses goes back, and its copy with the last of it
//! ```
//!
//! # What this crate does not do
//!
//! It decides nothing about blocks, which are a pool's as any other: it is where the pool's segments come from.
//! It calls no driver but through [`lowtide_core::Driver`], and copies nothing itself.
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
