//! The memory of the card that a recording was made on, inferred from refused requests.

use lowtide_core::{Action, Bytes};
use lowtide_trace::Trace;

/// More memory than any card has. A recording that implies more was not made on one.
const CARD_SIZE_MAX: Bytes = Bytes::gib(64 << 10);

/// The least memory that the card can have had, as far as its refused requests show.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Card {
    /// The largest sum of reserved and free bytes at a refused request, or the peak reserved bytes if that is more.
    /// `None` if no request was refused: nothing else shows the size.
    pub(crate) size_min: Option<Bytes>,
    /// The same, if every refused request was refused by a full card and not by the job's own limit; else `None`.
    pub(crate) full_size_min: Option<Bytes>,
}

impl Card {
    /// Infers the card of a recording. `page_size` is the page size of its expandable segments for large requests.
    /// O(n) for n events.
    pub(crate) fn new(trace: &Trace, page_size: Bytes) -> Card {
        let (mut refused_max, mut is_limited) = (None, false);
        for (recorded, reserved) in trace.events.iter().zip(trace.reserved_bytes()) {
            let event = recorded.event;
            if event.action != Action::OutOfMemory {
                continue;
            }
            // The event's address holds the bytes that the card had left.
            let left = Bytes(event.address.get());
            refused_max = refused_max.max(Some(left.saturating_add(reserved)));
            // If the request and a page more at either end would have fitted, a limit refused it and not the card.
            is_limited |= event.size.saturating_add(page_size + page_size) <= left;
        }
        let held_max = trace.peak_reserved_bytes();
        let size_min = refused_max.map(|size| size.max(held_max));
        Card {
            size_min,
            full_size_min: size_min.filter(|&size| !is_limited && size <= CARD_SIZE_MAX),
        }
    }
}
