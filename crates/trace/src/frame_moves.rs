//! The frames that `tide` moved between addresses.

use std::ops::Range;

use lowtide_core::{Action, Bytes, Event, StrategyName};

use crate::model::{Trace, TraceEvent};

impl Trace {
    /// Returns the ranges of events that move frames, in order, and the bytes that each moves; none for other strategies
    /// than `tide`.
    ///
    /// `tide` unmaps idle frames of the default pool and maps them elsewhere for one request, with no other event
    /// between. What a private pool unmaps is released. So is all memory, if more is unmapped than mapped. A release
    /// right before a request that maps as much looks like a move. Linear time.
    pub fn frame_moves(&self) -> Vec<(Range<usize>, Bytes)> {
        if self.settings.strategy_name() != Some(StrategyName::Tide) {
            return Vec::new();
        }
        let mut start = 0;
        let runs = self
            .events
            .chunk_by(|one, next| is_paging(one) == is_paging(next));
        let moves = runs.filter_map(|run| {
            let range = start..start + run.len();
            start = range.end;
            let sum = |counts: fn(&Event) -> bool| {
                let events = run.iter().map(|recorded| recorded.event).filter(counts);
                let sizes = events.map(|event| event.size);
                sizes.fold(Bytes::ZERO, Bytes::saturating_add)
            };
            let unmapped =
                sum(|event| event.action == Action::SegmentUnmap && event.pool.is_default());
            let mapped = sum(|event| event.action == Action::SegmentMap);
            (!unmapped.is_zero() && unmapped <= mapped).then_some((range, unmapped))
        });
        moves.collect()
    }
}

fn is_paging(recorded: &TraceEvent) -> bool {
    let action = recorded.event.action;
    matches!(action, Action::SegmentMap | Action::SegmentUnmap)
}
