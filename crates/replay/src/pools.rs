//! Infers the pool of each recorded segment, if a recording does not say it.
//!
//! Up to torch 2.14 a recording names the pools only of segments that exist at the end. But the addresses show more:
//!
//! - A request takes the smallest free block of its pool that fits. A free block that would have fitted better than
//!   the block taken lies in a segment of another pool.
//! - An expandable segment is one range, and grows at the lowest addresses with room for a request. Memory behind
//!   other segments, or with room below it, is of another pool.
//! - When a pool is emptied, its wholly free segments are released. A free segment that stays is another pool's.
//!
//! Segments that such evidence separates get different pools, and all others the same pool. In these pools,
//! PyTorch's allocator does what was recorded.

mod expandable;

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{
    Action, BlockStatus, Bytes, CachingConfig, DeviceAddress, Event, FreeBlockOrder, MempoolId,
    SegmentSnapshot, Stream,
};
use lowtide_trace::{InitialBlock, Trace};

use crate::apart::Apart;
use crate::card::Card;
use crate::initial::Initial;
use crate::initial_sizes::UNSPLIT_END_MAX;
use crate::settings::{config_of, releases_some};

/// The largest request that small segments serve, and the largest end that stays on a large block.
pub(crate) const SMALL_REQUEST_MAX: Bytes = Bytes::mib(1);
const BLOCK_MIN: Bytes = Bytes(512);
const SMALL_SEGMENT: Bytes = Bytes::mib(2);

/// The largest hole between runs of pages of one expandable segment in the first snapshot, which lists each run. On
/// cards with more memory, pools are further apart. On smaller ones, where runs grow is the evidence.
const SEGMENT_HOLE_MAX: Bytes = Bytes::gib(64);

/// The most free blocks and segments that are examined for evidence, which takes seconds. A recording of some
/// megabytes could have one for every two of its events. Tests have a lower bound.
const LOOKED_AT_MAX: usize = if cfg!(test) { 1 << 23 } else { 1 << 26 };

/// Returns what the addresses of a recording show, with `initial` as its state before the first event. `None` if the
/// recording says everything itself, contradicts itself, or has more evidence than is kept or examined.
///
/// Takes O(n log n) for n events, and more in three cases:
///
/// - for each free block that a request which got new memory could have taken;
/// - for each segment below an initial segment that grows;
/// - for the memory that stays when other memory is released.
fn infer(trace: &Trace, initial: &Initial, card: Card) -> Option<Inferred> {
    let is_release = |action| matches!(action, Action::SegmentFree | Action::SegmentUnmap);
    let mut events = trace.events.iter();
    let knows_pools = events.all(|event| event.pool_known || !is_release(event.event.action));
    let has_ranges = initial.segments.iter().any(|segment| segment.is_expandable);
    if knows_pools && initial.uncertain.is_empty() && !has_ranges {
        return None;
    }
    let ends = initial.uncertain.iter().map(|&end| (end, Bytes::ZERO));
    let mut layout = Layout {
        config: config_of(trace),
        uncertain: ends.collect(),
        ..Layout::default()
    };
    let page_size = layout.config.large_segment_size;
    let room = |card_size| CachingConfig::expandable_segment_size(card_size, page_size);
    layout.room = card.full_size_min.map(room);
    for (segment, known) in initial.segments.iter().zip(&trace.initial.segments) {
        layout.adopt(segment, known.pool);
    }
    layout.adopted = layout.segments.len();
    layout.separate_adopted();
    let is_pending = |block: &&InitialBlock| block.status == BlockStatus::PendingFree;
    layout.waiting = trace.initial.blocks.iter().filter(is_pending).count();
    let mut owners = Vec::with_capacity(trace.events.len());
    for recorded in &trace.events {
        owners.push(layout.apply(recorded.event, recorded.pool())?);
        if layout.apart.is_too_much() || layout.looked_at > LOOKED_AT_MAX {
            return None;
        }
    }
    layout.end_release(None);
    let pools = layout.pools();
    let ranges = layout.ranges(&initial.segments, &pools);
    let pools = Some(pools).filter(|_| !knows_pools);
    let pools = pools.map(|mut pools| {
        let pool_of = |owner: Option<usize>| owner.map_or(MempoolId::DEFAULT, |owner| pools[owner]);
        let events = owners.into_iter().map(pool_of).collect();
        let count = pools.iter().collect::<BTreeSet<_>>().len();
        pools.truncate(trace.initial.segments.len());
        InferredPools {
            initial: pools,
            events,
            count,
        }
    });
    let mut shorter_by = layout.shorter_by;
    shorter_by.extend(layout.uncertain);
    shorter_by.retain(|_, by| (Bytes(1)..=UNSPLIT_END_MAX).contains(by));
    Some(Inferred {
        pools,
        shorter_by,
        ranges,
    })
}

/// The pools of a recording's segments and events.
#[derive(Debug)]
pub(crate) struct EventPools<'a> {
    pub(crate) trace: &'a Trace,
    /// The options that the job ran with.
    pub(crate) config: CachingConfig,
    pub(crate) card: Card,
    /// The segments before the first event, in their pools.
    pub(crate) initial_segments: Vec<SegmentSnapshot>,
    /// For initial segments that lie inside a longer address range, by segment address: the start of the range.
    pub(crate) initial_ranges: BTreeMap<DeviceAddress, DeviceAddress>,
    /// The pools inferred from addresses; `None` if the recording names them.
    inferred: Option<InferredPools>,
}

impl<'a> EventPools<'a> {
    /// Takes as long as [`infer`].
    pub(crate) fn new(trace: &'a Trace) -> EventPools<'a> {
        let mut initial = Initial::new(trace);
        let config = config_of(trace);
        let card = Card::new(trace, config.large_segment_size);
        let Inferred {
            pools,
            shorter_by,
            ranges,
        } = infer(trace, &initial, card).unwrap_or_default();
        initial.shorten(&shorter_by);
        if let Some(pools) = &pools {
            for (segment, pool) in initial.segments.iter_mut().zip(&pools.initial) {
                segment.pool = *pool;
            }
        }
        EventPools {
            trace,
            config,
            card,
            initial_segments: initial.segments,
            initial_ranges: ranges,
            inferred: pools,
        }
    }

    /// Returns the pool of the event at `index`.
    pub(crate) fn of(&self, index: usize) -> MempoolId {
        let inferred = self.inferred.as_ref().map(|pools| pools.events[index]);
        inferred.unwrap_or(self.trace.events[index].event.pool)
    }

    /// Returns the number of pools inferred from addresses; `None` if the recording names the pools.
    pub(crate) fn inferred_count(&self) -> Option<usize> {
        self.inferred.as_ref().map(|pools| pools.count)
    }

    /// Returns the pool of the initial segment at `index`.
    pub(crate) fn of_initial(&self, index: usize) -> MempoolId {
        let inferred = self.inferred.as_ref().map(|pools| pools.initial[index]);
        inferred
            .or(self.trace.initial.segments[index].pool)
            .unwrap_or_default()
    }
}

/// Everything inferred from a recording's addresses.
#[derive(Debug, Default)]
struct Inferred {
    /// `None` if the recording names the pools.
    pools: Option<InferredPools>,
    /// By how many bytes free blocks are shorter than in [`Initial`], by their addresses there.
    shorter_by: BTreeMap<DeviceAddress, Bytes>,
    /// The starts of expandable segments whose beginning was not mapped before the first event, by the address of
    /// the first mapped memory.
    ranges: BTreeMap<DeviceAddress, DeviceAddress>,
}

/// The pools inferred from a recording's addresses.
#[derive(Debug)]
struct InferredPools {
    /// The pool of each initial segment.
    initial: Vec<MempoolId>,
    /// The pool of each event that allocates a block or concerns a segment.
    events: Vec<MempoolId>,
    /// The number of different pools.
    count: usize,
}

/// The segments and blocks that the recording has led to so far.
#[derive(Default)]
struct Layout {
    config: CachingConfig,
    /// By how many bytes some free blocks must be shorter than here, by address. These blocks may be shorter, and
    /// the block before each is still allocated.
    uncertain: BTreeMap<DeviceAddress, Bytes>,
    /// The same for those whose block before was freed.
    shorter_by: BTreeMap<DeviceAddress, Bytes>,
    segments: Vec<InferredSegment>,
    /// Every block, by address.
    blocks: BTreeMap<DeviceAddress, Block>,
    /// The free blocks, by owner.
    free: BTreeMap<Owner, BTreeSet<(Bytes, DeviceAddress)>>,
    /// The evidence that segments are in different pools.
    apart: Apart,
    /// The number of free blocks and segments examined for that evidence.
    looked_at: usize,
    /// The free blocks that would be released if their pools were emptied, wholly or in pages. Each as its segment
    /// and address.
    releasable: BTreeSet<(usize, DeviceAddress)>,
    /// The segment that was allocated or mapped for the next request.
    fresh: Option<usize>,
    /// The expandable segment that began for the next request.
    begun: Option<usize>,
    /// The size of an expandable segment's address range, if the recording shows it.
    room: Option<Bytes>,
    /// The owners of ranges that were reserved for a request although the card had no memory. The range stays, and
    /// the next segment of its owner begins there.
    empty: BTreeSet<Owner>,
    /// The segments that released memory since the last request or free.
    released: BTreeSet<usize>,
    /// The number of blocks that were freed and are not free yet.
    waiting: usize,
    /// Segments that are in some private pool.
    private: BTreeSet<usize>,
    /// The expandable segments with mapped memory, by stream and start.
    expandable: BTreeMap<(Stream, DeviceAddress), usize>,
    /// The number of segments that existed before the first event. They are the first of `segments`.
    adopted: usize,
    /// Expandable segments that began below another and may be the same segment: pairs of the upper one and the
    /// lower one.
    beginnings: Vec<(usize, usize)>,
    /// Segments that turned out to be a part of another, with that other segment.
    joined: BTreeMap<usize, usize>,
}

/// The requests that a segment serves, apart from its pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Owner {
    stream: Stream,
    is_large: bool,
}

struct InferredSegment {
    owner: Owner,
    pool: Option<MempoolId>,
    start: DeviceAddress,
    /// The start address when the segment was first seen.
    first: DeviceAddress,
    /// The end of the memory that was ever mapped, for an expandable segment.
    end: DeviceAddress,
    is_expandable: bool,
    /// Whether it is known to be for large requests or for small ones. For initial segments that were released,
    /// only the size shows it, unless they had blocks.
    is_kind_known: bool,
    held_bytes: Bytes,
}

#[derive(Clone, Copy)]
struct Block {
    size: Bytes,
    segment: usize,
    is_free: bool,
}

impl Layout {
    /// Applies an event, and returns the segment that it concerns. Returns `None` if the event contradicts the
    /// events before.
    fn apply(&mut self, event: Event, pool: Option<MempoolId>) -> Option<Option<usize>> {
        let Event { action, size, .. } = event;
        let (address, stream) = (event.address, event.stream);
        let is_release = matches!(action, Action::SegmentFree | Action::SegmentUnmap);
        // PyTorch waits for other streams before it releases anything, except for requests that release only some
        // memory.
        let goes_on = action == Action::FreeCompleted && releases_some(&self.config);
        let released = !self.released.is_empty();
        if let Some(begun) = self.begun.take() {
            let request = (action == Action::Alloc).then(|| self.config.block_size(size));
            self.separate_begun(begun, request);
        }
        if !is_release && !goes_on {
            self.end_release(Some(event));
        }
        match action {
            Action::SegmentAlloc => {
                let is_large = size > SMALL_SEGMENT;
                let owner = Owner { stream, is_large };
                let segment = self.insert_segment(owner, pool, address, size, false);
                self.insert_free(address, size, segment);
                self.fresh = Some(segment);
                Some(Some(segment))
            }
            Action::SegmentMap => self.map(address, size, stream, pool).map(Some),
            Action::Alloc => self.take(address, size).map(Some),
            Action::FreeCompleted => self.give(address).map(Some),
            Action::SegmentFree | Action::SegmentUnmap => self.release(address, size).map(Some),
            Action::OutOfMemory => self.refuse((size, stream), pool, released).map(Some),
            Action::FreeRequested => {
                self.waiting += 1;
                Some(None)
            }
            Action::Snapshot
            | Action::SegmentPaused
            | Action::SegmentResumed
            | Action::Annotate => Some(None),
        }
    }

    fn adopt(&mut self, picture: &SegmentSnapshot, pool: Option<MempoolId>) {
        let (stream, is_large) = (picture.stream, picture.is_large);
        let (owner, start) = (Owner { stream, is_large }, picture.address);
        let segment = self.insert_segment(owner, pool, start, picture.size, picture.is_expandable);
        let held = { picture.blocks.iter() }.filter(|block| block.status != BlockStatus::Inactive);
        let mut held_large = held.map(|block| block.requested > SMALL_REQUEST_MAX);
        self.segments[segment].is_kind_known =
            pool.is_some() || held_large.next() == Some(is_large);
        for block in &picture.blocks {
            if block.status == BlockStatus::Inactive {
                self.insert_free(block.address, block.size, segment);
            } else {
                self.insert_block(block.address, block.size, segment, false);
            }
        }
    }

    fn insert_segment(
        &mut self,
        owner: Owner,
        pool: Option<MempoolId>,
        start: DeviceAddress,
        size: Bytes,
        is_expandable: bool,
    ) -> usize {
        let end = start + size;
        self.segments.push(InferredSegment {
            owner,
            pool,
            start,
            first: start,
            end,
            is_expandable,
            is_kind_known: true,
            held_bytes: size,
        });
        let segment = self.segments.len() - 1;
        if is_expandable {
            self.expandable.insert((owner.stream, start), segment);
        }
        segment
    }

    /// Maps memory. It extends a segment if it lies at the segment's start or behind mapped memory of it; else it
    /// begins a new segment.
    fn map(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        stream: Stream,
        pool: Option<MempoolId>,
    ) -> Option<usize> {
        let first = (stream, DeviceAddress::NULL);
        let before = self.expandable.range(first..=(stream, address)).next_back();
        let known = before.map(|(_, &segment)| segment);
        let known = known.filter(|&segment| address <= self.segments[segment].end);
        let mut segment = match known {
            Some(known) => {
                let segment = &mut self.segments[known];
                segment.end = segment.end.max(address + size);
                segment.held_bytes += size;
                known
            }
            None => {
                let is_large = size > SMALL_SEGMENT;
                let owner = Owner { stream, is_large };
                let new = self.insert_segment(owner, pool, address, size, true);
                let above = (stream, address + size)..=(stream, DeviceAddress(u64::MAX));
                let next = self.expandable.range(above).next();
                self.beginnings.extend(next.map(|(_, &next)| (next, new)));
                new
            }
        };
        // The first pages of the segment behind it may have been released since.
        let behind = self.expandable.range(first..=(stream, address + size));
        let behind = { behind }.next_back();
        let behind = behind.map(|(_, &behind)| behind);
        match behind.filter(|&behind| self.are_one(segment, behind)) {
            Some(behind) => segment = self.join(segment, behind),
            None if known.is_none() => self.begun = Some(segment),
            None => {}
        }
        self.insert_free(address, size, segment);
        self.fresh = Some(segment);
        Some(segment)
    }

    /// Returns whether two expandable segments are one. The second begins where memory of the first was mapped; the
    /// memory between them was not mapped before the first event.
    fn are_one(&self, one: usize, other: usize) -> bool {
        let (first, second) = (&self.segments[one], &self.segments[other]);
        let pools = [first.pool, second.pool];
        one != other
            && first.owner == second.owner
            && (pools.contains(&None) || first.pool == second.pool)
    }

    /// Returns the real starts of the initial segments, which are in `pools`. A segment starts where memory of its
    /// pool was first mapped below it, with no memory of another pool between.
    fn ranges(
        &self,
        initial: &[SegmentSnapshot],
        pools: &[MempoolId],
    ) -> BTreeMap<DeviceAddress, DeviceAddress> {
        let mut first: BTreeMap<usize, DeviceAddress> = BTreeMap::new();
        for &(next, new) in &self.beginnings {
            let (owner, start) = (self.segments[new].owner, self.segments[new].first);
            let far = start + SEGMENT_HOLE_MAX;
            let is_same = self.segments[next].owner == owner && pools[next] == pools[new];
            if is_same && self.segments[next].first <= far {
                let known = first.entry(self.whole(next)).or_insert(start);
                *known = start.min(*known);
            }
        }
        let starts = initial.iter().enumerate().filter_map(|(index, segment)| {
            let start = *first.get(&self.whole(index))?;
            (segment.is_expandable && start < segment.address).then_some((segment.address, start))
        });
        starts.collect()
    }

    /// Merges two segments into the one with more mapped memory, and returns it.
    fn join(&mut self, one: usize, other: usize) -> usize {
        let held = |segment: usize| self.segments[segment].held_bytes;
        let (into, part) = if held(one) < held(other) {
            (other, one)
        } else {
            (one, other)
        };
        let (start, end) = (self.segments[part].start, self.segments[part].end);
        for (&address, block) in self.blocks.range_mut(start..end) {
            if block.segment == part {
                block.segment = into;
                if self.releasable.remove(&(part, address)) {
                    self.releasable.insert((into, address));
                }
            }
        }
        let pool = self.segments[part].pool;
        let held = std::mem::take(&mut self.segments[part].held_bytes);
        let whole = &mut self.segments[into];
        let stream = whole.owner.stream;
        self.expandable.remove(&(stream, start));
        self.expandable.remove(&(stream, whole.start));
        whole.pool = whole.pool.or(pool);
        whole.start = whole.start.min(start);
        whole.end = whole.end.max(end);
        whole.held_bytes += held;
        self.expandable.insert((stream, whole.start), into);
        if self.released.remove(&part) {
            self.released.insert(into);
        }
        self.joined.insert(part, into);
        into
    }

    /// Returns the segment that `segment` turned out to be a part of, or `segment` itself. O(log n) for n bytes,
    /// because the part always had fewer bytes.
    fn whole(&self, mut segment: usize) -> usize {
        while let Some(&into) = self.joined.get(&segment) {
            segment = into;
        }
        segment
    }

    /// Allocates the block at `address` for a request of `requested` bytes.
    fn take(&mut self, address: DeviceAddress, requested: Bytes) -> Option<usize> {
        let block = *self.blocks.get(&address).filter(|block| block.is_free)?;
        let size = self.config.block_size(requested).min(block.size);
        let is_fresh = self.fresh.take() == Some(block.segment);
        if is_fresh && block.segment < self.adopted {
            self.separate_below(block.segment, size);
        }
        self.separate_better(address, block, size, is_fresh)?;
        self.remove_free(address);
        let rest = block.size - size;
        let segment = &self.segments[block.segment];
        let least = if segment.owner.is_large && !segment.is_expandable {
            SMALL_REQUEST_MAX + BLOCK_MIN
        } else {
            BLOCK_MIN
        };
        let unsplit =
            segment.owner.is_large && self.config.max_split_size.is_some_and(|max| size >= max);
        let is_split = rest >= least && !unsplit;
        let taken = if is_split { size } else { block.size };
        self.insert_block(address, taken, block.segment, false);
        if taken < block.size {
            self.insert_free(address + taken, block.size - taken, block.segment);
        }
        Some(block.segment)
    }

    /// Records that free blocks which would have been taken instead are in another pool. For a request that got a
    /// new segment, these are all blocks that fit. For others, they are the blocks before the taken one in the
    /// order of size and, if it decides, address. Returns `None` if a block is missing because a segment came where
    /// another was.
    fn separate_better(
        &mut self,
        address: DeviceAddress,
        taken: Block,
        size: Bytes,
        is_fresh: bool,
    ) -> Option<()> {
        let owner = self.segments[taken.segment].owner;
        let Some(free) = self.free.get(&owner) else {
            return Some(());
        };
        // Other releases of PyTorch take the older of two blocks of one size.
        let order = self.config.free_block_order.unwrap_or_default();
        let by_address = order == FreeBlockOrder::Address;
        let mut others = Vec::new();
        for &(candidate_size, candidate) in free.range((size, DeviceAddress::NULL)..) {
            let is_before = by_address && candidate < address;
            let is_better =
                candidate_size < taken.size || (candidate_size == taken.size && is_before);
            if !is_better && !is_fresh {
                break;
            }
            self.looked_at += 1;
            let other = self.blocks.get(&candidate)?.segment;
            let serves = if is_fresh {
                self.config.block_serves(candidate_size, size)
            } else {
                !self.can_grow(candidate, candidate_size, other)
            };
            let are_of_one_pool = self.are_of_one_pool(other, taken.segment);
            if serves && are_of_one_pool.is_none() {
                others.push(other);
            } else if serves
                && are_of_one_pool == Some(true)
                && let Some(by) = self.uncertain.get_mut(&candidate)
            {
                // The block was at least one unit too short for the request.
                *by = (*by).max(candidate_size - size + BLOCK_MIN);
            }
        }
        self.apart.separate_all([taken.segment], others);
        Some(())
    }

    /// Returns whether two segments are in the same pool; `None` if unknown.
    fn are_of_one_pool(&self, one: usize, other: usize) -> Option<bool> {
        let (pool, other_pool) = (self.segments[one].pool, self.segments[other].pool);
        if one == other {
            Some(true)
        } else {
            Some(pool? == other_pool?)
        }
    }

    /// Returns whether more memory can be mapped behind a free block. Such a block is left for other requests.
    fn can_grow(&self, address: DeviceAddress, size: Bytes, segment: usize) -> bool {
        self.segments[segment].is_expandable && !self.is_followed(address + size, segment)
    }

    /// Returns whether a block of the segment begins at `address`.
    fn is_followed(&self, address: DeviceAddress, segment: usize) -> bool {
        let block = self.blocks.get(&address);
        block.is_some_and(|block| block.segment == segment)
    }

    /// Applies a refused request. It has no segment, so an empty one stands for it. Its pool has no block that
    /// would have served the request, and none that such a request would have released. Returns `None` as
    /// [`Layout::separate_better`] does.
    fn refuse(
        &mut self,
        (requested, stream): (Bytes, Stream),
        pool: Option<MempoolId>,
        released: bool,
    ) -> Option<usize> {
        let size = self.config.block_size(requested);
        let is_large = size > SMALL_REQUEST_MAX;
        let owner = Owner { stream, is_large };
        self.fresh = None;
        let refused = self.insert_segment(owner, pool, DeviceAddress::NULL, Bytes::ZERO, false);
        let unsplit = self.config.max_split_size.filter(|_| !released);
        let least = unsplit.map_or(size, |unsplit| unsplit.min(size));
        let free = self.free.get(&owner);
        let free = free.map(|free| free.range((least, DeviceAddress::NULL)..));
        let mut others = Vec::new();
        for &(candidate_size, candidate) in free.into_iter().flatten() {
            let segment = self.blocks.get(&candidate)?.segment;
            let serves = candidate_size >= size && self.config.block_serves(candidate_size, size);
            let goes = unsplit.is_some_and(|unsplit| candidate_size >= unsplit)
                && !self.segments[segment].is_expandable;
            self.looked_at += 1;
            others.extend((serves || goes).then_some(segment));
        }
        if self.room.is_some() && self.config.expandable_segments && !self.any_has_room(owner, size)
        {
            self.empty.insert(owner);
        }
        self.apart.separate_all([refused], others);
        Some(refused)
    }

    fn give(&mut self, address: DeviceAddress) -> Option<usize> {
        let block = *self.blocks.get(&address).filter(|block| !block.is_free)?;
        self.waiting = self.waiting.saturating_sub(1);
        let end = address + block.size;
        if let Some(by) = self.uncertain.remove(&end) {
            self.shorter_by.insert(end, by);
        }
        self.insert_free(address, block.size, block.segment);
        Some(block.segment)
    }

    fn release(&mut self, address: DeviceAddress, size: Bytes) -> Option<usize> {
        let (&start, &block) = self.blocks.range(..=address).next_back()?;
        if !block.is_free || start + block.size < address + size {
            return None;
        }
        self.remove_free(start);
        self.blocks.remove(&start);
        let (before, end) = (address.offset_from(start), address + size);
        if !before.is_zero() {
            self.insert_free(start, before, block.segment);
        }
        let after = (start + block.size).offset_from(end);
        if !after.is_zero() {
            self.insert_free(end, after, block.segment);
        }
        self.fresh = None;
        let segment = &mut self.segments[block.segment];
        segment.held_bytes = segment.held_bytes.saturating_sub(size);
        if segment.is_expandable && segment.held_bytes.is_zero() {
            // The segment has ended, and its addresses may be used by another.
            let key = (segment.owner.stream, segment.start);
            self.expandable.remove(&key);
        }
        self.released.insert(block.segment);
        Some(block.segment)
    }

    /// Ends the events that released memory; `next` is the event after them. Memory that could have been released
    /// with them and stayed is in another pool, unless a request may have released only as much as it needed.
    fn end_release(&mut self, next: Option<Event>) {
        let released = std::mem::take(&mut self.released);
        if released.is_empty() || next.is_some_and(|next| self.lets_some_go(next, &released)) {
            return;
        }
        if self.waiting > 0 {
            // A program that empties the default pool waits for all of these first.
            self.private.extend(&released);
        }
        self.looked_at += self.releasable.len();
        let could = self.releasable.iter().map(|&(segment, _)| segment);
        let stayed = could.filter(|could| !released.contains(could)).collect();
        self.apart.separate_all(released, stayed);
    }

    /// Returns whether a request may have released these segments and kept others: such a request gets memory next,
    /// or fails. Garbage is large and never expandable. Large unsplit blocks (`max_split_size_mb`) are released
    /// only for requests of their own stream.
    fn lets_some_go(&self, next: Event, released: &BTreeSet<usize>) -> bool {
        let is_large = match next.action {
            Action::SegmentAlloc => next.size > SMALL_SEGMENT,
            Action::OutOfMemory => next.size > SMALL_REQUEST_MAX,
            _ => return false,
        };
        let stream = next.stream;
        let owner = Owner { stream, is_large };
        let collects_garbage = self.config.garbage_collection_threshold > 0.0;
        let is_unsplit = |segment: &InferredSegment| {
            let size = segment.end.offset_from(segment.start);
            self.config.max_split_size.is_some_and(|max| size >= max)
        };
        let mut released = released.iter().map(|&released| &self.segments[released]);
        releases_some(&self.config)
            && !self.config.expandable_segments
            && released.all(|segment| {
                segment.owner.is_large
                    && (collects_garbage || segment.owner == owner && is_unsplit(segment))
            })
    }

    /// Returns whether a free block, or pages of it, would be released if its pool was emptied.
    fn is_releasable(&self, address: DeviceAddress, size: Bytes, segment: usize) -> bool {
        let segment = &self.segments[segment];
        if !segment.is_expandable {
            return size == segment.held_bytes;
        }
        let page_size = if segment.owner.is_large {
            self.config.large_segment_size
        } else {
            SMALL_SEGMENT
        };
        let offset = address.offset_from(segment.start);
        offset.round_up(page_size) < (offset + size).round_down(page_size)
    }

    /// Adds a free block, merged with its free neighbours in the same segment.
    fn insert_free(&mut self, mut address: DeviceAddress, mut size: Bytes, segment: usize) {
        let joins = |block: &Block| block.is_free && block.segment == segment;
        let next = address + size;
        if let Some(after) = self.blocks.get(&next).copied().filter(joins) {
            self.remove_free(next);
            self.blocks.remove(&next);
            size += after.size;
        }
        let before = self.blocks.range(..address).next_back();
        if let Some((at, block)) = before.map(|(&at, &block)| (at, block))
            && joins(&block)
            && at + block.size == address
        {
            self.remove_free(at);
            self.blocks.remove(&address);
            (address, size) = (at, size + block.size);
        }
        self.insert_block(address, size, segment, true);
        let owner = self.segments[segment].owner;
        self.free.entry(owner).or_default().insert((size, address));
        if self.is_releasable(address, size, segment) {
            self.releasable.insert((segment, address));
        }
    }

    fn insert_block(&mut self, at: DeviceAddress, size: Bytes, segment: usize, is_free: bool) {
        let block = Block {
            size,
            segment,
            is_free,
        };
        self.blocks.insert(at, block);
    }

    fn remove_free(&mut self, address: DeviceAddress) {
        let Some(&block) = self.blocks.get(&address) else {
            return;
        };
        self.releasable.remove(&(block.segment, address));
        if let Some(free) = self.free.get_mut(&self.segments[block.segment].owner) {
            free.remove(&(block.size, address));
        }
    }

    /// Returns a pool for each segment: the known one, or the first pool that the evidence allows.
    fn pools(&self) -> Vec<MempoolId> {
        let segments = self.segments.iter();
        let mut pools: Vec<Option<MempoolId>> = segments.map(|segment| segment.pool).collect();
        let whole = |segment| self.whole(segment);
        self.apart.assign(&mut pools, &self.private, whole);
        pools.into_iter().map(Option::unwrap_or_default).collect()
    }
}

#[cfg(test)]
mod tests;
