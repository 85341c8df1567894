//! How far each stream has come: which of its freed memory no queued work uses any more.

use std::collections::{BTreeMap, VecDeque};

use crate::driver::{Driver, DriverError, EventHandle};
use crate::units::Stream;

/// A stream has this many events at most. The host of a job that is bound by its card runs ahead of it by less.
const EVENTS_MAX: usize = 64;

/// The number of a stream in [`Fences`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct FenceId(usize);

/// The streams in which memory was freed.
#[derive(Debug, Default)]
pub(super) struct Fences {
    fences: Vec<Fence>,
    by_stream: BTreeMap<Stream, FenceId>,
}

/// A stream. Times are those of [`Pages::now`](crate::pages::Pages::now).
#[derive(Debug)]
struct Fence {
    stream: Stream,
    /// When memory was last freed in the stream.
    freed: u64,
    /// Work queued before that time is done.
    passed: u64,
    /// What was freed when the driver last refused an event; zero if it did not.
    refused: u64,
    /// Events that have not passed, oldest first, each with the time when it was recorded.
    events: VecDeque<(u64, EventHandle)>,
}

impl Fences {
    /// Returns the number of a stream. O(log n) for n streams.
    pub(super) fn of_stream(&mut self, stream: Stream) -> FenceId {
        let next = FenceId(self.fences.len());
        let id = *self.by_stream.entry(stream).or_insert(next);
        if id == next {
            self.fences.push(Fence {
                stream,
                freed: 0,
                passed: 0,
                refused: 0,
                events: VecDeque::new(),
            });
        }
        id
    }

    /// Notes that memory was freed in a stream.
    #[inline]
    pub(super) fn freed(&mut self, id: FenceId, now: u64) {
        self.fences[id.0].freed = now;
    }

    /// Returns whether the work queued in a stream before a time is known to be done. Never calls the driver.
    #[inline]
    pub(super) fn has_passed(&self, id: FenceId, time: u64) -> bool {
        time <= self.fences[id.0].passed
    }

    /// Records an event in each stream in which memory was freed since its last one, and asks which events have
    /// passed. Does nothing while one of the streams is captured.
    ///
    /// A stream that the driver refuses an event is left as it is: the program may have destroyed it, and others need
    /// not fail for that. Its memory serves others after [`Fences::synchronize`].
    pub(super) fn update(&mut self, driver: &mut impl Driver) {
        if self.has_captured(driver) {
            return;
        }
        for fence in &mut self.fences {
            if fence.events.len() < EVENTS_MAX && fence.is_known() {
                fence.record_or_note(driver);
            }
            while fence.poll(driver) == Ok(true) {}
        }
    }

    /// Returns whether one of the streams is captured. Events from outside would break the capture.
    pub(super) fn has_captured(&self, driver: &mut impl Driver) -> bool {
        let mut known = self.fences.iter().filter(|fence| fence.is_known());
        known.any(|fence| driver.capture_of(fence.stream).is_some())
    }

    /// Waits until all work of a stream is done. Not allowed during a capture.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub(super) fn synchronize(
        &mut self,
        driver: &mut impl Driver,
        id: FenceId,
    ) -> Result<(), DriverError> {
        let fence = &mut self.fences[id.0];
        // Also if everything that was freed has passed: a graph may use a pool's memory later.
        driver.synchronize_stream(fence.stream)?;
        fence.passed = fence.freed;
        let events = fence.events.drain(..);
        events.for_each(|(_, event)| driver.release_event(event));
        Ok(())
    }
}

impl Fence {
    /// Returns whether the driver may know the stream: it did not refuse an event since memory was last freed there.
    fn is_known(&self) -> bool {
        self.refused == 0 || self.refused < self.freed
    }

    /// Records an event, unless the latest one shows all that was freed. Notes whether the driver refuses it.
    fn record_or_note(&mut self, driver: &mut impl Driver) {
        self.refused = self.record(driver).map_or(self.freed, |()| 0);
    }

    /// Records an event, unless the latest one shows all that was freed.
    fn record(&mut self, driver: &mut impl Driver) -> Result<(), DriverError> {
        let recorded = self.events.back().map_or(self.passed, |&(time, _)| time);
        if recorded < self.freed {
            let event = driver.record_event(self.stream)?;
            self.events.push_back((self.freed, event));
        }
        Ok(())
    }

    /// Asks for the oldest event. Returns whether it has passed.
    fn poll(&mut self, driver: &mut impl Driver) -> Result<bool, DriverError> {
        let Some(&(time, event)) = self.events.front() else {
            return Ok(false);
        };
        let has_passed = driver.query_event(event)?;
        if has_passed {
            driver.release_event(event);
            self.events.pop_front();
            self.passed = time;
        }
        Ok(has_passed)
    }
}
