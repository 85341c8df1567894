//! Tests of pickles that Python made (`data/make.py`), in every protocol and with the dicts of old and new versions
//! of torch.

use std::path::PathBuf;

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, MempoolId, Stream};
use lowtide_trace::{
    AllocatorSettings, AnnotationStage, InitialBlock, InitialSegment, Note, Snapshot, StackId,
    Trace, TraceError, read, read_from,
};

const A: DeviceAddress = DeviceAddress(0x7f00_0000_0000);
const B: DeviceAddress = DeviceAddress(0x7f00_0020_0000);

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
        .with_extension("pickle")
}

fn data(name: &str) -> Snapshot {
    read(&path(name)).expect("the file is a recording")
}

fn only(name: &str) -> Trace {
    let mut snapshot = data(name);
    assert_eq!(snapshot.traces.len(), 1);
    snapshot.traces.remove(0)
}

fn stack(trace: &Trace, stack: StackId) -> Vec<(&str, &str, u32)> {
    trace
        .stacks
        .frames(stack)
        .map(|frame| (frame.name.raw(), frame.filename.raw(), frame.line))
        .collect()
}

#[track_caller]
fn check_one_segment(trace: &Trace, with_stacks: bool) {
    let actions: Vec<_> = trace
        .events
        .iter()
        .map(|event| event.event.action)
        .collect();
    use Action::{Alloc, Annotate, FreeCompleted, FreeRequested, OutOfMemory, SegmentAlloc};
    assert_eq!(
        actions,
        [
            SegmentAlloc,
            Alloc,
            Alloc,
            Annotate,
            FreeRequested,
            FreeCompleted,
            OutOfMemory,
            Alloc
        ]
    );
    let times: Vec<_> = trace.events.iter().map(|event| event.time_us).collect();
    assert_eq!(times, [100, 101, 102, 103, 104, 105, 106, 108]);
    assert_eq!(
        trace.events[6].event.address,
        DeviceAddress(4096),
        "the bytes free at the failure"
    );
    assert_eq!(trace.skipped_events, 1);
    let note = Note {
        compile_context: Some("N/A".into()),
        user_metadata: Some("".into()),
    };
    assert_eq!(trace.stacks.note(trace.events[1].note), note);
    assert_eq!(trace.events[1].pool(), Some(MempoolId::DEFAULT));
    assert_eq!(trace.events[6].pool(), None);
    let frames = [("forward", "model.py", 12), ("<module>", "train.py", 3)];
    if with_stacks {
        assert_eq!(stack(trace, trace.events[1].stack), frames);
        assert_eq!(stack(trace, trace.events[2].stack), frames[1..]);
        assert_eq!(
            trace.events[0].stack, trace.events[7].stack,
            "equal stacks have one number"
        );
    } else {
        assert!(
            trace
                .events
                .iter()
                .all(|event| event.stack == StackId::NONE)
        );
    }
    let segment = &trace.segments[0];
    assert_eq!(
        (segment.address, segment.size, segment.is_large),
        (A, Bytes::mib(2), false)
    );
    assert_eq!(segment.blocks[1].address, A + Bytes::kib(1));
    assert_eq!(segment.requested_bytes(), Bytes(1112));
    assert_eq!(trace.peak_live_bytes(), Bytes(1536));
    assert_eq!(trace.peak_requested_bytes(), Bytes(1512));
}

#[test]
fn every_protocol() {
    for protocol in 0..6 {
        let trace = only(&format!("protocol{protocol}"));
        check_one_segment(&trace, true);
        assert!(trace.initial.segments.is_empty() && trace.initial.blocks.is_empty());
        assert_eq!(
            trace.settings.conf.raw(),
            "max_split_size_mb:64,roundup_power2_divisions:4"
        );
        let settings = &trace.settings;
        assert_eq!(settings.max_split_size, Some(Some(Bytes::mib(64))));
        assert_eq!(settings.garbage_collection_threshold, Some(0.5));
        assert_eq!(settings.expandable_segments, Some(false));
        assert_eq!(
            trace.settings.roundup_power2_divisions,
            [(1, 4), (2, 4), (32768, 0)]
        );
        assert_eq!(trace.annotations.len(), 2);
        assert_eq!(trace.annotations[0].name.raw(), "step");
        assert_eq!(trace.annotations[1].stage, AnnotationStage::End);
    }
}

#[test]
fn no_stacks() {
    check_one_segment(&only("no_stacks"), false);
}

#[test]
fn devices() {
    let snapshot = data("devices");
    let devices: Vec<_> = snapshot.traces.iter().map(|trace| trace.device).collect();
    assert_eq!(devices, [0, 2], "device 1 did nothing");
    check_one_segment(&snapshot.traces[0], true);
    check_one_segment(&snapshot.traces[1], false);
}

#[test]
fn segments_only() {
    for name in ["segments_only", "segments_dict"] {
        let trace = only(name);
        assert!(trace.events.is_empty());
        assert_eq!(trace.segments.len(), 1);
        assert_eq!(trace.initial.segments[0].address, A);
        assert_eq!(trace.initial.blocks.len(), 2);
        assert_eq!(trace.initial.blocks[0].requested, Bytes(600));
        assert_eq!(
            stack(&trace, trace.initial.blocks[1].stack),
            [("<module>", "train.py", 3)]
        );
        assert_eq!(trace.peak_live_bytes(), Bytes(1536));
    }
}

#[test]
fn torch_2_1() {
    let trace = only("torch21");
    assert!(trace.initial.segments.is_empty() && trace.initial.blocks.is_empty());
    assert_eq!(trace.allocs(), 2);
    let blocks = &trace.segments[0].blocks;
    assert_eq!(blocks[0].requested, Bytes(600), "from the history");
    assert_eq!(
        (blocks[1].address, blocks[1].status),
        (A + Bytes(1024), BlockStatus::PendingFree)
    );
    assert_eq!(blocks[2].address, A + Bytes(1536));
    assert_eq!(trace.settings, AllocatorSettings::default());
}

#[test]
fn lost_beginning() {
    let trace = only("lost_beginning");
    let segment = InitialSegment {
        address: A,
        size: Bytes::mib(2),
        stream: Stream::DEFAULT,
        pool: Some(MempoolId::DEFAULT),
        is_large: false,
        is_expandable: false,
    };
    let freed = InitialSegment {
        address: B,
        size: Bytes::mib(20),
        pool: None,
        is_large: true,
        ..segment
    };
    assert_eq!(trace.initial.segments, [segment, freed]);
    let [stays, pending, goes] = trace.initial.blocks[..] else {
        panic!("three blocks were in use: {:?}", trace.initial.blocks);
    };
    assert_eq!(stack(&trace, stays.stack).len(), 2);
    let expected = InitialBlock {
        address: A,
        size: Bytes(1024),
        requested: Bytes(600),
        stream: Stream::DEFAULT,
        pool: Some(MempoolId::DEFAULT),
        status: BlockStatus::Allocated,
        stack: stays.stack,
    };
    assert_eq!(stays, expected);
    assert_eq!(
        (pending.address, pending.size, pending.requested),
        (A + Bytes(1024), Bytes(512), Bytes(300))
    );
    assert_eq!(pending.status, BlockStatus::PendingFree);
    assert_eq!(
        (goes.address, goes.size, goes.requested, goes.pool),
        (B, Bytes(1024), Bytes(700), None)
    );
    assert_eq!(goes.status, BlockStatus::Allocated);
    assert_eq!(trace.peak_live_bytes(), Bytes(1024 + 1024 + 512));
}

#[test]
fn pools_are_inferred_from_the_segment_of_the_time() {
    let trace = only("pools");
    let pools: Vec<_> = trace.events.iter().map(|event| event.pool()).collect();
    let last = Some(MempoolId(7, 0));
    assert_eq!(pools, [None, None, None, None, None, last, last, last]);
}

#[track_caller]
fn error(name: &str) -> TraceError {
    let error = read(&path(name)).expect_err("the file is not good");
    let line = error.to_string();
    assert!(
        line.contains(&format!("{name}.pickle: ")) && !line.contains('\n'),
        "{line}"
    );
    error
}

#[test]
fn code_is_refused() {
    for name in ["code2", "code4"] {
        let error = error(name);
        assert!(error.is_code());
        let line = error.to_string();
        assert!(
            line.contains("wants to run code (`posix.system`)"),
            "{line}"
        );
    }
}

#[test]
fn other_files_are_refused() {
    assert!(error("not_a_snapshot").is_not_a_recording());
    let missing = error("missing");
    assert!(missing.is_io(), "{missing}");
    assert!(read_from(&b""[..]).unwrap_err().is_truncated());
    assert!(read_from(&b"\x80\x09."[..]).unwrap_err().is_malformed());
}

#[test]
fn every_truncation_is_an_error() {
    for name in [
        "protocol0",
        "protocol2",
        "protocol4",
        "protocol5",
        "devices",
    ] {
        let whole = std::fs::read(path(name)).unwrap();
        for count in 0..whole.len() {
            let error = read_from(&whole[..count]).expect_err("part of a file is no recording");
            assert!(error.is_truncated(), "{name} cut at {count}: {error}");
        }
        read_from(&whole[..]).unwrap();
    }
}

/// Returns one byte at a time, as a pipe may.
struct Trickle<'b>(&'b [u8]);

impl std::io::Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = buffer.len().min(1);
        std::io::Read::read(&mut self.0, &mut buffer[..count])
    }
}

#[test]
fn slow_readers_make_no_difference() {
    let whole = std::fs::read(path("protocol4")).unwrap();
    check_one_segment(&read_from(Trickle(&whole)).unwrap().traces[0], true);
}

#[test]
fn compressed_files_are_recognized_by_their_contents() {
    use std::io::Write;
    let whole = std::fs::read(path("protocol4")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&whole).unwrap();
    let gzip = gzip.finish().unwrap();
    check_one_segment(&read_from(&gzip[..]).unwrap().traces[0], true);
    assert!(
        read_from(&gzip[..gzip.len() / 2])
            .unwrap_err()
            .is_truncated()
    );
    let mut damaged = gzip.clone();
    damaged[20] ^= 0x55;
    let error = read_from(&damaged[..]).unwrap_err();
    assert!(error.is_malformed() || error.is_truncated(), "{error}");
}

#[cfg(feature = "zstd")]
#[test]
fn zstd() {
    let whole = std::fs::read(path("protocol4")).unwrap();
    let zstd = zstd::encode_all(&whole[..], 3).unwrap();
    check_one_segment(&read_from(&zstd[..]).unwrap().traces[0], true);
    for count in 5..zstd.len() {
        assert!(
            read_from(&zstd[..count]).unwrap_err().is_truncated(),
            "cut at {count}"
        );
    }
}
