//! Out of memory: the callback that can free memory before, and the figures after.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::boundary::{self, run, write_to_c};
use crate::error::{Error, OutOfMemory, Status};

/// Writes the memory figures of this thread's last request that failed with `LOWTIDE_STATUS_OUT_OF_MEMORY`. Fails
/// with `LOWTIDE_STATUS_INVALID_ARGUMENT` if none did. For a request above 2^60 bytes, which no device could
/// serve, only `requested` is set.
///
/// # Safety
///
/// `figures` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_last_out_of_memory(figures: *mut OutOfMemory) -> Status {
    run(|| {
        let last = boundary::last_out_of_memory();
        let none = || {
            let text = "no request of this thread has run out of memory";
            Error::new(Status::InvalidArgument, text)
        };
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("figures", figures, last.ok_or_else(none)?) }
    })
}

/// Frees memory of a device if it can, and returns whether it freed any. Called with the `context` that was
/// registered with it, by a thread whose request no free block serves, before the driver is asked for more.
/// Called without any lock, so it may call lowtide. It must not throw or unwind.
pub type ShortageCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, device: c_int) -> bool>;

/// Registers `callback`, which is called when memory is short; the request is then tried again. Null removes it.
///
/// There is one callback: a later one replaces it. Another thread may still be in the earlier one when this
/// returns. PyTorch does this with its registry of `FreeMemoryCallback`.
///
/// # Safety
///
/// `callback` may be called with `context` from any thread, from several at once, and once more by each thread
/// after it was replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_on_shortage(
    callback: ShortageCallback,
    context: *mut c_void,
) -> Status {
    run(|| {
        *lock() = callback.map(|call| Listener { call, context });
        Ok(())
    })
}

/// The registered callback.
static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Listener>> {
    LISTENER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls the registered callback to free memory of a device, without a lock. Returns whether it freed any.
pub(crate) fn relieve(device: c_int) -> bool {
    let listener = *lock();
    listener.is_some_and(|listener| listener.call(device))
}

/// A caller's callback and its context.
#[derive(Clone, Copy)]
pub(crate) struct Listener {
    call: unsafe extern "C" fn(*mut c_void, c_int) -> bool,
    context: *mut c_void,
}

// SAFETY: the function may be called from any thread, by the contract of `lowtide_on_shortage`.
unsafe impl Send for Listener {}
// SAFETY: and from several at once.
unsafe impl Sync for Listener {}

impl Listener {
    fn call(&self, device: c_int) -> bool {
        // SAFETY: by the contract of `lowtide_on_shortage`.
        unsafe { (self.call)(self.context, device) }
    }
}
