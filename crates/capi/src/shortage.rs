//! Running out: who is asked to free memory before, and what can be said after.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::boundary::{self, run, write_to_c};
use crate::error::{Error, OutOfMemory, Status};

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
        let last = boundary::last_out_of_memory();
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
    run(|| {
        *lock() = callback.map(|call| Listener { call, context });
        Ok(())
    })
}

/// Who is asked for memory.
static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Listener>> {
    LISTENER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks whoever can free memory of a device to do so, without a lock, and returns whether they did.
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
