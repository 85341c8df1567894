//! Determines once, by trial, which kind of physical memory works on a device.

use lowtide_core::{Bytes, Driver, DriverError};

use crate::device::Attribute;
use crate::driver::CudaDriver;
use crate::held::HeldRange;
use crate::physical::{Extras, PhysicalMemory};

impl CudaDriver {
    /// Chooses the physical memory with the most capabilities that works. Chooses none if the device has no virtual
    /// memory.
    ///
    /// A capability that a device reports may still be refused. File descriptors may fail in a container, where
    /// creation fails. RDMA may fail under WSL2, where everything succeeds until access is set (pytorch#192330). So
    /// each kind is tried from creation to access.
    pub(crate) fn choose_physical_memory(&mut self) -> Result<(), DriverError> {
        let device = self.device();
        if device.attribute(Attribute::VirtualMemory)? == 0 {
            return Ok(());
        }
        let exportable = device.attribute(Attribute::PosixFileDescriptors)? != 0;
        let rdma = device.attribute(Attribute::GpuDirectRdma)? != 0;
        let mut candidates = vec![(exportable, rdma), (exportable, false), (false, false)];
        candidates.dedup();
        let mut result = Ok(());
        for (exportable, rdma) in candidates {
            result = self.use_physical_memory(Extras { exportable, rdma });
            // A device without a free page says nothing about its handles' capabilities.
            let is_full = result == Err(DriverError::OutOfMemory) && self.physical.is_some();
            if result.is_ok() || is_full {
                return Ok(());
            }
            self.physical = None;
        }
        match result {
            Err(DriverError::Unsupported { .. }) => Ok(()),
            result => result,
        }
    }

    /// Creates handles with `extras` from now on, and maps one to test them.
    fn use_physical_memory(&mut self, extras: Extras) -> Result<(), DriverError> {
        let physical = PhysicalMemory::new(self.device(), extras)?;
        let granularity = physical.granularity;
        self.physical = Some(physical);

        let mut held = HeldRange::default();
        let tried = self.try_page(&mut held, granularity);
        // Whether the page can be released says nothing about its capabilities.
        self.abandon(held);
        tried
    }

    fn try_page(&mut self, held: &mut HeldRange, size: Bytes) -> Result<(), DriverError> {
        self.reserve_held(held, size)?;
        let handle = self.create(size)?;
        self.map_held(held, handle, size)?;
        self.allow_held(held)
    }
}
