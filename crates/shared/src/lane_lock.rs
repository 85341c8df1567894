//! The lock of a lane.

#[cfg(not(test))]
use std::{hint, thread, time::Duration};

#[cfg(test)]
use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(test))]
use spin::mutex::{SpinMutex as Mutex, SpinMutexGuard as MutexGuard};

/// The number of times that the pauses between two checks of a lock double: up to 1,024. With fewer, many waiting
/// threads take the lock's cache line from the thread that holds it: with 256, 16 threads on 16 cores wait 1.7 times as
/// long.
#[cfg(not(test))]
const DOUBLINGS: u32 = 10;
/// The number of checks before a thread sleeps. They take a fraction of a millisecond where a processor is free. A lock
/// is held this long only during a driver call for memory, or while the thread that holds it does not run.
#[cfg(not(test))]
const CHECKS_UNTIL_SLEEP: u32 = 24;
#[cfg(not(test))]
const SLEEP: Duration = Duration::from_micros(20);

/// A lock that most requests hold for a tenth of a microsecond.
///
/// Unlocking is a plain store. [`std::sync::Mutex`] must also check whether a thread sleeps, which is a quarter of the
/// cost of an allocation. A thread that finds the lock taken doubles its pauses between checks (the exponential backoff
/// of Anderson, 1990), then sleeps between checks. A panic poisons the device
/// ([`SharedAllocator`](crate::SharedAllocator)), not the lock.
#[derive(Debug)]
pub(crate) struct LaneLock<T>(Mutex<T>);

/// Unlocks when it is dropped.
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
        let pause = |count: u32| (0..count).for_each(|_| hint::spin_loop());
        let mut checks: u32 = 0;
        loop {
            match checks {
                0..DOUBLINGS => pause(1 << checks),
                DOUBLINGS..CHECKS_UNTIL_SLEEP => {
                    pause(1 << DOUBLINGS);
                    // The thread that holds the lock may wait for a processor.
                    thread::yield_now();
                }
                _ => thread::sleep(SLEEP),
            }
            checks = checks.saturating_add(1);
            // A load keeps the cache line shared between processors; an attempt to lock does not.
            if !self.0.is_locked()
                && let Some(guard) = self.0.try_lock()
            {
                return guard;
            }
        }
    }
}

/// In unit tests, shuttle's scheduler must know which thread waits for which.
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
