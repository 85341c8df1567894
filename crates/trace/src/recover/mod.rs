//! Walks a recording backwards, from the segments at its end to what was there before it began; and one that
//! says only what was there before, forwards first (`forward.rs`).
//!
//! PyTorch keeps the last events in a ring; a long job, or a recording begun late, has lost the
//! first. What is alive at the end is known, so undoing the events one by one, newest first, tells
//! what was alive at every moment: an `alloc` undone takes its block away, a `free_completed` undone
//! brings it back. What is left when all are undone was there before. The same walk finds what
//! cannot have happened, and for recordings that do not say so, the pool of each event: that of the
//! segment that was around the block at the time, where it is known because the segment is still
//! there at the end.
//!
//! Recordings made with `skip_actions` lack some kinds of events:
//! - A block of which only one of `free_requested` and `free_completed` is there gets the other at
//!   the same time.
//! - With every `segment_*` left out, the segments at the end are taken to have been there all the
//!   time. A block that was there before the first event and lies in no segment gets one of its own.
//! - Without any `alloc`, blocks may be freed in memory that only came before.
//! - With no segments at the end, every block that is not freed is taken to be alive then.

mod forward;
mod segments;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use lowtide_core::{
    Action, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot, Stream,
};

use crate::budget::Budget;
use crate::error::{ErrorKind, TraceError};
use crate::model::{InitialBlock, InitialState, TraceEvent};
use crate::parts::BlockStacks;
use crate::stacks::StackId;

pub(crate) use forward::left_at_end;
pub(crate) use segments::is_large;
use segments::{Segment, Segments};

/// After so many events it is looked how much memory has been taken.
const CHECK_EVERY_EVENTS: usize = 4096;

/// What [`recover`] found.
#[derive(Debug)]
pub(crate) struct Recovered {
    /// The events, with both halves of each free, and their pools where they can be told.
    pub(crate) events: Vec<TraceEvent>,
    pub(crate) initial: InitialState,
}

/// Returns what a device had before `events`, of which `segments` were left at the end.
///
/// `segments` are in the order of their addresses. O(n log m) for n events and m blocks at once.
///
/// # Errors
///
/// If the events, or they and the segments, contradict each other, or if what was there would take
/// more memory than `budget` has left. The error names the event.
pub(crate) fn recover(
    device: u32,
    mut events: Vec<TraceEvent>,
    segments: &[SegmentSnapshot],
    block_stacks: &BlockStacks,
    budget: &mut Budget,
) -> Result<Recovered, TraceError> {
    let mut past = Past::from_end(segments, block_stacks)?;
    let has = |action| events.iter().any(|event| event.event.action == action);
    past.knows_allocations = has(Action::Alloc);
    past.knows_completions = has(Action::FreeCompleted);
    for (index, event) in events.iter_mut().enumerate().rev() {
        past.undo(index, event)
            .and_then(|()| match index % CHECK_EVERY_EVENTS {
                0 => budget.check(past.retained_bytes()),
                _ => Ok(()),
            })
            .map_err(|error| error.at_event(device, index))?;
    }
    budget.take(1, past.retained_bytes())?;
    let events = past.complete_frees(events);
    Ok(Recovered {
        events,
        initial: past.into_initial()?,
    })
}

/// What was alive at some moment of the recording.
struct Past {
    /// By address. No two overlap.
    blocks: BTreeMap<u64, Block>,
    segments: Segments,
    /// Whether what is alive at the end is known.
    knows_end: bool,
    /// Whether the recording has `alloc`.
    knows_allocations: bool,
    /// Whether the recording has `free_completed`.
    knows_completions: bool,
    /// The events that are one half of a free whose other half is not there.
    half_frees: Vec<usize>,
}

struct Block {
    /// How long it is at least: its rounded size where that is known, else what was asked for.
    size: Bytes,
    requested: Bytes,
    stream: Stream,
    status: BlockStatus,
    pool: Option<MempoolId>,
    stack: StackId,
    /// The event that freed it, or `None` where it is still there at the end.
    freed_by: Option<usize>,
}

impl Past {
    /// Returns what was alive at the end.
    fn from_end(
        segments: &[SegmentSnapshot],
        block_stacks: &BlockStacks,
    ) -> Result<Past, TraceError> {
        let mut past = Past {
            blocks: BTreeMap::new(),
            segments: Segments::default(),
            knows_end: !segments.is_empty(),
            knows_allocations: false,
            knows_completions: false,
            half_frees: Vec::new(),
        };
        for segment in segments {
            past.segments
                .insert(segment.address, Segment::from_snapshot(segment))?;
            let in_use = |status| status != BlockStatus::Inactive;
            if !is_memory(segment.address, segment.size) {
                return Err(contradiction(format!(
                    "a segment of {} at {} is no memory",
                    segment.size, segment.address
                )));
            }
            for block in segment.blocks.iter().filter(|block| in_use(block.status)) {
                if block.requested > block.size {
                    return Err(contradiction(format!(
                        "the block of {} at {} is for a request of {}",
                        block.size, block.address, block.requested
                    )));
                }
                past.blocks.insert(
                    block.address.get(),
                    Block {
                        size: block.size,
                        requested: block.requested,
                        stream: segment.stream,
                        status: block.status,
                        pool: Some(segment.pool),
                        stack: block_stacks.stack(block),
                        freed_by: None,
                    },
                );
            }
        }
        Ok(past)
    }

    /// Returns about how much memory all this takes, and what will be made of it.
    fn retained_bytes(&self) -> u64 {
        // A node of a tree is a half to wholly full.
        let block = 3 * size_of::<(u64, Block)>() / 2 + size_of::<InitialBlock>();
        let half_free = size_of::<usize>() + size_of::<TraceEvent>();
        (self.blocks.len() * block + self.half_frees.len() * half_free) as u64
            + self.segments.retained_bytes()
    }

    /// Undoes one event, and notes in it the pool it happened in.
    fn undo(&mut self, index: usize, event: &mut TraceEvent) -> Result<(), TraceError> {
        let Event {
            action,
            address,
            size,
            ..
        } = event.event;
        let has_place = !matches!(action, Action::Snapshot | Action::OutOfMemory);
        if has_place && !is_memory(address, size) {
            return Err(contradiction(format!(
                "{} of {size} at {address} is no memory",
                action.name()
            )));
        }
        match action {
            Action::Alloc => self.undo_alloc(event),
            Action::FreeRequested => self.undo_free_requested(index, event),
            Action::FreeCompleted => self.undo_free_completed(index, event),
            Action::SegmentAlloc => {
                self.check_unused(event.event)?;
                self.segments.undo_alloc(event, self.knows_end)
            }
            Action::SegmentFree => self.segments.undo_free(event),
            Action::SegmentMap => {
                self.check_unused(event.event)?;
                self.segments.undo_map(event, self.knows_end)
            }
            Action::SegmentUnmap => self.segments.undo_unmap(event),
            Action::Snapshot
            | Action::OutOfMemory
            | Action::SegmentPaused
            | Action::SegmentResumed => Ok(()),
        }
    }

    /// Fails where a block is in use in memory that only comes, and was freed: it was never allocated. One that is there
    /// at the end may be younger than the last event: PyTorch takes the events first, and then what there is.
    fn check_unused(&self, event: Event) -> Result<(), TraceError> {
        let mut occupants = self.occupants(event.address, event.size);
        match occupants.find(|(_, block)| block.freed_by.is_some()) {
            Some((other, block)) if self.knows_allocations => {
                Err(overlap("takes a segment of", event, other, block))
            }
            _ => Ok(()),
        }
    }

    fn undo_alloc(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        let Event { address, size, .. } = event.event;
        let block = self.blocks.remove(&address.get());
        if block.as_ref().is_none_or(|block| block.size < size)
            && let Some((other, block)) = self.occupant(address, size)
        {
            return Err(overlap("allocates", event.event, other, block));
        }
        let Some(block) = block else {
            if self.knows_end {
                return Err(contradiction(format!(
                    "allocates {size} at {address}, which is neither freed later nor alive at the \
                     end, or is allocated twice"
                )));
            }
            return Ok(());
        };
        event.set_pool(event.pool().or(block.pool));
        if block.status == BlockStatus::PendingFree
            && let Some(freed_by) = block.freed_by
        {
            self.half_frees.push(freed_by);
        }
        Ok(())
    }

    fn undo_free_requested(
        &mut self,
        index: usize,
        event: &mut TraceEvent,
    ) -> Result<(), TraceError> {
        let address = event.event.address;
        if let Some(block) = self.blocks.get_mut(&address.get())
            && block.status == BlockStatus::PendingFree
        {
            block.status = BlockStatus::Allocated;
            event.set_pool(event.pool().or(block.pool));
            return Ok(());
        }
        if self.knows_completions && self.knows_end {
            if let Some((other, block)) = self.occupant(address, event.event.size) {
                return Err(overlap("frees", event.event, other, block));
            }
            return Err(contradiction(format!(
                "lets go of the block at {address}, which is neither freed later nor waits at the end"
            )));
        }
        self.bring_back(index, event, BlockStatus::Allocated)?;
        if !self.knows_completions {
            self.half_frees.push(index);
        }
        Ok(())
    }

    fn undo_free_completed(
        &mut self,
        index: usize,
        event: &mut TraceEvent,
    ) -> Result<(), TraceError> {
        self.bring_back(index, event, BlockStatus::PendingFree)
    }

    /// Brings back the block that `event` freed.
    fn bring_back(
        &mut self,
        index: usize,
        event: &mut TraceEvent,
        status: BlockStatus,
    ) -> Result<(), TraceError> {
        let Event {
            address,
            size,
            stream,
            ..
        } = event.event;
        if let Some((other, block)) = self.occupant(address, size) {
            return Err(overlap("frees", event.event, other, block));
        }
        let pool = event.pool().or_else(|| self.segments.pool_at(address));
        event.set_pool(pool);
        let block = Block {
            size,
            requested: size,
            stream,
            status,
            pool,
            stack: StackId::NONE,
            freed_by: Some(index),
        };
        self.blocks.insert(address.get(), block);
        Ok(())
    }

    /// Returns a block that overlaps the `size` bytes at `address`, or the one at `address`.
    fn occupant(&self, address: DeviceAddress, size: Bytes) -> Option<(DeviceAddress, &Block)> {
        self.occupants(address, size).next()
    }

    /// Returns the blocks that reach into a range, the last one first.
    fn occupants(
        &self,
        address: DeviceAddress,
        size: Bytes,
    ) -> impl Iterator<Item = (DeviceAddress, &Block)> {
        let end = address.get() + size.get().max(1);
        let before = self.blocks.range(..end).rev();
        let reaching = before
            .take_while(move |(start, block)| *start + block.size.get().max(1) > address.get());
        reaching.map(|(&start, block)| (DeviceAddress(start), block))
    }

    /// Returns `events` with both halves of each free.
    fn complete_frees(&mut self, events: Vec<TraceEvent>) -> Vec<TraceEvent> {
        if self.half_frees.is_empty() {
            return events;
        }
        self.half_frees.sort_unstable();
        let mut half_frees = self.half_frees.iter().peekable();
        let mut complete = Vec::with_capacity(events.len() + half_frees.len());
        for (index, event) in events.into_iter().enumerate() {
            if half_frees.next_if(|&&half| half == index).is_none() {
                complete.push(event);
                continue;
            }
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                complete.push(TraceEvent {
                    event: Event {
                        action,
                        ..event.event
                    },
                    ..event
                });
            }
        }
        complete
    }

    /// Returns what is alive, once every event has been undone.
    fn into_initial(mut self) -> Result<InitialState, TraceError> {
        let mut initial = InitialState::default();
        for (address, block) in std::mem::take(&mut self.blocks) {
            let size = match block.freed_by {
                None => block.size,
                Some(_) => block.requested.round_up(Bytes(512)),
            };
            let block = InitialBlock {
                address: DeviceAddress(address),
                size,
                requested: block.requested,
                stream: block.stream,
                pool: block.pool,
                status: block.status,
                stack: block.stack,
            };
            self.segments.cover(&block)?;
            initial.blocks.push(block);
        }
        initial.segments = self.segments.into_initial();
        Ok(initial)
    }
}

/// Returns whether a device can have memory there: far from where sums of addresses overflow.
fn is_memory(address: DeviceAddress, size: Bytes) -> bool {
    address.get() < 1 << 63 && size <= Bytes::REQUEST_MAX
}

/// Fails where something that is no memory is said to be paused.
pub(crate) fn check_paused(paused: &[TraceEvent]) -> Result<(), TraceError> {
    let mut events = paused.iter().map(|recorded| recorded.event);
    match events.find(|event| !is_memory(event.address, event.size)) {
        None => Ok(()),
        Some(Event { address, size, .. }) => Err(contradiction(format!(
            "{size} at {address}, which are no memory, were paused before the first event"
        ))),
    }
}

#[cold]
fn overlap(verb: &str, event: Event, other: DeviceAddress, block: &Block) -> TraceError {
    let until = match block.freed_by {
        Some(index) => format!("until event {index}"),
        None => "to the end".to_owned(),
    };
    contradiction(format!(
        "{verb} {} at {}, where a block of {} at {other} is in use {until}",
        event.size, event.address, block.size
    ))
}

#[cold]
fn contradiction(what: String) -> TraceError {
    TraceError::new(ErrorKind::Contradiction, what)
}
