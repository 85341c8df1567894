//! Locks, condition variable and atomics: the standard library's, or in unit tests those that
//! [shuttle](https://docs.rs/shuttle) schedules.

#[cfg(test)]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(test))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
