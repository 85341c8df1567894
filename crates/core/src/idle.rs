//! Decides how much idle memory of a device is released for other programs. A 32nd of the device stays free.
//!
//! Memory that the job used within the last ten seconds stays: a step of training uses its memory again. If the job needs
//! released memory, it is created again.

use std::collections::VecDeque;
use std::time::Duration;

use crate::units::Bytes;

/// Memory that was used within this time stays.
const IDLE_FOR: Duration = Duration::from_secs(10);

/// The most that one call releases: requests wait for it.
const SLICE: Bytes = Bytes::mib(32);

/// Releases idle memory of one device while little of it is free.
#[derive(Debug, Default)]
pub struct IdleRelease {
    /// The device's own times ([`Lane::release_unused`](crate::Lane::release_unused)), one for each second, the oldest
    /// first.
    times: VecDeque<(Duration, u64)>,
}

impl IdleRelease {
    /// Releases what is missing, in slices, until nothing is or no more can go. Releases nothing in the first ten
    /// seconds. `now` is the time since any fixed time.
    ///
    /// `release` releases memory that has been idle since one of the device's own times, up to a number of bytes, and
    /// returns the device's time now. `missing` returns
    /// [`MemoryInfo::missing_free`](crate::MemoryInfo::missing_free).
    ///
    /// # Errors
    ///
    /// The first error of `release` or `missing`. What was released before it stays released.
    pub fn release<E>(
        &mut self,
        now: Duration,
        release: impl Fn(u64, Bytes) -> Result<u64, E>,
        missing: impl Fn() -> Result<Bytes, E>,
    ) -> Result<(), E> {
        self.add(now, release(0, Bytes::ZERO)?);
        let Some(since) = self.before(now) else {
            return Ok(());
        };
        let (mut before, mut still) = (Bytes(u64::MAX), missing()?);
        while !still.is_zero() && still < before {
            release(since, still.min(SLICE))?;
            (before, still) = (still, missing()?);
        }
        Ok(())
    }

    /// Adds the device's time, if the last one is a second old.
    fn add(&mut self, now: Duration, time: u64) {
        const STEP: Duration = Duration::from_secs(1);
        if self
            .times
            .back()
            .is_none_or(|&(last, _)| now.saturating_sub(last) >= STEP)
        {
            self.times.push_back((now, time));
        }
    }

    /// Returns the device's time of [`IDLE_FOR`] ago, and drops those before it. `None` if none is that old.
    fn before(&mut self, now: Duration) -> Option<u64> {
        let is_old = |&(then, _): &(Duration, u64)| now.saturating_sub(then) >= IDLE_FOR;
        while self.times.get(1).is_some_and(is_old) {
            self.times.pop_front();
        }
        let oldest = self.times.front().filter(|time| is_old(time));
        oldest.map(|&(_, time)| time)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    #[test]
    fn memory_is_old_once_it_was_idle_for_long() {
        let mut idle = IdleRelease::default();
        let start = Duration::from_secs(5);
        let mut known = Vec::new();
        for tenth in 0..400 {
            let now = start + tenth * Duration::from_millis(100);
            idle.add(now, u64::from(tenth));
            let before = idle.before(now);
            assert_eq!(before.is_some(), now - start >= IDLE_FOR);
            known.extend(before.map(|time| u64::from(tenth) - time));
            assert!(idle.times.len() <= 12);
        }
        // In tenths of a second: at least the time, and less than a second more.
        assert!(known.iter().all(|age| (100..110).contains(age)));
    }

    /// Lets a device with so much idle and so much missing memory run out of time and returns what was released: when
    /// it had been idle since, and the bytes.
    fn released(idle: Bytes, missing: Bytes) -> Vec<(u64, Bytes)> {
        let calls = RefCell::new(Vec::new());
        let (idle, missing) = (Cell::new(idle), Cell::new(missing));
        let mut policy = IdleRelease::default();
        for (now, time) in [(0, 7), (9, 8), (10, 9)] {
            let release = |since, most: Bytes| {
                let going = most.min(idle.get());
                idle.set(idle.get() - going);
                missing.set(missing.get().saturating_sub(going));
                calls
                    .borrow_mut()
                    .extend((!most.is_zero()).then_some((since, most)));
                Ok::<u64, ()>(time)
            };
            let done = policy.release(Duration::from_secs(now), release, || Ok(missing.get()));
            assert_eq!(done, Ok(()));
            assert!(now == 10 || calls.borrow().is_empty(), "nothing is old yet");
        }
        calls.into_inner()
    }

    #[test]
    fn what_is_missing_goes_in_slices() {
        let (mib, since) = (Bytes::mib(1), 7);
        assert_eq!(released(SLICE, Bytes::ZERO), []);
        assert_eq!(released(SLICE, mib), [(since, mib)]);
        let all = [(since, SLICE), (since, SLICE), (since, mib)];
        assert_eq!(released(Bytes::gib(1), SLICE + SLICE + mib), all);
    }

    #[test]
    fn what_cannot_go_is_asked_for_once() {
        assert_eq!(released(Bytes::ZERO, SLICE + SLICE), [(7, SLICE)]);
        let twice = [(7, SLICE), (7, SLICE)];
        assert_eq!(released(SLICE, Bytes::gib(1)), twice);
    }

    #[test]
    fn an_error_ends_the_release() {
        let mut idle = IdleRelease::default();
        assert_eq!(
            idle.release(Duration::ZERO, |_, _| Ok(0), || Err(1)),
            Ok(())
        );
        let late = IDLE_FOR;
        assert_eq!(idle.release(late, |_, _| Ok(0), || Err(1)), Err(1));
        assert_eq!(idle.release(late, |_, _| Err(2), || Ok(Bytes(1))), Err(2));
    }
}
