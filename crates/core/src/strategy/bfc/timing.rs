//! The count of frees, and the safe frontier in that count.

/// Counts frees.
#[derive(Debug)]
pub(super) struct Timing {
    /// The count of the latest free.
    count: u64,
    /// How many frees the device is behind.
    lag: u64,
}

impl Timing {
    /// Returns a counter before the first free, for a device that is `lag` frees behind.
    pub(super) fn new(lag: u64) -> Timing {
        Timing { count: 0, lag }
    }

    /// Counts a free and returns its count, from 1 on.
    pub(super) fn count_free(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    /// Returns the frontier: the device has passed all frees up to this count.
    pub(super) fn frontier(&self) -> u64 {
        self.count.saturating_sub(self.lag)
    }
}
