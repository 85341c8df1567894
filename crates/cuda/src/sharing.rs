//! Memory that other devices and other processes use too.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use lowtide_core::{Bytes, DeviceAddress, DriverError, Handle};

use crate::device::Device;
use crate::driver::{CudaDriver, read_write};
use crate::library::call;
use crate::sys::{CUmemAllocationHandleType, CUresult};

impl CudaDriver {
    /// Lets this device read and write the memory that `owner` allocates
    /// ([`allocate`](lowtide_core::Driver::allocate)), all that there is and all to come. Doing it again
    /// changes nothing.
    ///
    /// # Errors
    ///
    /// What the driver says, if [`Device::can_access`] is false.
    pub fn enable_peer(&mut self, owner: &CudaDriver) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        let library = self.library();
        // SAFETY: `owner` holds its context.
        match unsafe { (library.functions.cuCtxEnablePeerAccess)(owner.context.raw(), 0) } {
            CUresult::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => library.check("cuCtxEnablePeerAccess", result),
        }
    }

    /// Lets `peer` read and write what is mapped here from now on. Ranges that are mapped already need
    /// [`CudaDriver::grant_to_peer`].
    pub fn add_peer(&mut self, peer: &Device) {
        if !self
            .access
            .iter()
            .any(|known| known.location.id == peer.raw())
        {
            self.access.push(read_write(peer));
        }
    }

    /// Lets `peer` read and write a mapped range.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn grant_to_peer(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        peer: &Device,
    ) -> Result<(), DriverError> {
        self.grant(address, size, &[read_write(peer)])
    }

    /// Returns whether [`CudaDriver::export`] works. Does not change for one instance.
    pub fn supports_export(&self) -> bool {
        self.physical
            .as_ref()
            .is_some_and(|physical| physical.is_exportable())
    }

    /// Returns physical memory as a file descriptor, which another process can import. As long as either
    /// is open, the memory stays.
    ///
    /// # Errors
    ///
    /// [`DriverError::Unsupported`] unless [`CudaDriver::supports_export`]; else what the driver says.
    pub fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        if !self.supports_export() {
            let call = "cuMemExportToShareableHandle";
            return Err(DriverError::Unsupported { call });
        }
        let _scope = self.context.enter()?;
        let mut descriptor: c_int = -1;
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let place = (&raw mut descriptor).cast();
        // SAFETY: 1. the handle came from `create`, by the contract of `new`. 2. For this kind the call
        // writes an `int`, which `place` is, and which outlives it.
        unsafe {
            call!(
                self.library(),
                cuMemExportToShareableHandle(place, handle.0, kind, 0)
            )
        }?;
        // SAFETY: the call succeeded, so this is a new file descriptor that is the caller's to close.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Returns the physical memory of another process behind a file descriptor. It is mapped and released
    /// as if it were created here.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn import(&mut self, descriptor: BorrowedFd<'_>) -> Result<Handle, DriverError> {
        let _scope = self.context.enter()?;
        let mut handle = 0;
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        // A descriptor is passed as if it were an address; it is open, so it is not negative.
        let number = ptr::without_provenance_mut(descriptor.as_raw_fd().unsigned_abs() as usize);
        // SAFETY: 1. the call writes `handle`, which outlives it. 2. For this kind it reads the
        // descriptor from the pointer itself and does not follow it.
        unsafe {
            call!(
                self.library(),
                cuMemImportFromShareableHandle(&raw mut handle, number, kind)
            )
        }?;
        Ok(Handle(handle))
    }
}
