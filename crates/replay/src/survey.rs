//! Facts about a whole recording that the compilation of its first step already needs.
//!
//! No recording says why memory was released before a request: for the request, or because the program called
//! `empty_cache`. The bytes reserved before and after show which. If a request may release only some memory
//! (`max_split_size_mb`), so does whether every segment without blocks was released (`occupancy.rs`).
//!
//! `tide` also releases memory that was idle for long. Such a release leaves some, and `empty_cache` leaves none.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem;
use std::ops::Range;

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, StrategyName};
use lowtide_trace::Trace;

use crate::occupancy::Occupancy;
use crate::pools::EventPools;
use crate::settings::releases_some;

/// The facts that one pass over the events shows.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// The events at which blocks became free that other streams still used when they were freed. Here by the event
    /// that freed the block; in `initial_completions`, for blocks freed before the first event, by address.
    pub(crate) completions: HashMap<usize, usize>,
    pub(crate) initial_completions: HashMap<DeviceAddress, usize>,
    /// Whether requests release memory that was idle for long before they ask for more. Expandable segments are never
    /// garbage.
    pub(crate) collects_garbage: bool,
    /// Whether requests may release some of the releasable memory and not all, without a wait.
    pub(crate) releases_some: bool,
    /// The least limit that the job can have had: the most bytes that it held in segments or was granted pages for.
    pub(crate) limit_min: Bytes,
    /// Whether memory was released somewhere that no request can have released.
    pub(crate) empties_cache: bool,
    /// The requests and frees before which some memory was released without a call of `empty_cache`. Such a call
    /// waits for other streams first and then releases everything. Here, some free memory stayed, or other streams
    /// still used freed blocks. Empty if the options let requests release everything or nothing.
    pub(crate) partial_releases: HashSet<usize>,
    /// The strategy that served the job. `direct` releases each block when it is freed.
    strategy: Option<StrategyName>,
    /// The ranges of events with which `tide` moved frames between addresses, and the moved bytes.
    moves: Vec<(Range<usize>, Bytes)>,
    /// The events with which `tide` released some free memory and kept the rest.
    idle_releases: HashSet<usize>,
    /// The refused requests after which other streams still used freed blocks, or unused memory stayed. PyTorch
    /// neither waits nor releases everything while a graph is captured or a program allocates to a private pool.
    /// `tide` releases nothing before it refuses, so only the blocks count.
    pub(crate) captured_refusals: HashSet<usize>,
}

/// The memory that the allocator got from the driver or released to it since the last request or free.
#[derive(Default)]
pub(crate) struct Traffic {
    /// The bytes reserved when memory was first released, if it was.
    pub(crate) reserved_before: Option<Bytes>,
    /// The bytes that the driver provided after that.
    pub(crate) came: Bytes,
    /// The bytes reserved when the first page was mapped, if one was.
    mapped_from: Option<Bytes>,
    /// The events that released memory.
    pub(crate) releases: Vec<usize>,
    /// The blocks, from start to end, that became free in this time and were still used by other streams when they
    /// were freed.
    finished: BTreeMap<DeviceAddress, DeviceAddress>,
    /// Whether one of them became free after memory was released.
    finished_late: bool,
    /// The events by which they became free.
    finished_by: Vec<usize>,
    /// The released memory, from start to end.
    released: BTreeMap<DeviceAddress, DeviceAddress>,
    /// Whether pages were mapped before any memory was released. They were mapped for a request that had begun
    /// then.
    mapped_first: bool,
    /// Whether free memory or blocks that other streams used stayed after the last release. False if
    /// [`Traffic::note_kept`] was not called.
    kept_some: bool,
}

/// The freed blocks that other streams still use.
struct Waiting {
    /// The event that freed each block, by address.
    freed_by: HashMap<DeviceAddress, usize>,
    /// The number of blocks that were freed before the first event.
    from_before: usize,
}

impl Waiting {
    fn new(trace: &Trace) -> Waiting {
        let initial = trace.initial.blocks.iter();
        let pending = initial.filter(|block| block.status == BlockStatus::PendingFree);
        Waiting {
            freed_by: HashMap::new(),
            from_before: pending.count(),
        }
    }

    /// Removes the block at `address`, which is free now, and returns the event that freed it, if there is one.
    fn finish(&mut self, address: DeviceAddress) -> Option<usize> {
        let freed_by = self.freed_by.remove(&address);
        if freed_by.is_none() {
            self.from_before = self.from_before.saturating_sub(1);
        }
        freed_by
    }

    fn is_empty(&self) -> bool {
        self.freed_by.is_empty() && self.from_before == 0
    }
}

impl Traffic {
    /// Records memory from the driver. `reserved` is the bytes reserved before it came.
    pub(crate) fn add(&mut self, came: Event, reserved: Bytes) {
        self.came += came.size;
        if came.action == Action::SegmentMap {
            self.mapped_from.get_or_insert(reserved);
        }
    }

    /// Records that the event at `index` released memory of the default pool, with `reserved` bytes held before.
    /// Other pools release memory when they end.
    pub(crate) fn release(&mut self, released: Event, reserved: Bytes, index: usize) {
        self.mapped_first |= self.releases.is_empty() && self.mapped_from.is_some();
        self.releases.push(index);
        let end = released.address + released.size;
        self.released.insert(released.address, end);
        // Memory from the driver before the release went to an earlier part of the request, which still failed.
        if self.reserved_before.is_none() {
            self.reserved_before = Some(reserved);
            self.came = Bytes::ZERO;
        }
    }

    /// Records what stays after the event at `index`, if that released memory.
    fn note_kept(&mut self, index: usize, occupancy: &Occupancy, waiting: &Waiting) {
        if self.releases.last() == Some(&index) {
            self.kept_some = stays(occupancy, waiting) || occupancy.has_vacant_page();
        }
    }

    /// Records a block that became free by the event at `index`.
    pub(crate) fn finish(&mut self, completed: Event, index: usize) {
        self.finished_by.push(index);
        self.finished_late |= !self.releases.is_empty();
        self.finished
            .insert(completed.address, completed.address + completed.size);
    }

    /// Returns whether the request at event `index` would have been served from released memory: then the request
    /// came after the release. Segments with blocks that other streams had just finished with do not count, because
    /// PyTorch waits for those blocks only after it looked for a free one.
    pub(crate) fn would_have_served(&self, pools: &EventPools<'_>, index: usize) -> bool {
        let (trace, config) = (pools.trace, &pools.config);
        served_at(trace, index).is_some_and(|request| {
            let size = config.block_size(request.size);
            self.releases.iter().any(|&release| {
                let released = trace.events[release].event;
                let is_large = match released.action {
                    Action::SegmentUnmap => (released.size % Bytes::mib(20)).is_zero(),
                    _ => released.size > Bytes::mib(2),
                };
                let before = self.finished.range(..released.address + released.size);
                let in_use_until = before.map(|(_, &end)| end).next_back();
                in_use_until.is_none_or(|end| end <= released.address)
                    && released.stream == request.stream
                    && pools.of(release) == pools.of(index)
                    && is_large == (request.size > Bytes::mib(1))
                    && released.size >= size
                    && config.block_serves(released.size, size)
            })
        })
    }

    /// Returns whether the request at event `index` had begun before memory was released. Either pages were mapped
    /// for it before, or a block became free and stayed that would have served a request which looked after that.
    pub(crate) fn had_begun(&self, pools: &EventPools<'_>, index: usize) -> bool {
        let config = &pools.config;
        self.mapped_first
            || served_at(pools.trace, index).is_some_and(|request| {
                let size = config.block_size(request.size);
                self.finished_by.iter().any(|&finished| {
                    let block = pools.trace.events[finished].event;
                    let block_size = config.block_size(block.size);
                    block.stream == request.stream
                        && pools.of(finished) == pools.of(index)
                        && (block.size > Bytes::mib(1)) == (request.size > Bytes::mib(1))
                        && block_size >= size
                        && config.block_serves(block_size, size)
                        && !self.has_released(block.address, block.address + block_size)
                })
            })
    }

    /// Returns whether any memory between two addresses was released.
    fn has_released(&self, start: DeviceAddress, end: DeviceAddress) -> bool {
        let before = self.released.range(..end).next_back();
        before.is_some_and(|(_, &released_end)| released_end > start)
    }

    /// Returns whether all released memory is large, as garbage is.
    pub(crate) fn may_be_garbage(&self, trace: &Trace) -> bool {
        let is_large = |&release: &usize| trace.events[release].event.size > Bytes::mib(2);
        self.releases.iter().all(is_large)
    }

    /// Returns the bytes that would have been reserved for the request at event `index` without the release.
    /// Returns `None` unless memory was released and then new memory came.
    pub(crate) fn needed(&self, pools: &EventPools<'_>, index: usize) -> Option<Bytes> {
        let before = self.reserved_before.filter(|_| !self.came.is_zero())?;
        let asked = asked(pools, index).filter(|_| self.mapped_from.is_some());
        Some(before + asked.unwrap_or(self.came))
    }

    /// Returns the bytes reserved for the request at event `index`, if pages were mapped for it and nothing was
    /// released.
    fn granted(&self, pools: &EventPools<'_>, index: usize) -> Option<Bytes> {
        let released = self.reserved_before.is_some();
        let before = self.mapped_from.filter(|_| !released)?;
        Some(before + asked(pools, index)?)
    }
}

/// Returns the size by which the request at event `index` counts toward the limit: the segment that it would get if
/// no pages were mapped for it.
fn asked(pools: &EventPools<'_>, index: usize) -> Option<Bytes> {
    let (request, config) = (served_at(pools.trace, index)?, &pools.config);
    Some(config.segment_size(config.block_size(request.size)))
}

/// Returns the event at `index`, if it is a request that was served.
fn served_at(trace: &Trace, index: usize) -> Option<Event> {
    let event = trace.events.get(index).map(|recorded| recorded.event);
    event.filter(|event| event.action == Action::Alloc)
}

impl Survey {
    /// Reads every event of a recording once.
    pub(crate) fn new(trace: &Trace, pools: &EventPools<'_>) -> Survey {
        let mut reserved = trace.initial_reserved_bytes();
        let config = &pools.config;
        let has_threshold = config.garbage_collection_threshold > 0.0;
        let mut survey = Survey {
            collects_garbage: has_threshold && !config.expandable_segments,
            releases_some: releases_some(config),
            limit_min: reserved,
            moves: trace.frame_moves(),
            strategy: trace.settings.strategy_name(),
            ..Survey::default()
        };
        let mut waiting = Waiting::new(trace);
        let mut traffic = Traffic::default();
        let looks_at_rest = survey.releases_some || survey.is_of_tide() || has_refusal(trace);
        let mut occupancy = looks_at_rest.then(|| Occupancy::new(trace, pools));
        let mut needed_min: Option<Bytes> = None;
        let mut index = 0;
        while let Some(recorded) = trace.events.get(index) {
            let event = recorded.event;
            match event.action {
                Action::Alloc | Action::OutOfMemory | Action::FreeRequested => {
                    let rest = (occupancy.as_ref(), &waiting);
                    survey.note_rest(&mut traffic, (index, event.action), rest);
                    let needed = survey.end_traffic(&traffic, pools, index);
                    needed_min = needed_min.into_iter().chain(needed).min();
                    traffic = Traffic::default();
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    let is_by_strategy = survey.is_by_strategy(index);
                    if !is_by_strategy {
                        traffic.add(event, reserved);
                    }
                    reserved += event.size;
                    if is_by_strategy || event.action == Action::SegmentAlloc {
                        survey.limit_min = survey.limit_min.max(reserved);
                    }
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    if pools.of(index).is_default() && !survey.is_by_strategy(index) {
                        traffic.release(event, reserved, index);
                    }
                    reserved = reserved.saturating_sub(event.size);
                }
                Action::FreeCompleted => {
                    traffic.finish(event, index);
                    match waiting.finish(event.address) {
                        Some(freed) => drop(survey.completions.insert(freed, index)),
                        None => drop(survey.initial_completions.insert(event.address, index)),
                    }
                }
                // Snapshots, pauses and annotations.
                _ => {}
            }
            if let Some(occupancy) = &mut occupancy {
                occupancy.apply(event, pools.of(index));
                traffic.note_kept(index, occupancy, &waiting);
            }
            if event.action == Action::FreeRequested {
                if is_free_at_once(trace, index) {
                    index += 1;
                    if let Some(occupancy) = &mut occupancy {
                        occupancy.apply(trace.events[index].event, MempoolId::DEFAULT);
                    }
                } else {
                    waiting.freed_by.insert(event.address, index);
                }
            }
            index += 1;
        }
        survey.empties_cache |= needed_min.is_some_and(|needed| needed <= survey.limit_min);
        survey
    }

    /// Returns whether the strategy itself mapped or released the memory of the event at `index`, which another
    /// strategy would not have done. O(log n) for n moves.
    pub(crate) fn is_by_strategy(&self, index: usize) -> bool {
        let after = self
            .moves
            .partition_point(|(events, _)| events.end <= index);
        let mut moved = self.moves.get(after).into_iter();
        self.strategy == Some(StrategyName::Direct)
            || moved.any(|(events, _)| events.start <= index)
            || self.idle_releases.contains(&index)
    }

    /// Returns whether `tide` served the job. Its requests release no memory of the default pool.
    pub(crate) fn is_of_tide(&self) -> bool {
        self.strategy == Some(StrategyName::Tide)
    }

    /// Records, before a request or free, whether releasable memory stayed or other streams still used freed
    /// blocks.
    fn note_rest(
        &mut self,
        traffic: &mut Traffic,
        (index, action): (usize, Action),
        (occupancy, waiting): (Option<&Occupancy>, &Waiting),
    ) {
        let is_refused = action == Action::OutOfMemory;
        if self.is_of_tide() {
            if traffic.kept_some {
                self.idle_releases.extend(mem::take(traffic).releases);
            }
            if is_refused && !waiting.is_empty() {
                self.captured_refusals.insert(index);
            }
            return;
        }
        let stays = occupancy.map_or(!waiting.is_empty(), |some| stays(some, waiting));
        let has_page = occupancy.is_some_and(Occupancy::has_vacant_page);
        let released = !traffic.releases.is_empty();
        if released && self.releases_some && (stays || traffic.finished_late) {
            self.partial_releases.insert(index);
        }
        if is_refused && (stays || has_page) {
            self.captured_refusals.insert(index);
        }
    }

    /// Records the driver's calls before the event at `index`. If that event is a request for which memory was
    /// released, returns the bytes that it would have reserved without the release.
    fn end_traffic(
        &mut self,
        traffic: &Traffic,
        pools: &EventPools<'_>,
        index: usize,
    ) -> Option<Bytes> {
        let (trace, action) = (pools.trace, pools.trace.events[index].event.action);
        let granted = traffic.granted(pools, index);
        self.limit_min = self.limit_min.max(granted.unwrap_or_default());
        let asked = action == Action::Alloc
            && pools.of(index).is_default()
            && !traffic.would_have_served(pools, index);
        let needed = traffic.needed(pools, index).filter(|_| asked);
        // Before most events nothing was released, so there is nothing to check.
        let released = traffic.reserved_before.is_some();
        let needs_no_call = released
            && (self.partial_releases.contains(&index)
                || traffic.had_begun(pools, index)
                || self.collects_garbage && traffic.may_be_garbage(trace));
        let is_evidence = released && action != Action::OutOfMemory;
        self.empties_cache |= is_evidence && needed.is_none() && !needs_no_call;
        needed.filter(|_| !needs_no_call)
    }
}

/// Returns whether a segment without blocks stays, or other streams still use freed blocks.
fn stays(occupancy: &Occupancy, waiting: &Waiting) -> bool {
    !waiting.is_empty() || occupancy.vacant() > 0
}

/// Returns whether any request was refused.
fn has_refusal(trace: &Trace) -> bool {
    let mut events = trace.events.iter();
    events.any(|recorded| recorded.event.action == Action::OutOfMemory)
}

/// Returns whether the block that the event at `index` frees becomes free with the next event: then no other stream
/// used it. PyTorch records both events under one lock.
pub(crate) fn is_free_at_once(trace: &Trace, index: usize) -> bool {
    let freed = trace.events[index].event.address;
    let next = trace.events.get(index + 1).map(|next| next.event);
    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == freed)
}
