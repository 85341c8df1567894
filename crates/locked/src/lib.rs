//! One device's allocator, shared between threads.
//!
//! [`LockedAllocator`] is a lock around a [`DeviceAllocator`], and the wait that BFC asks for: a
//! request that finds no memory is tried again, for a bounded time, whenever another thread has
//! given some back.
//!
//! It is a crate of its own because the core has neither threads nor a clock: there a request is
//! served or it fails, which is what a replay and a simulation need. Whoever has threads (the C ABI)
//! uses this.
#![forbid(unsafe_code)]

mod error;
mod listeners;
/// The lock and the condition: the standard library's, or, in unit tests, those that
/// [shuttle](https://docs.rs/shuttle) schedules.
mod sync {
    #[cfg(test)]
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
    #[cfg(not(test))]
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
}

use std::time::{Duration, Instant};

use lowtide_core::{Bytes, DeviceAddress, DeviceAllocator, Driver, Stream};

pub use error::LockedError;
use listeners::Listeners;
pub use listeners::{Observer, Shortage};
use sync::{Condvar, Mutex, MutexGuard};

/// A [`DeviceAllocator`] that threads share.
///
/// Once a thread has panicked inside, every call returns [`LockedError::Poisoned`]: the allocator may
/// have been in the middle of a change, and what it would hand out could be in use already.
#[derive(Debug)]
pub struct LockedAllocator<D> {
    state: Mutex<State<D>>,
    /// Notified when memory may have come free and someone waits.
    freed: Condvar,
}

#[derive(Debug)]
struct State<D> {
    allocator: DeviceAllocator<D>,
    /// Threads that wait for memory. Almost always none, and then a free makes no system call.
    waiting: usize,
    /// Who wants to be told; most often nobody, which a request pays one branch for.
    listeners: Option<Box<Listeners>>,
}

impl<D: Driver> LockedAllocator<D> {
    /// Returns the allocator behind a lock.
    pub fn new(allocator: DeviceAllocator<D>) -> LockedAllocator<D> {
        LockedAllocator {
            state: Mutex::new(State {
                allocator,
                waiting: 0,
                listeners: None,
            }),
            freed: Condvar::new(),
        }
    }

    /// Returns what [`DeviceAllocator::allocate`] does. Where the strategy asks for it, a request
    /// that finds no memory first waits for other threads to give some back, at most as long as
    /// [`DeviceAllocator::retry_wait_ms`] says; a program of one thread waits in vain.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::allocate`], and [`LockedError::Poisoned`].
    pub fn allocate(&self, requested: Bytes, stream: Stream) -> Result<DeviceAddress, LockedError> {
        let state = self.lock()?;
        if state.listeners.is_some() {
            return self.allocate_heard(state, requested, stream);
        }
        self.allocate_locked(state, requested, stream)
    }

    /// Serves a request that nobody else has to hear of first.
    #[inline]
    fn allocate_locked(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, LockedError> {
        let Some(wait_ms) = state.allocator.retry_wait_ms() else {
            let served = state.allocator.allocate(requested, stream);
            state.tell_observer();
            return Ok(served?);
        };
        let served = state.allocator.try_allocate(requested, stream);
        state.tell_observer();
        match served? {
            Some(address) => Ok(address),
            None => self.allocate_later(state, requested, stream, Duration::from_millis(wait_ms)),
        }
    }

    /// Tries a request again each time that memory came free, until the time is up.
    fn allocate_later(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        requested: Bytes,
        stream: Stream,
        wait: Duration,
    ) -> Result<DeviceAddress, LockedError> {
        let start = Instant::now();
        while let Some(left) = wait.checked_sub(start.elapsed()) {
            state.waiting += 1;
            (state, _) = self.freed.wait_timeout(state, left)?;
            state.waiting -= 1;
            let served = state.allocator.try_allocate(requested, stream);
            state.tell_observer();
            if let Some(address) = served? {
                return Ok(address);
            }
        }
        // The last attempt is the one that counts as a failure and says why.
        let served = state.allocator.allocate(requested, stream);
        state.tell_observer();
        Ok(served?)
    }

    /// Takes a block back as [`DeviceAllocator::free`] does, and wakes the threads that wait for
    /// memory.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::free`], and [`LockedError::Poisoned`].
    pub fn free(&self, address: DeviceAddress) -> Result<(), LockedError> {
        Ok(self.with(|allocator| allocator.free(address))??)
    }

    /// Returns what `act` does with the allocator while no other thread can: everything but the two
    /// calls above. Threads that wait for memory then try again.
    ///
    /// # Errors
    ///
    /// [`LockedError::Poisoned`]; `act` is then not called.
    pub fn with<R>(
        &self,
        act: impl FnOnce(&mut DeviceAllocator<D>) -> R,
    ) -> Result<R, LockedError> {
        let mut state = self.lock()?;
        let result = act(&mut state.allocator);
        state.tell_observer();
        let someone_waits = state.waiting > 0;
        drop(state);
        if someone_waits {
            // All of them: what came free may be too little for the first and enough for the second.
            self.freed.notify_all();
        }
        Ok(result)
    }

    fn lock(&self) -> Result<MutexGuard<'_, State<D>>, LockedError> {
        Ok(self.state.lock()?)
    }
}

#[cfg(test)]
mod tests;
