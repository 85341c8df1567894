//! Memory that other devices and other processes use as well.

use std::ffi::{c_char, c_int};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use lowtide_core::{Bytes, DeviceAddress, DriverError, Handle};

use crate::context::PrimaryContext;
use crate::device::Device;
use crate::driver::{CudaDriver, read_write};
use crate::held::HeldRange;
use crate::library::call;
use crate::sys::{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUipcMemHandle, CUmemAllocationHandleType};

/// An allocation's CUDA IPC handle. The driver rejects 64 bytes that are not a handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpcHandle(pub [u8; 64]);

/// Peers.
impl CudaDriver {
    /// Gives `peer` read and write access to this device's memory: all present and future allocations, what is
    /// `mapped`, each a range of whole handles, and future mappings. Repeating the call changes nothing. Takes time
    /// linear in the number of ranges.
    ///
    /// Allocations stay accessible as long as the peer's primary context is retained, which another [`CudaDriver`]
    /// does.
    ///
    /// # Errors
    ///
    /// The driver's error, for example if [`Device::can_access`] is false. The peer may then have access to some of
    /// the memory.
    pub fn allow_peer(
        &mut self,
        peer: &Device,
        mapped: &[(DeviceAddress, Bytes)],
    ) -> Result<(), DriverError> {
        let is_known = |known: i32| known == peer.raw();
        if is_known(self.device().raw()) {
            return Ok(());
        }
        PrimaryContext::retain(peer.clone())?.enable_peer(&self.context)?;
        let access = read_write(peer);
        let imported = self.imported.iter().map(|(&start, &size)| (start, size));
        for (address, size) in mapped.iter().copied().chain(imported) {
            self.grant(address, size, &[access])?;
        }
        if !self.access.iter().any(|known| is_known(known.location.id)) {
            self.access.push(access);
        }
        Ok(())
    }
}

/// Allocations, for other processes.
impl CudaDriver {
    /// Returns the IPC handle of the allocation that contains an address, and the address's offset in it. Calls for
    /// the same allocation return the same handle, which no other allocation has.
    ///
    /// # Errors
    ///
    /// The driver's error, for example for mapped memory.
    pub fn ipc_handle(&self, address: DeviceAddress) -> Result<(IpcHandle, Bytes), DriverError> {
        let _scope = self.enter_relaxed()?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: 1. the address is the device's, by the contract of `new`. 2. The call writes both
        // numbers, which outlive it.
        unsafe {
            call!(
                self.library(),
                cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address.get())
            )
        }?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: 1. as above. 2. The call writes `handle`, which outlives it.
        unsafe { call!(self.library(), cuIpcGetMemHandle(&raw mut handle, base)) }?;
        // C's characters are signed on some processors.
        let handle = IpcHandle(handle.reserved.map(|byte| byte as u8));
        Ok((handle, address.offset_from(DeviceAddress(base))))
    }

    /// Opens another process's allocation and returns its start address in this process. It must be closed before
    /// it is opened again.
    ///
    /// # Errors
    ///
    /// The driver's error if there is no such allocation, or if it belongs to this process.
    pub fn open_ipc(&mut self, handle: &IpcHandle) -> Result<DeviceAddress, DriverError> {
        let _scope = self.enter_relaxed()?;
        let mut address = 0;
        let handle = CUipcMemHandle {
            reserved: handle.0.map(|byte| byte as c_char),
        };
        let flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the call writes `address`, which outlives it, and refuses bytes that are no handle.
        unsafe {
            call!(
                self.library(),
                cuIpcOpenMemHandle_v2(&raw mut address, handle, flags)
            )
        }?;
        Ok(DeviceAddress(address))
    }

    /// Closes an allocation that [`CudaDriver::open_ipc`] returned. The work that uses it must have ended:
    /// [`Device::synchronize`] waits for it without a [`CudaDriver`].
    ///
    /// # Errors
    ///
    /// The driver's error; the memory is then still open.
    pub fn close_ipc(&mut self, address: DeviceAddress) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        // SAFETY: the address came from `open_ipc`, by the contract of `new`.
        unsafe { call!(self.library(), cuIpcCloseMemHandle(address.get())) }
    }
}

/// Mapped memory, for other processes.
impl CudaDriver {
    /// Reserves addresses for `size` bytes that another process exported.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn begin_import(&mut self, size: Bytes) -> Result<HeldRange, DriverError> {
        let mut held = HeldRange::default();
        self.reserve_held(&mut held, size)?;
        Ok(held)
    }

    /// Maps a whole handle of another process, `size` bytes, after the mapped part of the range.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn import_part(
        &mut self,
        held: &mut HeldRange,
        descriptor: &OwnedFd,
        size: Bytes,
    ) -> Result<(), DriverError> {
        let handle = self.import(descriptor.as_fd())?;
        self.map_held(held, handle, size)
    }

    /// Gives the device and its peers access to the imported memory.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn finish_import(&mut self, held: &HeldRange) -> Result<(), DriverError> {
        self.allow_held(held)
    }

    /// Unmaps and releases an imported range. The work that uses it must have ended, as for
    /// [`CudaDriver::close_ipc`].
    ///
    /// # Errors
    ///
    /// The driver's error. Another call then continues where this one stopped.
    pub fn end_import(&mut self, held: &mut HeldRange) -> Result<(), DriverError> {
        self.release_held(held)
    }

    /// Returns whether [`CudaDriver::export`] works. The result never changes for one instance.
    pub fn supports_export(&self) -> bool {
        self.physical
            .as_ref()
            .is_some_and(|physical| physical.is_exportable())
    }

    /// Exports physical memory as a file descriptor that another process can import. The memory exists as long as
    /// the handle or the descriptor is open.
    ///
    /// # Errors
    ///
    /// [`DriverError::Unsupported`] unless [`CudaDriver::supports_export`]; else the driver's error.
    pub fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        if !self.supports_export() {
            let call = "cuMemExportToShareableHandle";
            return Err(DriverError::Unsupported { call });
        }
        let _scope = self.enter_relaxed()?;
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
        // SAFETY: the call succeeded, so this is a new file descriptor that the caller must close.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Imports another process's physical memory from a file descriptor. The handle is mapped and released like one
    /// that was created here.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn import(&mut self, descriptor: BorrowedFd<'_>) -> Result<Handle, DriverError> {
        let _scope = self.enter_relaxed()?;
        let mut handle = 0;
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        // The driver expects the descriptor in place of a pointer. It is open, so it is not negative.
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
