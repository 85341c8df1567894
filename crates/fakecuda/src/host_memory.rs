//! Pinned host memory, allocated by the driver or registered with it.

use std::ffi::c_uint;

use crate::calls::driver_calls;
use crate::capture;
use crate::os::{HostRange, PAGE_BYTES, create_file};
use crate::pointers::Out;
use crate::state::memory::HostMemory;
use crate::sys::CUresult;
use crate::work;

/// Flags of `cuMemHostAlloc`: portable, device map, write-combined.
const ALLOC_FLAGS: c_uint = 1 | 2 | 4;
/// Flags of `cuMemHostRegister`: portable, device map, I/O memory, read-only.
const REGISTER_FLAGS: c_uint = 1 | 2 | 4 | 8;

driver_calls! {
    fn cuMemHostAlloc(address: Out<u64>, bytes: usize, flags: c_uint) {
        let out = address.required()?;
        let (mut state, _) = capture::lock_for_unsafe_call()?;
        if bytes == 0 || flags & !ALLOC_FLAGS != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let bytes = bytes as u64;
        let host_bytes = bytes.checked_next_multiple_of(PAGE_BYTES);
        let host_bytes = host_bytes.ok_or(CUresult::OUT_OF_MEMORY)?;
        let file = create_file("fakecuda-host", host_bytes);
        let range = file.and_then(|file| HostRange::of_file(host_bytes, PAGE_BYTES, &file));
        let range = range.map_err(|_| CUresult::OUT_OF_MEMORY)?;
        let start = range.start();
        state.memory.host.insert(start, HostMemory { bytes, range: Some(range) });
        out.set(start);
        Ok(())
    }

    fn cuMemFreeHost(address: u64) {
        let (state, _) = capture::lock_for_unsafe_call()?;
        let is_ours = |memory: &HostMemory| memory.range.is_some();
        if !state.memory.host.get(&address).is_some_and(is_ours) {
            return Err(CUresult::INVALID_VALUE);
        }
        // The programming guide lists pinned memory among the calls that synchronize. It does not say which
        // streams, so this waits for all of them.
        let tails = state.tails();
        let mut state = work::wait_for(state, &tails)?;
        state.memory.host.remove(&address);
        Ok(())
    }

    fn cuMemHostRegister_v2(address: u64, bytes: usize, flags: c_uint) {
        let (mut state, _) = capture::lock_for_unsafe_call()?;
        let end = address.checked_add(bytes as u64).ok_or(CUresult::INVALID_VALUE)?;
        if address == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let below = state.memory.host.range(..end).next_back();
        if below.is_some_and(|(start, memory)| start + memory.bytes > address) {
            return Err(CUresult::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let memory = HostMemory { bytes: bytes as u64, range: None };
        state.memory.host.insert(address, memory);
        Ok(())
    }

    fn cuMemHostUnregister(address: u64) {
        let (mut state, _) = capture::lock_for_unsafe_call()?;
        let is_registered = |memory: &HostMemory| memory.range.is_none();
        if !state.memory.host.get(&address).is_some_and(is_registered) {
            return Err(CUresult::HOST_MEMORY_NOT_REGISTERED);
        }
        // As in cuMemFreeHost. The manual does not say that this call waits, so no program can rely on it.
        if !state.is_lazy {
            let tails = state.tails();
            state = work::wait_for(state, &tails)?;
        }
        state.memory.host.remove(&address);
        Ok(())
    }
}
