//! The end of a recording, where there is no time for all of it.

use std::sync::Arc;

use crate::budget::Budget;
use crate::error::TraceError;
use crate::model::Trace;
use crate::parts::{Parts, block_stacks_after, final_block_stacks};

impl Trace {
    /// Returns the recording of the last `count` events alone, with what was there before those. O(n log m) for
    /// so many events and m blocks at once, and linear in the events that are left out.
    ///
    /// # Errors
    ///
    /// If the events contradict the segments: never, for a recording that was read.
    pub fn last_events(&self, count: usize) -> Result<Trace, TraceError> {
        let left_out = self.events.len().saturating_sub(count);
        let events = self.events[left_out..].to_vec();
        let since_us = events.first().map_or(i64::MIN, |event| event.time_us);
        let annotations = self.annotations.iter();
        let since = annotations.filter(|annotation| annotation.time_us >= since_us);
        let mut parts = Parts::default();
        parts.events = events;
        parts.block_stacks = final_block_stacks(self);
        parts.settings = self.settings.clone();
        parts.annotations = since.cloned().collect();
        parts.skipped_events = self.skipped_events;
        parts.push_segments(self.segments.clone());
        // What is in memory already may take what it needs there.
        let mut budget = Budget::new(u64::MAX);
        let mut trace = parts.into_trace(self.device, Arc::clone(&self.stacks), &mut budget)?;
        // Of those that were freed since, the end does not know it.
        let stacks = block_stacks_after(self, left_out);
        for block in &mut trace.initial.blocks {
            block.stack = stacks.stack_at(block.address);
        }
        Ok(trace)
    }
}
