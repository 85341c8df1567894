//! What waits for a change of the driver's state.

use std::sync::{Condvar, MutexGuard, PoisonError};

/// Notified whenever a task ends, a task comes, or a stream is held, released or destroyed.
static CHANGED: Condvar = Condvar::new();

/// Wakes everything that waits for a change.
pub(crate) fn notify() {
    CHANGED.notify_all();
}

/// Lets others at the state until something has changed.
pub(crate) fn wait<T>(guard: MutexGuard<'_, T>) -> MutexGuard<'_, T> {
    CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
