//! Lets the driver scrub released memory in the background. The driver does that only when it is called, so otherwise the
//! next pause or resume would wait for it.

use std::ffi::c_int;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use lowtide_core::Bytes;
use lowtide_cuda::{DriverCall, start_beside};

use crate::devices::{self, DEVICES_MAX};

/// After less than this, the next call waits for a fraction of a millisecond at most.
const MOVED_MIN: Bytes = Bytes::gib(1);
/// The time between two calls. It keeps each call short, because other callers of the driver wait for it.
const INTERVAL: Duration = Duration::from_millis(20);
/// The number of calls: 0.4 s in all, in which a card can scrub all of its memory.
const CALLS: u32 = 20;

/// The number of calls left, by device. A device with calls left has a thread.
static CALLS_LEFT: [Mutex<u32>; DEVICES_MAX] = [const { Mutex::new(0) }; DEVICES_MAX];

/// Starts a thread that lets the driver take back the memory that the card has scrubbed, whoever released it. Does nothing
/// if less than [`MOVED_MIN`] has moved.
pub(super) fn begin(device: c_int, moved: Bytes) {
    if moved < MOVED_MIN || mem::replace(&mut *calls_left(device), CALLS) > 0 {
        return;
    }
    let thread = start_beside("lowtide scrubs", move || serve(device));
    if thread.is_err() {
        // Without a thread, the next call of the driver waits.
        *calls_left(device) = 0;
    }
}

fn serve(device: c_int) {
    loop {
        thread::sleep(INTERVAL);
        if let Some(allocator) = devices::get(device) {
            let mut physical = allocator.physical();
            // Once the lock is held, under which another thread may have waited for a kernel.
            if let Some(_call) = DriverCall::begin() {
                physical.driver_mut().reclaim_scrubbed();
            }
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
