//! The frames of a job that ran under `tide`, and when they moved between addresses.

use lowtide_core::{Action, Bytes, Config};
use lowtide_trace::Trace;
use serde::Serialize;

use crate::growth::Steps;
use crate::page::columns::Columns;

/// The frames: pieces of memory of one size, each shown at one address at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Frames {
    /// The size of each.
    size: u64,
    /// The most that there were at once.
    peak: u64,
    /// The number of addresses that showed one at some time. Views that stay mapped leave no event. If the recording began
    /// with the job, there are at most as many as these.
    addresses: u64,
    /// How often one moved to another address.
    moved: u64,
    /// The number of steps in which any did.
    moving_steps: usize,
    /// The step with the most moves; `None` if no step has any.
    busiest: Option<Step>,
}

/// A step of the job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct Step {
    /// Its number, counted from 1.
    number: usize,
    /// Its first instant.
    event: u32,
    moved: u64,
}

/// The instants at which frames moved, ascending, with their numbers.
type Moves = Vec<(u32, u64)>;

impl Frames {
    /// Returns the frames of a recording; `None` unless it is of `tide` and has any. O(n log n) for n events.
    pub(super) fn of(trace: &Trace, steps: &Steps) -> Option<Frames> {
        let size = frame_size(trace)?;
        let (peak, moves) = (peak(trace, size), moves(trace, size));
        let steps = moving_steps(&moves, &steps.boundaries);
        (peak > 0).then(|| Frames {
            size: size.get(),
            peak,
            addresses: addresses(trace, size),
            moved: sum(moves.iter().map(|&(_, moved)| moved)),
            moving_steps: steps.len(),
            // Among equals, the first.
            busiest: steps.into_iter().rev().max_by_key(|step| step.moved),
        })
    }
}

/// Adds the instants at which frames moved, and how many did; empty columns if none moved. Linear in the events.
pub(super) fn add_moves(columns: &mut Columns, trace: &Trace) {
    let moves = frame_size(trace).map_or_else(Vec::new, |size| moves(trace, size));
    columns.add_u32("moves/event", moves.iter().map(|&(instant, _)| instant));
    columns.add_u64("moves/frames", moves.iter().map(|&(_, moved)| moved));
}

/// Returns the size of the recording's frames; `None` unless it is of `tide`.
fn frame_size(trace: &Trace) -> Option<Bytes> {
    let strategy: Config = trace.settings.strategy.raw().parse().ok()?;
    match strategy {
        Config::Tide(_) => Some(strategy.large_page()),
        _ => None,
    }
}

/// Returns the peak number of frames of this size.
fn peak(trace: &Trace, size: Bytes) -> u64 {
    let frames = |bytes: Bytes| bytes.get() / size.get();
    let initial = trace.initial.segments.iter();
    let initial = initial.filter(|segment| segment.is_expandable);
    let mut present = sum(initial.map(|segment| frames(segment.size)));
    let mut peak = present;
    for recorded in &trace.events {
        let count = frames(recorded.event.size);
        match recorded.event.action {
            Action::SegmentUnmap => present = present.saturating_sub(count),
            Action::SegmentMap => present = present.saturating_add(count),
            _ => {}
        }
        peak = peak.max(present);
    }
    peak
}

/// Returns how many addresses, a frame's size apart, showed a frame at some time.
fn addresses(trace: &Trace, size: Bytes) -> u64 {
    let initial = trace.initial.segments.iter();
    let initial = initial.filter(|segment| segment.is_expandable);
    let initial = initial.map(|segment| (segment.address, segment.size));
    let events = trace.events.iter().map(|recorded| recorded.event);
    let mapped = events.filter(|event| event.action == Action::SegmentMap);
    let mapped = mapped.map(|event| (event.address, event.size));
    let mut ranges: Vec<(u64, u64)> = initial
        .chain(mapped)
        .map(|(start, size)| (start.get(), start.get().saturating_add(size.get())))
        .collect();
    ranges.sort_unstable();
    let new_bytes = ranges.into_iter().scan(0, |covered, (start, end)| {
        let new = end.saturating_sub(start.max(*covered));
        *covered = end.max(*covered);
        Some(new)
    });
    sum(new_bytes) / size.get()
}

/// Returns the moves of frames of this size. Their instant is that of the request that they serve.
fn moves(trace: &Trace, size: Bytes) -> Moves {
    let moves = trace.frame_moves().into_iter().map(|(events, bytes)| {
        let instant = u32::try_from(events.end + 1).unwrap_or(u32::MAX);
        (instant, bytes.get() / size.get())
    });
    moves.filter(|&(_, moved)| moved > 0).collect()
}

/// Returns the steps in which frames moved.
fn moving_steps(moves: &Moves, boundaries: &[u32]) -> Vec<Step> {
    let steps = { boundaries.windows(2) }.zip(1..).map(|(step, number)| {
        let first = moves.partition_point(|&(instant, _)| instant < step[0]);
        let end = moves.partition_point(|&(instant, _)| instant < step[1]);
        Step {
            number,
            event: step[0],
            moved: sum(moves[first..end].iter().map(|&(_, moved)| moved)),
        }
    });
    steps.filter(|step| step.moved > 0).collect()
}

/// Returns the sum, as far as it can be counted: a file may claim any sizes.
fn sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use lowtide_core::{DeviceAddress, DeviceAllocator, Event, MempoolId, Stream};
    use lowtide_sim::{SimConfig, SimDriver};
    use lowtide_trace::{NoteId, StackId, TraceEvent};

    use super::*;
    use crate::growth::StepSource;

    /// A job that is recorded under `tide`.
    struct Job(DeviceAllocator<SimDriver>);

    impl Job {
        fn new() -> Job {
            let driver = SimDriver::new(SimConfig {
                capacity: Some(Bytes::mib(100)),
                ..SimConfig::default()
            });
            let config: Config = "tide".parse().unwrap();
            let mut allocator = DeviceAllocator::new(driver, 0, &config);
            allocator.lane_mut().event_log().record(true);
            Job(allocator)
        }

        fn allocate(&mut self, mib: u64) -> DeviceAddress {
            let pool = MempoolId::DEFAULT;
            let block = self.0.allocate_in(pool, Bytes::mib(mib), Stream::DEFAULT);
            block.unwrap()
        }

        fn finish(&mut self) -> Trace {
            let events = self.0.lane_mut().event_log().take();
            let mut trace = Trace {
                events: events.map(recorded).collect(),
                ..Trace::default()
            };
            trace.settings.strategy = "tide".into();
            trace
        }
    }

    fn recorded(event: Event) -> TraceEvent {
        TraceEvent {
            event,
            time_us: 0,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        }
    }

    fn steps(boundaries: Vec<u32>) -> Steps {
        Steps {
            boundaries,
            source: StepSource::Period(1.0),
        }
    }

    /// A request of 40 MiB follows two freed blocks of 20 MiB that do not touch: it takes the addresses of the second
    /// and those after it, to which the frames of the first move.
    #[test]
    fn frames_that_move_are_counted_in_their_step() {
        let mut job = Job::new();
        let blocks = [20, 2, 20].map(|mib| job.allocate(mib));
        for block in [blocks[0], blocks[2]] {
            job.0.free(block).unwrap();
        }
        job.allocate(40);
        let trace = job.finish();
        let end = u32::try_from(trace.events.len()).unwrap();
        let frames = Frames::of(&trace, &steps(vec![0, 3, 7, end + 1, end + 2])).unwrap();
        let busiest = Step {
            number: 3,
            event: 7,
            moved: 10,
        };
        let expected = Frames {
            size: 2 << 20,
            peak: 21,
            addresses: 31,
            moved: 10,
            moving_steps: 1,
            busiest: Some(busiest),
        };
        assert_eq!(frames, expected);
        let mut columns = Columns::default();
        add_moves(&mut columns, &trace);
        let mut expected = Columns::default();
        expected.add_u32("moves/event", [end].into_iter());
        expected.add_u64("moves/frames", [10].into_iter());
        assert_eq!(columns, expected);
        // A job without steps has moves, too.
        let frames = Frames::of(&trace, &steps(Vec::new())).unwrap();
        assert_eq!((frames.moved, frames.busiest), (10, None));
    }

    /// A private pool's request first unmaps what it takes from elsewhere.
    #[test]
    fn frames_of_one_request_may_be_mapped_in_several_ranges() {
        let event = |action, page: u64, pages: u64| Event {
            action,
            pool: MempoolId::DEFAULT,
            address: DeviceAddress((1 << 40) + (page << 21)),
            size: Bytes::mib(2 * pages),
            stream: Stream::DEFAULT,
        };
        let unmaps = (0..4).map(|page| event(Action::SegmentUnmap, page, 1));
        let maps = [10, 13].map(|page| event(Action::SegmentMap, page, 2));
        let block = event(Action::Alloc, 10, 5);
        let events = unmaps.chain(maps).chain([block]);
        let mut trace = Trace {
            events: events.map(recorded).collect(),
            ..Trace::default()
        };
        trace.settings.strategy = "tide".into();
        let frames = Frames::of(&trace, &steps(Vec::new())).unwrap();
        assert_eq!((frames.peak, frames.addresses, frames.moved), (4, 4, 4));
    }

    #[test]
    fn a_release_is_no_move() {
        let mut job = Job::new();
        let block = job.allocate(40);
        job.0.free(block).unwrap();
        job.0.empty_cache(None).unwrap();
        job.allocate(20);
        let frames = Frames::of(&job.finish(), &steps(Vec::new())).unwrap();
        assert_eq!((frames.peak, frames.addresses, frames.moved), (20, 20, 0));
    }

    #[test]
    fn only_tide_has_frames() {
        let mut job = Job::new();
        job.allocate(20);
        let mut trace = job.finish();
        assert!(Frames::of(&trace, &steps(Vec::new())).is_some());
        trace.settings.strategy = "caching:expandable_segments:True".into();
        assert_eq!(Frames::of(&trace, &steps(Vec::new())), None);
        trace.settings.strategy = "tide".into();
        trace.events.clear();
        assert_eq!(Frames::of(&trace, &steps(Vec::new())), None);
    }
}
