//! What a recording tells of the card that it was made on.

use lowtide_core::{Action, Bytes, Event};
use lowtide_trace::Trace;

/// No card has more: what says so is no recording of one.
const CARD_SIZE_MAX: Bytes = Bytes::gib(64 << 10);

/// Returns the least that the card can have had where all requests that were refused were so because it was full, and
/// not by a limit of the job's own: a page more at either end than they asked for would not have fitted.
pub(crate) fn full_card_size_min(trace: &Trace, page_size: Bytes) -> Option<Bytes> {
    let mut events = trace.events.iter().map(|recorded| recorded.event);
    // Their address says what the card had left.
    let fits = |event: Event| {
        event.size.saturating_add(page_size + page_size) <= Bytes(event.address.get())
    };
    let is_limited = events.any(|event| event.action == Action::OutOfMemory && fits(event));
    card_size_min(trace).filter(|&size| !is_limited && size <= CARD_SIZE_MAX)
}

/// Returns the least that the card can have had: what was held and what was free where a request was refused, or
/// what was held at most. `None` where no request was refused, as nothing tells then.
pub(crate) fn card_size_min(trace: &Trace) -> Option<Bytes> {
    let segments = trace.initial.segments.iter();
    let mut reserved: Bytes = segments.map(|segment| segment.size).sum();
    let (mut held_max, mut refused_max) = (reserved, None);
    for recorded in &trace.events {
        let event = recorded.event;
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                reserved = reserved.saturating_add(event.size);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                reserved = reserved.saturating_sub(event.size);
            }
            // Its address says what the card had left.
            Action::OutOfMemory => {
                let size = Bytes(event.address.get()).saturating_add(reserved);
                refused_max = refused_max.max(Some(size));
            }
            _ => {}
        }
        held_max = held_max.max(reserved);
    }
    refused_max.map(|size| size.max(held_max))
}

/// Returns how many addresses an expandable segment has on a card of so many bytes, in pages of `page_size`: PyTorch
/// reserves an eighth more than the card has.
pub(crate) fn segment_room(card_size: Bytes, page_size: Bytes) -> Bytes {
    Bytes(card_size.get().saturating_add(card_size.get() / 8)).round_up(page_size)
}
