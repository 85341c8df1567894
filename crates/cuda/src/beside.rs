//! lowtide's background threads that call the driver while the job runs. The process's exit waits for those calls.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::exit::call_at_exit;
use crate::signals::SignalsBlocked;

/// The number of driver calls that background threads are making now.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Whether the process is exiting. The driver is about to shut down, so background threads must not call it any
/// more.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// The process that started the threads. A forked child has none of them.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Starts a background thread. It may call the driver while it holds a [`DriverCall`].
///
/// # Errors
///
/// The system's error if no thread can be created.
pub fn start_beside(
    name: &str,
    act: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, io::Error> {
    stop_at_exit();
    let _signals = SignalsBlocked::begin();
    thread::Builder::new().name(name.into()).spawn(act)
}

/// A driver call by a thread from [`start_beside`]. The process does not exit before this is dropped.
#[must_use = "the process may end once this is dropped"]
#[derive(Debug)]
pub struct DriverCall(());

impl DriverCall {
    /// Registers a call. Returns `None` once the process is exiting: no call may be made then.
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

/// Makes the process's exit wait for background threads that are in a driver call, and keeps them out of the driver
/// after that. Exit handlers run in reverse order of registration, so this one runs before the driver's own.
fn stop_at_exit() {
    extern "C" fn stop() {
        const STEP: Duration = Duration::from_micros(100);
        // A driver call takes some milliseconds, for example to page-lock a block. A call that hangs must not block
        // the exit forever.
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
        // If the system has no room for the handler, that is no reason to fail.
        call_at_exit(stop);
    });
}
