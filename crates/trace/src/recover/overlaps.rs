//! Refuses blocks that overlap in time and memory, for recordings whose end does not show it.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, DeviceAddress, Event};

use super::kinds::Kinds;
use crate::budget::{Budget, CHECK_EVERY_EVENTS};
use crate::error::{Result, TraceError};
use crate::model::{InitialState, TraceEvent};

/// Returns an error if an allocation takes memory of an earlier block that was not freed. `events` are all events
/// of a device, in order. `initial` is the memory before them. O(n log m) for n events and m blocks at once.
///
/// # Errors
///
/// If there is such an event. The error names the first.
pub(super) fn refuse_overlaps(
    device: u32,
    events: &[TraceEvent],
    initial: &InitialState,
    budget: &Budget,
) -> Result<()> {
    let mut blocks = Blocks::default();
    for block in &initial.blocks {
        blocks.insert(block.address, block.requested);
    }
    for (index, recorded) in events.iter().enumerate() {
        let event = recorded.event;
        match event.action {
            Action::Alloc => {
                if let Some(other) = blocks.insert(event.address, event.size) {
                    let error = Kinds::of(events).explain(overlap(event, other));
                    return Err(error.at_event(device, index));
                }
            }
            // One half of a free may be missing.
            Action::FreeRequested | Action::FreeCompleted => blocks.remove(event.address),
            _ => {}
        }
        if index % CHECK_EVERY_EVENTS == 0 {
            budget.check(blocks.retained_bytes())?;
        }
    }
    Ok(())
}

/// The requested bytes of each block, by its start. No two overlap.
#[derive(Default)]
struct Blocks(BTreeMap<u64, Bytes>);

impl Blocks {
    /// Adds a block, or returns a block that it overlaps. A block of zero bytes overlaps none.
    fn insert(&mut self, address: DeviceAddress, size: Bytes) -> Option<(DeviceAddress, Bytes)> {
        if size.is_zero() {
            return None;
        }
        let below = self.0.range(..(address + size).get()).next_back();
        let below = below.map(|(&start, &size)| (DeviceAddress(start), size));
        let other = below.filter(|&(start, size)| start + size > address);
        if other.is_none() {
            self.0.insert(address.get(), size);
        }
        other
    }

    fn remove(&mut self, address: DeviceAddress) {
        self.0.remove(&address.get());
    }

    fn retained_bytes(&self) -> u64 {
        // A tree's nodes are at least half full.
        (3 * size_of::<(u64, Bytes)>() / 2 * self.0.len()) as u64
    }
}

#[cold]
pub(super) fn overlap(event: Event, (other, size): (DeviceAddress, Bytes)) -> TraceError {
    TraceError::contradiction(format!(
        "allocates {} at {}, where a block of {size} at {other} is in use",
        event.size, event.address
    ))
}

/// Returns the end of a range. An empty range counts as one byte, because a block starts there.
pub(super) fn range_end(address: DeviceAddress, size: Bytes) -> u64 {
    address.get() + size.get().max(1)
}
