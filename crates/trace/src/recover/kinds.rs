//! Which kinds of events a recording has.

use lowtide_core::Action;

use crate::error::TraceError;
use crate::model::TraceEvent;

/// The kinds of events that a recording has. One of which there is no event may have been left out, so that what it would
/// have told may have happened at any time.
#[derive(Clone, Copy, Default)]
pub(super) struct Kinds(u16);

impl Kinds {
    /// Returns the kinds of `events`. Linear in them.
    pub(super) fn of(events: &[TraceEvent]) -> Kinds {
        let kinds = events.iter().map(|recorded| bit(recorded.event.action));
        Kinds(kinds.fold(0, |all, kind| all | kind))
    }

    pub(super) fn has(self, action: Action) -> bool {
        self.0 & bit(action) != 0
    }

    /// Returns `error`, of memory that is allocated while it is in use, with the reason if no frees are recorded.
    pub(super) fn explain(self, error: TraceError) -> TraceError {
        if self.count(&[Action::FreeRequested, Action::FreeCompleted]) > 0 {
            return error;
        }
        error.in_part(
            "no frees are recorded, so record without skip_actions=[\"free_requested\", \"free_completed\"]",
        )
    }

    /// Returns how many of some kinds it has.
    pub(super) fn count(self, kinds: &[Action]) -> u64 {
        kinds.iter().map(|&kind| u64::from(self.has(kind))).sum()
    }

    /// Returns whether the recording tells which segments come from the driver, or pages of expandable ones.
    pub(super) fn tells_coming(self, is_expandable: bool) -> bool {
        self.has(match is_expandable {
            true => Action::SegmentMap,
            false => Action::SegmentAlloc,
        })
    }

    /// Returns whether it tells which go back to it.
    pub(super) fn tells_going(self, is_expandable: bool) -> bool {
        self.has(match is_expandable {
            true => Action::SegmentUnmap,
            false => Action::SegmentFree,
        })
    }

    /// Returns whether it tells of all memory that goes: of what it has coming, and of any.
    pub(super) fn tells_all_going(self) -> bool {
        let both = [true, false];
        both.iter().any(|&kind| self.tells_going(kind))
            && both
                .iter()
                .all(|&kind| self.tells_going(kind) || !self.tells_coming(kind))
    }
}

fn bit(action: Action) -> u16 {
    1 << action as u16
}
