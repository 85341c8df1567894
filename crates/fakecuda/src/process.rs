//! The process that started the driver: no other may call it, nor this one after its end.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::os;
use crate::sys::CUresult;

/// The process that called `cuInit`; 0 before.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static HAS_EXITED: AtomicBool = AtomicBool::new(false);

/// Makes this process the one that may call the driver, until its exit handlers have run.
pub(crate) fn start() {
    if PROCESS.swap(process::id(), Ordering::SeqCst) == 0 {
        os::raise_file_limit();
        os::call_at_exit(end);
    }
}

/// After this, calls fail: the program has run its own exit handlers, and CUDA is gone.
extern "C" fn end() {
    HAS_EXITED.store(true, Ordering::SeqCst);
}

/// Checks that this process may call the driver now.
///
/// # Errors
///
/// `DEINITIALIZED` at the end of the process, with a line on stderr that tests can look for;
/// `NOT_INITIALIZED` in a child of the process that called `cuInit`, where a card's driver does not
/// work either.
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
