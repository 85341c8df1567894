//! Tracks whether this thread is being served, and stops panics.

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::code;

thread_local! {
    static IS_SERVED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is inside a replaced driver function. A signal's handler may end the process
/// there.
pub(super) fn is_thread_served() -> bool {
    IS_SERVED.get()
}

/// Runs code that serves the program. No panic crosses it.
#[inline]
pub(super) fn guarded(serve: impl FnOnce() -> c_int) -> c_int {
    IS_SERVED.set(true);
    // A panic leaves no inconsistent state that is used again: it is behind locks, which are then poisoned.
    let code = catch_unwind(AssertUnwindSafe(serve));
    IS_SERVED.set(false);
    code.unwrap_or(code::UNKNOWN)
}
