//! Threads of lowtide's own, and the signals of the program.

use std::{mem, ptr};

/// No signal comes to this thread, nor to those that it starts: they are the program's to handle.
pub(crate) struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    pub(crate) fn begin() -> SignalsBlocked {
        // SAFETY: a set is numbers only.
        let mut all: libc::sigset_t = unsafe { mem::zeroed() };
        let mut before = all;
        // SAFETY: `all` may be written to.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: reads the one set and writes the other; both outlive the call.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
        SignalsBlocked { before }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: reads the set, which outlives the call.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        };
    }
}
