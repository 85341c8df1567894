//! What happened, kept until its owner takes it, and told to an observer if there is one.

use std::fmt;
use std::sync::Arc;

use crate::event::{Action, Event};
use crate::recent_events::RecentEvents;

/// Is told of events, in order and of those of one call together, by the thread whose call caused them: of
/// memory that leaves before it does, of all else when the owner of the allocator asks for that.
pub type Observer = Arc<dyn Fn(&[Event]) + Send + Sync>;

/// Events in their order.
#[derive(Default)]
pub(crate) struct EventLog {
    /// Whether anyone wants events at all.
    pub(crate) enabled: bool,
    events: Vec<Event>,
    /// How many of them, the first ones, the observer was told of already.
    told: usize,
    observer: Option<Observer>,
    /// Those that are kept whether or not anyone wants them.
    pub(crate) recent: RecentEvents,
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut log = f.debug_struct("EventLog");
        log.field("enabled", &self.enabled)
            .field("events", &self.events)
            .field("told", &self.told);
        log.finish_non_exhaustive()
    }
}

/// A point in a log, for [`EventLog::take_back`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogMark {
    events: usize,
    recent: usize,
}

impl EventLog {
    /// Has `observer` told of every event from now on, or nobody; then none are kept either.
    pub(crate) fn observe(&mut self, observer: Option<Observer>) {
        self.enabled = observer.is_some();
        self.observer = observer;
    }

    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.observer.is_some()
    }

    pub(crate) fn push(&mut self, event: Event) {
        debug_assert!(self.enabled, "nobody asked for events");
        self.events.push(event);
    }

    /// Tells the observer, if there is one, what it was not told yet, and keeps it: it may have to be
    /// taken back.
    pub(crate) fn tell(&mut self) {
        if let Some(observer) = &self.observer {
            let untold = &self.events[self.told..];
            if !untold.is_empty() {
                observer(untold);
                self.told = self.events.len();
            }
        }
    }

    /// Returns the events that nobody was told of, and forgets all.
    pub(crate) fn take(&mut self) -> std::vec::Drain<'_, Event> {
        debug_assert!(self.told <= self.events.len());
        self.events.drain(..std::mem::take(&mut self.told));
        self.events.drain(..)
    }

    #[inline]
    pub(crate) fn mark(&self) -> LogMark {
        LogMark {
            events: self.events.len(),
            recent: self.recent.count(),
        }
    }

    /// Takes back the events since `mark`, of a call that failed. What the observer was told of already is
    /// corrected, the last event first: what it hears next makes its picture what it was at the mark.
    #[cold]
    pub(crate) fn take_back(&mut self, mark: LogMark) {
        debug_assert!(mark.events <= self.events.len(), "a mark is of this log");
        debug_assert!(self.told <= self.events.len());
        self.recent.take_back(mark.recent);
        let told = self.told.max(mark.events);
        self.events.truncate(told);
        for index in (mark.events..told).rev() {
            let event = self.events[index];
            let mut correct = |action| self.events.push(Event { action, ..event });
            match event.action {
                Action::SegmentFree => correct(Action::SegmentAlloc),
                Action::SegmentUnmap => correct(Action::SegmentMap),
                Action::FreeCompleted => {
                    correct(Action::Alloc);
                    // Where the program's own free stands, the block waits again.
                    if index == mark.events {
                        correct(Action::FreeRequested);
                    }
                }
                // With the event above, the block is held again.
                Action::FreeRequested => {}
                Action::Alloc => {
                    correct(Action::FreeRequested);
                    correct(Action::FreeCompleted);
                }
                Action::SegmentAlloc => correct(Action::SegmentFree),
                Action::SegmentMap => correct(Action::SegmentUnmap),
                // That these were so stays true.
                Action::Snapshot
                | Action::OutOfMemory
                | Action::SegmentPaused
                | Action::SegmentResumed => {}
            }
        }
    }
}
