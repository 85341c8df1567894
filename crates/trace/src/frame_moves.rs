//! The frames that `tide` moved between addresses.

use std::ops::Range;

use lowtide_core::{Action, Bytes, StrategyName};

use crate::model::{Trace, TraceEvent};

impl Trace {
    /// Returns the ranges of events that move frames, in order; none for other strategies than `tide`.
    ///
    /// `tide` unmaps idle frames and maps them elsewhere for one request, with no other event between. If more is
    /// unmapped than mapped, memory was released. A release right before a request that maps as much looks like a
    /// move. Linear time.
    pub fn frame_moves(&self) -> Vec<Range<usize>> {
        if self.settings.strategy_name() != Some(StrategyName::Tide) {
            return Vec::new();
        }
        let is_paging = |event: &TraceEvent| {
            let action = event.event.action;
            matches!(action, Action::SegmentMap | Action::SegmentUnmap)
        };
        let mut start = 0;
        let runs = self
            .events
            .chunk_by(|one, next| is_paging(one) == is_paging(next));
        let ranges = runs.map(|run| {
            let range = start..start + run.len();
            start = range.end;
            range
        });
        let is_move = |range: &Range<usize>| {
            let sum = |action| {
                let events = self.events[range.clone()].iter();
                let sizes = events.filter(|event| event.event.action == action);
                sizes.fold(Bytes::ZERO, |sum, event| {
                    sum.saturating_add(event.event.size)
                })
            };
            let unmapped = sum(Action::SegmentUnmap);
            !unmapped.is_zero() && unmapped <= sum(Action::SegmentMap)
        };
        ranges.filter(is_move).collect()
    }
}
