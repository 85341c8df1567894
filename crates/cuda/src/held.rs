//! Device memory that is held for something other than an allocator: a page by which the driver is tried,
//! or another process's memory.

use lowtide_core::{Bytes, DeviceAddress, Handle};

/// A range of addresses and what is mapped in it. It is given back step by step, and a step that fails
/// can be tried again.
#[must_use = "what is held stays until it is given back"]
#[derive(Default, Debug)]
pub struct HeldRange {
    /// Where it is and how long, while it is reserved.
    pub(crate) reserved: Option<(DeviceAddress, Bytes)>,
    /// How much of it is mapped, from its start.
    pub(crate) mapped: Bytes,
    /// Handles that are not released yet.
    pub(crate) handles: Vec<Handle>,
}

impl HeldRange {
    /// Returns what holds a handle that is mapped nowhere.
    pub(crate) fn of_handle(handle: Handle) -> HeldRange {
        HeldRange {
            handles: vec![handle],
            ..HeldRange::default()
        }
    }

    /// Returns where it starts, while it is reserved.
    pub fn address(&self) -> Option<DeviceAddress> {
        self.reserved.map(|(start, _)| start)
    }

    /// Returns whether all of it is mapped.
    pub fn is_mapped(&self) -> bool {
        self.reserved.is_some_and(|(_, size)| size == self.mapped)
    }
}
