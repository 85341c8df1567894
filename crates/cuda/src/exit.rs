//! Functions that run when the process exits.

use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Registers `handler` to run when the process exits, also in a forked child. Has an effect once for each handler.
/// Handlers run in the reverse order of their registration. Returns whether the handler is registered: the C library
/// has room for 32 handlers at least.
///
/// The handler's library must stay loaded, as `liblowtide.so` does (`crates/capi/build.rs`).
pub fn call_at_exit(handler: extern "C" fn()) -> bool {
    static REGISTERED: Mutex<Vec<extern "C" fn()>> = Mutex::new(Vec::new());
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    if { registered.iter() }.any(|&known| ptr::fn_addr_eq(known, handler)) {
        return true;
    }
    // SAFETY: the function takes nothing, and its library stays loaded.
    let is_registered = unsafe { libc::atexit(handler) } == 0;
    if is_registered {
        registered.push(handler);
    }
    is_registered
}
