//! The last events of an allocator. After an out-of-memory error, they are replayed with other settings to
//! explain it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::domain::{DomainId, Domains};
use crate::event::{Action, Event};
use crate::units::{Bytes, DeviceAddress};

/// How many events are kept: a few steps of a training job, in 512 KiB.
const KEPT: usize = 1 << 14;

/// The clock advances once for this many events.
const PER_TICK: usize = 1 << 6;

/// The clock that orders the events of several allocators of one device.
///
/// It advances with every driver event, so that driver events of all allocators are in order. It also advances
/// once per 64 other events, so that the events of allocators that are busy at the same time are interleaved.
#[derive(Debug, Default)]
pub struct EventClock {
    is_running: AtomicBool,
    time: AtomicU64,
}

impl EventClock {
    /// Starts keeping the events of all its allocators. This costs up to a tenth of the time of a request and its
    /// free, so it starts only when the events may be needed.
    pub fn start(&self) {
        self.is_running.store(true, Ordering::Relaxed);
    }

    /// Returns whether events are kept.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Relaxed)
    }

    fn tick(&self) -> u64 {
        self.time.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// The last events, in 32 bytes each. A free that completes at once is one record for both of its events.
#[derive(Debug, Default)]
pub(crate) struct RecentEvents {
    /// `None` if no events are kept.
    clock: Option<Arc<EventClock>>,
    /// Number of events in all.
    count: usize,
    /// The number of the first event that is still needed.
    oldest: usize,
    /// The time at which the event before `oldest` was removed.
    forgotten_at: u64,
    /// The last events: number `n` is at `n % KEPT`.
    records: Vec<Record>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    time: u64,
    address: DeviceAddress,
    size: Bytes,
    domain: DomainId,
    action: Action,
}

/// The recent events of one allocator.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RecentPast {
    /// The last events, oldest first, with the time of the [`EventClock`]. A pause or resume of a pool is one event
    /// without address or size: it applies to every segment that the pool has then.
    pub events: Vec<(u64, Event)>,
    /// The time since which the events are complete; 0 if none is missing.
    pub since: u64,
}

impl RecentEvents {
    pub(crate) fn keep(&mut self, clock: Arc<EventClock>) {
        self.clock = Some(clock);
    }

    #[inline(always)]
    pub(crate) fn push(
        &mut self,
        action: Action,
        domain: DomainId,
        address: DeviceAddress,
        size: Bytes,
    ) {
        let Some(clock) = self.clock.as_ref().filter(|clock| clock.is_running()) else {
            return;
        };
        self.count += 1;
        // Times are in order because of the lane's lock and the driver's.
        let is_of_driver = action.is_segment() || action.is_pause();
        let time = if is_of_driver || self.count.is_multiple_of(PER_TICK) {
            clock.tick()
        } else {
            clock.time.load(Ordering::Relaxed)
        };
        let record = Record {
            time,
            address,
            size,
            domain,
            action,
        };
        match self.records.get_mut((self.count - 1) % KEPT) {
            Some(oldest) => *oldest = record,
            None => self.records.push(record),
        }
    }

    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Removes the events after the first `count`.
    pub(crate) fn truncate(&mut self, count: usize) {
        debug_assert!(
            count <= self.count,
            "only events that happened can be removed"
        );
        let first = self.first();
        if first > self.oldest {
            self.forgotten_at = self.records[first % KEPT].time;
            self.oldest = first;
        }
        self.count = count;
        if self.records.len() < KEPT {
            self.records.truncate(count);
        }
        debug_assert!(self.records.len() <= KEPT);
    }

    /// Removes all events, because some are about a domain that ends.
    pub(crate) fn forget(&mut self) {
        self.oldest = self.count;
        let clock = self.clock.as_ref();
        self.forgotten_at = clock.map_or(0, |clock| clock.tick());
    }

    /// Returns the number of the first kept event.
    fn first(&self) -> usize {
        self.oldest.max(self.count.saturating_sub(KEPT))
    }

    /// Returns the kept events.
    pub(crate) fn past(&self, domains: &Domains) -> RecentPast {
        let first = self.first();
        let since = if first > self.oldest {
            self.records[first % KEPT].time
        } else {
            self.forgotten_at
        };
        let records = (first..self.count).map(|number| self.records[number % KEPT]);
        let mut waiting = BTreeSet::new();
        let mut events = Vec::new();
        for record in records {
            let domain = domains.domain(record.domain);
            let event = Event {
                action: record.action,
                pool: domains.pool(domain.pool).id,
                address: record.address,
                size: record.size,
                stream: domain.stream,
            };
            let is_both = match record.action {
                Action::FreeRequested => !waiting.insert(record.address),
                Action::FreeCompleted => !waiting.remove(&record.address),
                _ => false,
            };
            if is_both {
                let action = Action::FreeRequested;
                events.push((record.time, Event { action, ..event }));
            }
            events.push((record.time, event));
        }
        RecentPast { events, since }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recent() -> RecentEvents {
        let mut recent = RecentEvents::default();
        let clock = EventClock::default();
        clock.start();
        recent.keep(Arc::new(clock));
        recent
    }

    /// Adds events whose addresses are their numbers.
    fn push(recent: &mut RecentEvents, numbers: std::ops::Range<usize>) {
        for number in numbers {
            let address = DeviceAddress(number as u64);
            recent.push(Action::Alloc, DomainId::DEFAULT, address, Bytes(1));
        }
    }

    fn kept(recent: &RecentEvents) -> Vec<usize> {
        let events = recent.past(&Domains::new()).events.into_iter();
        { events.map(|(_, event)| usize::try_from(event.address.get())) }
            .collect::<Result<_, _>>()
            .unwrap_or_default()
    }

    #[test]
    fn nothing_is_kept_unless_asked_for() {
        let mut recent = RecentEvents::default();
        push(&mut recent, 0..10);
        let clock = Arc::new(EventClock::default());
        recent.keep(Arc::clone(&clock));
        push(&mut recent, 10..20);
        assert_eq!(kept(&recent), [0; 0]);
        clock.start();
        push(&mut recent, 20..22);
        assert_eq!(kept(&recent), [20, 21]);
    }

    #[test]
    fn the_last_are_kept() {
        let mut recent = recent();
        push(&mut recent, 0..100);
        assert_eq!(kept(&recent), (0..100).collect::<Vec<_>>());
        assert_eq!(recent.past(&Domains::new()).since, 0);
        push(&mut recent, 100..3 * KEPT + 7);
        assert_eq!(
            kept(&recent),
            (2 * KEPT + 7..3 * KEPT + 7).collect::<Vec<_>>()
        );
        // A tick for each 64 events.
        let since = (2 * KEPT + 7) / PER_TICK;
        assert_eq!(recent.past(&Domains::new()).since, since as u64);
    }

    #[test]
    fn the_clock_goes_on_with_dozens_of_events_and_with_each_of_the_driver() {
        let clock = Arc::new(EventClock::default());
        clock.start();
        let mut busy = RecentEvents::default();
        busy.keep(Arc::clone(&clock));
        let mut other = RecentEvents::default();
        other.keep(clock);
        push(&mut busy, 0..200);
        let (action, address) = (Action::SegmentFree, DeviceAddress(1));
        other.push(action, DomainId::DEFAULT, address, Bytes(1));
        push(&mut busy, 200..201);
        let times = |recent: &RecentEvents| {
            let events = recent.past(&Domains::new()).events;
            events.into_iter().map(|(time, _)| time).collect::<Vec<_>>()
        };
        let counted = |wanted: u64| times(&busy).iter().filter(|&&time| time == wanted).count();
        assert_eq!([0, 1, 2, 3, 4].map(counted), [63, 64, 64, 9, 1]);
        assert_eq!(times(&other), [4]);
    }

    #[test]
    fn what_is_taken_back_was_never_there() {
        for before in [10, KEPT - 1, KEPT, 2 * KEPT + 5] {
            let mut recent = recent();
            push(&mut recent, 0..before + 3);
            recent.truncate(before);
            // The oldest events were overwritten meanwhile.
            let first = (before + 3).saturating_sub(KEPT);
            assert_eq!(kept(&recent), (first..before).collect::<Vec<_>>());
            push(&mut recent, before..before + 2);
            assert_eq!(kept(&recent), (first..before + 2).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_forgotten_is_said_to_be_missing() {
        let mut recent = recent();
        push(&mut recent, 0..10);
        recent.forget();
        push(&mut recent, 10..12);
        let past = recent.past(&Domains::new());
        assert_eq!((past.events.len(), past.since), (2, 1));
    }
}
