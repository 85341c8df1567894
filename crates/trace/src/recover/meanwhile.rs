//! Computes the memory at the last event of a recording whose segments are of another moment.
//!
//! PyTorch reads the events of a device and then its segments, each under the allocator's lock but not both under
//! one. Other threads may allocate and free between the two. The segments then have changes without events. The
//! state after the last event of an address is certain:
//!
//! - A block that the events leave in use, and that the segments do not have, was freed meanwhile.
//! - A block of the segments at an address with events, where the events leave none, was allocated meanwhile.
//! - A range that the events leave allocated, and that the segments do not have, was released meanwhile.
//! - A segment where the events leave none, or another one, was allocated meanwhile. Only an expandable segment may
//!   have been mapped in parts.
//!
//! Memory without events is taken to have existed all the time. Segments that are older than the last event, which
//! PyTorch does not write, are treated alike: as if the last events had been undone.
//!
//! A kind without any event may not have been recorded (`skip_actions`). Its events may have happened at any time,
//! so these differences are no sign of other threads:
//! - a block that waits to be freed, if no request to free is recorded,
//! - a block that the segments do not have, if no free is recorded,
//! - a segment that is missing, if no release is recorded. If a block was in use in some released memory at the
//!   last event, all missing free memory counts as released with it, because one call releases all of it.
//!
//! So a recording may be refused that would be consistent if no kind was skipped. It can be recorded again. Reading
//! it with memory that had been released long before would give wrong numbers that look right.

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, SegmentSnapshot,
};

use super::forward::{granule, picture};
use super::kinds::Kinds;
use super::segments::{Segments, is_large};
use crate::budget::{Budget, CHECK_EVERY_EVENTS};
use crate::model::{InitialSegment, TraceEvent};

/// The most calls of other threads between the two locks. Only threads that waited for the lock run in between, a
/// few calls each; one call may release all cached memory. If more calls are needed, the difference is no race:
/// events and segments do not belong together.
const CALLS_MAX: u64 = 1000;

/// The size that the sizes of segments are multiples of.
const PAGE: Bytes = Bytes::mib(2);

/// The memory at the last event.
#[derive(Debug)]
pub(crate) struct Rewound {
    /// The segments, sorted by address.
    pub(crate) segments: Vec<SegmentSnapshot>,
    /// The starts of the segments whose pool is unknown.
    pub(super) without_pool: BTreeSet<DeviceAddress>,
    /// The blocks allocated after the last event.
    pub(crate) younger: BTreeSet<DeviceAddress>,
    /// The least number of events between the last event and the segments.
    pub(crate) missed_events: u64,
}

/// Returns the memory at the last of `events`. `shown` are the segments a little later. Returns `None` if both are
/// the same, or if they differ by more than other threads do meanwhile. O((n + m) log m) for n events and m blocks.
///
/// `has_requests` says whether the blocks of the segments have their requested bytes, and not their sizes instead.
pub(super) fn rewind(
    events: &[TraceEvent],
    shown: &[SegmentSnapshot],
    has_requests: bool,
    budget: &Budget,
) -> Option<Rewound> {
    let mut said = Said::new(events, granule(shown, events));
    for (index, recorded) in events.iter().enumerate() {
        said.listen(recorded)?;
        if index % CHECK_EVERY_EVENTS == 0 {
            budget.check(said.retained_bytes()).ok()?;
        }
    }
    let shown_blocks: usize = shown.iter().map(|segment| segment.blocks.len()).sum();
    let shown_bytes = 3 * shown_blocks * size_of::<(u64, BlockSnapshot)>();
    let bytes = said.retained_bytes() + shown_bytes as u64;
    budget.check(bytes).ok()?;
    let mut rewind = Rewind {
        segments: Segments::default(),
        shown: blocks_in_use(shown),
        left: BTreeMap::new(),
        younger: BTreeSet::new(),
        missed_events: 0,
        calls: 0,
    };
    rewind.keep_segments(&said, shown)?;
    rewind.match_blocks(&said, has_requests);
    rewind.remove_younger(&said);
    rewind.restore_segments(&said)?;
    if rewind.missed_events == 0 || rewind.calls > CALLS_MAX {
        return None;
    }
    Some(rewind.into_rewound(shown))
}

/// Returns whether a block in use has requested bytes of its own. Older recordings have the size of the block there; so has a
/// recording in which all requests in use are multiples of 512 bytes.
pub(super) fn has_requests(shown: &[SegmentSnapshot]) -> bool {
    let mut in_use = blocks_in_use(shown).into_values();
    in_use.any(|block| block.requested != block.size)
}

/// Returns the blocks in use in some segments, by address.
fn blocks_in_use(shown: &[SegmentSnapshot]) -> BTreeMap<u64, BlockSnapshot> {
    let blocks = shown.iter().flat_map(|segment| &segment.blocks);
    let in_use = blocks.filter(|block| block.status != BlockStatus::Inactive);
    in_use.map(|block| (block.address.get(), *block)).collect()
}

/// The final state of the memory that the events mention.
struct Said<'e> {
    events: &'e [TraceEvent],
    /// The size that sizes of blocks are multiples of.
    granule: Bytes,
    /// The blocks that the events leave in use, by address.
    blocks: BTreeMap<u64, Left>,
    /// The ranges by their start. No two overlap.
    ranges: BTreeMap<u64, Range>,
    kinds: Kinds,
}

/// A range that events allocated or released.
#[derive(Clone, Copy)]
struct Range {
    end: u64,
    /// The last segment there.
    segment: InitialSegment,
    is_there: bool,
}

/// A block that the events leave in use.
#[derive(Clone, Copy)]
struct Left {
    requested: Bytes,
    status: BlockStatus,
}

impl Left {
    /// Returns the block with an estimated size.
    fn block_at(&self, address: u64, granule: Bytes) -> BlockSnapshot {
        BlockSnapshot {
            address: DeviceAddress(address),
            size: self.requested.max(Bytes(1)).round_up(granule),
            requested: self.requested,
            status: self.status,
        }
    }
}

impl<'e> Said<'e> {
    fn new(events: &'e [TraceEvent], granule: Bytes) -> Said<'e> {
        Said {
            events,
            granule,
            blocks: BTreeMap::new(),
            ranges: BTreeMap::new(),
            kinds: Kinds::of(events),
        }
    }

    /// Applies the next event. Returns `None` if it contradicts the events before.
    fn listen(&mut self, recorded: &TraceEvent) -> Option<()> {
        let Event { action, size, .. } = recorded.event;
        let left = |status| Left {
            requested: size,
            status,
        };
        let start = recorded.event.address.get();
        // Memory with a block in use is neither allocated nor released, whatever other threads do later.
        let end = start + size.get();
        if action.is_segment()
            && let Some((&last, block)) = self.blocks.range(..end).next_back()
            && last + block.requested.get() > start
        {
            return None;
        }
        match action {
            Action::Alloc => {
                self.blocks.insert(start, left(BlockStatus::Allocated));
            }
            Action::FreeRequested if self.kinds.has(Action::FreeCompleted) => {
                self.blocks.insert(start, left(BlockStatus::PendingFree));
            }
            Action::FreeRequested | Action::FreeCompleted => {
                self.blocks.remove(&start);
            }
            Action::SegmentAlloc | Action::SegmentMap => self.say(recorded, true),
            Action::SegmentFree | Action::SegmentUnmap => self.say(recorded, false),
            _ => {}
        }
        Some(())
    }

    /// Records whether a range exists from now on.
    fn say(&mut self, recorded: &TraceEvent, is_there: bool) {
        let start = recorded.event.address.get();
        let end = start + recorded.event.size.get();
        if start == end {
            return;
        }
        while let Some((&from, &before)) = self.ranges.range(..end).next_back()
            && before.end > start
        {
            self.ranges.remove(&from);
            if from < start {
                let end = start;
                self.ranges.insert(from, Range { end, ..before });
            }
            if before.end > end {
                self.ranges.insert(end, before);
            }
        }
        let range = Range {
            end,
            segment: InitialSegment::of_event(recorded),
            is_there,
        };
        self.ranges.insert(start, range);
    }

    /// Returns the start and end of the block of each event that has one, with the event.
    fn places(&self) -> impl Iterator<Item = (u64, u64, &'e TraceEvent)> {
        let (events, granule) = (self.events.iter(), self.granule);
        let kinds = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
        let of_blocks = events.filter(move |recorded| kinds.contains(&recorded.event.action));
        of_blocks.map(move |recorded| {
            let Event { address, size, .. } = recorded.event;
            let end = address + size.max(Bytes(1)).round_up(granule);
            (address.get(), end.get(), recorded)
        })
    }

    /// Returns the recorded parts of a range, in order, each with its start.
    fn of_range(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Range)> {
        let before = self.ranges.range(..start).next_back();
        let reaching = before.filter(move |(_, before)| before.end > start);
        let ranges = reaching.into_iter().chain(self.ranges.range(start..end));
        ranges.map(|(&from, range)| (from, range))
    }

    /// Returns whether a range of an expandable segment overlaps or touches this range.
    fn is_beside_expandable(&self, start: u64, end: u64) -> bool {
        let mut touching = self.of_range(start.saturating_sub(1), end + 1);
        touching.any(|(_, range)| range.segment.is_expandable)
    }

    /// Returns the least number of events that free a block which the events leave in use; 0 if frees are not
    /// recorded.
    fn events_to_free(&self, left: &Left) -> u64 {
        let requests = match left.status {
            BlockStatus::Allocated => self.kinds.count(&[Action::FreeRequested]),
            _ => 0,
        };
        requests + self.kinds.count(&[Action::FreeCompleted])
    }

    /// Returns about how many bytes of memory this and its result take.
    fn retained_bytes(&self) -> u64 {
        // A tree's nodes are at least half full.
        let block = size_of::<(u64, Left)>() + size_of::<(u64, BlockSnapshot)>();
        let blocks = self.blocks.len() * block;
        let ranges = self.ranges.len() * size_of::<(u64, Range)>();
        (3 * (blocks + ranges) / 2) as u64
    }
}

/// Disjoint ranges by their start: the end of each, and the largest block in it.
#[derive(Default)]
struct Ranges<'e>(BTreeMap<u64, (u64, &'e TraceEvent)>);

impl<'e> Ranges<'e> {
    /// Adds a range around a block, and merges it with the ranges that it overlaps.
    fn join(&mut self, mut start: u64, mut end: u64, mut block: &'e TraceEvent) {
        while let Some((&from, &(to, other))) = self.0.range(..end).next_back()
            && to > start
        {
            self.0.remove(&from);
            (start, end) = (start.min(from), end.max(to));
            if other.event.size > block.event.size {
                block = other;
            }
        }
        self.0.insert(start, (end, block));
    }
}

/// The segments of the recording, while they are changed back to the last event.
struct Rewind {
    segments: Segments,
    /// The blocks in use, by address, that are not yet known to be those that the events leave.
    shown: BTreeMap<u64, BlockSnapshot>,
    /// The blocks that the events leave in use.
    left: BTreeMap<u64, BlockSnapshot>,
    younger: BTreeSet<DeviceAddress>,
    missed_events: u64,
    /// The number of other threads' calls that the changes take.
    calls: u64,
}

impl Rewind {
    /// Keeps the parts of `shown` that existed at the last event. Returns `None` if they overlap.
    fn keep_segments(&mut self, said: &Said<'_>, shown: &[SegmentSnapshot]) -> Option<()> {
        let straddled = straddled(said, shown);
        for segment in shown.iter().map(InitialSegment::from) {
            let mut at = segment.address.get();
            for (from, to) in came_meanwhile(said, &segment, &straddled) {
                self.keep(at, from, &segment)?;
                self.missed_events += 1;
                self.take_blocks(said, from, to);
                at = to;
            }
            self.keep(at, segment.end(), &segment)?;
        }
        Some(())
    }

    fn keep(&mut self, start: u64, end: u64, segment: &InitialSegment) -> Option<()> {
        if start < end {
            self.segments.insert(segment.part(start, end)).ok()?;
        }
        Some(())
    }

    /// Removes the blocks that overlap a range: they were allocated after the last event.
    fn take_blocks(&mut self, said: &Said<'_>, start: u64, end: u64) {
        while let Some((&address, block)) = self.shown.range(..end).next_back()
            && address + block.size.get() > start
        {
            let events = match block.status {
                BlockStatus::PendingFree => &[Action::Alloc, Action::FreeRequested][..],
                _ => &[Action::Alloc],
            };
            self.younger.insert(block.address);
            self.missed_events += said.kinds.count(events);
            self.calls += 1;
            self.shown.remove(&address);
        }
    }

    /// Finds the blocks that the events leave in use among those of the segments. Those that it does not find were
    /// freed meanwhile, and are added.
    fn match_blocks(&mut self, said: &Said<'_>, has_requests: bool) {
        for (&address, left) in &said.blocks {
            let next = said.blocks.range(address + 1..).next();
            let next = next.map_or(u64::MAX, |(&next, _)| next);
            let shown = self.shown.get(&address);
            let Some(&block) = shown.filter(|block| is_same(block, left, next, has_requests))
            else {
                let missed = said.events_to_free(left);
                if missed > 0 {
                    self.left
                        .insert(address, left.block_at(address, said.granule));
                    self.missed_events += missed;
                    self.calls += u64::from(left.status == BlockStatus::Allocated);
                }
                continue;
            };
            let missed = match (left.status, block.status) {
                (BlockStatus::Allocated, BlockStatus::PendingFree) => {
                    said.kinds.count(&[Action::FreeRequested])
                }
                // It became free and was allocated again.
                (BlockStatus::PendingFree, BlockStatus::Allocated) => {
                    said.kinds.count(&[Action::FreeCompleted, Action::Alloc])
                }
                _ => 0,
            };
            self.missed_events += missed;
            self.calls += u64::from(missed > 0);
            self.shown.remove(&address);
            let status = match missed {
                0 => block.status,
                _ => left.status,
            };
            self.left.insert(address, BlockSnapshot { status, ..block });
        }
    }

    /// Removes the blocks at addresses with events, except those that the events leave in use.
    fn remove_younger(&mut self, said: &Said<'_>) {
        let is_free = |action| matches!(action, Action::FreeRequested | Action::FreeCompleted);
        let places = said.events.iter().map(|recorded| recorded.event);
        let places = places.filter(|event| {
            said.kinds.has(Action::Alloc) && (is_free(event.action) || event.action.is_segment())
        });
        let places = places.map(|event| (event.address.get(), event.size));
        let left = said.blocks.iter();
        let left = left.map(|(&address, left)| (address, left.requested));
        for (start, size) in places.chain(left) {
            self.take_blocks(said, start, start + size.get().max(1));
        }
    }

    /// Adds the segments that were released meanwhile, unless that may have happened before the last event. Returns
    /// `None` if one overlaps another.
    fn restore_segments(&mut self, said: &Said<'_>) -> Option<()> {
        // Memory with a block in use at the last event was released later, whatever kinds are recorded.
        let is_away = |&address: &u64| self.segments.around(DeviceAddress(address)).is_none();
        let went = self.left.keys().any(is_away);
        self.restore_ranges(said, went)?;
        if went || said.kinds.has_all_segment_releases() {
            self.restore_lost(said)
        } else {
            Some(())
        }
    }

    /// Adds the ranges that the events leave allocated: of the kinds whose releases are recorded, or of all kinds.
    fn restore_ranges(&mut self, said: &Said<'_>, all: bool) -> Option<()> {
        let mut pages_end = None;
        for (&start, range) in &said.ranges {
            if !range.is_there
                || !(all || said.kinds.has_segment_releases(range.segment.is_expandable))
            {
                continue;
            }
            for (from, to) in self.segments.gaps(start, range.end) {
                self.keep(from, to, &range.segment)?;
                // Adjacent pages may have been unmapped at once.
                self.missed_events += u64::from(pages_end != Some(from));
                pages_end = range.segment.is_expandable.then_some(to);
            }
        }
        Some(())
    }

    /// Adds segments for blocks that lie in no segment of the events or of the recording's end. Such a segment
    /// existed before the first event and was released after the last.
    fn restore_lost(&mut self, said: &Said<'_>) -> Option<()> {
        let unknown = self.unknown_places(said);
        // The driver allocates whole pages. Pages that one block overlaps are of one segment.
        let mut lost = Ranges::default();
        for (start, end, block) in said.places() {
            let before = unknown.range(..end).next_back();
            if before.is_some_and(|(_, &to)| to > start) {
                let start = start - start % PAGE.get();
                lost.join(start, end.next_multiple_of(PAGE.get()), block);
            }
        }
        for (start, (end, block)) in lost.0 {
            for (from, to) in self.unknown(said, start, end) {
                let is_expandable = self.segments.is_beside_expandable(from, to)
                    || said.is_beside_expandable(from, to);
                let segment = lost_segment(block, from, to, is_expandable);
                self.segments.insert(segment).ok()?;
                self.missed_events += 1;
            }
        }
        Some(())
    }

    /// Returns the parts of the blocks' ranges that neither the events nor the segments mention, by their start.
    /// Each segment is visited once, however many blocks overlap it.
    fn unknown_places(&self, said: &Said<'_>) -> BTreeMap<u64, u64> {
        let mut places = Ranges::default();
        for (start, end, block) in said.places() {
            places.join(start, end, block);
        }
        let unknown = |(start, (end, _))| self.unknown(said, start, end);
        places.0.into_iter().flat_map(unknown).collect()
    }

    /// Returns the parts of a range that neither the events nor the segments mention.
    fn unknown(&self, said: &Said<'_>, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut unknown = Vec::new();
        for (from, to) in self.segments.gaps(start, end) {
            let mut at = from;
            for (start, range) in said.of_range(from, to) {
                if at < start {
                    unknown.push((at, start));
                }
                at = range.end;
            }
            if at < to {
                unknown.push((at, to));
            }
        }
        unknown
    }

    fn into_rewound(mut self, shown: &[SegmentSnapshot]) -> Rewound {
        let shown: BTreeMap<DeviceAddress, &SegmentSnapshot> =
            shown.iter().map(|it| (it.address, it)).collect();
        let segments = self.segments.into_initial();
        let without_pool = segments.iter().filter(|segment| segment.pool.is_none());
        let without_pool = without_pool.map(|segment| segment.address).collect();
        self.left.append(&mut self.shown);
        let blocks = &self.left;
        let picture_of = |segment: &InitialSegment| {
            let blocks = blocks.range(segment.address.get()..segment.end());
            let in_use: Vec<BlockSnapshot> = blocks.map(|(_, block)| *block).collect();
            let same = shown.get(&segment.address);
            let same = same.filter(|it| shows(it, segment, &in_use));
            same.map_or_else(|| picture(segment, &in_use), |&it| it.clone())
        };
        Rewound {
            segments: segments.iter().map(picture_of).collect(),
            without_pool,
            younger: self.younger,
            missed_events: self.missed_events,
        }
    }
}

/// Returns a segment, or range of an expandable segment, around the block of an event.
fn lost_segment(block: &TraceEvent, start: u64, end: u64, is_expandable: bool) -> InitialSegment {
    let size = Bytes(end - start);
    InitialSegment {
        address: DeviceAddress(start),
        size,
        stream: block.event.stream,
        pool: block.pool(),
        is_large: is_large(size) || block.event.size > Bytes::mib(1),
        is_expandable,
    }
}

/// Returns the starts of those segments that a block of the events overlaps only in part. Expandable segments are
/// not included, because a part of one may have been unmapped.
fn straddled(said: &Said<'_>, shown: &[SegmentSnapshot]) -> BTreeSet<u64> {
    let plain = shown.iter().filter(|segment| !segment.is_expandable);
    let bounds = |it: &SegmentSnapshot| (it.address.get(), (it.address + it.size).get());
    let mut plain: BTreeMap<u64, u64> = plain.map(bounds).collect();
    let mut straddled = BTreeSet::new();
    for (start, end, _) in said.places() {
        let before = plain.range(..end).rev();
        let reaching = before.take_while(|&(_, &to)| to > start);
        let reached = reaching.filter(|&(&from, &to)| from > start || to < end);
        let reached: Vec<u64> = reached.map(|(&from, _)| from).collect();
        for from in reached {
            // Each segment is visited once, however many blocks overlap it.
            plain.remove(&from);
            straddled.insert(from);
        }
    }
    straddled
}

/// Returns the parts of a segment that were allocated after the last event, in order. Returns none if such events
/// are not recorded.
fn came_meanwhile(
    said: &Said<'_>,
    segment: &InitialSegment,
    straddled: &BTreeSet<u64>,
) -> Vec<(u64, u64)> {
    let (start, end) = (segment.address.get(), segment.end());
    if !said.kinds.has_segment_allocations(segment.is_expandable) {
        return Vec::new();
    }
    if straddled.contains(&start) && said.of_range(start, end).next().is_none() {
        return vec![(start, end)];
    }
    let is_other = |(from, range): &(u64, &Range)| {
        let is_whole = (*from, range.end) == (start, end);
        let is_kind = range.segment.is_expandable == segment.is_expandable;
        !(range.is_there && is_kind && (is_whole || segment.is_expandable))
    };
    let mut others = said.of_range(start, end).filter(is_other);
    if segment.is_expandable {
        let clipped = others.map(|(from, range)| (from.max(start), range.end.min(end)));
        return clipped.collect();
    }
    others.next().map(|_| (start, end)).into_iter().collect()
}

/// Returns whether a block of the segments can be the block that the events leave at its address. `next` is the
/// start of the next block. If `has_requests` is false, the requested bytes are unknown.
fn is_same(block: &BlockSnapshot, left: &Left, next: u64, has_requests: bool) -> bool {
    let is_size = if has_requests {
        block.requested == left.requested
    } else {
        block.size >= left.requested
    };
    is_size && block.address.get() + block.size.get() <= next
}

/// Returns whether a recorded segment is equal to the segment at the last event.
fn shows(shown: &SegmentSnapshot, segment: &InitialSegment, in_use: &[BlockSnapshot]) -> bool {
    let blocks = shown.blocks.iter();
    let shown_in_use = blocks.filter(|block| block.status != BlockStatus::Inactive);
    let is_place = (shown.size, shown.is_expandable) == (segment.size, segment.is_expandable);
    is_place && shown_in_use.eq(in_use)
}
