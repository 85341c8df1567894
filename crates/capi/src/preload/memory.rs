//! What the driver's functions for memory do where lowtide serves them. `None` is for the driver to answer.

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

/// By device: whether its primary context was reset, and all of lowtide's memory with it.
static LOST: [AtomicBool; devices::DEVICES_MAX] =
    [const { AtomicBool::new(false) }; devices::DEVICES_MAX];

/// Whether the program chooses the driver's pools, from which its memory must come then.
static CHOOSES_POOLS: AtomicBool = AtomicBool::new(false);

/// How many captures are under way.
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
    // A captured request is a node of the graph, which the driver serves whenever the graph runs.
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
        // The driver tells the program of these itself.
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
        Found::Held(device, _) => device,
        Found::NotHeld(code) => return Some(code),
    };
    // Any stream may use the memory still. CUDA waits here as well, so programs count on it.
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
        Found::Held(device, allocation) => (device, allocation),
        Found::NotHeld(code) => return Some(code),
    };
    let order = Order::of(stream, is_per_thread);
    match capture_status(contexts, order) {
        Ok(CaptureStatus::None) => {}
        Ok(_) => return Some(code::STREAM_CAPTURE_UNSUPPORTED),
        // Work that failed before, for one.
        Err(error) => return Some(code_of(&error)),
    }
    let is_foreign = order.is_default() && contexts.current() != Ok(Some(device));
    if is_foreign {
        // The default stream of another device has no number that its event could be recorded by.
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

/// `cuMemGetInfo`, after the driver's answer: what lowtide keeps for later is free.
pub(super) fn add_kept(free: *mut usize) {
    let kept = || -> Option<Bytes> {
        let device = started()?.current().ok()??;
        let allocator = devices::get(number(device))?;
        let stats = allocator
            .with_all(|device| device.stats())
            .ok()
            .filter(|_| !is_lost(device))?;
        let kept = stats.reserved_bytes.all.current - stats.active_bytes.all.current;
        // The driver has the memory of paused regions already, and counts it.
        let away = figures::free_bytes_away(number(device)).ok()?;
        u64::try_from(kept)
            .ok()
            .map(|kept| Bytes(kept).saturating_sub(away))
    };
    if let Some(kept) = kept() {
        // SAFETY: the driver has just written to it.
        let driver_free = unsafe { free.read() };
        // SAFETY: as above.
        unsafe { free.write(driver_free.saturating_add(host_size(kept))) };
    }
}

/// `cuIpcGetMemHandle`: the driver's handle is that of a whole segment.
pub(super) fn refuse_inner(address: u64) -> Option<c_int> {
    started()?;
    let (_, segment) = devices::find_segment(DeviceAddress(address)).ok()?;
    (segment.address.get() != address).then_some(code::NOT_SUPPORTED)
}

/// Gives back everything that is kept for later, and returns whether there was a device to do so for.
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
                Ok(allocator.with_all(|device| device.empty_cache())??)
            }
        })
    });
    released == Status::Ok
}

/// `cuDevicePrimaryCtxReset`: from now on the device is the driver's alone.
pub(super) fn lose(device: c_int) {
    let device = usize::try_from(device).ok();
    if let Some(lost) = device.and_then(|device| LOST.get(device)) {
        lost.store(true, Ordering::Relaxed);
    }
}

/// `cuDeviceSetMemPool`, `cuMemPoolSetAccess`: requests in stream order are the driver's from now on.
pub(super) fn leave_pools_to_program() {
    CHOOSES_POOLS.store(true, Ordering::Relaxed);
}

/// `cuStreamBeginCapture`, after the driver's answer.
pub(super) fn note_capture_began(code: c_int) {
    if code != code::SUCCESS {
        return;
    }
    CAPTURES.fetch_add(1, Ordering::Relaxed);
    if let Some(contexts) = started()
        && let Ok(Some(device)) = contexts.current()
    {
        // A free in the capture tries again.
        let _ = contexts.keep_spare(device);
    }
}

/// `cuStreamEndCapture`, after the driver's answer: a capture that was spoiled has ended, too.
pub(super) fn note_capture_ended(code: c_int) {
    if ![code::ILLEGAL_STATE, code::STREAM_CAPTURE_WRONG_THREAD].contains(&code) {
        let end = |captures: u32| captures.checked_sub(1);
        let _ = CAPTURES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end);
    }
}

/// `cuStreamDestroy`: the next stream may have the same handle, and would be given memory that the last one's
/// work still uses. Returns why the stream stays where nobody can tell that its work is done.
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

/// Waits for a device's work, as a free of the driver's does.
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

/// What lowtide knows of an address in its memory.
enum Found {
    /// The program holds it, on this device.
    Held(u32, Allocation),
    /// It does not, and is told so by this code: freed already, or no beginning of an allocation.
    NotHeld(c_int),
}

/// Returns what an address is; `None` for one outside of lowtide's memory.
fn find(address: u64) -> Option<Found> {
    let address = DeviceAddress(address);
    let (ordinal, found) = match devices::find_allocation(address) {
        Ok((ordinal, allocation)) => (ordinal, Ok(allocation)),
        Err(error) if error.status == Status::NotAllocated => {
            let (ordinal, _) = devices::find_segment(address).ok()?;
            (ordinal, Err(code::INVALID_VALUE))
        }
        Err(_) => return Some(Found::NotHeld(code::UNKNOWN)),
    };
    let device = u32::try_from(ordinal)
        .ok()
        .filter(|&device| !is_lost(device))?;
    Some(match found {
        Ok(allocation) => Found::Held(device, allocation),
        Err(code) => Found::NotHeld(code),
    })
}

/// Returns CUDA's code for what became of a call.
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
