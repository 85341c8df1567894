//! A driver that does what a recording says the driver did.

use std::ops::Range;

use lowtide_core::{Action, Bytes, DeviceAddress, DriverError, Event};
use lowtide_sim::{AddressSource, FirstFit};
use lowtide_trace::TraceEvent;

/// What PyTorch's driver did, step by step: the source of a simulated device's addresses, and of its
/// refusals.
///
/// During a step the driver gives the addresses that were recorded for it. Where the recording shows
/// memory going back next, it refuses: that is why memory went back. What the recording does not have
/// gets an address of its own, and the comparison of events shows the difference.
#[derive(Debug)]
pub(crate) struct Script {
    /// Recorded events between the allocator and the driver, and requests that failed.
    events: Vec<(usize, Event)>,
    /// The first of them that has not happened.
    next: usize,
    /// The recorded events of the step being taken.
    step: Range<usize>,
    elsewhere: FirstFit,
}

/// Where a replay's addresses come from.
#[derive(Debug)]
pub(crate) enum Addresses {
    /// The simulator chooses.
    Simulated(FirstFit),
    /// The recording says.
    Recorded(Script),
}

impl Default for Addresses {
    fn default() -> Addresses {
        Addresses::Simulated(FirstFit::new())
    }
}

impl Script {
    pub(crate) fn new(events: &[TraceEvent]) -> Script {
        let indexed = events.iter().map(|recorded| recorded.event).enumerate();
        let concerns_driver =
            |event: &Event| event.action.is_segment() || event.action == Action::OutOfMemory;
        Script {
            events: indexed.filter(|(_, event)| concerns_driver(event)).collect(),
            next: 0,
            step: 0..0,
            elsewhere: FirstFit::new(),
        }
    }

    /// Goes on to the step that the recorded events up to `end` belong to.
    pub(crate) fn begin_step(&mut self, end: usize) {
        self.step = self.step.end..end.max(self.step.end);
        while self.events.get(self.next).is_some_and(|&(index, _)| index < self.step.start) {
            self.next += 1;
        }
    }

    /// Returns what the recording says comes next in this step.
    fn next_in_step(&self) -> Option<Event> {
        let &(index, event) = self.events.get(self.next)?;
        self.step.contains(&index).then_some(event)
    }

    fn pass(&mut self, action: Action) {
        if self.next_in_step().is_some_and(|event| event.action == action) {
            self.next += 1;
        }
    }

    fn refuses(&self) -> bool {
        self.next_in_step().is_some_and(|event| {
            matches!(
                event.action,
                Action::SegmentFree | Action::SegmentUnmap | Action::OutOfMemory
            )
        })
    }
}

impl AddressSource for Script {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        if self.refuses() {
            return Err(DriverError::OutOfMemory);
        }
        let recorded = self.next_in_step();
        let same = |event: &Event| event.action == Action::SegmentAlloc && event.size == size;
        match recorded.filter(same) {
            Some(event) => {
                self.next += 1;
                Ok(event.address)
            }
            None => self.elsewhere.allocate(size),
        }
    }

    fn freed(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.pass(Action::SegmentFree);
    }

    /// A range begins where the recording maps memory into it first.
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let recorded = self.events[self.next..].iter().map(|&(_, event)| event);
        match { recorded }.find(|event| event.action == Action::SegmentMap) {
            Some(event) => Ok(event.address),
            None => self.elsewhere.reserve(size),
        }
    }

    fn unreserved(&mut self, _address: DeviceAddress, _size: Bytes) {}

    fn create(&mut self, _size: Bytes) -> Result<(), DriverError> {
        if self.refuses() { Err(DriverError::OutOfMemory) } else { Ok(()) }
    }

    fn mapped(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.pass(Action::SegmentMap);
    }

    fn unmapped(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.pass(Action::SegmentUnmap);
    }
}

/// Calls a method of whichever source there is.
macro_rules! forward {
    ($addresses:expr, $source:ident => $call:expr) => {
        match $addresses {
            Addresses::Simulated($source) => $call,
            Addresses::Recorded($source) => $call,
        }
    };
}

impl AddressSource for Addresses {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        forward!(self, source => source.allocate(size))
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        forward!(self, source => source.freed(address, size));
    }

    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        forward!(self, source => source.reserve(size))
    }

    fn unreserved(&mut self, address: DeviceAddress, size: Bytes) {
        forward!(self, source => source.unreserved(address, size));
    }

    fn create(&mut self, size: Bytes) -> Result<(), DriverError> {
        forward!(self, source => source.create(size))
    }

    fn mapped(&mut self, address: DeviceAddress, size: Bytes) {
        forward!(self, source => source.mapped(address, size));
    }

    fn unmapped(&mut self, address: DeviceAddress, size: Bytes) {
        forward!(self, source => source.unmapped(address, size));
    }
}
