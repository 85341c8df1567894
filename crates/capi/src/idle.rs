//! Releases memory that has been idle for long when little of a device is free: another program may need it.
//!
//! The thread of this file looks at each device, off the path of requests. Memory that a job used within the last seconds
//! stays: a step of training uses it again. What is released costs the job its creation once more, if it needs it.

use std::collections::VecDeque;
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use lowtide_core::{AllocError, Bytes, Driver as _, MemoryInfo, StrategyName};
use lowtide_cuda::{DriverCall, start_beside};
use lowtide_shared::LaneOf;

use crate::cuda;
use crate::devices::{self, Allocator, DEVICES_MAX};
use crate::error::Error;

/// How often the free memory of each device is looked at. A query takes a few microseconds. A program that takes 20 GiB a
/// second on an H200 outran 100 ms.
const EVERY: Duration = Duration::from_millis(20);
/// Memory that was used within this time stays.
const IDLE_FOR: Duration = Duration::from_secs(10);
/// The part of a device that is kept free.
const FREE_PART: u64 = 32;
/// How much is released under one lock of the device, for which requests wait.
const SLICE: Bytes = Bytes::mib(32);

/// Starts the thread when the first device with such memory is started. Without the thread, idle memory stays.
pub(crate) fn start(strategy: StrategyName) {
    static ONCE: Once = Once::new();
    if strategy == StrategyName::Tide {
        ONCE.call_once(|| drop(start_beside("lowtide idle", watch)));
    }
}

fn watch() {
    // In this mode, calls from this thread do not break the captures of others.
    let relax = |_call| Ok(cuda::library()?.relax_capture()?);
    let relaxed: Option<Result<_, Error>> = DriverCall::begin().map(relax);
    let Some(Ok(_relaxed)) = relaxed else {
        return;
    };
    let mut times: Vec<Times> = (0..DEVICES_MAX).map(|_| Times::default()).collect();
    loop {
        for (ordinal, allocator) in devices::all() {
            // A failed call is reported to the request that makes it next.
            let _ = keep_free(allocator, &mut times[ordinal as usize], Instant::now());
        }
        thread::sleep(EVERY);
    }
}

/// Releases memory of a device that has been idle for long, as much as is missing in what is kept free.
fn keep_free(allocator: &Allocator, times: &mut Times, now: Instant) -> Result<(), AllocError> {
    let release = |since, most| {
        allocator.with_lane(LaneOf::Pools, |lane| {
            // Under the lock, for which another thread may have waited.
            match DriverCall::begin() {
                Some(_call) => lane.release_unused(since, most),
                None => Ok(since),
            }
        })
    };
    times.add(now, release(0, Bytes::ZERO)?);
    let Some(since) = times.before(now) else {
        return Ok(());
    };
    let mut missing = missing(allocator)?;
    while !missing.is_zero() {
        release(since, missing.min(SLICE))?;
        let still = self::missing(allocator)?;
        if still >= missing {
            break;
        }
        missing = still;
    }
    Ok(())
}

/// Returns how much memory of a device is missing in what is kept free.
fn missing(allocator: &Allocator) -> Result<Bytes, AllocError> {
    let mut physical = allocator.physical();
    let Some(_call) = DriverCall::begin() else {
        return Ok(Bytes::ZERO);
    };
    let MemoryInfo { free, total } = physical.driver_mut().memory_info()?;
    Ok(Bytes(total.get() / FREE_PART).saturating_sub(free))
}

/// When a device's own times were, the oldest first: one for each second.
#[derive(Debug, Default)]
struct Times(VecDeque<(Instant, u64)>);

impl Times {
    /// Adds the device's time now, if the last one is a second old.
    fn add(&mut self, now: Instant, time: u64) {
        const STEP: Duration = Duration::from_secs(1);
        if self.0.back().is_none_or(|&(last, _)| now - last >= STEP) {
            self.0.push_back((now, time));
        }
    }

    /// Returns the device's time of [`IDLE_FOR`] ago, and forgets those before it. `None` if none is that old.
    fn before(&mut self, now: Instant) -> Option<u64> {
        let is_old = |&(then, _): &(Instant, u64)| now - then >= IDLE_FOR;
        while self.0.get(1).is_some_and(is_old) {
            self.0.pop_front();
        }
        self.0
            .front()
            .filter(|time| is_old(time))
            .map(|&(_, time)| time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_old_once_it_was_idle_for_long() {
        let mut times = Times::default();
        let start = Instant::now();
        let mut known = Vec::new();
        for tenth in 0..400 {
            let now = start + tenth * Duration::from_millis(100);
            times.add(now, u64::from(tenth));
            let before = times.before(now);
            assert_eq!(before.is_some(), now - start >= IDLE_FOR);
            known.extend(before.map(|time| u64::from(tenth) - time));
            assert!(times.0.len() <= 12);
        }
        // In tenths of a second: at least the time, and less than a second more.
        assert!(known.iter().all(|age| (100..110).contains(age)));
    }
}
