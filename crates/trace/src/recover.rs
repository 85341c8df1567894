//! Walks a recording backwards, from the segments at its end to what was there before it began.
//!
//! PyTorch keeps the last events in a ring; a long job, or a recording begun late, has lost the
//! first. What is alive at the end is known, so undoing the events one by one, newest first, tells
//! what was alive at every moment: an `alloc` undone takes its block away, a `free_completed` undone
//! brings it back. What is left when all are undone was there before. The same walk finds what
//! cannot have happened, and for recordings that do not say so, the pool of each event: that of the
//! segment that was around the block at the time, where it is known because the segment is still
//! there at the end.
//!
//! Recordings made with `skip_actions` lack some kinds of events. Of `free_requested` and
//! `free_completed`, the missing one is put in next to the other. With all `segment_*` left out, the
//! segments at the end are taken to have been there all the time, and blocks outside of them get
//! segments of their own. With no segments at the end at all, every block that is not freed is taken
//! to be alive.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use lowtide_core::{
    Action, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot, Stream,
};

use crate::error::{ErrorKind, TraceError};
use crate::model::{InitialBlock, InitialSegment, InitialState, TraceEvent};
use crate::stacks::StackId;

/// What [`recover`] found.
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
/// If the events, or they and the segments, contradict each other. The error names the event.
pub(crate) fn recover(
    device: u32,
    events: Vec<TraceEvent>,
    segments: &[SegmentSnapshot],
    block_stacks: &HashMap<DeviceAddress, StackId>,
) -> Result<Recovered, TraceError> {
    let mut events = complete_frees(events);
    let mut past = Past::from_end(segments, block_stacks)?;
    for (index, event) in events.iter_mut().enumerate().rev() {
        past.undo(index, event)
            .map_err(|error| error.at_event(device, index))?;
    }
    Ok(Recovered {
        events,
        initial: past.into_initial()?,
    })
}

/// Returns whether PyTorch has segments of this size for large requests: those for small requests
/// are 2 MiB each.
pub(crate) fn is_large(size: Bytes) -> bool {
    size > Bytes::mib(2)
}

/// Puts in the half of each free that a recording leaves out throughout.
fn complete_frees(events: Vec<TraceEvent>) -> Vec<TraceEvent> {
    let has = |action| events.iter().any(|event| event.event.action == action);
    let (requested, completed) = (has(Action::FreeRequested), has(Action::FreeCompleted));
    if requested == completed {
        return events;
    }
    let mut complete = Vec::with_capacity(events.len());
    for event in events {
        let with = |action| TraceEvent {
            event: Event {
                action,
                ..event.event
            },
            ..event
        };
        match event.event.action {
            Action::FreeRequested | Action::FreeCompleted => {
                complete.extend([with(Action::FreeRequested), with(Action::FreeCompleted)]);
            }
            _ => complete.push(event),
        }
    }
    complete
}

/// What was alive at some moment of the recording.
struct Past {
    /// By address. No two overlap.
    blocks: BTreeMap<u64, Block>,
    /// By address. No two overlap.
    segments: BTreeMap<u64, Segment>,
    /// Whether what is alive at the end is known.
    knows_end: bool,
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

#[derive(Clone, Copy)]
struct Segment {
    size: u64,
    stream: Stream,
    pool: Option<MempoolId>,
    is_large: bool,
    is_expandable: bool,
}

impl Past {
    /// Returns what was alive at the end.
    fn from_end(
        segments: &[SegmentSnapshot],
        block_stacks: &HashMap<DeviceAddress, StackId>,
    ) -> Result<Past, TraceError> {
        let mut past = Past {
            blocks: BTreeMap::new(),
            segments: BTreeMap::new(),
            knows_end: !segments.is_empty(),
        };
        for segment in segments {
            past.insert_segment(
                segment.address,
                Segment {
                    size: segment.size.get(),
                    stream: segment.stream,
                    pool: Some(segment.pool),
                    is_large: segment.is_large,
                    is_expandable: segment.is_expandable,
                },
            )?;
            for block in segment
                .blocks
                .iter()
                .filter(|block| block.status != BlockStatus::Inactive)
            {
                past.blocks.insert(
                    block.address.get(),
                    Block {
                        size: block.size,
                        requested: block.requested,
                        stream: segment.stream,
                        status: block.status,
                        pool: Some(segment.pool),
                        stack: block_stacks
                            .get(&block.address)
                            .copied()
                            .unwrap_or_default(),
                        freed_by: None,
                    },
                );
            }
        }
        Ok(past)
    }

    /// Undoes one event, and notes in it the pool it happened in.
    fn undo(&mut self, index: usize, event: &mut TraceEvent) -> Result<(), TraceError> {
        match event.event.action {
            Action::FreeCompleted => self.undo_free_completed(index, event),
            Action::FreeRequested => self.undo_free_requested(event),
            Action::Alloc => self.undo_alloc(event),
            Action::SegmentAlloc => self.undo_segment_alloc(event),
            Action::SegmentFree => self.undo_segment_free(event, false),
            Action::SegmentMap => self.undo_segment_map(event),
            Action::SegmentUnmap => self.undo_segment_free(event, true),
            Action::Snapshot | Action::OutOfMemory => Ok(()),
        }
    }

    fn undo_free_completed(
        &mut self,
        index: usize,
        event: &mut TraceEvent,
    ) -> Result<(), TraceError> {
        let Event {
            address,
            size,
            stream,
            ..
        } = event.event;
        let end = address.get().saturating_add(size.get().max(1));
        if let Some((&other, block)) = self.blocks.range(..end).next_back()
            && other.saturating_add(block.size.get()) > address.get()
        {
            return Err(overlap("frees", event.event, DeviceAddress(other), block));
        }
        let pool = event.pool().or_else(|| self.pool_at(address));
        event.set_pool(pool);
        self.blocks.insert(
            address.get(),
            Block {
                size,
                requested: size,
                stream,
                status: BlockStatus::PendingFree,
                pool,
                stack: StackId::NONE,
                freed_by: Some(index),
            },
        );
        Ok(())
    }

    fn undo_free_requested(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        let Event {
            address,
            size,
            stream,
            ..
        } = event.event;
        match self.blocks.get_mut(&address.get()) {
            Some(block) if block.status == BlockStatus::PendingFree => {
                block.status = BlockStatus::Allocated;
                event.set_pool(event.pool().or(block.pool));
                Ok(())
            }
            Some(block) => Err(overlap("frees", event.event, address, block)),
            None if self.knows_end => Err(contradiction(format!(
                "lets go of the block at {address}, which is neither freed later nor waits at the end"
            ))),
            None => {
                let pool = event.pool();
                let block = Block {
                    size,
                    requested: size,
                    stream,
                    status: BlockStatus::Allocated,
                    pool,
                    stack: StackId::NONE,
                    freed_by: None,
                };
                self.blocks.insert(address.get(), block);
                Ok(())
            }
        }
    }

    fn undo_alloc(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        let Event { address, size, .. } = event.event;
        if let Some(block) = self.blocks.remove(&address.get()) {
            event.set_pool(event.pool().or(block.pool));
            return Ok(());
        }
        let end = address.get().saturating_add(size.get().max(1));
        match self.blocks.range(..end).next_back() {
            Some((&other, block)) if other.saturating_add(block.size.get()) > address.get() => Err(
                overlap("allocates", event.event, DeviceAddress(other), block),
            ),
            _ if self.knows_end => Err(contradiction(format!(
                "allocates {size} at {address}, which is neither freed later nor alive at the end, \
                 or is allocated twice"
            ))),
            _ => Ok(()),
        }
    }

    fn undo_segment_alloc(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        let Event { address, size, .. } = event.event;
        match self.segments.get(&address.get()) {
            Some(segment) if segment.size == size.get() => {
                event.set_pool(event.pool().or(segment.pool));
                self.segments.remove(&address.get());
                Ok(())
            }
            None if !self.knows_end => Ok(()),
            _ => Err(contradiction(format!(
                "a segment of {size} at {address} comes, which neither goes later nor is there at \
                 the end, or comes twice"
            ))),
        }
    }

    /// Brings back a segment that was freed, or a range that was unmapped.
    fn undo_segment_free(
        &mut self,
        event: &mut TraceEvent,
        is_expandable: bool,
    ) -> Result<(), TraceError> {
        let Event {
            address,
            size,
            stream,
            ..
        } = event.event;
        let segment = Segment {
            size: size.get(),
            stream,
            pool: event.pool(),
            is_large: is_large(size),
            is_expandable,
        };
        let pool = self.insert_segment(address, segment)?;
        event.set_pool(pool);
        Ok(())
    }

    /// Takes away a range that was mapped, out of the ranges that contain it.
    fn undo_segment_map(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        let Event { address, size, .. } = event.event;
        let (start, end) = (address.get(), address.get().saturating_add(size.get()));
        let around = self.segments.range(..=start).next_back();
        let around = around.map(|(&around, &segment)| (around, segment));
        match around {
            Some((around, segment)) if around + segment.size >= end => {
                event.set_pool(event.pool().or(segment.pool));
                self.segments.remove(&around);
                if around < start {
                    let left = Segment {
                        size: start - around,
                        ..segment
                    };
                    self.segments.insert(around, left);
                }
                if end < around + segment.size {
                    let right = Segment {
                        size: around + segment.size - end,
                        ..segment
                    };
                    self.segments.insert(end, right);
                }
                Ok(())
            }
            None if !self.knows_end => Ok(()),
            _ => Err(contradiction(format!(
                "{size} at {address} is mapped, which is neither unmapped later nor there at the end, \
                 or is mapped twice"
            ))),
        }
    }

    /// Adds a segment; returns its pool, where that is known.
    ///
    /// A range of an expandable segment joins the ranges that it touches, as PyTorch lists them.
    fn insert_segment(
        &mut self,
        address: DeviceAddress,
        mut segment: Segment,
    ) -> Result<Option<MempoolId>, TraceError> {
        let mut start = address.get();
        let end = start.checked_add(segment.size).ok_or_else(|| {
            contradiction(format!(
                "the segment at {address} reaches beyond all addresses"
            ))
        })?;
        let before = self.segments.range(..end.max(start + 1)).next_back();
        if let Some((&other, before)) = before.map(|(other, before)| (other, *before)) {
            let other_end = other + before.size;
            if other_end > start {
                return Err(contradiction(format!(
                    "the segments at {address} ({}) and {} ({}) overlap",
                    Bytes(segment.size),
                    DeviceAddress(other),
                    Bytes(before.size)
                )));
            }
            if other_end == start && joins(&before, &segment) {
                segment = Segment {
                    size: before.size + segment.size,
                    pool: before.pool.or(segment.pool),
                    ..before
                };
                start = other;
            }
        }
        if let Some(&after) = self.segments.get(&end)
            && joins(&segment, &after)
        {
            self.segments.remove(&end);
            segment = Segment {
                size: segment.size + after.size,
                pool: segment.pool.or(after.pool),
                ..after
            };
        }
        self.segments.insert(start, segment);
        Ok(segment.pool)
    }

    /// Returns the pool of the segment around `address`, where that is known.
    fn pool_at(&self, address: DeviceAddress) -> Option<MempoolId> {
        let (&start, segment) = self.segments.range(..=address.get()).next_back()?;
        (address.get() - start < segment.size).then_some(segment.pool)?
    }

    /// Returns what is alive, once every event has been undone.
    fn into_initial(mut self) -> Result<InitialState, TraceError> {
        let blocks = std::mem::take(&mut self.blocks);
        let mut initial = InitialState::default();
        for (address, block) in blocks {
            let size = match block.freed_by {
                None => block.size,
                Some(_) => block.requested.round_up(Bytes(512)),
            };
            self.cover(address, size, &block)?;
            initial.blocks.push(InitialBlock {
                address: DeviceAddress(address),
                size,
                requested: block.requested,
                stream: block.stream,
                pool: block.pool,
                status: block.status,
                stack: block.stack,
            });
        }
        initial.segments = self
            .segments
            .into_iter()
            .map(|(address, segment)| InitialSegment {
                address: DeviceAddress(address),
                size: Bytes(segment.size),
                stream: segment.stream,
                pool: segment.pool,
                is_large: segment.is_large,
                is_expandable: segment.is_expandable,
            })
            .collect();
        Ok(initial)
    }

    /// Makes a segment for a block that lies in none.
    fn cover(&mut self, address: u64, size: Bytes, block: &Block) -> Result<(), TraceError> {
        let around = self.segments.range(..=address).next_back();
        if let Some((&start, segment)) = around
            && address.saturating_add(size.get()) <= start + segment.size
        {
            return Ok(());
        }
        let segment = Segment {
            size: size.get(),
            stream: block.stream,
            pool: block.pool,
            is_large: size > Bytes::mib(1),
            is_expandable: false,
        };
        self.insert_segment(DeviceAddress(address), segment)?;
        Ok(())
    }
}

/// Returns whether two ranges that touch belong to one expandable segment.
fn joins(before: &Segment, after: &Segment) -> bool {
    let same_pool = match (before.pool, after.pool) {
        (Some(before), Some(after)) => before == after,
        _ => true,
    };
    before.is_expandable && after.is_expandable && before.stream == after.stream && same_pool
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
