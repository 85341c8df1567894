//! Virtual memory management: reserving addresses, creating physical memory, mapping it.
//!
//! None of these calls needs a context or waits for the device's work, and all are allowed during a capture. An
//! H200 with driver 580 behaves so: PyTorch maps pages during captures, and each call was as fast while a kernel
//! ran as without one.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};

use crate::calls::driver_calls;
use crate::names::new_name;
use crate::os::{Access, HostRange};
use crate::pointers::{In, Out};
use crate::state::device::{GRANULARITY_BYTES, host_size};
use crate::state::memory::{Handle, Kind, Mapping, Physical, Reservation};
use crate::state::{State, lock};
use crate::sys::*;

driver_calls! {
    fn cuMemAddressReserve(
        address: Out<CUdeviceptr>,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: c_ulonglong,
    ) {
        let out = address.required()?;
        let mut state = lock()?;
        // 0 leaves the alignment to the driver.
        if !is_whole(bytes as u64) || !alignment.max(1).is_power_of_two() || flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let alignment = (alignment as u64).max(GRANULARITY_BYTES);
        let range = HostRange::reserve(bytes as u64, alignment, hint);
        let range = range.map_err(|_| CUresult::OUT_OF_MEMORY)?;
        let start = range.start();
        let reservation = Reservation {
            range,
            is_allocation: false,
        };
        state.memory.reservations.insert(start, reservation);
        out.set(start);
        Ok(())
    }

    fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) {
        let mut state = lock()?;
        let memory = &mut state.memory;
        let reservation = memory.reservations.get(&address);
        let reservation = reservation.ok_or(CUresult::INVALID_VALUE)?;
        let bytes = bytes as u64;
        if reservation.is_allocation
            || reservation.range.bytes() != bytes
            || memory.mappings_in(address, bytes).next().is_some()
        {
            return Err(CUresult::INVALID_VALUE);
        }
        memory.reservations.remove(&address);
        Ok(())
    }

    fn cuMemCreate(
        handle: Out<CUmemGenericAllocationHandle>,
        bytes: usize,
        properties: In<CUmemAllocationProp>,
        flags: c_ulonglong,
    ) {
        let out = handle.required()?;
        let properties = properties.get()?;
        let mut state = lock()?;
        if !is_whole(bytes as u64) || flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let device = state.check_properties(&properties)?;
        let charge = state.devices[device].charge(bytes as u64)?;
        let number = state.devices[device].number;
        let physical = Physical::new(number, bytes as u64, Some(charge), properties)?;
        let name = new_name();
        state.memory.handles.insert(name, Handle { physical, references: 1 });
        out.set(name);
        Ok(())
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) {
        let mut state = lock()?;
        let found = state.memory.handles.get_mut(&handle);
        let found = found.ok_or(CUresult::INVALID_VALUE)?;
        found.references -= 1;
        if found.references == 0 {
            state.memory.handles.remove(&handle);
        }
        Ok(())
    }

    fn cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    ) {
        let mut state = lock()?;
        let memory = &mut state.memory;
        let bytes = bytes as u64;
        let found = memory.handles.get(&handle);
        let physical = found.ok_or(CUresult::INVALID_VALUE)?.physical.clone();
        if !is_whole(bytes) || !address.is_multiple_of(GRANULARITY_BYTES) || flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        // An H200 with driver 580 maps only whole handles.
        if offset != 0 || bytes != physical.bytes {
            return Err(CUresult::NOT_SUPPORTED);
        }
        let reservation = memory.reservation_at(address);
        let reservation = reservation.ok_or(CUresult::INVALID_VALUE)?;
        let room = reservation.range.start() + reservation.range.bytes() - address;
        // Such an H200 lets a mapping extend beyond its reservation, whether another reservation follows or not.
        // Here those addresses may belong to anything, so this is refused.
        if reservation.is_allocation
            || bytes > room
            || memory.mappings_in(address, bytes).next().is_some()
        {
            return Err(CUresult::INVALID_VALUE);
        }
        let mapped = reservation.range.map(address, bytes, &physical.file);
        mapped.map_err(|_| CUresult::OUT_OF_MEMORY)?;
        let kind = Kind::Virtual { handle, access: BTreeMap::new() };
        memory.mappings.insert(address, Mapping { bytes, physical, kind });
        Ok(())
    }

    fn cuMemUnmap(address: CUdeviceptr, bytes: usize) {
        let mut state = lock()?;
        // An H200 with driver 580 requires only that the range starts in a reservation, is not empty and cuts no
        // mapping. Gaps are allowed, even if nothing in the range is mapped.
        let reservation = state.memory.reservation_at(address);
        let reservation = reservation.ok_or(CUresult::INVALID_VALUE)?;
        if reservation.is_allocation || bytes == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let starts = state.memory.uncut_mappings(address, bytes as u64)?;
        state.check_virtual(&starts)?;
        for start in starts {
            let mapping = state.memory.mappings.get(&start).expect("found above");
            let reservation = state.memory.reservation_at(start).expect("mappings lie in one");
            let unmapped = reservation.range.unmap(start, mapping.bytes);
            unmapped.map_err(|_| CUresult::OPERATING_SYSTEM)?;
            state.memory.mappings.remove(&start);
        }
        Ok(())
    }

    fn cuMemSetAccess(
        address: CUdeviceptr,
        bytes: usize,
        descriptions: In<CUmemAccessDesc>,
        count: usize,
    ) {
        let descriptions = descriptions.all(count)?;
        let mut state = lock()?;
        let starts = state.memory.whole_mappings(address, bytes as u64)?;
        state.check_virtual(&starts)?;
        let describe = |description: &CUmemAccessDesc| {
            let access = access_of(description.flags)?;
            Ok((state.device_at(description.location)?, access))
        };
        let wanted: Result<Vec<_>, CUresult> = descriptions.iter().map(describe).collect();
        let wanted = wanted?;
        let memory = &mut state.memory;
        for start in starts {
            let mapping = memory.mappings.get_mut(&start).expect("found above");
            let Kind::Virtual { access, .. } = &mut mapping.kind else {
                unreachable!("checked above");
            };
            access.extend(wanted.iter().copied());
            // The host has one set of access rights: access that some device has does not fault.
            let widest = access.values().max().copied().unwrap_or(Access::None);
            let bytes = mapping.bytes;
            let reservation = memory.reservation_at(start).expect("mappings lie in one");
            let protected = reservation.range.protect(start, bytes, widest);
            protected.map_err(|_| CUresult::OUT_OF_MEMORY)?;
        }
        Ok(())
    }

    fn cuMemGetAllocationGranularity(
        bytes: Out<usize>,
        properties: In<CUmemAllocationProp>,
        option: c_uint,
    ) {
        let out = bytes.required()?;
        let properties = properties.get()?;
        let state = lock()?;
        state.check_properties(&properties)?;
        if option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED {
            return Err(CUresult::INVALID_VALUE);
        }
        out.set(host_size(GRANULARITY_BYTES));
        Ok(())
    }

    fn cuMemRetainAllocationHandle(
        handle: Out<CUmemGenericAllocationHandle>,
        address: CUdeviceptr,
    ) {
        let out = handle.required()?;
        let mut state = lock()?;
        let memory = &mut state.memory;
        let found = memory.mapping_at(address);
        let (_, mapping) = found.ok_or(CUresult::INVALID_VALUE)?;
        let Kind::Virtual { handle, .. } = mapping.kind else {
            return Err(CUresult::INVALID_VALUE);
        };
        let physical = mapping.physical.clone();
        // The manual: the handle is the one that was mapped, even if it has been released since.
        let retained = memory.handles.entry(handle);
        retained.or_insert(Handle { physical, references: 0 }).references += 1;
        out.set(handle);
        Ok(())
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        properties: Out<CUmemAllocationProp>,
        handle: CUmemGenericAllocationHandle,
    ) {
        let out = properties.required()?;
        let state = lock()?;
        let found = state.memory.handles.get(&handle);
        out.set(found.ok_or(CUresult::INVALID_VALUE)?.physical.properties);
        Ok(())
    }
}

impl State {
    /// Fails if one of the mappings is an allocation, whose access rights a program cannot change.
    fn check_virtual(&self, starts: &[u64]) -> Result<(), CUresult> {
        let is_virtual = |start| matches!(self.memory.mappings[start].kind, Kind::Virtual { .. });
        if starts.iter().all(is_virtual) {
            Ok(())
        } else {
            Err(CUresult::INVALID_VALUE)
        }
    }

    /// Returns the device of memory with these properties.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for invalid properties, `INVALID_DEVICE` for a missing device, and `NOT_SUPPORTED` for
    /// capabilities that the device does not report. `NOT_PERMITTED` for fabric handles, as on an H200 with driver
    /// 580 where no fabric is set up.
    fn check_properties(&self, properties: &CUmemAllocationProp) -> Result<usize, CUresult> {
        if properties.kind != CU_MEM_ALLOCATION_TYPE_PINNED {
            return Err(CUresult::INVALID_VALUE);
        }
        let index = self.device_at(properties.location)?;
        let device = &self.devices[index];
        let can = |attribute| device.attribute(attribute) != 0;
        if properties.requested_handle_types == CU_MEM_HANDLE_TYPE_FABRIC {
            return Err(CUresult::NOT_PERMITTED);
        }
        let handle_types_are_fine = match properties.requested_handle_types {
            CU_MEM_HANDLE_TYPE_NONE => true,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {
                can(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
            }
            _ => false,
        };
        let rdma_is_fine = properties.flags.gpu_direct_rdma_capable == 0
            || can(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let is_plain = properties.flags.compression_type == 0 && properties.flags.usage == 0;
        let has_addresses = can(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
        if handle_types_are_fine && rdma_is_fine && is_plain && has_addresses {
            Ok(index)
        } else {
            Err(CUresult::NOT_SUPPORTED)
        }
    }

    fn device_at(&self, location: CUmemLocation) -> Result<usize, CUresult> {
        if location.kind != CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(CUresult::INVALID_VALUE);
        }
        self.device_index(location.id)
    }
}

fn is_whole(bytes: u64) -> bool {
    bytes != 0 && bytes.is_multiple_of(GRANULARITY_BYTES)
}

fn access_of(flags: c_uint) -> Result<Access, CUresult> {
    match flags {
        CU_MEM_ACCESS_FLAGS_PROT_NONE => Ok(Access::None),
        CU_MEM_ACCESS_FLAGS_PROT_READ => Ok(Access::Read),
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE => Ok(Access::ReadWrite),
        _ => Err(CUresult::INVALID_VALUE),
    }
}
