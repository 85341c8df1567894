//! A bounded queue of events. Threads that allocate are the producers; one thread is the consumer.
//!
//! Producers claim slots for a batch with a single `fetch_add`. So the events of one call stay together, and
//! slots are in the order of events: if one event happens after another thread's, its slot is later. Each slot
//! has a flag that says when it is filled.
//!
//! There is no lock and no allocation. No event is lost: if the queue is full, producers wait. Dropping events
//! would be cheaper for the job, but would make the rest of the recording useless, because the memory held at any
//! moment is the sum of all events before.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};

/// The capacity: some milliseconds of a program that only allocates.
const PLACES: usize = 1 << 16;
/// The number of events between two wake-ups of the consumer.
const WAKE_EVERY: u64 = PLACES as u64 / 4;
/// Marks an announcement, in place of an event's action.
const ANNOUNCEMENT: u64 = 15;

/// An event's last word: the action, then these.
const ACTION_MASK: u64 = 15;
const DEVICE_SHIFT: u32 = 4;
const METADATA_SHIFT: u32 = 12;
const STACK_SHIFT: u32 = 32;

/// The first number of a metadata text that an entry has no room for.
pub(super) const METADATA_END: u32 = 1 << (STACK_SHIFT - METADATA_SHIFT);

/// An entry of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Entry {
    /// An event of a device.
    Happened {
        device: u8,
        event: Event,
        time_us: i64,
        /// The call site, as a number of [`stacks`](super::stacks).
        stack: u32,
        /// The program's text, as a number of [`metadata`](super::metadata).
        metadata: u32,
    },
    /// An announcement that the recorder has under this number.
    Announced(u64),
}

pub(super) struct Ring {
    places: Box<[Place]>,
    /// The number of the next entry to put.
    next: Line<AtomicU64>,
    /// The number of the next entry to take.
    oldest: Line<AtomicU64>,
    /// Whether the consumer has stopped.
    is_closed: AtomicBool,
    /// Whether the consumer is busy with other work that takes long.
    is_delayed: AtomicBool,
    /// The minimum time that a producer waits for room.
    patience: Duration,
}

/// The queue is full, and the consumer took nothing for too long.
#[derive(Debug)]
pub(super) struct Stuck;

/// Aligned to two cache lines, because processors fetch them in pairs.
#[repr(align(128))]
struct Line<T>(T);

/// A cache line.
#[derive(Default)]
#[repr(align(64))]
struct Place {
    words: [AtomicU64; 7],
    /// Twice the number of the lap that may fill the slot; plus one once it is filled.
    turn: AtomicU64,
}

impl Ring {
    /// Returns an empty queue. Producers wait for room for `patience` if nothing is taken.
    pub(super) fn new(patience: Duration) -> Ring {
        Ring {
            places: (0..PLACES).map(|_| Place::default()).collect(),
            next: Line(AtomicU64::new(0)),
            oldest: Line(AtomicU64::new(0)),
            is_closed: AtomicBool::new(false),
            is_delayed: AtomicBool::new(false),
            patience,
        }
    }

    /// Puts entries in consecutive slots. Calls `wake` now and then, and before it waits for room.
    ///
    /// Waits as long as the consumer takes entries or is delayed, and at least as long as the queue's patience. A
    /// closed queue discards the entries.
    ///
    /// # Errors
    ///
    /// If the wait was in vain. The queue is closed then.
    #[inline]
    pub(super) fn put(
        &self,
        entries: impl ExactSizeIterator<Item = Entry>,
        wake: impl Fn(),
    ) -> Result<(), Stuck> {
        if self.is_closed() {
            return Ok(());
        }
        let count = entries.len() as u64;
        let first = self.next.0.fetch_add(count, Ordering::Relaxed);
        for (number, entry) in (first..).zip(entries) {
            let (place, turn) = self.place(number);
            if place.turn.load(Ordering::Acquire) != turn && !self.wait(place, turn, &wake)? {
                return Ok(());
            }
            place.fill(entry);
            place.turn.store(turn + 1, Ordering::Release);
        }
        if first / WAKE_EVERY != (first + count) / WAKE_EVERY {
            wake();
        }
        Ok(())
    }

    /// Takes the oldest entry, if there is one. Only the consumer's thread may call this.
    pub(super) fn take(&self) -> Option<Entry> {
        let number = self.oldest.0.load(Ordering::Relaxed);
        let (place, turn) = self.place(number);
        if place.turn.load(Ordering::Acquire) != turn + 1 {
            return None;
        }
        let entry = place.entry();
        place.turn.store(turn + 2, Ordering::Release);
        self.oldest.0.store(number + 1, Ordering::Relaxed);
        Some(entry)
    }

    /// Returns the number of the oldest entry if its slot is claimed but not filled yet.
    pub(super) fn awaited(&self) -> Option<u64> {
        let number = self.oldest.0.load(Ordering::Relaxed);
        let (place, turn) = self.place(number);
        let is_awaited = number < self.next.0.load(Ordering::Relaxed)
            && place.turn.load(Ordering::Acquire) == turn;
        is_awaited.then_some(number)
    }

    /// Sets whether the consumer is busy with other work. Producers wait without a time limit meanwhile.
    pub(super) fn set_delayed(&self, is_delayed: bool) {
        self.is_delayed.store(is_delayed, Ordering::Relaxed);
    }

    pub(super) fn is_delayed(&self) -> bool {
        self.is_delayed.load(Ordering::Relaxed)
    }

    /// Discards everything that is put from now on.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Returns an entry's slot, and the turn in which it may be filled.
    #[inline]
    fn place(&self, number: u64) -> (&Place, u64) {
        let lap = number / PLACES as u64;
        #[expect(clippy::cast_possible_truncation, reason = "less than the places")]
        let index = (number % PLACES as u64) as usize;
        (&self.places[index], 2 * lap)
    }

    /// Waits for room. Returns true if there is room, false if the queue is closed.
    #[cold]
    fn wait(&self, place: &Place, turn: u64, wake: &impl Fn()) -> Result<bool, Stuck> {
        let is_free = || place.turn.load(Ordering::Acquire) == turn;
        let mut waits_since = Instant::now();
        let mut oldest = self.oldest.0.load(Ordering::Relaxed);
        wake();
        loop {
            if is_free() {
                return Ok(true);
            }
            if self.is_closed() {
                return Ok(false);
            }
            thread::sleep(Duration::from_micros(50));
            let now_oldest = self.oldest.0.load(Ordering::Relaxed);
            if now_oldest != oldest || self.is_delayed() {
                (waits_since, oldest) = (Instant::now(), now_oldest);
            } else if waits_since.elapsed() > self.patience {
                self.close();
                return Err(Stuck);
            }
        }
    }
}

impl Place {
    #[inline]
    fn fill(&self, entry: Entry) {
        let words = match entry {
            Entry::Happened {
                device,
                event,
                time_us,
                stack,
                metadata,
            } => [
                event.address.get(),
                event.size.get(),
                event.stream.0,
                event.pool.0,
                event.pool.1,
                time_us.cast_unsigned(),
                event.action as u64
                    | u64::from(device) << DEVICE_SHIFT
                    | u64::from(metadata) << METADATA_SHIFT
                    | u64::from(stack) << STACK_SHIFT,
            ],
            Entry::Announced(number) => [number, 0, 0, 0, 0, 0, ANNOUNCEMENT],
        };
        for (place, word) in self.words.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
    fn entry(&self) -> Entry {
        let words = self
            .words
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        let [address, size, stream, capture, user, time_us, what] = words;
        if what == ANNOUNCEMENT {
            return Entry::Announced(address);
        }
        Entry::Happened {
            device: (what >> DEVICE_SHIFT) as u8,
            event: Event {
                action: Action::ALL[(what & ACTION_MASK) as usize],
                pool: MempoolId(capture, user),
                address: DeviceAddress(address),
                size: Bytes(size),
                stream: Stream(stream),
            },
            time_us: time_us.cast_signed(),
            stack: (what >> STACK_SHIFT) as u32,
            metadata: (what >> METADATA_SHIFT) as u32 % METADATA_END,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn happened(number: u64) -> Entry {
        Entry::Happened {
            device: 127,
            event: Event {
                action: Action::ALL[usize::try_from(number % 12).unwrap()],
                pool: MempoolId(number, !number),
                address: DeviceAddress(number << 20),
                size: Bytes(number),
                stream: Stream(!number),
            },
            time_us: -5,
            stack: u32::MAX - 7,
            metadata: METADATA_END - 3,
        }
    }

    #[test]
    fn what_is_put_in_comes_out() {
        let ring = Ring::new(PATIENCE);
        assert_eq!(ring.take(), None);
        let entries = [happened(0), Entry::Announced(77), happened(u64::MAX >> 21)];
        for _ in 0..2 * PLACES {
            ring.put(entries.into_iter(), || ()).unwrap();
            for expected in entries {
                assert_eq!(ring.take(), Some(expected));
            }
            assert_eq!(ring.take(), None);
        }
    }

    /// Several producers put batches larger than the queue; the consumer gets each batch in one piece.
    #[test]
    fn who_finds_it_full_waits_and_what_belongs_together_stays_together() {
        const THREADS: usize = 4;
        const BATCHES: u64 = 3_000;
        const LARGE: u64 = PLACES as u64 + 100;
        let ring = Ring::new(PATIENCE);
        let total = THREADS as u64 * (BATCHES * 50 + LARGE);
        thread::scope(|scope| {
            for thread in 0..THREADS as u64 {
                let ring = &ring;
                scope.spawn(move || {
                    for batch in 0..=BATCHES {
                        let count = if batch == BATCHES { LARGE } else { 50 };
                        let first = thread << 40 | batch << 20;
                        let entries = (0..usize::try_from(count).unwrap())
                            .map(|index| Entry::Announced(first + index as u64));
                        ring.put(entries, || ()).unwrap();
                    }
                });
            }
            let (mut expected, mut batches) = (None, [0; THREADS]);
            for _ in 0..total {
                let entry = loop {
                    match ring.take() {
                        Some(entry) => break entry,
                        None => thread::yield_now(),
                    }
                };
                let Entry::Announced(value) = entry else {
                    panic!("not put in: {entry:?}");
                };
                let (thread, batch) = (value >> 40, value >> 20 & 0xf_ffff);
                if value & 0xf_ffff == 0 {
                    let next = &mut batches[usize::try_from(thread).unwrap()];
                    assert_eq!((expected, batch), (None, *next));
                    *next += 1;
                } else {
                    assert_eq!(expected, Some(value));
                }
                let count = if batch == BATCHES { LARGE } else { 50 };
                let is_last = value & 0xf_ffff == count - 1;
                expected = (!is_last).then_some(value + 1);
            }
        });
    }

    #[test]
    fn who_waits_for_a_queue_that_is_closed_goes_on() {
        let ring = Ring::new(PATIENCE);
        thread::scope(|scope| {
            let full = scope.spawn(|| {
                let all = (0..PLACES + 1).map(|number| Entry::Announced(number as u64));
                ring.put(all, || ()).unwrap();
            });
            while ring.next.0.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            ring.close();
            full.join().unwrap();
        });
        ring.put([Entry::Announced(1)].into_iter(), || ()).unwrap();
        assert_eq!(ring.next.0.load(Ordering::Relaxed), PLACES as u64 + 1);
    }

    /// The consumer is delayed for longer than the patience.
    #[test]
    fn who_waits_for_one_that_is_delayed_goes_on_waiting() {
        let ring = Ring::new(Duration::from_millis(1));
        ring.set_delayed(true);
        let is_full = || ring.next.0.load(Ordering::Relaxed) > PLACES as u64;
        thread::scope(|scope| {
            let full = scope.spawn(|| {
                let all = (0..PLACES + 1).map(|number| Entry::Announced(number as u64));
                ring.put(all, || ())
            });
            while !is_full() {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(50));
            assert!(!ring.is_closed());
            assert_eq!(ring.take(), Some(Entry::Announced(0)));
            ring.set_delayed(false);
            assert!(full.join().unwrap().is_ok());
        });
    }

    #[test]
    fn who_waits_in_vain_says_so_and_closes_it() {
        let ring = Ring::new(Duration::from_millis(1));
        let all = (0..PLACES + 1).map(|number| Entry::Announced(number as u64));
        assert!(ring.put(all, || ()).is_err());
        assert!(ring.is_closed());
        ring.put([Entry::Announced(1)].into_iter(), || ()).unwrap();
    }
}
