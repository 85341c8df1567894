//! Unique handles and thread numbers.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// A thread of the program. This avoids std's thread id and anything else with a destructor: exit handlers call the
/// driver after the destructors of thread-local variables have run.
pub(crate) type Thread = u64;

/// Returns the calling thread.
pub(crate) fn this_thread() -> Thread {
    thread_local! {
        static THREAD: Cell<Thread> = const { Cell::new(0) };
    }
    if THREAD.get() == 0 {
        THREAD.set(new_name());
    }
    THREAD.get()
}

/// Returns a name that no context, stream, event, graph, handle or thread ever had in this process. It looks like a
/// pointer, and dereferencing it faults.
pub(crate) fn new_name() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    0xfa4e_0000_0000_0000 + 16 * (1 + LAST.fetch_add(1, Ordering::Relaxed))
}
