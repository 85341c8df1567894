//! Regions: device memory whose physical pages leave the card while its addresses stay, and come back with
//! what was in them where that was asked for.
#![forbid(unsafe_code)]

mod backup;

pub use backup::{BackupError, BackupKind, Backups, MemoryRange};
