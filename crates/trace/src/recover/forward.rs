//! Walks a recording forwards, from the segments before its first event to those at its end.
//!
//! A recording that is written while the job runs has no segments at its end, because the process may be killed at
//! any time. An event has the requested bytes and not the size of the block. So each block gets the size of its
//! request rounded up to 512 bytes, or to less if blocks are closer.

use std::collections::BTreeMap;

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, SegmentSnapshot,
};

use super::bounds::check_segments;
use super::overlaps::{overlap, range_end};
use super::segments::Segments;
use crate::budget::{Budget, CHECK_EVERY_EVENTS};
use crate::error::{Result, TraceError};
use crate::model::{InitialSegment, TraceEvent};

/// Returns the segments after `events`, sorted by address. `held` are the segments before. O(n log m) for n events
/// and m blocks at once.
///
/// # Errors
///
/// If the events contradict `held` or each other, or if the result would exceed `budget`.
pub(crate) fn left_at_end(
    device: u32,
    held: &[SegmentSnapshot],
    events: &[TraceEvent],
    budget: &mut Budget,
) -> Result<Vec<SegmentSnapshot>> {
    check_segments(held)?;
    let mut present = Present::new(held, granule(held, events))?;
    for (index, event) in events.iter().enumerate() {
        let applied = present.apply(event);
        let checked = applied.and_then(|()| match index % CHECK_EVERY_EVENTS {
            0 => budget.check(present.retained_bytes()),
            _ => Ok(()),
        });
        checked.map_err(|error| error.at_event(device, index))?;
    }
    budget.take(1, present.retained_bytes())?;
    Ok(present.into_segments())
}

/// The memory at some event of the recording.
struct Present {
    /// The blocks in use, by address.
    blocks: BTreeMap<u64, BlockSnapshot>,
    segments: Segments,
    /// The size that sizes of blocks are multiples of.
    granule: Bytes,
}

/// Returns the largest power of two, at most 512 bytes, of which all blocks' addresses are multiples. A request
/// rounded up to it reaches no other block. BFC's blocks are multiples of 256 bytes.
pub(super) fn granule(held: &[SegmentSnapshot], events: &[TraceEvent]) -> Bytes {
    let held = held.iter().flat_map(|segment| &segment.blocks);
    let allocated = events.iter().map(|recorded| recorded.event);
    let allocated = allocated.filter(|event| event.action == Action::Alloc);
    let addresses = held.map(|block| block.address);
    let addresses = addresses.chain(allocated.map(|event| event.address));
    let bits = addresses.fold(512, |bits, address| bits | address.get());
    Bytes(1 << bits.trailing_zeros())
}

impl Present {
    fn new(held: &[SegmentSnapshot], granule: Bytes) -> Result<Present> {
        let mut present = Present {
            blocks: BTreeMap::new(),
            segments: Segments::default(),
            granule,
        };
        for segment in held {
            present.segments.insert(segment.into())?;
            let blocks = segment.blocks.iter();
            let in_use = blocks.filter(|block| block.status != BlockStatus::Inactive);
            let in_use = in_use.map(|block| (block.address.get(), *block));
            present.blocks.extend(in_use);
        }
        Ok(present)
    }

    fn apply(&mut self, recorded: &TraceEvent) -> Result<()> {
        let Event { action, size, .. } = recorded.event;
        let address = recorded.event.address;
        // A copy, because the segments set an event's pool, which is not needed here.
        let mut event = *recorded;
        match action {
            Action::Alloc => {
                if let Some(other) = self.occupant(address, size) {
                    return Err(overlap(event.event, (other.address, other.requested)));
                }
                let block = BlockSnapshot {
                    address,
                    size: size.max(Bytes(1)).round_up(self.granule),
                    requested: size,
                    status: BlockStatus::Allocated,
                };
                self.blocks.insert(address.get(), block);
            }
            Action::FreeRequested => match self.blocks.get_mut(&address.get()) {
                Some(block) if block.status == BlockStatus::Allocated => {
                    block.status = BlockStatus::PendingFree;
                }
                _ => return Err(not_there(recorded.event)),
            },
            Action::FreeCompleted => {
                let block = self.blocks.remove(&address.get());
                return block.map(drop).ok_or_else(|| not_there(recorded.event));
            }
            // To undo the opposite event is to apply this one.
            Action::SegmentAlloc | Action::SegmentMap => {
                return self.segments.undo_release(&mut event);
            }
            Action::SegmentFree => {
                let gone = self.segments.undo_alloc(&mut event, true);
                return gone.map_err(|_| not_there(recorded.event));
            }
            Action::SegmentUnmap => {
                let gone = self.segments.undo_map(&mut event, true);
                return gone.map_err(|_| not_there(recorded.event));
            }
            Action::Snapshot
            | Action::OutOfMemory
            | Action::SegmentPaused
            | Action::SegmentResumed
            | Action::Annotate => {}
        }
        Ok(())
    }

    /// Returns the block in use whose requested bytes overlap the `size` bytes at `address`.
    fn occupant(&self, address: DeviceAddress, size: Bytes) -> Option<&BlockSnapshot> {
        let below = self.blocks.range(..range_end(address, size)).next_back();
        let below = below.map(|(_, block)| block);
        below.filter(|block| range_end(block.address, block.requested) > address.get())
    }

    /// Returns about how many bytes of memory this takes.
    fn retained_bytes(&self) -> u64 {
        // A tree's nodes are at least half full.
        let block = 3 * size_of::<(u64, BlockSnapshot)>() / 2;
        (self.blocks.len() * block) as u64 + self.segments.retained_bytes()
    }

    fn into_segments(self) -> Vec<SegmentSnapshot> {
        let blocks = &self.blocks;
        let segments = self.segments.into_initial().into_iter();
        segments
            .map(|segment| {
                let end = (segment.address + segment.size).get();
                let blocks = blocks.range(segment.address.get()..end);
                let in_use: Vec<BlockSnapshot> = blocks.map(|(_, block)| *block).collect();
                picture(&segment, &in_use)
            })
            .collect()
    }
}

/// Returns a segment with its blocks in use and the free blocks between them.
pub(super) fn picture(segment: &InitialSegment, in_use: &[BlockSnapshot]) -> SegmentSnapshot {
    let end = segment.address + segment.size;
    let mut blocks = Vec::new();
    let mut at = segment.address;
    let push_free = |blocks: &mut Vec<_>, start: DeviceAddress, end: DeviceAddress| {
        if start < end {
            blocks.push(BlockSnapshot {
                address: start,
                size: end.offset_from(start),
                requested: Bytes::ZERO,
                status: BlockStatus::Inactive,
            });
        }
    };
    for (index, block) in in_use.iter().enumerate() {
        push_free(&mut blocks, at, block.address);
        let next = in_use.get(index + 1).map_or(end, |next| next.address);
        let size = block.size.min(next.offset_from(block.address));
        blocks.push(BlockSnapshot { size, ..*block });
        at = block.address + size;
    }
    push_free(&mut blocks, at, end);
    segment.with_blocks(blocks)
}

#[cold]
fn not_there(event: Event) -> TraceError {
    TraceError::contradiction(format!(
        "{} of {} at {}, where there is no such thing",
        event.action.name(),
        event.size,
        event.address
    ))
}
