//! Changes to a snapshot that give it numbers and texts that no job has, and the comparison of a changed snapshot
//! with itself after writing and reading.

use std::sync::Arc;

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};
use lowtide_trace::{
    AllocatorSettings, Note, NoteId, RecordedStr, Snapshot, StackId, StackTable, Trace, TraceError,
    TraceEvent,
};
use proptest::prelude::*;

/// A change to a snapshot. The numbers choose where.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Size(usize, u64),
    Address(usize, u64),
    Stream(usize, u64),
    Pool(usize, u64, bool),
    Time(usize, i64),
    Action(usize, usize),
    SegmentSize(usize, u64),
    BlockRequest(usize, u64),
    Paused(u64, u64),
    Device(u32),
    MaxSplitSize(u64),
    Threshold(f64),
    Divisions(Vec<(u64, u64)>),
    Conf(String),
    Mark(String),
    Tag(u64, String),
    Note(usize, String, Option<String>),
}

/// A number at an edge of some range, or any number.
fn number() -> impl Strategy<Value = u64> {
    const EDGES: [u64; 8] = [0, 1, 512, 1 << 47, 1 << 60, 1 << 61, 1 << 62, 1 << 63];
    let edge = proptest::sample::select(&EDGES[..]).prop_flat_map(|edge: u64| {
        prop_oneof![Just(edge), Just(edge.wrapping_sub(1)), Just(edge + 1)]
    });
    prop_oneof![edge, any::<u64>(), 0..100_000_u64]
}

/// A text that is short, empty, long, or not one line.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        Just(String::new()),
        Just("\0\r\n\u{1b}[2J\u{202e}".to_owned()),
        Just("long ".repeat(20_000)),
        Just("max_split_size_mb:18446744073709551615,free_block_order:address".to_owned()),
    ]
}

pub(crate) fn change() -> impl Strategy<Value = Change> {
    let at = any::<usize>;
    prop_oneof![
        (at(), number()).prop_map(|(at, size)| Change::Size(at, size)),
        (at(), number()).prop_map(|(at, address)| Change::Address(at, address)),
        (at(), number()).prop_map(|(at, stream)| Change::Stream(at, stream)),
        (at(), number(), any::<bool>()).prop_map(|(at, pool, known)| Change::Pool(at, pool, known)),
        (at(), any::<i64>()).prop_map(|(at, time_us)| Change::Time(at, time_us)),
        (at(), at()).prop_map(|(at, action)| Change::Action(at, action)),
        (at(), number()).prop_map(|(at, size)| Change::SegmentSize(at, size)),
        (at(), number()).prop_map(|(at, size)| Change::BlockRequest(at, size)),
        (number(), number()).prop_map(|(address, size)| Change::Paused(address, size)),
        prop_oneof![0..130_u32, any::<u32>()].prop_map(Change::Device),
        // In lowtide's own format, the largest number means unlimited.
        number().prop_map(|size| Change::MaxSplitSize(size.min(u64::MAX - 1))),
        any::<f64>().prop_map(Change::Threshold),
        proptest::collection::vec((number(), number()), 0..70).prop_map(Change::Divisions),
        text().prop_map(Change::Conf),
        text().prop_map(Change::Mark),
        (number(), text()).prop_map(|(pool, tag)| Change::Tag(pool, tag)),
        (at(), text(), proptest::option::of(text()))
            .prop_map(|(at, context, metadata)| Change::Note(at, context, metadata)),
    ]
}

/// Makes a change. A change of settings applies to all devices.
pub(crate) fn change_snapshot(snapshot: &mut Snapshot, change: &Change) {
    let set = |snapshot: &mut Snapshot, set: &dyn Fn(&mut AllocatorSettings)| {
        let traces = snapshot.traces.iter_mut();
        traces.for_each(|trace| set(&mut trace.settings));
    };
    match change {
        Change::MaxSplitSize(size) => set(snapshot, &|settings| {
            settings.max_split_size = Some(Some(Bytes(*size)));
        }),
        Change::Threshold(threshold) => set(snapshot, &|settings| {
            settings.garbage_collection_threshold = Some(*threshold);
        }),
        Change::Divisions(divisions) => set(snapshot, &|settings| {
            let mut divisions = divisions.clone();
            divisions.sort_unstable();
            settings.roundup_power2_divisions = divisions;
        }),
        Change::Conf(conf) => set(snapshot, &|settings| settings.conf = conf.as_str().into()),
        _ => {
            if let Some(trace) = snapshot.traces.last_mut() {
                change_trace(trace, change);
            }
        }
    }
}

fn change_trace(trace: &mut Trace, change: &Change) {
    match change {
        Change::Device(device) => trace.device = *device,
        Change::Mark(name) => trace.annotations[0].name = name.as_str().into(),
        Change::Tag(pool, tag) => {
            let pool = MempoolId(*pool, 1);
            trace.regions.insert(pool, tag.as_str().into());
        }
        Change::Paused(address, size) => trace.initial.paused.push(TraceEvent {
            event: Event {
                action: Action::SegmentPaused,
                pool: MempoolId(4, 2),
                address: DeviceAddress(*address),
                size: Bytes(*size),
                stream: Stream::DEFAULT,
            },
            time_us: 0,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        }),
        Change::SegmentSize(at, size) => {
            let count = trace.segments.len().max(1);
            if let Some(segment) = trace.segments.get_mut(at % count) {
                segment.size = Bytes(*size);
            }
        }
        Change::BlockRequest(at, size) => {
            let blocks = trace.segments.iter_mut();
            let mut blocks: Vec<_> = blocks.flat_map(|segment| &mut segment.blocks).collect();
            let count = blocks.len().max(1);
            if let Some(block) = blocks.get_mut(at % count) {
                block.requested = Bytes(*size);
            }
        }
        _ => change_event(trace, change),
    }
}

fn change_event(trace: &mut Trace, change: &Change) {
    let count = trace.events.len().max(1);
    let mut change_at = |at: &usize, change: &dyn Fn(&mut TraceEvent)| {
        trace
            .events
            .get_mut(at % count)
            .into_iter()
            .for_each(change);
    };
    match change {
        Change::Size(at, size) => change_at(at, &|event| event.event.size = Bytes(*size)),
        Change::Address(at, address) => change_at(at, &|event| {
            event.event.address = DeviceAddress(*address);
        }),
        Change::Stream(at, stream) => change_at(at, &|event| event.event.stream = Stream(*stream)),
        Change::Time(at, time_us) => change_at(at, &|event| event.time_us = *time_us),
        Change::Action(at, action) => change_at(at, &|event| {
            event.event.action = Action::ALL[action % Action::ALL.len()];
        }),
        Change::Pool(at, pool, is_known) => change_at(at, &|event| {
            event.pool_known = *is_known;
            event.event.pool = MempoolId(if *is_known { *pool } else { 0 }, 0);
        }),
        Change::Note(at, context, metadata) => {
            let mut stacks = StackTable::clone(&trace.stacks);
            let note = stacks.intern_note(Note {
                compile_context: Some(context.as_str().into()),
                user_metadata: metadata.as_deref().map(RecordedStr::from),
            });
            change_at(at, &|event| event.note = note);
            trace.stacks = Arc::new(stacks);
        }
        _ => unreachable!("those are of the trace"),
    }
}

/// Asserts that a written snapshot reads back as the same, except for inferred contents: pools, the memory before
/// the first event, and regions that only pauses name.
#[track_caller]
pub(crate) fn assert_says_the_same(read: Result<Snapshot, TraceError>, written: &Snapshot) {
    let read = read.expect("what is written can be read");
    assert_eq!(read.traces.len(), written.traces.len());
    for (one, other) in written.traces.iter().zip(&read.traces) {
        assert_eq!(one.device, other.device);
        assert_eq!(one.events.len(), other.events.len());
        for (event, same) in one.events.iter().zip(&other.events) {
            assert!(event.pool().is_none() || event.pool() == same.pool());
            let mut same_event = same.event;
            same_event.pool = event.event.pool;
            assert_eq!((event.event, event.time_us), (same_event, same.time_us));
            assert_eq!(one.stacks.note(event.note), other.stacks.note(same.note));
        }
        // Segments of a later moment than the last event are read as of the last event.
        assert!(other.missed_events > 0 || one.segments == other.segments);
        assert_eq!(one.initial.paused.len(), other.initial.paused.len());
        assert_eq!(one.annotations, other.annotations);
        let known = |(pool, tag)| assert_eq!(other.regions.get(pool), Some(tag));
        one.regions.iter().for_each(known);
        let bits = |trace: &Trace| {
            let threshold = trace.settings.garbage_collection_threshold;
            threshold.map(f64::to_bits)
        };
        assert_eq!(bits(one), bits(other));
        let others = |trace: &Trace| AllocatorSettings {
            garbage_collection_threshold: None,
            ..trace.settings.clone()
        };
        assert_eq!(others(one), others(other));
    }
}
