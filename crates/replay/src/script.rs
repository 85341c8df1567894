//! Chooses where a replay's segments lie: where the recorded driver put them, as far as the recording shows it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;

use lowtide_core::{Action, Bytes, DeviceAddress, DriverError, Event, Stream};
use lowtide_sim::{AddressSource, FirstFit, footprint};
use lowtide_trace::TraceEvent;

use crate::extents::Extents;
use crate::pools::SMALL_REQUEST_MAX;

/// The calls of the recorded driver: the source of a simulated device's addresses and refusals.
///
/// An exact script does what was recorded, step by step. During a step the driver returns the addresses that were
/// recorded for it. If the recording shows released memory next, the driver refuses, because a refusal is why memory
/// was released. A call that was not recorded gets an address of its own, and the comparison of events shows the
/// difference.
///
/// A likely script has no steps and refuses nothing. It returns the addresses that the recorded driver would likely
/// have returned. A segment lies where the recording has one of its size, in recorded order. Once those addresses are
/// taken, it lies elsewhere.
///
/// Among free blocks of one size, an allocator takes the one at the lowest address. Its choice therefore depends a
/// little on where the driver puts segments. With these addresses, PyTorch's allocator takes the same blocks in a
/// replay as in the recording.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) is_exact: bool,
    /// For an exact script: the recorded events between the allocator and the driver, and the requests that failed.
    events: Vec<(usize, Event)>,
    large_page_size: Option<Bytes>,
    /// The index of the first of `events` that has not happened.
    next: usize,
    /// The recorded events of the current step.
    step: Range<usize>,
    /// Whether the driver refused a call in that step.
    refused_in_step: bool,
    /// The address of the next segment, before the first step.
    place: Option<DeviceAddress>,
    /// For a likely script: the recorded segments of each size that are not taken, the next one first.
    vacant: HashMap<Bytes, VecDeque<DeviceAddress>>,
    places: Places,
    /// The start addresses of the reserved ranges.
    reserved: BTreeSet<DeviceAddress>,
    /// For a stream and for large requests or small ones: an index into `events`. No unreserved range begins before
    /// it.
    looked_ahead: HashMap<(Stream, bool), usize>,
    mapped: Extents,
}

/// The addresses that segments lie at: recorded ones, and others for unrecorded segments.
#[derive(Debug)]
struct Places {
    /// The taken ranges, from start to end, and whether each is recorded.
    taken: BTreeMap<DeviceAddress, (DeviceAddress, bool)>,
    elsewhere: FirstFit,
}

impl Default for Places {
    fn default() -> Places {
        Places {
            taken: BTreeMap::new(),
            elsewhere: FirstFit::new(),
        }
    }
}

impl Places {
    /// Takes a recorded place, unless a part of it is taken, or else an unrecorded one. The simulated driver allocates
    /// whole pages. The recorded driver, or an allocator in its place, may have packed large segments more closely.
    fn take_or_elsewhere(
        &mut self,
        recorded: Option<DeviceAddress>,
        size: Bytes,
    ) -> Result<DeviceAddress, DriverError> {
        if let Some(start) = recorded
            && self.insert(start, size, true)
        {
            return Ok(start);
        }
        loop {
            let start = self.elsewhere.allocate(size)?;
            // A job recorded on a simulator has its segments where this search begins; such places are skipped.
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

    /// Frees a place, and returns whether it was a recorded one.
    fn give(&mut self, start: DeviceAddress, size: Bytes) -> bool {
        let place = self.taken.remove(&start);
        let is_recorded = place.is_some_and(|(_, is_recorded)| is_recorded);
        if !is_recorded {
            self.elsewhere.freed(start, size);
        }
        is_recorded
    }
}

impl Script {
    /// Returns the likely script of a job.
    pub(crate) fn likely(events: &[TraceEvent]) -> Script {
        let mut script = Script::default();
        for TraceEvent { event, .. } in events {
            if event.action == Action::SegmentAlloc
                && event.address + footprint(event.size) <= FirstFit::RESERVED.start
            {
                let of_size = script.vacant.entry(event.size).or_default();
                of_size.push_back(event.address);
            }
        }
        script
    }

    /// Returns the exact script of a job. `large_page_size` is the page size of its expandable segments for large
    /// requests. It is `None` if the job has several pools, because then the range that begins next is unknown.
    pub(crate) fn exact(events: &[TraceEvent], large_page_size: Option<Bytes>) -> Script {
        let indexed = events.iter().map(|recorded| recorded.event).enumerate();
        let concerns_driver =
            |event: &Event| event.action.is_segment() || event.action == Action::OutOfMemory;
        let events = indexed.filter(|(_, event)| concerns_driver(event));
        Script {
            is_exact: true,
            events: events.collect(),
            large_page_size,
            ..Script::default()
        }
    }

    /// Puts the next segment, or the next reserved range, at `address`.
    pub(crate) fn place_next(&mut self, address: DeviceAddress) {
        self.place = Some(address);
    }

    /// Begins the step with the recorded events up to `end`. Steps with the same end share their events.
    pub(crate) fn begin_step(&mut self, end: usize) {
        self.place = None;
        if end > self.step.end {
            self.step = self.step.end..end;
            self.refused_in_step = false;
        }
        let gone = self.events[self.next..].iter();
        let gone = gone.take_while(|(index, _)| *index < self.step.start);
        self.next += gone.count();
    }

    /// Returns the next recorded event of this step.
    fn next_in_step(&self) -> Option<Event> {
        self.left_in_step().next()
    }

    /// Returns whether the driver refused a call in this step.
    pub(crate) fn refused_in_step(&self) -> bool {
        self.refused_in_step
    }

    /// Returns whether memory is still to be released in this step.
    pub(crate) fn releases_in_step(&self) -> bool {
        self.left_in_step()
            .any(|event| matches!(event.action, Action::SegmentFree | Action::SegmentUnmap))
    }

    /// Returns the recorded events that are still to come in this step.
    fn left_in_step(&self) -> impl Iterator<Item = Event> {
        let left = self.events[self.next..].iter();
        left.take_while(|(index, _)| self.step.contains(index))
            .map(|&(_, event)| event)
    }

    fn pass(&mut self, action: Action) {
        let next = self.next_in_step();
        self.next += usize::from(next.is_some_and(|event| event.action == action));
    }

    /// Returns the start of the next range, of the step's stream and kind, that memory is mapped into in any later
    /// step. If the driver has no memory for a new range, the empty range stays reserved, and memory is mapped into
    /// it later. Returns an error if no range follows. O(n) for n events, over all requests of a stream and kind,
    /// while no range is freed.
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
        let next = self.events.get(*looked_ahead);
        let (_, event) = next.ok_or(DriverError::OutOfMemory)?;
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
        let likely = self.vacant.get_mut(&size).and_then(VecDeque::pop_front);
        let next = || Some(self.next_in_step().filter(same)?.address);
        let recorded = placed.or(likely).or_else(next);
        let address = self.places.take_or_elsewhere(recorded, size)?;
        if recorded == Some(address) {
            self.pass(Action::SegmentAlloc);
        }
        Ok(address)
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        self.pass(Action::SegmentFree);
        if self.places.give(address, size) && !self.is_exact {
            self.vacant.entry(size).or_default().push_front(address);
        }
    }

    /// Returns the address that the recording first maps memory at in this step. If the recorded driver refuses
    /// memory in this step, returns such an address of a later step, or an error if no later step has one: nothing
    /// shows where the empty range was. Under a limit, PyTorch reserves no range for a request that exceeds it.
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

    /// The size of the range does not matter: a range for small requests may contain whole pages for large ones,
    /// too.
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
        let mut script = Script::exact(&events, Some(Bytes::mib(20)));
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

    /// As in the recording of a job on the simulator: the recorded addresses begin where the substitutes for
    /// unrecorded ones do.
    #[test]
    fn places_of_its_own_avoid_recorded_ones() {
        let first = FirstFit::new().allocate(Bytes::mib(40)).unwrap();
        let recorded = recorded(Action::SegmentAlloc, first, Bytes::mib(40));
        let mut likely = Script::likely(&[recorded]);
        assert_eq!(likely.allocate(Bytes::mib(40)), Ok(first));
        let own = likely.allocate(Bytes::mib(22)).unwrap();
        assert!(first + Bytes::mib(40) <= own);

        let mut likely = Script::likely(&[recorded]);
        let own = likely.allocate(Bytes::mib(22)).unwrap();
        let other = likely.allocate(Bytes::mib(40)).unwrap();
        assert!(own + Bytes::mib(22) <= other);
        likely.freed(own, Bytes::mib(22));
        assert_eq!(likely.allocate(Bytes::mib(22)), Ok(own));
    }

    /// As the segments of `direct` in a region, which are parts of its pages. A driver gives each segment whole
    /// pages.
    #[test]
    fn places_that_are_closer_than_a_driver_has_them_are_not_both_taken() {
        let first = DeviceAddress(0x7f00_0000_0000);
        let size = Bytes::mib(3);
        let segments = [first, first + size].map(|at| recorded(Action::SegmentAlloc, at, size));
        let likely = Script::likely(&segments);
        let mut driver = SimDriver::with_addresses(SimConfig::default(), likely);
        assert_eq!(driver.allocate(size), Ok(first));
        assert!(driver.allocate(size).is_ok());
        assert_eq!(driver.violations(), [""; 0]);
    }

    /// The simulator reserves ranges there, which may be mapped.
    #[test]
    fn places_where_ranges_are_reserved_are_not_taken() {
        let size = Bytes::mib(20);
        let segment = recorded(Action::SegmentAlloc, FirstFit::RESERVED.start, size);
        let mut likely = Script::likely(&[segment]);
        let place = likely.allocate(size).unwrap();
        assert!(place < FirstFit::RESERVED.start);
    }
}
