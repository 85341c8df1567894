//! The thread that looks at each device, off the path of requests, and releases idle memory ([`IdleRelease`]).

use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use lowtide_core::{AllocError, Bytes, Driver as _, IdleRelease, StrategyName};
use lowtide_cuda::{DriverCall, start_beside};
use lowtide_shared::LaneOf;

use crate::cuda;
use crate::devices::{self, Allocator, DEVICES_MAX};
use crate::error::Error;

/// How often the free memory of each device is looked at. A query takes a few microseconds. A program that takes 20 GiB a
/// second on an H200 outran 100 ms.
const EVERY: Duration = Duration::from_millis(20);

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
    let start = Instant::now();
    let mut idle: Vec<IdleRelease> = (0..DEVICES_MAX).map(|_| IdleRelease::default()).collect();
    loop {
        for (ordinal, allocator) in devices::all() {
            // A failed call is reported to the request that makes it next.
            let _ = look_at(allocator, &mut idle[ordinal as usize], start.elapsed());
        }
        thread::sleep(EVERY);
    }
}

/// Releases memory of a device that has been idle for long, if another program may need it.
fn look_at(allocator: &Allocator, idle: &mut IdleRelease, now: Duration) -> Result<(), AllocError> {
    let release = |since, most| {
        allocator.with_lane(LaneOf::Pools, |lane| {
            // Under the lock, for which another thread may have waited.
            match DriverCall::begin() {
                Some(_call) => lane.release_unused(since, most),
                None => Ok(since),
            }
        })
    };
    let missing = || {
        let mut physical = allocator.physical();
        let Some(_call) = DriverCall::begin() else {
            return Ok(Bytes::ZERO);
        };
        Ok(physical.driver_mut().memory_info()?.missing_free())
    };
    idle.release(now, release, missing)
}
