//! `cuMemAlloc` and similar calls: memory that comes with its addresses.

use std::ffi::c_uint;

use crate::calls::driver_calls;
use crate::capture;
use crate::pointers::Out;
use crate::state::device::{GRANULARITY_BYTES, host_size, ordinal};
use crate::state::memory::{Kind, Physical, plain_properties};
use crate::state::stream::Work;
use crate::state::{State, lock};
use crate::sys::*;
use crate::work;

/// The unit of small allocations. The manual promises 256 bytes. On an H200 with driver 580, 4,096 of these units
/// fill a page of 2 MiB.
const SMALL_UNIT_BYTES: u64 = 512;

driver_calls! {
    fn cuMemAlloc_v2(address: Out<CUdeviceptr>, bytes: usize) {
        let out = address.required()?;
        let (mut state, device) = capture::lock_for_unsafe_call()?;
        out.set(state.allocate(device, bytes as u64)?);
        Ok(())
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        let (state, _) = capture::lock_for_unsafe_call()?;
        // An H200 with driver 580 accepts null.
        if address == 0 {
            return Ok(());
        }
        let device = state.freeable_allocation(address)?;
        // Measured on an H200: the call waits for every kernel of the device, whether it uses this memory or not.
        let tails = state.tails_of_device(device);
        let mut state = work::wait_for(state, &tails)?;
        // Another thread may have freed it meanwhile.
        state.freeable_allocation(address)?;
        state.memory.free(address);
        Ok(())
    }

    fn cuMemAllocAsync(address: Out<CUdeviceptr>, bytes: usize, stream: CUstream) {
        let out = address.required()?;
        let mut state = lock()?;
        let stream = state.stream_named(stream)?;
        // An H200 captures a node that allocates when the graph runs. Graphs do not run here.
        capture::refuse_in_capture(&mut state, stream)?;
        capture::refuse_unsafe_call(&mut state)?;
        let device = state.streams[&stream].device;
        // The card's pool keeps freed memory until the next wait. Here it is released at once.
        out.set(state.allocate(device, bytes as u64)?);
        Ok(())
    }

    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) {
        let mut state = lock()?;
        let stream = state.stream_named(stream)?;
        capture::refuse_in_capture(&mut state, stream)?;
        capture::refuse_unsafe_call(&mut state)?;
        state.freeable_allocation(address)?;
        state.submit(stream, Work::Free { address })
    }

    fn cuMemAllocManaged(address: Out<CUdeviceptr>, bytes: usize, flags: c_uint) {
        let out = address.required()?;
        let (mut state, device) = capture::lock_for_unsafe_call()?;
        let is_known = [CU_MEM_ATTACH_GLOBAL, CU_MEM_ATTACH_HOST].contains(&flags);
        if !is_known || bytes == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        // Managed memory may exceed the card's memory, so it does not count as used here.
        let properties = plain_properties(ordinal(device), CU_MEM_HANDLE_TYPE_NONE);
        let physical = Physical::new(state.devices[device].number, bytes as u64, None, properties)?;
        out.set(state.memory.allocate(physical, Kind::Managed)?);
        Ok(())
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (free, total) = (free.required()?, total.required()?);
        let state = lock()?;
        let (index, _) = state.current()?;
        let device = &state.devices[index];
        free.set(host_size(device.capacity_bytes.saturating_sub(device.used_bytes())));
        total.set(host_size(device.capacity_bytes));
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, bytes: Out<usize>, address: CUdeviceptr) {
        let state = lock()?;
        state.current()?;
        let found = state.memory.mapping_at(address);
        let (start, mapping) = found.ok_or(CUresult::INVALID_VALUE)?;
        // An H200 with driver 580 supports this call for allocations only.
        if matches!(mapping.kind, Kind::Virtual { .. }) {
            return Err(CUresult::NOT_FOUND);
        }
        base.set_if_wanted(start);
        bytes.set_if_wanted(host_size(mapping.bytes));
        Ok(())
    }
}

impl State {
    fn allocate(&mut self, index: usize, bytes: u64) -> Result<u64, CUresult> {
        if bytes == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let device = &self.devices[index];
        // As on an H200 with driver 580: allocations smaller than a page share pages.
        let charge = if bytes < GRANULARITY_BYTES {
            device.charge_shared(bytes.next_multiple_of(SMALL_UNIT_BYTES))?
        } else {
            let whole_pages = bytes.checked_next_multiple_of(GRANULARITY_BYTES);
            device.charge(whole_pages.ok_or(CUresult::OUT_OF_MEMORY)?)?
        };
        let number = device.number;
        let properties = plain_properties(ordinal(index), CU_MEM_HANDLE_TYPE_NONE);
        let physical = Physical::new(number, bytes, Some(charge), properties)?;
        self.memory.allocate(physical, Kind::Allocation)
    }

    /// Returns the device of the allocation that starts at `address`.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for any other address.
    fn freeable_allocation(&self, address: u64) -> Result<usize, CUresult> {
        let mapping = self.memory.mappings.get(&address);
        let mapping = mapping.ok_or(CUresult::INVALID_VALUE)?;
        match mapping.kind {
            Kind::Allocation | Kind::Managed => Ok(mapping.physical.device),
            Kind::Virtual { .. } | Kind::Opened { .. } => Err(CUresult::INVALID_VALUE),
        }
    }
}
