//! The states of a region on one device.

/// Where a region's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionState {
    /// On the device.
    Mapped,
    /// A pause is in progress.
    Pausing,
    /// Released. Contents are where the region's [`BackupKind`](crate::BackupKind) says. If the pause returned an error,
    /// some memory may still be on the device.
    Paused,
    /// A resume is in progress.
    Resuming,
}
