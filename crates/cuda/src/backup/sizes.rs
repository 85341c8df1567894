//! How much of a backup is done at once.

use std::thread;

/// How much is done at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// What goes through a slot of the ring, and what is written to a file at once: the link's time for it
    /// is ten times what it takes to begin a copy, and disks are at full speed.
    pub(super) piece_bytes: usize,
    /// How many slots the ring may have. To page-lock all of it takes some 30 ms once.
    pub(super) slots: usize,
    /// What is page-locked at once, a multiple of `piece_bytes`: other threads may wait for the driver as
    /// long as that takes, some milliseconds.
    pub(super) block_bytes: usize,
    /// What is saved at once in memory that is page-locked, or what of a range is more, a multiple of `block_bytes`:
    /// little beside a large backup, most of which leaves the device meanwhile, and a thousand times what a step takes
    /// more.
    pub(super) step_bytes: usize,
    /// How many threads fill and empty slots.
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
