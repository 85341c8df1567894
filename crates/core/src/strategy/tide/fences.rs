//! The progress of each stream: which of its freed memory queued work may still use.

use std::collections::{BTreeMap, VecDeque};

use crate::driver::{Driver, DriverError, EventHandle};
use crate::units::Stream;

/// The most events of a stream. If a job is bound by its GPU, its CPU thread runs ahead by fewer.
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
    /// Whether the stream exists until the process ends.
    is_kept: bool,
    /// When memory was last freed in the stream.
    freed: u64,
    /// Work queued before that time is done.
    passed: u64,
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
                is_kept: false,
                freed: 0,
                passed: 0,
                events: VecDeque::new(),
            });
        }
        id
    }

    /// Records that memory was freed in a stream.
    #[inline]
    pub(super) fn freed(&mut self, id: FenceId, now: u64) {
        let fence = &mut self.fences[id.0];
        debug_assert!(fence.freed <= now, "times only rise");
        fence.freed = now;
    }

    /// Returns whether all work queued in a stream before a time is known to be done. Never calls the driver.
    #[inline]
    pub(super) fn has_passed(&self, id: FenceId, time: u64) -> bool {
        let fence = &self.fences[id.0];
        debug_assert!(
            time <= fence.freed,
            "a stream knows of all its memory that was freed"
        );
        time <= fence.passed
    }

    /// Returns whether a driver call may show that more of a stream's work is done.
    #[inline]
    pub(super) fn may_have_passed(&self, id: FenceId) -> bool {
        let fence = &self.fences[id.0];
        !fence.events.is_empty() || fence.is_kept && fence.passed < fence.freed
    }

    /// Records an event in `own`, which must exist, and in every kept stream. Then queries the oldest events of all
    /// streams. Does nothing while any stream that it would record in is captured.
    ///
    /// Other streams may be destroyed. Querying such a stream crashes the driver. Their memory serves other streams
    /// after their own next miss, or after [`Fences::synchronize`].
    pub(super) fn update(&mut self, driver: &mut impl Driver, own: Option<FenceId>) {
        if self.is_captured(driver, own) {
            return;
        }
        for fence in self.existing(own) {
            fence.record(driver);
        }
        for fence in &mut self.fences {
            while fence.poll(driver) {}
        }
    }

    /// Returns whether `own`, which must exist, or a kept stream is captured. Another event would break the capture.
    pub(super) fn is_captured(&mut self, driver: &mut impl Driver, own: Option<FenceId>) -> bool {
        for fence in &mut self.fences {
            fence.is_kept = driver.is_kept(fence.stream);
        }
        let mut streams = self.existing(own).map(|fence| fence.stream);
        streams.any(|stream| driver.is_in_capture(stream))
    }

    /// Returns `own` and the kept streams, for which driver calls are safe.
    fn existing(&mut self, own: Option<FenceId>) -> impl Iterator<Item = &mut Fence> {
        let fences = (0..).map(FenceId).zip(&mut self.fences);
        let existing = fences.filter(move |(id, fence)| fence.is_kept || Some(*id) == own);
        existing.map(|(_, fence)| fence)
    }

    /// Waits until all work of the device is done. Not allowed during a capture.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub(super) fn synchronize(&mut self, driver: &mut impl Driver) -> Result<(), DriverError> {
        driver.synchronize_device()?;
        for fence in &mut self.fences {
            fence.passed = fence.freed;
            let events = fence.events.drain(..);
            events.for_each(|(_, event)| driver.release_event(event));
        }
        Ok(())
    }
}

impl Fence {
    /// Records an event, unless the latest one covers all freed memory. If the driver refuses, the next miss tries
    /// again.
    fn record(&mut self, driver: &mut impl Driver) {
        let recorded = self.events.back().map_or(self.passed, |&(time, _)| time);
        if recorded < self.freed
            && self.events.len() < EVENTS_MAX
            && let Ok(event) = driver.record_event(self.stream)
        {
            // Another thread may just have begun a capture. Querying an event recorded in it would break it.
            if driver.is_in_capture(self.stream) {
                driver.release_event(event);
            } else {
                self.events.push_back((self.freed, event));
            }
        }
    }

    /// Queries the oldest event. Returns whether to query the next one: this one has passed, or cannot be queried.
    /// Memory freed before it then passes with a later one.
    fn poll(&mut self, driver: &mut impl Driver) -> bool {
        let Some(&(time, event)) = self.events.front() else {
            return false;
        };
        debug_assert!(
            self.passed < time && time <= self.freed,
            "an event shows more than is known, and no more than was freed"
        );
        match driver.query_event(event) {
            Ok(false) => return false,
            Ok(true) => self.passed = time,
            Err(_) => {}
        }
        driver.release_event(event);
        self.events.pop_front();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::test_driver::TestDriver;
    use crate::units::Bytes;

    #[test]
    fn an_event_in_a_capture_that_another_thread_began_shows_nothing() {
        let mut driver = TestDriver::new(Bytes::gib(1));
        let mut fences = Fences::default();
        let own = fences.of_stream(Stream(1));
        fences.freed(own, 1);
        driver.captured_from = 1;
        fences.update(&mut driver, Some(own));
        assert!(!fences.has_passed(own, 1));
        driver.captured_from = u64::MAX;
        assert!(!fences.may_have_passed(own), "no event is left to ask for");
        fences.update(&mut driver, Some(own));
        assert!(fences.has_passed(own, 1));
        assert_eq!((driver.events, driver.released_events), (2, 2));
    }
}
