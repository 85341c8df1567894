//! Decides whether lowtide serves this process.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering};

use super::summary;

/// The mode of this process: unknown, not served, served, or served with a summary at its end.
static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const LEFT_ALONE: u8 = 1;
const SERVED: u8 = 2;
const SERVED_AND_REPORTED: u8 = 3;

/// Reads the environment before the program can change it.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = {
    extern "C" fn look() {
        mode();
    }
    look
};

/// Returns whether this process is served.
#[inline]
pub(super) fn is_serving() -> bool {
    mode() >= SERVED
}

/// Returns whether a summary is printed when the process ends.
pub(super) fn reports() -> bool {
    mode() == SERVED_AND_REPORTED
}

#[inline]
fn mode() -> u8 {
    match MODE.load(Ordering::Relaxed) {
        UNKNOWN => find_mode(),
        known => known,
    }
}

/// Allocates no host memory: this may be the first code that runs in the process.
#[cold]
fn find_mode() -> u8 {
    let is_preloaded = variable(c"LD_PRELOAD").is_some_and(|list| {
        let mut paths = list.to_bytes().split(|byte| b": ".contains(byte));
        paths.any(|path| path.ends_with(b"liblowtide.so"))
    });
    let mode = match variable(c"LOWTIDE_PRELOAD").map(CStr::to_bytes) {
        Some(b"1") if is_preloaded => SERVED_AND_REPORTED,
        Some(b"quiet") if is_preloaded => SERVED,
        _ => LEFT_ALONE,
    };
    if mode == SERVED_AND_REPORTED {
        summary::look_at_standard_error();
    }
    MODE.store(mode, Ordering::Relaxed);
    mode
}

fn variable(name: &CStr) -> Option<&CStr> {
    // SAFETY: the name ends with a zero byte.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: it is not null then, and a value ends with a zero byte. Nothing changes it: the program's own
    // code runs later.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}
