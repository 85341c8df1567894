//! Blocks the program's signals in lowtide's own threads.

use std::{fmt, mem, ptr};

/// While this exists, its thread receives no signal. Threads that it starts meanwhile never receive one: the
/// program handles signals in its own threads.
#[must_use = "signals come again once this is dropped"]
pub struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    /// Blocks every signal in this thread.
    pub fn begin() -> SignalsBlocked {
        // SAFETY: a set is numbers only.
        let mut all: libc::sigset_t = unsafe { mem::zeroed() };
        let mut before = all;
        // SAFETY: the call writes `all`, which outlives it.
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

impl fmt::Debug for SignalsBlocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SignalsBlocked").finish_non_exhaustive()
    }
}
