//! Implements the driver's memory functions. `None` means that the driver has to serve the call.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use lowtide_core::{Allocation, Bytes, DeviceAddress, DriverError, Stream};
use lowtide_cuda::{CaptureStatus, PrimaryContexts};

use super::code;
use super::order::{ANY_STREAM, Order, StreamFilter};
use super::start::{start, started};
use crate::boundary::{Reported, report_once, run};
use crate::devices;
use crate::error::{Error, Status};
use crate::pointers::{host_size, stream_of};
use crate::record::stacks;
use crate::regions::figures;
use crate::shortage;

/// For each device, whether its primary context was reset, which frees all of lowtide's memory there.
static LOST: [AtomicBool; devices::DEVICES_MAX] =
    [const { AtomicBool::new(false) }; devices::DEVICES_MAX];

/// Whether the program sets the driver's pools itself. Its stream-ordered memory must come from those then.
static CHOOSES_POOLS: AtomicBool = AtomicBool::new(false);

/// The number of captures under way.
static CAPTURES: AtomicU32 = AtomicU32::new(0);

/// Streams in whose order freed memory may be reused.
static STREAMS: StreamFilter = StreamFilter::new();

/// `cuMemAlloc`.
pub(super) fn allocate(memory: *mut u64, size: usize) -> Option<c_int> {
    if memory.is_null() || size == 0 {
        return None;
    }
    let device = start()?.current().ok()??;
    place(memory, size, device, ANY_STREAM)
}

/// `cuMemAllocAsync`.
pub(super) fn allocate_async(
    memory: *mut u64,
    size: usize,
    stream: *mut c_void,
    is_per_thread: bool,
) -> Option<c_int> {
    if memory.is_null() || size == 0 || CHOOSES_POOLS.load(Ordering::Relaxed) {
        return None;
    }
    let contexts = start()?;
    let order = Order::of(stream, is_per_thread);
    // A captured request becomes a node of the graph, which the driver serves whenever the graph runs.
    if capture_status(contexts, order) != Ok(CaptureStatus::None) {
        return None;
    }
    let device = if order.is_default() {
        contexts.current()
    } else {
        // SAFETY: the stream exists: the program puts its request into it.
        unsafe { contexts.of_stream(order.handle) }
    };
    let device = device.ok()??;
    STREAMS.insert(order.handle);
    place(memory, size, device, order.owner)
}

/// Serves a request for a device whose primary context is in use.
fn place(memory: *mut u64, size: usize, device: u32, stream: Stream) -> Option<c_int> {
    static REPORTED: Reported = Reported::nothing();
    if is_lost(device) {
        return None;
    }
    let mut address = DeviceAddress::NULL;
    let status = run(|| {
        let allocator = crate::start::device(number(device))?;
        let _stack = stacks::enter();
        let on_miss = || Ok(shortage::relieve(number(device)));
        address = allocator.allocate(Bytes(size as u64), stream, on_miss)?;
        Ok(())
    });
    match status {
        Status::Ok => {
            // SAFETY: it is not null, so the program has room for an address there.
            unsafe { memory.write(address.get()) };
            Some(code::SUCCESS)
        }
        // The driver reports these to the program itself.
        Status::OutOfMemory | Status::Driver | Status::Forked => None,
        status => {
            let _ = report_once(&REPORTED, status);
            None
        }
    }
}

/// `cuMemFree`.
pub(super) fn free(address: u64) -> Option<c_int> {
    let contexts = started()?;
    let device = match find(address)? {
        Ok((device, _)) => device,
        Err(code) => return Some(code),
    };
    // Any stream may still use the memory. CUDA's own function waits here too, and programs rely on it.
    if let Err(error) = wait(contexts, device) {
        return Some(code_of(&error));
    }
    let address = DeviceAddress(address);
    Some(outcome(|| {
        devices::with_block(address, |lane| lane.free(address))?;
        Ok(())
    }))
}

/// `cuMemFreeAsync`.
pub(super) fn free_async(address: u64, stream: *mut c_void, is_per_thread: bool) -> Option<c_int> {
    let contexts = started()?;
    let (device, allocation) = match find(address)? {
        Ok(held) => held,
        Err(code) => return Some(code),
    };
    let order = Order::of(stream, is_per_thread);
    match capture_status(contexts, order) {
        Ok(CaptureStatus::None) => {}
        Ok(_) => return Some(code::STREAM_CAPTURE_UNSUPPORTED),
        // For example, earlier work has failed.
        Err(error) => return Some(code_of(&error)),
    }
    let is_foreign = order.is_default() && contexts.current() != Ok(Some(device));
    if is_foreign {
        // The default stream of another device has no handle with which its event could be recorded.
        let waited = contexts
            .current()
            .map(|current| current.map(|other| wait(contexts, other)));
        if let Err(error) | Ok(Some(Err(error))) = waited {
            return Some(code_of(&error));
        }
    }
    let address = DeviceAddress(address);
    Some(outcome(|| {
        devices::with_block(address, |lane| {
            if allocation.stream != order.owner && !is_foreign {
                lane.record_stream(address, order.handle)?;
            }
            lane.free(address)
        })?;
        Ok(())
    }))
}

/// `cuMemGetInfo`, after the driver's result, which is returned: adds lowtide's cached memory to the free memory.
pub(super) fn add_kept(code: c_int, free: *mut usize) -> c_int {
    if code == code::SUCCESS
        && !free.is_null()
        && let Some(kept) = kept()
    {
        // SAFETY: the driver has just written to it.
        let driver_free = unsafe { free.read() };
        // SAFETY: as above.
        unsafe { free.write(driver_free.saturating_add(host_size(kept))) };
    }
    code
}

/// Returns the cached memory of this thread's device.
fn kept() -> Option<Bytes> {
    let device = started()?.current().ok()??;
    let allocator = devices::get(number(device))?;
    let stats = allocator.with_all(|device| device.stats()).ok();
    let stats = stats.filter(|_| !is_lost(device))?;
    let kept = stats.reserved_bytes.all.current - stats.active_bytes.all.current;
    // The memory of paused regions was released to the driver, which counts it as free already.
    let paused = figures::paused_free_bytes(number(device)).ok()?;
    Some(Bytes(u64::try_from(kept).ok()?).saturating_sub(paused))
}

/// `cuIpcGetMemHandle`: refused for a block that does not start its segment, because the driver's handle is for a
/// whole segment.
pub(super) fn refuse_inner(address: u64) -> Option<c_int> {
    started()?;
    let (_, segment) = devices::find_segment(DeviceAddress(address)).ok()?;
    (segment.address.get() != address).then_some(code::NOT_SUPPORTED)
}

/// Releases all cached memory, and returns whether there was a device to do so for.
pub(super) fn release_kept() -> bool {
    if started().is_none() || devices::all().next().is_none() {
        return false;
    }
    let released = run(|| {
        devices::for_each(|ordinal, allocator| {
            let is_lost = u32::try_from(ordinal).is_ok_and(is_lost);
            if is_lost {
                Ok(())
            } else {
                Ok(allocator.with_all(|device| device.empty_cache(None))??)
            }
        })
    });
    released == Status::Ok
}

/// `cuDevicePrimaryCtxReset`: from now on the driver alone serves this device.
pub(super) fn lose(device: c_int) {
    let device = usize::try_from(device).ok();
    if let Some(lost) = device.and_then(|device| LOST.get(device)) {
        lost.store(true, Ordering::Relaxed);
    }
}

/// `cuDeviceSetMemPool`, `cuMemPoolSetAccess`: from now on the driver serves stream-ordered requests.
pub(super) fn leave_pools_to_program() {
    CHOOSES_POOLS.store(true, Ordering::Relaxed);
}

/// `cuStreamBeginCapture`, after the driver's result, which is returned.
pub(super) fn note_capture_began(code: c_int) -> c_int {
    if code == code::SUCCESS {
        CAPTURES.fetch_add(1, Ordering::Relaxed);
        if let Some(contexts) = started()
            && let Ok(Some(device)) = contexts.current()
        {
            // If this fails, a free during the capture tries again.
            let _ = contexts.keep_spare(device);
        }
    }
    code
}

/// `cuStreamEndCapture`, after the driver's result, which is returned. An invalidated capture has ended too.
pub(super) fn note_capture_ended(code: c_int) -> c_int {
    if ![code::ILLEGAL_STATE, code::STREAM_CAPTURE_WRONG_THREAD].contains(&code) {
        let end = |captures: u32| captures.checked_sub(1);
        let _ = CAPTURES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end);
    }
    code
}

/// `cuStreamDestroy`: waits for the stream's work. The next stream may get the same handle, and with it memory
/// that this stream's work still uses. Returns an error code, and the stream stays, if the work cannot be waited
/// for.
pub(super) fn wait_for_last_work(stream: *mut c_void) -> Option<c_int> {
    let order = Order {
        handle: stream_of(stream),
        owner: stream_of(stream),
    };
    let contexts = started()?;
    if order.is_default() || !STREAMS.may_contain(order.handle) {
        return None;
    }
    let waited = match capture_status(contexts, order) {
        // SAFETY: the stream exists: the program is about to destroy it.
        Ok(CaptureStatus::None) => unsafe { contexts.wait_for_stream(order.handle) },
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    waited.err().map(|error| code_of(&error))
}

/// Waits for a device's work, as the driver's own free does.
fn wait(contexts: &PrimaryContexts, device: u32) -> Result<(), DriverError> {
    let wait = || contexts.wait(device, CAPTURES.load(Ordering::Relaxed) > 0);
    match wait() {
        Err(DriverError::OutOfMemory) if release_kept() => wait(),
        outcome => outcome,
    }
}

fn capture_status(contexts: &PrimaryContexts, order: Order) -> Result<CaptureStatus, DriverError> {
    // SAFETY: the stream exists: the program puts something into it.
    unsafe { contexts.capture_status(order.handle) }
}

/// Returns the block that the program holds at an address, and its device; `None` if the address lies outside of
/// lowtide's memory.
///
/// # Errors
///
/// The code for the program if it does not hold such a block: it was freed already, or the address is not the start
/// of an allocation.
fn find(address: u64) -> Option<Result<(u32, Allocation), c_int>> {
    let address = DeviceAddress(address);
    let (ordinal, found) = match devices::find_allocation(address) {
        Ok((ordinal, allocation)) => (ordinal, Ok(allocation)),
        Err(error) if error.status == Status::NotAllocated => {
            let (ordinal, _) = devices::find_segment(address).ok()?;
            (ordinal, Err(code::INVALID_VALUE))
        }
        Err(_) => return Some(Err(code::UNKNOWN)),
    };
    let device = u32::try_from(ordinal).ok();
    let device = device.filter(|&device| !is_lost(device))?;
    Some(found.map(|allocation| (device, allocation)))
}

/// Returns CUDA's error code for the result of a call.
fn outcome(body: impl FnOnce() -> Result<(), Error>) -> c_int {
    match run(body) {
        Status::Ok => code::SUCCESS,
        Status::NotAllocated => code::INVALID_VALUE,
        _ => code::UNKNOWN,
    }
}

fn code_of(error: &DriverError) -> c_int {
    match error {
        DriverError::OutOfMemory => code::OUT_OF_MEMORY,
        DriverError::Failed { code, .. } => *code,
        _ => code::NOT_SUPPORTED,
    }
}

fn is_lost(device: u32) -> bool {
    let device = usize::try_from(device).ok();
    device
        .and_then(|device| LOST.get(device))
        .is_none_or(|lost| lost.load(Ordering::Relaxed))
}

fn number(device: u32) -> c_int {
    device.cast_signed()
}
