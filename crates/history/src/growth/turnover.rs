//! Whether a job gives back what it asks for from step to step.

use crate::history::{Block, History};

/// Within so many steps a job gives back what it asks for: some of it outlives the step's end.
const STEPS: u32 = 2;

/// This share of its requests it may keep for longer, or for good, and this share of the bytes that it gives back.
const KEPT_MAX: u64 = 4;

/// Returns whether a job gives back most of what it asks for soon after the span between two of `boundaries` in which
/// it asks: what it keeps until a later phase, as a forward pass does for backward, says that the spans are parts of
/// a step. Linear time.
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
