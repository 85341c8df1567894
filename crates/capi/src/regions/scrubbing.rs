//! Beside the job, the driver's own work after much memory has moved: without it, the next pause or resume waits for
//! that, as the driver puts it off until it is called.

use std::ffi::c_int;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use lowtide_core::Bytes;
use lowtide_cuda::{DriverCall, start_beside};

use crate::devices::{self, DEVICES_MAX};

/// Where less has moved, the next call waits for a fraction of a millisecond at most.
const MOVED_MIN: Bytes = Bytes::gib(1);
/// Between two calls, so that each is short: whoever else calls the driver then waits for it.
const INTERVAL: Duration = Duration::from_millis(20);
/// Together 0.4 s, in which a card scrubs all that it has.
const CALLS: u32 = 20;

/// How many calls are still to come, by device. There is a thread wherever some are.
static CALLS_LEFT: [Mutex<u32>; DEVICES_MAX] = [const { Mutex::new(0) }; DEVICES_MAX];

/// Has the driver take back beside the job what the card has scrubbed, by whomever it was given back. Does nothing where
/// little has `moved`.
pub(super) fn begin(device: c_int, moved: Bytes) {
    if moved < MOVED_MIN || mem::replace(&mut *calls_left(device), CALLS) > 0 {
        return;
    }
    let thread = start_beside("lowtide scrubs", move || serve(device));
    if thread.is_err() {
        // Whoever calls the driver next waits for it.
        *calls_left(device) = 0;
    }
}

fn serve(device: c_int) {
    loop {
        thread::sleep(INTERVAL);
        if let Some(allocator) = devices::get(device) {
            allocator.with_driver(|driver| {
                // Not before the lock is there, under which others may wait for a kernel.
                if let Some(_call) = DriverCall::begin() {
                    driver.reclaim_scrubbed();
                }
            });
        }
        let mut left = calls_left(device);
        *left -= 1;
        if *left == 0 {
            return;
        }
    }
}

fn calls_left(device: c_int) -> MutexGuard<'static, u32> {
    let index = usize::try_from(device).expect("a region's device has a number");
    let left = CALLS_LEFT[index].lock();
    left.unwrap_or_else(PoisonError::into_inner)
}
