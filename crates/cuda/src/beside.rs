//! Threads of lowtide's own that call the driver beside the job, and the end of the process, which waits for them.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::signals::SignalsBlocked;

/// Such threads that are in the driver now.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// The process ends: none of them may call the driver any more, which is about to be torn down.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// The process whose threads they are: the child of a fork has none.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Starts a thread that may call the driver beside the job, where it has a [`DriverCall`].
///
/// # Errors
///
/// What the system says where it has no thread to give.
pub fn start_beside(
    name: &str,
    act: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, io::Error> {
    stop_at_exit();
    let _signals = SignalsBlocked::begin();
    thread::Builder::new().name(name.into()).spawn(act)
}

/// A call to the driver that a thread of [`start_beside`] makes: the process does not end before this is dropped.
#[must_use = "the process may end once this is dropped"]
#[derive(Debug)]
pub struct DriverCall(());

impl DriverCall {
    /// Returns the call; `None` once the process ends, when none may be made any more.
    pub fn begin() -> Option<DriverCall> {
        CALLS.fetch_add(1, Ordering::SeqCst);
        let call = DriverCall(());
        (!IS_ENDING.load(Ordering::SeqCst)).then_some(call)
    }
}

impl Drop for DriverCall {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Has the process's end wait for threads that are in the driver, and keep all out of it: what runs at a
/// process's end runs in reverse order, so this comes before the driver's own.
fn stop_at_exit() {
    extern "C" fn stop() {
        const STEP: Duration = Duration::from_micros(100);
        // A thread is in the driver for some milliseconds, such as a block takes to be page-locked. One that does
        // not come out shall not keep the process.
        const WAIT_MAX: Duration = Duration::from_secs(10);
        if PROCESS.load(Ordering::SeqCst) != std::process::id() {
            return;
        }
        IS_ENDING.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while CALLS.load(Ordering::SeqCst) > 0 && start.elapsed() < WAIT_MAX {
            thread::sleep(STEP);
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        PROCESS.store(std::process::id(), Ordering::SeqCst);
        // SAFETY: the function is ours, and the library that it is part of stays loaded: it has threads.
        let registered = unsafe { libc::atexit(stop) };
        // It takes at least 32 functions; one more than it takes is no reason to fail.
        let _ = registered;
    });
}
