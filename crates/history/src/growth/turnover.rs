//! Determines whether a job frees its allocations from step to step.

use crate::history::{Block, History};

/// The number of steps within which a job frees most allocations. Some outlive the step's end.
const STEPS: u32 = 2;

/// At most one in this many requests is kept for longer or for good, and at most this share of the freed bytes was
/// kept for longer.
const KEPT_MAX: u64 = 4;

/// Returns whether a job frees most of its allocations soon after the span between two of `boundaries` in which it
/// makes them. Memory that is kept until a later phase, as from forward to backward, shows that the spans are parts
/// of a step. Linear time.
pub(super) fn is_given_back(history: &History, boundaries: &[u32]) -> bool {
    let (Some(&first), Some(&last)) = (boundaries.first(), boundaries.last()) else {
        return false;
    };
    let spans = u32::try_from(boundaries.len() - 1).unwrap_or(u32::MAX);
    let soon = (last - first) / spans.max(1) * STEPS;
    let is_seen = |block: &&Block| {
        let is_inside = (first.max(1)..last).contains(&block.start);
        is_inside && block.start + soon <= history.events
    };
    let (mut requests, mut kept) = (0, 0);
    let (mut given_back_bytes, mut late_bytes) = (0, 0);
    for block in history.blocks.iter().filter(is_seen) {
        let is_late = block.freed - block.start > soon;
        requests += 1;
        kept += u64::from(is_late);
        if block.freed <= history.events {
            let bytes = block.live_bytes().get();
            given_back_bytes += bytes;
            late_bytes += if is_late { bytes } else { 0 };
        }
    }
    requests > 0 && kept <= requests / KEPT_MAX && late_bytes <= given_back_bytes / KEPT_MAX
}
