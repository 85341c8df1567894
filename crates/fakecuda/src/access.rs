//! What an address is, and which device may do what there.

use crate::os::Access;
use crate::state::State;
use crate::state::memory::{Kind, Mapping};
use crate::state::stream::Place;

impl State {
    /// Returns what a device may do with a mapping.
    pub(crate) fn access_of(&self, mapping: &Mapping, device: usize) -> Access {
        match &mapping.kind {
            Kind::Virtual { access, .. } => access.get(&device).copied().unwrap_or(Access::None),
            Kind::Managed => Access::ReadWrite,
            Kind::Allocation | Kind::Opened { .. } => {
                let owner = mapping.physical.device;
                if owner == device || self.peers.contains(&(device, owner)) {
                    Access::ReadWrite
                } else {
                    Access::None
                }
            }
        }
    }

    /// Returns what an address is now.
    pub(crate) fn place(&self, address: u64) -> Place {
        Place {
            address,
            is_device: self.memory.reservation_at(address).is_some(),
            is_pinned: self.memory.host_at(address).is_some(),
        }
    }

    /// Returns whether work of a device may access the range so: device memory must be mapped and
    /// allow it; for the host's that is not pinned the program answers.
    ///
    /// Copies between devices need no peer access: the driver then goes through the host. So
    /// `is_copy` lets the device that has the memory do its part.
    pub(crate) fn allows(
        &self,
        place: Place,
        bytes: u64,
        device: usize,
        needed: Access,
        is_copy: bool,
    ) -> bool {
        if !place.is_device {
            return !place.is_pinned || self.memory.host_at(place.address).is_some();
        }
        self.memory.covers(place.address, bytes, |mapping| {
            self.access_of(mapping, device) >= needed
                || is_copy && self.access_of(mapping, mapping.physical.device) >= needed
        })
    }
}
