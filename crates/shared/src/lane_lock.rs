//! The lock of a lane.

#[cfg(not(test))]
use std::{hint, thread, time::Duration};

#[cfg(test)]
use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(test))]
use spin::mutex::{SpinMutex as Mutex, SpinMutexGuard as MutexGuard};

/// How often a thread looks whether a lock is free before it lets others run, and before it sleeps.
#[cfg(not(test))]
const LOOKS_UNTIL_YIELD: u32 = 64;
#[cfg(not(test))]
const LOOKS_UNTIL_SLEEP: u32 = 256;
/// How long it sleeps: what holds a lock so long is a driver that is asked for memory.
#[cfg(not(test))]
const SLEEP: Duration = Duration::from_micros(20);

/// A lock that threads rarely meet at, as each stream has a lane and hardly a stream has two threads.
///
/// It is given back by a mere store, where [`std::sync::Mutex`] must find out whether somebody sleeps: that
/// is a quarter of what its user pays for an allocation. Who finds it taken looks again and again, lets
/// others run, and at last sleeps in between. A panic does not poison it; the device is
/// ([`SharedAllocator`](crate::SharedAllocator)).
#[derive(Debug)]
pub(crate) struct LaneLock<T>(Mutex<T>);

/// Gives the lock back when it is dropped.
pub(crate) type LockGuard<'a, T> = MutexGuard<'a, T>;

impl<T> LaneLock<T> {
    pub(crate) fn new(state: T) -> LaneLock<T> {
        LaneLock(Mutex::new(state))
    }
}

#[cfg(not(test))]
impl<T> LaneLock<T> {
    #[inline]
    pub(crate) fn lock(&self) -> LockGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        self.0.try_lock()
    }

    #[cold]
    fn wait(&self) -> LockGuard<'_, T> {
        let mut looks = 0;
        loop {
            match looks {
                0..LOOKS_UNTIL_YIELD => hint::spin_loop(),
                LOOKS_UNTIL_YIELD..LOOKS_UNTIL_SLEEP => thread::yield_now(),
                _ => thread::sleep(SLEEP),
            }
            looks = looks.saturating_add(1);
            // A look leaves the line in every processor's cache, as an attempt does not.
            if !self.0.is_locked()
                && let Some(guard) = self.0.try_lock()
            {
                return guard;
            }
        }
    }
}

/// In unit tests the scheduler must know who waits for whom.
#[cfg(test)]
impl<T> LaneLock<T> {
    pub(crate) fn lock(&self) -> LockGuard<'_, T> {
        let poison = std::sync::PoisonError::into_inner;
        self.0.lock().unwrap_or_else(poison)
    }

    pub(crate) fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poison)) => Some(poison.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}
