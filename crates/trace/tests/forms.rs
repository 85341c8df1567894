//! Tests of the formats that recordings come in, made by Python (`data/make.py`) and PyTorch (`data/record.py`).

use std::fs;
use std::path::PathBuf;

use lowtide_core::{Action, Bytes};
use lowtide_trace::{
    Snapshot, StackId, Trace, TraceError, TraceEvent, read, read_from, write_compact, write_pickle,
};

/// The PyTorch releases whose files are tested.
const RELEASES: [&str; 3] = ["torch2.8", "torch2.11", "torch2.15"];

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

fn data(name: &str) -> Snapshot {
    read(&path(name)).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn error(name: &str) -> TraceError {
    let error = read(&path(name)).expect_err("it cannot be read");
    let line = error.to_string();
    assert!(line.contains(name) && !line.contains('\n'), "{line}");
    error
}

#[track_caller]
fn assert_same(name: &str, one: &Snapshot, other: &Snapshot) {
    assert_eq!(one.traces.len(), other.traces.len(), "{name}");
    assert_eq!(one.host.len(), other.host.len(), "{name}");
    let ones = one.traces.iter().chain(&one.host);
    for (one, other) in ones.zip(other.traces.iter().chain(&other.host)) {
        assert_same_trace(name, one, other);
    }
}

#[track_caller]
fn assert_same_trace(name: &str, one: &Trace, other: &Trace) {
    assert_eq!(one.device, other.device, "{name}");
    // Equal stacks may have different numbers. They are compared below.
    let events = |trace: &Trace| -> Vec<TraceEvent> {
        let stack = StackId::NONE;
        let events = trace.events.iter();
        events.map(|&event| TraceEvent { stack, ..event }).collect()
    };
    assert_eq!(events(one), events(other), "{name}");
    assert_eq!(one.segments, other.segments, "{name}");
    assert_eq!(one.initial, other.initial, "{name}");
    assert_eq!(one.settings, other.settings, "{name}");
    assert_eq!(one.annotations, other.annotations, "{name}");
    let stack_of_each = |trace: &Trace| -> Vec<Vec<String>> {
        let stacks = trace
            .events
            .iter()
            .map(|event| trace.stacks.frames(event.stack));
        let texts = stacks.map(|frames| frames.map(|frame| format!("{frame:?}")).collect());
        texts.collect()
    };
    assert_eq!(stack_of_each(one), stack_of_each(other), "{name}");
}

#[test]
fn xz_and_bzip2() {
    let plain = data("protocol4.pickle");
    for name in ["protocol4.pickle.xz", "protocol4.pickle.bz2"] {
        assert_same(name, &data(name), &plain);
        let whole = fs::read(path(name)).unwrap();
        for count in 6..whole.len() {
            let error = read_from(&whole[..count]);
            // The last bytes of an xz file are checksums of the data before.
            let Err(error) = error else { continue };
            assert!(error.is_truncated(), "{name} cut at {count}: {error}");
        }
        let half = read_from(&whole[..whole.len() / 2]).unwrap_err();
        assert!(half.is_truncated(), "{half}");
        let mut damaged = whole.clone();
        damaged[whole.len() / 2] ^= 0x55;
        let error = read_from(&damaged[..]).unwrap_err();
        assert!(error.is_malformed(), "{name}: {error}");
    }
}

#[test]
fn what_pytorch_and_its_users_write() {
    for release in RELEASES {
        let of = |form| format!("{release}.{form}");
        let plain = data(&of("pickle"));
        assert_eq!(plain.traces.len(), 1, "{release}: one card was used");
        assert_eq!(
            plain.traces[0].allocs(),
            6,
            "{release}: a batch and a result in each step"
        );
        for form in ["json", "page.html", "pt", "added.pickle"] {
            assert_same(&of(form), &data(&of(form)), &plain);
        }
        let old = error(&of("old.pt"));
        assert!(old.is_not_a_recording());
        assert!(
            old.to_string()
                .ends_with("load it in Python and write it by pickle.dump")
        );
    }
}

#[test]
fn other_containers_and_the_numbers_of_numpy() {
    let plain = data("protocol4.pickle");
    for name in ["containers2", "containers4", "numbers2", "numbers4"] {
        assert_same(name, &data(&format!("{name}.pickle")), &plain);
    }
    // numpy 1 uses another name for the same function.
    let mut numpy1 = fs::read(path("numbers2.pickle")).unwrap();
    let new = b"numpy._core.multiarray\n";
    let start = { numpy1.windows(new.len()) }.position(|window| window == new);
    numpy1.remove(start.unwrap() + b"numpy.".len());
    assert_same("numpy 1", &read_from(&numpy1[..]).unwrap(), &plain);
}

#[test]
fn what_python_would_call_is_refused_by_its_name() {
    let check = |pickle: &[u8], name: &str| {
        let error = read_from(pickle).unwrap_err();
        assert!(error.is_code(), "{error}");
        let line = error.to_string();
        assert!(
            line.contains(&format!("wants to run code (`{name}`)")),
            "{line}"
        );
    };
    check(b"\x80\x02cos\nsystem\n.", "os.system");
    check(
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        "builtins.eval",
    );
    check(
        b"\x80\x02cos\x1b[31m\nsys\x07tem\n.",
        "os\\u{1b}[31m.sys\\u{7}tem",
    );
    // An attribute of a known constructor is not known.
    check(
        b"\x80\x02ccollections\nOrderedDict.fromkeys\n.",
        "collections.OrderedDict.fromkeys",
    );
    check(b"\x80\x02cnumpy\nload\n.", "numpy.load");
    let malformed: [&[u8]; 6] = [
        b"\x80\x04K\x01)R.",
        b"\x80\x02c_codecs\nencode\nK\x01R.",
        b"\x80\x02ctorch\nSize\n)R.",
        b"\x80\x04K\x01K\x02\x93.",
        b"\x80\x02R.",
        b"\x80\x02cnumpy\ndtype\n(X\x02\x00\x00\x00i8t\x52(K\x03X\x01\x00\x00\x00>tb.",
    ];
    for pickle in malformed {
        assert!(read_from(pickle).unwrap_err().is_malformed(), "{pickle:?}");
    }
    let error = read_from(&b"\x80\x02]}b."[..]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("wants to run code (opcode BUILD)"),
        "{error}"
    );
}

#[test]
fn several_snapshots_in_a_file() {
    let members = |snapshot: &Snapshot| -> Vec<(Option<String>, u32)> {
        let member = |trace: &Trace| trace.member.as_ref().map(|name| name.raw().to_owned());
        let traces = snapshot.traces.iter();
        traces.map(|trace| (member(trace), trace.device)).collect()
    };
    let named = |name: &str, device| (Some(name.to_owned()), device);
    let none: &[&str] = &[];
    let one = &["1 of 3 items is no snapshot"][..];
    for (name, expected, left_out) in [
        ("gathered_list", [named("0", 0), named("2", 0)], one),
        ("gathered_tuple", [named("0", 0), named("1", 0)], none),
        ("gathered_dict", [named("0", 0), named("1", 0)], none),
        (
            "gathered_names",
            [named("rank0", 0), named("rank1", 2)],
            one,
        ),
    ] {
        let snapshot = data(&format!("{name}.pickle"));
        assert_eq!(members(&snapshot), expected);
        assert_same_trace(
            name,
            &snapshot.traces[0],
            &data("protocol4.pickle").traces[0],
        );
        assert_eq!(snapshot.traces[1].events.len(), 8, "{name}");
        assert_eq!(snapshot.left_out, left_out, "{name}");
    }
    // A second snapshot in the file is not read. One file may have many ranks.
    let one = fs::read(path("protocol4.pickle")).unwrap();
    let json = fs::read(path("torch2.11.json")).unwrap();
    let more = [
        "the file goes on behind the first snapshot; write each snapshot to a file of its own, or one list of them",
    ];
    for (bytes, left_out) in [
        ([&one[..], &one].concat(), &more[..]),
        ([&json[..], b"\n", &json].concat(), &more),
        ([&json[..], b" \n"].concat(), &[]),
    ] {
        assert_eq!(read_from(&bytes[..]).unwrap().left_out, left_out);
    }
    let json = std::str::from_utf8(&json).unwrap();
    let ranks: Vec<String> = (0..100).map(|rank| format!("\"{rank}\": {json}")).collect();
    let ranks = format!("{{{}}}", ranks.join(","));
    assert_eq!(read_from(ranks.as_bytes()).unwrap().traces.len(), 100);
    let rows = format!("[{{\"rank\": 0, \"snapshot\": {json}}}]");
    let error = read_from(rows.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("each item of which is what"), "{error}");
    let wrapped = data("wrapped.pickle");
    assert_eq!(members(&wrapped), [(None, 0)]);
    let twice = data("gathered_twice.pickle");
    assert_eq!(members(&twice), [(None, 0)]);
    assert_eq!(twice.left_out, ["1 of 2 items repeats an earlier snapshot"]);

    // A file of one snapshot can hold several snapshots of different devices.
    let mut out = Vec::new();
    write_compact(&data("gathered_names.pickle"), &mut out).unwrap();
    assert_eq!(
        members(&read_from(&out[..]).unwrap()),
        [(None, 0), (None, 2)]
    );
    let both = data("gathered_list.pickle");
    for written in [
        write_compact(&both, &mut out),
        write_pickle(&both, &mut out),
    ] {
        let line = written.unwrap_err().to_string();
        assert!(
            line.starts_with("several snapshots have device 0, "),
            "{line}"
        );
    }
}

#[test]
fn a_list_belongs_to_one_snapshot() {
    // Two dicts with the same list of 16 segments, which would be read twice.
    let list = [&b"]\x94("[..], &b"N".repeat(16), b"e0"].concat();
    let dict = b"}\x8c\x08segmentsh\x00s";
    let pickle = [&b"\x80\x04"[..], &list, b"](", dict, dict, b"e."].concat();
    let line = read_from(&pickle[..]).unwrap_err().to_string();
    assert!(line.contains("segment 0"), "the first is read: {line}");
    let empty = [&b"]\x94("[..], &b"}\x8c\x04nameK\x01s".repeat(16), b"e0"].concat();
    let dict = b"}(\x8c\x08segments]\x8c\x14external_annotationsh\x00u";
    let pickle = [&b"\x80\x04"[..], &empty, b"](", dict, dict, b"e."].concat();
    let line = read_from(&pickle[..]).unwrap_err().to_string();
    assert_eq!(line, "snapshot 1: two snapshots share a list");
}

#[test]
fn a_device_of_marks_alone_is_not_listed() {
    let devices: Vec<u32> = data("marks.pickle")
        .traces
        .iter()
        .map(|trace| trace.device)
        .collect();
    assert_eq!(devices, [0]);
}

#[test]
fn pinned_memory_of_the_host() {
    let snapshot = data("torch2.15.pickle");
    let [host] = &snapshot.host[..] else {
        panic!("one snapshot has one: {:?}", snapshot.host);
    };
    assert_eq!(host.allocs(), 3, "a batch in each step");
    // PyTorch rounds 300 KiB up to a power of two. Because of the synchronization, one block serves all steps.
    let sizes: Vec<Bytes> = host.segments.iter().map(|segment| segment.size).collect();
    assert_eq!(sizes, vec![Bytes::kib(512); sizes.len()]);
    assert_eq!(
        host.peak_reserved_bytes(),
        host.segments.iter().map(|segment| segment.size).sum()
    );
    let frames = |event: &TraceEvent| {
        let frames = host.stacks.frames(event.stack);
        frames
            .map(|frame| frame.name.raw().to_owned())
            .collect::<Vec<_>>()
    };
    let requests = host
        .events
        .iter()
        .filter(|event| event.event.action == Action::Alloc);
    for request in requests {
        assert_eq!(frames(request)[0], "step");
    }
    for segment in &host.segments {
        let [block] = &segment.blocks[..] else {
            panic!("a segment of the host is one block: {segment:?}");
        };
        assert_eq!((block.size, block.requested), (segment.size, segment.size));
    }
    let device = &snapshot.traces[0];
    assert!(
        device
            .segments
            .iter()
            .all(|segment| segment.address != host.segments[0].address)
    );

    let mut pickle = Vec::new();
    write_pickle(&snapshot, &mut pickle).unwrap();
    assert_same("as a pickle", &read_from(&pickle[..]).unwrap(), &snapshot);
    let mut compact = Vec::new();
    write_compact(&snapshot, &mut compact).unwrap();
    assert_same(
        "in lowtide's format",
        &read_from(&compact[..]).unwrap(),
        &snapshot,
    );
    assert!(data("torch2.11.pickle").host.is_empty());
}

/// PyTorch rounds pinned memory to a power of two, so a segment of it may have few bytes.
#[test]
fn pinned_memory_from_before_the_first_event() {
    let snapshot = data("torch2.15.begun_late.pickle");
    assert!(snapshot.left_out.is_empty(), "{:?}", snapshot.left_out);
    let host = &snapshot.host[0];
    let small = host
        .initial
        .blocks
        .iter()
        .filter(|block| block.size < Bytes(512));
    let sizes: Vec<Bytes> = small.map(|block| block.size).collect();
    assert_eq!(sizes, [Bytes(4)]);
    assert_eq!(host.allocs(), 1);
}

#[test]
fn events_of_pinned_memory_that_contradict_each_other_are_left_out_with_a_word() {
    let snapshot = data("torch2.15.pickle");
    let read = data("torch2.15.raced.pickle");
    let [line] = &read.left_out[..] else {
        panic!("one line: {:?}", read.left_out);
    };
    assert!(
        line.starts_with("the events of pinned host memory contradict each other ("),
        "{line}"
    );
    assert_eq!(read.host[0].segments, snapshot.host[0].segments);
    assert!(read.host[0].events.is_empty());
    assert_eq!(read.traces[0].events.len(), snapshot.traces[0].events.len());
}

#[test]
fn other_files_have_a_line_that_says_what_to_do() {
    let check = |contents: &[u8], expected: &str| {
        let error = read_from(contents).unwrap_err();
        assert!(error.is_not_a_recording(), "{error}");
        let line = error.to_string();
        assert!(line.contains(expected), "{line}");
    };
    let profile = "torch.profiler wrote it";
    let lists = "a list of lists, as torch.profiler writes";
    check(b"[[17, 18], [[0, 512], [0, 1024]]]", lists);
    check(b"[[17, 0, 512, 3], [18, 3, -512, 3]]", lists);
    check(b"{\"schemaVersion\": 1, \"traceEvents\": []}", profile);
    check(b"{\"traceEvents\": [{\"name\": \"x\"}]}", profile);
    check(
        b"<html>\n<head><meta charset=\"utf-8\" /><title>GPU Memory Timeline HTML</title></head>",
        profile,
    );
    check(
        b"<!doctype html><title>lowtide report</title>",
        "name the recording that it was made from",
    );
    check(b"\n<svg></svg>", "without a snapshot in it");
    check(
        b"PK\x03\x04 a zip archive with other things",
        "unpack it (unzip)",
    );
    check(
        b"{\"weights\": [1.5, true, null, \"x\"]}",
        "neither `segments` nor `device_traces`",
    );
    check(b"not a recording", "neither a pickle nor a recording");
    use std::io::Write;
    let mut twice = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    twice
        .write_all(&fs::read(path("protocol4.pickle.xz")).unwrap())
        .unwrap();
    check(&twice.finish().unwrap(), "undo one by `xz -d`");
}

#[test]
fn json_and_pages_that_are_cut_off_or_damaged() {
    for name in ["torch2.11.json", "torch2.11.page.html"] {
        let whole = fs::read(path(name)).unwrap();
        for count in (300..whole.len() - 30).step_by(97) {
            let error = read_from(&whole[..count]).expect_err("part of a file is no recording");
            assert!(error.is_truncated(), "{name} cut at {count}: {error}");
        }
    }
    let mut page = fs::read(path("torch2.11.page.html")).unwrap();
    page[1000] = b'*';
    let error = read_from(&page[..]).unwrap_err();
    assert!(
        error.is_malformed() && error.to_string().contains("the base64 data is damaged"),
        "{error}"
    );
    let error = read_from(&b"{\"segments\": [}"[..]).unwrap_err();
    assert!(
        error.is_malformed() && error.to_string().contains("line 1 column 15"),
        "{error}"
    );
}

#[test]
fn a_recording_without_frees_says_so() {
    for release in ["torch2.11", "torch2.15"] {
        let error = error(&format!("{release}.no_frees.pickle"));
        assert!(error.is_contradiction());
        let line = error.to_string();
        let expected = "device 0, event 5: no frees are recorded, so record without \
                        skip_actions=[\"free_requested\", \"free_completed\"]: allocates 300.00 KiB at ";
        assert!(line.contains(expected), "{line}");
    }
    // A job that freed nothing has no frees to record.
    let mut snapshot = data("torch2.11.pickle");
    let trace = &mut snapshot.traces[0];
    let kept = trace.events[..2].iter().map(|event| event.event);
    let recovered = Trace::recovered(0, kept, Vec::new()).unwrap();
    assert!(recovered.may_lack_frees() && !trace.may_lack_frees());
}
