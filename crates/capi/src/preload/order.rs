//! The stream order in which memory is reused.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::Stream;

/// The owner of memory that any stream may use at once. No stream has this number: the driver takes 1 for the
/// default stream, which is 0 here.
pub(super) const ANY_STREAM: Stream = Stream(1);

/// The driver's handle of the per-thread default stream.
const PER_THREAD: u64 = 2;

/// A stream, as the driver and as the allocator identify it.
#[derive(Clone, Copy)]
pub(super) struct Order {
    /// The driver's handle.
    pub(super) handle: Stream,
    /// The owner of the stream's memory. Stream handles are pointers and so are even. An odd number means a
    /// thread's own default stream; the driver has one handle for all of those, and lowtide-cuda hands it no odd one.
    pub(super) owner: Stream,
}

impl Order {
    /// Returns the order of a program's stream. `is_per_thread` says whether the called form of the function has
    /// per-thread default streams.
    pub(super) fn of(stream: *mut c_void, is_per_thread: bool) -> Order {
        let number = stream.expose_provenance() as u64;
        if number == PER_THREAD || number == 0 && is_per_thread {
            return Order {
                handle: Stream(PER_THREAD),
                owner: own_stream(),
            };
        }
        let number = if number == 1 { 0 } else { number };
        Order {
            handle: Stream(number),
            owner: Stream(number),
        }
    }

    /// Returns whether it is a default stream of the current context.
    pub(super) fn is_default(self) -> bool {
        self.handle.0 <= PER_THREAD
    }
}

/// Returns the number of this thread's own default stream. No other thread ever gets it.
fn own_stream() -> Stream {
    thread_local! {
        static OWN: Cell<u64> = const { Cell::new(0) };
    }
    static LAST: AtomicU64 = AtomicU64::new(ANY_STREAM.0);
    OWN.with(|own| {
        if own.get() == 0 {
            own.set(LAST.fetch_add(2, Ordering::Relaxed) + 2);
        }
        Stream(own.get())
    })
}

/// A set of streams in whose order memory was allocated. May contain others too.
pub(super) struct StreamFilter([AtomicU64; StreamFilter::WORDS]);

impl StreamFilter {
    const WORDS: usize = 64;

    pub(super) const fn new() -> StreamFilter {
        StreamFilter([const { AtomicU64::new(0) }; StreamFilter::WORDS])
    }

    #[inline]
    pub(super) fn insert(&self, stream: Stream) {
        let (word, bit) = place(stream);
        if self.0[word].load(Ordering::Relaxed) & bit == 0 {
            self.0[word].fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Returns whether the set may contain the stream.
    pub(super) fn may_contain(&self, stream: Stream) -> bool {
        let (word, bit) = place(stream);
        self.0[word].load(Ordering::Relaxed) & bit != 0
    }
}

/// Returns the stream's word and bit.
fn place(stream: Stream) -> (usize, u64) {
    let hash = stream.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((hash >> 58) as usize, 1 << (hash >> 52 & 63))
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut;
    use std::thread;

    use super::*;

    #[test]
    fn default_streams_have_several_names() {
        let of = |number, is_per_thread| {
            let order = Order::of(without_provenance_mut(number), is_per_thread);
            (order.handle.0, order.owner.0)
        };
        assert_eq!(of(0, false), (0, 0));
        assert_eq!(of(1, false), (0, 0));
        assert_eq!(of(1, true), (0, 0), "asked for by its name");
        let own = of(0, true);
        assert_eq!(own.0, 2);
        assert_eq!(of(2, false), own);
        assert_eq!(of(0x7f00, true), (0x7f00, 0x7f00));
    }

    #[test]
    fn each_thread_has_a_stream_of_its_own() {
        let own = || own_stream().0;
        assert_eq!(own(), own());
        let others = [thread::spawn(own), thread::spawn(own)];
        let [first, second] = others.map(|thread| thread.join().unwrap());
        assert!(first != second && first != own() && second != own());
        for number in [first, second, own()] {
            assert!(
                number > ANY_STREAM.0 && number % 2 == 1,
                "{number} is no stream's"
            );
        }
    }

    #[test]
    fn the_filter_knows_every_stream_that_was_inserted() {
        let filter = StreamFilter::new();
        let streams = (1..200).map(|number| Stream(0x55d0_0000_0000 + number * 0x1d0));
        let unknown = streams.clone().filter(|&stream| filter.may_contain(stream));
        assert_eq!(unknown.count(), 0);
        streams.clone().for_each(|stream| filter.insert(stream));
        assert!(streams.clone().all(|stream| filter.may_contain(stream)));
        let others = (300..1300).map(|number| Stream(0x55d0_0000_0000 + number * 0x1d0));
        assert!(others.filter(|&stream| filter.may_contain(stream)).count() < 200);
    }
}
