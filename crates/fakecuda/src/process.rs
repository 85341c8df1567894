//! The process that initialized the driver: no other may call the driver, and this one not after its exit.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::os;
use crate::sys::CUresult;

/// The process that called `cuInit`, or 0 before that.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static HAS_EXITED: AtomicBool = AtomicBool::new(false);

/// Allows this process to call the driver, until its exit handlers have run.
pub(crate) fn start() {
    if PROCESS.swap(process::id(), Ordering::SeqCst) == 0 {
        os::raise_file_limit();
        os::call_at_exit(end);
    }
}

/// Makes later calls fail: the program has run its own exit handlers, and CUDA has shut down.
extern "C" fn end() {
    HAS_EXITED.store(true, Ordering::SeqCst);
}

/// Checks that this process may call the driver now.
///
/// # Errors
///
/// `DEINITIALIZED` when the process exits, with a line on stderr that tests can look for. `NOT_INITIALIZED` in a
/// forked child of the process that called `cuInit`, where a card's driver does not work either.
pub(crate) fn check(name: &str) -> Result<(), CUresult> {
    if HAS_EXITED.load(Ordering::SeqCst) {
        eprintln!("fakecuda: {name} was called after the driver was gone");
        return Err(CUresult::DEINITIALIZED);
    }
    let started = PROCESS.load(Ordering::SeqCst);
    if started == 0 || started == process::id() {
        Ok(())
    } else {
        Err(CUresult::NOT_INITIALIZED)
    }
}
