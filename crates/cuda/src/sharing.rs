//! Memory that other devices and other processes use too.

use std::ffi::{c_char, c_int};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use lowtide_core::{Bytes, DeviceAddress, DriverError, Handle};

use crate::context::PrimaryContext;
use crate::device::Device;
use crate::driver::{CudaDriver, read_write};
use crate::held::HeldRange;
use crate::library::call;
use crate::mappings::MappedRange;
use crate::sys::{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUipcMemHandle, CUmemAllocationHandleType};

/// What names an allocation to other processes. Any 64 bytes may be tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpcHandle(pub [u8; 64]);

/// Peers.
impl CudaDriver {
    /// Lets work on `peer` read and write the memory of this device, all that there is and all to come:
    /// what is allocated, and what is mapped. Doing it again changes nothing. Linear in what is mapped.
    ///
    /// What is allocated may be used for as long as someone holds the peer's primary context, as another
    /// [`CudaDriver`] does.
    ///
    /// # Errors
    ///
    /// What the driver says, if [`Device::can_access`] is false for one. Some of the memory may be the
    /// peer's to use then.
    pub fn allow_peer(&mut self, peer: &Device) -> Result<(), DriverError> {
        let is_known = |known: i32| known == peer.raw();
        if is_known(self.device().raw()) {
            return Ok(());
        }
        PrimaryContext::retain(peer.clone())?.enable_peer(&self.context)?;
        let access = read_write(peer);
        for (address, size) in self.mappings.iter() {
            self.grant(address, size, &[access])?;
        }
        if !self.access.iter().any(|known| is_known(known.location.id)) {
            self.access.push(access);
        }
        Ok(())
    }
}

/// What is allocated, for other processes.
impl CudaDriver {
    /// Returns what names the allocation around an address to other processes, and how far from its start
    /// the address is. The same allocation has the same name, and no other has it.
    ///
    /// # Errors
    ///
    /// What the driver says, as for memory that is mapped.
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
        let handle = IpcHandle(handle.reserved.map(c_char::cast_unsigned));
        Ok((handle, address.offset_from(DeviceAddress(base))))
    }

    /// Returns where another process's allocation starts here. It must be closed before it is opened
    /// again.
    ///
    /// # Errors
    ///
    /// What the driver says, if there is no such allocation, or it is this process's own.
    pub fn open_ipc(&mut self, handle: &IpcHandle) -> Result<DeviceAddress, DriverError> {
        let _scope = self.enter_relaxed()?;
        let mut address = 0;
        let handle = CUipcMemHandle {
            reserved: handle.0.map(u8::cast_signed),
        };
        let flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the call writes `address`, which outlives it, and refuses a handle that is none.
        unsafe {
            call!(
                self.library(),
                cuIpcOpenMemHandle_v2(&raw mut address, handle, flags)
            )
        }?;
        Ok(DeviceAddress(address))
    }

    /// Lets go of what [`CudaDriver::open_ipc`] returned. The work that uses it must have ended:
    /// [`Device::synchronize`] waits for it without the driver.
    ///
    /// # Errors
    ///
    /// What the driver says; the memory is then still open.
    pub fn close_ipc(&mut self, address: DeviceAddress) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        // SAFETY: the address came from `open_ipc`, by the contract of `new`.
        unsafe { call!(self.library(), cuIpcCloseMemHandle(address.get())) }
    }
}

/// What is mapped, for other processes.
impl CudaDriver {
    /// Returns the handles around a block, if it is mapped.
    pub fn mapped_range(&self, address: DeviceAddress, size: Bytes) -> Option<MappedRange> {
        self.mappings.around(address, size)
    }

    /// Returns the handles of a range from `offset` on, at most `count`, as file descriptors with the
    /// handles' sizes; `None` if the range is not what is mapped now.
    ///
    /// # Errors
    ///
    /// As [`CudaDriver::export`].
    pub fn export_range(
        &self,
        range: &MappedRange,
        offset: Bytes,
        count: usize,
    ) -> Result<Option<Vec<(OwnedFd, Bytes)>>, DriverError> {
        let Some(handles) = self.mappings.handles(range, offset) else {
            return Ok(None);
        };
        let handles = handles.take(count);
        let exported = handles.map(|(handle, size)| Ok((self.export(handle)?, size)));
        exported.collect::<Result<_, _>>().map(Some)
    }

    /// Returns addresses for `size` bytes that another process exported.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn begin_import(&mut self, size: Bytes) -> Result<HeldRange, DriverError> {
        let mut held = HeldRange::default();
        self.reserve_held(&mut held, size)?;
        Ok(held)
    }

    /// Maps `size` bytes of another process, a whole handle of its, behind what is mapped in the range.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn import_part(
        &mut self,
        held: &mut HeldRange,
        descriptor: &OwnedFd,
        size: Bytes,
    ) -> Result<(), DriverError> {
        let handle = self.import(descriptor.as_fd())?;
        self.map_held(held, handle, size)
    }

    /// Lets the device, and its peers, use what was imported.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn finish_import(&mut self, held: &HeldRange) -> Result<(), DriverError> {
        self.allow_held(held)
    }

    /// Gives a range back. The work that uses it must have ended, as for [`CudaDriver::close_ipc`].
    ///
    /// # Errors
    ///
    /// What the driver says; the same call then goes on where this one stopped.
    pub fn end_import(&mut self, held: &mut HeldRange) -> Result<(), DriverError> {
        self.give_back(held)
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
        let _scope = self.enter_relaxed()?;
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
