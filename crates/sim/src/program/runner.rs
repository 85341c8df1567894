//! Executes programs and compares the allocator with the model.

use lowtide_core::{
    Action, AllocError, Allocation, Bytes, CachingConfig, Config, DeviceAddress, DeviceAllocator,
    DriverError, Event, Lane, Memory, MempoolId, OutOfMemory, PoolSetting, RouteOrder, StatsReset,
    StrategyName, Stream,
};

use super::Op;
use super::checkpoints::Checkpoints;
use super::ensure::{ensure, ensure_equal, ensure_unchanged};
use super::ledger::Ledger;
use super::shadow::Shadow;
use crate::{Call, FaultPlan, SimConfig, SimDriver, Step};

/// An allocator on a simulated device, and the model that it is checked against.
///
/// A failed check returns a sentence that says what is wrong. Only the allocator's own assertions panic.
#[derive(Debug)]
pub struct Runner {
    pub(super) allocator: DeviceAllocator<SimDriver>,
    capacity: Bytes,
    /// The alignment of block addresses, in bytes.
    alignment: u64,
    /// How much may be reserved above the limit. With expandable segments, PyTorch compares the limit with the
    /// segment that the request would get without them.
    pub(super) limit_slack: Bytes,
    pub(super) shadow: Shadow,
    pub(super) ledger: Ledger,
    pub(super) checkpoints: Checkpoints,
    config: Config,
    /// The fault that may happen. A call may fail with this error only.
    pub(super) fault: Option<DriverError>,
    /// Whether a fault was ever injected. The allocator may then keep memory that the driver refused to release.
    pub(super) had_fault: bool,
    /// Whether the program reset the accumulated statistics, which then no longer add up to the current values.
    pub(super) had_reset: bool,
    /// The number of requests that ran out of memory.
    pub(super) ooms: u64,
    /// The allocator's time at the last [`Op::ReleaseUnused`].
    released_at: u64,
    /// Kept between calls for its capacity.
    pub(super) events: Vec<Event>,
    /// The driver's steps since the last operation began.
    steps: Vec<Step>,
}

/// The effect of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// The operation was done.
    Done,
    /// Nothing happened: no block is allocated, there is no checkpoint, or a capture forbids the wait.
    Nothing,
    /// The allocator refused the operation, as it should.
    Refused,
}

impl Runner {
    /// Executes a program on a new device with `capacity` bytes and checks everything after each operation. Then
    /// frees and releases everything, and checks that nothing is left.
    ///
    /// # Errors
    ///
    /// A sentence that names the operation and says what is wrong.
    pub fn run(config: &Config, capacity: Bytes, program: &[Op]) -> Result<(), String> {
        let mut runner = Runner::new(config, capacity);
        for (index, op) in program.iter().enumerate() {
            let outcome = runner.apply(op).and_then(|_| runner.check());
            outcome.map_err(|error| format!("{config}: operation {index}, {op:?}: {error}"))?;
        }
        runner
            .finish()
            .map_err(|error| format!("{config}: at the end: {error}"))
    }

    /// Returns an allocator that has allocated nothing, on a device with `capacity` bytes.
    pub fn new(config: &Config, capacity: Bytes) -> Runner {
        let mut driver = SimDriver::new(SimConfig {
            capacity: Some(capacity),
            ..SimConfig::default()
        });
        // Of the other two streams of a program, one exists for ever.
        driver.keep_stream(Stream(1));
        let mut allocator = DeviceAllocator::new(driver, 0, config);
        allocator.lane_mut().event_log().record(true);
        allocator.driver().keep_steps();
        Runner {
            allocator,
            capacity,
            alignment: if config.name() == StrategyName::Bfc {
                256
            } else {
                512
            },
            limit_slack: match config {
                Config::Caching(caching) if caching.expandable_segments => {
                    caching.large_segment_size
                }
                _ => Bytes::ZERO,
            },
            shadow: Shadow::new(config),
            ledger: Ledger::default(),
            checkpoints: Checkpoints::default(),
            config: config.clone(),
            fault: None,
            had_fault: false,
            had_reset: false,
            ooms: 0,
            released_at: 0,
            events: Vec::new(),
            steps: Vec::new(),
        }
    }

    /// Executes one operation and makes the checks that take about constant time: the result, the new block's range
    /// and the allocated blocks next to it, the events, the statistics.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong.
    pub fn apply(&mut self, op: &Op) -> Result<Effect, String> {
        self.steps.clear();
        let asked = self.event_questions();
        let reserved = self.allocator.stats().reserved();
        let effect = self.perform(op)?;
        self.read_events()?;
        let now_ns = self.now_ns();
        self.shadow.forget_idle(now_ns);
        if self.shadow.captures > 0 {
            ensure_equal(
                "questions about events in a capture",
                self.event_questions(),
                asked,
            )?;
        }
        self.check_figures()?;
        self.check_limit(reserved)?;
        self.check_device()?;
        Ok(effect)
    }

    /// Returns how many driver calls that can fail were made so far.
    pub fn driver_calls(&mut self) -> u64 {
        let calls = Call::ALL
            .into_iter()
            .filter(|&call| call != Call::ReleaseEvent);
        calls.map(|call| self.calls(call)).sum()
    }

    /// Returns how often a driver call was made so far.
    pub fn calls(&mut self, call: Call) -> u64 {
        self.allocator.driver().stats(call).count
    }

    /// Returns how many events the allocator has recorded so far.
    pub fn events(&self) -> u64 {
        self.ledger.events
    }

    /// Returns the driver calls of the last operation that changed what addresses show, or the order of streams.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the allocator.
    pub fn allocator(&self) -> &DeviceAllocator<SimDriver> {
        &self.allocator
    }

    fn perform(&mut self, op: &Op) -> Result<Effect, String> {
        match *op {
            Op::Alloc { size, stream, pool } => self.allocate(size, stream, pool),
            Op::AllocBehind {
                index,
                gap,
                size,
                stream,
            } => self.allocate_behind(index, gap, (size, stream)),
            Op::Free { index } => self.free(index),
            Op::FreeStray { index } => self.free_stray(index),
            Op::RecordStream { index, stream } => self.record_stream(index, stream),
            Op::ProcessEvents => {
                let result = self.allocator.lane_mut().process_events();
                self.unless_fault(result)
            }
            Op::EmptyCache => {
                let result = self.allocator.empty_cache(None);
                self.unless_fault(result)
            }
            Op::ReleaseUnused { is_old, most } => self.release_unused(is_old, most),
            Op::ReleaseIdle { size } => self.release_idle(size),
            Op::BeginPool { .. }
            | Op::EndPool { .. }
            | Op::RetainPool { .. }
            | Op::ReleasePool { .. }
            | Op::UseOnOom { .. }
            | Op::NoSplit { .. } => self.manage_pool(op),
            Op::Checkpoint { pool } => self.checkpoint(pool),
            Op::Restore { pool } => self.restore(pool),
            Op::Reconfigure {
                expandable_segments,
                max_split_size,
            } => self.reconfigure(expandable_segments, max_split_size),
            Op::CaptureEnd => self.end_capture(),
            Op::Snapshot => self.check().map(|()| Effect::Done),
            _ => Ok(self.turn(op)),
        }
    }

    /// Performs an operation that cannot fail and returns nothing.
    fn turn(&mut self, op: &Op) -> Effect {
        match *op {
            Op::Launch { stream, ns } => {
                let now_ns = self.now_ns();
                self.shadow.launch(stream, now_ns, ns);
                self.allocator.driver().launch(stream, ns);
            }
            Op::Advance { ns } => self.allocator.driver().advance(ns),
            Op::Wait { stream, other } if self.shadow.captured.may_wait(stream, other) => {
                self.shadow.wait(stream, other);
                self.allocator.driver().wait(stream, other);
            }
            Op::Wait { .. } => return Effect::Nothing,
            Op::CaptureBegin { stream } => {
                self.allocator.lane_mut().capture_begin();
                self.allocator.driver().begin_capture(stream);
                self.shadow.begin_capture(stream);
            }
            Op::SetLimit { limit } => self.allocator.set_limit(limit),
            Op::Fault { nth, out_of_memory } => self.set_fault(nth, out_of_memory),
            Op::ResetPeaks => self.allocator.reset_stats(StatsReset::Peaks),
            Op::ResetSums => {
                self.allocator.reset_stats(StatsReset::Accumulated);
                self.had_reset = true;
            }
            _ => unreachable!("the other operations have answers"),
        }
        Effect::Done
    }

    /// Ends the capture that began first.
    fn end_capture(&mut self) -> Result<Effect, String> {
        if let Some(stream) = self.shadow.captured.end_first() {
            self.allocator.driver().end_capture(stream);
        }
        self.shadow.captures = self.shadow.captures.saturating_sub(1);
        let result = self.allocator.lane_mut().capture_end();
        self.unless_fault(result)
    }

    fn allocate(
        &mut self,
        size: Bytes,
        stream: Stream,
        named: Option<MempoolId>,
    ) -> Result<Effect, String> {
        let before = self.allocator.stats();
        let result = match named {
            Some(pool) => self.allocator.allocate_in(pool, size, stream),
            None => self.allocator.allocate(size, stream),
        };
        // Events of memory that was freed, mapped or unmapped for this request come before the new block.
        self.read_events()?;
        if let Some(pool) = named {
            self.check_named(pool, &result)?;
        }
        match result {
            Ok(DeviceAddress::NULL) if size.is_zero() => {
                ensure_unchanged(&before, &self.allocator.stats())?;
                Ok(Effect::Done)
            }
            Ok(address) => {
                let pool = named.unwrap_or_else(|| self.shadow.pools.route(stream));
                self.check_block(address, size, stream, pool)?;
                Ok(Effect::Done)
            }
            Err(AllocError::TooLarge { requested })
                if requested == size && size > Bytes::REQUEST_MAX =>
            {
                ensure_unchanged(&before, &self.allocator.stats())?;
                Ok(Effect::Refused)
            }
            Err(AllocError::OutOfMemory(error))
                if !size.is_zero() && size <= Bytes::REQUEST_MAX =>
            {
                // A rejected request has not run out of memory and records no event.
                self.ooms += u64::from(!error.is_rejected);
                self.check_out_of_memory(&error, size)?;
                Ok(Effect::Refused)
            }
            Err(error) => self.unless_fault(Err(error)),
        }
    }

    /// Requests memory at an address behind a block.
    fn allocate_behind(
        &mut self,
        index: u16,
        gap: u8,
        (size, stream): (Bytes, Stream),
    ) -> Result<Effect, String> {
        let Some(held) = self.shadow.address(index) else {
            return Ok(Effect::Nothing);
        };
        let held = self.allocator.lane().allocation(held);
        let held = held.map_err(|error| error.to_string())?;
        let address = held.address + held.size + Bytes(512 * u64::from(gap));
        let reserved = self.allocator.stats().reserved();
        let result = self
            .allocator
            .lane_mut()
            .allocate_where(address, size, stream);
        self.read_events_before(address)?;
        let now = self.allocator.stats().reserved();
        ensure(now <= reserved, || format!("it reserved {now:?}"))?;
        match result {
            Ok(DeviceAddress::NULL) if size.is_zero() => Ok(Effect::Done),
            Ok(at) => {
                ensure_equal("the address", at.get(), address.get())?;
                self.check_block(at, size, stream, self.shadow.pools.route(stream))?;
                Ok(Effect::Done)
            }
            Err(AllocError::NotFree { .. } | AllocError::TooLarge { .. }) => Ok(Effect::Refused),
            Err(error) => self.unless_fault(Err(error)),
        }
    }

    /// Releases memory that no work uses, and checks that it was not more than was asked for.
    fn release_unused(&mut self, is_old: bool, most: Bytes) -> Result<Effect, String> {
        let since = if is_old { self.released_at } else { u64::MAX };
        let before = self.allocator.stats().reserved();
        let result = self.allocator.lane_mut().release_unused(since, most);
        self.read_events()?;
        let released = before.saturating_sub(self.allocator.stats().reserved());
        ensure(released <= most, || {
            format!("{released:?} were released of {most:?}")
        })?;
        if let Ok(now) = result {
            self.released_at = now;
        }
        self.unless_fault(result.map(drop))
    }

    /// Releases idle memory, and checks that it was not more than was missing, and as much as was promised.
    fn release_idle(&mut self, size: Bytes) -> Result<Effect, String> {
        let limit = self.allocator.limit().unwrap_or(Bytes(u64::MAX));
        let before = self.allocator.stats().reserved();
        let free = self.capacity - self.allocator.driver().physical_bytes();
        let missing = (before + size).saturating_sub(limit);
        let missing = missing.max(size.saturating_sub(free));
        let result = self.allocator.lane_mut().release_idle(size);
        self.read_events()?;
        let released = before.saturating_sub(self.allocator.stats().reserved());
        ensure(released <= missing.round_up(Bytes::mib(2)), || {
            format!("{released:?} were released, {missing:?} were missing")
        })?;
        // A handle that the driver refuses to take back stays counted as reserved.
        let is_enough = self.had_fault || (!missing.is_zero() && released >= missing);
        ensure(!matches!(result, Ok(true)) || is_enough, || {
            format!("{missing:?} are still missing")
        })?;
        self.unless_fault(result.map(drop))
    }

    /// Checks a block that was just allocated, and adds it to the model.
    fn check_block(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
    ) -> Result<(), String> {
        let allocation = self
            .allocator
            .lane()
            .allocation(address)
            .map_err(|error| error.to_string())?;
        let is_from = |pool| (allocation.stream, allocation.pool) == (stream, pool);
        let is_from_open =
            pool.is_default() && self.shadow.pools.open.iter().any(|&open| is_from(open));
        ensure(is_from(pool) || is_from_open, || {
            format!("{allocation:?} was handed out for {stream:?} and {pool:?}")
        })?;
        ensure(
            allocation.requested == size && allocation.size >= size,
            || format!("{allocation:?} was handed out for {size:?}"),
        )?;
        ensure(address.get().is_multiple_of(self.alignment), || {
            format!("{address} is not aligned")
        })?;
        let now_ns = self.now_ns();
        self.shadow.hand_out(allocation, now_ns)?;
        let access = self.allocator.driver().access(address, allocation.size);
        access.map_err(|error| error.to_string())
    }

    fn check_out_of_memory(&self, error: &OutOfMemory, size: Bytes) -> Result<(), String> {
        let stats = self.allocator.stats();
        let reported = (
            error.requested,
            error.allocated,
            error.reserved,
            error.limit,
        );
        let known = (
            size,
            self.shadow.held_bytes,
            stats.reserved(),
            self.allocator.limit(),
        );
        ensure(reported == known, || {
            format!("the error says {reported:?} and not {known:?}")
        })?;
        ensure(
            error.segment_size >= size && error.largest_free <= error.reserved,
            || format!("the error contradicts itself: {error:?}"),
        )
    }

    fn free(&mut self, index: u16) -> Result<Effect, String> {
        let Some(address) = self.shadow.address(index) else {
            return Ok(Effect::Nothing);
        };
        let result = self.allocator.free(address);
        if result.is_err() {
            return self.unless_fault(result);
        }
        self.shadow.free(address);
        self.read_events()?;
        let again = self.allocator.free(address);
        ensure(again == Err(AllocError::NotAllocated { address }), || {
            format!("{address} was freed twice: {again:?}")
        })?;
        Ok(Effect::Done)
    }

    fn free_stray(&mut self, index: u16) -> Result<Effect, String> {
        let held = self.shadow.address(index).unwrap_or(DeviceAddress(1 << 41));
        let address = held + Bytes(1);
        let before = self.allocator.stats();
        let refused = Err(AllocError::NotAllocated { address });
        let answers = [
            self.allocator.free(address),
            self.allocator.lane_mut().record_stream(address, Stream(1)),
            self.allocator.lane().allocation(address).map(drop),
        ];
        ensure(answers.iter().all(|answer| *answer == refused), || {
            format!("{address} is no block's: {answers:?}")
        })?;
        let nulls = [
            self.allocator.free(DeviceAddress::NULL),
            self.allocator
                .lane_mut()
                .record_stream(DeviceAddress::NULL, Stream(1)),
        ];
        ensure(nulls == [Ok(()), Ok(())], || {
            format!("null may be freed and used: {nulls:?}")
        })?;
        ensure_unchanged(&before, &self.allocator.stats())?;
        Ok(Effect::Refused)
    }

    fn record_stream(&mut self, index: u16, stream: Stream) -> Result<Effect, String> {
        let Some(address) = self.shadow.address(index) else {
            return Ok(Effect::Nothing);
        };
        self.allocator
            .lane_mut()
            .record_stream(address, stream)
            .map_err(|error| error.to_string())?;
        self.shadow.record_stream(address, stream);
        Ok(Effect::Done)
    }

    fn manage_pool(&mut self, op: &Op) -> Result<Effect, String> {
        let (pools, lane) = (&mut self.shadow.pools, self.allocator.lane_mut());
        let (pool, result, expected) = match *op {
            Op::BeginPool { pool, stream } => {
                let accepts = move |other| other == stream;
                let result = lane.begin_allocate_to_pool(pool, RouteOrder::BeforeOthers, accepts);
                let is_routed = pools.is_routed(pool);
                if !is_routed {
                    pools.routes.push((pool, stream));
                }
                let expected = (!is_routed)
                    .then_some(())
                    .ok_or(AllocError::PoolInUse { pool });
                (pool, result, expected)
            }
            Op::EndPool { pool } => {
                let position = pools.routes.iter().position(|&(routed, _)| routed == pool);
                let route = position.map(|position| pools.routes.remove(position));
                let unrouted = said_of(lane, pool, AllocError::PoolNotRouted { pool });
                let expected = route.map_or(unrouted, |_| Ok(()));
                (pool, lane.end_allocate_to_pool(pool), expected)
            }
            Op::RetainPool { pool } => {
                lane.create_or_retain_pool(pool);
                (pool, Ok(()), Ok(()))
            }
            Op::ReleasePool { pool } => {
                let held = pools.use_count(pool) > 0;
                let unheld = said_of(lane, pool, AllocError::PoolNotHeld { pool });
                let expected = if held { Ok(()) } else { unheld };
                (pool, lane.release_pool(pool), expected)
            }
            Op::UseOnOom { pool, allow } => {
                let result = lane.set_pool(pool, PoolSetting::UseOnOom(allow));
                if allow && result.is_ok() {
                    pools.open.push(pool);
                }
                (pool, result, lane.pool(pool).map(drop))
            }
            Op::NoSplit { pool } => {
                let result = lane.set_pool(pool, PoolSetting::NoSplit);
                (pool, result, lane.pool(pool).map(drop))
            }
            _ => unreachable!("the other operations are not about pools"),
        };
        ensure(result == expected, || {
            format!("{result:?} instead of {expected:?}")
        })?;
        if result.is_ok() {
            let count = pools.use_count(pool);
            match op {
                Op::BeginPool { .. } | Op::RetainPool { .. } => {
                    pools.use_counts.insert(pool, count + 1)
                }
                Op::ReleasePool { .. } => {
                    if count == 1 {
                        self.checkpoints.doubt(pool);
                        pools.end_hold(pool);
                    }
                    pools.use_counts.insert(pool, count - 1)
                }
                _ => None,
            };
        }
        self.check_pool(pool)?;
        Ok(if result.is_ok() {
            Effect::Done
        } else {
            Effect::Refused
        })
    }

    fn reconfigure(
        &mut self,
        expandable_segments: bool,
        max_split_size: Option<Bytes>,
    ) -> Result<Effect, String> {
        let before = self.allocator.stats();
        let Config::Caching(options) = &self.config else {
            let answer = self.allocator.lane_mut().reconfigure(&Config::default());
            ensure(answer == Err(AllocError::NotReconfigurable), || {
                format!("options of another strategy were taken over: {answer:?}")
            })?;
            ensure_unchanged(&before, &self.allocator.stats())?;
            return Ok(Effect::Refused);
        };
        let config = Config::Caching(CachingConfig {
            expandable_segments,
            max_split_size,
            ..options.clone()
        });
        let answer = self.allocator.lane_mut().reconfigure(&config);
        answer.map_err(|error| error.to_string())?;
        if expandable_segments {
            self.limit_slack = options.large_segment_size;
        }
        if max_split_size.is_some() {
            self.shadow.pools.lose_memory();
        }
        Ok(Effect::Done)
    }

    /// Checks the pool that a request named. The request creates the pool if it does not exist, and sets a use
    /// count of zero to one, unless it is refused before memory is searched.
    fn check_named(
        &mut self,
        pool: MempoolId,
        result: &Result<DeviceAddress, AllocError>,
    ) -> Result<(), String> {
        let was_looked_for = match result {
            Ok(address) => *address != DeviceAddress::NULL,
            Err(AllocError::OutOfMemory(_)) => true,
            // The failed call may have come before or after the pool was created.
            Err(AllocError::Driver(_)) => self.use_count(pool) == Ok(1),
            Err(_) => false,
        };
        if was_looked_for {
            let count = self.shadow.pools.use_count(pool).max(1);
            self.shadow.pools.use_counts.insert(pool, count);
        }
        self.check_pool(pool)
    }

    fn use_count(&self, pool: MempoolId) -> Result<u32, AllocError> {
        Ok(self.allocator.lane().pool(pool)?.use_count)
    }

    pub(super) fn check_pool(&self, pool: MempoolId) -> Result<(), String> {
        let answer = self.use_count(pool);
        let count = self.shadow.pools.use_count(pool);
        let has_ended = count == 0 && !self.shadow.pools.is_routed(pool) && answer.is_err();
        ensure(has_ended || answer == Ok(count), || {
            format!("{pool:?} is held {count} times, and the allocator says {answer:?}")
        })
    }

    fn set_fault(&mut self, nth: u64, out_of_memory: bool) {
        let error = if out_of_memory {
            DriverError::OutOfMemory
        } else {
            DriverError::Failed {
                call: "fault",
                code: 999,
                message: "injected".into(),
            }
        };
        let plan = FaultPlan::nth_of_any(nth, error.clone());
        self.allocator.driver().set_faults(plan);
        self.fault = Some(error);
        self.had_fault = true;
    }

    /// Accepts a driver error only if it was injected.
    pub(super) fn unless_fault(
        &mut self,
        result: Result<(), AllocError>,
    ) -> Result<Effect, String> {
        match result {
            Ok(()) => Ok(Effect::Done),
            Err(AllocError::Driver(error)) if self.fault.as_ref() == Some(&error) => {
                self.fault = None;
                Ok(Effect::Refused)
            }
            Err(error) => Err(format!("it failed: {error:?}")),
        }
    }

    pub(super) fn now_ns(&mut self) -> u64 {
        self.allocator.driver().now_ns()
    }

    fn event_questions(&mut self) -> u64 {
        let driver = self.allocator.driver();
        driver.stats(Call::QueryEvent).count + driver.stats(Call::SynchronizeEvent).count
    }

    /// Follows the calls of the driver since this was last done.
    pub(super) fn follow_steps(&mut self) -> Result<(), String> {
        let steps = self.allocator.driver().take_steps();
        self.steps.extend(&steps);
        steps.iter().try_for_each(|step| self.shadow.follow(step))
    }

    pub(super) fn read_events(&mut self) -> Result<(), String> {
        self.read_events_before(DeviceAddress::NULL)
    }

    /// Reads new events, of which those of blocks before an address are of memory that was taken for the moment.
    fn read_events_before(&mut self, address: DeviceAddress) -> Result<(), String> {
        self.follow_steps()?;
        self.events
            .extend(self.allocator.lane_mut().event_log().take());
        let now_ns = self.allocator.driver().now_ns();
        for event in self.events.drain(..) {
            self.ledger.apply(&event)?;
            if event.action == Action::Alloc && event.address < address {
                self.shadow.hand_out(taken_for_the_moment(&event), now_ns)?;
                self.shadow.free(event.address);
            }
            self.shadow.witness(&event, now_ns)?;
        }
        Ok(())
    }
}

/// Returns the block that an event says was allocated.
fn taken_for_the_moment(event: &Event) -> Allocation {
    Allocation {
        address: event.address,
        size: event.size,
        requested: event.size,
        stream: event.stream,
        pool: event.pool,
        is_expandable: false,
        is_watched: false,
    }
}

/// Returns the allocator's error for a pool in the wrong state, or for a pool that does not exist.
fn said_of(lane: &Lane<impl Memory>, pool: MempoolId, error: AllocError) -> Result<(), AllocError> {
    lane.pool(pool)?;
    Err(error)
}
