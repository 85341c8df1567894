//! One driver for all lanes of a device.

use std::sync::{Arc, PoisonError};

use lowtide_core::{
    Bytes, CapturePoint, DeviceAddress, Driver, DriverError, EventHandle, GraphNode, Handle,
    MemoryInfo, Stream,
};

use crate::owners::{Owner, OwnerTable};
use crate::sync::{Mutex, MutexGuard};

/// A lane's handle on the device's driver. The driver has its own lock, the last in the lock order. The handle also
/// records in the owner table which memory the lane holds.
#[derive(Debug)]
pub struct SharedDriver<D> {
    driver: Arc<Mutex<D>>,
    owner: Owner,
    owners: Arc<OwnerTable>,
    supports_virtual_memory: bool,
    granularity: Bytes,
}

impl<D: Driver> SharedDriver<D> {
    pub(crate) fn new(driver: Arc<Mutex<D>>, owner: Owner, owners: Arc<OwnerTable>) -> Self {
        let known = Self::lock_driver(&driver);
        let supports_virtual_memory = known.supports_virtual_memory();
        let granularity = known.granularity();
        drop(known);
        SharedDriver {
            driver,
            owner,
            owners,
            supports_virtual_memory,
            granularity,
        }
    }

    /// Locks the driver, so that no other lane can use it, and returns it. A driver whose call panicked is treated
    /// like one whose call failed: the lane that made the call is poisoned, and its device with it.
    pub(crate) fn lock_driver(driver: &Mutex<D>) -> MutexGuard<'_, D> {
        driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, D> {
        Self::lock_driver(&self.driver)
    }
}

impl<D: Driver> Driver for SharedDriver<D> {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let address = self.lock().allocate(size)?;
        self.owners.add(self.owner, address, size);
        Ok(address)
    }

    fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        let mut driver = self.lock();
        driver.free(address, size)?;
        // Before the driver can give another lane the same addresses.
        self.owners.remove(address, size);
        Ok(())
    }

    fn lend(&mut self, address: DeviceAddress, size: Bytes) {
        self.owners.add(self.owner, address, size);
    }

    fn return_lent(&mut self, address: DeviceAddress, size: Bytes) {
        self.owners.remove(address, size);
    }

    fn supports_virtual_memory(&self) -> bool {
        self.supports_virtual_memory
    }

    fn granularity(&self) -> Bytes {
        self.granularity
    }

    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.lock().reserve(size)
    }

    fn unreserve(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.lock().unreserve(address, size)
    }

    fn create(&mut self, size: Bytes) -> Result<Handle, DriverError> {
        self.lock().create(size)
    }

    fn release(&mut self, handle: Handle) -> Result<(), DriverError> {
        self.lock().release(handle)
    }

    fn map(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        handle: Handle,
    ) -> Result<(), DriverError> {
        self.lock().map(address, size, handle)?;
        self.owners.add(self.owner, address, size);
        Ok(())
    }

    fn set_access(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.lock().set_access(address, size)
    }

    fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.lock().unmap(address, size)?;
        // The range stays reserved for this lane, so that no other lane records memory there.
        self.owners.remove(address, size);
        Ok(())
    }

    fn record_event(&mut self, stream: Stream) -> Result<EventHandle, DriverError> {
        self.lock().record_event(stream)
    }

    fn query_event(&mut self, event: EventHandle) -> Result<bool, DriverError> {
        self.lock().query_event(event)
    }

    fn synchronize_event(&mut self, event: EventHandle) -> Result<(), DriverError> {
        self.lock().synchronize_event(event)
    }

    fn wait_event(&mut self, stream: Stream, event: EventHandle) -> Result<(), DriverError> {
        self.lock().wait_event(stream, event)
    }

    fn release_event(&mut self, event: EventHandle) {
        self.lock().release_event(event);
    }

    fn synchronize_stream(&mut self, stream: Stream) -> Result<(), DriverError> {
        self.lock().synchronize_stream(stream)
    }

    fn capture_of(&mut self, stream: Stream) -> Option<u64> {
        self.lock().capture_of(stream)
    }

    fn capture_point(&mut self, stream: Stream) -> Option<CapturePoint> {
        self.lock().capture_point(stream)
    }

    fn dependencies(&mut self, node: GraphNode) -> Vec<GraphNode> {
        self.lock().dependencies(node)
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DriverError> {
        self.lock().memory_info()
    }
}
