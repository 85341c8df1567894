//! Device memory that does not belong to an allocator: a test page, or another process's memory.

use lowtide_core::{Bytes, DeviceAddress, Handle};

/// A range of reserved addresses and its mapped handles. It is released step by step, and a step that fails can be
/// retried.
#[must_use = "what is held stays until it is released"]
#[derive(Default, Debug)]
pub struct HeldRange {
    /// The start and size of the range while it is reserved.
    pub(crate) reserved: Option<(DeviceAddress, Bytes)>,
    /// The number of mapped bytes from the start of the range.
    pub(crate) mapped: Bytes,
    /// The handles that have not been released yet.
    pub(crate) handles: Vec<Handle>,
}

impl HeldRange {
    /// Returns a range that holds one handle, mapped nowhere.
    pub(crate) fn of_handle(handle: Handle) -> HeldRange {
        HeldRange {
            handles: vec![handle],
            ..HeldRange::default()
        }
    }

    /// Returns the start of the range while it is reserved.
    pub fn address(&self) -> Option<DeviceAddress> {
        self.reserved.map(|(start, _)| start)
    }

    /// Returns whether the whole range is mapped.
    pub fn is_mapped(&self) -> bool {
        self.reserved.is_some_and(|(_, size)| size == self.mapped)
    }
}
