//! Which physical memory works on a device: found out once, by trying.

use lowtide_core::{Bytes, Driver, DriverError};

use crate::device::Attribute;
use crate::driver::CudaDriver;
use crate::held::HeldRange;
use crate::physical::{Extras, PhysicalMemory};

impl CudaDriver {
    /// Takes the best physical memory that works; none where the device has no virtual memory.
    ///
    /// What a device says that it can do may still be refused: the first in a container, where creation
    /// fails, the second under WSL2, where everything succeeds until access is set (pytorch#192330).
    /// So each kind is tried whole.
    pub(crate) fn choose_physical_memory(&mut self) -> Result<(), DriverError> {
        let device = self.device();
        if device.attribute(Attribute::VirtualMemory)? == 0 {
            return Ok(());
        }
        let best = Extras {
            exportable: device.attribute(Attribute::PosixFileDescriptors)? != 0,
            rdma: device.attribute(Attribute::GpuDirectRdma)? != 0,
        };
        let mut candidates = vec![
            best,
            Extras {
                rdma: false,
                ..best
            },
            Extras {
                rdma: false,
                exportable: false,
            },
        ];
        candidates.dedup();
        let mut result = Ok(());
        for extras in candidates {
            result = self.use_physical_memory(extras);
            // A device without a free page refuses nothing: it says nothing about its handles.
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

    /// Has handles created with `extras` from now on, and maps one to see whether that works.
    fn use_physical_memory(&mut self, extras: Extras) -> Result<(), DriverError> {
        let physical = PhysicalMemory::new(self.device(), extras)?;
        let granularity = physical.granularity;
        self.physical = Some(physical);

        let mut held = HeldRange::default();
        let tried = self.try_page(&mut held, granularity);
        // Whether the page can be given back says nothing about what it is made of.
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
