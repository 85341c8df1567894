//! What has to be known of a whole recording before any of its steps can be told.
//!
//! No recording says why memory was released before a request: for the request, or because the program called
//! `empty_cache`. The bytes reserved before and after tell these apart. Where a request may release only some memory
//! (`max_split_size_mb`), so does whether every segment without blocks went (`occupancy.rs`).

use std::collections::{BTreeMap, HashMap, HashSet};

use lowtide_core::{Action, BlockStatus, Bytes, CachingConfig, DeviceAddress, Event, MempoolId};
use lowtide_trace::Trace;

use crate::occupancy::Occupancy;
use crate::pools::EventPools;
use crate::settings::{config_of, gives_back_some};

/// What one look at every event tells.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// The events at which blocks became free that did not at once: by the event that freed them, or,
    /// where that was before the first event, by address.
    pub(crate) completions: HashMap<usize, usize>,
    pub(crate) initial_completions: HashMap<DeviceAddress, usize>,
    /// The options it was made with.
    pub(crate) config: CachingConfig,
    /// The least that the job was allowed to hold from the driver: the most that it held in segments, or was
    /// granted pages for.
    pub(crate) limit_min: Bytes,
    /// Whether memory went back somewhere although no request can have asked for that.
    pub(crate) empties_cache: bool,
    /// The requests and frees before which some memory went back without a call of `empty_cache`, which waits for
    /// other streams first and then gives all back: some stayed, or freed blocks were still used by other streams.
    /// Where requests let all go or nothing, there are none.
    pub(crate) partial_releases: HashSet<usize>,
    /// The refused requests after which freed blocks were still used by other streams, or memory stayed that nobody
    /// used: while a graph is captured, and while a program allocates to a private pool, PyTorch neither waits nor
    /// gives all back.
    pub(crate) captured_refusals: HashSet<usize>,
}

/// What passed between allocator and driver since the last request or free.
#[derive(Default)]
pub(crate) struct Traffic {
    /// How much was held when the first memory went back, if any did.
    pub(crate) reserved_before: Option<Bytes>,
    /// Bytes that came after that.
    pub(crate) came: Bytes,
    /// How much was held when the first page was mapped, if any was.
    mapped_from: Option<Bytes>,
    /// The events by which memory went back.
    pub(crate) releases: Vec<usize>,
    /// Where the blocks end that became free meanwhile and were not when their program let go of them, by where they
    /// start.
    finished: BTreeMap<DeviceAddress, DeviceAddress>,
    /// Whether one of them did after memory had gone back.
    finished_late: bool,
    /// The events by which they did.
    finished_by: Vec<usize>,
    /// Where what went back ends, by where it starts.
    went_back: BTreeMap<DeviceAddress, DeviceAddress>,
    /// Whether pages were mapped before any memory went back: for a request, that had begun then.
    mapped_first: bool,
}

/// The blocks that their program let go of, and that other streams still use.
struct Waiting {
    /// By which event each was freed, by address.
    freed_by: HashMap<DeviceAddress, usize>,
    /// How many there are that were freed before the first event.
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

    /// Returns the event that freed the block at `address`, which waits no more, if any did.
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
    /// Notes memory that came from the driver, where `reserved` bytes were held, by an event of a kind.
    pub(crate) fn add(&mut self, size: Bytes, reserved: Bytes, action: Action) {
        self.came += size;
        if action == Action::SegmentMap {
            self.mapped_from.get_or_insert(reserved);
        }
    }

    /// Notes that memory of the default pool went back by an event, that at `index`, of `reserved` bytes held.
    /// That of another goes back when the pool ends.
    pub(crate) fn release(&mut self, released: Event, reserved: Bytes, index: usize) {
        self.mapped_first |= self.releases.is_empty() && self.mapped_from.is_some();
        self.releases.push(index);
        let end = released.address + released.size;
        self.went_back.insert(released.address, end);
        // What came before that went to a request that had it, and still failed.
        if self.reserved_before.is_none() {
            self.reserved_before = Some(reserved);
            self.came = Bytes::ZERO;
        }
    }

    /// Notes a block that became free by an event of its own, that at `index`.
    pub(crate) fn finish(&mut self, completed: Event, index: usize) {
        self.finished_by.push(index);
        self.finished_late |= !self.releases.is_empty();
        self.finished
            .insert(completed.address, completed.address + completed.size);
    }

    /// Returns whether something went back that the request at event `index` would have been served
    /// from: then it had not asked yet. What has blocks that other streams had just finished with does not
    /// count, since PyTorch waits for those only after it has looked.
    pub(crate) fn would_have_served(
        &self,
        pools: &EventPools<'_>,
        config: &CachingConfig,
        index: usize,
    ) -> bool {
        let trace = pools.trace;
        let request = trace.events.get(index).map(|recorded| recorded.event);
        let request = request.filter(|event| event.action == Action::Alloc);
        request.is_some_and(|request| {
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

    /// Returns whether the request at event `index` had begun before memory went back: pages were mapped for it before,
    /// or a block that became free and stayed would have served it, had it looked for one after that.
    pub(crate) fn had_begun(
        &self,
        pools: &EventPools<'_>,
        config: &CachingConfig,
        index: usize,
    ) -> bool {
        let events = &pools.trace.events;
        let request = events.get(index).map(|recorded| recorded.event);
        let request = request.filter(|event| event.action == Action::Alloc);
        self.mapped_first
            || request.is_some_and(|request| {
                let size = config.block_size(request.size);
                self.finished_by.iter().any(|&finished| {
                    let block = events[finished].event;
                    let block_size = config.block_size(block.size);
                    block.stream == request.stream
                        && pools.of(finished) == pools.of(index)
                        && (block.size > Bytes::mib(1)) == (request.size > Bytes::mib(1))
                        && block_size >= size
                        && config.block_serves(block_size, size)
                        && !self.took_away(block.address, block.address + block_size)
                })
            })
    }

    /// Returns whether something between two addresses went back.
    fn took_away(&self, start: DeviceAddress, end: DeviceAddress) -> bool {
        let before = self.went_back.range(..end).next_back();
        before.is_some_and(|(_, &released_end)| released_end > start)
    }

    /// Returns whether all that went back is large.
    pub(crate) fn may_be_garbage(&self, trace: &Trace) -> bool {
        let mut released = self
            .releases
            .iter()
            .map(|&release| trace.events[release].event);
        released.all(|released| released.size > Bytes::mib(2))
    }

    /// Returns what would have been held for the request at event `index`, had nothing gone back, if memory
    /// went back and came.
    pub(crate) fn needed(
        &self,
        trace: &Trace,
        config: &CachingConfig,
        index: usize,
    ) -> Option<Bytes> {
        let before = self.reserved_before.filter(|_| !self.came.is_zero())?;
        let asked = asked(trace, config, index).filter(|_| self.mapped_from.is_some());
        Some(before + asked.unwrap_or(self.came))
    }

    /// Returns what was held for the request at event `index`, if pages were mapped for it and nothing went back.
    fn granted(&self, trace: &Trace, config: &CachingConfig, index: usize) -> Option<Bytes> {
        let before = self
            .mapped_from
            .filter(|_| self.reserved_before.is_none())?;
        Some(before + asked(trace, config, index)?)
    }
}

/// Returns what the request at event `index` is held against the limit for: the segment that it would get if
/// pages were not mapped for it.
fn asked(trace: &Trace, config: &CachingConfig, index: usize) -> Option<Bytes> {
    let request = trace.events.get(index).map(|recorded| recorded.event);
    let request = request.filter(|event| event.action == Action::Alloc)?;
    Some(config.segment_size(config.block_size(request.size)))
}

impl Survey {
    /// Returns whether requests let memory go back that was long idle, before they ask for more: expandable
    /// segments are never garbage.
    pub(crate) fn collects_garbage(&self) -> bool {
        self.config.garbage_collection_threshold > 0.0 && !self.config.expandable_segments
    }

    /// Returns whether requests may let some memory go back and not all that could, without a wait.
    pub(crate) fn gives_back_some(&self) -> bool {
        gives_back_some(&self.config)
    }

    /// Looks at every event of a recording once.
    pub(crate) fn new(trace: &Trace, pools: &EventPools<'_>) -> Survey {
        let segments = trace.initial.segments.iter();
        let mut reserved = segments.map(|segment| segment.size).sum();
        let mut survey = Survey {
            config: config_of(trace),
            limit_min: reserved,
            ..Survey::default()
        };
        let mut waiting = Waiting::new(trace);
        let mut traffic = Traffic::default();
        let mut occupancy = { survey.gives_back_some() || has_refusal(trace) }
            .then(|| Occupancy::new(trace, pools));
        let mut needed_min: Option<Bytes> = None;
        let mut index = 0;
        while let Some(recorded) = trace.events.get(index) {
            let event = recorded.event;
            match event.action {
                Action::Alloc | Action::OutOfMemory | Action::FreeRequested => {
                    let rest = (occupancy.as_ref(), &waiting);
                    survey.note_rest(&traffic, (index, event.action), rest);
                    let needed = survey.end_traffic(&traffic, pools, index);
                    needed_min = needed_min.into_iter().chain(needed).min();
                    traffic = Traffic::default();
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    traffic.add(event.size, reserved, event.action);
                    reserved += event.size;
                    if event.action == Action::SegmentAlloc {
                        survey.limit_min = survey.limit_min.max(reserved);
                    }
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    if pools.of(index).is_default() {
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
                Action::Snapshot | Action::SegmentPaused | Action::SegmentResumed => {}
            }
            if let Some(occupancy) = &mut occupancy {
                occupancy.apply(event, pools.of(index));
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

    /// Takes into account, before a request or free, whether memory stays that could have gone back, or blocks that
    /// other streams use.
    fn note_rest(
        &mut self,
        traffic: &Traffic,
        (index, action): (usize, Action),
        (occupancy, waiting): (Option<&Occupancy>, &Waiting),
    ) {
        let stays = !waiting.is_empty() || occupancy.is_some_and(|some| some.vacant() > 0);
        let has_page = occupancy.is_some_and(Occupancy::has_vacant_page);
        let went_back = !traffic.releases.is_empty();
        if went_back && self.gives_back_some() && (stays || traffic.finished_late) {
            self.partial_releases.insert(index);
        }
        if action == Action::OutOfMemory && (stays || has_page) {
            self.captured_refusals.insert(index);
        }
    }

    /// Takes into account what passed between allocator and driver before the event at `index`, and returns what
    /// that, a request, would have had held, if memory went back for it.
    fn end_traffic(
        &mut self,
        traffic: &Traffic,
        pools: &EventPools<'_>,
        index: usize,
    ) -> Option<Bytes> {
        let (trace, action) = (pools.trace, pools.trace.events[index].event.action);
        let granted = traffic.granted(trace, &self.config, index);
        self.limit_min = self.limit_min.max(granted.unwrap_or_default());
        let asked = action == Action::Alloc
            && pools.of(index).is_default()
            && !traffic.would_have_served(pools, &self.config, index);
        let needed = traffic.needed(trace, &self.config, index);
        let needed = needed.filter(|_| asked);
        // Of most events there is nothing to ask: no memory went back before them.
        let went_back = traffic.reserved_before.is_some();
        let needs_no_call = went_back
            && (self.partial_releases.contains(&index)
                || traffic.had_begun(pools, &self.config, index)
                || self.collects_garbage() && traffic.may_be_garbage(trace));
        let is_told = went_back && action != Action::OutOfMemory;
        self.empties_cache |= is_told && needed.is_none() && !needs_no_call;
        needed.filter(|_| !needs_no_call)
    }
}

/// Returns whether a request was refused.
fn has_refusal(trace: &Trace) -> bool {
    let mut events = trace.events.iter();
    events.any(|recorded| recorded.event.action == Action::OutOfMemory)
}

/// Returns whether the block that an event frees is free with the next event: then no other stream
/// used it. PyTorch writes both down under one lock.
pub(crate) fn is_free_at_once(trace: &Trace, index: usize) -> bool {
    let freed = trace.events[index].event.address;
    let next = trace.events.get(index + 1).map(|next| next.event);
    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == freed)
}
