//! How much of a backup is copied, page-locked or written at once.

use std::thread;

/// The sizes of the units that a backup is processed in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// The size of a ring slot and of a write to a file. The link takes ten times as long for it as beginning a
    /// copy does, and disks reach their full speed.
    pub(super) piece_bytes: usize,
    /// The largest number of slots in the ring. Page-locking all of them takes some 30 ms once.
    pub(super) slots: usize,
    /// The size of a block, which is page-locked at once; a multiple of `piece_bytes`. Other threads may wait for
    /// the driver during this time, some milliseconds.
    pub(super) block_bytes: usize,
    /// The size of a step, which is saved at once in page-locked memory; a multiple of `block_bytes`. A larger
    /// range makes its step larger. A step is small compared with a large backup, so most device memory is released
    /// while later steps are saved. It takes a thousand times as long as its overhead.
    pub(super) step_bytes: usize,
    /// The number of threads that fill and empty slots.
    pub(super) threads: usize,
}

impl Default for Sizes {
    fn default() -> Sizes {
        // A few threads of a large machine already copy faster than the link.
        const THREADS_MAX: usize = 16;
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(THREADS_MAX);
        Sizes {
            piece_bytes: 4 << 20,
            slots: 2 * threads,
            block_bytes: 16 << 20,
            step_bytes: 1 << 30,
            threads,
        }
    }
}
