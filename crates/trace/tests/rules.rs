//! Tests of small rules of reading and writing, each alone.

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};
use lowtide_trace::{NoteId, Snapshot, StackId, Trace, TraceEvent, read_from, write_pickle};

/// Returns a recording of one event.
fn recording(action: Action) -> Trace {
    let event = Event {
        action,
        pool: MempoolId::DEFAULT,
        address: DeviceAddress(0x7f00_0000_0000),
        size: Bytes::mib(2),
        stream: Stream::DEFAULT,
    };
    let event = TraceEvent {
        event,
        time_us: 1,
        note: NoteId::NONE,
        stack: StackId::NONE,
        pool_known: true,
    };
    Trace {
        events: vec![event],
        ..Trace::default()
    }
}

#[test]
fn data_that_no_snapshot_holds_is_named() {
    let opcodes = [
        (0x8f, "EMPTY_SET"),
        (0x90, "ADDITEMS"),
        (0x91, "FROZENSET"),
        (0x96, "BYTEARRAY8"),
        (0x97, "NEXT_BUFFER"),
        (0x98, "READONLY_BUFFER"),
    ];
    for (opcode, name) in opcodes {
        let error = read_from(&[0x80, 5, opcode][..]).expect_err(name);
        assert!(error.to_string().contains(name), "{error}");
    }
}

/// PyTorch and its viewer have the free memory under a key of its own, not as an address.
#[test]
fn what_was_free_when_memory_ran_out_has_a_key_of_its_own() {
    let keys = |action| {
        let snapshot = Snapshot {
            traces: vec![recording(action)],
            ..Snapshot::default()
        };
        let mut pickle = Vec::new();
        write_pickle(&snapshot, &mut pickle).expect("memory takes everything");
        let has = |key: &[u8]| pickle.windows(key.len()).any(|bytes| bytes == key);
        (has(b"\x04\0\0\0addr"), has(b"\x0b\0\0\0device_free"))
    };
    assert_eq!(keys(Action::OutOfMemory), (false, true));
    assert_eq!(keys(Action::Alloc), (true, false));
}

#[test]
fn only_pauses_are_pauses() {
    assert!(!recording(Action::Alloc).has_pauses());
    assert!(recording(Action::SegmentPaused).has_pauses());
    assert!(recording(Action::SegmentResumed).has_pauses());
    let mut paused_before = recording(Action::Alloc);
    let event = paused_before.events[0];
    paused_before.initial.paused.push(event);
    assert!(paused_before.has_pauses());
}
