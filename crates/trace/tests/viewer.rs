//! Tests of what PyTorch's viewer requires of a snapshot beyond being a pickle: its JavaScript knows few opcodes,
//! and appends to a list by one call with all items as arguments.
//!
//! Not covered here: what the viewer draws. Its pages for these files were compared by hand in a browser.

use std::sync::Arc;

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot,
    Stream,
};
use lowtide_trace::{
    AllocatorSettings, Annotation, AnnotationStage, Frame, InitialState, NoteId, PausedSegment,
    RecordedStr, Snapshot, StackId, StackTable, Trace, TraceEvent, add_regions, read_from,
    write_pickle,
};

/// Returns the number of items of each append, as the viewer's stack machine would see them.
///
/// # Panics
///
/// At an opcode that the viewer does not know.
fn items_appended(pickle: &[u8]) -> Vec<usize> {
    let mut appended = Vec::new();
    let mut marks = Vec::new();
    let mut depth = 0;
    let mut offset = 0;
    while let Some(&opcode) = pickle.get(offset) {
        let argument = offset + 1;
        // The number of values that are pushed, and the bytes of the argument.
        let (pushed, argument_bytes) = match opcode {
            b'(' => {
                marks.push(depth);
                (0, 0)
            }
            b'e' => {
                let mark = marks.pop().expect("a mark before APPENDS");
                appended.push(depth - mark);
                depth = mark;
                (0, 0)
            }
            b'u' => {
                depth = marks.pop().expect("a mark before SETITEMS");
                (0, 0)
            }
            0x86 => {
                depth -= 2;
                (1, 0)
            }
            b']' | b'}' | 0x88 | 0x89 => (1, 0),
            b'K' | b'h' => (1, 1),
            b'M' => (1, 2),
            b'J' | b'j' => (1, 4),
            b'G' => (1, 8),
            0x8a => (1, 1 + usize::from(pickle[argument])),
            b'X' => {
                let count = pickle[argument..][..4].try_into().expect("4 bytes");
                (1, 4 + u32::from_le_bytes(count) as usize)
            }
            0x80 | b'q' => (0, 1),
            b'r' => (0, 4),
            b'.' => break,
            _ => panic!("the viewer does not know opcode {opcode:#x}"),
        };
        depth += pushed;
        offset = argument + argument_bytes;
    }
    assert_eq!((depth, offset + 1), (1, pickle.len()));
    appended
}

/// Returns a snapshot in which every list that grows with the job has at least `count` items.
fn long(count: usize) -> Snapshot {
    let address = |segment: usize| DeviceAddress(0x7f00_0000_0000 + ((segment as u64) << 21));
    let block = |index: usize, size, status| BlockSnapshot {
        address: address(0) + Bytes(index as u64 * 512),
        size,
        requested: size,
        status,
    };
    let size = Bytes(count as u64 * 512);
    let segment = |index| SegmentSnapshot {
        address: address(index),
        size,
        stream: Stream(0),
        pool: MempoolId::DEFAULT,
        is_large: false,
        is_expandable: false,
        blocks: vec![BlockSnapshot {
            address: address(index),
            ..block(0, size, BlockStatus::Inactive)
        }],
    };
    let mut segments: Vec<SegmentSnapshot> = (0..count).map(segment).collect();
    segments[0].blocks = (0..count)
        .map(|index| block(index, Bytes(512), BlockStatus::Allocated))
        .collect();
    let event = |action, address, size| TraceEvent {
        event: Event {
            action,
            pool: MempoolId::DEFAULT,
            address,
            size,
            stream: Stream(0),
        },
        time_us: 1_795_223_068_669_434,
        note: NoteId::NONE,
        stack: StackId::NONE,
        pool_known: true,
    };
    let mapped = segments
        .iter()
        .map(|segment| event(Action::SegmentAlloc, segment.address, segment.size));
    let allocated = segments[0]
        .blocks
        .iter()
        .map(|block| event(Action::Alloc, block.address, block.size));
    let paused = segments
        .iter()
        .map(|segment| event(Action::SegmentPaused, segment.address, segment.size));
    let annotation = Annotation {
        name: "step".into(),
        stage: AnnotationStage::Start,
        time_us: -5,
    };
    Snapshot {
        traces: vec![Trace {
            member: None,
            device: 0,
            events: mapped.chain(allocated).chain(paused).collect(),
            initial: InitialState::default(),
            segments,
            missed_events: 0,
            settings: AllocatorSettings::default(),
            stacks: Arc::new(StackTable::new()),
            annotations: vec![annotation; count],
            regions: [].into(),
            skipped_events: 0,
        }],
        ..Snapshot::default()
    }
}

#[test]
fn a_long_list_is_appended_in_parts() {
    let snapshot = long(2500);
    let mut pickle = Vec::new();
    write_pickle(&snapshot, &mut pickle).expect("memory takes everything");
    assert_eq!(items_appended(&pickle).iter().max(), Some(&1000));
    let again = read_from(&pickle[..]).expect("it is a recording");
    assert_eq!(again.traces[0].events, snapshot.traces[0].events);
    assert_eq!(again.traces[0].segments, snapshot.traces[0].segments);
    assert_eq!(again.traces[0].annotations, snapshot.traces[0].annotations);
}

#[test]
fn what_is_paused_is_added_in_the_same_few_opcodes() {
    let mut snapshot = long(1500);
    let events = &mut snapshot.traces[0].events;
    let paused = events.extract_if(.., |event| event.event.action.is_pause());
    let paused = paused.map(|pause| PausedSegment {
        device: 0,
        event: pause.event,
        time_us: pause.time_us,
        tag: "kv".into(),
    });
    let paused: Vec<_> = paused.collect();
    let mut pickle = Vec::new();
    write_pickle(&snapshot, &mut pickle).expect("memory takes everything");
    let before = items_appended(&pickle);
    assert!(add_regions(&mut pickle, &[], &paused));
    let after = items_appended(&pickle);
    assert_eq!(after[..before.len()], before);
    assert_eq!(after.iter().max(), Some(&1000));
    let again = read_from(&pickle[..]).expect("it is a recording");
    assert_eq!(
        again.traces[0].events.len(),
        snapshot.traces[0].events.len() + 1500
    );
}

#[test]
fn a_segment_says_what_allocated_it() {
    let mut snapshot = long(1);
    let trace = &mut snapshot.traces[0];
    let mut table = StackTable::new();
    let mut stack = |name| {
        table.intern([Frame {
            name: RecordedStr::from(name),
            filename: "train.py".into(),
            line: 1,
        }])
    };
    // Two allocations of the same address: the second one's stack counts.
    let mut before = trace.events[0];
    before.stack = stack("before");
    trace.events[0].stack = stack("at_last");
    let mut freed = before;
    freed.event.action = Action::SegmentFree;
    trace.events.splice(..0, [before, freed]);
    trace.stacks = Arc::new(table);
    let mut pickle = Vec::new();
    write_pickle(&snapshot, &mut pickle).expect("memory takes everything");
    let position = |text: &str| {
        let mut windows = pickle.windows(text.len());
        let position = windows.position(|window| window == text.as_bytes());
        position.expect("it was written")
    };
    let segments_end = position("device_traces");
    assert!(position("at_last") < segments_end);
    assert!(segments_end < position("before"));
}
