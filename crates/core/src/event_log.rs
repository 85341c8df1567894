//! Events, kept until their owner takes them. An observer, if there is one, is notified of them.

use std::fmt;
use std::sync::Arc;

use crate::event::{Action, Event};
use crate::recent_events::{EventClock, RecentEvents};

/// A function that is notified of events, in order, by the thread whose call caused them. Events of one call are
/// reported together. Releases are reported before the memory is released; other events when the allocator's owner
/// asks for it.
pub type Observer = Arc<dyn Fn(&[Event]) + Send + Sync>;

/// The events of a lane, in their order.
#[derive(Default)]
pub struct EventLog {
    /// Whether events are recorded.
    pub(crate) enabled: bool,
    events: Vec<Event>,
    /// How many of them, from the first, were already reported to the observer.
    notified: usize,
    observer: Option<Observer>,
    /// The last events, which are kept even if events are not recorded.
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

/// A point in a log, for [`EventLog::undo`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogMark {
    events: usize,
    recent: usize,
}

impl EventLog {
    /// Starts or stops recording events.
    pub fn record(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// Keeps the last events, some thousands, for [`Device::recent_past`](crate::Device::recent_past), while
    /// `clock` is running. Lanes of one device share a clock, which orders their events.
    pub fn keep_recent(&mut self, clock: Arc<EventClock>) {
        self.recent.keep(clock);
    }

    /// Sets the observer that is notified of every event from now on; `None` removes it, and no events are recorded.
    /// It is notified of a release to the driver or to a pool's source just before that happens, and of all earlier
    /// events with it. It is notified of other events when [`Lane::notify_and_clear_peak`](crate::Lane::notify_and_clear_peak) or
    /// [`Device::sync_peaks`](crate::Device::sync_peaks) is called. If the driver refuses a release, the observer is
    /// notified of events that undo those of the call.
    pub fn observe(&mut self, observer: Option<Observer>) {
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

    /// Notifies the observer, if there is one, of new events. The events are kept, because a failed call takes them
    /// back.
    pub(crate) fn notify(&mut self) {
        if let Some(observer) = &self.observer {
            let unseen = &self.events[self.notified..];
            if !unseen.is_empty() {
                observer(unseen);
                self.notified = self.events.len();
            }
        }
    }

    /// Returns the recorded events that no observer was notified of, and removes all.
    pub fn take(&mut self) -> std::vec::Drain<'_, Event> {
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

    /// Undoes the events of a failed call, those since `mark`. For events that the observer was already
    /// notified of, it is notified of their opposites, the last first. Its state is then as it was at the mark.
    #[cold]
    pub(crate) fn undo(&mut self, mark: LogMark) {
        debug_assert!(mark.events <= self.events.len(), "a mark is of this log");
        debug_assert!(self.notified <= self.events.len());
        self.recent.truncate(mark.recent);
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
                    // At the program's own free, the block is pending again.
                    if index == mark.events {
                        correct(Action::FreeRequested);
                    }
                }
                // With the event above, the block is allocated again.
                Action::FreeRequested => {}
                Action::Alloc => {
                    correct(Action::FreeRequested);
                    correct(Action::FreeCompleted);
                }
                Action::SegmentAlloc => correct(Action::SegmentFree),
                Action::SegmentMap => correct(Action::SegmentUnmap),
                // These events stay true.
                Action::Snapshot
                | Action::OutOfMemory
                | Action::SegmentPaused
                | Action::SegmentResumed
                | Action::Annotate => {}
            }
        }
    }
}
