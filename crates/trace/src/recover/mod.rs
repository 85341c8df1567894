//! Walks a recording backwards, from the segments at its end to the memory before its first event. A recording that
//! has only the segments before its first event is walked forwards first (`forward.rs`).
//!
//! PyTorch keeps the last events in a ring buffer. So a long job, or a recording started late, lacks the first
//! events. The blocks in use at the end are known. Undoing the events one by one, newest first, gives the blocks in
//! use at every event: undoing an `alloc` removes its block, undoing a `free_completed` adds its block again. The
//! blocks that remain after the first event is undone were in use before it.
//!
//! The same walk finds contradictions. For recordings without pools it also finds the pool of each event: that of
//! the segment around the block at the time. The pool is known if that segment still exists at the end.
//!
//! The segments may be a little younger than the last event, with the effects of other threads' calls. If the walk
//! finds that, it starts again from the memory at the last event (`meanwhile.rs`).
//!
//! Recordings made with `skip_actions` lack some kinds of events:
//! - If only one of a block's `free_requested` and `free_completed` is recorded, the other is added at the same
//!   time.
//! - If no `segment_*` is recorded, the segments at the end are taken to have existed all the time. A block from
//!   before the first event that lies in no segment gets one of its own.
//! - If no free is recorded, an address that is allocated twice has unknown blocks before. Such a recording is
//!   refused.
//! - If no `alloc` is recorded, a block may be freed in memory that was allocated only within the recording.
//! - If there are no segments at the end, every block that is not freed is taken to be in use then. Another block
//!   that overlaps it is a contradiction.
//! - A difference that an unrecorded kind of event explains is no sign of other threads.

mod bounds;
mod forward;
mod kinds;
mod meanwhile;
mod overlaps;
mod segments;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, Event, SegmentSnapshot};

use crate::block_stacks::BlockStacks;
use crate::budget::{Budget, CHECK_EVERY_EVENTS};
use crate::error::{Result, TraceError};
use crate::model::{InitialBlock, InitialSegment, InitialState, TraceEvent};
use crate::stacks::StackId;

pub(crate) use bounds::{check_events, check_paused, check_segments};
pub(crate) use forward::left_at_end;
use kinds::Kinds;
pub(crate) use meanwhile::Rewound;
use overlaps::{range_end, refuse_overlaps};
use segments::Segments;
pub(crate) use segments::is_large;

/// The result of [`recover`].
#[derive(Debug)]
pub(crate) struct Recovered {
    /// The events, with both halves of each free, and with their pools if those can be inferred.
    pub(crate) events: Vec<TraceEvent>,
    pub(crate) initial: InitialState,
    /// The memory at the last event, if the segments are of another moment.
    pub(crate) rewound: Option<Rewound>,
}

/// Returns the memory of a device before `events`. `segments` are those after the last event, or a little later.
///
/// `segments` are sorted by address. `end_follows` is whether they were computed from the events, so that they
/// cannot be of another moment. O(n log m) for n events and m blocks at once.
///
/// # Errors
///
/// If the events contradict each other, if they contradict the segments by more than other threads' calls explain,
/// or if the result would exceed `budget`. The error names the event.
pub(crate) fn recover(
    device: u32,
    mut events: Vec<TraceEvent>,
    segments: &[SegmentSnapshot],
    end_follows: bool,
    block_stacks: &BlockStacks,
    budget: &mut Budget,
) -> Result<Recovered> {
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
        // An end that was computed from the events is of their moment.
        Ok(walked) if !walked.saw_younger || end_follows => walked,
        Err(error) if end_follows => return Err(error),
        first => {
            // The first walk's result is not needed any more, and takes memory.
            let first = first.map(drop);
            let mut walk_from = |has_requests| {
                forget_pools(&mut events, &pools_known);
                let rewound = meanwhile::rewind(&events, segments, has_requests, budget)?;
                let walked = walk(&mut events, Some(&rewound), budget).ok()?;
                Some((rewound, walked))
            };
            // No recording says whether it has requested bytes.
            let has_requests = meanwhile::has_requests(segments);
            let attempts = [has_requests, true];
            let attempts = attempts.into_iter().filter(|_| !segments.is_empty());
            match attempts
                .take(2 - usize::from(has_requests))
                .find_map(&mut walk_from)
            {
                Some((of_then, walked)) => {
                    rewound = Some(of_then);
                    walked
                }
                None => first.and_then(|()| walk(&mut events, None, budget))?,
            }
        }
    };
    // Otherwise the walk has compared every block with the blocks at the end.
    if segments.is_empty() || walked.saw_younger {
        refuse_overlaps(device, &events, &walked.initial, budget)?;
    }
    budget.release(pools_known.len() as u64);
    budget.take(1, walked.retained_bytes)?;
    Ok(Recovered {
        events: complete_frees(events, &walked.half_frees),
        initial: walked.initial,
        rewound,
    })
}

/// Returns an error if [`recover`] would, or if it would add the other half of a free. Usually it copies a few
/// events at a time: only a recording that needs more than one walk is copied whole.
///
/// # Errors
///
/// Like [`recover`].
pub(crate) fn check(
    device: u32,
    events: &[TraceEvent],
    segments: &[SegmentSnapshot],
    block_stacks: &BlockStacks,
) -> Result<()> {
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
    if recovered.events.len() != events.len() {
        let what = "a free has only one of its two events";
        return Err(TraceError::contradiction(what));
    }
    Ok(())
}

/// The result of a walk.
struct Walked {
    initial: InitialState,
    /// The events that are one half of a free and lack the other half, in order.
    half_frees: Vec<usize>,
    /// Whether the segments have changes from after the last event, without contradicting the events.
    saw_younger: bool,
    /// The bytes of memory that the result takes, with the missing halves of frees.
    retained_bytes: u64,
}

/// Removes the inferred pool of each event whose pool is not recorded.
fn forget_pools(events: &mut [TraceEvent], pools_known: &[bool]) {
    for (event, &is_known) in events.iter_mut().zip(pools_known) {
        if !is_known {
            event.set_pool(None);
        }
    }
}

/// The memory in use at some event of the recording.
struct Past {
    /// The blocks by address. No two overlap.
    blocks: BTreeMap<u64, Block>,
    /// The addresses of the blocks that an event freed. Built on first use, because few recordings need it.
    freed: Option<BTreeSet<u64>>,
    segments: Segments,
    /// Whether the memory in use at the end is known.
    knows_end: bool,
    /// Whether the end was computed from the events.
    end_follows: bool,
    kinds: Kinds,
    /// The events that are one half of a free and lack the other half.
    half_frees: Vec<usize>,
    /// Whether the segments have changes from after the last event, without contradicting the events.
    saw_younger: bool,
}

struct Block {
    /// The size is a lower bound: its rounded size if that is known, otherwise the requested bytes.
    block: InitialBlock,
    /// The event that freed it; `None` if it still exists at the end.
    freed_by: Option<usize>,
}

impl Block {
    /// Returns the block if it reaches beyond `address`.
    fn reaches(&self, address: DeviceAddress) -> Option<&Block> {
        (range_end(self.block.address, self.block.size) > address.get()).then_some(self)
    }

    /// Returns whether the block exists at the end and cannot be the block of an event with these requested bytes.
    /// A recording without requested bytes has the block's size in their place, which is no less.
    fn is_of_another(&self, requested: Bytes) -> bool {
        let InitialBlock {
            size,
            requested: own,
            ..
        } = self.block;
        let may_be_it = size >= requested && [requested, size].contains(&own);
        self.freed_by.is_none() && !may_be_it
    }
}

impl Past {
    /// Returns the memory in use at the end, or at the last event for `rewound` segments.
    fn from_end(
        segments: &[SegmentSnapshot],
        rewound: Option<&Rewound>,
        block_stacks: &BlockStacks,
    ) -> Result<Past> {
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
            let of_segment = InitialSegment {
                pool,
                ..segment.into()
            };
            past.segments.insert(of_segment)?;
            let in_use = |status| status != BlockStatus::Inactive;
            for block in segment.blocks.iter().filter(|block| in_use(block.status)) {
                // The recorded stack is that of a later block at this address.
                let is_other = rewound.is_some_and(|it| it.younger.contains(&block.address));
                let stack = if is_other {
                    StackId::NONE
                } else {
                    block_stacks.stack(block)
                };
                let block = InitialBlock {
                    pool,
                    ..InitialBlock::of(segment, block, stack)
                };
                past.insert(block, None);
            }
        }
        Ok(past)
    }

    fn insert(&mut self, block: InitialBlock, freed_by: Option<usize>) {
        let address = block.address.get();
        self.blocks.insert(address, Block { block, freed_by });
    }

    /// Undoes all events.
    fn walk(mut self, device: u32, events: &mut [TraceEvent], budget: &Budget) -> Result<Walked> {
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

    /// Returns an error if an undone event shows that the end is of another moment, but the end was computed from
    /// the events.
    fn check_end(&self, event: Event) -> Result<()> {
        if !(self.end_follows && self.saw_younger) {
            return Ok(());
        }
        let Event { size, address, .. } = event;
        let what = event.action.name();
        Err(TraceError::contradiction(format!(
            "{what} of {size} at {address}, which other events contradict"
        )))
    }

    /// Undoes events, the last first. `first` is the index of the first of them in the recording.
    fn undo_all(
        &mut self,
        device: u32,
        first: usize,
        events: &mut [TraceEvent],
        budget: &Budget,
    ) -> Result<()> {
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

    /// Returns about how many bytes of memory this and its result take.
    fn retained_bytes(&self) -> u64 {
        // A tree's nodes are at least half full.
        let block = 3 * size_of::<(u64, Block)>() / 2 + size_of::<InitialBlock>();
        let freed = 3 * size_of::<u64>() / 2;
        let half_free = size_of::<usize>() + size_of::<TraceEvent>();
        let blocks =
            self.blocks.len() * block + self.freed.as_ref().map_or(0, BTreeSet::len) * freed;
        (blocks + self.half_frees.len() * half_free) as u64 + self.segments.retained_bytes()
    }

    /// Undoes one event, and sets its pool.
    fn undo(&mut self, index: usize, event: &mut TraceEvent) -> Result<()> {
        match event.event.action {
            Action::Alloc => {
                let kinds = self.kinds;
                self.undo_alloc(event).map_err(|error| kinds.explain(error))
            }
            Action::FreeRequested => self.undo_free_requested(index, event),
            Action::FreeCompleted => self.bring_back(index, event, BlockStatus::PendingFree),
            Action::SegmentAlloc => {
                self.check_unused(event.event)?;
                self.segments.undo_alloc(event, self.knows_end)
            }
            Action::SegmentFree | Action::SegmentUnmap => self.segments.undo_release(event),
            Action::SegmentMap => {
                self.check_unused(event.event)?;
                self.segments.undo_map(event, self.knows_end)
            }
            Action::Snapshot
            | Action::OutOfMemory
            | Action::SegmentPaused
            | Action::SegmentResumed
            | Action::Annotate => Ok(()),
        }
    }

    /// Returns an error if a block is in use in memory that the undone event allocates, and an event freed it:
    /// nothing allocated that block. A block that still exists at the end may be younger than the last event.
    fn check_unused(&mut self, event: Event) -> Result<()> {
        if !self.kinds.has(Action::Alloc) {
            return Ok(());
        }
        if self.occupant(event.address, event.size).is_some() {
            if let Some(block) = self.freed_occupant(event.address, event.size) {
                return Err(overlap("takes a segment of", event, block));
            }
            self.saw_younger = true;
        }
        Ok(())
    }

    fn undo_alloc(&mut self, event: &mut TraceEvent) -> Result<()> {
        let Event { address, size, .. } = event.event;
        let block = self.blocks.remove(&address.get());
        if let Some(freed) = &mut self.freed {
            freed.remove(&address.get());
        }
        if { block.as_ref() }.is_none_or(|block| block.block.size < size)
            && let Some(block) = self.occupant(address, size)
        {
            return Err(overlap("allocates", event.event, block));
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
        event.set_pool(event.pool().or(block.block.pool));
        if block.block.status == BlockStatus::PendingFree {
            match block.freed_by {
                Some(freed_by) => self.half_frees.push(freed_by),
                // The program freed it after the last event, unless requests to free are not recorded.
                None => self.saw_younger |= self.kinds.has(Action::FreeRequested),
            }
        }
        self.saw_younger |= block.is_of_another(size);
        Ok(())
    }

    fn undo_free_requested(&mut self, index: usize, event: &mut TraceEvent) -> Result<()> {
        let address = event.event.address;
        if let Some(block) = self.blocks.get_mut(&address.get())
            && block.block.status == BlockStatus::PendingFree
        {
            block.block.status = BlockStatus::Allocated;
            self.saw_younger |= block.is_of_another(event.event.size);
            event.set_pool(event.pool().or(block.block.pool));
            return Ok(());
        }
        let knows_completions = self.kinds.has(Action::FreeCompleted);
        if knows_completions && self.knows_end {
            if let Some(block) = self.occupant(address, event.event.size) {
                return Err(overlap("frees", event.event, block));
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

    /// Adds the block that `event` freed.
    fn bring_back(
        &mut self,
        index: usize,
        event: &mut TraceEvent,
        status: BlockStatus,
    ) -> Result<()> {
        let Event { address, size, .. } = event.event;
        if let Some(block) = self.occupant(address, size) {
            return Err(overlap("frees", event.event, block));
        }
        let segment = self.segments.around(address);
        // A segment that does not exist at the end, and is not freed by an event, existed at the last event. So
        // did the segment of a block that reaches out of the one at the end.
        let is_within = segment.is_some_and(|it| range_end(address, size) <= it.end());
        self.saw_younger |= !is_within && self.knows_end && self.kinds.has_all_segment_releases();
        let pool = event.pool().or(segment.and_then(|segment| segment.pool));
        event.set_pool(pool);
        let block = InitialBlock {
            address,
            size,
            requested: size,
            stream: event.event.stream,
            pool,
            status,
            stack: StackId::NONE,
        };
        self.insert(block, Some(index));
        if let Some(freed) = &mut self.freed {
            freed.insert(address.get());
        }
        Ok(())
    }

    /// Returns the last block that overlaps the `size` bytes at `address`. An empty range overlaps the block around
    /// it.
    fn occupant(&self, address: DeviceAddress, size: Bytes) -> Option<&Block> {
        let (_, block) = self.blocks.range(..range_end(address, size)).next_back()?;
        block.reaches(address)
    }

    /// Like [`Past::occupant`], but among the blocks that an event freed. Takes no longer if many others are in use
    /// there.
    fn freed_occupant(&mut self, address: DeviceAddress, size: Bytes) -> Option<&Block> {
        let freed = self.freed.get_or_insert_with(|| {
            let freed = { self.blocks.iter() }.filter(|(_, block)| block.freed_by.is_some());
            freed.map(|(&start, _)| start).collect()
        });
        let start = freed.range(..range_end(address, size)).next_back()?;
        self.blocks[start].reaches(address)
    }

    /// Returns the memory in use after every event was undone, and whether each block lies within a segment. A
    /// block that does not is cut to the part within its segment.
    fn into_initial(mut self) -> (InitialState, bool) {
        let mut initial = InitialState::default();
        let mut are_whole = true;
        let kinds = self.kinds;
        let has_all = kinds.has_segment_allocations(true)
            && kinds.has_segment_allocations(false)
            && kinds.has_all_segment_releases();
        for Block {
            mut block,
            freed_by,
        } in std::mem::take(&mut self.blocks).into_values()
        {
            let size = match freed_by {
                None => block.size,
                Some(_) => self.segments.rounded(block.address.get(), block.requested),
            };
            block.size = size;
            block.size = self.segments.cover(&block);
            are_whole &= block.size == size || !has_all;
            block.requested = block.requested.min(block.size);
            initial.blocks.push(block);
        }
        initial.segments = self.segments.into_initial();
        (initial, are_whole)
    }
}

/// Returns `events` with both halves of each free. `half_frees` are the events whose other half is missing.
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
            let mut half = event;
            half.event.action = action;
            complete.push(half);
        }
    }
    complete
}

#[cold]
fn overlap(verb: &str, event: Event, block: &Block) -> TraceError {
    let until = match block.freed_by {
        Some(index) => format!("until event {index}"),
        None => "to the end".to_owned(),
    };
    let InitialBlock { address, size, .. } = block.block;
    TraceError::contradiction(format!(
        "{verb} {} at {}, where a block of {size} at {address} is in use {until}",
        event.size, event.address
    ))
}
