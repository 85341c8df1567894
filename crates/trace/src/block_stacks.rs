//! The call stacks of the blocks in use at one event of a recording.

use hashbrown::HashMap;
use lowtide_core::{Action, BlockSnapshot, BlockStatus, DeviceAddress};

use crate::model::Trace;
use crate::stacks::StackId;

/// The call stacks that allocated the blocks in use, by block address.
#[derive(Clone, Default)]
pub(crate) struct BlockStacks(HashMap<DeviceAddress, StackId>);

impl BlockStacks {
    pub(crate) fn insert(&mut self, address: DeviceAddress, stack: StackId) {
        if stack == StackId::NONE {
            self.0.remove(&address);
        } else {
            self.0.insert(address, stack);
        }
    }

    /// Returns the stack that allocated the block in use at `address`.
    pub(crate) fn stack_at(&self, address: DeviceAddress) -> StackId {
        self.0.get(&address).copied().unwrap_or_default()
    }

    /// Returns the stack that allocated `block`; [`StackId::NONE`] for a block that is not in use.
    pub(crate) fn stack(&self, block: &BlockSnapshot) -> StackId {
        match block.status {
            BlockStatus::Inactive => StackId::NONE,
            BlockStatus::Allocated | BlockStatus::PendingFree => self.stack_at(block.address),
        }
    }

    /// Returns about how many bytes of memory the stacks take.
    pub(crate) fn retained_bytes(&self) -> u64 {
        self.0.allocation_size() as u64
    }
}

/// Returns the call stacks of the blocks in use at the end of `trace`. Linear in its events.
pub(crate) fn final_block_stacks(trace: &Trace) -> BlockStacks {
    block_stacks_after(trace, trace.events.len())
}

/// Returns the call stacks of the blocks in use after the first `events` events of `trace`. Linear in `events`.
pub(crate) fn block_stacks_after(trace: &Trace, events: usize) -> BlockStacks {
    let mut stacks = BlockStacks::default();
    for block in &trace.initial.blocks {
        stacks.insert(block.address, block.stack);
    }
    for recorded in &trace.events[..events] {
        if recorded.event.action == Action::Alloc {
            stacks.insert(recorded.event.address, recorded.stack);
        }
    }
    stacks
}
