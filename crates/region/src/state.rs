//! The states of a region on one device.

/// Where a region's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionState {
    /// On the device.
    Mapped,
    /// On its way from it.
    Pausing,
    /// Nowhere, but for what the error of the pause said is still on the device; its contents are where the region's
    /// [`BackupKind`](crate::BackupKind) says.
    Paused,
    /// On its way back.
    Resuming,
}
