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
//! The segments may be a little younger than the last event, with what other threads did meanwhile. Where the walk
//! finds that, it begins anew from what was there at the last event (`meanwhile.rs`).
//!
//! Recordings made with `skip_actions` lack some kinds of events:
//! - A block of which only one of `free_requested` and `free_completed` is there gets the other at
//!   the same time.
//! - With every `segment_*` left out, the segments at the end are taken to have been there all the
//!   time. A block that was there before the first event and lies in no segment gets one of its own.
//! - Without any free, nothing is known of what an address had before it was allocated again: such a recording is refused.
//! - Without any `alloc`, blocks may be freed in memory that only came before.
//! - With no segments at the end, every block that is not freed is taken to be alive then, and one that overlaps it for
//!   a contradiction.
//! - What a kind of event that is missing would have told is no sign of other threads.

mod bounds;
mod forward;
mod kinds;
mod meanwhile;
mod overlaps;
mod segments;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{
    Action, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot, Stream,
};

use crate::block_stacks::BlockStacks;
use crate::budget::{Budget, CHECK_EVERY_EVENTS};
use crate::error::TraceError;
use crate::model::{InitialBlock, InitialState, TraceEvent};
use crate::stacks::StackId;

pub(crate) use bounds::{check_events, check_paused, check_segments};
pub(crate) use forward::left_at_end;
use kinds::Kinds;
pub(crate) use meanwhile::Rewound;
use overlaps::{range_end, refuse_overlaps};
pub(crate) use segments::is_large;
use segments::{Segment, Segments};

/// What [`recover`] found.
#[derive(Debug)]
pub(crate) struct Recovered {
    /// The events, with both halves of each free, and their pools where they can be told.
    pub(crate) events: Vec<TraceEvent>,
    pub(crate) initial: InitialState,
    /// What was there at the last event, where the segments are of another moment.
    pub(crate) rewound: Option<Rewound>,
}

/// Returns what a device had before `events`, of which `segments` were left at the end, or a little later.
///
/// `segments` are in the order of their addresses; `end_follows` says whether they follow from the events, so that they
/// are of no other moment. O(n log m) for n events and m blocks at once.
///
/// # Errors
///
/// If the events contradict each other, or the segments more than what others do meanwhile explains, or if what was
/// there would take more memory than `budget` has left. The error names the event.
pub(crate) fn recover(
    device: u32,
    mut events: Vec<TraceEvent>,
    segments: &[SegmentSnapshot],
    end_follows: bool,
    block_stacks: &BlockStacks,
    budget: &mut Budget,
) -> Result<Recovered, TraceError> {
    let pools_known: Vec<bool> = events.iter().map(|event| event.pool_known).collect();
    budget.take(pools_known.len(), size_of::<bool>() as u64)?;
    let walk = |events: &mut [TraceEvent], rewound: Option<&Rewound>, budget: &Budget| {
        let segments = rewound.map_or(segments, |rewound| &rewound.segments);
        forget_pools(events, &pools_known);
        Past::from_end(segments, rewound, block_stacks)?.walk(device, events, budget)
    };
    let mut at_end = Past::from_end(segments, None, block_stacks)?;
    at_end.end_follows = end_follows;
    let mut rewound = None;
    let walked = match at_end.walk(device, &mut events, budget) {
        // An end that follows from the events is of their moment.
        Ok(walked) if !walked.saw_younger || end_follows => walked,
        Err(error) if end_follows => return Err(error),
        first => {
            // What it found is not needed any more, and takes memory.
            let first = first.map(drop);
            forget_pools(&mut events, &pools_known);
            if !segments.is_empty() {
                rewound = meanwhile::rewind(&events, segments, budget);
            }
            let of_then = rewound.as_ref();
            match of_then.and_then(|_| walk(&mut events, of_then, budget).ok()) {
                Some(walked) => walked,
                None => {
                    rewound = None;
                    first.and_then(|()| walk(&mut events, None, budget))?
                }
            }
        }
    };
    // Otherwise the walk has met every block with what is there at the end.
    if segments.is_empty() || walked.saw_younger {
        refuse_overlaps(device, &events, &walked.initial, budget)?;
    }
    budget.give_back(pools_known.len() as u64);
    budget.take(1, walked.retained_bytes)?;
    Ok(Recovered {
        events: complete_frees(events, &walked.half_frees),
        initial: walked.initial,
        rewound,
    })
}

/// Fails where [`recover`] fails, or would add the other half of a free. Mostly it takes no memory for events: most recordings are of one moment.
///
/// # Errors
///
/// As for [`recover`].
pub(crate) fn check(
    device: u32,
    events: &[TraceEvent],
    segments: &[SegmentSnapshot],
    block_stacks: &BlockStacks,
) -> Result<(), TraceError> {
    let mut budget = Budget::new(u64::MAX);
    let mut past = Past::from_end(segments, None, block_stacks)?;
    past.kinds = Kinds::of(events);
    let mut first = events.len();
    let walked = events.rchunks(CHECK_EVERY_EVENTS).try_for_each(|events| {
        first -= events.len();
        past.undo_all(device, first, &mut events.to_vec(), &budget)
    });
    let is_whole = past.half_frees.is_empty() && !past.saw_younger && !segments.is_empty();
    if walked.is_ok() && is_whole && past.into_initial().1 {
        return Ok(());
    }
    let copy = events.to_vec();
    let recovered = recover(device, copy, segments, false, block_stacks, &mut budget)?;
    match recovered.events.len() == events.len() {
        true => Ok(()),
        false => Err(TraceError::contradiction(
            "a free has only one of its two events",
        )),
    }
}

/// What a walk found.
struct Walked {
    initial: InitialState,
    /// The events that are one half of a free whose other half is not there, in order.
    half_frees: Vec<usize>,
    /// Whether the segments showed what came after the last event, though nothing contradicts it.
    saw_younger: bool,
    /// How much memory all that takes, with the other halves.
    retained_bytes: u64,
}

/// Takes from each event the pool that was found for it, where the recording does not say one.
fn forget_pools(events: &mut [TraceEvent], pools_known: &[bool]) {
    for (event, &is_known) in events.iter_mut().zip(pools_known) {
        if !is_known {
            event.set_pool(None);
        }
    }
}

/// What was alive at some moment of the recording.
struct Past {
    /// By address. No two overlap.
    blocks: BTreeMap<u64, Block>,
    /// Where those of them start that an event freed, once that was asked for: few recordings are worth the time.
    freed: Option<BTreeSet<u64>>,
    segments: Segments,
    /// Whether what is alive at the end is known.
    knows_end: bool,
    /// Whether it follows from the events.
    end_follows: bool,
    kinds: Kinds,
    /// The events that are one half of a free whose other half is not there.
    half_frees: Vec<usize>,
    /// Whether the segments showed what came after the last event, though nothing contradicts it.
    saw_younger: bool,
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

impl Block {
    /// Returns it, with where it starts, if it reaches beyond `address`.
    fn reaches(&self, start: u64, address: DeviceAddress) -> Option<(DeviceAddress, &Block)> {
        let start = DeviceAddress(start);
        (range_end(start, self.size) > address.get()).then_some((start, self))
    }

    /// Returns whether it is shown, and is not the one of which an event says that so much was asked for. Where a
    /// recording does not say what was asked for, it says the size, which is no less.
    fn is_of_another(&self, requested: Bytes) -> bool {
        let may_be_it = self.size >= requested && [requested, self.size].contains(&self.requested);
        self.freed_by.is_none() && !may_be_it
    }
}

impl Past {
    /// Returns what was alive at the end, or at the last event where that was `rewound`.
    fn from_end(
        segments: &[SegmentSnapshot],
        rewound: Option<&Rewound>,
        block_stacks: &BlockStacks,
    ) -> Result<Past, TraceError> {
        let mut past = Past {
            blocks: BTreeMap::new(),
            freed: None,
            segments: Segments::default(),
            knows_end: rewound.is_some() || !segments.is_empty(),
            end_follows: false,
            kinds: Kinds::default(),
            half_frees: Vec::new(),
            saw_younger: false,
        };
        check_segments(segments)?;
        for segment in segments {
            let has_pool = rewound.is_none_or(|it| !it.without_pool.contains(&segment.address));
            let pool = has_pool.then_some(segment.pool);
            let of_segment = Segment {
                pool,
                ..Segment::from_snapshot(segment)
            };
            past.segments.insert(segment.address, of_segment)?;
            let in_use = |status| status != BlockStatus::Inactive;
            for block in segment.blocks.iter().filter(|block| in_use(block.status)) {
                // The stack that is shown there is that of a later block.
                let is_other = rewound.is_some_and(|it| it.younger.contains(&block.address));
                let stack = match is_other {
                    true => StackId::NONE,
                    false => block_stacks.stack(block),
                };
                past.blocks.insert(
                    block.address.get(),
                    Block {
                        size: block.size,
                        requested: block.requested,
                        stream: segment.stream,
                        status: block.status,
                        pool,
                        stack,
                        freed_by: None,
                    },
                );
            }
        }
        Ok(past)
    }

    /// Undoes all events.
    fn walk(
        mut self,
        device: u32,
        events: &mut [TraceEvent],
        budget: &Budget,
    ) -> Result<Walked, TraceError> {
        self.kinds = Kinds::of(events);
        self.undo_all(device, 0, events, budget)?;
        let retained_bytes = self.retained_bytes();
        budget.check(retained_bytes)?;
        let mut half_frees = std::mem::take(&mut self.half_frees);
        half_frees.sort_unstable();
        let saw_younger = self.saw_younger;
        let (initial, are_whole) = self.into_initial();
        Ok(Walked {
            initial,
            half_frees,
            saw_younger: saw_younger || !are_whole,
            retained_bytes,
        })
    }

    /// Fails where an event that was undone shows that the end is of another moment, and it cannot be.
    fn check_end(&self, event: Event) -> Result<(), TraceError> {
        match self.end_follows && self.saw_younger {
            true => Err(TraceError::contradiction(format!(
                "{} of {} at {}, which other events contradict",
                event.action.name(),
                event.size,
                event.address
            ))),
            false => Ok(()),
        }
    }

    /// Undoes events, the last first, of which the first has a number.
    fn undo_all(
        &mut self,
        device: u32,
        first: usize,
        events: &mut [TraceEvent],
        budget: &Budget,
    ) -> Result<(), TraceError> {
        for (offset, event) in events.iter_mut().enumerate().rev() {
            let index = first + offset;
            self.undo(index, event)
                .and_then(|()| self.check_end(event.event))
                .and_then(|()| match index % CHECK_EVERY_EVENTS {
                    0 => budget.check(self.retained_bytes()),
                    _ => Ok(()),
                })
                .map_err(|error| error.at_event(device, index))?;
        }
        Ok(())
    }

    /// Returns about how much memory all this takes, and what will be made of it.
    fn retained_bytes(&self) -> u64 {
        // A node of a tree is a half to wholly full.
        let block = 3 * size_of::<(u64, Block)>() / 2 + size_of::<InitialBlock>();
        let freed = 3 * size_of::<u64>() / 2;
        let half_free = size_of::<usize>() + size_of::<TraceEvent>();
        let blocks =
            self.blocks.len() * block + self.freed.as_ref().map_or(0, BTreeSet::len) * freed;
        (blocks + self.half_frees.len() * half_free) as u64 + self.segments.retained_bytes()
    }

    /// Undoes one event, and notes in it the pool it happened in.
    fn undo(&mut self, index: usize, event: &mut TraceEvent) -> Result<(), TraceError> {
        match event.event.action {
            Action::Alloc => {
                let kinds = self.kinds;
                self.undo_alloc(event).map_err(|error| kinds.explain(error))
            }
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

    /// Fails where a block is in use in memory that only comes, and was freed: it was never allocated. One that is shown
    /// may be younger than the last event.
    fn check_unused(&mut self, event: Event) -> Result<(), TraceError> {
        if !self.kinds.has(Action::Alloc) {
            return Ok(());
        }
        if self.occupant(event.address, event.size).is_some() {
            if let Some((other, block)) = self.freed_occupant(event.address, event.size) {
                return Err(overlap("takes a segment of", event, other, block));
            }
            self.saw_younger = true;
        }
        Ok(())
    }

    fn undo_alloc(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        let Event { address, size, .. } = event.event;
        let block = self.blocks.remove(&address.get());
        if let Some(freed) = &mut self.freed {
            freed.remove(&address.get());
        }
        if block.as_ref().is_none_or(|block| block.size < size)
            && let Some((other, block)) = self.occupant(address, size)
        {
            return Err(overlap("allocates", event.event, other, block));
        }
        let Some(block) = block else {
            if self.knows_end {
                return Err(TraceError::contradiction(format!(
                    "allocates {size} at {address}, which is neither freed later nor alive at the \
                     end, or is allocated twice"
                )));
            }
            return Ok(());
        };
        event.set_pool(event.pool().or(block.pool));
        if block.status == BlockStatus::PendingFree {
            match block.freed_by {
                Some(freed_by) => self.half_frees.push(freed_by),
                // Its program let go of it after the last event, unless that is left out.
                None => self.saw_younger |= self.kinds.has(Action::FreeRequested),
            }
        }
        self.saw_younger |= block.is_of_another(size);
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
            self.saw_younger |= block.is_of_another(event.event.size);
            event.set_pool(event.pool().or(block.pool));
            return Ok(());
        }
        let knows_completions = self.kinds.has(Action::FreeCompleted);
        if knows_completions && self.knows_end {
            if let Some((other, block)) = self.occupant(address, event.event.size) {
                return Err(overlap("frees", event.event, other, block));
            }
            return Err(TraceError::contradiction(format!(
                "lets go of the block at {address}, which is neither freed later nor waits at the end"
            )));
        }
        self.bring_back(index, event, BlockStatus::Allocated)?;
        if !knows_completions {
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
        let segment = self.segments.around(address);
        // What is not shown and does not go later was there at the last event.
        self.saw_younger |= segment.is_none() && self.knows_end && self.kinds.tells_all_going();
        let pool = event.pool().or(segment.and_then(|segment| segment.pool));
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
        if let Some(freed) = &mut self.freed {
            freed.insert(address.get());
        }
        Ok(())
    }

    /// Returns the last block that overlaps the `size` bytes at `address`, or the one at `address`.
    fn occupant(&self, address: DeviceAddress, size: Bytes) -> Option<(DeviceAddress, &Block)> {
        let (&start, block) = self.blocks.range(..range_end(address, size)).next_back()?;
        block.reaches(start, address)
    }

    /// Returns the last such block that an event freed, however many that are shown are there.
    fn freed_occupant(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
    ) -> Option<(DeviceAddress, &Block)> {
        let freed = self.freed.get_or_insert_with(|| {
            let freed = { self.blocks.iter() }.filter(|(_, block)| block.freed_by.is_some());
            freed.map(|(&start, _)| start).collect()
        });
        let &start = freed.range(..range_end(address, size)).next_back()?;
        self.blocks[&start].reaches(start, address)
    }

    /// Returns what is alive, once every event has been undone, and whether each block lies within a segment. Of one
    /// that does not, what does is alive.
    fn into_initial(mut self) -> (InitialState, bool) {
        let mut initial = InitialState::default();
        let mut are_whole = true;
        let kinds = self.kinds;
        let tells_all =
            kinds.tells_coming(true) && kinds.tells_coming(false) && kinds.tells_all_going();
        for (address, block) in std::mem::take(&mut self.blocks) {
            let size = match block.freed_by {
                None => block.size,
                Some(_) => self.segments.rounded(address, block.requested),
            };
            let mut block = InitialBlock {
                address: DeviceAddress(address),
                size,
                requested: block.requested,
                stream: block.stream,
                pool: block.pool,
                status: block.status,
                stack: block.stack,
            };
            block.size = self.segments.cover(&block);
            are_whole &= block.size == size || !tells_all;
            block.requested = block.requested.min(block.size);
            initial.blocks.push(block);
        }
        initial.segments = self.segments.into_initial();
        (initial, are_whole)
    }
}

/// Returns `events` with both halves of each free; `half_frees` are those of which one is missing.
fn complete_frees(events: Vec<TraceEvent>, half_frees: &[usize]) -> Vec<TraceEvent> {
    if half_frees.is_empty() {
        return events;
    }
    let mut complete = Vec::with_capacity(events.len() + half_frees.len());
    let mut half_frees = half_frees.iter().peekable();
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

#[cold]
fn overlap(verb: &str, event: Event, other: DeviceAddress, block: &Block) -> TraceError {
    let until = match block.freed_by {
        Some(index) => format!("until event {index}"),
        None => "to the end".to_owned(),
    };
    TraceError::contradiction(format!(
        "{verb} {} at {}, where a block of {} at {other} is in use {until}",
        event.size, event.address, block.size
    ))
}
