//! The contents of a file about one device, before they are checked and completed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use hashbrown::HashMap;
use lowtide_core::{Action, BlockSnapshot, BlockStatus, Event, MempoolId, SegmentSnapshot};

use crate::block_stacks::BlockStacks;
use crate::budget::Budget;
use crate::error::{Result, TraceError};
use crate::model::{
    AllocatorSettings, Annotation, InitialBlock, InitialState, Snapshot, Trace, TraceEvent,
};
use crate::notes::NoteId;
use crate::pickle::StringId;
use crate::recover;
use crate::stacks::{StackId, StackTable};
use crate::text::RecordedText;

/// The most devices in a recording: PyTorch counts them in a signed byte.
pub(crate) const DEVICES_MAX: u32 = 128;

/// The contents of a file about one device.
#[derive(Default)]
pub(crate) struct Parts {
    /// The file's name for the snapshot, if the file has several.
    pub(crate) member: Option<RecordedText>,
    pub(crate) events: Vec<TraceEvent>,
    segments: Vec<SegmentSnapshot>,
    /// The segments before the first event, for a file that has those and not the segments at the end.
    held_before: Option<Vec<SegmentSnapshot>>,
    /// The segments of those that were paused.
    pub(crate) paused_before: Vec<TraceEvent>,
    /// The number of blocks in the segments.
    blocks: usize,
    /// The stacks of the blocks in use at the end.
    pub(crate) block_stacks: BlockStacks,
    pub(crate) settings: AllocatorSettings,
    pub(crate) annotations: Vec<Annotation>,
    /// The tags of regions, by their pools.
    pub(crate) regions: BTreeMap<MempoolId, RecordedText>,
    pub(crate) skipped_events: u64,
}

impl Trace {
    /// Returns the recording of `events`, oldest first, that ended with `segments`. Recovers the segments and
    /// blocks that existed before the first event. The trace has no settings, stacks or times.
    ///
    /// O(n log m) for n events and m blocks at once.
    ///
    /// # Errors
    ///
    /// If the events and the segments contradict each other. The error names the event.
    pub fn recovered(
        device: u32,
        events: impl IntoIterator<Item = Event>,
        segments: Vec<SegmentSnapshot>,
    ) -> Result<Trace, TraceError> {
        let mut parts = Parts::default();
        let events = events.into_iter().map(|event| TraceEvent {
            event,
            time_us: 0,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        });
        parts.events = events.collect();
        parts.push_segments(segments);
        // The events are in memory already, so the memory needs no limit.
        parts.into_trace(device, Arc::default(), &mut Budget::new(u64::MAX))
    }
}

impl Parts {
    pub(crate) fn push_segment(&mut self, segment: SegmentSnapshot) {
        self.blocks += segment.blocks.len();
        self.segments.push(segment);
    }

    pub(crate) fn push_segments(&mut self, segments: Vec<SegmentSnapshot>) {
        for segment in segments {
            self.push_segment(segment);
        }
    }

    /// Sets the segments that existed before the first event.
    pub(crate) fn begin_with(&mut self, mut segments: Vec<SegmentSnapshot>) {
        segments.sort_by_key(|segment| segment.address);
        let blocks = segments.iter().map(|segment| segment.blocks.len());
        self.blocks += blocks.sum::<usize>();
        self.held_before = Some(segments);
    }

    /// Returns whether the file has only marks of the recorder and the program.
    pub(crate) fn are_marks(&self) -> bool {
        let is_mark =
            |event: &TraceEvent| matches!(event.event.action, Action::Snapshot | Action::Annotate);
        self.segments.is_empty() && self.held_before.is_none() && self.events.iter().all(is_mark)
    }

    /// Adds the host's recording to `all`, if it has any. Threads record events of pinned memory without a common
    /// lock, so the events may contradict each other. Then only the segments at the end are added, with a note.
    ///
    /// # Errors
    ///
    /// If it would take too much memory.
    pub(crate) fn into_host(
        self,
        stacks: &Arc<StackTable>,
        budget: &mut Budget,
        all: &mut Snapshot,
    ) -> Result<()> {
        if self.are_marks() {
            return Ok(());
        }
        budget.take(1, self.retained_bytes())?;
        let at_end = Parts {
            member: self.member.clone(),
            segments: self.segments.clone(),
            blocks: self.blocks,
            block_stacks: self.block_stacks.clone(),
            ..Parts::default()
        };
        let trace = match self.into_trace(0, Arc::clone(stacks), budget) {
            Err(error) if error.is_contradiction() => {
                all.left_out.push(format!(
                    "the events of pinned host memory contradict each other ({error}), so what was there at the end \
                     is all that is known of it"
                ));
                at_end.into_trace(0, Arc::clone(stacks), budget)?
            }
            other => other?,
        };
        all.host.push(trace);
        Ok(())
    }

    /// Returns about how many bytes of memory these parts take.
    pub(crate) fn retained_bytes(&self) -> u64 {
        let events = self.events.len() + self.paused_before.len();
        let events = events * size_of::<TraceEvent>();
        let annotations = self.annotations.len() * size_of::<Annotation>();
        let segments = self.segments.len() + self.held_before.as_ref().map_or(0, Vec::len);
        let segments = segments * size_of::<SegmentSnapshot>();
        let blocks = self.blocks * size_of::<BlockSnapshot>();
        let regions = self.regions.len() * size_of::<(MempoolId, RecordedText)>();
        (events + annotations + segments + blocks + regions) as u64
            + self.block_stacks.retained_bytes()
    }

    /// Adds the regions that pauses name: older recordings name them nowhere else. Pools with the same tag share
    /// its text.
    fn add_paused_regions(&mut self, stacks: &StackTable, budget: &mut Budget) -> Result<()> {
        let mut tags: HashMap<StringId, RecordedText> = HashMap::new();
        for recorded in self.paused_before.iter().chain(&self.events) {
            let pool = recorded.event.pool;
            if recorded.event.action.is_pause()
                && !pool.is_default()
                && let Some(id) = stacks.notes.get(recorded.note).user_metadata
                && let Entry::Vacant(region) = self.regions.entry(pool)
            {
                let text = stacks.strings.get(id);
                if !tags.contains_key(&id) {
                    budget.take(1, text.len() as u64)?;
                }
                budget.take(1, size_of::<(MempoolId, RecordedText)>() as u64)?;
                let tag = tags.entry(id).or_insert_with(|| text.into());
                region.insert(tag.clone());
            }
        }
        Ok(())
    }

    /// Returns the trace of these parts, with the memory that existed before its first event.
    ///
    /// # Errors
    ///
    /// If the recording cannot have happened, or would take too much memory; see [`recover::recover`].
    pub(crate) fn into_trace(
        mut self,
        device: u32,
        stacks: Arc<StackTable>,
        budget: &mut Budget,
    ) -> Result<Trace> {
        recover::check_events(device, &self.events)?;
        recover::check_paused(&self.paused_before)?;
        self.add_paused_regions(&stacks, budget)?;
        let held_before = self.held_before.take().filter(|_| self.segments.is_empty());
        if let Some(held) = &held_before {
            self.segments = recover::left_at_end(device, held, &self.events, budget)?;
        }
        self.segments.sort_by_key(|segment| segment.address);
        let recovered = recover::recover(
            device,
            self.events,
            &self.segments,
            held_before.is_some(),
            &self.block_stacks,
            budget,
        )?;
        let mut missed_events = 0;
        if let Some(rewound) = recovered.rewound {
            missed_events = rewound.missed_events;
            self.segments = rewound.segments;
        }
        let held_before = held_before.map(|held| initial_state(&held, &self.block_stacks));
        let mut initial = held_before.unwrap_or(recovered.initial);
        initial.paused = self.paused_before;
        Ok(Trace {
            member: self.member,
            device,
            events: recovered.events,
            initial,
            segments: self.segments,
            missed_events,
            settings: self.settings,
            stacks,
            annotations: self.annotations,
            regions: self.regions,
            skipped_events: self.skipped_events,
        })
    }
}

/// Returns the memory before the first event, for a file that has it.
fn initial_state(held: &[SegmentSnapshot], stacks: &BlockStacks) -> InitialState {
    let mut initial = InitialState {
        has_sizes: true,
        ..InitialState::default()
    };
    for segment in held {
        initial.segments.push(segment.into());
        let in_use = |block: &&BlockSnapshot| block.status != BlockStatus::Inactive;
        let blocks = segment.blocks.iter().filter(in_use);
        let blocks = blocks.map(|block| InitialBlock::of(segment, block, stacks.stack(block)));
        initial.blocks.extend(blocks);
    }
    initial
}

#[cfg(test)]
mod tests {
    use lowtide_core::{Bytes, DeviceAddress, Stream};

    use super::*;

    #[test]
    fn the_tags_of_paused_regions_are_taken_from_the_budget() {
        let mut stacks = StackTable::new();
        let mut paused = |pool: u64, tag: &str| {
            let event = Event {
                action: Action::SegmentPaused,
                pool: MempoolId(pool, 0),
                address: DeviceAddress(1 << 30),
                size: Bytes::mib(2),
                stream: Stream::DEFAULT,
            };
            TraceEvent::with_metadata(event, 0, tag, &mut stacks)
        };
        let long = "kv".repeat(500);
        let one = [paused(1, &long), paused(2, &long)];
        let other = paused(3, &format!("{long}!"));
        let add = |paused: &[TraceEvent]| {
            let mut parts = Parts {
                paused_before: paused.to_vec(),
                ..Parts::default()
            };
            parts.add_paused_regions(&stacks, &mut Budget::new(2000))
        };
        add(&one).expect("they have one tag");
        assert!(add(&[one[0], other]).unwrap_err().is_limit());
    }
}
