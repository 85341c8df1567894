//! Compiles a recording into a [`Program`], event by event.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use lowtide_core::{
    Action, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot, Stream,
};
use lowtide_trace::Trace;

use crate::extents::Extents;
use crate::pools::EventPools;
use crate::program::{Program, Request, Slot, Step, User};
use crate::survey::{Survey, Traffic, is_free_at_once};

/// Returns the steps of a recording. Reads each event twice and hashes each block once.
pub(crate) fn compile(trace: &Trace) -> Program {
    Compiler::new(trace).compile()
}

/// Builds a [`Program`].
struct Compiler<'a> {
    trace: &'a Trace,
    survey: Survey,
    event_pools: EventPools<'a>,
    program: Program,
    /// The allocated blocks, by their recorded addresses.
    in_use: HashMap<DeviceAddress, Slot, BuildHasherDefault<AddressHasher>>,
    vacant: Vec<Slot>,
    /// The users of freed blocks that other streams still use.
    used: HashMap<DeviceAddress, User>,
    /// The users, by the event at which the latest block of each becomes free.
    users: BTreeMap<usize, Vec<User>>,
    /// Private pools, and whether something holds them.
    pools: HashMap<MempoolId, bool>,
    /// The bytes in the segments of each pool.
    pool_bytes: HashMap<MempoolId, Bytes>,
    group: Group,
    extents: Extents,
    /// The first event after the requests that restore a segment to a checkpoint.
    restored_until: usize,
    /// The pools that released memory for the next request.
    emptied: Vec<MempoolId>,
    /// Steps that run right before the next step.
    silent: Vec<Step>,
    reserved: Bytes,
}

/// The driver's calls and completed frees since the last request or free.
#[derive(Default)]
struct Group {
    traffic: Traffic,
    /// The pools that released memory, in order.
    released_from: Vec<MempoolId>,
    released_pools: HashSet<MempoolId>,
    /// The events that released memory.
    releases: Vec<usize>,
    /// The number of events up to and including the last of these.
    release_end: usize,
    /// The users whose blocks became free.
    finished: Vec<User>,
    /// The number of them whose blocks became free before any memory was released.
    finished_first: usize,
}

impl<'a> Compiler<'a> {
    fn new(trace: &'a Trace) -> Compiler<'a> {
        let mut event_pools = EventPools::new(trace);
        let initial_segments = std::mem::take(&mut event_pools.initial_segments);
        let survey = Survey::new(trace, &event_pools);
        let pool_bytes = initial_bytes(&initial_segments);
        Compiler {
            trace,
            program: Program {
                initial_segments,
                initial_ranges: std::mem::take(&mut event_pools.initial_ranges),
                limit_min: survey.limit_min,
                card: event_pools.card,
                inferred_pools: event_pools.inferred_count(),
                ..Program::default()
            },
            in_use: HashMap::default(),
            vacant: Vec::new(),
            used: HashMap::new(),
            users: BTreeMap::new(),
            // Something holds each pool before the first event.
            pools: pool_bytes.keys().map(|&pool| (pool, true)).collect(),
            pool_bytes,
            group: Group::default(),
            restored_until: 0,
            emptied: Vec::new(),
            silent: Vec::new(),
            reserved: trace.initial_reserved_bytes(),
            extents: Extents::new(trace),
            event_pools,
            survey,
        }
    }

    fn compile(mut self) -> Program {
        let events = self.trace.events.len();
        self.program.steps.reserve(events / 3 * 2);
        self.program.event_ends.reserve(events / 3 * 2);
        self.compile_initial_state();
        self.program.initial_steps = self.program.steps.len();
        for index in 0..events {
            self.compile_event(index);
        }
        self.end_group(events, false);
        self.flush(events);
        self.program
    }

    /// Adds the first steps: requests for the blocks that are allocated before the first event, by address. Behind
    /// the blocks of each segment of a private pool come requests for the segment's free memory.
    fn compile_initial_state(&mut self) {
        let reserves = initial_reserves(&self.program.initial_segments);
        let mut reserves = reserves.into_iter().peekable();
        let mut reserved = Vec::new();
        for block in &self.trace.initial.blocks {
            while let Some(reserve) = reserves.next_if(|reserve| reserve.end <= block.address) {
                reserved.extend(self.compile_reserve(&reserve));
            }
            let slot = self.occupy(block.address);
            self.program.initial_slots.push(slot);
            let request = Request {
                size: block.requested,
                stream: block.stream,
                pool: block.pool.unwrap_or_default(),
            };
            self.pools.insert(request.pool, true);
            let at = None;
            self.push(0, Step::Allocate { slot, request, at });
        }
        for reserve in reserves {
            reserved.extend(self.compile_reserve(&reserve));
        }
        for slot in reserved {
            self.vacant.push(slot);
            self.push(0, Step::Free { slot });
        }
        self.program.adopted_steps = self.program.steps.len();
        for block in &self.trace.initial.blocks {
            if block.status == BlockStatus::PendingFree {
                let completion = self.survey.initial_completions.get(&block.address).copied();
                self.compile_free_while_used(0, block.address, completion);
            }
        }
    }

    /// Requests the free memory of a segment in as few pieces as such a segment serves, and returns their slots.
    fn compile_reserve(&mut self, reserve: &Reserve) -> Vec<Slot> {
        let mut slots = Vec::new();
        let mut left = reserve.free;
        // If the remainder is too small for a large segment, it is the unsplit end of a block in use.
        while left >= reserve.piece_min {
            let size = left.min(reserve.piece_max);
            left -= size;
            let slot = self.new_slot();
            slots.push(slot);
            let (stream, pool) = (reserve.stream, reserve.pool);
            let request = Request { size, stream, pool };
            self.push(0, Step::Reserve { slot, request });
        }
        slots
    }

    fn compile_event(&mut self, index: usize) {
        let event = self.trace.events[index].event;
        match event.action {
            Action::Alloc => self.compile_alloc(index),
            Action::OutOfMemory => self.compile_out_of_memory(index),
            Action::FreeRequested => self.compile_free(index),
            Action::FreeCompleted if self.used.is_empty() => {}
            Action::FreeCompleted => {
                if let Some(user) = self.used.remove(&event.address) {
                    let released = !self.group.released_from.is_empty();
                    if released && !self.survey.releases_some {
                        // PyTorch waits for all blocks that other streams use before it releases memory.
                        self.end_group(index, false);
                    }
                    self.vacate(event.address);
                    self.group.traffic.finish(event, index);
                    self.group.finished.push(user);
                    if self.group.released_from.is_empty() {
                        self.group.finished_first += 1;
                    }
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                self.extents.apply(event);
                if !self.survey.is_by_strategy(index) {
                    self.group.traffic.add(event, self.reserved);
                }
                self.reserved += event.size;
                let pool = self.event_pools.of(index);
                *self.pool_bytes.entry(pool).or_default() += event.size;
            }
            Action::SegmentFree | Action::SegmentUnmap => self.compile_release(index),
            // To the program, a pause is no event: paused memory keeps its addresses until it is freed.
            Action::Snapshot
            | Action::SegmentPaused
            | Action::SegmentResumed
            | Action::Annotate => {}
        }
    }

    fn compile_alloc(&mut self, index: usize) {
        let request = self.begin_request(index);
        let address = self.trace.events[index].event.address;
        let slot = self.occupy(address);
        let is_restored = self.restores(index, request.pool);
        let at = is_restored.then_some(address);
        self.push(index + 1, Step::Allocate { slot, request, at });
        self.finish_uses(index + 1);
    }

    fn compile_out_of_memory(&mut self, index: usize) {
        let request = self.begin_request(index);
        let in_capture =
            !request.pool.is_default() || self.survey.captured_refusals.contains(&index);
        let step = Step::AllocateInVain {
            request,
            in_capture,
        };
        self.push(index + 1, step);
        self.finish_uses(index + 1);
    }

    /// Returns the request of an event, after the steps that come before it.
    fn begin_request(&mut self, index: usize) -> Request {
        let Event { size, stream, .. } = self.trace.events[index].event;
        let pool = self.event_pools.of(index);
        self.end_group(index, true);
        self.hold_pool(pool);
        Request { size, stream, pool }
    }

    fn compile_free(&mut self, index: usize) {
        let address = self.trace.events[index].event.address;
        self.end_group(index, false);
        if !is_free_at_once(self.trace, index) {
            let completion = self.survey.completions.get(&index).copied();
            self.compile_free_while_used(index + 1, address, completion);
        } else if let Some(slot) = self.vacate(address) {
            self.push(index + 2, Step::Free { slot });
        }
    }

    fn compile_free_while_used(
        &mut self,
        end: usize,
        address: DeviceAddress,
        completion: Option<usize>,
    ) {
        if let Some(&slot) = self.in_use.get(&address) {
            let user = self.user_until(completion.unwrap_or(usize::MAX));
            self.used.insert(address, user);
            self.push(end, Step::FreeWhileUsed { slot, user });
        }
    }

    /// Returns a user whose blocks are all free before `completion`, an existing one if possible.
    fn user_until(&mut self, completion: usize) -> User {
        let done_before = self.users.range(..=completion).next_back();
        let latest = done_before.map(|(&latest, _)| latest);
        let user = latest.and_then(|latest| {
            let mut users = self.users.remove(&latest)?;
            let user = users.pop();
            if !users.is_empty() {
                self.users.insert(latest, users);
            }
            user
        });
        let user = user.unwrap_or_else(|| {
            self.program.users += 1;
            User(number(self.program.users - 1))
        });
        self.users.entry(completion).or_default().push(user);
        user
    }

    fn compile_release(&mut self, index: usize) {
        let (event, pool) = (self.trace.events[index].event, self.event_pools.of(index));
        let reserved = self.reserved;
        self.extents.apply(event);
        self.reserved = reserved.saturating_sub(event.size);
        let left = self.pool_bytes.entry(pool).or_default();
        *left = left.saturating_sub(event.size);
        if pool.is_default() {
            if self.survey.is_by_strategy(index) {
                return;
            }
            self.group.traffic.release(event, reserved, index);
        }
        self.group.release_end = index + 1;
        self.group.releases.push(index);
        if !pool.is_default() && self.pools.insert(pool, false) == Some(true) {
            self.silent.push(Step::ReleasePool { pool });
        }
        if self.group.released_pools.insert(pool) {
            self.group.released_from.push(pool);
        }
    }

    /// Ends the group before the event at `end`, which is a request or a free, and decides whether the memory was
    /// released because the program called `empty_cache`.
    fn end_group(&mut self, end: usize, before_request: bool) {
        if self.group.finished.is_empty() && self.group.released_from.is_empty() {
            self.group.traffic = Traffic::default();
            return;
        }
        let mut group = std::mem::take(&mut self.group);
        if before_request && (self.released_first(&group, end) || self.waits_in_vain(&group, end)) {
            let released = !group.releases.is_empty();
            let is_private = !self.event_pools.of(end).is_default();
            if released && (is_private || self.survey.collects_garbage)
                || self.survey.partial_releases.contains(&end)
            {
                // PyTorch first checks which streams have finished, and then releases some memory without a wait.
                self.finish(group.finished.drain(..group.finished_first));
            }
            // PyTorch waited for other streams during the request.
            self.group.finished = std::mem::take(&mut group.finished);
            self.emptied = group.released_from;
            return;
        }
        self.finish(group.finished.drain(..group.finished_first));
        for pool in group.released_from {
            let step = if pool.is_default() {
                Step::EmptyCache
            } else {
                Step::EmptyPool { pool }
            };
            self.push(group.release_end, step);
            self.hold_again(pool);
        }
        self.finish(group.finished.into_iter());
    }

    /// Completes the users' work before the next step.
    fn finish(&mut self, users: impl Iterator<Item = User>) {
        self.silent
            .extend(users.map(|user| Step::FinishUse { user }));
    }

    /// Holds a pool that released memory again, if it has more. A pool that was inferred may stand for several, of
    /// which only one has ended. The memory of the others stays until the recording shows its release.
    fn hold_again(&mut self, pool: MempoolId) {
        if self
            .pool_bytes
            .get(&pool)
            .is_some_and(|left| !left.is_zero())
        {
            self.hold_pool(pool);
        }
    }

    /// Returns whether the request at event `index` released memory itself, instead of a call of `empty_cache`
    /// before it.
    ///
    /// A request that fails at first releases memory and then gets new memory. Did this one fail at first?
    ///
    /// - Not if it would have been served from the released memory.
    /// - If it was refused, yes, except during a graph capture.
    /// - Not if no new memory came for it.
    /// - Yes if it had begun before the release.
    /// - Yes if free memory stayed that `empty_cache` would have released.
    /// - Else only if the new memory would have exceeded the least possible limit, inferred from the requests that
    ///   were served. Even then not if some other release cannot have come from a request: such a program calls
    ///   `empty_cache`, and called it here too.
    ///
    /// Requests of `tide` release nothing. Requests that collect garbage, which is always large, do not fail first.
    /// Requests of a private pool release nothing, and neither do requests of other pools during a graph capture.
    /// Large unsplit blocks (`max_split_size_mb`) are the exception.
    fn released_first(&self, group: &Group, index: usize) -> bool {
        if !self.event_pools.of(index).is_default() {
            return self.releases_own(group, index);
        }
        if group.released_from.is_empty()
            || self.survey.is_of_tide()
            || self.survey.captured_refusals.contains(&index) && !self.survey.releases_some
            || group.traffic.would_have_served(&self.event_pools, index)
        {
            return false;
        }
        let needed = group.traffic.needed(&self.event_pools, index);
        let Some(needed) = needed else {
            let recorded = self.trace.events.get(index);
            return recorded.is_some_and(|event| event.event.action == Action::OutOfMemory);
        };
        self.survey.collects_garbage && group.traffic.may_be_garbage(self.trace)
            || self.survey.partial_releases.contains(&index)
            || needed > self.survey.limit_min && !self.survey.empties_cache
            || group.traffic.had_begun(&self.event_pools, index)
    }

    /// Returns whether the request at event `index`, of a private pool, released large unsplit blocks of that pool.
    /// Such a request can release nothing else.
    fn releases_own(&self, group: &Group, index: usize) -> bool {
        let config = &self.event_pools.config;
        let Some((request, max)) = self.event_at(index).zip(config.max_split_size) else {
            return false;
        };
        let size = config.block_size(request.size);
        let mut released = group.releases.iter().map(|&release| {
            let event = self.trace.events[release].event;
            let is_own = self.event_pools.of(release) == self.event_pools.of(index);
            (event, is_own && event.stream == request.stream)
        });
        let releases = released.all(|(event, is_own)| {
            let would_serve = event.size >= size && config.block_serves(event.size, size);
            is_own && event.action == Action::SegmentFree && event.size >= max && !would_serve
        });
        releases && !group.releases.is_empty() && size > Bytes::mib(1)
    }

    /// Returns whether the request at event `index` was refused without releasing memory. Blocks that became free
    /// just before its event did so while it waited, and PyTorch does not look for a free block after that wait.
    fn waits_in_vain(&self, group: &Group, index: usize) -> bool {
        let event = self.event_at(index);
        group.released_from.is_empty()
            && event.is_some_and(|event| event.action == Action::OutOfMemory)
            && self.event_pools.of(index).is_default()
            && !self.survey.captured_refusals.contains(&index)
    }

    /// Returns whether the request at event `index` restores a segment of a private pool to a checkpoint. Such
    /// requests cover the segment one after the other; requests of a running program take the best fit and do not.
    /// If more was mapped to an expandable segment since the checkpoint, they cover only its beginning, and the last
    /// block, which was free then, is freed at once. A recording that lost its beginning may begin among them.
    fn restores(&mut self, index: usize, pool: MempoolId) -> bool {
        if pool.is_default() || index < self.restored_until {
            return index < self.restored_until;
        }
        let is_fresh = index > 0 && self.trace.events[index - 1].event.action.is_segment();
        let start = self.trace.events[index].event.address;
        let around = { self.extents.around(start) }
            .filter(|&(first, _)| !is_fresh && (first == start || index == 0));
        let Some((first, segment_end)) = around else {
            return false;
        };
        let (mut last, mut end, mut behind) = (start, start, index);
        while end < segment_end
            && let Some(event) = self.event_at(behind)
            && event.action == Action::Alloc
            && event.address == end
        {
            (last, end) = (end, end + event.size.round_up(Bytes(512)));
            behind += 1;
        }
        let has_grown = end < segment_end && last != start && self.extents.is_mapped(first);
        // A single request at the beginning of a recording may end at the segment's end by chance.
        let is_tiled = end == segment_end && (start == first || last != start);
        if is_tiled || has_grown && self.is_freed_next(behind, (first, last)) {
            self.restored_until = behind;
        }
        index < self.restored_until
    }

    /// Returns whether the frees from event `index` on, of blocks from `start` to `last`, include the block at
    /// `last`.
    fn is_freed_next(&self, index: usize, (start, last): (DeviceAddress, DeviceAddress)) -> bool {
        let events = self.trace.events[index..].iter();
        let mut frees = events.map(|recorded| recorded.event).take_while(|event| {
            matches!(event.action, Action::FreeRequested | Action::FreeCompleted)
                && (start..=last).contains(&event.address)
        });
        frees.any(|event| event.address == last)
    }

    fn event_at(&self, index: usize) -> Option<Event> {
        self.trace.events.get(index).map(|recorded| recorded.event)
    }

    /// Completes work by the event before `end`, and holds the pools again that released memory for it.
    fn finish_uses(&mut self, end: usize) {
        for pool in std::mem::take(&mut self.emptied) {
            self.hold_again(pool);
        }
        for user in std::mem::take(&mut self.group.finished) {
            self.push(end, Step::FinishUse { user });
        }
    }

    fn hold_pool(&mut self, pool: MempoolId) {
        // A new pool is held by its first request.
        if !pool.is_default() && self.pools.insert(pool, true) == Some(false) {
            self.silent.push(Step::HoldPool { pool });
        }
    }

    fn occupy(&mut self, address: DeviceAddress) -> Slot {
        let slot = self.new_slot();
        self.in_use.insert(address, slot);
        slot
    }

    fn new_slot(&mut self) -> Slot {
        self.vacant.pop().unwrap_or_else(|| {
            self.program.slots += 1;
            Slot(number(self.program.slots - 1))
        })
    }

    fn vacate(&mut self, address: DeviceAddress) -> Option<Slot> {
        let slot = self.in_use.remove(&address);
        self.vacant.extend(slot);
        slot
    }

    /// Adds the steps that wait for the next step, and then `step`, for the events before `end`.
    fn push(&mut self, end: usize, step: Step) {
        if !self.silent.is_empty() {
            self.flush(end);
        }
        self.program.steps.push(step);
        self.program.event_ends.push(number(end));
    }

    fn flush(&mut self, end: usize) {
        let ends = self.silent.iter().map(|_| number(end));
        self.program.event_ends.extend(ends);
        self.program.steps.append(&mut self.silent);
    }
}

/// The free memory of a private pool's segment before the first event.
struct Reserve {
    stream: Stream,
    pool: MempoolId,
    end: DeviceAddress,
    free: Bytes,
    /// The smallest and largest requests that such segments serve.
    piece_min: Bytes,
    piece_max: Bytes,
}

/// Returns the free memory of each private pool's segment, by address.
fn initial_reserves(segments: &[SegmentSnapshot]) -> Vec<Reserve> {
    const SMALL_MAX: Bytes = Bytes::mib(1);
    let private = segments.iter().filter(|segment| !segment.pool.is_default());
    let reserves = private.map(|segment| {
        let (piece_min, piece_max) = if segment.is_large {
            (SMALL_MAX + Bytes(1), Bytes(u64::MAX))
        } else {
            (Bytes(1), SMALL_MAX)
        };
        Reserve {
            stream: segment.stream,
            pool: segment.pool,
            end: segment.address + segment.size,
            free: segment.size.saturating_sub(segment.active_bytes()),
            piece_min,
            piece_max,
        }
    });
    reserves.collect()
}

/// Returns the bytes in each pool's segments before the first event.
fn initial_bytes(segments: &[SegmentSnapshot]) -> HashMap<MempoolId, Bytes> {
    let mut bytes = HashMap::new();
    for segment in segments {
        *bytes.entry(segment.pool).or_default() += segment.size;
    }
    bytes
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("a recording has fewer than 2^32 events")
}

/// Hashes an address with one multiplication. A recording holds a million addresses, and no attacker chooses them
/// to collide.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let product = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
