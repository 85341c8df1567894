//! What physical memory is made of: found out once for a device, by trying.

use std::ffi::{c_int, c_uchar};
use std::ptr;

use lowtide_core::{Bytes, Driver, DriverError};

use crate::device::{Attribute, Device};
use crate::driver::CudaDriver;
use crate::held::HeldRange;
use crate::library::call;
use crate::sys::{
    CUmemAllocationGranularityFlags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationPropFlags, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

/// What the device's handles are created with.
#[derive(Debug)]
pub(crate) struct PhysicalMemory {
    pub(crate) properties: CUmemAllocationProp,
    pub(crate) granularity: Bytes,
}

/// What handles can be beyond plain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Extras {
    /// Other processes can be given them, as file descriptors.
    exportable: bool,
    /// Network cards can reach them.
    rdma: bool,
}

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
        let properties = properties(self.device(), extras);
        let granularity = self.granularity_of(&properties)?;
        self.physical = Some(PhysicalMemory {
            properties,
            granularity,
        });

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

    fn granularity_of(&self, properties: &CUmemAllocationProp) -> Result<Bytes, DriverError> {
        let mut granularity = 0;
        let minimum = CUmemAllocationGranularityFlags::MINIMUM;
        // SAFETY: the call reads the properties and writes `granularity`; both outlive it.
        unsafe {
            call!(
                self.library(),
                cuMemGetAllocationGranularity(
                    &raw mut granularity,
                    ptr::from_ref(properties),
                    minimum
                )
            )
        }?;
        Ok(Bytes(granularity as u64))
    }
}

impl PhysicalMemory {
    /// Returns whether handles can be given to other processes.
    pub(crate) fn is_exportable(&self) -> bool {
        self.properties.requested_handle_types != CUmemAllocationHandleType::NONE
    }
}

impl Device {
    /// Returns where the device's memory is.
    pub(crate) fn location(&self) -> CUmemLocation {
        CUmemLocation {
            kind: CUmemLocationType::DEVICE,
            id: c_int::from(self.raw()),
        }
    }
}

fn properties(device: &Device, extras: Extras) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CUmemAllocationType::PINNED,
        requested_handle_types: if extras.exportable {
            CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR
        } else {
            CUmemAllocationHandleType::NONE
        },
        location: device.location(),
        win32_handle_metadata: ptr::null_mut(),
        flags: CUmemAllocationPropFlags {
            compression_type: 0,
            gpu_direct_rdma_capable: c_uchar::from(extras.rdma),
            usage: 0,
            reserved: [0; 4],
        },
    }
}
