//! Detects a forked child in which CUDA does not work.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Status};

/// Whether this process is a forked child of a process that had started the driver.
static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Marks future forked children of this process as such. A program that only starts another program (`exec`) is
/// not affected.
///
/// # Errors
///
/// If the system refuses to register the handler.
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

/// Returns whether this process is such a child. Checked before any lock is taken: the lock's holder may be a
/// thread that does not exist in the child.
#[inline]
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Relaxed)
}

/// Returns the error that every exported function returns in such a child.
#[cold]
pub(crate) fn error() -> Error {
    let text = "this process was forked from one that had started CUDA, which does not work in it; \
                start it anew instead, in Python with the start method 'spawn' of multiprocessing";
    Error::new(Status::Forked, text)
}
