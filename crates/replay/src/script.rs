//! Where a replay's segments lie: where the recorded driver put them, as far as that can be told.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;

use lowtide_core::{Action, Bytes, DeviceAddress, DriverError, Event, Stream};
use lowtide_sim::{AddressSource, FirstFit, footprint};
use lowtide_trace::TraceEvent;

use crate::extents::Extents;
use crate::pools::SMALL_REQUEST_MAX;

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
    large_page_size: Option<Bytes>,
    /// The first of them that has not happened.
    next: usize,
    /// The recorded events of the step being taken.
    step: Range<usize>,
    /// Whether the driver refused something in that step.
    refused_in_step: bool,
    /// Where the next segment goes, before the first step.
    place: Option<DeviceAddress>,
    places: Places,
    /// The starts of reserved ranges.
    reserved: BTreeSet<DeviceAddress>,
    /// Before which of the events no range begins that is not reserved, of a stream, for large requests or small ones.
    looked_ahead: HashMap<(Stream, bool), usize>,
    mapped: Extents,
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
    places: Places,
}

/// The places that segments lie at: recorded ones, and others where no recorded one is meant.
#[derive(Debug)]
struct Places {
    /// From start to end, and whether the recording has the place.
    taken: BTreeMap<DeviceAddress, (DeviceAddress, bool)>,
    elsewhere: FirstFit,
}

impl Places {
    fn new() -> Places {
        Places {
            taken: BTreeMap::new(),
            elsewhere: FirstFit::new(),
        }
    }

    /// Takes a recorded place, unless a part of it is taken; returns whether it did. The simulated driver hands out
    /// whole pages where the recorded one, or whatever gave memory in its place, may have packed what is large closer.
    fn take(&mut self, start: DeviceAddress, size: Bytes) -> bool {
        self.insert(start, size, true)
    }

    /// Takes a place of its own for what the recording does not have.
    fn take_elsewhere(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        loop {
            let start = self.elsewhere.allocate(size)?;
            // What was recorded on a simulator lies where this looks first; such places are passed by.
            if self.insert(start, size, false) {
                return Ok(start);
            }
        }
    }

    fn insert(&mut self, start: DeviceAddress, size: Bytes, is_recorded: bool) -> bool {
        let end = start + footprint(size);
        let before = self.taken.range(..end).next_back();
        let free = before.is_none_or(|(_, &(taken_end, _))| taken_end <= start);
        if free {
            self.taken.insert(start, (end, is_recorded));
        }
        free
    }

    /// Gives a place back, and returns whether it was a recorded one.
    fn give(&mut self, start: DeviceAddress, size: Bytes) -> bool {
        let place = self.taken.remove(&start);
        let is_recorded = place.is_some_and(|(_, is_recorded)| is_recorded);
        if !is_recorded {
            self.elsewhere.freed(start, size);
        }
        is_recorded
    }
}

impl Likely {
    pub(crate) fn new(events: &[TraceEvent]) -> Likely {
        let mut vacant: HashMap<Bytes, VecDeque<DeviceAddress>> = HashMap::new();
        for TraceEvent { event, .. } in events {
            if event.action == Action::SegmentAlloc
                && event.address + footprint(event.size) <= FirstFit::RESERVED.start
            {
                vacant
                    .entry(event.size)
                    .or_default()
                    .push_back(event.address);
            }
        }
        Likely {
            vacant,
            places: Places::new(),
        }
    }
}

impl Script {
    /// Of a job in whose expandable segments large requests have pages of `large_page_size`; `None` where it is not to
    /// be told which range begins next, as it has several pools.
    pub(crate) fn new(events: &[TraceEvent], large_page_size: Option<Bytes>) -> Script {
        let indexed = events.iter().map(|recorded| recorded.event).enumerate();
        let concerns_driver =
            |event: &Event| event.action.is_segment() || event.action == Action::OutOfMemory;
        Script {
            events: indexed
                .filter(|(_, event)| concerns_driver(event))
                .collect(),
            large_page_size,
            next: 0,
            step: 0..0,
            refused_in_step: false,
            place: None,
            places: Places::new(),
            reserved: BTreeSet::new(),
            looked_ahead: HashMap::new(),
            mapped: Extents::default(),
        }
    }

    /// Puts the next segment, or the next range of addresses, at `address`.
    pub(crate) fn place_next(&mut self, address: DeviceAddress) {
        self.place = Some(address);
    }

    /// Goes on to a step with the recorded events up to `end`. Steps with the same end share them.
    pub(crate) fn begin_step(&mut self, end: usize) {
        self.place = None;
        if end > self.step.end {
            self.step = self.step.end..end;
            self.refused_in_step = false;
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
        self.left_in_step().next()
    }

    /// Returns whether the driver refused something in this step.
    pub(crate) fn refused_in_step(&self) -> bool {
        self.refused_in_step
    }

    /// Returns whether memory goes back in this step.
    pub(crate) fn gives_back_in_step(&self) -> bool {
        self.left_in_step()
            .any(|event| matches!(event.action, Action::SegmentFree | Action::SegmentUnmap))
    }

    /// Returns what the recording says is still to come in this step.
    fn left_in_step(&self) -> impl Iterator<Item = Event> {
        let left = self.events[self.next..].iter();
        left.take_while(|(index, _)| self.step.contains(index))
            .map(|&(_, event)| event)
    }

    fn pass(&mut self, action: Action) {
        if self
            .next_in_step()
            .is_some_and(|event| event.action == action)
        {
            self.next += 1;
        }
    }

    /// Returns where the next range of the step's stream begins into which memory is mapped, in whichever step: where
    /// one is reserved for which there is no memory, it stays, and that comes later. Refuses where none comes. O(n) for n
    /// events, all requests of a stream and kind together, while no range goes.
    fn reserve_ahead(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let large_page = self.large_page_size.ok_or(DriverError::OutOfMemory)?;
        let served = self.left_in_step().find_map(|event| match event.action {
            Action::SegmentMap => Some((event.stream, event.size >= large_page)),
            Action::OutOfMemory => Some((event.stream, event.size > SMALL_REQUEST_MAX)),
            _ => None,
        });
        let (stream, is_large) = served.ok_or(DriverError::OutOfMemory)?;
        let is_in_range = |address: DeviceAddress| {
            let before = self.reserved.range(..=address).next_back();
            before.is_some_and(|&start| address < start + size)
        };
        let begins = |event: &Event| {
            event.action == Action::SegmentMap
                && event.stream == stream
                && (event.size >= large_page) == is_large
                && !is_in_range(event.address)
        };
        let looked_ahead = self.looked_ahead.entry((stream, is_large)).or_default();
        let first = self.next.max(*looked_ahead);
        let later = self.events[first..].iter();
        let found = later.map(|(_, event)| event).position(begins);
        *looked_ahead = found.map_or(self.events.len(), |found| first + found);
        let (_, event) = self
            .events
            .get(*looked_ahead)
            .ok_or(DriverError::OutOfMemory)?;
        self.reserved.insert(event.address);
        Ok(event.address)
    }

    fn refuses(&mut self) -> bool {
        let refuses = self.next_in_step().is_some_and(|event| {
            matches!(
                event.action,
                Action::SegmentFree | Action::SegmentUnmap | Action::OutOfMemory
            )
        });
        self.refused_in_step |= refuses;
        refuses
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
        match recorded.filter(|&address| self.places.take(address, size)) {
            Some(address) => {
                self.pass(Action::SegmentAlloc);
                Ok(address)
            }
            None => self.places.take_elsewhere(size),
        }
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        self.pass(Action::SegmentFree);
        self.places.give(address, size);
    }

    /// A range begins where the recording maps memory into it first, in the same step, or, where it refuses memory, in
    /// a later one; where none does, the range would stay empty at an address that nothing tells. Under a limit PyTorch
    /// reserves none for a request that exceeds it.
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let placed = self.place.take();
        if placed.is_none() && self.refuses() {
            return self.reserve_ahead(size);
        }
        let mapped = { self.left_in_step() }.find(|event| {
            let end = event.address + event.size;
            event.action == Action::SegmentMap && !self.mapped.is_mapped_within(event.address, end)
        });
        let start = placed.or_else(|| Some(mapped?.address));
        match start.filter(|&address| self.reserved.insert(address)) {
            Some(address) => Ok(address),
            None => self.places.elsewhere.reserve(size),
        }
    }

    fn unreserved(&mut self, address: DeviceAddress, size: Bytes) {
        if !self.reserved.remove(&address) {
            self.places.elsewhere.unreserved(address, size);
        }
        self.looked_ahead.clear();
    }

    fn create(&mut self, _size: Bytes) -> Result<(), DriverError> {
        if self.refuses() {
            Err(DriverError::OutOfMemory)
        } else {
            Ok(())
        }
    }

    fn mapped(&mut self, address: DeviceAddress, size: Bytes) {
        self.mapped.map(address, address + size);
        self.pass(Action::SegmentMap);
    }

    fn unmapped(&mut self, address: DeviceAddress, size: Bytes) {
        self.mapped.unmap(address, address + size);
        self.pass(Action::SegmentUnmap);
    }
}

impl AddressSource for Likely {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let next = self.vacant.get_mut(&size).and_then(VecDeque::pop_front);
        match next.filter(|&address| self.places.take(address, size)) {
            Some(address) => Ok(address),
            None => self.places.take_elsewhere(size),
        }
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        if self.places.give(address, size) {
            self.vacant.entry(size).or_default().push_front(address);
        }
    }

    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.places.elsewhere.reserve(size)
    }

    fn unreserved(&mut self, address: DeviceAddress, size: Bytes) {
        self.places.elsewhere.unreserved(address, size);
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

#[cfg(test)]
mod tests {
    use lowtide_core::{Driver, MempoolId};
    use lowtide_sim::{SimConfig, SimDriver};
    use lowtide_trace::{NoteId, StackId};

    use super::*;

    fn recorded(action: Action, address: DeviceAddress, size: Bytes) -> TraceEvent {
        let event = Event {
            action,
            pool: MempoolId::DEFAULT,
            address,
            size,
            stream: Stream::DEFAULT,
        };
        TraceEvent {
            event,
            time_us: 0,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        }
    }

    /// Whatever the range's size: that of one for small requests may have whole pages for large ones, too.
    #[test]
    fn a_range_that_stays_empty_is_the_next_of_its_kind() {
        let range = Bytes::mib(200);
        let [small, large, other_small] =
            [0x1000_0000, 0x4000_0000, 0x7000_0000].map(DeviceAddress);
        let refused = |size| recorded(Action::OutOfMemory, DeviceAddress::NULL, size);
        let map = |address, mib| recorded(Action::SegmentMap, address, Bytes::mib(mib));
        let events = [
            refused(Bytes::kib(4)),
            refused(Bytes::mib(4)),
            refused(Bytes::kib(4)),
            refused(Bytes::mib(4)),
            map(large, 20),
            map(small, 2),
            map(small + Bytes::mib(2), 2),
            map(other_small, 2),
        ];
        let mut script = Script::new(&events, Some(Bytes::mib(20)));
        let mut reserve_at = |event: usize| {
            script.begin_step(event + 1);
            let place = script.reserve(range);
            script.pass(Action::OutOfMemory);
            place
        };
        assert_eq!(reserve_at(0), Ok(small));
        assert_eq!(reserve_at(1), Ok(large));
        assert_eq!(reserve_at(2), Ok(other_small));
        assert_eq!(reserve_at(3), Err(DriverError::OutOfMemory));
        script.unreserved(large, range);
        script.next = 3;
        assert_eq!(script.reserve(range), Ok(large));
    }

    /// As in a recording of a job on the simulator, whose addresses begin where those begin that stand in for
    /// unrecorded ones.
    #[test]
    fn places_of_its_own_avoid_recorded_ones() {
        let first = FirstFit::new().allocate(Bytes::mib(40)).unwrap();
        let recorded = recorded(Action::SegmentAlloc, first, Bytes::mib(40));
        let mut likely = Likely::new(&[recorded]);
        assert_eq!(likely.allocate(Bytes::mib(40)), Ok(first));
        let own = likely.allocate(Bytes::mib(22)).unwrap();
        assert!(first + Bytes::mib(40) <= own);

        let mut likely = Likely::new(&[recorded]);
        let own = likely.allocate(Bytes::mib(22)).unwrap();
        let other = likely.allocate(Bytes::mib(40)).unwrap();
        assert!(own + Bytes::mib(22) <= other);
        likely.freed(own, Bytes::mib(22));
        assert_eq!(likely.allocate(Bytes::mib(22)), Ok(own));
    }

    /// As those of `direct` in a region, which are parts of its pages: a driver gives each whole pages of its own.
    #[test]
    fn places_that_are_closer_than_a_driver_has_them_are_not_both_taken() {
        let first = DeviceAddress(0x7f00_0000_0000);
        let size = Bytes::mib(3);
        let segments = [first, first + size].map(|at| recorded(Action::SegmentAlloc, at, size));
        let mut driver = SimDriver::with_addresses(
            SimConfig::default(),
            Addresses::Likely(Likely::new(&segments)),
        );
        assert_eq!(driver.allocate(size), Ok(first));
        assert!(driver.allocate(size).is_ok());
        assert_eq!(driver.violations(), [""; 0]);
    }

    /// The simulator has ranges of its own there, which may be mapped.
    #[test]
    fn places_where_ranges_are_reserved_are_not_taken() {
        let size = Bytes::mib(20);
        let segment = recorded(Action::SegmentAlloc, FirstFit::RESERVED.start, size);
        let mut likely = Likely::new(&[segment]);
        let place = likely.allocate(size).unwrap();
        assert!(place < FirstFit::RESERVED.start);
    }
}
