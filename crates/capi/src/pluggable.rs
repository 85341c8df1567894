//! The functions that PyTorch calls through `CUDAPluggableAllocator`, and the same functions with a status.
//!
//! PyTorch ignores the results of its hooks, so the hooks here return a status where PyTorch declares `void`.
//! Where a user would not notice a failure otherwise, there are two functions. One is for callers that check the
//! status. The other begins with `lowtide_hook_`, is for PyTorch, and also prints the first failure of each
//! status to standard error.
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

use std::ffi::{c_int, c_void};
use std::ptr;

use lowtide_core::{AllocError, Bytes, DeviceAddress, Driver as _};
use lowtide_shared::LaneOf;

use crate::boundary::{Reported, report_once, run, run_and_report, write_to_c};
use crate::control::{EVERY_DEVICE, lowtide_empty_cache};
use crate::devices::{self, Lane};
use crate::error::{Error, Status};
use crate::explain;
use crate::pointers::{address_of, host_size, pointer_to, stream_of};
use crate::record::stacks;
use crate::{cuda, shortage, start};

/// Returns at least `size` bytes of `device`, which work in `stream` may use at once. Returns null for 0 bytes
/// and on failure. After a failure, a line on standard error and `lowtide_last_error` give the reason.
///
/// This is the `alloc` of PyTorch's `CUDAPluggableAllocator`. PyTorch does not check the result: after a failure
/// the tensor has a null pointer, and no `torch.OutOfMemoryError` is raised. Inside a `torch.cuda.MemPool`
/// PyTorch does check it and raises the error. Callers that can raise an exception use `lowtide_allocate`.
///
/// The caller owns the memory and frees it with `lowtide_free` or `lowtide_deallocate`. `device` is CUDA's number
/// of the device in this process. `stream` is a `cudaStream_t` of that device, and must not be destroyed while
/// memory is used on it.
///
/// May be called from any thread, whatever its current device. If no free memory serves the request and the
/// thread has no current context, the device's primary context becomes current, as with `cudaMalloc`. A context
/// that is current stays current.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let mut memory = ptr::null_mut();
    let status = run_and_report(|| {
        memory = allocate(size, device, stream)?;
        Ok(())
    });
    debug_assert!(status == Status::Ok || memory.is_null());
    memory
}

/// Frees memory. It is reused only after all work that uses it: work queued before in `stream`, and in the
/// streams that `lowtide_record_stream` named.
///
/// This is the `free` of PyTorch's `CUDAPluggableAllocator`. Null is ignored. A pointer that the program does not
/// hold is ignored too, as is any pointer in a forked child; `lowtide_last_error` then gives the reason. `size`,
/// `device` and `stream` are ignored: lowtide knows them. May be called from any thread, and until the process
/// has ended.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_free(
    memory: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) {
    let _ = (size, device, stream);
    let _ = run(|| deallocate(address_of(memory)));
}

/// Like `lowtide_malloc`, but returns a status and writes the address to `memory`.
///
/// On failure `memory` is not changed. After `LOWTIDE_STATUS_OUT_OF_MEMORY`, `lowtide_last_error` returns
/// PyTorch's message for `torch.OutOfMemoryError`.
///
/// # Safety
///
/// `memory` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_allocate(
    size: usize,
    device: c_int,
    stream: *mut c_void,
    memory: *mut *mut c_void,
) -> Status {
    run(|| {
        if memory.is_null() {
            return Err(Error::null("memory"));
        }
        let address = allocate(size, device, stream)?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("memory", memory, address) }
    })
}

/// Allocates `size` bytes at the address `memory`, which must be free. Returns `LOWTIDE_STATUS_NOT_FREE` if they
/// are not, or if they would not serve such a request of `stream`.
///
/// Memory before and after them stays free. With `caching`, `memory` may be any multiple of 512 bytes within a
/// free block that has room for the request's rounded size. With other strategies, it must be the address that
/// the strategy would choose itself. No memory is requested from the driver. Does nothing for 0 bytes. Takes time
/// linear in the number of the stream's free blocks.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_allocate_at(
    memory: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> Status {
    run(|| {
        let _stack = stacks::enter();
        let allocator = start::device(device)?;
        let (address, size) = (address_of(memory), Bytes(size as u64));
        let stream = stream_of(stream);
        allocator.with_lane(LaneOf::Stream(stream), |lane| {
            lane.allocate_where(address, size, stream)
        })?;
        Ok(())
    })
}

/// Like `lowtide_free`, but returns a status: `LOWTIDE_STATUS_NOT_ALLOCATED` for a pointer that the program does
/// not hold. After another failure the program still holds the memory.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_deallocate(memory: *mut c_void) -> Status {
    run(|| deallocate(address_of(memory)))
}

/// Records that work in `stream` uses a block, so that the block is not reused before that work is done.
///
/// Null is ignored. `stream` may belong to another device, except a default stream, which is taken as the default
/// stream of the memory's device. `stream` must not be destroyed before the memory has been freed. May be called
/// from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_record_stream(memory: *mut c_void, stream: *mut c_void) -> Status {
    run(|| {
        if memory.is_null() {
            return Ok(());
        }
        let address = address_of(memory);
        let stream = stream_of(stream);
        devices::with_block(address, |lane| lane.record_stream(address, stream))?;
        Ok(())
    })
}

/// Declares that the program never destroys `stream`, as with the streams of PyTorch's pools. `stream` must exist.
/// Starts the device if it is not in use.
///
/// With each request that needs the driver, `tide` checks which work in such a stream is done. Idle memory of any other
/// stream serves other streams only after that stream's own next such request, or before a request would fail.
///
/// Returns `LOWTIDE_STATUS_INVALID_ARGUMENT` for a thread's own default stream: its number is another stream in each thread.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_keep_stream(device: c_int, stream: *mut c_void) -> Status {
    run(|| {
        let mut physical = start::device(device)?.physical();
        let is_kept = physical.driver_mut().keep_stream(stream_of(stream));
        let text = "a thread's own default stream cannot be kept: its number is another stream in each thread";
        is_kept
            .then_some(())
            .ok_or_else(|| Error::new(Status::InvalidArgument, text))
    })
}

/// Starts the driver, so that a missing driver is reported early. Creates no context and takes no device memory.
/// If the process forks after this, the child cannot use CUDA.
///
/// This is PyTorch's hook `set_init_fn`. `device_count` is ignored: lowtide asks the driver.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_init(device_count: c_int) -> Status {
    let _ = device_count;
    run(|| cuda::library().map(drop))
}

/// Like `lowtide_empty_cache` for every device, and also prints the first failure of each status to standard
/// error. This is PyTorch's hook `set_reset_fn`, which `torch.cuda.empty_cache` calls.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_reset() -> Status {
    static REPORTED: Reported = Reported::nothing();
    report_once(&REPORTED, lowtide_empty_cache(EVERY_DEVICE))
}

/// Limits the reserved memory to a fraction of the device's memory, from 0 to 1; 1 removes the limit. Memory
/// above the limit stays reserved. Requests that would need more fail with `LOWTIDE_STATUS_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_memory_fraction(fraction: f64, device: c_int) -> Status {
    run(|| {
        if !(0.0..=1.0).contains(&fraction) {
            let text = format_args!("{fraction} is not a fraction from 0 to 1");
            return Err(Error::new(Status::InvalidArgument, text));
        }
        let allocator = start::device(device)?;
        let info = allocator.physical().driver_mut().memory_info()?;
        let limit = info.limit(fraction);
        Ok(allocator.with_all(|device| device.set_limit(limit))?)
    })
}

/// Like `lowtide_record_stream`, and also prints the first failure of each status to standard error. This is
/// PyTorch's hook `set_record_stream_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_hook_record_stream(memory: *mut c_void, stream: *mut c_void) -> Status {
    static REPORTED: Reported = Reported::nothing();
    report_once(&REPORTED, lowtide_record_stream(memory, stream))
}

/// Like `lowtide_set_memory_fraction`, and also prints the first failure of each status to standard error. This
/// is PyTorch's hook `set_memory_fraction_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_hook_set_memory_fraction(fraction: f64, device: c_int) -> Status {
    static REPORTED: Reported = Reported::nothing();
    report_once(&REPORTED, lowtide_set_memory_fraction(fraction, device))
}

/// Returns the start of the segment that holds a block, and writes the segment's size to `size`. Returns null for
/// a pointer that the program does not hold. `size` may be null.
///
/// This is PyTorch's hook `set_base_alloc_fn`. As with PyTorch's own allocator, this is the address to share with
/// another process: the start of the driver's allocation, not an address within it. Takes time linear in the
/// number of blocks.
///
/// # Safety
///
/// `size` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_base_alloc(memory: *mut c_void, size: *mut usize) -> *mut c_void {
    let mut base = ptr::null_mut();
    let _ = run(|| {
        let address = address_of(memory);
        devices::find_allocation(address)?;
        let (_, segment) = devices::find_segment(address)?;
        if !size.is_null() {
            // SAFETY: it may be written to, by the contract of this function.
            unsafe { write_to_c("size", size, host_size(segment.size)) }?;
        }
        base = pointer_to(segment.address);
        Ok(())
    });
    base
}

#[inline(always)]
fn allocate(size: usize, device: c_int, stream: *mut c_void) -> Result<*mut c_void, Error> {
    let _stack = stacks::enter();
    let size = Bytes(size as u64);
    let allocator = start::device(device)?;
    let on_miss = || {
        // Programs call the driver themselves after `cudaMalloc`, and so does the source of a pool's segments.
        allocator.physical().driver_mut().make_current_if_none()?;
        Ok(shortage::relieve(device))
    };
    match allocator.allocate(size, stream_of(stream), on_miss) {
        Ok(address) => Ok(pointer_to(address)),
        Err(error) => Err(explain::in_words(allocator, error)),
    }
}

#[inline(always)]
fn deallocate(address: DeviceAddress) -> Result<(), Error> {
    if address == DeviceAddress::NULL {
        return Ok(());
    }
    devices::with_block(address, |lane| free(lane, address))?;
    Ok(())
}

/// Frees a block. If the driver is gone, the call succeeds. Separate from [`deallocate`], so that the address is
/// passed in a register.
#[inline(never)]
fn free(lane: &mut Lane, address: DeviceAddress) -> Result<(), AllocError> {
    match lane.free(address) {
        Err(error) if cuda::is_gone(&error) => Ok(()),
        outcome => outcome,
    }
}
