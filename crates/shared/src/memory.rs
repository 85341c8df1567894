//! One physical memory for all lanes of a device.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};

use lowtide_core::{Bytes, DeviceAddress, Driver, Memory, Owners, Physical};

use crate::owners::{LaneId, OwnerTable};
use crate::sync::{Mutex, MutexGuard};

/// A lane's access to the physical memory of its device, which has its own lock: the last in the lock order.
#[derive(Debug)]
pub struct SharedMemory<D>(pub(crate) Arc<Mutex<Physical<D>>>);

/// Locks the physical memory and returns it. A driver whose call panicked is treated like one whose call failed: the
/// lane that made the call is poisoned, and its device with it.
pub(crate) fn lock<D>(physical: &Mutex<Physical<D>>) -> MutexGuard<'_, Physical<D>> {
    physical.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: Driver> Memory for SharedMemory<D> {
    type Driver = D;

    fn physical(&self) -> impl Deref<Target = Physical<D>> {
        lock(&self.0)
    }

    fn physical_mut(&mut self) -> impl DerefMut<Target = Physical<D>> {
        lock(&self.0)
    }
}

/// Records in the table of all devices which lane of one device holds an address.
#[derive(Debug)]
pub(crate) struct DeviceOwners {
    pub(crate) table: Arc<OwnerTable>,
    pub(crate) device: u8,
}

impl Owners for DeviceOwners {
    fn add(&self, lane: u8, address: DeviceAddress, size: Bytes) {
        let device = self.device;
        self.table.add(LaneId { device, lane }, address, size);
    }

    fn remove(&self, address: DeviceAddress, size: Bytes) {
        self.table.remove(address, size);
    }
}
