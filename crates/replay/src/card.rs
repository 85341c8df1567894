//! What a recording tells of the card that it was made on.

use lowtide_core::{Action, Bytes};
use lowtide_trace::Trace;

/// No card has more: what says so is no recording of one.
const CARD_SIZE_MAX: Bytes = Bytes::gib(64 << 10);

/// The least that the card of a recording can have had, as far as requests that it refused tell.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Card {
    /// What was held and what was free where a request was refused, or what was held at most. `None` where no request
    /// was refused, as nothing tells then.
    pub(crate) size_min: Option<Bytes>,
    /// The same where all that were refused were so because it was full, and not by a limit of the job's own.
    pub(crate) full_size_min: Option<Bytes>,
}

impl Card {
    /// Returns what a recording tells, in whose expandable segments large requests have pages of `page_size`. O(n) for n
    /// events.
    pub(crate) fn new(trace: &Trace, page_size: Bytes) -> Card {
        let segments = trace.initial.segments.iter();
        let mut reserved: Bytes = segments.map(|segment| segment.size).sum();
        let (mut held_max, mut refused_max, mut is_limited) = (reserved, None, false);
        for recorded in &trace.events {
            let event = recorded.event;
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => {
                    reserved = reserved.saturating_add(event.size);
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    reserved = reserved.saturating_sub(event.size);
                }
                Action::OutOfMemory => {
                    // Its address says what the card had left.
                    let left = Bytes(event.address.get());
                    refused_max = refused_max.max(Some(left.saturating_add(reserved)));
                    // A full card has no room for a page more at either end than was asked for.
                    is_limited |= event.size.saturating_add(page_size + page_size) <= left;
                }
                _ => {}
            }
            held_max = held_max.max(reserved);
        }
        let size_min = refused_max.map(|size| size.max(held_max));
        Card {
            size_min,
            full_size_min: size_min.filter(|&size| !is_limited && size <= CARD_SIZE_MAX),
        }
    }
}
