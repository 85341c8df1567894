use lowtide_trace::{NoteId, StackId, TraceEvent};

use super::*;

/// An event at a place of its own, of this many MiB in a pool. The recording names the pool if it is private.
fn event(action: Action, place: u64, mib: u64, pool: MempoolId) -> TraceEvent {
    let event = Event {
        action,
        pool,
        address: DeviceAddress(place << 32),
        size: Bytes::mib(mib),
        stream: Stream::DEFAULT,
    };
    TraceEvent {
        event,
        time_us: 0,
        stack: StackId::NONE,
        pool_known: !pool.is_default(),
        note: NoteId::NONE,
    }
}

/// The events of a segment that is allocated, used and freed.
fn used(place: u64, mib: u64, pool: MempoolId) -> [TraceEvent; 3] {
    let actions = [Action::SegmentAlloc, Action::Alloc, Action::FreeCompleted];
    actions.map(|action| event(action, place, mib, pool))
}

fn trace_of(events: impl Iterator<Item = TraceEvent>) -> Trace {
    Trace {
        events: events.collect(),
        ..Trace::default()
    }
}

/// A recording of this many segments of one stream; one releases pages.
fn recording(segments: u64) -> Trace {
    let pages = |action, place| event(action, place, 20, MempoolId::DEFAULT);
    let maps = (1..=segments).map(|place| pages(Action::SegmentMap, place));
    trace_of(maps.chain([pages(Action::SegmentUnmap, 1)]))
}

#[test]
fn segments_of_one_stream_that_grow_are_of_different_pools() {
    let inferred = infer(&recording(40), &Initial::default(), Card::default()).unwrap();
    let pools: BTreeSet<MempoolId> = inferred.pools.unwrap().events.into_iter().collect();
    assert_eq!(pools.len(), 40);
}

/// Returns the pools of `events`, each of these MiB in one stream. Before the first event, pages are mapped in
/// `ranges`, from and to these MiB. They are free, except for 1 MiB in each range of 10 MiB. Ranges below 20 MiB
/// are for small requests, and those of 2 MiB still exist at the end.
fn pools_behind_holes(
    ranges: &[(u64, u64)],
    events: &[(Action, u64, u64)],
) -> Option<Vec<MempoolId>> {
    let mut trace = recording(0);
    let template = trace.events[0];
    let events = events.iter().map(|&(action, start_mib, size_mib)| {
        let (address, size) = (DeviceAddress(start_mib << 20), Bytes::mib(size_mib));
        let event = Event {
            action,
            address,
            size,
            ..template.event
        };
        TraceEvent { event, ..template }
    });
    trace.events = events.collect();
    let ranges = ranges
        .iter()
        .map(|&(start_mib, end_mib)| lowtide_trace::InitialSegment {
            address: DeviceAddress(start_mib << 20),
            size: Bytes::mib(end_mib - start_mib),
            stream: Stream::DEFAULT,
            pool: (end_mib - start_mib == 2).then_some(MempoolId(0, 9)),
            is_large: end_mib - start_mib >= 20,
            is_expandable: true,
        });
    trace.initial.segments = ranges.collect();
    let with_block = trace.initial.segments.iter();
    let with_block = with_block.filter(|segment| segment.size == Bytes::mib(10));
    let blocks = with_block.map(|segment| lowtide_trace::InitialBlock {
        address: segment.address,
        size: Bytes::mib(1),
        requested: Bytes::mib(1),
        stream: Stream::DEFAULT,
        pool: None,
        status: BlockStatus::Allocated,
        stack: StackId::NONE,
    });
    trace.initial.blocks = blocks.collect();
    let card = Card::new(&trace, config_of(&trace).large_segment_size);
    let inferred = infer(&trace, &Initial::new(&trace), card)?;
    Some(inferred.pools?.events)
}

/// A snapshot lists each run of mapped pages, and blocks lie across what were several runs.
#[test]
fn runs_of_pages_between_which_memory_is_mapped_are_one_segment() {
    let mapped = [(Action::SegmentMap, 140, 40)];
    // The first pages of the second run were released before.
    let replaced = [
        (Action::SegmentUnmap, 180, 20),
        (Action::SegmentMap, 140, 60),
    ];
    for beginning in [&mapped[..], &replaced] {
        let across = [
            (Action::Alloc, 100, 150),
            (Action::Alloc, 250, 40),
            (Action::FreeCompleted, 100, 150),
            (Action::SegmentUnmap, 100, 140),
        ];
        let across = [beginning, &across].concat();
        let pools = pools_behind_holes(&[(100, 140), (180, 300)], &across);
        assert_eq!(pools, Some(vec![MempoolId::DEFAULT; across.len()]));
    }
}

#[test]
fn pages_right_before_others_may_be_of_the_same_segment() {
    let before = [
        (Action::SegmentMap, 100, 20),
        (Action::SegmentUnmap, 100, 20),
        (Action::SegmentUnmap, 180, 120),
    ];
    let pools = pools_behind_holes(&[(180, 300)], &before);
    assert_eq!(pools, Some(vec![MempoolId::DEFAULT; 3]));
    // Behind pages of another kind, or this far away, they are of another segment.
    let pools = pools_behind_holes(&[(160, 162), (180, 300)], &before).unwrap();
    assert_ne!(pools[0], pools[2]);
    let pools = pools_behind_holes(&[(100 << 10, 101 << 10)], &before[..2]).unwrap();
    assert!(!pools[0].is_default());
}

/// Returns the pools of these events: all ranges are allocated; then, `times` times, `by_mib` are mapped behind the
/// last for a request and released.
fn pools_when_grown(ranges: &[(u64, u64)], by_mib: u64, times: usize) -> Option<Vec<MempoolId>> {
    let mut events: Vec<(Action, u64, u64)> = ranges
        .iter()
        .map(|&(start_mib, end_mib)| (Action::Alloc, start_mib, end_mib - start_mib))
        .collect();
    let end_mib = ranges.last()?.1;
    let grown = [
        Action::SegmentMap,
        Action::Alloc,
        Action::FreeCompleted,
        Action::SegmentUnmap,
    ];
    let grown = grown.map(|action| (action, end_mib, by_mib));
    events.extend(std::iter::repeat_n(grown, times).flatten());
    pools_behind_holes(ranges, &events)
}

/// On a small card, segments of different pools are as near to each other as runs of pages of one.
#[test]
fn what_grows_where_there_is_room_below_is_of_another_pool() {
    let is_apart = |ranges: &[(u64, u64)], by_mib| {
        let pools = pools_when_grown(ranges, by_mib, 1).unwrap();
        pools.first() != pools.last()
    };
    let runs = [(0, 60), (100, 140), (160, 180), (200, 300)];
    assert!(!is_apart(&runs, 60));
    assert!(is_apart(&runs, 40));
    assert!(is_apart(&runs, 20));
}

/// A segment is one range, whatever its pool.
#[test]
fn runs_between_which_there_is_another_segment_are_of_different_pools() {
    let is_apart = |ranges: &[(u64, u64)]| {
        let back = |&(start_mib, end_mib): &(u64, u64)| {
            (Action::SegmentUnmap, start_mib, end_mib - start_mib)
        };
        let ends = [&ranges[0], ranges.last().unwrap()];
        let pools = pools_behind_holes(ranges, &ends.map(back)).unwrap();
        pools.first() != pools.last()
    };
    assert!(!is_apart(&[(0, 60), (80, 100), (120, 140)]));
    assert!(is_apart(&[(0, 60), (80, 82), (120, 140)]));
    // For released pages, only their blocks show for certain whether they were for small requests.
    assert!(!is_apart(&[(0, 60), (80, 84), (120, 140)]));
    assert!(is_apart(&[(0, 60), (80, 90), (120, 140)]));
    // A segment for small requests that came later.
    let events = [
        (Action::Alloc, 120, 20),
        (Action::Alloc, 0, 60),
        (Action::SegmentMap, 80, 2),
        (Action::SegmentMap, 140, 60),
        (Action::Alloc, 140, 60),
        (Action::FreeCompleted, 140, 60),
        (Action::SegmentUnmap, 140, 60),
    ];
    let pools = pools_behind_holes(&[(0, 60), (120, 140)], &events).unwrap();
    assert_ne!(pools[1], pools[3]);
}

/// Each time the last run grows, every other run is examined.
#[test]
fn what_grows_above_many_for_too_long_is_not_inferred() {
    let runs: Vec<(u64, u64)> = (0..2_000).map(|run| (run * 60, run * 60 + 20)).collect();
    assert!(pools_when_grown(&runs, 60, 1_000).is_some());
    assert!(pools_when_grown(&runs, 60, 4_500).is_none());
}

/// This many segments of known pools, which stay, and as many that are allocated, used and released.
fn beside_pools(count: u64) -> Trace {
    let held = (1..=count).flat_map(|place| used(place, 20, MempoolId(0, place)));
    let gone = (count + 1..=2 * count).flat_map(|place| {
        let back = event(Action::SegmentFree, place, 20, MempoolId::DEFAULT);
        used(place, 20, MempoolId::DEFAULT)
            .into_iter()
            .chain([back])
    });
    trace_of(held.chain(gone))
}

/// Thousands of pools keep their segments while segments of another are released, in call after call.
#[test]
fn what_goes_beside_many_pools_is_inferred() {
    let inferred = infer(&beside_pools(1_500), &Initial::default(), Card::default());
    let pools = inferred.unwrap().pools.unwrap();
    assert!(pools.events[4_500..].iter().all(|pool| pool.is_default()));
}

/// Some segments came where others were, and their blocks are not there to be separated.
#[test]
fn segments_that_came_where_others_were_show_nothing() {
    let used = |place, mib| used(place, mib, MempoolId::DEFAULT);
    let back = |place, mib| [event(Action::SegmentFree, place, mib, MempoolId::DEFAULT)];
    let twice = used(1, 40)
        .into_iter()
        .chain(used(1, 60))
        .chain(back(1, 60));
    let events = twice.chain(used(2, 30)).chain(back(2, 30));
    assert!(infer(&trace_of(events), &Initial::default(), Card::default()).is_none());
}

#[test]
fn what_takes_too_long_to_look_for_is_not() {
    assert!(infer(&beside_pools(3_000), &Initial::default(), Card::default()).is_none());
}

#[test]
fn too_many_to_tell_apart_are_not() {
    assert!(infer(&recording(1_450), &Initial::default(), Card::default()).is_none());
    // Runs of either kind between runs of the other, before the first event.
    let ranges = (0..3_000).map(|place| (place * 40, place * 40 + 2 + place % 2 * 18));
    let ranges: Vec<(u64, u64)> = ranges.collect();
    assert_eq!(
        pools_behind_holes(&ranges, &[(Action::SegmentUnmap, 40, 20)]),
        None
    );
}
