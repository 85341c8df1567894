//! Logical time: the host's clock, the work queued on each stream, and events.

use std::collections::BTreeMap;

use lowtide_core::{EventHandle, Stream};

/// The host's clock, the streams and the events. All times are nanoseconds since the start.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    host_ns: u64,
    streams: BTreeMap<Stream, Timeline>,
    events: BTreeMap<EventHandle, Event>,
    /// The number of events that were ever recorded.
    recorded: u64,
}

/// The state of one stream.
#[derive(Debug, Default)]
struct Timeline {
    /// The time when the work queued so far is done.
    done_ns: u64,
    /// Whether events recorded now are held until [`Clock::complete`].
    held: bool,
}

#[derive(Debug)]
struct Event {
    stream: Stream,
    /// The time when the work before the event is done.
    passes_ns: u64,
    /// Whether the event is held: it does not pass, whatever the time, before [`Clock::complete`] or a wait.
    held: bool,
}

impl Clock {
    pub(crate) fn now_ns(&self) -> u64 {
        self.host_ns
    }

    pub(crate) fn advance(&mut self, ns: u64) {
        self.host_ns = self.host_ns.saturating_add(ns);
    }

    /// Queues work of `ns` on a stream.
    pub(crate) fn launch(&mut self, stream: Stream, ns: u64) {
        let timeline = self.streams.entry(stream).or_default();
        timeline.done_ns = timeline.done_ns.max(self.host_ns).saturating_add(ns);
    }

    /// Makes later work of `stream` wait for the current work of `other`.
    pub(crate) fn wait_for(&mut self, stream: Stream, other: Stream) {
        let other_done_ns = self.streams.get(&other).map_or(0, |other| other.done_ns);
        let timeline = self.streams.entry(stream).or_default();
        timeline.done_ns = timeline.done_ns.max(other_done_ns);
    }

    /// Holds the events that are recorded in `stream` from now on until [`Clock::complete`].
    pub(crate) fn hold(&mut self, stream: Stream) {
        self.streams.entry(stream).or_default().held = true;
    }

    /// Lets the events of `stream` pass by time again.
    pub(crate) fn resume(&mut self, stream: Stream) {
        self.streams.entry(stream).or_default().held = false;
        self.end_holds(|event| event.stream == stream);
    }

    pub(crate) fn record(&mut self, stream: Stream) -> EventHandle {
        let timeline = self.streams.entry(stream).or_default();
        let event = Event {
            stream,
            passes_ns: timeline.done_ns,
            held: timeline.held,
        };
        let handle = EventHandle(self.recorded);
        self.recorded += 1;
        self.events.insert(handle, event);
        handle
    }

    /// Returns the handle of the event that is recorded next.
    pub(crate) fn next_event(&self) -> EventHandle {
        EventHandle(self.recorded)
    }

    /// Returns whether an event has passed, or `None` if there is no such event.
    pub(crate) fn passed(&self, handle: EventHandle) -> Option<bool> {
        let event = self.events.get(&handle)?;
        Some(!event.held && event.passes_ns <= self.host_ns)
    }

    /// Makes an event pass now. Returns whether the event exists.
    pub(crate) fn complete(&mut self, handle: EventHandle) -> bool {
        let Some(event) = self.events.get_mut(&handle) else {
            return false;
        };
        event.held = false;
        event.passes_ns = event.passes_ns.min(self.host_ns);
        true
    }

    /// Waits for an event. Returns whether the event exists.
    pub(crate) fn wait_for_event(&mut self, handle: EventHandle) -> bool {
        let Some(event) = self.events.get_mut(&handle) else {
            return false;
        };
        event.held = false;
        self.host_ns = self.host_ns.max(event.passes_ns);
        true
    }

    /// Makes later work of `stream` wait for an event. Returns whether the event exists. A stream that waits for a
    /// held event is held itself.
    pub(crate) fn wait_in_stream(&mut self, stream: Stream, handle: EventHandle) -> bool {
        let Some(event) = self.events.get(&handle) else {
            return false;
        };
        let timeline = self.streams.entry(stream).or_default();
        timeline.done_ns = timeline.done_ns.max(event.passes_ns);
        timeline.held |= event.held;
        true
    }

    /// Waits for the work of one stream.
    pub(crate) fn wait_for_stream(&mut self, stream: Stream) {
        let done_ns = self
            .streams
            .get(&stream)
            .map_or(0, |timeline| timeline.done_ns);
        self.host_ns = self.host_ns.max(done_ns);
        self.end_holds(|event| event.stream == stream);
    }

    /// Waits for the work of every stream.
    pub(crate) fn wait_for_device(&mut self) {
        let done_ns = self
            .streams
            .values()
            .map(|timeline| timeline.done_ns)
            .max()
            .unwrap_or(0);
        self.host_ns = self.host_ns.max(done_ns);
        self.end_holds(|_| true);
    }

    /// Removes an event. Returns whether the event existed.
    pub(crate) fn release(&mut self, handle: EventHandle) -> bool {
        self.events.remove(&handle).is_some()
    }

    /// Returns the events that were not released, oldest first.
    pub(crate) fn events(&self) -> impl Iterator<Item = (EventHandle, Stream)> {
        self.events
            .iter()
            .map(|(&handle, event)| (handle, event.stream))
    }

    fn end_holds(&mut self, which: impl Fn(&Event) -> bool) {
        for event in self.events.values_mut().filter(|event| which(event)) {
            event.held = false;
        }
    }
}
