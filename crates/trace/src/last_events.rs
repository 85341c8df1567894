//! Cuts a recording to its last events, for uses that have no time for all of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use lowtide_core::{Action, Bytes, DeviceAddress};

use crate::block_stacks::{block_stacks_after, final_block_stacks};
use crate::budget::Budget;
use crate::error::TraceError;
use crate::model::{Trace, TraceEvent};
use crate::parts::Parts;

impl Trace {
    /// Returns the recording of the last `count` events alone, with the segments and blocks that existed before
    /// them.
    ///
    /// O(n log m) for `count` = n events and m blocks at once; linear in the events that are left out.
    ///
    /// # Errors
    ///
    /// If the events contradict the segments, which never happens for a recording that was read.
    pub fn last_events(&self, count: usize) -> Result<Trace, TraceError> {
        let left_out = self.events.len().saturating_sub(count);
        let (before, events) = self.events.split_at(left_out);
        let events = events.to_vec();
        let since_us = events.first().map_or(i64::MIN, |event| event.time_us);
        let annotations = self.annotations.iter();
        let since = annotations.filter(|annotation| annotation.time_us >= since_us);
        let mut parts = Parts::default();
        parts.events = events;
        parts.paused_before = paused_after(&self.initial.paused, before);
        parts.block_stacks = final_block_stacks(self);
        parts.settings = self.settings.clone();
        parts.annotations = since.cloned().collect();
        parts.regions = self.regions.clone();
        parts.skipped_events = self.skipped_events;
        parts.push_segments(self.segments.clone());
        // The trace is in memory already, so its memory needs no limit.
        let mut budget = Budget::new(u64::MAX);
        let mut trace = parts.into_trace(self.device, Arc::clone(&self.stacks), &mut budget)?;
        trace.missed_events = self.missed_events;
        // The end of the recording has no stacks for blocks that were freed since.
        let stacks = block_stacks_after(self, left_out);
        for block in &mut trace.initial.blocks {
            block.stack = stacks.stack_at(block.address);
        }
        Ok(trace)
    }
}

/// Returns the pauses that are still in effect after `events`, by address: one per paused range. `paused` are the
/// pauses before `events`.
fn paused_after(paused: &[TraceEvent], events: &[TraceEvent]) -> Vec<TraceEvent> {
    let mut away = BTreeMap::new();
    for recorded in paused.iter().chain(events) {
        let start = recorded.event.address.get();
        match recorded.event.action {
            Action::SegmentPaused => {
                away.insert(start, *recorded);
            }
            // Memory that is released to the driver is not paused any more either.
            Action::SegmentResumed | Action::SegmentFree | Action::SegmentUnmap => {
                end_pauses(&mut away, start, start + recorded.event.size.get());
            }
            _ => {}
        }
    }
    away.into_values().collect()
}

/// Ends the pauses between two addresses. A pause that extends beyond them is cut.
fn end_pauses(away: &mut BTreeMap<u64, TraceEvent>, start: u64, end: u64) {
    while let Some((&from, &pause)) = away.range(..end).next_back() {
        let to = from + pause.event.size.get();
        if to <= start {
            return;
        }
        away.remove(&from);
        for (from, to) in [(from, start), (end, to)] {
            if from < to {
                let mut rest = pause;
                rest.event.address = DeviceAddress(from);
                rest.event.size = Bytes(to - from);
                away.insert(from, rest);
            }
        }
    }
}
