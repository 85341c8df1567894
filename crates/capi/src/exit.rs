//! What lowtide does when the process exits.

use std::process;
use std::sync::Mutex;

use lowtide_cuda::call_at_exit;

static ACTS: Mutex<Vec<Box<dyn Fn() + Send>>> = Mutex::new(Vec::new());

/// Calls `act` when this process exits, before what was registered earlier, and not when a forked child exits. The
/// driver may be gone by that time. Not called if the process is killed, or if the system has no room for a handler.
pub(crate) fn at_exit(act: impl Fn() + Send + 'static) {
    extern "C" fn run() {
        // In a forked child the lock may be held for ever.
        if let Ok(acts) = ACTS.try_lock() {
            acts.iter().rev().for_each(|act| act());
        }
    }
    let process = process::id();
    let in_this_process = move || {
        if process == process::id() {
            act();
        }
    };
    // As above.
    if let Ok(mut acts) = ACTS.try_lock() {
        acts.push(Box::new(in_this_process));
    }
    call_at_exit(run);
}
