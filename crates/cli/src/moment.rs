//! The figures of an instant, as text and as JSON.

use std::collections::BTreeMap;

use lowtide_core::Cause;
use lowtide_history::Moment;
use serde::Serialize;

/// An instant: after this number of events.
#[derive(Debug, Serialize)]
pub(crate) struct MomentRow {
    event: u32,
    live_bytes: u64,
    reserved_bytes: u64,
    /// The reserved bytes that are not live, by cause.
    causes: BTreeMap<&'static str, u64>,
}

impl MomentRow {
    pub(crate) fn new(moment: &Moment) -> MomentRow {
        let fragmentation = &moment.fragmentation;
        let causes = Cause::ALL.into_iter();
        MomentRow {
            event: moment.instant,
            live_bytes: fragmentation.live.get(),
            reserved_bytes: fragmentation.reserved.get(),
            causes: causes
                .map(|cause| (cause.name(), fragmentation.of_cause(cause).get()))
                .collect(),
        }
    }
}

/// Returns a cause's name for people.
pub(crate) fn cause_text(cause: Cause) -> String {
    cause.name().replace('_', " ")
}
