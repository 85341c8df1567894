//! The properties of physical memory.

use std::ffi::{c_int, c_uchar};
use std::ptr;

use lowtide_core::{Bytes, DriverError};

use crate::device::Device;
use crate::library::call;
use crate::sys::{
    CUmemAllocationGranularityFlags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationPropFlags, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

/// The properties with which the device's handles are created.
#[derive(Debug)]
pub(crate) struct PhysicalMemory {
    pub(crate) properties: CUmemAllocationProp,
    pub(crate) granularity: Bytes,
}

/// Optional capabilities of handles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extras {
    /// Handles can be exported to other processes as file descriptors.
    pub(crate) exportable: bool,
    /// Network cards can reach the memory (GPUDirect RDMA).
    pub(crate) rdma: bool,
}

impl PhysicalMemory {
    /// Returns the properties of a device's handles with `extras`.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub(crate) fn new(device: &Device, extras: Extras) -> Result<PhysicalMemory, DriverError> {
        let properties = properties(device, extras);
        let mut granularity = 0;
        let minimum = CUmemAllocationGranularityFlags::MINIMUM;
        // SAFETY: the call reads the properties and writes `granularity`; both outlive it.
        unsafe {
            call!(
                device.library(),
                cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, minimum)
            )
        }?;
        Ok(PhysicalMemory {
            properties,
            granularity: Bytes(granularity as u64),
        })
    }

    /// Returns whether handles can be exported to other processes.
    pub(crate) fn is_exportable(&self) -> bool {
        self.properties.requested_handle_types != CUmemAllocationHandleType::NONE
    }
}

impl Device {
    /// Returns the location of the device's memory.
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
