//! What a file says about one device, before it is checked and completed.

use std::sync::Arc;

use hashbrown::HashMap;
use lowtide_core::{Action, BlockSnapshot, BlockStatus, DeviceAddress, SegmentSnapshot};

use crate::budget::Budget;
use crate::error::TraceError;
use crate::model::{AllocatorSettings, Annotation, Trace, TraceEvent};
use crate::recover;
use crate::stacks::{StackId, StackTable};

/// The most devices a recording has: PyTorch counts them in a signed byte.
pub(crate) const DEVICES_MAX: u32 = 128;

/// What a file says about one device.
#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) events: Vec<TraceEvent>,
    segments: Vec<SegmentSnapshot>,
    /// How many blocks the segments have.
    blocks: usize,
    pub(crate) block_stacks: BlockStacks,
    pub(crate) settings: AllocatorSettings,
    pub(crate) annotations: Vec<Annotation>,
    pub(crate) skipped_events: u64,
}

/// The call stacks that allocated the blocks in use at the end, by the addresses of the blocks.
#[derive(Default)]
pub(crate) struct BlockStacks(HashMap<DeviceAddress, StackId>);

impl Parts {
    pub(crate) fn push_segment(&mut self, segment: SegmentSnapshot) {
        self.blocks += segment.blocks.len();
        self.segments.push(segment);
    }

    /// Returns about how much memory they take.
    pub(crate) fn retained_bytes(&self) -> u64 {
        let events = self.events.len() * size_of::<TraceEvent>();
        let annotations = self.annotations.len() * size_of::<Annotation>();
        let segments = self.segments.len() * size_of::<SegmentSnapshot>();
        let blocks =
            self.blocks * size_of::<BlockSnapshot>() + self.block_stacks.0.allocation_size();
        (events + annotations + segments + blocks) as u64
    }

    /// Returns the trace that these are the parts of, with what was there before its first event.
    ///
    /// # Errors
    ///
    /// If it cannot have happened, or would take too much memory; see [`recover::recover`].
    pub(crate) fn into_trace(
        mut self,
        device: u32,
        stacks: Arc<StackTable>,
        budget: &mut Budget,
    ) -> Result<Trace, TraceError> {
        self.segments.sort_by_key(|segment| segment.address);
        let recovered = recover::recover(
            device,
            self.events,
            &self.segments,
            &self.block_stacks,
            budget,
        )?;
        Ok(Trace {
            device,
            events: recovered.events,
            initial: recovered.initial,
            segments: self.segments,
            settings: self.settings,
            stacks,
            annotations: self.annotations,
            skipped_events: self.skipped_events,
        })
    }
}

impl BlockStacks {
    pub(crate) fn insert(&mut self, address: DeviceAddress, stack: StackId) {
        if stack == StackId::NONE {
            self.0.remove(&address);
        } else {
            self.0.insert(address, stack);
        }
    }

    /// Returns the stack that allocated `block`; none for a block that is not in use.
    pub(crate) fn stack(&self, block: &BlockSnapshot) -> StackId {
        match block.status {
            BlockStatus::Inactive => StackId::NONE,
            BlockStatus::Allocated | BlockStatus::PendingFree => {
                self.0.get(&block.address).copied().unwrap_or_default()
            }
        }
    }
}

/// Returns the call stacks of the blocks in use at the end of `trace`. Linear in its events.
pub(crate) fn final_block_stacks(trace: &Trace) -> BlockStacks {
    let mut stacks = BlockStacks::default();
    for block in &trace.initial.blocks {
        stacks.insert(block.address, block.stack);
    }
    for event in trace
        .events
        .iter()
        .filter(|event| event.event.action == Action::Alloc)
    {
        stacks.insert(event.event.address, event.stack);
    }
    stacks
}
