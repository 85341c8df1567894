//! The simulated driver. Each call applies injected faults first, then checks the rules, then updates the
//! statistics.

use std::collections::BTreeSet;
use std::time::Duration;

use lowtide_core::{
    Bytes, CapturePoint, DeviceAddress, Driver, DriverError, EventHandle, GraphNode, Handle,
    MemoryInfo, Stream,
};

use crate::addresses::{AddressSource, FirstFit};
use crate::call::{Call, CallStats};
use crate::clock::Clock;
use crate::cost::{SHARED_NS, cost_ns};
use crate::fault::FaultPlan;
use crate::graph::Captures;
use crate::memory::{Memory, PAGE, Refusal, broken_rule};
use crate::step::{Step, StepKind};

/// The properties of the simulated device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SimConfig {
    /// The device's memory. `None`, or more than 64 TiB, means 64 TiB, which stands for no limit.
    pub capacity: Option<Bytes>,
    /// The total memory that the device reports, if that is not its capacity. They differ when other programs use
    /// the device, or when requests fail at chosen moments.
    pub total: Option<Bytes>,
    /// Whether the device supports virtual memory management, as all but old devices do.
    pub virtual_memory: bool,
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            capacity: None,
            total: None,
            virtual_memory: true,
        }
    }
}

/// A driver without a device.
///
/// It implements the contract of [`Driver`] and checks that its caller keeps to it. A broken rule returns
/// [`DriverError::Failed`], never panics, and is listed in [`SimDriver::violations`]. The same calls always have
/// the same results.
///
/// Time is logical. The host's clock advances by the cost of each call, by the time a call waits, and by
/// [`SimDriver::advance`]. Each stream runs the work that [`SimDriver::launch`] queued.
#[derive(Debug)]
pub struct SimDriver<A = FirstFit> {
    device: Device<A>,
    faults: FaultPlan,
    stats: [CallStats; Call::ALL.len()],
    violations: Vec<String>,
    /// What was done since it was last taken, if it is kept.
    steps: Option<Vec<Step>>,
}

/// The state that calls change.
#[derive(Debug)]
struct Device<A> {
    addresses: A,
    memory: Memory,
    clock: Clock,
    captures: Captures,
    /// The streams that exist until the process ends, beside the default stream.
    kept: BTreeSet<Stream>,
    /// The total memory that it reports.
    total: Bytes,
    virtual_memory: bool,
}

impl SimDriver {
    /// Returns a device that uses the lowest free addresses.
    pub fn new(config: SimConfig) -> SimDriver {
        SimDriver::with_addresses(config, FirstFit::new())
    }
}

impl Default for SimDriver {
    fn default() -> SimDriver {
        SimDriver::new(SimConfig::default())
    }
}

impl<A: AddressSource> SimDriver<A> {
    /// Returns a device that uses the addresses chosen by `addresses`.
    pub fn with_addresses(config: SimConfig, addresses: A) -> SimDriver<A> {
        let capacity = config
            .capacity
            .map_or(NO_LIMIT, |capacity| capacity.min(NO_LIMIT));
        SimDriver {
            device: Device {
                addresses,
                memory: Memory::new(capacity),
                clock: Clock::default(),
                captures: Captures::default(),
                kept: BTreeSet::new(),
                total: config.total.map_or(capacity, |total| total.min(NO_LIMIT)),
                virtual_memory: config.virtual_memory,
            },
            faults: FaultPlan::none(),
            stats: [CallStats::default(); Call::ALL.len()],
            violations: Vec::new(),
            steps: None,
        }
    }

    /// Returns the source of the addresses.
    pub fn addresses_mut(&mut self) -> &mut A {
        &mut self.device.addresses
    }

    /// Replaces the plan of failures. It counts calls from here.
    pub fn set_faults(&mut self, faults: FaultPlan) {
        self.faults = faults;
    }

    /// Notes that a stream exists until the process ends.
    pub fn keep_stream(&mut self, stream: Stream) {
        self.device.kept.insert(stream);
    }

    /// Returns the host's clock, in nanoseconds since the start.
    pub fn now_ns(&self) -> u64 {
        self.device.clock.now_ns()
    }

    /// Advances the host's clock, as work on the host would.
    pub fn advance(&mut self, ns: u64) {
        self.device.clock.advance(ns);
    }

    /// Queues work of `ns` nanoseconds on a stream, as launching a kernel does. If the stream is being captured,
    /// the work becomes a node of the graph and does not run.
    pub fn launch(&mut self, stream: Stream, ns: u64) {
        if !self.device.captures.launch(stream) {
            self.device.clock.launch(stream, ns);
        }
    }

    /// Makes later work of `stream` wait for the current work of `other`. If `other` is being captured, `stream`
    /// joins the capture. Returns whether the device allows it: a captured stream cannot wait for work outside its
    /// capture.
    pub fn wait(&mut self, stream: Stream, other: Stream) -> bool {
        let Device {
            captures, clock, ..
        } = &mut self.device;
        let [own, others] = [stream, other].map(|stream| captures.point(stream).cloned());
        match (own, others) {
            (None, None) => clock.wait_for(stream, other),
            (Some(_), None) => return false,
            (Some(own), Some(others)) if own.capture != others.capture => return false,
            (_, Some(others)) => captures.wait(stream, &others),
        }
        true
    }

    /// Sets the dependencies of a captured stream's next work to `after`, replacing the current ones
    /// (`cudaStreamUpdateCaptureDependencies`).
    pub fn set_capture_order(&mut self, stream: Stream, after: &[GraphNode]) {
        self.device.captures.set_order(stream, after);
    }

    /// Begins the capture of a stream. Returns false if the stream is already being captured.
    pub fn begin_capture(&mut self, stream: Stream) -> bool {
        let is_new = self.device.captures.point(stream).is_none();
        if is_new {
            self.device.captures.begin(stream);
        }
        is_new
    }

    /// Ends the capture that a stream is part of, in all its streams. Returns whether there was one.
    pub fn end_capture(&mut self, stream: Stream) -> bool {
        self.capture_of(stream)
            .inspect(|&capture| self.device.captures.end(capture))
            .is_some()
    }

    /// Holds the events recorded in `stream` from now on: they pass only by [`SimDriver::complete_event`], or when
    /// the host waits for them. A replay uses this, because it knows when they passed.
    pub fn hold_stream(&mut self, stream: Stream) {
        self.device.clock.hold(stream);
    }

    /// Lets all events of `stream` pass by time again, including those already recorded.
    pub fn resume_stream(&mut self, stream: Stream) {
        self.device.clock.resume(stream);
    }

    /// Returns the handle that the next event will have. Handles count up.
    pub fn next_event(&self) -> EventHandle {
        self.device.clock.next_event()
    }

    /// Makes an event pass now. Returns whether the event exists.
    pub fn complete_event(&mut self, event: EventHandle) -> bool {
        self.device.clock.complete(event)
    }

    /// Checks the access of a kernel that reads and writes `size` bytes at `address`.
    ///
    /// # Errors
    ///
    /// [`DriverError::Failed`] if a byte has no memory or the device has no access to it. This counts as a
    /// violation.
    pub fn access(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        let answer = self.device.memory.check_access(address, size);
        answer.map_err(|refusal| self.refuse("kernel", refusal))
    }

    /// Returns the statistics of one kind of call.
    pub fn stats(&self, call: Call) -> CallStats {
        self.stats[call as usize]
    }

    /// Returns the host time of all calls, in nanoseconds, without the time they waited for the device's work.
    pub fn driver_time_ns(&self) -> u64 {
        self.stats.iter().map(|stats| stats.cost_ns).sum()
    }

    /// Returns the physical memory of allocations, in whole pages of 2 MiB.
    pub fn allocated_bytes(&self) -> Bytes {
        self.device.memory.allocated()
    }

    /// Returns the physical memory of handles, mapped or not.
    pub fn created_bytes(&self) -> Bytes {
        self.device.memory.created()
    }

    /// Returns the physical memory in use, by allocations and handles.
    pub fn physical_bytes(&self) -> Bytes {
        self.device.memory.physical()
    }

    /// Returns the peak of the physical memory in use.
    pub fn physical_bytes_max(&self) -> Bytes {
        self.device.memory.physical_max()
    }

    /// Returns one line for each broken rule, in order.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Keeps the calls that map memory and order streams, for [`SimDriver::take_steps`].
    pub fn keep_steps(&mut self) {
        self.steps = Some(Vec::new());
    }

    /// Returns the calls of [`SimDriver::keep_steps`] since this was last called.
    pub fn take_steps(&mut self) -> Vec<Step> {
        self.steps.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns one line for each resource that was not released: memory, mappings, handles, reserved ranges,
    /// events.
    pub fn leaks(&self) -> Vec<String> {
        let events = self.device.clock.events();
        let events =
            events.map(|(event, stream)| format!("{event:?} in {stream:?} is not released"));
        self.device.memory.leaks().chain(events).collect()
    }

    /// Keeps a call that was made at a time and succeeded.
    fn keep(&mut self, now_ns: u64, kind: StepKind) {
        if let Some(steps) = &mut self.steps {
            steps.push(Step { now_ns, kind });
        }
    }

    /// Makes a call: fails it if the plan says so, updates the statistics, advances the clock.
    ///
    /// `act` returns the result and the call's cost in nanoseconds.
    fn call<T>(
        &mut self,
        call: Call,
        size: Bytes,
        act: impl FnOnce(&mut Device<A>) -> Result<(T, u64), Refusal>,
    ) -> Result<T, DriverError> {
        let before_ns = self.now_ns();
        let outcome = match self.faults.next(call) {
            Some(fault) => Err(Refusal::Driver(fault)),
            None => act(&mut self.device),
        };
        let wait_ns = self.now_ns() - before_ns;
        let (answer, cost_ns) = match outcome {
            Ok((answer, cost_ns)) => (Ok(answer), cost_ns),
            // A failed call takes about as long as the smallest successful one.
            Err(refusal) => (
                Err(self.refuse(call.name(), refusal)),
                cost_ns(call, Bytes::ZERO),
            ),
        };
        self.device.clock.advance(cost_ns);

        let stats = &mut self.stats[call as usize];
        stats.count += 1;
        stats.cost_ns += cost_ns;
        stats.wait_ns += wait_ns;
        match answer {
            Ok(_) => stats.bytes = stats.bytes.saturating_add(size),
            Err(_) => stats.failures += 1,
        }
        answer
    }

    /// Returns the caller's error. A broken rule is added to the violations.
    fn refuse(&mut self, call: &'static str, refusal: Refusal) -> DriverError {
        match refusal {
            Refusal::Driver(error) => error,
            Refusal::Rule { code, message } => {
                self.violations.push(format!("{call}: {message}"));
                DriverError::Failed {
                    call,
                    code,
                    message,
                }
            }
        }
    }
}

/// The capacity of a device without a limit.
const NO_LIMIT: Bytes = Bytes::gib(64 << 10);

impl<A: AddressSource> Driver for SimDriver<A> {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.call(Call::Allocate, size, |device| {
            device.memory.check_size(size)?;
            let address = device.addresses.allocate(size)?;
            match device.memory.allocate(address, size) {
                Ok(taken) => Ok((address, cost_of_pages(Call::Allocate, taken))),
                Err(refusal) => {
                    device.addresses.freed(address, size);
                    Err(refusal)
                }
            }
        })
    }

    fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.call(Call::Free, size, |device| {
            let returned = device.memory.free(address, size)?;
            device.addresses.freed(address, size);
            device.clock.wait_for_device();
            Ok(((), cost_of_pages(Call::Free, returned)))
        })
    }

    fn supports_virtual_memory(&self) -> bool {
        self.device.virtual_memory
    }

    fn granularity(&self) -> Bytes {
        PAGE
    }

    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.call(Call::Reserve, size, |device| {
            device.check_virtual(Call::Reserve, size)?;
            let address = device.addresses.reserve(size)?;
            match device.memory.reserve(address, size) {
                Ok(()) => Ok((address, cost_ns(Call::Reserve, size))),
                Err(refusal) => {
                    device.addresses.unreserved(address, size);
                    Err(refusal)
                }
            }
        })
    }

    fn unreserve(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.call(Call::Unreserve, size, |device| {
            device.check_virtual(Call::Unreserve, size)?;
            device.memory.unreserve(address, size)?;
            device.addresses.unreserved(address, size);
            Ok(((), cost_ns(Call::Unreserve, size)))
        })
    }

    fn create(&mut self, size: Bytes) -> Result<Handle, DriverError> {
        self.call(Call::Create, size, |device| {
            device.check_virtual(Call::Create, size)?;
            device.addresses.create(size)?;
            let handle = device.memory.create(size)?;
            Ok((handle, cost_ns(Call::Create, size)))
        })
    }

    fn release(&mut self, handle: Handle) -> Result<(), DriverError> {
        self.call(Call::Release, Bytes::ZERO, |device| {
            Ok(((), device.memory.release(handle)?))
        })
    }

    fn map(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        handle: Handle,
    ) -> Result<(), DriverError> {
        let now_ns = self.now_ns();
        self.call(Call::Map, size, |device| {
            device.check_virtual(Call::Map, size)?;
            device.memory.map(address, size, handle)?;
            Ok(((), cost_ns(Call::Map, size)))
        })?;
        self.keep(
            now_ns,
            StepKind::Map {
                address,
                size,
                handle,
            },
        );
        Ok(())
    }

    fn set_access(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.call(Call::SetAccess, size, |device| {
            device.check_virtual(Call::SetAccess, size)?;
            let cost_ns = device.memory.set_access(address, size)?;
            device.addresses.mapped(address, size);
            Ok(((), cost_ns))
        })
    }

    fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        let now_ns = self.now_ns();
        self.call(Call::Unmap, size, |device| {
            device.check_virtual(Call::Unmap, size)?;
            let cost_ns = device.memory.unmap(address, size)?;
            device.addresses.unmapped(address, size);
            Ok(((), cost_ns))
        })?;
        self.keep(now_ns, StepKind::Unmap { address, size });
        Ok(())
    }

    fn record_event(&mut self, stream: Stream) -> Result<EventHandle, DriverError> {
        let now_ns = self.now_ns();
        let event = self.call(Call::RecordEvent, Bytes::ZERO, |device| {
            if device.captures.point(stream).is_some() {
                return broken_rule(format!(
                    "{stream:?} is being captured: the event never passes"
                ));
            }
            Ok((
                device.clock.record(stream),
                cost_ns(Call::RecordEvent, Bytes::ZERO),
            ))
        })?;
        self.keep(now_ns, StepKind::Record { event, stream });
        Ok(event)
    }

    fn query_event(&mut self, event: EventHandle) -> Result<bool, DriverError> {
        self.call(Call::QueryEvent, Bytes::ZERO, |device| {
            device.check_captures()?;
            match device.clock.passed(event) {
                Some(passed) => Ok((passed, cost_ns(Call::QueryEvent, Bytes::ZERO))),
                None => no_event(event),
            }
        })
    }

    fn synchronize_event(&mut self, event: EventHandle) -> Result<(), DriverError> {
        self.call(Call::SynchronizeEvent, Bytes::ZERO, |device| {
            device.check_captures()?;
            if !device.clock.wait_for_event(event) {
                return no_event(event);
            }
            Ok(((), cost_ns(Call::SynchronizeEvent, Bytes::ZERO)))
        })
    }

    fn wait_event(&mut self, stream: Stream, event: EventHandle) -> Result<(), DriverError> {
        let now_ns = self.now_ns();
        self.call(Call::WaitEvent, Bytes::ZERO, |device| {
            if !device.clock.wait_in_stream(stream, event) {
                return no_event(event);
            }
            Ok(((), cost_ns(Call::WaitEvent, Bytes::ZERO)))
        })?;
        self.keep(now_ns, StepKind::Wait { stream, event });
        Ok(())
    }

    fn release_event(&mut self, event: EventHandle) {
        let cost_ns = cost_ns(Call::ReleaseEvent, Bytes::ZERO);
        self.device.clock.advance(cost_ns);
        let known = self.device.clock.release(event);
        let stats = &mut self.stats[Call::ReleaseEvent as usize];
        stats.count += 1;
        stats.cost_ns += cost_ns;
        if !known {
            stats.failures += 1;
            self.violations
                .push(format!("{}: {event:?} does not exist", Call::ReleaseEvent));
        }
    }

    fn synchronize_stream(&mut self, stream: Stream) -> Result<(), DriverError> {
        self.call(Call::SynchronizeStream, Bytes::ZERO, |device| {
            device.clock.wait_for_stream(stream);
            Ok(((), cost_ns(Call::SynchronizeStream, Bytes::ZERO)))
        })
    }

    fn synchronize_device(&mut self) -> Result<(), DriverError> {
        self.call(Call::SynchronizeDevice, Bytes::ZERO, |device| {
            device.check_captures()?;
            device.clock.wait_for_device();
            Ok(((), cost_ns(Call::SynchronizeDevice, Bytes::ZERO)))
        })
    }

    fn capture_of(&mut self, stream: Stream) -> Option<u64> {
        let point = self.device.captures.point(stream);
        point.map(|point| point.capture)
    }

    fn capture_point(&mut self, stream: Stream) -> Option<CapturePoint> {
        self.device.captures.point(stream).cloned()
    }

    fn dependencies(&mut self, node: GraphNode) -> Vec<GraphNode> {
        let Some(after) = self.device.captures.dependencies(node) else {
            self.violations.push(format!("{node:?} is in no graph"));
            return Vec::new();
        };
        after.to_vec()
    }

    fn is_kept(&self, stream: Stream) -> bool {
        stream == Stream::DEFAULT || self.device.kept.contains(&stream)
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns())
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DriverError> {
        self.call(Call::MemoryInfo, Bytes::ZERO, |device| {
            let (total, memory) = (device.total, &device.memory);
            let free = (memory.capacity() - memory.physical()).min(total);
            Ok((
                MemoryInfo { free, total },
                cost_ns(Call::MemoryInfo, Bytes::ZERO),
            ))
        })
    }
}

impl<A> Device<A> {
    /// Checks that events may be queried and waited for.
    fn check_captures(&self) -> Result<(), Refusal> {
        if self.captures.are_none() {
            return Ok(());
        }
        broken_rule("a stream is being captured".into())
    }

    /// Checks the rules that all virtual-memory calls share.
    fn check_virtual(&self, call: Call, size: Bytes) -> Result<(), Refusal> {
        if !self.virtual_memory {
            return Err(DriverError::Unsupported { call: call.name() }.into());
        }
        if size.is_zero() || !(size % PAGE).is_zero() {
            return broken_rule(format!("{size:?} are not a multiple of {PAGE}"));
        }
        Ok(())
    }
}

/// Returns the cost of allocating or freeing `pages` bytes of physical memory.
fn cost_of_pages(call: Call, pages: Bytes) -> u64 {
    if pages.is_zero() {
        SHARED_NS
    } else {
        cost_ns(call, pages)
    }
}

fn no_event<T>(event: EventHandle) -> Result<T, Refusal> {
    broken_rule(format!("{event:?} does not exist"))
}
