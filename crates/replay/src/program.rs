//! A recording as a list of steps that any allocator can take.
//!
//! A recording names blocks by the addresses that PyTorch gave them. Another allocator gives other
//! addresses, so a program names them by slots, small numbers that are used again. This is also
//! where everything is told that a recording does not say but implies: calls of `empty_cache`, when
//! a private pool was let go of, and which freed blocks other streams still used.

use std::collections::{BTreeMap, HashMap};

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, Stream};
use lowtide_trace::{Trace, TraceEvent};

use crate::pools;

/// What a [`Program`] does with a block or with everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Asks for a block and keeps it in a slot.
    Allocate {
        slot: Slot,
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
    },
    /// Asks for the block at an address: PyTorch restores a private pool to a checkpoint so. Where
    /// addresses are others, any block will do.
    AllocateAt {
        slot: Slot,
        address: DeviceAddress,
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
    },
    /// Asks for a block that PyTorch could not serve.
    AllocateInVain {
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
    },
    /// Frees the block in a slot, which nothing uses any more.
    Free { slot: Slot },
    /// Frees the block in a slot, which work in another stream still uses: the stream that stands for
    /// it is `user`.
    FreeWhileUsed { slot: Slot, user: User },
    /// The work that used the oldest block of a user is done.
    FinishUse { user: User },
    /// `torch.cuda.empty_cache()`.
    EmptyCache,
    /// The same for what one private pool holds.
    EmptyPool { pool: MempoolId },
    /// A graph or `MemPool` takes hold of a private pool that nothing held.
    HoldPool { pool: MempoolId },
    /// The last holder of a private pool lets go of it.
    ReleasePool { pool: MempoolId },
}

/// The number of a place for a block that is in use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Slot(u32);

impl Slot {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The number of a stream that stands for whatever work used blocks of other streams. A recording
/// does not name those streams, only when their work was done; blocks whose work was done in the order
/// in which they were freed share one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct User(u32);

impl User {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A recording as steps.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    /// For each step, the number of recorded events up to and including what it stands for. The
    /// events from one end to the next are those that PyTorch wrote down during the step; a step that
    /// says what no event says has the end of the step that it belongs to.
    pub(crate) event_ends: Vec<u32>,
    /// How many steps, the first ones, stand for what was there before the first event.
    pub(crate) initial_steps: usize,
    /// The pools of the segments that were there then, where only their addresses tell.
    pub(crate) initial_pools: Option<Vec<MempoolId>>,
    pub(crate) slots: usize,
    pub(crate) users: usize,
}

impl Program {
    /// Returns the steps of a recording. Takes one look at each event and a hash for each block.
    pub(crate) fn new(trace: &Trace) -> Program {
        let mut compiler = Compiler::new(trace);
        compiler.compile_initial_state();
        compiler.program.initial_steps = compiler.program.steps.len();
        for index in 0..trace.events.len() {
            compiler.compile_event(index);
        }
        compiler.end_group(trace.events.len(), false);
        compiler.flush(trace.events.len());
        compiler.program
    }
}

/// Makes a [`Program`], event by event.
struct Compiler<'a> {
    trace: &'a Trace,
    /// The pool of each event, where the recording does not say.
    told_pools: Option<Vec<MempoolId>>,
    program: Program,
    /// The blocks in use, by their recorded addresses.
    in_use: HashMap<DeviceAddress, Slot>,
    vacant: Vec<Slot>,
    /// The users of freed blocks that are still used.
    used: HashMap<DeviceAddress, User>,
    /// For each user, the event at which its latest block will be free.
    users: Vec<usize>,
    /// When freed blocks that are still used will be free: (address, the event of the free).
    completions: HashMap<(DeviceAddress, usize), usize>,
    /// Private pools, and whether something holds them.
    pools: HashMap<MempoolId, bool>,
    group: Group,
    /// The recorded segments, from start to size.
    segments: BTreeMap<DeviceAddress, Bytes>,
    /// The first event behind the requests that restore a segment to a checkpoint.
    restored_until: usize,
    /// Steps to be taken right before the next.
    silent: Vec<Step>,
    reserved: Bytes,
    reserved_max: Bytes,
    /// Whether the program calls `empty_cache` somewhere.
    empties_cache: bool,
}

/// What happened between the allocator and the driver since the last step.
#[derive(Default)]
struct Group {
    /// Whether, and from which pools, segments or pages went back.
    released_from: Vec<MempoolId>,
    /// The number of events up to and including the last of them.
    release_end: usize,
    /// How much was held from the driver before the first of them went back.
    reserved_before: Bytes,
    /// Bytes of segments or pages that came, after any that went back.
    came: Bytes,
    /// Blocks that became free in it.
    finished: Vec<User>,
}

impl Group {
    /// Returns whether more than `limit` would have been held, had nothing gone back.
    fn passes(&self, limit: Bytes) -> bool {
        !self.came.is_zero() && self.reserved_before + self.came > limit
    }
}

impl<'a> Compiler<'a> {
    fn new(trace: &'a Trace) -> Compiler<'a> {
        let told = pools::tell(trace)
            .map(|told| (told.initial, told.events))
            .unzip();
        let segments = &trace.initial.segments;
        let initial = segments.iter().map(|segment| segment.size).sum();
        Compiler {
            trace,
            told_pools: told.1,
            program: Program {
                initial_pools: told.0,
                ..Program::default()
            },
            in_use: HashMap::new(),
            vacant: Vec::new(),
            used: HashMap::new(),
            users: Vec::new(),
            completions: find_completions(&trace.events),
            pools: HashMap::new(),
            group: Group::default(),
            segments: segments
                .iter()
                .map(|segment| (segment.address, segment.size))
                .collect(),
            restored_until: 0,
            silent: Vec::new(),
            reserved: initial,
            reserved_max: reserved_max(initial, &trace.events),
            empties_cache: empties_cache(initial, &trace.events),
        }
    }

    /// Blocks in use before the first event are asked for in the order of their addresses: the first
    /// steps, one for each.
    fn compile_initial_state(&mut self) {
        for block in &self.trace.initial.blocks {
            let slot = self.occupy(block.address);
            let pool = block.pool.unwrap_or_default();
            self.pools.insert(pool, true);
            let (size, stream) = (block.requested, block.stream);
            self.push(
                0,
                Step::Allocate {
                    slot,
                    size,
                    stream,
                    pool,
                },
            );
        }
        for block in &self.trace.initial.blocks {
            if block.status == BlockStatus::PendingFree {
                self.compile_free(block.address, None);
            }
        }
    }

    fn compile_event(&mut self, index: usize) {
        let recorded = &self.trace.events[index];
        let Event {
            action,
            address,
            size,
            stream,
            ..
        } = recorded.event;
        let pool = self.pool_of(index);
        let end = index + 1;
        match action {
            Action::Alloc => {
                self.end_group(index, true);
                self.hold_pool(pool);
                let slot = self.occupy(address);
                let step = match self.restores(index, pool) {
                    true => Step::AllocateAt {
                        slot,
                        address,
                        size,
                        stream,
                        pool,
                    },
                    false => Step::Allocate {
                        slot,
                        size,
                        stream,
                        pool,
                    },
                };
                self.push(end, step);
                self.finish_uses(end);
            }
            Action::OutOfMemory => {
                self.end_group(index, true);
                self.push(end, Step::AllocateInVain { size, stream, pool });
                self.finish_uses(end);
            }
            Action::FreeRequested => {
                self.end_group(index, false);
                self.compile_free(address, Some(index));
            }
            Action::FreeCompleted => {
                // Most were compiled with the request.
                if let Some(user) = self.used.remove(&address) {
                    self.vacate(address);
                    self.group.finished.push(user);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                self.segments.insert(address, size);
                self.reserved += size;
                self.group.came += size;
            }
            Action::SegmentFree | Action::SegmentUnmap => self.compile_release(size, pool, index),
            Action::Snapshot => {}
        }
    }

    /// A block that is free right after it was freed was used by no other stream: PyTorch writes both
    /// down under one lock.
    fn compile_free(&mut self, address: DeviceAddress, index: Option<usize>) {
        let Some(&slot) = self.in_use.get(&address) else {
            return;
        };
        let end = index.map_or(0, |index| index + 1);
        let next = self.trace.events.get(end).map(|next| next.event);
        let at_once = |next: Event| next.action == Action::FreeCompleted && next.address == address;
        if index.is_some() && next.is_some_and(at_once) {
            self.vacate(address);
            self.push(end + 1, Step::Free { slot });
        } else {
            let user = self.user_until(self.completion(address, index));
            self.used.insert(address, user);
            self.push(end, Step::FreeWhileUsed { slot, user });
        }
    }

    fn completion(&self, address: DeviceAddress, index: Option<usize>) -> usize {
        let key = (address, index.map_or(0, |index| index + 1));
        self.completions.get(&key).copied().unwrap_or(usize::MAX)
    }

    /// Returns a user all of whose blocks are free before `completion`, a new one if need be.
    fn user_until(&mut self, completion: usize) -> User {
        let fitting = self.users.iter().position(|&latest| latest <= completion);
        let index = fitting.unwrap_or_else(|| {
            self.users.push(0);
            self.program.users += 1;
            self.users.len() - 1
        });
        self.users[index] = completion;
        User(number(index))
    }

    fn compile_release(&mut self, size: Bytes, pool: MempoolId, index: usize) {
        // Memory that came before the release belongs to a request that had it, and still failed.
        if self.group.released_from.is_empty() {
            self.group.reserved_before = self.reserved;
            self.group.came = Bytes::ZERO;
        }
        self.group.release_end = index + 1;
        if !pool.is_default() && self.pools.insert(pool, false) == Some(true) {
            self.push_silent(Step::ReleasePool { pool });
        }
        if !self.group.released_from.contains(&pool) {
            self.group.released_from.push(pool);
        }
        self.reserved = self.reserved.saturating_sub(size);
    }

    /// Ends what happened since the last step, before the event at `end`, which is a request or a
    /// free: tells whether memory went back because the program said so.
    ///
    /// A request that fails lets memory go back and then gets new memory. It did fail only if with
    /// the new memory more would have been held than ever was, because the limit was at least that;
    /// and where some memory went back that no request can have let go, the program is one that calls
    /// `empty_cache`, and did so here too. Requests that collect garbage do not fail first.
    fn end_group(&mut self, end: usize, before_request: bool) {
        let mut group = std::mem::take(&mut self.group);
        self.group.finished = std::mem::take(&mut group.finished);
        if before_request && self.let_go_first(&group, end) {
            // The wait for other streams was part of the request.
            return;
        }
        for user in std::mem::take(&mut self.group.finished) {
            self.push_silent(Step::FinishUse { user });
        }
        for pool in group.released_from {
            let step = match pool.is_default() {
                true => Step::EmptyCache,
                false => Step::EmptyPool { pool },
            };
            self.push(group.release_end, step);
        }
    }

    /// Returns whether the request at event `index` let memory go back itself.
    fn let_go_first(&self, group: &Group, index: usize) -> bool {
        if group.released_from.is_empty() {
            return false;
        }
        if group.came.is_zero() {
            return self.is_out_of_memory(index);
        }
        let collects_garbage = self.trace.settings.garbage_collection_threshold > 0.0;
        collects_garbage || !self.empties_cache && group.passes(self.reserved_max)
    }

    /// Returns whether the request at event `index` is one of those that restore a segment of a private
    /// pool: one after the other they tile it, which blocks that are asked for as they are needed, and
    /// go to the best fit, do not do.
    fn restores(&mut self, index: usize, pool: MempoolId) -> bool {
        if index < self.restored_until {
            return true;
        }
        let start = self.trace.events[index].event.address;
        let Some(&size) = self.segments.get(&start).filter(|_| !pool.is_default()) else {
            return false;
        };
        let fresh = index > 0 && self.trace.events[index - 1].event.action.is_segment();
        let mut end = start;
        let tiles = self.trace.events[index..]
            .iter()
            .map(|recorded| recorded.event);
        let tiles = tiles.take_while(|event| {
            let follows = event.action == Action::Alloc && event.address == end;
            end = if follows {
                end + event.size.round_up(Bytes(512))
            } else {
                end
            };
            follows
        });
        let count = tiles.count();
        if !fresh && end == start + size {
            self.restored_until = index + count;
        }
        index < self.restored_until
    }

    fn pool_of(&self, index: usize) -> MempoolId {
        let told = self.told_pools.as_ref().map(|pools| pools[index]);
        told.unwrap_or(self.trace.events[index].event.pool)
    }

    fn is_out_of_memory(&self, index: usize) -> bool {
        let recorded = self.trace.events.get(index);
        recorded.is_some_and(|recorded| recorded.event.action == Action::OutOfMemory)
    }

    /// Work that is done by the event at `end - 1`.
    fn finish_uses(&mut self, end: usize) {
        for user in std::mem::take(&mut self.group.finished) {
            self.push(end, Step::FinishUse { user });
        }
    }

    fn hold_pool(&mut self, pool: MempoolId) {
        // A pool that is new is held by its first request.
        if !pool.is_default() && self.pools.insert(pool, true) == Some(false) {
            self.push_silent(Step::HoldPool { pool });
        }
    }

    fn occupy(&mut self, address: DeviceAddress) -> Slot {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.program.slots += 1;
            Slot(number(self.program.slots - 1))
        });
        self.in_use.insert(address, slot);
        slot
    }

    fn vacate(&mut self, address: DeviceAddress) {
        self.vacant.extend(self.in_use.remove(&address));
    }

    /// Adds a step that no recorded event stands for, to be taken right before the next that one does.
    fn push_silent(&mut self, step: Step) {
        self.silent.push(step);
    }

    fn push(&mut self, end: usize, step: Step) {
        self.push_silent(step);
        self.flush(end);
    }

    fn flush(&mut self, end: usize) {
        self.program
            .event_ends
            .extend(self.silent.iter().map(|_| number(end)));
        self.program.steps.append(&mut self.silent);
    }
}

/// Returns when each freed block became free, for those where that was later: by address and the
/// event behind the free.
fn find_completions(events: &[TraceEvent]) -> HashMap<(DeviceAddress, usize), usize> {
    let mut requested = HashMap::new();
    let mut completions = HashMap::new();
    for (index, TraceEvent { event, .. }) in events.iter().enumerate() {
        let previous = index.checked_sub(1).map(|previous| events[previous].event);
        let follows_its_request = previous.is_some_and(|previous| {
            previous.action == Action::FreeRequested && previous.address == event.address
        });
        match event.action {
            Action::FreeRequested => {
                let next = events.get(index + 1).map(|next| next.event);
                let at_once = next.is_some_and(|next| {
                    next.action == Action::FreeCompleted && next.address == event.address
                });
                if !at_once {
                    requested.insert(event.address, index + 1);
                }
            }
            Action::FreeCompleted if !follows_its_request => {
                let start = requested.remove(&event.address).unwrap_or(0);
                completions.insert((event.address, start), index);
            }
            _ => {}
        }
    }
    completions
}

/// Returns the most bytes that were ever held from the driver.
fn reserved_max(initial: Bytes, events: &[TraceEvent]) -> Bytes {
    let (mut reserved, mut max) = (initial, initial);
    for TraceEvent { event, .. } in events {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => reserved += event.size,
            Action::SegmentFree | Action::SegmentUnmap => {
                reserved = reserved.saturating_sub(event.size);
            }
            _ => {}
        }
        max = max.max(reserved);
    }
    max
}

/// Returns whether memory went back somewhere although no request can have asked for that.
fn empties_cache(initial: Bytes, events: &[TraceEvent]) -> bool {
    let reserved_max = reserved_max(initial, events);
    let mut reserved = initial;
    let mut group = Group::default();
    for TraceEvent { event, .. } in events {
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap => {
                if group.released_from.is_empty() {
                    group = Group {
                        reserved_before: reserved,
                        ..Group::default()
                    };
                    group.released_from.push(event.pool);
                }
                reserved = reserved.saturating_sub(event.size);
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                reserved += event.size;
                group.came += event.size;
            }
            Action::Alloc | Action::FreeRequested | Action::OutOfMemory => {
                let own = event.action == Action::OutOfMemory
                    || event.action == Action::Alloc && group.passes(reserved_max);
                if !group.released_from.is_empty() && !own {
                    return true;
                }
                group = Group::default();
            }
            Action::FreeCompleted | Action::Snapshot => {}
        }
    }
    false
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("a recording has fewer than 2^32 events")
}
