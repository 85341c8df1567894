//! The memory behind an address, and each device's access to it.

use crate::os::Access;
use crate::state::State;
use crate::state::memory::{Kind, Mapping};
use crate::state::stream::Place;

impl State {
    /// Returns a device's access to a mapping.
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

    /// Returns an address with the kind of memory that is there now.
    pub(crate) fn place(&self, address: u64) -> Place {
        Place {
            address,
            is_device: self.memory.reservation_at(address).is_some(),
            is_pinned: self.memory.host_at(address).is_some(),
        }
    }

    /// Returns whether a device's work may access the range in this way. Device memory must be mapped and allow it.
    /// Pageable host memory is the program's responsibility.
    ///
    /// Copies between devices need no peer access, because the driver then goes through the host. So with
    /// `is_copy`, access by the device that owns the memory is enough.
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
