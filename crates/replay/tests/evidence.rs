//! Facts that a recording implies but does not say, in recordings of a few events made by hand.
#![expect(clippy::unwrap_used, reason = "a test that cannot replay fails")]

use std::sync::Mutex;

use lowtide_core::{Action, BlockStatus, Bytes, Config, DeviceAddress, Event, MempoolId, Stream};
use lowtide_replay::{Job, Options, Outcome, Progress};
use lowtide_trace::{InitialBlock, InitialSegment, StackId, Trace, TraceEvent};

const HERE: u64 = 0x7f00_0000_0000;
const THERE: u64 = 0x7f00_2000_0000;
const THIRD: u64 = 0x7f00_4000_0000;

fn event(action: Action, address: u64, mib: u64) -> Event {
    let (pool, stream) = (MempoolId::DEFAULT, Stream::DEFAULT);
    Event {
        action,
        pool,
        address: DeviceAddress(address),
        size: Bytes::mib(mib),
        stream,
    }
}

fn recording(events: Vec<Event>) -> Trace {
    let recorded = events.into_iter().map(|event| TraceEvent {
        event,
        time_us: 0,
        stack: StackId::NONE,
        pool_known: true,
        note: lowtide_trace::NoteId::NONE,
    });
    Trace {
        events: recorded.collect(),
        ..Trace::default()
    }
}

fn verify(trace: &Trace) -> Outcome {
    let options = Options {
        verify: true,
        ..Options::default()
    };
    let config = Config::Caching(trace.config_in_force().unwrap());
    let outcome = Job::new(trace).replay(&config, &options, &()).unwrap();
    let verified = outcome.verified.as_ref().unwrap();
    assert_eq!(
        verified.first_difference.as_ref().map(ToString::to_string),
        None
    );
    assert_eq!(verified.compared, verified.same_address);
    outcome
}

/// A request that the cache would have served cannot have emptied it.
#[test]
fn an_empty_cache_right_before_the_peak_is_the_programs() {
    for (first_mib, second_mib) in [(100, 100), (200, 150), (200, 201)] {
        let trace = recording(vec![
            event(Action::SegmentAlloc, HERE, first_mib + first_mib % 2),
            event(Action::Alloc, HERE, first_mib),
            event(Action::FreeRequested, HERE, first_mib),
            event(Action::FreeCompleted, HERE, first_mib),
            event(Action::SegmentFree, HERE, first_mib + first_mib % 2),
            event(Action::SegmentAlloc, THERE, second_mib + second_mib % 2),
            event(Action::Alloc, THERE, second_mib),
        ]);
        let outcome = verify(&trace);
        // The last release could be the request's or the program's; the memory is the same either way.
        let was_request = second_mib > first_mib;
        assert_eq!(
            outcome.retries,
            u64::from(was_request),
            "{first_mib} then {second_mib} MiB"
        );
    }
}

/// With rounding to eighths, a request of 17 MiB takes 18 MiB.
#[test]
fn a_cache_that_would_have_served_the_rounded_request_is_the_programs() {
    for (cached_mib, was_request) in [(18, false), (16, true)] {
        let mut trace = recording_of(&[
            (Action::SegmentAlloc, HERE, cached_mib),
            (Action::Alloc, HERE, cached_mib),
            (Action::FreeRequested, HERE, cached_mib),
            (Action::FreeCompleted, HERE, cached_mib),
            (Action::SegmentFree, HERE, cached_mib),
            (Action::SegmentAlloc, THERE, 18),
            (Action::Alloc, THERE, 17),
        ]);
        trace.settings.conf = "roundup_power2_divisions:8".into();
        assert_eq!(
            verify(&trace).retries,
            u64::from(was_request),
            "{cached_mib} MiB"
        );
    }
}

#[test]
fn a_pool_that_was_free_before_the_first_event_is_held_until_its_memory_goes() {
    let pool = MempoolId(0, 5);
    let mut freed = event(Action::SegmentFree, HERE, 20);
    freed.pool = pool;
    let mut trace = recording(vec![
        event(Action::SegmentAlloc, THERE, 20),
        event(Action::Alloc, THERE, 5),
        freed,
        event(Action::Alloc, THERE + (5 << 20), 5),
    ]);
    trace.initial.segments.push(InitialSegment {
        address: DeviceAddress(HERE),
        size: Bytes::mib(20),
        stream: Stream::DEFAULT,
        pool: Some(pool),
        is_large: true,
        is_expandable: false,
    });
    verify(&trace);
}

/// A configured fraction is a fraction of the capacity.
#[test]
fn a_fraction_limits_a_replay() {
    let trace = recording(vec![
        event(Action::SegmentAlloc, HERE, 600),
        event(Action::Alloc, HERE, 600),
    ]);
    let options = Options {
        capacity: Some(Bytes::mib(1000)),
        ..Options::default()
    };
    for (fraction, completed) in [("1.0", true), ("0.7", true), ("0.5", false)] {
        let conf = format!("per_process_memory_fraction:{fraction}");
        let config = Config::parse("caching", &conf).unwrap();
        let outcome = Job::new(&trace).replay(&config, &options, &()).unwrap();
        assert_eq!(outcome.completed, completed, "{conf}");
    }
}

/// While a program allocates to a private pool, PyTorch releases nothing when memory runs out.
#[test]
fn memory_that_goes_back_before_a_private_pools_request_is_the_programs() {
    let pool = MempoolId(0, 7);
    let private = |action, address| Event {
        pool,
        ..event(action, address, 100)
    };
    let trace = recording(vec![
        event(Action::SegmentAlloc, HERE, 100),
        event(Action::Alloc, HERE, 100),
        event(Action::FreeRequested, HERE, 100),
        event(Action::FreeCompleted, HERE, 100),
        event(Action::SegmentFree, HERE, 100),
        private(Action::SegmentAlloc, THERE),
        private(Action::Alloc, THERE),
    ]);
    assert_eq!(verify(&trace).retries, 0);
}

/// A job that released old memory at 14,994 MiB and held 22,718 MiB in the end.
fn garbage_recording() -> Trace {
    let small = HERE - (64 << 30);
    let place = |number: u64| HERE + number * (32 << 30);
    recording_of(&[
        (Action::SegmentAlloc, small, 2),
        (Action::Alloc, small, 1),
        (Action::FreeRequested, small, 1),
        (Action::FreeCompleted, small, 1),
        (Action::SegmentAlloc, place(0), 100),
        (Action::Alloc, place(0), 100),
        (Action::SegmentAlloc, place(1), 14_892),
        (Action::Alloc, place(1), 14_892),
        (Action::FreeRequested, place(0), 100),
        (Action::FreeCompleted, place(0), 100),
        (Action::SegmentFree, place(0), 100),
        (Action::SegmentAlloc, place(2), 200),
        (Action::Alloc, place(2), 200),
        (Action::SegmentAlloc, place(3), 7_624),
        (Action::Alloc, place(3), 7_624),
    ])
}

fn recording_of(events: &[(Action, u64, u64)]) -> Trace {
    let events = events.iter();
    recording(
        events
            .map(|&(action, address, mib)| event(action, address, mib))
            .collect(),
    )
}

fn verify_garbage(threshold: &str, capacity: Option<Bytes>) -> lowtide_replay::Verified {
    let conf = format!("garbage_collection_threshold:{threshold}");
    let config = Config::parse("caching", &conf).unwrap();
    let options = Options {
        capacity,
        verify: true,
        timeline_points: 0,
    };
    let mut trace = garbage_recording();
    trace.settings.conf = conf.into();
    let outcome = Job::new(&trace).replay(&config, &options, &()).unwrap();
    outcome.verified.unwrap()
}

/// The limit lies in a range of less than 2 MiB: between the bytes that the job held and the bytes that would
/// exceed it.
#[test]
fn a_limit_that_only_just_allows_what_was_held_is_found() {
    let held = Bytes::mib(22_718);
    let verified = verify_garbage("0.66", None);
    assert_eq!(verified.first_difference, None);
    assert_eq!(verified.limit_bytes, Some(held));
    let verified = verify_garbage("0.66", Some(held));
    assert_eq!(
        (verified.first_difference, verified.limit_bytes),
        (None, None)
    );
    for other in [held - Bytes::mib(1), held + Bytes::mib(1)] {
        assert!(
            verify_garbage("0.66", Some(other))
                .first_difference
                .is_some()
        );
    }
}

/// At each report: the events expected so far and the events replayed so far.
#[derive(Default)]
struct Heard(Mutex<Vec<(u64, u64)>>);

impl Heard {
    fn add(&self, expected: u64, replayed: u64) {
        let mut reports = self.0.lock().unwrap();
        let before = reports.last().copied().unwrap_or_default();
        reports.push((before.0 + expected, before.1 + replayed));
    }
}

impl Progress for Heard {
    fn advance(&self, events: u64) {
        self.add(0, events);
    }

    fn expect(&self, events: u64) {
        self.add(events, 0);
    }
}

#[test]
fn the_search_for_a_limit_reports_how_far_it_is() {
    for threshold in ["0.66", "0.999999", "0.5", "0.000000000001"] {
        let conf = format!("garbage_collection_threshold:{threshold}");
        let mut trace = garbage_recording();
        trace.settings.conf = conf.into();
        let config = Config::Caching(trace.config_in_force().unwrap());
        let options = Options {
            verify: true,
            ..Options::default()
        };
        let heard = Heard::default();
        Job::new(&trace).replay(&config, &options, &heard).unwrap();
        let reports = heard.0.into_inner().unwrap();
        let events = trace.events.len() as u64;
        let total = reports[0].0 + events;
        // All replays are announced first. Then the reports follow, replay by replay.
        assert!(
            reports
                .iter()
                .all(|&(expected, replayed)| { expected == reports[0].0 && replayed <= total })
        );
        let replays = reports
            .iter()
            .filter(|report| report.1 % events == 0)
            .count();
        assert!(replays > 3 && reports[0].0 >= 3 * events, "{reports:?}");
        assert_eq!(reports.last().unwrap().1, total);
    }
}

/// After a replay that broke off, no events are left.
#[test]
fn replays_that_break_off_report_all_of_it() {
    let mut trace = garbage_recording();
    trace.settings.conf = "garbage_collection_threshold:0.5".into();
    // No driver returns the same memory twice.
    for (address, is_expandable) in [(THERE, true), (THERE + (20 << 20), false)] {
        trace.initial.segments.push(InitialSegment {
            address: DeviceAddress(address),
            size: Bytes::mib(40),
            stream: Stream::DEFAULT,
            pool: Some(MempoolId::DEFAULT),
            is_large: true,
            is_expandable,
        });
    }
    let config = Config::parse("caching", trace.settings.conf.raw()).unwrap();
    let options = Options {
        verify: true,
        ..Options::default()
    };
    let heard = Heard::default();
    let outcome = Job::new(&trace).replay(&config, &options, &heard);
    assert!(outcome.is_err());
    let reports = heard.0.into_inner().unwrap();
    let &(expected, replayed) = reports.last().unwrap();
    let events = trace.events.len() as u64;
    assert!(expected > events);
    assert_eq!(replayed, expected + events);
}

#[test]
fn thresholds_near_their_ends_are_no_fault() {
    for threshold in ["0.999999", "0.5", "0.000000000001", "5e-324"] {
        let verified = verify_garbage(threshold, None);
        let again = verify_garbage(threshold, verified.limit_bytes);
        assert_eq!(
            again.first_difference, verified.first_difference,
            "{threshold}"
        );
    }
}

/// Free memory of 5 MiB and 6 MiB before the first event, each behind a block, and a request that was served from
/// the second.
fn end_recording(mib: u64) -> Trace {
    let place = |mib: u64| HERE + (mib << 20);
    let mut trace = recording_of(&[
        (Action::Alloc, place(12), mib),
        (Action::FreeRequested, place(0), 4),
        (Action::FreeCompleted, place(0), 4),
        (Action::Alloc, place(0), 8),
    ]);
    trace.initial.segments.push(InitialSegment {
        address: DeviceAddress(HERE),
        size: Bytes::mib(40),
        stream: Stream::DEFAULT,
        pool: Some(MempoolId::DEFAULT),
        is_large: true,
        is_expandable: false,
    });
    let blocks = [(0, 4), (9, 3), (18, 22)];
    let blocks = blocks.map(|(start_mib, size_mib)| InitialBlock {
        address: DeviceAddress(place(start_mib)),
        size: Bytes::mib(size_mib),
        requested: Bytes::mib(size_mib),
        stream: Stream::DEFAULT,
        pool: Some(MempoolId::DEFAULT),
        status: BlockStatus::Allocated,
        stack: StackId::NONE,
    });
    trace.initial.blocks.extend(blocks);
    trace
}

/// A block from before the first event may have an end that was not split off.
#[test]
fn free_memory_that_was_passed_by_was_too_short() {
    verify(&end_recording(5));
    // The end would be longer than an end that is not split off.
    let options = Options {
        verify: true,
        ..Options::default()
    };
    let trace = end_recording(4);
    let outcome = Job::new(&trace).replay(&Config::default(), &options, &());
    assert!(
        outcome
            .unwrap()
            .verified
            .unwrap()
            .first_difference
            .is_some()
    );
}

/// Pages that were mapped before the first event, from and to these MiB, each range filled by one block.
fn expandable_recording(ranges: &[(u64, u64)], events: &[(Action, u64, u64)]) -> Trace {
    let events = events.iter();
    let mut trace = recording_of(
        &events
            .map(|&(action, start_mib, size_mib)| (action, HERE + (start_mib << 20), size_mib))
            .collect::<Vec<_>>(),
    );
    trace.settings.conf = "expandable_segments:True".into();
    for &(start_mib, end_mib) in ranges {
        let address = DeviceAddress(HERE + (start_mib << 20));
        let size = Bytes::mib(end_mib - start_mib);
        trace.initial.segments.push(InitialSegment {
            address,
            size,
            stream: Stream::DEFAULT,
            pool: Some(MempoolId::DEFAULT),
            is_large: true,
            is_expandable: true,
        });
        trace.initial.blocks.push(InitialBlock {
            address,
            size,
            requested: size,
            stream: Stream::DEFAULT,
            pool: Some(MempoolId::DEFAULT),
            status: BlockStatus::Allocated,
            stack: StackId::NONE,
        });
    }
    trace
}

/// What was there before the first event was allocated before the recorded time.
#[test]
fn driver_time_begins_with_the_first_event() {
    let events = [(Action::Alloc, 8192, 20)];
    let time = |ranges: &[(u64, u64)]| {
        let trace = expandable_recording(ranges, &events);
        let config: Config = "tide".parse().unwrap();
        let outcome = Job::new(&trace).replay(&config, &Options::default(), &());
        outcome.unwrap().driver_time_us
    };
    let alone = time(&[]);
    let after_others = time(&[(0, 4096)]);
    assert!(after_others > 0.0 && after_others <= alone);
}

/// The first pages of an expandable segment may have been released before the first event.
#[test]
fn a_segment_begins_where_memory_is_mapped_before_the_rest() {
    let mut events = vec![
        (Action::SegmentMap, 0, 20),
        (Action::Alloc, 0, 15),
        (Action::SegmentMap, 20, 80),
        (Action::Alloc, 15, 85),
        (Action::SegmentMap, 140, 40),
        (Action::Alloc, 140, 30),
    ];
    verify(&expandable_recording(&[(100, 140)], &events));
    // The same holds while the pages between are not mapped yet.
    events.truncate(2);
    verify(&expandable_recording(&[(100, 140)], &events));
}

#[test]
fn a_segment_of_another_stream_begins_where_it_was_recorded() {
    let mut trace = expandable_recording(&[(0, 20), (40, 60)], &[]);
    let events = [(Action::SegmentMap, 20), (Action::Alloc, 15)];
    let events = events.map(|(action, mib)| Event {
        stream: Stream(7),
        ..event(action, THERE + (1 << 36), mib)
    });
    trace.events = recording(events.to_vec()).events;
    verify(&trace);
}

/// On cards with less memory, segments of different pools begin nearer to each other. Up to torch 2.14 a recording
/// does not say the pool of a released segment.
#[test]
fn a_segment_that_grows_near_to_one_with_room_is_of_another_pool() {
    for card_gib in [1_u64, 24, 80] {
        let place = card_gib * 1024 / 8 * 9;
        let mut trace = expandable_recording(
            &[(0, 500), (place, place + 20)],
            &[
                (Action::SegmentMap, place + 20, 20),
                (Action::Alloc, place + 20, 20),
                (Action::FreeRequested, place, 20),
                (Action::FreeCompleted, place, 20),
                (Action::FreeRequested, place + 20, 20),
                (Action::FreeCompleted, place + 20, 20),
                (Action::SegmentUnmap, place, 40),
            ],
        );
        trace.initial.segments[1].pool = None;
        trace.initial.blocks[1].pool = None;
        let unknown = trace.events.iter_mut();
        unknown.for_each(|recorded| recorded.pool_known = false);
        verify(&trace);
    }
}

/// Two segments of 20 MiB of a private pool, each of which begins with a block of this many MiB.
fn private_recording(held_mib: [u64; 2], events: &[(Action, u64, u64)]) -> Trace {
    let pool = MempoolId(0, 5);
    let mut trace = recording_of(events);
    for recorded in &mut trace.events {
        recorded.event.pool = pool;
    }
    for (address, size_mib) in [HERE, THERE].into_iter().zip(held_mib) {
        let address = DeviceAddress(address);
        trace.initial.segments.push(InitialSegment {
            address,
            size: Bytes::mib(20),
            stream: Stream::DEFAULT,
            pool: Some(pool),
            is_large: true,
            is_expandable: false,
        });
        trace.initial.blocks.push(InitialBlock {
            address,
            size: Bytes::mib(size_mib),
            requested: Bytes::mib(size_mib),
            stream: Stream::DEFAULT,
            pool: Some(pool),
            status: BlockStatus::Allocated,
            stack: StackId::NONE,
        });
    }
    trace
}

/// Requests that restore a pool to a checkpoint take their old addresses and not the best fit.
#[test]
fn a_recording_may_begin_while_a_pool_is_restored() {
    let events = [
        (Action::Alloc, HERE + (8 << 20), 2),
        (Action::Alloc, HERE + (10 << 20), 10),
        (Action::FreeRequested, HERE + (10 << 20), 10),
        (Action::FreeCompleted, HERE + (10 << 20), 10),
        // The best fit.
        (Action::Alloc, THERE + (18 << 20), 2),
    ];
    verify(&private_recording([8, 18], &events));
}

/// Such a request takes the best fit, as any other does.
#[test]
fn one_request_up_to_a_segments_end_restores_nothing() {
    for (address, agrees) in [(HERE, true), (THERE, false)] {
        let events = [(Action::Alloc, address + (8 << 20), 12)];
        let trace = private_recording([8, 8], &events);
        let options = Options {
            verify: true,
            ..Options::default()
        };
        let outcome = Job::new(&trace).replay(&Config::default(), &options, &());
        let verified = outcome.unwrap().verified.unwrap();
        assert_eq!(verified.first_difference.is_none(), agrees, "{address:#x}");
    }
}

/// Under a limit, which the recording does not say, no address range was reserved for the refused request.
#[test]
fn a_segment_begins_where_it_was_recorded_after_a_request_was_refused() {
    let events = [
        (Action::OutOfMemory, 0, 100),
        (Action::SegmentMap, 0, 20),
        (Action::Alloc, 0, 15),
    ];
    verify(&expandable_recording(&[], &events));
}

/// One stream's memory grew elsewhere than in the replay, where another stream's memory is in its way.
#[test]
fn a_replay_that_breaks_off_says_what_it_did_otherwise_before() {
    let there = (THERE - HERE) >> 20;
    let events = [
        (Action::SegmentMap, there, 20),
        (Action::Alloc, there, 20),
        (Action::SegmentMap, there + 20, 20),
        (Action::Alloc, there + 20, 20),
    ];
    let mut trace = expandable_recording(&[(0, 20), (40, 60)], &events);
    trace.initial.segments[1].stream = Stream(7);
    trace.initial.blocks[1].stream = Stream(7);
    let options = Options {
        verify: true,
        ..Options::default()
    };
    let config = Config::Caching(trace.config_in_force().unwrap());
    let error = Job::new(&trace).replay(&config, &options, &());
    let error = error.unwrap_err().to_string();
    let (broke_off, difference) = error.split_once("; first difference: ").unwrap();
    assert!(
        broke_off.starts_with("the replay broke off at event 4: cuMemMap"),
        "{error}"
    );
    assert!(
        difference.starts_with("event 1: recorded alloc of 20971520 bytes"),
        "{error}"
    );
    assert!(!error.contains('\n'));
}

/// A request that waits for two blocks at once looked for a free block before either was free.
#[test]
fn what_one_wait_ends_is_free_after_the_request_has_looked() {
    const OTHER: Stream = Stream(5);
    const FOURTH: u64 = THERE + (1 << 30);
    let mut events = recording_of(&[
        (Action::SegmentAlloc, HERE, 28),
        (Action::Alloc, HERE, 28),
        (Action::SegmentAlloc, THERE, 40),
        (Action::Alloc, THERE, 40),
        (Action::SegmentAlloc, THIRD, 20),
        (Action::Alloc, THIRD, 3),
        (Action::FreeRequested, HERE, 28),
        (Action::FreeRequested, THIRD, 3),
        (Action::FreeCompleted, HERE, 28),
        (Action::FreeCompleted, THIRD, 3),
        (Action::SegmentFree, HERE, 28),
        (Action::SegmentFree, THIRD, 20),
        (Action::SegmentAlloc, FOURTH, 24),
        (Action::Alloc, FOURTH, 24),
    ]);
    for recorded in &mut events.events {
        if recorded.event.address == DeviceAddress(THIRD) {
            recorded.event.stream = OTHER;
        }
    }
    assert_eq!(verify(&events).retries, 1);
}

/// A refused request waited for all blocks that other streams used, and does not look at them afterwards.
#[test]
fn what_a_refused_request_waited_for_does_not_serve_it() {
    for conf in ["", "garbage_collection_threshold:0.5"] {
        let mut trace = recording_of(&[
            (Action::SegmentAlloc, HERE, 20),
            (Action::Alloc, HERE, 2),
            (Action::Alloc, HERE + (2 << 20), 2),
            (Action::Alloc, HERE + (4 << 20), 4),
            (Action::FreeRequested, HERE + (4 << 20), 4),
            (Action::FreeRequested, HERE + (2 << 20), 2),
            (Action::FreeCompleted, HERE + (2 << 20), 2),
            (Action::FreeCompleted, HERE + (4 << 20), 4),
            (Action::OutOfMemory, 0, 18),
            (Action::Alloc, HERE + (2 << 20), 3),
        ]);
        trace.settings.conf = conf.into();
        verify(&trace);
    }
}

/// While a graph is captured or a program allocates to a private pool, refused requests of other pools neither wait
/// nor release everything.
#[test]
fn what_stays_at_a_refusal_shows_a_capture() {
    let waiting = [
        (Action::SegmentAlloc, HERE, 20),
        (Action::Alloc, HERE, 2),
        (Action::Alloc, HERE + (2 << 20), 2),
        (Action::FreeRequested, HERE + (2 << 20), 2),
        (Action::OutOfMemory, 0, 100),
        (Action::FreeCompleted, HERE + (2 << 20), 2),
        (Action::Alloc, HERE + (2 << 20), 3),
    ];
    let vacant = [
        (Action::SegmentAlloc, HERE, 12),
        (Action::Alloc, HERE, 12),
        (Action::FreeRequested, HERE, 12),
        (Action::FreeCompleted, HERE, 12),
        (Action::OutOfMemory, 0, 100),
        (Action::Alloc, HERE, 12),
    ];
    let confs = [
        "",
        "garbage_collection_threshold:0.5",
        "max_split_size_mb:64",
    ];
    for conf in confs {
        for events in [&waiting[..], &vacant] {
            let mut trace = recording_of(events);
            trace.settings.conf = conf.into();
            assert_eq!(verify(&trace).retries, 0, "{conf}");
        }
    }
}

#[test]
fn pages_that_stay_at_a_refusal_show_a_capture() {
    let trace = expandable_recording(
        &[(0, 20)],
        &[
            (Action::SegmentMap, 20, 40),
            (Action::Alloc, 20, 30),
            (Action::Alloc, 50, 5),
            (Action::FreeRequested, 20, 30),
            (Action::FreeCompleted, 20, 30),
            // The first of two pages is free.
            (Action::OutOfMemory, 0, 100),
            (Action::Alloc, 20, 30),
        ],
    );
    assert_eq!(verify(&trace).retries, 0);
}

/// The block that was waited for lies elsewhere, so the release may still be a call of `empty_cache`.
#[test]
fn an_empty_cache_that_waits_is_the_programs() {
    let trace = recording_of(&[
        (Action::SegmentAlloc, HERE, 20),
        (Action::Alloc, HERE, 3),
        (Action::Alloc, HERE + (3 << 20), 3),
        (Action::SegmentAlloc, THERE, 30),
        (Action::Alloc, THERE, 30),
        (Action::FreeRequested, THERE, 30),
        (Action::FreeCompleted, THERE, 30),
        (Action::FreeRequested, HERE, 3),
        (Action::Alloc, HERE + (6 << 20), 2),
        (Action::FreeCompleted, HERE, 3),
        (Action::SegmentFree, THERE, 30),
        (Action::SegmentAlloc, THIRD, 30),
        (Action::Alloc, THIRD, 30),
    ]);
    assert_eq!(verify(&trace).retries, 0);
}

/// Pages in the middle of the block that was waited for were released: the request waited, and not a call of
/// `empty_cache`.
#[test]
fn pages_of_a_block_that_was_waited_for_are_the_requests() {
    let trace = expandable_recording(
        &[],
        &[
            (Action::SegmentMap, 0, 20),
            (Action::Alloc, 0, 10),
            (Action::SegmentMap, 20, 60),
            (Action::Alloc, 10, 65),
            (Action::FreeRequested, 10, 65),
            (Action::Alloc, 75, 3),
            (Action::FreeCompleted, 10, 65),
            (Action::SegmentUnmap, 20, 40),
            (Action::SegmentMap, 20, 40),
            (Action::Alloc, 10, 35),
        ],
    );
    assert_eq!(verify(&trace).retries, 1);
}

/// A recording with `max_split_size_mb`, whose program calls `empty_cache` once. Then 90 MiB are free, and beside a
/// block in use lies a freed block that other streams still use.
fn recording_with_a_use(mut then: Vec<Event>) -> Trace {
    let in_use = Event {
        stream: Stream(1),
        ..event(Action::Alloc, THIRD, 8)
    };
    let mut events = vec![
        event(Action::SegmentAlloc, THERE, 90),
        event(Action::Alloc, THERE, 90),
        event(Action::FreeRequested, THERE, 90),
        event(Action::FreeCompleted, THERE, 90),
        event(Action::SegmentFree, THERE, 90),
        Event {
            action: Action::SegmentAlloc,
            size: Bytes::mib(20),
            ..in_use
        },
        in_use,
        Event {
            address: in_use.address + in_use.size,
            ..in_use
        },
        event(Action::SegmentAlloc, THERE, 90),
        event(Action::Alloc, THERE, 90),
        event(Action::FreeRequested, THERE, 90),
        event(Action::FreeCompleted, THERE, 90),
        Event {
            action: Action::FreeRequested,
            ..in_use
        },
        event(Action::SegmentFree, THERE, 90),
    ];
    events.append(&mut then);
    let mut trace = recording(events);
    trace.settings.conf = "max_split_size_mb:64".into();
    trace
}

/// A call of `empty_cache` would have waited for them before it released anything.
#[test]
fn memory_that_goes_back_while_other_streams_use_some_is_the_requests() {
    let completed = Event {
        stream: Stream(1),
        ..event(Action::FreeCompleted, THIRD, 8)
    };
    // The release is enough for the first request and does not count as a retry. The second request waits for the
    // rest.
    let served = recording_with_a_use(vec![
        event(Action::SegmentAlloc, HERE, 66),
        event(Action::Alloc, HERE, 66),
        completed,
        event(Action::FreeRequested, HERE, 66),
        event(Action::FreeCompleted, HERE, 66),
    ]);
    assert_eq!(verify(&served).retries, 0);
    let waited = recording_with_a_use(vec![
        completed,
        event(Action::SegmentAlloc, HERE, 100),
        event(Action::Alloc, HERE, 100),
    ]);
    assert_eq!(verify(&waited).retries, 1);
}

/// The program calls `empty_cache` elsewhere. But the block that became free would have served the request if the
/// request had not looked before.
#[test]
fn a_request_that_what_became_free_would_have_served_had_begun() {
    let mut trace = recording_of(&[
        (Action::SegmentAlloc, HERE, 40),
        (Action::Alloc, HERE, 40),
        (Action::FreeRequested, HERE, 40),
        (Action::FreeCompleted, HERE, 40),
        (Action::Alloc, HERE, 12),
        (Action::SegmentAlloc, THERE, 30),
        (Action::Alloc, THERE, 30),
        (Action::FreeRequested, THERE, 30),
        (Action::FreeCompleted, THERE, 30),
        (Action::SegmentFree, THERE, 30),
        (Action::Alloc, HERE + (12 << 20), 12),
        (Action::Alloc, HERE + (24 << 20), 16),
        (Action::FreeRequested, HERE + (12 << 20), 12),
        (Action::SegmentAlloc, THERE, 28),
        (Action::Alloc, THERE, 28),
        (Action::FreeRequested, THERE, 28),
        (Action::FreeCompleted, THERE, 28),
        (Action::FreeCompleted, HERE + (12 << 20), 12),
        (Action::SegmentFree, THERE, 28),
        (Action::SegmentAlloc, THIRD, 12),
        (Action::Alloc, THIRD, 11),
    ]);
    for recorded in &mut trace.events {
        if recorded.event.address == DeviceAddress(THERE) {
            recorded.event.stream = Stream(1);
        }
    }
    assert_eq!(verify(&trace).retries, 1);
}

/// The program calls `empty_cache` elsewhere. But pages were mapped for the request before others were released.
#[test]
fn a_request_that_pages_were_mapped_for_had_begun() {
    let trace = expandable_recording(
        &[],
        &[
            (Action::SegmentMap, 0, 20),
            (Action::Alloc, 0, 10),
            (Action::SegmentMap, 20, 20),
            (Action::Alloc, 10, 30),
            (Action::SegmentMap, 40, 20),
            (Action::Alloc, 40, 20),
            (Action::FreeRequested, 10, 30),
            (Action::FreeCompleted, 10, 30),
            (Action::SegmentUnmap, 20, 20),
            (Action::Alloc, 10, 5),
            (Action::FreeRequested, 40, 20),
            (Action::FreeCompleted, 40, 20),
            (Action::SegmentMap, 20, 20),
            (Action::SegmentUnmap, 20, 40),
            (Action::SegmentMap, 20, 60),
            (Action::Alloc, 15, 60),
        ],
    );
    assert_eq!(verify(&trace).retries, 1);
}

/// Requests served from mapped memory were not checked against a limit. Without a limit, the card ran out at less
/// memory than they would have needed.
#[test]
fn a_request_that_had_begun_let_memory_go_whatever_others_were_granted() {
    let trace = expandable_recording(
        &[],
        &[
            (Action::SegmentMap, 0, 20),
            (Action::Alloc, 0, 10),
            (Action::SegmentMap, 20, 80),
            (Action::Alloc, 10, 85),
            (Action::FreeRequested, 10, 85),
            (Action::FreeCompleted, 10, 85),
            (Action::SegmentMap, 100, 20),
            (Action::Alloc, 10, 105),
            (Action::FreeRequested, 10, 105),
            (Action::FreeCompleted, 10, 105),
            (Action::SegmentUnmap, 20, 100),
            (Action::Alloc, 10, 5),
            (Action::SegmentMap, 20, 20),
            (Action::Alloc, 15, 25),
            (Action::SegmentMap, 40, 20),
            (Action::Alloc, 40, 20),
            (Action::FreeRequested, 15, 25),
            (Action::FreeCompleted, 15, 25),
            (Action::SegmentUnmap, 20, 20),
            (Action::Alloc, 15, 2),
            (Action::FreeRequested, 40, 20),
            (Action::FreeCompleted, 40, 20),
            (Action::SegmentMap, 20, 20),
            (Action::SegmentUnmap, 20, 40),
            (Action::SegmentMap, 20, 60),
            (Action::Alloc, 17, 60),
        ],
    );
    assert_eq!(verify(&trace).retries, 1);
}

/// Blocks that are not split are released for requests of their own pool. For requests of a private pool nothing
/// else is.
#[test]
fn unsplit_blocks_of_a_private_pool_go_back_for_its_requests() {
    let served = [
        (Action::SegmentAlloc, THIRD, 80),
        (Action::Alloc, THIRD, 80),
    ];
    let refused = [(Action::OutOfMemory, 0, 200)];
    for then in [&served[..], &refused] {
        let before = [
            (Action::SegmentAlloc, HERE, 100),
            (Action::Alloc, HERE, 100),
            (Action::FreeRequested, HERE, 100),
            (Action::FreeCompleted, HERE, 100),
            (Action::SegmentAlloc, THERE, 12),
            (Action::Alloc, THERE, 12),
            (Action::FreeRequested, THERE, 12),
            (Action::FreeCompleted, THERE, 12),
            (Action::SegmentFree, HERE, 100),
        ];
        let after = [(Action::Alloc, THERE, 12)];
        let mut trace = recording_of(&[&before, then, &after].concat());
        for recorded in &mut trace.events {
            recorded.event.pool = MempoolId(0, 5);
        }
        trace.settings.conf = "max_split_size_mb:64".into();
        assert_eq!(verify(&trace).retries, 0);
    }
}

/// The block would have been released for its own pool. Up to torch 2.14 a recording does not say the pool of a
/// refused request.
#[test]
fn a_refusal_beside_an_unsplit_block_that_stays_is_of_another_pool() {
    let mut trace = recording_of(&[
        (Action::SegmentAlloc, HERE, 100),
        (Action::Alloc, HERE, 100),
        (Action::FreeRequested, HERE, 100),
        (Action::FreeCompleted, HERE, 100),
        (Action::OutOfMemory, 0, 200),
        (Action::Alloc, HERE, 100),
        (Action::FreeRequested, HERE, 100),
        (Action::FreeCompleted, HERE, 100),
        (Action::SegmentFree, HERE, 100),
    ]);
    let unknown = trace.events.iter_mut();
    unknown.for_each(|recorded| recorded.pool_known = false);
    trace.settings.conf = "max_split_size_mb:64".into();
    verify(&trace);
}

#[test]
fn a_refusal_shows_the_recorded_card() {
    let trace = recording_of(&[
        (Action::SegmentAlloc, HERE, 20),
        (Action::Alloc, HERE, 20),
        // The event's address holds the bytes that the card had left.
        (Action::OutOfMemory, 5 << 20, 30),
    ]);
    let message = verify(&trace).oom_message.unwrap();
    let card = "GPU 0 has a total capacity of 25.00 MiB of which 5.00 MiB is free. ";
    assert!(message.contains(card), "{message}");
}

/// What `tide` unmaps in a private pool is released, also right before a request for as much.
#[test]
fn a_private_pool_that_ends_before_a_request_moves_no_frame() {
    let in_pool = |event: Event| Event {
        pool: MempoolId(1, 0),
        ..event
    };
    let mut trace = recording(vec![
        in_pool(event(Action::SegmentMap, HERE, 20)),
        in_pool(event(Action::Alloc, HERE, 20)),
        in_pool(event(Action::FreeRequested, HERE, 20)),
        in_pool(event(Action::FreeCompleted, HERE, 20)),
        in_pool(event(Action::SegmentUnmap, HERE, 20)),
        event(Action::SegmentMap, THERE, 20),
        event(Action::Alloc, THERE, 20),
    ]);
    trace.settings.strategy = "tide".into();
    for config in ["caching", "caching:expandable_segments:True", "tide"] {
        let config: Config = config.parse().unwrap();
        let outcome = Job::new(&trace).replay(&config, &Options::default(), &());
        assert_eq!(outcome.unwrap().peak_reserved_bytes, Bytes::mib(20));
    }
}

/// With `tide`, a release that leaves free memory was not `empty_cache`, and neither was one beside a block that another
/// stream still used.
#[test]
fn a_release_of_tide_that_leaves_some_is_no_empty_cache() {
    let next = HERE + (60 << 20);
    let freed = |address, mib| {
        [
            event(Action::FreeRequested, address, mib),
            event(Action::FreeCompleted, address, mib),
        ]
    };
    let begin = [
        event(Action::SegmentMap, HERE, 60),
        event(Action::Alloc, HERE, 60),
        event(Action::SegmentMap, next, 40),
        event(Action::Alloc, next, 40),
    ];
    let unmap = |address, mib| [event(Action::SegmentUnmap, address, mib)];
    // Pages of the next request hold no block yet.
    let request = [
        event(Action::SegmentMap, THERE, 4),
        event(Action::Alloc, THERE, 4),
    ];
    let all = [&freed(HERE, 60)[..], &freed(next, 40)].concat();
    let pending = [&freed(HERE, 60)[..], &freed(next, 40)[..1]].concat();
    for (frees, unmaps, is_empty_cache) in [
        (&all, [unmap(HERE, 60), unmap(next, 40)].concat(), true),
        (&all, unmap(HERE, 60).to_vec(), false),
        (&pending, unmap(HERE, 60).to_vec(), false),
    ] {
        let events = [&begin[..], frees, &unmaps, &request].concat();
        let mut trace = recording(events);
        trace.settings.strategy = "tide".into();
        let config: Config = "caching".parse().unwrap();
        let outcome = Job::new(&trace).replay(&config, &Options::default(), &());
        let released = outcome.unwrap().device_frees > 0;
        assert_eq!(released, is_empty_cache, "{unmaps:?}");
    }
}
