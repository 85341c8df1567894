//! The segments at some event of a recording.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot, Stream};

use crate::error::TraceError;
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
pub(super) struct Segments(BTreeMap<u64, Segment>);

#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub(super) size: u64,
    pub(super) stream: Stream,
    pub(super) pool: Option<MempoolId>,
    pub(super) is_large: bool,
    pub(super) is_expandable: bool,
}

impl Segment {
    pub(super) fn from_snapshot(segment: &SegmentSnapshot) -> Segment {
        Segment {
            size: segment.size.get(),
            stream: segment.stream,
            pool: Some(segment.pool),
            is_large: segment.is_large,
            is_expandable: segment.is_expandable,
        }
    }

    /// Returns the segment, or range of an expandable segment, that an event allocates or releases.
    pub(super) fn of_event(recorded: &TraceEvent, is_expandable: bool) -> Segment {
        let Event { size, stream, .. } = recorded.event;
        Segment {
            size: size.get(),
            stream,
            pool: recorded.pool(),
            is_large: if is_expandable {
                is_of_large_pages(size)
            } else {
                is_large(size)
            },
            is_expandable,
        }
    }

    /// Returns a segment, or range of an expandable segment, with `size` bytes around the block of an event.
    pub(super) fn of_block(recorded: &TraceEvent, size: Bytes, is_expandable: bool) -> Segment {
        Segment {
            size: size.get(),
            stream: recorded.event.stream,
            pool: recorded.pool(),
            is_large: is_large(size) || recorded.event.size > Bytes::mib(1),
            is_expandable,
        }
    }

    /// Returns whether this range and `after`, which starts at its end, are of one expandable segment.
    fn continues_in(&self, after: &Segment) -> bool {
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
    pub(super) fn insert(
        &mut self,
        address: DeviceAddress,
        mut segment: Segment,
    ) -> Result<Option<MempoolId>, TraceError> {
        let mut start = address.get();
        let end = start + segment.size;
        if let Some((&other, &before)) = self.0.range(..end.max(start + 1)).next_back() {
            let other_end = other + before.size;
            if other_end > start || other == start {
                return Err(TraceError::contradiction(format!(
                    "the segments at {address} ({}) and {} ({}) overlap",
                    Bytes(segment.size),
                    DeviceAddress(other),
                    Bytes(before.size)
                )));
            }
            if other_end == start && before.continues_in(&segment) {
                start = other;
                segment = Segment {
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
            segment = Segment {
                size: segment.size + after.size,
                pool: segment.pool.or(after.pool),
                ..after
            };
        }
        self.0.insert(start, segment);
        Ok(segment.pool)
    }

    /// Returns about how many bytes of memory these and their result take.
    pub(super) fn retained_bytes(&self) -> u64 {
        let segment = 3 * size_of::<(u64, Segment)>() / 2 + size_of::<InitialSegment>();
        (self.0.len() * segment) as u64
    }

    /// Returns the segment around `address`.
    pub(super) fn around(&self, address: DeviceAddress) -> Option<&Segment> {
        let (&start, segment) = self.0.range(..=address.get()).next_back()?;
        (address.get() - start < segment.size).then_some(segment)
    }

    /// Returns the size of a block at `address` for a request, as allocators round: up to 512 bytes, if the segment
    /// has room. A segment of pinned host memory may be shorter.
    pub(super) fn rounded(&self, address: u64, requested: Bytes) -> Bytes {
        let rounded = requested.round_up(Bytes(512));
        let below = self.0.range(..=address).next_back();
        let room = below.and_then(|(&start, segment)| {
            let room = segment.size.checked_sub(address - start)?;
            Some(Bytes(room)).filter(|room| *room >= requested)
        });
        room.map_or(rounded, |room| rounded.min(room))
    }

    /// Removes a segment that was allocated. If the segments at the end are unknown, it may be missing, because it
    /// may have stayed to the end.
    pub(super) fn undo_alloc(
        &mut self,
        event: &mut TraceEvent,
        knows_end: bool,
    ) -> Result<(), TraceError> {
        let Event { address, size, .. } = event.event;
        match self.0.get(&address.get()) {
            Some(segment) if segment.size == size.get() => {
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

    /// Adds a segment that was released.
    pub(super) fn undo_free(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        self.bring_back(event, false)
    }

    /// Adds a range that was unmapped.
    pub(super) fn undo_unmap(&mut self, event: &mut TraceEvent) -> Result<(), TraceError> {
        self.bring_back(event, true)
    }

    fn bring_back(
        &mut self,
        event: &mut TraceEvent,
        is_expandable: bool,
    ) -> Result<(), TraceError> {
        let segment = Segment::of_event(event, is_expandable);
        let pool = self.insert(event.event.address, segment)?;
        event.set_pool(pool);
        Ok(())
    }

    /// Removes a range that was mapped, from the range that contains it.
    pub(super) fn undo_map(
        &mut self,
        event: &mut TraceEvent,
        knows_end: bool,
    ) -> Result<(), TraceError> {
        let Event { address, size, .. } = event.event;
        let (start, end) = (address.get(), address.get() + size.get());
        let around = self.0.range(..=start).next_back();
        match around.map(|(&around, &segment)| (around, around + segment.size, segment)) {
            Some((around, around_end, segment)) if around_end >= end && around_end > start => {
                event.set_pool(event.pool().or(segment.pool));
                self.0.remove(&around);
                if around < start {
                    self.0.insert(
                        around,
                        Segment {
                            size: start - around,
                            ..segment
                        },
                    );
                }
                if end < around_end {
                    self.0.insert(
                        end,
                        Segment {
                            size: around_end - end,
                            ..segment
                        },
                    );
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
            at = at.max(from + segment.size);
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }

    /// Returns whether a range of an expandable segment touches this range.
    pub(super) fn is_beside_expandable(&self, start: u64, end: u64) -> bool {
        let before = self.0.range(..start).next_back();
        let touching = before.filter(|(address, before)| *address + before.size == start);
        let beside = [touching.map(|(_, before)| before), self.0.get(&end)];
        beside
            .into_iter()
            .flatten()
            .any(|segment| segment.is_expandable)
    }

    /// Returns how many bytes of a block lie in one segment. Adds a segment for a block that starts in none.
    pub(super) fn cover(&mut self, block: &InitialBlock) -> Bytes {
        let (address, size) = (block.address.get(), block.size.get());
        if let Some((&start, segment)) = self.0.range(..=address).next_back()
            && address < start + segment.size
        {
            return Bytes(size.min(start + segment.size - address));
        }
        let next = self.0.range(address..).next();
        let size = next.map_or(size, |(&next, _)| size.min(next - address));
        let segment = Segment {
            size,
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
        let segments = self.0.into_iter();
        segments
            .map(|(address, segment)| InitialSegment {
                address: DeviceAddress(address),
                size: Bytes(segment.size),
                stream: segment.stream,
                pool: segment.pool,
                is_large: segment.is_large,
                is_expandable: segment.is_expandable,
            })
            .collect()
    }
}
