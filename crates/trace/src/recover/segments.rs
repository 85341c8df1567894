//! The segments at some event of a recording.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId};

use crate::error::{Result, TraceError};
use crate::model::{InitialBlock, InitialSegment, TraceEvent};

/// Returns whether a segment of this size serves PyTorch's large requests. Segments for small requests have 2 MiB.
pub(crate) fn is_large(size: Bytes) -> bool {
    size > Bytes::mib(2)
}

/// Returns whether a range of this size, which was unmapped at once, had pages for large requests. Those have 20
/// MiB, unless the job set another size; the others have 2 MiB.
fn is_of_large_pages(size: Bytes) -> bool {
    (size % Bytes::mib(20)).is_zero()
}

/// Segments, and mapped ranges of expandable segments, by address. No two overlap.
#[derive(Default)]
pub(super) struct Segments(BTreeMap<u64, InitialSegment>);

impl InitialSegment {
    /// Returns the segment, or range of an expandable segment, that an event allocates or releases.
    pub(super) fn of_event(recorded: &TraceEvent) -> InitialSegment {
        let event = recorded.event;
        let is_expandable = matches!(event.action, Action::SegmentMap | Action::SegmentUnmap);
        InitialSegment {
            address: event.address,
            size: event.size,
            stream: event.stream,
            pool: recorded.pool(),
            is_large: if is_expandable {
                is_of_large_pages(event.size)
            } else {
                is_large(event.size)
            },
            is_expandable,
        }
    }

    /// Returns the end of the segment.
    pub(super) fn end(&self) -> u64 {
        (self.address + self.size).get()
    }

    /// Returns the part of the segment between two addresses.
    pub(super) fn part(&self, start: u64, end: u64) -> InitialSegment {
        InitialSegment {
            address: DeviceAddress(start),
            size: Bytes(end - start),
            ..*self
        }
    }

    /// Returns whether this range and `after`, which starts at its end, are of one expandable segment.
    fn continues_in(&self, after: &InitialSegment) -> bool {
        let same_pool = match (self.pool, after.pool) {
            (Some(pool), Some(other)) => pool == other,
            _ => true,
        };
        self.is_expandable && after.is_expandable && self.stream == after.stream && same_pool
    }
}

impl Segments {
    /// Adds a segment. Returns its pool, if it is known.
    ///
    /// A range of an expandable segment is merged with the ranges that it touches, as in PyTorch's snapshots.
    pub(super) fn insert(&mut self, mut segment: InitialSegment) -> Result<Option<MempoolId>> {
        let (start, end) = (segment.address.get(), segment.end());
        if let Some((&other, &before)) = self.0.range(..end.max(start + 1)).next_back() {
            if before.end() > start || other == start {
                return Err(TraceError::contradiction(format!(
                    "the segments at {} ({}) and {} ({}) overlap",
                    segment.address, segment.size, before.address, before.size
                )));
            }
            if before.end() == start && before.continues_in(&segment) {
                segment = InitialSegment {
                    size: before.size + segment.size,
                    pool: before.pool.or(segment.pool),
                    ..before
                };
            }
        }
        if let Some(&after) = self.0.get(&end)
            && segment.continues_in(&after)
        {
            self.0.remove(&end);
            segment = InitialSegment {
                address: segment.address,
                size: segment.size + after.size,
                pool: segment.pool.or(after.pool),
                ..after
            };
        }
        self.0.insert(segment.address.get(), segment);
        Ok(segment.pool)
    }

    /// Returns about how many bytes of memory these and their result take.
    pub(super) fn retained_bytes(&self) -> u64 {
        let segment = 3 * size_of::<(u64, InitialSegment)>() / 2 + size_of::<InitialSegment>();
        (self.0.len() * segment) as u64
    }

    /// Returns the segment around `address`.
    pub(super) fn around(&self, address: DeviceAddress) -> Option<&InitialSegment> {
        let (_, segment) = self.0.range(..=address.get()).next_back()?;
        (address.get() < segment.end()).then_some(segment)
    }

    /// Returns the size of a block at `address` for a request, as allocators round: up to 512 bytes, if the segment
    /// has room. A segment of pinned host memory may be shorter.
    pub(super) fn rounded(&self, address: u64, requested: Bytes) -> Bytes {
        let rounded = requested.round_up(Bytes(512));
        let below = self.0.range(..=address).next_back();
        let room = below.and_then(|(_, segment)| segment.end().checked_sub(address));
        let room = room.map(Bytes).filter(|room| *room >= requested);
        room.map_or(rounded, |room| rounded.min(room))
    }

    /// Removes a segment that was allocated. If the segments at the end are unknown, it may be missing, because it
    /// may have stayed to the end.
    pub(super) fn undo_alloc(&mut self, event: &mut TraceEvent, knows_end: bool) -> Result<()> {
        let Event { address, size, .. } = event.event;
        match self.0.get(&address.get()) {
            Some(segment) if segment.size == size => {
                event.set_pool(event.pool().or(segment.pool));
                self.0.remove(&address.get());
                Ok(())
            }
            None if !knows_end => Ok(()),
            _ => Err(TraceError::contradiction(format!(
                "a segment of {size} at {address} comes, which neither goes later nor is there at \
                 the end, or comes twice"
            ))),
        }
    }

    /// Adds a segment that was released, or a range that was unmapped.
    pub(super) fn undo_release(&mut self, event: &mut TraceEvent) -> Result<()> {
        let pool = self.insert(InitialSegment::of_event(event))?;
        event.set_pool(pool);
        Ok(())
    }

    /// Removes a range that was mapped, from the range that contains it.
    pub(super) fn undo_map(&mut self, event: &mut TraceEvent, knows_end: bool) -> Result<()> {
        let Event { address, size, .. } = event.event;
        let (start, end) = (address.get(), address.get() + size.get());
        let around = self.0.range(..=start).next_back();
        match around.map(|(_, &segment)| segment) {
            Some(segment) if segment.end() >= end && segment.end() > start => {
                event.set_pool(event.pool().or(segment.pool));
                self.0.remove(&segment.address.get());
                let rest = [(segment.address.get(), start), (end, segment.end())];
                for (from, to) in rest.into_iter().filter(|(from, to)| from < to) {
                    self.0.insert(from, segment.part(from, to));
                }
                Ok(())
            }
            _ if !knows_end => Ok(()),
            _ => Err(TraceError::contradiction(format!(
                "{size} at {address} is mapped, which is neither unmapped later nor there at the \
                 end, or is mapped twice"
            ))),
        }
    }

    /// Returns the parts of a range without a segment, in order.
    pub(super) fn gaps(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut at = start;
        let before = self.0.range(..start).next_back();
        for (&from, segment) in before.into_iter().chain(self.0.range(start..end)) {
            if from > at {
                gaps.push((at, from));
            }
            at = at.max(segment.end());
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }

    /// Returns whether a range of an expandable segment touches this range.
    pub(super) fn is_beside_expandable(&self, start: u64, end: u64) -> bool {
        let before = self.0.range(..start).next_back();
        let before = before.map(|(_, before)| before);
        let touching = before.filter(|before| before.end() == start);
        let mut beside = touching.into_iter().chain(self.0.get(&end));
        beside.any(|segment| segment.is_expandable)
    }

    /// Returns how many bytes of a block lie in one segment. Adds a segment for a block that starts in none.
    pub(super) fn cover(&mut self, block: &InitialBlock) -> Bytes {
        let (address, size) = (block.address.get(), block.size.get());
        if let Some(segment) = self.around(block.address) {
            return Bytes(size.min(segment.end() - address));
        }
        let next = self.0.range(address..).next();
        let size = next.map_or(size, |(&next, _)| size.min(next - address));
        let segment = InitialSegment {
            address: block.address,
            size: Bytes(size),
            stream: block.stream,
            pool: block.pool,
            is_large: block.size > Bytes::mib(1),
            is_expandable: false,
        };
        self.0.insert(address, segment);
        Bytes(size)
    }

    /// Returns the segments as those before the first event.
    pub(super) fn into_initial(self) -> Vec<InitialSegment> {
        self.0.into_values().collect()
    }
}
