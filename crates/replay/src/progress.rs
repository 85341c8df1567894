//! Reports how far a replay is.

/// Receives reports of a replay's progress. `()` ignores them.
pub trait Progress: Sync {
    /// Reports that `events` more recorded events have been replayed.
    fn advance(&self, events: u64);

    /// Announces that `events` will be replayed in addition to those of the recording. Trial replays find what the
    /// recording does not say: about fifteen for a limit, up to two hundred for the ages of initial segments and
    /// blocks.
    fn expect(&self, events: u64) {
        let _ = events;
    }
}

impl Progress for () {
    fn advance(&self, _events: u64) {}
}
