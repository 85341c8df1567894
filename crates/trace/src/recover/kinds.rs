//! The kinds of events that a recording has.

use lowtide_core::Action;

use crate::error::TraceError;
use crate::model::TraceEvent;

/// The kinds of events that a recording has. A kind without any event may not have been recorded. Such events may
/// then have happened at any time.
#[derive(Clone, Copy, Default)]
pub(super) struct Kinds(u16);

impl Kinds {
    /// Returns the kinds of `events`. Linear time.
    pub(super) fn of(events: &[TraceEvent]) -> Kinds {
        let kinds = events.iter().map(|recorded| bit(recorded.event.action));
        Kinds(kinds.fold(0, |all, kind| all | kind))
    }

    pub(super) fn has(self, action: Action) -> bool {
        self.0 & bit(action) != 0
    }

    /// Returns `error`, about memory that is allocated while it is in use. Adds the reason if no frees are
    /// recorded.
    pub(super) fn explain(self, error: TraceError) -> TraceError {
        if self.count(&[Action::FreeRequested, Action::FreeCompleted]) > 0 {
            return error;
        }
        error.in_part(
            "no frees are recorded, so record without skip_actions=[\"free_requested\", \"free_completed\"]",
        )
    }

    /// Returns how many of `kinds` the recording has.
    pub(super) fn count(self, kinds: &[Action]) -> u64 {
        kinds.iter().map(|&kind| u64::from(self.has(kind))).sum()
    }

    /// Returns whether the recording has allocations of segments, or of pages of expandable segments.
    pub(super) fn has_segment_allocations(self, is_expandable: bool) -> bool {
        let [plain, expandable] = [Action::SegmentAlloc, Action::SegmentMap];
        self.has(if is_expandable { expandable } else { plain })
    }

    /// Returns whether the recording has releases of segments, or of pages of expandable segments.
    pub(super) fn has_segment_releases(self, is_expandable: bool) -> bool {
        let [plain, expandable] = [Action::SegmentFree, Action::SegmentUnmap];
        self.has(if is_expandable { expandable } else { plain })
    }

    /// Returns whether the recording has all releases: at least one kind, and that of each kind of allocation it
    /// has.
    pub(super) fn has_all_segment_releases(self) -> bool {
        let both = [true, false];
        both.iter().any(|&kind| self.has_segment_releases(kind))
            && both
                .iter()
                .all(|&kind| self.has_segment_releases(kind) || !self.has_segment_allocations(kind))
    }
}

fn bit(action: Action) -> u16 {
    1 << action as u16
}
