//! Finds what was there at the last event of a recording whose segments are of another moment.
//!
//! PyTorch takes the events of a device and then its segments, each under the allocator's lock and not both under one.
//! So other threads may allocate and free between the two, and the segments show what no event tells of. What the
//! events say last of a place is certain:
//!
//! - A block that they leave in use, and that is not shown, was freed meanwhile.
//! - A block that is shown in a place they tell of, and that they do not leave there, was allocated meanwhile.
//! - A range that they leave and that is not shown went meanwhile, and what is shown where they say that a range went,
//!   or that there is another, came meanwhile. What is no part of an expandable segment came as a whole.
//!
//! What no event tells of is taken to have been there all the time. Segments that are older than the last event, which
//! PyTorch does not write, are read alike: as if what the last events did had been undone.
//!
//! A kind of which a recording has no event may have been left out (`skip_actions`), and what it would have told may have
//! happened at any time. That is no sign of other threads: a block that waits where no request is told, or is not shown
//! where no free is; memory that is not shown where none goes, unless a block was in use in some of it at the last event:
//! then what is free goes with it, as one call takes all of that. So a recording is refused that could be true if nothing
//! was left out. It can be made again; one that is read with memory that had gone long before would be believed.

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, SegmentSnapshot,
};

use super::forward::{granule, picture};
use super::kinds::Kinds;
use super::segments::{Segment, Segments};
use crate::budget::{Budget, CHECK_EVERY_EVENTS};
use crate::model::{InitialSegment, TraceEvent};

/// Between the two locks only those get in who waited for them, a few calls each; one call may let go of all that is
/// cached. What takes more calls than this is no race: events and segments do not belong together.
const CALLS_MAX: u64 = 1000;

/// What segments are multiples of.
const PAGE: Bytes = Bytes::mib(2);

/// What was there at the last event.
#[derive(Debug)]
pub(crate) struct Rewound {
    /// In the order of their addresses.
    pub(crate) segments: Vec<SegmentSnapshot>,
    /// Where those of `segments` start of whose pool nothing is known.
    pub(super) without_pool: BTreeSet<DeviceAddress>,
    /// The blocks that came after the last event.
    pub(crate) younger: BTreeSet<DeviceAddress>,
    /// How many events there were at least from then until the segments were taken.
    pub(crate) missed_events: u64,
}

/// Returns what was there at the last of `events`, `shown` being what was there a little later; `None` where that is
/// the same, or cannot be told by so little as other threads do meanwhile. O((n + m) log m) for n events and m blocks.
pub(super) fn rewind(
    events: &[TraceEvent],
    shown: &[SegmentSnapshot],
    budget: &Budget,
) -> Option<Rewound> {
    let mut said = Said::new(events);
    for (index, recorded) in events.iter().enumerate() {
        said.listen(recorded)?;
        if index % CHECK_EVERY_EVENTS == 0 {
            budget.check(said.retained_bytes()).ok()?;
        }
    }
    let shown_blocks: usize = shown.iter().map(|segment| segment.blocks.len()).sum();
    let shown_bytes = 3 * shown_blocks * size_of::<(u64, BlockSnapshot)>();
    budget
        .check(said.retained_bytes() + shown_bytes as u64)
        .ok()?;
    let mut rewind = Rewind {
        segments: Segments::default(),
        shown: blocks_in_use(shown),
        left: BTreeMap::new(),
        younger: BTreeSet::new(),
        missed_events: 0,
        calls: 0,
    };
    let granule = granule(shown, events);
    let straddled = straddled(shown, events, granule);
    rewind.keep_segments(&said, shown, &straddled)?;
    let missing = rewind.match_blocks(&said);
    rewind.remove_younger(&said, events);
    rewind.put_back(missing, granule);
    rewind.restore_segments(&said, events, granule)?;
    if rewind.missed_events == 0 || rewind.calls > CALLS_MAX {
        return None;
    }
    Some(rewind.into_rewound(shown))
}

/// Returns the blocks in use of some segments, by address.
fn blocks_in_use(shown: &[SegmentSnapshot]) -> BTreeMap<u64, BlockSnapshot> {
    let blocks = shown.iter().flat_map(|segment| &segment.blocks);
    let in_use = blocks.filter(|block| block.status != BlockStatus::Inactive);
    in_use.map(|block| (block.address.get(), *block)).collect()
}

/// What the events say last.
struct Said {
    /// The blocks that they leave in use, by address.
    blocks: BTreeMap<u64, Left>,
    /// By where they start. No two overlap.
    ranges: BTreeMap<u64, Range>,
    kinds: Kinds,
}

/// A range of which the events say whether it is there.
#[derive(Clone, Copy)]
struct Range {
    end: u64,
    /// What came last, or went.
    segment: Segment,
    is_there: bool,
}

/// A block that the events leave in use.
#[derive(Clone, Copy)]
struct Left {
    requested: Bytes,
    status: BlockStatus,
}

impl Said {
    fn new(events: &[TraceEvent]) -> Said {
        Said {
            blocks: BTreeMap::new(),
            ranges: BTreeMap::new(),
            kinds: Kinds::of(events),
        }
    }

    /// Takes what the next event says; returns `None` if that cannot be.
    fn listen(&mut self, recorded: &TraceEvent) -> Option<()> {
        let Event {
            action,
            address,
            size,
            ..
        } = recorded.event;
        let left = |status| Left {
            requested: size,
            status,
        };
        let start = address.get();
        // No memory comes or goes where a block is in use, before others do anything.
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
            Action::SegmentAlloc | Action::SegmentFree => {
                self.say(recorded, false, action == Action::SegmentAlloc);
            }
            Action::SegmentMap | Action::SegmentUnmap => {
                self.say(recorded, true, action == Action::SegmentMap);
            }
            _ => {}
        }
        Some(())
    }

    /// Notes of a range whether it is there from now on.
    fn say(&mut self, recorded: &TraceEvent, is_expandable: bool, is_there: bool) {
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
            segment: Segment::of_event(recorded, is_expandable),
            is_there,
        };
        self.ranges.insert(start, range);
    }

    /// Returns what is said of the parts of a range, in order, and where each starts.
    fn of_range(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Range)> {
        let before = self.ranges.range(..start).next_back();
        let reaching = before.filter(move |(_, before)| before.end > start);
        let within = self.ranges.range(start..end);
        reaching
            .into_iter()
            .chain(within)
            .map(|(&from, range)| (from, range))
    }

    /// Returns whether one that touches a range is of an expandable segment.
    fn is_beside_expandable(&self, start: u64, end: u64) -> bool {
        let mut touching = self.of_range(start.saturating_sub(1), end + 1);
        touching.any(|(_, range)| range.segment.is_expandable)
    }

    /// Returns how many events at least free a block that the events leave in use: none where they do not tell of that.
    fn events_to_free(&self, left: &Left) -> u64 {
        let requests = match left.status {
            BlockStatus::Allocated => self.kinds.count(&[Action::FreeRequested]),
            _ => 0,
        };
        requests + self.kinds.count(&[Action::FreeCompleted])
    }

    /// Returns about how much memory they take, and what will be made of them.
    fn retained_bytes(&self) -> u64 {
        // A node of a tree is a half to wholly full.
        let block = size_of::<(u64, Left)>() + size_of::<(u64, BlockSnapshot)>();
        let blocks = self.blocks.len() * block;
        let ranges = self.ranges.len() * size_of::<(u64, Range)>();
        (3 * (blocks + ranges) / 2) as u64
    }
}

/// Ranges that are apart, by where they start: the end of each, and the largest block in it.
#[derive(Default)]
struct Ranges<'e>(BTreeMap<u64, (u64, &'e TraceEvent)>);

impl<'e> Ranges<'e> {
    /// Adds a range around a block, as one with those that it overlaps.
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

/// What is shown, on its way back to the last event.
struct Rewind {
    segments: Segments,
    /// The blocks in use, by address, of which it is not known that the events leave them.
    shown: BTreeMap<u64, BlockSnapshot>,
    /// Those that they leave.
    left: BTreeMap<u64, BlockSnapshot>,
    younger: BTreeSet<DeviceAddress>,
    missed_events: u64,
    /// How many calls of other threads that takes.
    calls: u64,
}

impl Rewind {
    /// Keeps of the segments that are `shown` what was there; returns `None` where they overlap.
    fn keep_segments(
        &mut self,
        said: &Said,
        shown: &[SegmentSnapshot],
        straddled: &BTreeSet<u64>,
    ) -> Option<()> {
        for snapshot in shown {
            let segment = Segment::from_snapshot(snapshot);
            let start = snapshot.address.get();
            let mut at = start;
            for (from, to) in came_meanwhile(said, start, &segment, straddled) {
                self.keep(at, from, segment)?;
                self.take_away(said, from, to);
                at = to;
            }
            self.keep(at, start + segment.size, segment)?;
        }
        Some(())
    }

    fn keep(&mut self, start: u64, end: u64, segment: Segment) -> Option<()> {
        if start < end {
            let part = Segment {
                size: end - start,
                ..segment
            };
            self.segments.insert(DeviceAddress(start), part).ok()?;
        }
        Some(())
    }

    /// Takes away a range that came after the last event, and the blocks in it.
    fn take_away(&mut self, said: &Said, start: u64, end: u64) {
        self.missed_events += 1;
        self.take_blocks(said, start, end);
    }

    /// Takes away the blocks that reach into a range: they came after the last event.
    fn take_blocks(&mut self, said: &Said, start: u64, end: u64) {
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

    /// Finds the blocks that the events leave in use among those that are shown, and returns the others.
    fn match_blocks(&mut self, said: &Said) -> Vec<(u64, Left)> {
        let mut missing = Vec::new();
        // Older recordings have the size of the block there.
        let has_requests = self
            .shown
            .values()
            .any(|block| block.requested != block.size);
        for (&address, left) in &said.blocks {
            let next = said.blocks.range(address + 1..).next();
            let next = next.map_or(u64::MAX, |(&next, _)| next);
            let shown = self.shown.get(&address);
            let Some(&block) = shown.filter(|block| is_same(block, left, next, has_requests))
            else {
                let missed = said.events_to_free(left);
                if missed > 0 {
                    missing.push((address, *left));
                    self.missed_events += missed;
                    self.calls += u64::from(left.status == BlockStatus::Allocated);
                }
                continue;
            };
            let missed = match (left.status, block.status) {
                (BlockStatus::Allocated, BlockStatus::PendingFree) => {
                    said.kinds.count(&[Action::FreeRequested])
                }
                // It became free and was handed out again.
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
        missing
    }

    /// Takes away the blocks in places that the events tell of, but for those that they leave there.
    fn remove_younger(&mut self, said: &Said, events: &[TraceEvent]) {
        let is_free = |action| matches!(action, Action::FreeRequested | Action::FreeCompleted);
        let places = events.iter().map(|recorded| recorded.event);
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

    /// Puts back the blocks that were freed since.
    fn put_back(&mut self, missing: Vec<(u64, Left)>, granule: Bytes) {
        for (address, left) in missing {
            let block = BlockSnapshot {
                address: DeviceAddress(address),
                size: left.requested.max(Bytes(1)).round_up(granule),
                requested: left.requested,
                status: left.status,
            };
            self.left.insert(address, block);
        }
    }

    /// Brings back what went since, unless it may have gone before; returns `None` where it overlaps others.
    fn restore_segments(
        &mut self,
        said: &Said,
        events: &[TraceEvent],
        granule: Bytes,
    ) -> Option<()> {
        // Memory in which a block was in use went later, whatever the events tell.
        let is_away = |&address: &u64| self.segments.around(DeviceAddress(address)).is_none();
        let went = self.left.keys().any(is_away);
        self.restore_told(said, went)?;
        match went || said.kinds.tells_all_going() {
            true => self.restore_lost(said, events, granule),
            false => Some(()),
        }
    }

    /// Brings back what the events say is there, of the kinds of memory of which they tell what goes, or of all.
    fn restore_told(&mut self, said: &Said, all: bool) -> Option<()> {
        let mut pages_end = None;
        for (&start, range) in &said.ranges {
            if !range.is_there || !(all || said.kinds.tells_going(range.segment.is_expandable)) {
                continue;
            }
            for (from, to) in self.segments.gaps(start, range.end) {
                self.keep(from, to, range.segment)?;
                // Pages that touch may have gone at once.
                self.missed_events += u64::from(pages_end != Some(from));
                pages_end = range.segment.is_expandable.then_some(to);
            }
        }
        Some(())
    }

    /// Makes segments for blocks of which no event and nothing that is shown says where they were: those were there
    /// before the first event and went after the last.
    fn restore_lost(&mut self, said: &Said, events: &[TraceEvent], granule: Bytes) -> Option<()> {
        let unknown = self.unknown_places(said, events, granule);
        // What the driver hands out has whole pages. Those that one block reaches into are of one segment.
        let mut lost = Ranges::default();
        for (start, end, block) in blocks(events, granule) {
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
                self.keep(
                    from,
                    to,
                    Segment::of_block(block, Bytes(to - from), is_expandable),
                )?;
                self.missed_events += 1;
            }
        }
        Some(())
    }

    /// Returns the parts of the blocks' places of which neither an event nor what is shown says anything, by where they
    /// start. However many blocks lie over a segment, it is looked at once.
    fn unknown_places(
        &self,
        said: &Said,
        events: &[TraceEvent],
        granule: Bytes,
    ) -> BTreeMap<u64, u64> {
        let mut places = Ranges::default();
        for (start, end, block) in blocks(events, granule) {
            places.join(start, end, block);
        }
        let places = places.0.into_iter();
        places
            .flat_map(|(start, (end, _))| self.unknown(said, start, end))
            .collect()
    }

    /// Returns the parts of a range of which neither an event nor what is shown says anything.
    fn unknown(&self, said: &Said, start: u64, end: u64) -> Vec<(u64, u64)> {
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
            let end = (segment.address + segment.size).get();
            let blocks = blocks.range(segment.address.get()..end);
            let in_use: Vec<BlockSnapshot> = blocks.map(|(_, block)| *block).collect();
            let same = shown
                .get(&segment.address)
                .filter(|it| shows(it, segment, &in_use));
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

/// Returns where those of the shown segments start that a block of the events reaches into from outside, or out of. None
/// of the expandable ones, of which a part may have gone.
fn straddled(shown: &[SegmentSnapshot], events: &[TraceEvent], granule: Bytes) -> BTreeSet<u64> {
    let plain = shown.iter().filter(|segment| !segment.is_expandable);
    let bounds = |it: &SegmentSnapshot| (it.address.get(), (it.address + it.size).get());
    let mut plain: BTreeMap<u64, u64> = plain.map(bounds).collect();
    let mut straddled = BTreeSet::new();
    for (start, end, _) in blocks(events, granule) {
        let before = plain.range(..end).rev();
        let reaching = before.take_while(|&(_, &to)| to > start);
        let reached = reaching.filter(|&(&from, &to)| from > start || to < end);
        let reached: Vec<u64> = reached.map(|(&from, _)| from).collect();
        for from in reached {
            // Each is looked at once, however many blocks reach into it.
            plain.remove(&from);
            straddled.insert(from);
        }
    }
    straddled
}

/// Returns where each block that an event tells of starts and ends, with the event.
fn blocks(events: &[TraceEvent], granule: Bytes) -> impl Iterator<Item = (u64, u64, &TraceEvent)> {
    let is_block = |recorded: &&TraceEvent| {
        matches!(
            recorded.event.action,
            Action::Alloc | Action::FreeRequested | Action::FreeCompleted
        )
    };
    events.iter().filter(is_block).map(move |recorded| {
        let Event { address, size, .. } = recorded.event;
        let end = address + size.max(Bytes(1)).round_up(granule);
        (address.get(), end.get(), recorded)
    })
}

/// Returns the parts of a shown segment that came after the last event, in order: none where events do not tell of that.
fn came_meanwhile(
    said: &Said,
    start: u64,
    segment: &Segment,
    straddled: &BTreeSet<u64>,
) -> Vec<(u64, u64)> {
    let end = start + segment.size;
    if !said.kinds.tells_coming(segment.is_expandable) {
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

/// Returns whether a block that is shown can be the one that the events leave at its address, the next one being where
/// `next` says. Where no block `has_requests`, it is not known what was asked for.
fn is_same(block: &BlockSnapshot, left: &Left, next: u64, has_requests: bool) -> bool {
    let is_size = match has_requests {
        true => block.requested == left.requested,
        false => block.size >= left.requested,
    };
    is_size && block.address.get() + block.size.get() <= next
}

/// Returns whether a segment is shown as it was.
fn shows(shown: &SegmentSnapshot, segment: &InitialSegment, in_use: &[BlockSnapshot]) -> bool {
    let blocks = shown.blocks.iter();
    let shown_in_use = blocks.filter(|block| block.status != BlockStatus::Inactive);
    let is_place = (shown.size, shown.is_expandable) == (segment.size, segment.is_expandable);
    is_place && shown_in_use.eq(in_use)
}
