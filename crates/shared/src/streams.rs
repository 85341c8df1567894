//! Finds the lane that serves a stream, without a lock.

use lowtide_core::Stream;

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const SLOTS_LOG2: u32 = 8;
const SLOTS: usize = 1 << SLOTS_LOG2;
/// At most half of the slots are used, so that a search ends soon. Later streams are not stored.
const STREAMS_MAX: usize = SLOTS / 2;

/// The streams of a device except the default one, each with its lane, which never changes.
#[derive(Debug)]
pub(crate) struct StreamTable {
    slots: Box<[Slot]>,
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Slot {
    /// Zero if the slot is unused: the default stream is not in the table.
    stream: AtomicU64,
    /// Written before the stream.
    lane: AtomicUsize,
}

impl StreamTable {
    pub(crate) fn new() -> StreamTable {
        StreamTable {
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            count: AtomicUsize::new(0),
        }
    }

    /// Returns the lane of a stream, if it is stored. Constant time.
    #[inline]
    pub(crate) fn find(&self, stream: Stream) -> Option<usize> {
        let mut slot = hash(stream);
        loop {
            let place = &self.slots[slot % SLOTS];
            match place.stream.load(Ordering::Acquire) {
                0 => return None,
                found if found == stream.0 => {
                    return Some(place.lane.load(Ordering::Relaxed));
                }
                _ => slot += 1,
            }
        }
    }

    /// Returns the lane of a stream and stores it if there is room. New streams take the `lanes` in turn, except the
    /// first, which is the default stream's. Without room, the stream's number determines the lane. Only one thread may
    /// call this at a time.
    pub(crate) fn find_or_insert(&self, stream: Stream, lanes: usize) -> usize {
        if let Some(lane) = self.find(stream) {
            return lane;
        }
        let others = lanes - 1;
        let count = self.count.load(Ordering::Relaxed);
        if count >= STREAMS_MAX {
            return 1 + hash(stream) % others;
        }
        let lane = 1 + count % others;
        let mut slot = hash(stream);
        while self.slots[slot % SLOTS].stream.load(Ordering::Relaxed) != 0 {
            slot += 1;
        }
        let place = &self.slots[slot % SLOTS];
        place.lane.store(lane, Ordering::Relaxed);
        place.stream.store(stream.0, Ordering::Release);
        self.count.store(count + 1, Ordering::Relaxed);
        lane
    }
}

/// Returns a slot. Streams are pointers, so their lowest bits are all equal.
#[inline]
fn hash(stream: Stream) -> usize {
    (stream.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - SLOTS_LOG2)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::alone;

    #[test]
    fn each_stream_keeps_its_lane() {
        alone(|| {
            let table = StreamTable::new();
            let stream = |number: u64| Stream(0x7f00_0000_0000 + number * 0x1d0);
            let lanes: Vec<usize> = (0..1000)
                .map(|number| table.find_or_insert(stream(number), 32))
                .collect();
            for (number, &lane) in (0..).zip(&lanes) {
                assert_eq!(table.find_or_insert(stream(number), 32), lane);
                let is_noted = number < STREAMS_MAX as u64;
                assert_eq!(table.find(stream(number)), is_noted.then_some(lane));
                assert!((1..32).contains(&lane));
            }
            assert_eq!(lanes[..31], (1..32).collect::<Vec<_>>());
            assert_eq!(lanes[31], 1);
        });
    }
}
