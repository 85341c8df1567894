//! What physical memory is made of.

use std::ffi::{c_int, c_uchar};
use std::ptr;

use lowtide_core::{Bytes, DriverError};

use crate::device::Device;
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
pub(crate) struct Extras {
    /// Other processes can be given them, as file descriptors.
    pub(crate) exportable: bool,
    /// Network cards can reach them.
    pub(crate) rdma: bool,
}

impl PhysicalMemory {
    /// Returns what the handles of a device are created with to have `extras`.
    ///
    /// # Errors
    ///
    /// What the driver says.
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
