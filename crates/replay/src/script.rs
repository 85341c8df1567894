//! Where a replay's segments lie: where the recorded driver put them, as far as that can be told.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
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
    /// Where the next segment goes, before the first step.
    place: Option<DeviceAddress>,
    taken: Taken,
    /// The starts of reserved ranges.
    reserved: BTreeSet<DeviceAddress>,
    elsewhere: FirstFit,
}

/// Where a replay's addresses come from.
#[derive(Debug)]
pub(crate) enum Addresses {
    /// The recording helps where it can.
    Likely(Likely),
    /// The recording says.
    Recorded(Script),
}

/// The addresses that the recorded driver would likely have given: a segment lies where the recording
/// has one of its size, in the recorded order, and elsewhere once those are taken.
///
/// Of several free blocks of one size the allocators take the one at the lowest address, so what a job
/// takes depends a little on where the driver puts segments. With this, PyTorch's allocator takes in a
/// replay what it took in the recording.
#[derive(Debug)]
pub(crate) struct Likely {
    /// The recorded segments of each size that are not taken, next first.
    vacant: HashMap<Bytes, VecDeque<DeviceAddress>>,
    taken: Taken,
    elsewhere: FirstFit,
}

/// The recorded places that segments lie at, from start to end.
#[derive(Debug, Default)]
struct Taken(BTreeMap<DeviceAddress, DeviceAddress>);

impl Taken {
    /// Takes a place, unless a part of it is taken; returns whether it did.
    fn take(&mut self, start: DeviceAddress, size: Bytes) -> bool {
        let end = start + size;
        let before = self.0.range(..end).next_back();
        let free = before.is_none_or(|(_, &taken_end)| taken_end <= start);
        if free {
            self.0.insert(start, end);
        }
        free
    }

    /// Gives a place back, and returns whether it was taken.
    fn give(&mut self, start: DeviceAddress) -> bool {
        self.0.remove(&start).is_some()
    }
}

impl Likely {
    pub(crate) fn new(events: &[TraceEvent]) -> Likely {
        let mut vacant: HashMap<Bytes, VecDeque<DeviceAddress>> = HashMap::new();
        for TraceEvent { event, .. } in events {
            if event.action == Action::SegmentAlloc {
                vacant
                    .entry(event.size)
                    .or_default()
                    .push_back(event.address);
            }
        }
        Likely {
            vacant,
            taken: Taken::default(),
            elsewhere: FirstFit::new(),
        }
    }
}

impl Script {
    pub(crate) fn new(events: &[TraceEvent]) -> Script {
        let indexed = events.iter().map(|recorded| recorded.event).enumerate();
        let concerns_driver =
            |event: &Event| event.action.is_segment() || event.action == Action::OutOfMemory;
        Script {
            events: indexed
                .filter(|(_, event)| concerns_driver(event))
                .collect(),
            next: 0,
            step: 0..0,
            place: None,
            taken: Taken::default(),
            reserved: BTreeSet::new(),
            elsewhere: FirstFit::new(),
        }
    }

    /// Puts the next segment, or the next range of addresses, at `address`.
    pub(crate) fn place_next(&mut self, address: DeviceAddress) {
        self.place = Some(address);
    }

    /// Goes on to a step with the recorded events up to `end`. Steps with the same end share them.
    pub(crate) fn begin_step(&mut self, end: usize) {
        if end > self.step.end {
            self.step = self.step.end..end;
        }
        while self
            .events
            .get(self.next)
            .is_some_and(|&(index, _)| index < self.step.start)
        {
            self.next += 1;
        }
    }

    /// Returns what the recording says comes next in this step.
    fn next_in_step(&self) -> Option<Event> {
        let &(index, event) = self.events.get(self.next)?;
        self.step.contains(&index).then_some(event)
    }

    fn pass(&mut self, action: Action) {
        if self
            .next_in_step()
            .is_some_and(|event| event.action == action)
        {
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
        let placed = self.place.take();
        if placed.is_none() && self.refuses() {
            return Err(DriverError::OutOfMemory);
        }
        let same = |event: &Event| event.action == Action::SegmentAlloc && event.size == size;
        let recorded = placed.or_else(|| Some(self.next_in_step().filter(same)?.address));
        match recorded.filter(|&address| self.taken.take(address, size)) {
            Some(address) => {
                self.pass(Action::SegmentAlloc);
                Ok(address)
            }
            None => self.elsewhere.allocate(size),
        }
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        self.pass(Action::SegmentFree);
        if !self.taken.give(address) {
            self.elsewhere.freed(address, size);
        }
    }

    /// A range begins where the recording maps memory into it first.
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let recorded = self.events[self.next..].iter().map(|&(_, event)| event);
        let mapped = { recorded }.find(|event| event.action == Action::SegmentMap);
        let start = self.place.take().or_else(|| Some(mapped?.address));
        match start.filter(|&address| self.reserved.insert(address)) {
            Some(address) => Ok(address),
            None => self.elsewhere.reserve(size),
        }
    }

    fn unreserved(&mut self, address: DeviceAddress, size: Bytes) {
        if !self.reserved.remove(&address) {
            self.elsewhere.unreserved(address, size);
        }
    }

    fn create(&mut self, _size: Bytes) -> Result<(), DriverError> {
        if self.refuses() {
            Err(DriverError::OutOfMemory)
        } else {
            Ok(())
        }
    }

    fn mapped(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.pass(Action::SegmentMap);
    }

    fn unmapped(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.pass(Action::SegmentUnmap);
    }
}

impl AddressSource for Likely {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let next = self.vacant.get_mut(&size).and_then(VecDeque::pop_front);
        match next.filter(|&address| self.taken.take(address, size)) {
            Some(address) => Ok(address),
            None => self.elsewhere.allocate(size),
        }
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        if self.taken.give(address) {
            self.vacant.entry(size).or_default().push_front(address);
        } else {
            self.elsewhere.freed(address, size);
        }
    }

    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.elsewhere.reserve(size)
    }

    fn unreserved(&mut self, address: DeviceAddress, size: Bytes) {
        self.elsewhere.unreserved(address, size);
    }
}

/// Calls a method of whichever source there is.
macro_rules! forward {
    ($addresses:expr, $source:ident => $call:expr) => {
        match $addresses {
            Addresses::Likely($source) => $call,
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
