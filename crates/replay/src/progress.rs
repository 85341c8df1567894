//! How far a replay is.

/// Hears how far a replay is. `()` does not listen.
pub trait Progress: Sync {
    /// Says that `events` more recorded events have been replayed.
    fn advance(&self, events: u64);

    /// Says that `events` will be replayed besides those of the recording: what it does not say is found by replaying it,
    /// a limit up to some fifteen times, the ages of what was there before up to two hundred.
    fn expect(&self, events: u64) {
        let _ = events;
    }
}

impl Progress for () {
    fn advance(&self, _events: u64) {}
}
