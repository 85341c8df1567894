//! Which work of other streams a stream's later work comes after, by the events that it waited for.

use std::collections::BTreeMap;

use lowtide_core::{EventHandle, Stream};

/// Until which time of each stream work is done before something.
type Times = BTreeMap<Stream, u64>;

/// The order between streams.
#[derive(Debug, Default)]
pub(super) struct Order {
    after: BTreeMap<Stream, Times>,
    events: BTreeMap<EventHandle, Times>,
}

impl Order {
    /// Records an event behind the work of a stream, which is done at `done_ns`.
    pub(super) fn record(&mut self, event: EventHandle, stream: Stream, done_ns: u64) {
        let mut times = self.after.get(&stream).cloned().unwrap_or_default();
        times.insert(stream, done_ns);
        self.events.insert(event, times);
    }

    /// Makes later work of a stream wait for an event. Returns when the event passes at the latest.
    pub(super) fn wait(&mut self, stream: Stream, event: EventHandle) -> u64 {
        let times = self.events.get(&event).cloned().unwrap_or_default();
        let after = self.after.entry(stream).or_default();
        for (&other, &time) in &times {
            let known = after.entry(other).or_insert(0);
            *known = time.max(*known);
        }
        times.values().copied().max().unwrap_or(0)
    }

    /// Returns whether later work of a stream comes after work of another that ends at a time.
    pub(super) fn is_after(&self, stream: Stream, other: Stream, end_ns: u64) -> bool {
        let times = self.after.get(&stream);
        times.is_some_and(|times| times.get(&other).is_some_and(|&time| end_ns <= time))
    }
}
