//! Whether this process is the child of a fork in which CUDA does not work.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Status};

/// Whether this process is the child of one that had started the driver.
static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Has a child of this process know that it is one. A program that only starts another one (`exec`) is not touched by
/// that.
///
/// # Errors
///
/// If the system cannot do that.
pub(crate) fn watch() -> Result<(), Error> {
    static IS_WATCHING: AtomicBool = AtomicBool::new(false);
    extern "C" fn in_child() {
        IS_FORKED.store(true, Ordering::Relaxed);
    }
    if IS_WATCHING.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: what runs in the child stores one number, which needs no lock.
    let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if code != 0 {
        IS_WATCHING.store(false, Ordering::Relaxed);
        let text = format_args!("pthread_atfork failed with error {code}");
        return Err(Error::new(Status::Internal, text));
    }
    Ok(())
}

/// Returns whether this process is such a child. Asked before any lock is taken: a thread that is not there may hold it.
#[inline]
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Relaxed)
}

/// Returns the error of every exported function in such a child.
#[cold]
pub(crate) fn error() -> Error {
    let text = "this process was forked from one that had started CUDA, which does not work in it; \
                start it anew instead, in Python with the start method 'spawn' of multiprocessing";
    Error::new(Status::Forked, text)
}
