//! What PyTorch calls through `CUDAPluggableAllocator`, and the same with a status for those who can use
//! one.
//!
//! PyTorch ignores what its hooks return, so those here return a status in place of its `void`. Where a user
//! would notice a failure by nothing else, there are two functions: one for those who use the status, and a
//! `lowtide_hook_` for PyTorch, which tells of the failure on standard error, too, once a kind.
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

use std::ffi::{c_int, c_void};
use std::ptr;

use lowtide_core::{AllocError, Bytes, DeviceAddress};

use crate::boundary::{Reported, report_once, run, run_and_report, write_to_c};
use crate::control::{EVERY_DEVICE, lowtide_empty_cache};
use crate::devices::{self, Lane};
use crate::error::{Error, Status};
use crate::explain;
use crate::pointers::{address_of, host_size, pointer_to, stream_of};
use crate::record::stacks;
use crate::{cuda, shortage, start};

/// Returns at least `size` bytes of `device`, which work in `stream` may use at once; null for 0 bytes,
/// and null on failure, which a line on standard error and `lowtide_last_error` then explain.
///
/// This is the `alloc` of PyTorch's `CUDAPluggableAllocator`. PyTorch does not look at the answer: after
/// a failure there is a tensor with a null pointer and no `torch.OutOfMemoryError`. Inside a
/// `torch.cuda.MemPool` it does, and runs out of memory as it should. Whoever can raise an exception
/// calls `lowtide_allocate`.
///
/// The memory is the caller's until `lowtide_free` or `lowtide_deallocate`. `device` is CUDA's number of
/// it in this process, `stream` a `cudaStream_t` of it that is not destroyed while memory is used on it.
///
/// May be called from any thread, whatever its current device. A request that no free memory serves makes the
/// device's primary context current in a thread that has none, as `cudaMalloc` does. A context that is current stays.
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

/// Takes memory back from the program. Work that was put into `stream` before, and into the streams that
/// `lowtide_record_stream` named, may still use it; it is handed out again after that.
///
/// This is the `free` of PyTorch's `CUDAPluggableAllocator`. Null is ignored. So is a pointer that the
/// program does not hold, and any in a forked child; `lowtide_last_error` then says so. `size`, `device`
/// and `stream` are ignored: lowtide knows them. May be called from any thread, and until the process
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

/// As `lowtide_malloc`, with a status: writes the address to `memory`.
///
/// On failure `memory` is left as it was. After `LOWTIDE_STATUS_OUT_OF_MEMORY`, `lowtide_last_error` has
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

/// Takes `size` bytes from `memory` on, which were free, as `lowtide_allocate` takes what it finds;
/// `LOWTIDE_STATUS_NOT_FREE` where they are not, or would not serve such a request of `stream`.
///
/// What lies before and behind them stays free. With `caching` a request is served wherever a free block
/// lies around it that serves its size, at a multiple of 512 bytes; with other strategies, where it would go
/// by itself. The device is not asked for more memory. Does nothing for 0 bytes. Takes time in proportion to
/// the free blocks of the stream.
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
        allocator.allocate_where(address, size, stream_of(stream))?;
        Ok(())
    })
}

/// As `lowtide_free`, with a status: `LOWTIDE_STATUS_NOT_ALLOCATED` for a pointer that the program does
/// not hold. After another failure the program still holds the memory.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_deallocate(memory: *mut c_void) -> Status {
    run(|| deallocate(address_of(memory)))
}

/// Notes that work in `stream` uses memory, so that it is not handed out again before that work is done.
///
/// Null is ignored. `stream` may be another device's, unless it is a default stream, which is taken for the
/// memory's device; it must not be destroyed before the memory has been freed. May be called from any
/// thread.
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

/// Starts the driver, so that a machine without one is told of early. Makes no context and takes no
/// memory of a device. A process that forks after this cannot use CUDA in the child.
///
/// PyTorch's hook `set_init_fn`. `device_count` is ignored: the driver is asked.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_init(device_count: c_int) -> Status {
    let _ = device_count;
    run(|| cuda::library().map(drop))
}

/// As `lowtide_empty_cache` for every device, and reports the first failure of a kind on standard error, too.
/// PyTorch's hook `set_reset_fn`, which `torch.cuda.empty_cache` calls.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_reset() -> Status {
    static REPORTED: Reported = Reported::nothing();
    report_once(&REPORTED, lowtide_empty_cache(EVERY_DEVICE))
}

/// Limits what may be held from the driver to a part of the device's memory, from 0 to 1, which removes the
/// limit. What is held above it stays; requests that would need more fail with `LOWTIDE_STATUS_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_memory_fraction(fraction: f64, device: c_int) -> Status {
    run(|| {
        if !(0.0..=1.0).contains(&fraction) {
            let text = format_args!("{fraction} is not a fraction from 0 to 1");
            return Err(Error::new(Status::InvalidArgument, text));
        }
        let allocator = start::device(device)?;
        Ok(allocator.with_all(|device| device.set_memory_fraction(fraction))??)
    })
}

/// As `lowtide_record_stream`, and tells the first failure of a kind on standard error, too. PyTorch's hook
/// `set_record_stream_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_hook_record_stream(memory: *mut c_void, stream: *mut c_void) -> Status {
    static REPORTED: Reported = Reported::nothing();
    report_once(&REPORTED, lowtide_record_stream(memory, stream))
}

/// As `lowtide_set_memory_fraction`, and tells the first failure of a kind on standard error, too. PyTorch's
/// hook `set_memory_fraction_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_hook_set_memory_fraction(fraction: f64, device: c_int) -> Status {
    static REPORTED: Reported = Reported::nothing();
    report_once(&REPORTED, lowtide_set_memory_fraction(fraction, device))
}

/// Returns the start of the segment that holds a block, and writes the segment's size to `size`; null
/// for a pointer that the program does not hold. `size` may be null.
///
/// PyTorch's hook `set_base_alloc_fn`. As with PyTorch's own allocator this is what another process must
/// be given: an address from the driver, not one within its allocation. Takes time in proportion to the
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
        // Programs call the driver themselves after `cudaMalloc`; so does the source of a pool's segments.
        allocator.with_driver(|driver| driver.make_current_if_none())?;
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

/// Takes a block back; once the driver is gone, that is no failure. Apart from [`deallocate`], so that the
/// address is passed in a register.
#[inline(never)]
fn free(lane: &mut Lane, address: DeviceAddress) -> Result<(), AllocError> {
    match lane.free(address) {
        Err(error) if cuda::is_gone(&error) => Ok(()),
        outcome => outcome,
    }
}
