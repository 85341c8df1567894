//! Runs a program's steps with one allocator on the simulator.

use std::collections::VecDeque;
use std::time::Instant;

use lowtide_core::{
    Action, AllocError, Bytes, Config, DeviceAddress, DeviceAllocator, EventHandle, StatsReset,
    Stream,
};
use lowtide_sim::{Call, SimConfig, SimDriver};
use lowtide_trace::Trace;

use crate::job::{Job, Options};
use crate::outcome::{Difference, Outcome, Point, ReplayError};
use crate::program::{Program, Request, Slot, Step, User};
use crate::progress::Progress;
use crate::script::Script;
use crate::settings::config_of;
use crate::verify::Comparison;

/// The number of steps between two reports of progress.
const PROGRESS_STEPS: usize = 1 << 14;

/// A replay in progress.
pub(crate) struct Run<'a> {
    trace: &'a Trace,
    peak_live_bytes: Bytes,
    program: &'a Program,
    /// The ages of the segments and blocks that existed before the first event.
    ages: &'a Ages,
    allocator: DeviceAllocator<SimDriver<Script>>,
    /// The addresses of the blocks in the slots; null if the request was refused.
    addresses: Vec<DeviceAddress>,
    /// The events that the blocks of each user wait for, oldest first; `None` for a block of zero bytes, which
    /// waits for none.
    waits: Vec<VecDeque<Option<EventHandle>>>,
    comparison: Option<Comparison<'a>>,
    timeline: Option<Timeline<'a>>,
    /// The size of each block that was allocated, if the sizes were requested.
    block_sizes: Option<Vec<Bytes>>,
    /// Whether the strategy has free memory that can be held for a private pool.
    keeps_free_memory: bool,
    /// Whether the replay stops at the first difference.
    stops_at_difference: bool,
    /// The time that the driver's calls took before the first event, in nanoseconds: those for blocks that were there.
    before_events_ns: u64,
    /// The latest time of the events so far, in microseconds since 1970.
    time_us: i64,
    /// The recorded event of the first refusal, and its error.
    refused: Option<(usize, AllocError)>,
}

/// The order in which the segments and blocks before the first event were created.
#[derive(Clone, Debug)]
pub(crate) struct Ages {
    /// Indices into the program's initial segments, the oldest first.
    pub(crate) segments: Vec<usize>,
    /// The addresses of all blocks in them, the oldest first; empty if the strategy does not use the ages of
    /// blocks.
    pub(crate) blocks: Vec<DeviceAddress>,
}

impl Ages {
    /// Returns the order of addresses, in which a driver allocates segments for a job that has released none. The
    /// blocks of a segment are ordered as if they had been split off one after the other.
    pub(crate) fn guess(job: &Job<'_>) -> Ages {
        Ages {
            segments: (0..job.program.initial_segments.len()).collect(),
            blocks: Vec::new(),
        }
    }
}

/// The first difference between a replay and the recording.
pub(crate) struct Miss {
    pub(crate) difference: Difference,
    /// Whether the replay releases memory there that no refusal explains.
    pub(crate) releases_too_much: bool,
    /// The allocator right after the difference.
    pub(crate) allocator: DeviceAllocator<SimDriver<Script>>,
}

/// Whether the job continues after a step.
enum Progressed {
    /// The job continues.
    On,
    /// A request was refused that PyTorch served: the job would have ended here.
    Ended,
}

impl<'a> Run<'a> {
    /// Returns a replay that has not begun. `ages` gives the ages of the segments and blocks that existed before
    /// the first event.
    pub(crate) fn new(
        job: &'a Job<'a>,
        config: &Config,
        options: &Options,
        ages: &'a Ages,
    ) -> Run<'a> {
        let Job {
            trace,
            program,
            peak_live_bytes,
        } = job;
        let addresses = if options.verify {
            Script::exact(&trace.events, large_page_size(job))
        } else {
            Script::likely(&trace.events)
        };
        // A fraction in the configuration is a fraction of the capacity.
        let has_fraction = config.memory_fraction().is_some();
        let capacity = if options.verify && !has_fraction {
            recorded_capacity(options.capacity, program)
        } else {
            options.capacity
        };
        let is_bound_by_card = options.verify && capacity.is_none() && !has_fraction;
        let sim = SimConfig {
            capacity,
            // If nothing limits the replay, the recording decides which requests are refused. The number of
            // addresses of an expandable segment decides which block is taken, too.
            total: program.card.full_size_min.filter(|_| is_bound_by_card),
            ..SimConfig::default()
        };
        let mut driver = SimDriver::with_addresses(sim, addresses);
        for index in 0..program.users {
            driver.hold_stream(stream_of(index));
        }
        // Nearly all are of PyTorch's pools of streams, which are never destroyed.
        for run in (trace.events).chunk_by(|one, next| one.event.stream == next.event.stream) {
            driver.keep_stream(run[0].event.stream);
        }
        let config = config.clone().in_order(trace.settings.free_block_order);
        let mut allocator = DeviceAllocator::new(driver, trace.device, &config);
        if options.capacity.is_some() && !has_fraction {
            allocator.set_limit(options.capacity);
        }
        allocator.lane_mut().event_log().record(options.verify);
        Run {
            trace,
            peak_live_bytes: *peak_live_bytes,
            program,
            ages,
            allocator,
            addresses: vec![DeviceAddress::NULL; program.slots],
            waits: vec![VecDeque::new(); program.users],
            comparison: options.verify.then(|| Comparison::new(&trace.events)),
            timeline: Timeline::new(trace, program, options.timeline_points),
            block_sizes: None,
            keeps_free_memory: config.keeps_free_memory(),
            stops_at_difference: false,
            before_events_ns: 0,
            time_us: trace.events.first().map_or(0, |event| event.time_us),
            refused: None,
        }
    }

    /// Runs every step and returns the result.
    pub(crate) fn finish(
        mut self,
        config: &Config,
        progress: &dyn Progress,
    ) -> Result<Outcome, ReplayError> {
        let started = Instant::now();
        let taken = self.take_all(progress);
        let taken = taken.map_err(|error| error.after(self.first_difference()))?;
        let elapsed_ns = started.elapsed().as_secs_f64() * 1e9;
        Ok(self.outcome(config, elapsed_ns, taken))
    }

    /// Runs every step and returns the size of each block; `None` if one was not at its recorded address. Requires
    /// [`Options::verify`].
    pub(crate) fn block_sizes(
        mut self,
        progress: &dyn Progress,
    ) -> Result<Option<Vec<Bytes>>, ReplayError> {
        self.block_sizes = Some(Vec::new());
        self.stops_at_difference = true;
        self.take_all(progress)?;
        let verified = self.comparison.map(Comparison::finish);
        let agrees = verified.is_some_and(|verified| verified.first_difference.is_none());
        let is_served = |step: &&Step| matches!(step, Step::Allocate { .. });
        let blocks = self.program.steps.iter().filter(is_served).count();
        let sizes = self.block_sizes;
        Ok(sizes.filter(|sizes| agrees && sizes.len() == blocks))
    }

    /// Runs the steps up to the first difference to the recording, and returns that difference, if there is one.
    /// Requires [`Options::verify`].
    pub(crate) fn first_miss(
        mut self,
        progress: &dyn Progress,
    ) -> Result<Option<Miss>, ReplayError> {
        self.stops_at_difference = true;
        self.take_all(progress)?;
        let was_refused = self.script().is_some_and(|script| script.refused_in_step());
        let difference = self
            .comparison
            .and_then(|comparison| comparison.finish().first_difference);
        Ok(difference.map(|difference| Miss {
            difference,
            releases_too_much: !was_refused,
            allocator: self.allocator,
        }))
    }

    /// Returns the addresses of the blocks before the first event, the oldest first; empty if the strategy does not
    /// take blocks by age. Requires [`Options::verify`].
    pub(crate) fn blocks_by_age(mut self) -> Vec<DeviceAddress> {
        if self.adopt_initial_state().is_err() {
            return Vec::new();
        }
        let mut blocks: Vec<_> = self.allocator.lane().block_numbers().collect();
        blocks.sort_unstable_by_key(|&(_, number)| number);
        blocks.into_iter().map(|(address, _)| address).collect()
    }

    /// Runs every step, or the steps up to the one at which the job would have ended, and returns their number.
    /// Reports all events as replayed even if the replay breaks off, because none of them will follow.
    fn take_all(&mut self, progress: &dyn Progress) -> Result<usize, ReplayError> {
        let mut reported = 0;
        let taken = self.take_steps(&mut |done| {
            progress.advance(done - reported);
            reported = done;
        });
        progress.advance(self.trace.events.len() as u64 - reported);
        taken
    }

    /// Runs steps as [`take_all`](Self::take_all) does, and reports now and then how many events are done.
    fn take_steps(&mut self, report: &mut dyn FnMut(u64)) -> Result<usize, ReplayError> {
        let adopted = self.adopt_initial_state()?;
        let mut taken = 0;
        for index in adopted..self.program.steps.len() {
            if index == self.program.adopted_steps {
                self.begin_events(adopted == 0);
            }
            if taken % PROGRESS_STEPS == 0 {
                report(u64::from(self.program.event_ends[index]));
            }
            taken += 1;
            if let Progressed::Ended = self.take(index)? {
                break;
            }
            if self.stops_at_difference && self.differs() {
                break;
            }
        }
        Ok(taken)
    }

    /// Forgets what the state before the first event took. `is_replayed` says whether its blocks were allocated.
    fn begin_events(&mut self, is_replayed: bool) {
        self.before_events_ns = self.allocator.driver().driver_time_ns();
        if is_replayed && self.program.has_reserves() {
            // The reserves of private pools were allocated for a moment.
            self.allocator.reset_stats(StatsReset::Peaks);
        }
    }

    /// If events are compared, adopts the segments and blocks before the first event exactly as they were, and
    /// returns the number of steps that this replaces. Returns 0 if events are not compared or the strategy cannot
    /// adopt a segment.
    fn adopt_initial_state(&mut self) -> Result<usize, ReplayError> {
        if self.comparison.is_none() {
            return Ok(0);
        }
        for &place in &self.ages.segments {
            let segment = &self.program.initial_segments[place];
            let range = self.program.initial_ranges.get(&segment.address);
            if let Some(script) = self.script() {
                script.place_next(range.copied().unwrap_or(segment.address));
            }
            let adopted = self.allocator.lane_mut().adopt(segment);
            if !adopted.map_err(|error| ReplayError::at(0, error))? {
                return Ok(0);
            }
        }
        self.allocator.lane_mut().event_log().take();
        self.allocator.lane_mut().order_blocks(&self.ages.blocks);
        for (slot, block) in (self.program.initial_slots.iter()).zip(&self.trace.initial.blocks) {
            self.addresses[slot.index()] = block.address;
            self.note_block_size(block.address);
        }
        Ok(self.program.adopted_steps)
    }

    fn take(&mut self, index: usize) -> Result<Progressed, ReplayError> {
        let step = self.program.steps[index];
        let end = self.program.event_ends[index] as usize;
        if let Some(script) = self.script() {
            script.begin_step(end);
        }
        self.advance_to(end);
        let progressed = self
            .act(step, end)
            .map_err(|error| ReplayError::at(end, error))?;
        if let Some(comparison) = &mut self.comparison {
            let replayed = self.allocator.lane_mut().event_log().take();
            // Events from before the first recorded one have no counterpart.
            comparison.add(replayed.filter(|_| index >= self.program.initial_steps));
            let next_end = self.program.event_ends.get(index + 1);
            if next_end.is_none_or(|&next_end| next_end as usize > end) {
                comparison.compare(end);
            }
        }
        if let Some(timeline) = &mut self.timeline
            && let Progressed::On = progressed
        {
            timeline.add(step, end, self.allocator.stats().reserved());
        }
        Ok(progressed)
    }

    /// Advances the device's clock to the time of the event before `end`.
    fn advance_to(&mut self, end: usize) {
        let last = end
            .checked_sub(1)
            .and_then(|last| self.trace.events.get(last));
        let before = self.time_us;
        self.time_us = last.map_or(before, |event| event.time_us.max(before));
        let passed_us = self.time_us.abs_diff(before);
        self.allocator
            .driver()
            .advance(passed_us.saturating_mul(1000));
    }

    fn act(&mut self, step: Step, end: usize) -> Result<Progressed, AllocError> {
        match step {
            Step::Allocate { slot, request, at } => {
                let is_compared = self.comparison.is_some();
                let at_address = at.filter(|_| is_compared).and_then(|address| {
                    let lane = self.allocator.lane_mut();
                    lane.allocate_at(address, request.size).ok()
                });
                let result = match at_address {
                    Some(address) => Ok(address),
                    None => self.allocate(request, false),
                };
                return self.keep(slot, result, end);
            }
            Step::Reserve { slot, request } => {
                if self.keeps_free_memory {
                    let Request { size, stream, pool } = request;
                    match self.allocator.allocate_in(pool, size, stream) {
                        Ok(address) => self.addresses[slot.index()] = address,
                        Err(error) => return self.refuse(end, error, Progressed::Ended),
                    }
                }
            }
            Step::AllocateInVain {
                request,
                in_capture,
            } => {
                let result = self.allocate(request, in_capture);
                return self.go_on_without(end, result);
            }
            Step::Free { slot } => self.allocator.free(self.addresses[slot.index()])?,
            Step::FreeWhileUsed { slot, user } => self.free_while_used(slot, user)?,
            Step::FinishUse { user } => self.finish_use(user)?,
            Step::EmptyCache => self.allocator.empty_cache(None)?,
            Step::EmptyPool { pool } => unless_ended(self.allocator.empty_cache(Some(pool)))?,
            Step::HoldPool { pool } => self.allocator.lane_mut().create_or_retain_pool(pool),
            Step::ReleasePool { pool } => {
                unless_ended(self.allocator.lane_mut().release_pool(pool))?
            }
        }
        Ok(Progressed::On)
    }

    /// Allocates a block. While a program allocates to a private pool, PyTorch behaves as during a graph capture:
    /// when memory runs out, it releases nothing and queries no event. `in_capture` says that the recording shows
    /// the same for a request of another pool.
    fn allocate(
        &mut self,
        Request { size, stream, pool }: Request,
        in_capture: bool,
    ) -> Result<DeviceAddress, AllocError> {
        let gives_nothing_back = self
            .script()
            .is_some_and(|script| in_capture || !pool.is_default() && !script.releases_in_step());
        if gives_nothing_back {
            self.allocator.lane_mut().capture_begin();
        }
        let result = self.allocator.allocate_in(pool, size, stream);
        if gives_nothing_back {
            self.allocator.lane_mut().capture_end()?;
        }
        result
    }

    /// Keeps the result of a request that PyTorch served.
    fn keep(
        &mut self,
        slot: Slot,
        result: Result<DeviceAddress, AllocError>,
        end: usize,
    ) -> Result<Progressed, AllocError> {
        match result {
            Ok(address) => {
                self.addresses[slot.index()] = address;
                self.note_block_size(address);
                Ok(Progressed::On)
            }
            Err(error) => self.refuse(end, error, Progressed::Ended),
        }
    }

    /// Returns the recorded driver's calls, if the driver does what was recorded.
    fn script(&mut self) -> Option<&mut Script> {
        let script = self.allocator.driver().addresses_mut();
        script.is_exact.then_some(script)
    }

    fn first_difference(&mut self) -> Option<Difference> {
        self.comparison.take()?.finish().first_difference
    }

    fn differs(&self) -> bool {
        let comparison = self.comparison.as_ref();
        comparison.is_some_and(Comparison::has_difference)
    }

    fn note_block_size(&mut self, address: DeviceAddress) {
        if let Some(sizes) = &mut self.block_sizes {
            let block = self.allocator.lane().allocation(address);
            // A block without an address has no bytes.
            sizes.push(block.map_or(Bytes::ZERO, |block| block.size));
        }
    }

    /// Handles a request that PyTorch refused. If this allocator serves it, the block is freed at once, because the
    /// recorded program continued without it.
    fn go_on_without(
        &mut self,
        end: usize,
        result: Result<DeviceAddress, AllocError>,
    ) -> Result<Progressed, AllocError> {
        match result {
            Ok(address) => self.allocator.free(address).map(|()| Progressed::On),
            // The recording shows how the program continued.
            Err(AllocError::TooLarge { .. }) => Ok(Progressed::On),
            Err(error) => self.refuse(end, error, Progressed::On),
        }
    }

    fn refuse(
        &mut self,
        end: usize,
        error: AllocError,
        progressed: Progressed,
    ) -> Result<Progressed, AllocError> {
        let AllocError::OutOfMemory(mut refusal) = error else {
            return Err(error);
        };
        let refused = end.saturating_sub(1);
        let recorded = self.trace.events.get(refused).map(|event| event.event);
        if let Some(recorded) = recorded
            && self.comparison.is_some()
            && recorded.action == Action::OutOfMemory
        {
            // The simulated card has no end here. The recording has the free bytes of the real card, which with the
            // reserved bytes are the least that the card can have had.
            refusal.device_free = Bytes(recorded.address.get());
            refusal.device_total = refusal.reserved.saturating_add(refusal.device_free);
        }
        self.refused
            .get_or_insert((refused, AllocError::OutOfMemory(refusal)));
        Ok(progressed)
    }

    fn free_while_used(&mut self, slot: Slot, user: User) -> Result<(), AllocError> {
        let address = self.addresses[slot.index()];
        self.allocator
            .lane_mut()
            .record_stream(address, stream_of(user.index()))?;
        let event = self.allocator.driver().next_event();
        self.allocator.free(address)?;
        let recorded = self.allocator.driver().next_event() != event;
        self.waits[user.index()].push_back(recorded.then_some(event));
        Ok(())
    }

    fn finish_use(&mut self, user: User) -> Result<(), AllocError> {
        if let Some(event) = self.waits[user.index()].pop_front().flatten() {
            // The event has already completed if the allocator waited for it.
            self.allocator.driver().complete_event(event);
        }
        self.allocator.lane_mut().process_events()
    }

    fn outcome(mut self, config: &Config, elapsed_ns: f64, taken: usize) -> Outcome {
        let stats = self.allocator.stats();
        let driver = self.allocator.driver();
        let done = |call: Call| driver.stats(call).count - driver.stats(call).failures;
        let peak_reserved = stats.reserved_bytes.all.peak.unsigned_abs();
        #[expect(clippy::cast_precision_loss, reason = "figures for people")]
        let float = |number: u64| number as f64;
        Outcome {
            strategy: config.name(),
            config: config.to_conf(),
            completed: self.refused.is_none(),
            oom_at_event: self.refused.as_ref().map(|&(event, _)| event),
            oom_message: self.refused.as_ref().map(|(_, error)| error.to_string()),
            peak_reserved_bytes: Bytes(peak_reserved),
            peak_allocated_bytes: Bytes(stats.allocated_bytes.all.peak.unsigned_abs()),
            reserved_ratio: float(peak_reserved) / float(self.peak_live_bytes.get().max(1)),
            device_allocs: done(Call::Allocate),
            device_frees: done(Call::Free),
            maps: done(Call::SetAccess),
            unmaps: done(Call::Unmap),
            remapped_bytes: driver.stats(Call::Unmap).bytes,
            retries: stats.num_alloc_retries.unsigned_abs(),
            driver_time_us: float(driver.driver_time_ns() - self.before_events_ns) / 1e3,
            ns_per_op: elapsed_ns / float(taken.max(1) as u64),
            stats,
            verified: self.comparison.map(Comparison::finish),
            timeline: self
                .timeline
                .map_or_else(Vec::new, |timeline| timeline.points),
        }
    }
}

/// Returns the page size of expandable segments for large requests; `None` for a job with private pools.
fn large_page_size(job: &Job<'_>) -> Option<Bytes> {
    let mut steps = job.program.steps.iter();
    let has_pools = steps.any(|step| matches!(step, Step::HoldPool { .. }));
    (!has_pools).then(|| config_of(job.trace).large_segment_size)
}

/// Returns the memory of the recording's card, for a job with the limit `limit`. PyTorch reserves address ranges by
/// the card's memory. Returns `None` if no request was refused, because then nothing shows it.
fn recorded_capacity(limit: Option<Bytes>, program: &Program) -> Option<Bytes> {
    let known = limit.and(program.card.size_min);
    known.max(limit.filter(|_| known.is_some()))
}

/// Ignores the errors of a pool that has ended or that nothing holds: it has nothing more to release.
fn unless_ended(result: Result<(), AllocError>) -> Result<(), AllocError> {
    match result {
        Err(AllocError::NoSuchPool { .. } | AllocError::PoolNotHeld { .. }) => Ok(()),
        result => result,
    }
}

/// Returns the stream that stands for a user. Handles of real streams are small numbers or addresses.
fn stream_of(index: usize) -> Stream {
    Stream(u64::MAX - index as u64)
}

/// Bytes over time, in a limited number of parts.
struct Timeline<'a> {
    trace: &'a Trace,
    /// The number of recorded events in one part.
    part_events: usize,
    points: Vec<Point>,
    /// The bytes that each slot's block counts for.
    sizes: Vec<Bytes>,
    live: Bytes,
}

impl<'a> Timeline<'a> {
    fn new(trace: &'a Trace, program: &'a Program, points: usize) -> Option<Timeline<'a>> {
        let part_events = trace.events.len().max(1).div_ceil(points.max(1));
        (points > 0).then(|| Timeline {
            trace,
            part_events,
            points: Vec::new(),
            sizes: vec![Bytes::ZERO; program.slots],
            live: Bytes::ZERO,
        })
    }

    /// Keeps the maximum of each part, so that no peak falls between two points.
    fn add(&mut self, step: Step, end: usize, reserved: Bytes) {
        match step {
            Step::Allocate { slot, request, .. } => {
                self.sizes[slot.index()] = request.size.round_up(Bytes(512));
                self.live += self.sizes[slot.index()];
            }
            Step::Free { slot } | Step::FreeWhileUsed { slot, .. } => {
                self.live -= self.sizes[slot.index()];
            }
            _ => {}
        }
        let part = end.saturating_sub(1) / self.part_events;
        let events = &self.trace.events;
        let event = ((part + 1) * self.part_events).min(events.len()).max(1) - 1;
        if self.points.last().is_none_or(|last| last.event != event) {
            let time_us = events.get(event).map_or(0, |event| event.time_us);
            self.points.push(Point {
                event,
                time_us,
                live_bytes: self.live,
                reserved_bytes: reserved,
            });
        }
        if let Some(point) = self.points.last_mut() {
            point.live_bytes = point.live_bytes.max(self.live);
            point.reserved_bytes = point.reserved_bytes.max(reserved);
        }
    }
}
