//! Memory of other processes: handles by file descriptor, allocations by IPC handle.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::fs::{self, File};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::process;
use std::sync::Arc;

use crate::calls::driver_calls;
use crate::capture;
use crate::names::new_name;
use crate::os;
use crate::pointers::Out;
use crate::state::device::{Device, ordinal};
use crate::state::memory::{
    Handle, Kind, Mapping, Physical, file_key, file_name, plain_properties,
};
use crate::state::{State, lock};
use crate::sys::*;

driver_calls! {
    fn cuMemExportToShareableHandle(
        shareable: Out<c_int>,
        handle: CUmemGenericAllocationHandle,
        kind: c_uint,
        flags: c_ulonglong,
    ) {
        let out = shareable.required()?;
        let state = lock()?;
        let found = state.memory.handles.get(&handle);
        let physical = &found.ok_or(CUresult::INVALID_VALUE)?.physical;
        // The manual: only types that were requested when the memory was created.
        if flags != 0
            || kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            || physical.properties.requested_handle_types & kind == 0
        {
            return Err(CUresult::INVALID_VALUE);
        }
        let copy = physical.file.try_clone();
        out.set(copy.map_err(|_| CUresult::OPERATING_SYSTEM)?.into_raw_fd());
        Ok(())
    }

    /// The descriptor is passed as the value of a pointer, and the caller still owns it.
    fn cuMemImportFromShareableHandle(
        handle: Out<CUmemGenericAllocationHandle>,
        shareable: *mut c_void,
        kind: c_uint,
    ) {
        let out = handle.required()?;
        let number = i32::try_from(shareable as isize).map_err(|_| CUresult::INVALID_VALUE)?;
        if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUresult::NOT_SUPPORTED);
        }
        let file = os::duplicate(number).map_err(|_| CUresult::INVALID_VALUE)?;
        let mut state = lock()?;
        let physical = state.import(file)?;
        let name = new_name();
        state.memory.handles.insert(name, Handle { physical, references: 1 });
        out.set(name);
        Ok(())
    }

    fn cuIpcGetMemHandle(handle: Out<CUipcMemHandle>, address: CUdeviceptr) {
        let out = handle.required()?;
        let state = lock()?;
        state.current()?;
        // Any address of an allocation identifies the whole allocation.
        let found = state.memory.mapping_at(address);
        let (_, mapping) = found.ok_or(CUresult::INVALID_VALUE)?;
        if !matches!(mapping.kind, Kind::Allocation) {
            return Err(CUresult::INVALID_VALUE);
        }
        let number = state.devices[mapping.physical.device].number;
        let ticket = Ticket::new(&mapping.physical, number).ok_or(CUresult::OPERATING_SYSTEM)?;
        out.set(ticket.write());
        Ok(())
    }

    fn cuIpcOpenMemHandle_v2(address: Out<CUdeviceptr>, handle: CUipcMemHandle, flags: c_uint) {
        let out = address.required()?;
        let (mut state, _) = capture::lock_for_unsafe_call()?;
        if flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS {
            return Err(CUresult::INVALID_VALUE);
        }
        let ticket = Ticket::read(&handle).ok_or(CUresult::INVALID_VALUE)?;
        // The manual: a process cannot open its own handle. PyTorch's users see this code in that case.
        if ticket.process == u64::from(process::id()) {
            return Err(CUresult::INVALID_CONTEXT);
        }
        out.set(state.open(&ticket, handle.reserved)?);
        Ok(())
    }

    fn cuIpcCloseMemHandle(address: CUdeviceptr) {
        let (mut state, _) = capture::lock_for_unsafe_call()?;
        let mapping = state.memory.mappings.get_mut(&address);
        let Some(Mapping { kind: Kind::Opened { opens, .. }, .. }) = mapping else {
            return Err(CUresult::INVALID_VALUE);
        };
        *opens -= 1;
        if *opens == 0 {
            state.memory.free(address);
        }
        Ok(())
    }
}

/// The content of an IPC handle's 64 bytes: how another process finds the memory. The process that allocated the
/// memory must be alive and keep it, as on a card.
struct Ticket {
    process: u64,
    file: u64,
    /// The number of the device on this machine.
    number: u64,
    bytes: u64,
    /// The manual: memory that is allocated later at the same address has another handle.
    key: u64,
}

const TICKET_MAGIC: u64 = u64::from_ne_bytes(*b"fakecuda");

impl Ticket {
    fn new(physical: &Physical, number: usize) -> Option<Self> {
        Some(Self {
            process: process::id().into(),
            file: physical.file.as_raw_fd().try_into().ok()?,
            number: number as u64,
            bytes: physical.bytes,
            key: physical.key()?,
        })
    }

    fn write(&self) -> CUipcMemHandle {
        let Self {
            process,
            file,
            number,
            bytes,
            key,
        } = *self;
        let words = [TICKET_MAGIC, process, file, number, bytes, key, 0, 0];
        let mut reserved = [0; 64];
        for (place, word) in reserved.as_chunks_mut().0.iter_mut().zip(words) {
            *place = word.to_ne_bytes();
        }
        CUipcMemHandle { reserved }
    }

    fn read(handle: &CUipcMemHandle) -> Option<Self> {
        let mut words = handle
            .reserved
            .as_chunks()
            .0
            .iter()
            .copied()
            .map(u64::from_ne_bytes);
        (words.next()? == TICKET_MAGIC).then_some(())?;
        Some(Self {
            process: words.next()?,
            file: words.next()?,
            number: words.next()?,
            bytes: words.next()?,
            key: words.next()?,
        })
    }
}

impl State {
    /// Returns the physical memory of an imported file descriptor. Memory of this process is found again, so it
    /// does not count as used twice.
    fn import(&self, file: File) -> Result<Arc<Physical>, CUresult> {
        let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let name = name.map_err(|_| CUresult::INVALID_VALUE)?;
        let name = name.to_string_lossy();
        let is_of = |device: &Device| name.contains(&format!("{} ", file_name(device.number)));
        let device = self.devices.iter().position(is_of);
        let device = device.ok_or(CUresult::INVALID_VALUE)?;
        let key = file_key(&file);
        let handles = self.memory.handles.values().map(|handle| &handle.physical);
        let mapped = self
            .memory
            .mappings
            .values()
            .map(|mapping| &mapping.physical);
        if let Some(known) = handles.chain(mapped).find(|known| known.key() == key) {
            return Ok(Arc::clone(known));
        }
        let bytes = file
            .metadata()
            .map_err(|_| CUresult::OPERATING_SYSTEM)?
            .len();
        let handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let properties = plain_properties(ordinal(device), handle_types);
        Ok(Physical::foreign(file, bytes, properties))
    }

    /// Returns the address of another process's allocation. It is the same each time, and must be closed as often
    /// as it was opened.
    fn open(&mut self, ticket: &Ticket, key: [u8; 64]) -> Result<u64, CUresult> {
        for (&address, mapping) in &mut self.memory.mappings {
            if let Kind::Opened { key: known, opens } = &mut mapping.kind
                && *known == key
            {
                *opens += 1;
                return Ok(address);
            }
        }
        let device = self.index_of_number(ticket.number);
        let device = device.ok_or(CUresult::INVALID_VALUE)?;
        let path = format!("/proc/{}/fd/{}", ticket.process, ticket.file);
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|_| CUresult::INVALID_VALUE)?;
        if file_key(&file) != Some(ticket.key) {
            return Err(CUresult::INVALID_VALUE);
        }
        let properties = plain_properties(ordinal(device), CU_MEM_HANDLE_TYPE_NONE);
        let physical = Physical::foreign(file, ticket.bytes, properties);
        self.memory
            .allocate(physical, Kind::Opened { key, opens: 1 })
    }
}
