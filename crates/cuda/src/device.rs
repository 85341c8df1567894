//! Properties of a device. No function here creates a context or allocates device memory.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::Arc;

use lowtide_core::{Bytes, DriverError};

use crate::library::{Library, call, call_optional};
use crate::sys::{CUdevice, CUdeviceAttribute, CUuuid};

/// A device.
#[derive(Clone, Debug)]
pub struct Device {
    library: Arc<Library>,
    raw: CUdevice,
    ordinal: u32,
}

impl Library {
    /// Returns the number of devices that are visible to the process (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn device_count(&self) -> Result<u32, DriverError> {
        let mut count = 0;
        // SAFETY: the call writes `count`, which outlives it.
        unsafe { call!(self, cuDeviceGetCount(&raw mut count)) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Returns a device by its number, counted from 0 as in `cuda:0`.
    ///
    /// # Errors
    ///
    /// The driver's error if there is no such device.
    pub fn device(self: &Arc<Library>, ordinal: u32) -> Result<Device, DriverError> {
        let mut raw = 0;
        // A number beyond C's range becomes -1, which names no device, so the driver reports the error.
        let number = c_int::try_from(ordinal).unwrap_or(-1);
        // SAFETY: the call writes `raw`, which outlives it.
        unsafe { call!(self, cuDeviceGet(&raw mut raw, number)) }?;
        Ok(Device {
            library: Arc::clone(self),
            raw,
            ordinal,
        })
    }
}

impl Device {
    /// Returns the device's number, counted from 0.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the driver library of the device.
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Returns the device's name, such as `NVIDIA H200`.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn name(&self) -> Result<String, DriverError> {
        const LENGTH: c_int = 256;
        let mut name = [0; LENGTH as usize];
        let start = name.as_mut_ptr().cast::<c_char>();
        // SAFETY: the call writes at most `LENGTH` bytes including the final zero, and `name` has `LENGTH` bytes.
        unsafe { call!(&self.library, cuDeviceGetName(start, LENGTH, self.raw)) }?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// Returns the device's UUID, which is the same in every process.
    ///
    /// # Errors
    ///
    /// [`DriverError::Unsupported`] before CUDA 11.4; else the driver's error.
    pub fn uuid(&self) -> Result<Uuid, DriverError> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the call writes `uuid`, which outlives it.
        unsafe { call_optional!(&self.library, cuDeviceGetUuid_v2(&raw mut uuid, self.raw)) }?;
        // C's characters are signed on some processors.
        Ok(Uuid(uuid.bytes.map(|byte| byte as u8)))
    }

    /// Returns the device's total memory in bytes.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn total_memory(&self) -> Result<Bytes, DriverError> {
        let mut bytes = 0;
        // SAFETY: the call writes `bytes`, which outlives it.
        unsafe { call!(&self.library, cuDeviceTotalMem_v2(&raw mut bytes, self.raw)) }?;
        Ok(Bytes(bytes as u64))
    }

    /// Returns the value of an attribute. For a capability, any value but 0 means that the device has it.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn attribute(&self, attribute: Attribute) -> Result<i32, DriverError> {
        let mut value = 0;
        let raw = attribute.raw();
        // SAFETY: the call writes `value`, which outlives it.
        unsafe {
            call!(
                &self.library,
                cuDeviceGetAttribute(&raw mut value, raw, self.raw)
            )
        }?;
        Ok(value)
    }

    /// Returns whether this device can read and write the memory of `owner` once peer access is enabled.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn can_access(&self, owner: &Device) -> Result<bool, DriverError> {
        let mut can_access = 0;
        // SAFETY: the call writes `can_access`, which outlives it.
        unsafe {
            call!(
                &self.library,
                cuDeviceCanAccessPeer(&raw mut can_access, self.raw, owner.raw)
            )
        }?;
        Ok(can_access != 0)
    }

    pub(crate) fn raw(&self) -> CUdevice {
        self.raw
    }
}

/// An attribute of a [`Device`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Attribute {
    /// The major compute capability: 9 of 9.0.
    ComputeCapabilityMajor,
    /// The minor compute capability: 0 of 9.0.
    ComputeCapabilityMinor,
    /// The PCI domain.
    PciDomain,
    /// The PCI bus.
    PciBus,
    /// The PCI device.
    PciDevice,
    /// Whether the device supports virtual memory management: reserve, create, map.
    VirtualMemory,
    /// Whether physical memory can be exported to other processes as a file descriptor.
    PosixFileDescriptors,
    /// Whether GPUDirect RDMA works on virtual memory: network cards can reach it if it was created for that.
    GpuDirectRdma,
}

impl Attribute {
    fn raw(self) -> CUdeviceAttribute {
        type Raw = CUdeviceAttribute;
        match self {
            Attribute::ComputeCapabilityMajor => Raw::COMPUTE_CAPABILITY_MAJOR,
            Attribute::ComputeCapabilityMinor => Raw::COMPUTE_CAPABILITY_MINOR,
            Attribute::PciDomain => Raw::PCI_DOMAIN_ID,
            Attribute::PciBus => Raw::PCI_BUS_ID,
            Attribute::PciDevice => Raw::PCI_DEVICE_ID,
            Attribute::VirtualMemory => Raw::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            Attribute::PosixFileDescriptors => Raw::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            Attribute::GpuDirectRdma => Raw::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        }
    }
}

/// A device's UUID, displayed as `nvidia-smi` shows it after `GPU-`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                write!(f, "-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_others_write_it() {
        let uuid = Uuid(std::array::from_fn(|index| {
            0xf0 - u8::try_from(index).unwrap()
        }));
        assert_eq!(uuid.to_string(), "f0efeeed-eceb-eae9-e8e7-e6e5e4e3e2e1");
    }
}
