//! Tests of regions and their pauses: both formats keep them, other writers' snapshots get them, and a recording's
//! last events know them.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its data fails")]

use std::sync::Arc;

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot,
    Stream,
};
use lowtide_trace::{
    AllocatorSettings, NoteId, PausedSegment, RegionPool, Snapshot, StackId, StackTable,
    StreamWriter, Trace, TraceEvent, add_regions, read_from, write_compact, write_pickle,
};

const BASE: u64 = 0x7f00_0000_0000;
const POOL: MempoolId = MempoolId(2, 2);

/// Returns an event of segment `number`. Each segment has 2 MiB and is one block.
fn event(action: Action, number: u64) -> Event {
    Event {
        action,
        pool: POOL,
        address: DeviceAddress(BASE + (number << 21)),
        size: Bytes::mib(2),
        stream: Stream(7),
    }
}

fn at(time_us: i64, action: Action, number: u64) -> TraceEvent {
    TraceEvent {
        event: event(action, number),
        time_us,
        stack: StackId::NONE,
        pool_known: true,
        note: NoteId::NONE,
    }
}

/// Returns a segment with one block.
fn segment(number: u64) -> SegmentSnapshot {
    let Event {
        address,
        size,
        stream,
        pool,
        ..
    } = event(Action::SegmentAlloc, number);
    SegmentSnapshot {
        address,
        size,
        stream,
        pool,
        is_large: false,
        is_expandable: false,
        blocks: vec![BlockSnapshot {
            address,
            size,
            requested: size,
            status: BlockStatus::Allocated,
        }],
    }
}

/// Returns a recording that ends with segments 0, 1 and 2. Segment 0 existed before its first event.
fn recording(times: [i64; 4]) -> Trace {
    let came = [Action::SegmentAlloc, Action::Alloc];
    let events = [1, 2]
        .into_iter()
        .flat_map(|number| came.map(|action| (action, number)));
    let events = times.into_iter().zip(events);
    let mut trace = Trace::recovered(0, [], (0..3).map(segment).collect()).unwrap();
    trace.initial.segments.truncate(1);
    trace.initial.blocks.truncate(1);
    trace.events = events
        .map(|(time_us, (action, number))| at(time_us, action, number))
        .collect();
    trace
}

/// Returns events in order: the action, the segment's number, and the region's tag.
fn rows(trace: &Trace, events: &[TraceEvent]) -> Vec<(Action, u64, String)> {
    let rows = events.iter().map(|recorded| {
        let tag = trace.stacks.note(recorded.note).user_metadata;
        let Event {
            action, address, ..
        } = recorded.event;
        let number = (address.get() - BASE) >> 21;
        (action, number, tag.unwrap_or_default().raw().to_owned())
    });
    rows.collect()
}

fn pickle_of(trace: Trace) -> Vec<u8> {
    let mut pickle = Vec::new();
    write_pickle(&whole(vec![trace]), &mut pickle).unwrap();
    pickle
}

fn whole(traces: Vec<Trace>) -> Snapshot {
    Snapshot {
        traces,
        ..Snapshot::default()
    }
}

/// Returns a snapshot as read back from each format.
fn read_back(snapshot: &Snapshot) -> [Snapshot; 2] {
    let (mut pickle, mut compact) = (Vec::new(), Vec::new());
    write_pickle(snapshot, &mut pickle).unwrap();
    write_compact(snapshot, &mut compact).unwrap();
    [pickle, compact].map(|bytes| read_from(&*bytes).unwrap())
}

#[test]
fn each_format_keeps_what_was_paused_when() {
    let mut stacks = StackTable::new();
    let mut pause = |time_us, action, number, tag| {
        TraceEvent::with_metadata(event(action, number), time_us, tag, &mut stacks)
    };
    let mut trace = recording([10, 20, 30, 40]);
    trace.initial.paused = vec![pause(0, Action::SegmentPaused, 0, "weights")];
    let first = pause(5, Action::SegmentResumed, 0, "weights");
    let both = [0, 1].map(|number| pause(25, Action::SegmentPaused, number, "kv"));
    let last = pause(50, Action::SegmentResumed, 1, "kv");
    trace.events.insert(0, first);
    trace.events.splice(3..3, both);
    trace.events.push(last);
    let other = Trace {
        device: 3,
        ..recording([1, 2, 3, 4])
    };
    trace.stacks = Arc::new(stacks);
    let snapshot = whole(vec![trace, other]);
    for read in read_back(&snapshot) {
        assert_eq!(read.traces.len(), 2);
        for (read, written) in read.traces.iter().zip(&snapshot.traces) {
            assert_eq!(read.initial.segments, written.initial.segments);
            for (read_events, events) in [
                (&read.events, &written.events),
                (&read.initial.paused, &written.initial.paused),
            ] {
                assert_eq!(rows(read, read_events), rows(written, events));
                let plain = |events: &[TraceEvent]| -> Vec<(Event, i64)> {
                    { events.iter() }
                        .map(|event| (event.event, event.time_us))
                        .collect()
                };
                assert_eq!(plain(read_events), plain(events));
            }
        }
    }
}

#[test]
fn a_recording_without_pauses_says_nothing_of_them() {
    let pickle = pickle_of(recording([10, 20, 30, 40]));
    assert!(!pickle.windows(6).any(|text| text == b"pauses"));
}

/// Returns the recording after paused segments were added to its file. The file's writer did not know them.
fn added(times: [i64; 4], paused: &[(i64, u64)]) -> Trace {
    added_to(pickle_of(recording(times)), paused)
}

fn added_to(mut pickle: Vec<u8>, paused: &[(i64, u64)]) -> Trace {
    let paused = paused.iter().map(|&(time_us, number)| PausedSegment {
        device: 0,
        event: event(Action::SegmentPaused, number),
        time_us,
        tag: format!("tag {number}").into(),
    });
    assert!(add_regions(&mut pickle, &[], &paused.collect::<Vec<_>>()));
    read_from(&*pickle).unwrap().traces.remove(0)
}

#[test]
fn pauses_that_are_added_lie_where_they_were_by_their_times() {
    let paused = |number: u64| (Action::SegmentPaused, number, format!("tag {number}"));
    let place = |trace: &Trace, number: u64| {
        let read = rows(trace, &trace.events);
        read.iter()
            .position(|event| *event == paused(number))
            .unwrap()
    };
    // Between the segments, and long before the first event.
    let trace = added([10, 20, 30, 40], &[(25, 1), (5, 0)]);
    assert_eq!(place(&trace, 1), 2);
    assert_eq!(rows(&trace, &trace.initial.paused), [paused(0)]);
    assert_eq!(trace.events.len(), 5);
    // By a clock that is slow: not before the block existed.
    let trace = added([10, 20, 30, 40], &[(35, 2), (15, 1)]);
    assert_eq!((place(&trace, 1), place(&trace, 2)), (2, 5));
    // Without recorded times, the pause is at the end.
    let trace = added([0; 4], &[(35, 2), (15, 0)]);
    assert_eq!((place(&trace, 0), place(&trace, 2)), (4, 5));
    assert!(trace.initial.paused.is_empty());
    // More pauses than events, at one time.
    let many: Vec<_> = (0..50).map(|_| (25, 1)).collect();
    assert_eq!(added([10, 20, 30, 40], &many).events.len(), 5);
}

/// PyTorch's C++ code memoizes the completed dict.
#[test]
fn pauses_are_added_to_what_is_memoized() {
    let whole = pickle_of(recording([10, 20, 30, 40]));
    for memoized in [b"q\x07.".as_slice(), b"r\x07\x00\x00\x00."] {
        let pickle = [&whole[..whole.len() - 1], memoized].concat();
        let trace = added_to(pickle, &[(25, 1)]);
        let paused = (Action::SegmentPaused, 1, "tag 1".to_owned());
        assert_eq!(rows(&trace, &trace.events)[2], paused);
    }
}

#[test]
fn what_is_no_snapshot_by_pytorch_stays_as_it_is() {
    let whole = pickle_of(recording([10, 20, 30, 40]));
    let cut_off = &whole[..whole.len() - 1];
    for bytes in [
        b"".as_slice(),
        b"\x80\x02](.",
        b"\x80\x02}.",
        b"\x80\x04}(u.",
        cut_off,
    ] {
        let mut pickle = bytes.to_vec();
        assert!(!add_regions(&mut pickle, &[], &[]));
        assert_eq!(pickle, bytes);
    }
}

#[test]
fn damaged_pauses_are_reported() {
    let mut stacks = StackTable::new();
    let mut trace = recording([10, 20, 30, 40]);
    let pause = event(Action::SegmentPaused, 0);
    trace
        .events
        .push(TraceEvent::with_metadata(pause, 50, "kv", &mut stacks));
    trace.stacks = Arc::new(stacks);
    let pickle = pickle_of(trace);
    let replaced = |from: &[u8], to: &[u8]| {
        assert_eq!(from.len(), to.len());
        let start = pickle
            .windows(from.len())
            .rposition(|bytes| bytes == from)
            .unwrap();
        let mut damaged = pickle.clone();
        damaged[start..start + to.len()].copy_from_slice(to);
        read_from(&*damaged)
    };
    let error = replaced(b"event", b"other").unwrap_err();
    assert!(error.is_malformed(), "{error}");
    assert!(error.to_string().contains("entry 0 of `pauses`"), "{error}");
    // A pause without a count is placed by its time. An unknown action is an error.
    let read = replaced(b"entries_beforeq", b"entries_beforfq").unwrap();
    assert_eq!(read.traces[0].events.len(), 5);
    let read = replaced(b"segment_paused", b"segment_passed").unwrap_err();
    assert!(read.is_malformed());
}

#[test]
fn what_is_paused_is_memory() {
    let mut stacks = StackTable::new();
    let mut trace = recording([10, 20, 30, 40]);
    let mut pause = event(Action::SegmentPaused, 0);
    pause.address = DeviceAddress(0x1234_5678_9abc_def0);
    trace.initial.paused = vec![TraceEvent::with_metadata(pause, 0, "kv", &mut stacks)];
    trace.stacks = Arc::new(stacks);
    let mut pickle = pickle_of(trace);
    let address = pause.address.get().to_le_bytes();
    let at = pickle
        .windows(8)
        .position(|bytes| bytes == address)
        .unwrap();
    pickle[at..at + 8].copy_from_slice(&(1_u64 << 62).to_le_bytes());
    let error = read_from(&*pickle).unwrap_err().to_string();
    assert!(error.contains("no memory"), "{error}");
}

#[test]
fn the_last_events_begin_with_what_is_paused_then() {
    let mut stacks = StackTable::new();
    let mut pause = |time_us, action, number, tag| {
        TraceEvent::with_metadata(event(action, number), time_us, tag, &mut stacks)
    };
    let mut trace = recording([10, 20, 30, 40]);
    trace.initial.paused = vec![pause(0, Action::SegmentPaused, 0, "weights")];
    let both = [0, 1].map(|number| pause(25, Action::SegmentPaused, number, "kv"));
    trace
        .events
        .insert(0, pause(5, Action::SegmentResumed, 0, "weights"));
    trace.events.splice(3..3, both);
    trace
        .events
        .push(pause(50, Action::SegmentResumed, 1, "kv"));
    trace.stacks = Arc::new(stacks);
    let paused = |count: usize| {
        let last = trace.last_events(count).unwrap();
        assert_eq!(last.events, trace.events[trace.events.len() - count..]);
        let paused = rows(&last, &last.initial.paused).into_iter();
        paused
            .map(|(_, number, tag)| (number, tag))
            .collect::<Vec<_>>()
    };
    let expect = |paused: &[(u64, &str)]| -> Vec<(u64, String)> {
        { paused.iter() }
            .map(|&(number, tag)| (number, tag.to_owned()))
            .collect()
    };
    assert_eq!(paused(8), expect(&[(0, "weights")]));
    assert_eq!(paused(7), expect(&[]));
    assert_eq!(paused(4), expect(&[(0, "kv")]));
    assert_eq!(paused(3), expect(&[(0, "kv"), (1, "kv")]));
    assert_eq!(paused(0), expect(&[(0, "kv")]));
}

/// Paused memory may be released, all of it or a part.
#[test]
fn what_went_back_is_paused_no_more() {
    let mut stacks = StackTable::new();
    let whole = Event {
        size: Bytes::mib(6),
        ..event(Action::SegmentPaused, 0)
    };
    let mut trace = Trace::recovered(0, [], Vec::new()).unwrap();
    trace.initial.paused = vec![TraceEvent::with_metadata(whole, 0, "kv", &mut stacks)];
    trace.stacks = Arc::new(stacks);
    let left = |gone: Event| {
        let trace = Trace {
            events: vec![TraceEvent {
                event: gone,
                ..at(0, Action::Snapshot, 0)
            }],
            ..trace.clone()
        };
        let last = trace.last_events(0).unwrap();
        let left = last.initial.paused.iter().map(|left| {
            let Event { address, size, .. } = left.event;
            ((address.get() - BASE) >> 20, size.get() >> 20)
        });
        left.collect::<Vec<_>>()
    };
    assert_eq!(left(event(Action::SegmentUnmap, 1)), [(0, 2), (4, 2)]);
    assert_eq!(left(event(Action::SegmentUnmap, 2)), [(0, 4)]);
    assert_eq!(left(event(Action::SegmentUnmap, 3)), [(0, 6)]);
    let all = Event {
        action: Action::SegmentFree,
        ..whole
    };
    assert_eq!(left(all), []);
}

/// Returns the tags of regions, by the first number of each pool's id.
fn regions(trace: &Trace) -> Vec<(u64, &str)> {
    { trace.regions.iter() }
        .map(|(pool, tag)| (pool.0, tag.raw()))
        .collect()
}

#[test]
fn each_format_says_which_pool_is_which_region() {
    let mut trace = recording([10, 20, 30, 40]);
    trace.regions = [(POOL, "weights".into()), (MempoolId(3, 3), "kv".into())].into();
    let other = Trace {
        device: 3,
        regions: [(POOL, "kv".into())].into(),
        ..recording([1, 2, 3, 4])
    };
    for read in read_back(&whole(vec![trace, other])) {
        assert_eq!(regions(&read.traces[0]), [(2, "weights"), (3, "kv")]);
        assert_eq!(regions(&read.traces[1]), [(2, "kv")]);
        let last = read.traces[0].last_events(1).unwrap();
        assert_eq!(regions(&last), [(2, "weights"), (3, "kv")]);
    }
}

#[test]
fn a_recording_that_is_under_way_says_which_pool_is_which_region() {
    let stacks = StackTable::new();
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::new(&mut bytes).unwrap();
    for device in [0, 1] {
        let settings = AllocatorSettings::default();
        writer
            .begin_device(device, &settings, &[], &[], &stacks)
            .unwrap();
    }
    let came = [Action::SegmentAlloc, Action::Alloc];
    for (time_us, action) in [10, 20].into_iter().zip(came) {
        writer
            .push(0, &at(time_us, action, 0), &stacks, &stacks)
            .unwrap();
    }
    writer.push_region(0, POOL, "kv").unwrap();
    writer.push_region(1, POOL, "weights").unwrap();
    writer.flush().unwrap();
    drop(writer);
    let read = read_from(&*bytes).unwrap();
    assert!(read.is_cut_off);
    assert_eq!(read.traces[0].events.len(), 2);
    assert_eq!(regions(&read.traces[0]), [(2, "kv")]);
    assert_eq!(regions(&read.traces[1]), [(2, "weights")]);
}

#[test]
fn regions_are_added_to_what_another_wrote() {
    let mut pickle = pickle_of(recording([10, 20, 30, 40]));
    let pool = |device, pool| RegionPool {
        device,
        pool,
        tag: "kv".into(),
    };
    // A region of a device that the snapshot does not have is left out.
    let pools = [pool(0, POOL), pool(7, POOL)];
    assert!(add_regions(&mut pickle, &pools, &[]));
    let read = read_from(&*pickle).unwrap();
    assert_eq!(read.traces.len(), 1);
    assert_eq!(regions(&read.traces[0]), [(2, "kv")]);
}

/// lowtide's recordings had pauses before they had regions.
#[test]
fn a_pause_says_which_pool_is_which_region() {
    let trace = added([10, 20, 30, 40], &[(25, 1)]);
    assert_eq!(regions(&trace), [(2, "tag 1")]);
}

/// A file of some kilobytes may use one long tag for thousands of pools.
#[test]
fn regions_that_pauses_name_share_their_tags() {
    let mut stacks = StackTable::new();
    let mut trace = recording([10, 20, 30, 40]);
    for number in 0..3 {
        let pause = Event {
            pool: MempoolId(number, 1),
            ..event(Action::SegmentPaused, 0)
        };
        let tag = if number < 2 { "kv" } else { "weights" };
        let pause = TraceEvent::with_metadata(pause, 50, tag, &mut stacks);
        trace.events.push(pause);
    }
    trace.stacks = Arc::new(stacks);
    for read in read_back(&whole(vec![trace])) {
        let regions: Vec<_> = read.traces[0].regions.values().collect();
        assert_eq!(regions.len(), 3);
        assert!(std::ptr::eq(regions[0].raw(), regions[1].raw()));
        assert_eq!(regions[2].raw(), "weights");
    }
}

#[test]
fn a_region_without_a_tag_is_left_out() {
    let mut trace = recording([10, 20, 30, 40]);
    trace.regions = [(POOL, "kv".into())].into();
    let mut pickle = pickle_of(trace);
    let last = pickle
        .windows(12)
        .rposition(|bytes| bytes == b"region_pools");
    let key = pickle[last.unwrap()..]
        .windows(3)
        .position(|bytes| bytes == b"tag");
    pickle[last.unwrap() + key.unwrap()] = b'x';
    assert!(read_from(&*pickle).unwrap().traces[0].regions.is_empty());
}

#[test]
fn a_damaged_pool_of_a_region_is_reported() {
    let mut trace = recording([10, 20, 30, 40]);
    trace.regions = [(POOL, "kv".into()), (MempoolId(3, 3), "weights".into())].into();
    let mut pickle = pickle_of(trace);
    let pool = pickle
        .windows(5)
        .rposition(|bytes| bytes == b"K\x03K\x03\x86");
    // The pool's first number becomes a reference to the string written first.
    pickle[pool.unwrap()..][..2].copy_from_slice(b"h\0");
    assert_eq!(
        read_from(&*pickle).unwrap_err().to_string(),
        "entry 1 of `region_pools`: the identity of a pool is not a pair of numbers"
    );
}
