//! A driver that does what a recording says the driver did.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

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

/// The same script for the driver and for the replay that moves it on.
#[derive(Clone, Debug)]
pub(crate) struct SharedScript(pub(crate) Rc<RefCell<Script>>);

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

impl AddressSource for SharedScript {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let mut script = self.0.borrow_mut();
        if script.refuses() {
            return Err(DriverError::OutOfMemory);
        }
        let recorded = script.next_in_step();
        let same = recorded
            .filter(|event| event.action == Action::SegmentAlloc && event.size == size);
        match same {
            Some(event) => {
                script.next += 1;
                Ok(event.address)
            }
            None => script.elsewhere.allocate(size),
        }
    }

    fn freed(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.0.borrow_mut().pass(Action::SegmentFree);
    }

    /// A range begins where the recording maps memory into it first.
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let mut script = self.0.borrow_mut();
        let recorded = script.events[script.next..].iter();
        let mapped = recorded.map(|&(_, event)| event).find(|event| event.action == Action::SegmentMap);
        match mapped {
            Some(event) => Ok(event.address),
            None => script.elsewhere.reserve(size),
        }
    }

    fn unreserved(&mut self, _address: DeviceAddress, _size: Bytes) {}

    fn create(&mut self, _size: Bytes) -> Result<(), DriverError> {
        if self.0.borrow().refuses() { Err(DriverError::OutOfMemory) } else { Ok(()) }
    }

    fn mapped(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.0.borrow_mut().pass(Action::SegmentMap);
    }

    fn unmapped(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.0.borrow_mut().pass(Action::SegmentUnmap);
    }
}
