//! What lowtide does when the process exits.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{process, thread};

use lowtide_cuda::call_at_exit;

/// How often a process that exits tries to run what was registered.
const ATTEMPTS: u32 = 100;

static ACTS: Mutex<Vec<Box<dyn Fn() + Send>>> = Mutex::new(Vec::new());

/// Calls `act` when this process exits, before the acts that were registered here earlier, and not when a forked child
/// exits. The driver may be gone by that time. Not called if the process is killed, or if the system has no room for a
/// handler.
pub(crate) fn at_exit(act: impl Fn() + Send + 'static) {
    extern "C" fn run() {
        // In a forked child the lock may be held for ever. Otherwise another thread holds it for a moment.
        for _ in 0..ATTEMPTS {
            if let Ok(acts) = ACTS.try_lock() {
                return acts.iter().rev().for_each(|act| act());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    let process = process::id();
    let in_this_process = move || {
        if process == process::id() {
            act();
        }
    };
    let mut acts = ACTS.lock().unwrap_or_else(PoisonError::into_inner);
    acts.push(Box::new(in_this_process));
    drop(acts);
    call_at_exit(run);
}
