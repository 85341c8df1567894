//! The summary that is printed when the process ends.

use crate::devices;
use std::ffi::c_int;
use std::fmt::Write as _;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::Bytes;

use super::serving::is_thread_served;

/// The number of memory calls that lowtide left to the driver.
static LEFT_TO_DRIVER: AtomicU64 = AtomicU64::new(0);
/// How many of those were for managed memory.
static MANAGED: AtomicU64 = AtomicU64::new(0);
/// The device and inode numbers of standard error when the process began; zero for none.
static STANDARD_ERROR: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

pub(super) fn count_left_to_driver() {
    LEFT_TO_DRIVER.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn count_managed() {
    MANAGED.fetch_add(1, Ordering::Relaxed);
}

/// Stores what standard error is. Allocates no host memory.
pub(super) fn look_at_standard_error() {
    for (noted, number) in STANDARD_ERROR.iter().zip(standard_error()) {
        noted.store(number, Ordering::Relaxed);
    }
}

/// Prints the summary when the process ends by `exit` or by the end of `main`.
pub(super) fn report() {
    // This thread may hold a lock that the summary would wait for.
    if is_thread_served() {
        return;
    }
    // If the program closed standard error, the number may belong to its own file or connection.
    let noted = STANDARD_ERROR
        .each_ref()
        .map(|noted| noted.load(Ordering::Relaxed));
    if noted == [0; 2] || noted != standard_error() {
        return;
    }
    let text = text();
    let bytes = text.as_bytes();
    // In one write and without buffers: the program may have closed its buffers already.
    // SAFETY: the bytes are valid.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Returns the device and inode numbers of standard error now; zero for none.
fn standard_error() -> [u64; 2] {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call writes to `found`, which outlives it.
    if unsafe { libc::fstat(libc::STDERR_FILENO, found.as_mut_ptr()) } != 0 {
        return [0; 2];
    }
    // SAFETY: the call above has succeeded, and written all of it.
    let found = unsafe { found.assume_init() };
    [found.st_dev, found.st_ino]
}

/// Returns the summary, made from counters alone: the driver may be gone.
fn text() -> String {
    let mut served = 0;
    let mut reached = LEFT_TO_DRIVER.load(Ordering::Relaxed).cast_signed();
    let left = reached;
    let mut devices = String::new();
    for (ordinal, allocator) in devices::all() {
        let Ok(stats) = allocator.with_all(|device| device.stats()) else {
            continue;
        };
        served += stats.allocation.all.allocated + stats.allocation.all.freed;
        reached += stats.num_device_alloc + stats.num_device_free;
        let peaks = [
            stats.reserved_bytes.all.peak,
            stats.requested_bytes.all.peak,
        ];
        devices.push_str(&peaks_of(ordinal, peaks));
    }
    let mut text = format!(
        "lowtide: {} calls for memory, {reached} made to the driver",
        served + left
    );
    let managed = MANAGED.load(Ordering::Relaxed);
    if managed > 0 {
        let _ = write!(text, "; {managed} for managed memory, left to the driver");
    }
    text + "\n" + &devices
}

fn peaks_of(ordinal: c_int, peaks: [i64; 2]) -> String {
    let [reserved, live] = peaks.map(|bytes| Bytes(u64::try_from(bytes).unwrap_or(0)));
    format!("lowtide: device {ordinal}: peak {reserved} reserved, peak {live} live\n")
}
