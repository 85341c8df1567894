//! Whether this thread is being served, which no panic passes.

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::code;

thread_local! {
    static IS_SERVED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is in a function that stands in for the driver's. The process may end in one, by the
/// handler of a signal.
pub(super) fn is_thread_served() -> bool {
    IS_SERVED.get()
}

/// Runs what serves the program, which no panic passes.
#[inline]
pub(super) fn guarded(serve: impl FnOnce() -> c_int) -> c_int {
    IS_SERVED.set(true);
    // What a panic leaves half done is behind locks, which are poisoned.
    let code = catch_unwind(AssertUnwindSafe(serve));
    IS_SERVED.set(false);
    code.unwrap_or(code::UNKNOWN)
}
