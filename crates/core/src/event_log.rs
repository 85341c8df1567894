//! What happened, kept until its owner takes it, and notified to an observer if there is one.

use std::fmt;
use std::sync::Arc;

use crate::event::{Action, Event};
use crate::recent_events::RecentEvents;

/// Is notified of events, in order and of those of one call together, by the thread whose call caused them: of
/// memory that leaves before it does, of all else when the owner of the allocator asks for that.
pub type Observer = Arc<dyn Fn(&[Event]) + Send + Sync>;

/// Events in their order.
#[derive(Default)]
pub(crate) struct EventLog {
    /// Whether anyone wants events at all.
    pub(crate) enabled: bool,
    events: Vec<Event>,
    /// How many of them, the first ones, the observer was notified of already.
    notified: usize,
    observer: Option<Observer>,
    /// Those that are kept whether or not anyone wants them.
    pub(crate) recent: RecentEvents,
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut log = f.debug_struct("EventLog");
        log.field("enabled", &self.enabled)
            .field("events", &self.events)
            .field("notified", &self.notified);
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
    /// Has `observer` notified of every event from now on, or nobody; then none are kept either.
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

    /// Tells the observer, if there is one, what it was not notified yet, and keeps it: it may have to be
    /// taken back.
    pub(crate) fn notify(&mut self) {
        if let Some(observer) = &self.observer {
            let unseen = &self.events[self.notified..];
            if !unseen.is_empty() {
                observer(unseen);
                self.notified = self.events.len();
            }
        }
    }

    /// Returns the events that nobody was notified of, and forgets all.
    pub(crate) fn take(&mut self) -> std::vec::Drain<'_, Event> {
        debug_assert!(self.notified <= self.events.len());
        self.events.drain(..std::mem::take(&mut self.notified));
        self.events.drain(..)
    }

    #[inline]
    pub(crate) fn mark(&self) -> LogMark {
        LogMark {
            events: self.events.len(),
            recent: self.recent.count(),
        }
    }

    /// Takes back the events since `mark`, of a call that failed. What the observer was notified of already is
    /// corrected, the last event first: what it hears next makes its picture what it was at the mark.
    #[cold]
    pub(crate) fn take_back(&mut self, mark: LogMark) {
        debug_assert!(mark.events <= self.events.len(), "a mark is of this log");
        debug_assert!(self.notified <= self.events.len());
        self.recent.take_back(mark.recent);
        let notified = self.notified.max(mark.events);
        self.events.truncate(notified);
        for index in (mark.events..notified).rev() {
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
