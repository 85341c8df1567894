//! Waiting for a change of the driver's state.

use std::sync::{Condvar, MutexGuard, PoisonError};

/// Notified when a task ends or is submitted, and when a stream is held, released or destroyed.
static CHANGED: Condvar = Condvar::new();

/// Wakes every thread that waits for a change.
pub(crate) fn notify() {
    CHANGED.notify_all();
}

/// Unlocks the state until something has changed.
pub(crate) fn wait<T>(guard: MutexGuard<'_, T>) -> MutexGuard<'_, T> {
    CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
