//! Running out: who is asked to free memory before, and what can be said after.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use lowtide_shared::Shortage;

use crate::boundary::{run, write_to_c};
use crate::error::{Error, Status};
use crate::registry;

thread_local! {
    static LAST: Cell<Option<OutOfMemory>> = const { Cell::new(None) };
}

/// What there was when a request ran out of memory, in bytes. `lowtide_last_error` says it in words.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct OutOfMemory {
    /// The device.
    pub device: c_int,
    /// What was asked for.
    pub requested: u64,
    /// What the driver would have been asked for: PyTorch's messages name this size.
    pub segment_size: u64,
    /// The largest block that is free in the request's memory pool and stream.
    pub largest_free: u64,
    /// What the program holds.
    pub allocated: u64,
    /// What is held from the driver.
    pub reserved: u64,
    /// What may be held from the driver; 0 where there is no limit.
    pub limit: u64,
    /// What was free on the device, as its driver says.
    pub device_free: u64,
    /// All of the device's memory.
    pub device_total: u64,
    /// Whether the request was rejected without asking the driver (`throw_on_cudamalloc_oom`).
    pub is_rejected: bool,
}

/// Writes the figures of the last request of this thread that failed with `LOWTIDE_STATUS_OUT_OF_MEMORY`,
/// or fails with `LOWTIDE_STATUS_INVALID_ARGUMENT` if none did. Of a request that no device could serve,
/// because it is above 2^60 bytes, only `requested` is said.
///
/// # Safety
///
/// `figures` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_last_out_of_memory(figures: *mut OutOfMemory) -> Status {
    run(|| {
        let last = LAST.try_with(Cell::get).ok().flatten();
        let none = || {
            let text = "no request of this thread has run out of memory";
            Error::new(Status::InvalidArgument, text)
        };
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("figures", figures, last.ok_or_else(none)?) }
    })
}

/// Frees what memory of a device it can, and returns whether that was any. Called with the `context` that
/// was given with it, by the thread whose request no free block serves, before the driver is asked for
/// more; without any lock, so that it may call lowtide. It must not throw or unwind.
pub type ShortageCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, device: c_int) -> bool>;

/// Calls `callback` from now on when memory is short, and tries the request again after it; null ends it.
///
/// There is one: a later one replaces it, which another thread may still be in when this returns. What
/// PyTorch does with its registry of `FreeMemoryCallback`.
///
/// # Safety
///
/// `callback` may be called with `context` from any thread, from several at once, and once more by each
/// thread after it was replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_on_shortage(
    callback: ShortageCallback,
    context: *mut c_void,
) -> Status {
    run(|| registry::on_shortage(callback.map(|call| ShortageListener { call, context })))
}

/// A caller's callback and its context.
#[derive(Clone, Copy)]
pub(crate) struct ShortageListener {
    call: unsafe extern "C" fn(*mut c_void, c_int) -> bool,
    context: *mut c_void,
}

// SAFETY: the function may be called from any thread, by the contract of `lowtide_on_shortage`.
unsafe impl Send for ShortageListener {}
// SAFETY: and from several at once.
unsafe impl Sync for ShortageListener {}

impl ShortageListener {
    /// Returns what is called for one device.
    pub(crate) fn of_device(self, device: c_int) -> Shortage {
        Arc::new(move || self.call(device))
    }

    fn call(&self, device: c_int) -> bool {
        // SAFETY: by the contract of `lowtide_on_shortage`.
        unsafe { (self.call)(self.context, device) }
    }
}

impl OutOfMemory {
    /// Returns the figures of an error of the allocator's.
    pub(crate) fn of(error: &lowtide_core::OutOfMemory) -> OutOfMemory {
        OutOfMemory {
            device: c_int::try_from(error.device).unwrap_or(-1),
            requested: error.requested.get(),
            segment_size: error.segment_size.get(),
            largest_free: error.largest_free.get(),
            allocated: error.allocated.get(),
            reserved: error.reserved.get(),
            limit: error.limit.map_or(0, |limit| limit.get()),
            device_free: error.device_free.get(),
            device_total: error.device_total.get(),
            is_rejected: error.is_rejected,
        }
    }

    /// Keeps the figures for the thread.
    pub(crate) fn keep(self) {
        // A thread that is ending has no place for them any more.
        let _ = LAST.try_with(|last| last.set(Some(self)));
    }
}
