//! Tests of files that are made to cost far more than their size. Each is refused within bounded memory and time.

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot,
    Stream,
};
use lowtide_trace::{
    NoteId, Snapshot, StackId, Trace, TraceError, TraceEvent, read_from, write_pickle,
};

#[track_caller]
fn refused(bytes: &[u8]) -> TraceError {
    let error = read_from(bytes).expect_err("the file is made to harm");
    assert!(!error.to_string().contains('\n'));
    error
}

/// Returns a pickle of `unit` repeated, compressed some ten-thousandfold.
#[cfg(feature = "zstd")]
fn bomb(unit: &[u8], expanded_bytes: usize) -> Vec<u8> {
    use std::io::Write;
    let mut zstd = zstd::Encoder::new(Vec::new(), 1).expect("level 1 exists");
    zstd.write_all(&[0x80, 4]).expect("memory takes everything");
    let block = unit.repeat((1 << 20) / unit.len());
    for _ in 0..expanded_bytes / block.len() {
        zstd.write_all(&block).expect("memory takes everything");
    }
    zstd.finish().expect("memory takes everything")
}

#[cfg(feature = "zstd")]
#[test]
fn bombs() {
    // Each byte creates one object. The last units also create a container apart from the stack.
    for unit in [&b"]"[..], b"}", b"}0", b"N\x94", b"K\x01"] {
        assert!(refused(&bomb(unit, 100 << 20)).is_limit(), "{unit:?}");
    }
    // Nothing is kept. Only the expansion exceeds the limit.
    assert!(refused(&bomb(b"N0", 100 << 20)).is_limit());
}

/// Writes `head` and then `unit` repeated into `pack`, which compresses them.
fn packed<W: std::io::Write>(head: &[u8], unit: &[u8], expanded_bytes: usize, mut pack: W) -> W {
    pack.write_all(head).expect("memory takes everything");
    let block = unit.repeat((1 << 20) / unit.len());
    for _ in 0..expanded_bytes / block.len() {
        pack.write_all(&block).expect("memory takes everything");
    }
    pack
}

fn gzip(head: &[u8], unit: &[u8], expanded_bytes: usize) -> Vec<u8> {
    let gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed(head, unit, expanded_bytes, gzip)
        .finish()
        .expect("memory takes everything")
}

fn xz(head: &[u8], unit: &[u8], expanded_bytes: usize) -> Vec<u8> {
    let options = lzma_rust2::XzOptions::with_preset(0);
    let xz = lzma_rust2::XzWriter::new(Vec::new(), options).expect("memory takes everything");
    packed(head, unit, expanded_bytes, xz)
        .finish()
        .expect("memory takes everything")
}

#[test]
fn bombs_of_other_compressions() {
    // A byte string of 4 GiB whose contents are never used. The file has part of it.
    let head = b"\x80\x04B\xff\xff\xff\xff";
    let bzip2 = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    let bzip2 = packed(head, b"a", 90 << 20, bzip2);
    let bzip2 = bzip2.finish().expect("memory takes everything");
    for bomb in [&bzip2, &xz(head, b"a", 90 << 20)] {
        assert!(bomb.len() < 20_000, "{}", bomb.len());
        let error = refused(bomb);
        assert!(error.is_limit(), "{error}");
        assert!(error.to_string().contains("more than a thousandfold"));
    }
    // Only the outer one of two nested compressions is undone.
    let error = refused(&gzip(&bzip2, b"x", 0));
    assert!(error.to_string().contains("compressed twice"), "{error}");
}

#[test]
fn a_huge_dictionary_is_refused_before_it_is_made() {
    let mut xz = xz(b"\x80\x04].", b"x", 0);
    read_from(&xz[..]).expect("an empty list of segments");
    // The header of the first block: its length in units of 4 bytes, flags, LZMA2, one byte, the dictionary's size;
    // then a checksum.
    let header = 12..12 + 4 * (usize::from(xz[12]) + 1);
    assert_eq!(xz[14..16], [0x21, 1]);
    // Dictionaries of 4 GiB and 192 MiB.
    for size in [40, 31] {
        xz[16] = size;
        let mut sum = flate2::Crc::new();
        sum.update(&xz[header.start..header.end - 4]);
        xz[header.end - 4..header.end].copy_from_slice(&sum.sum().to_le_bytes());
        let error = refused(&xz);
        assert!(error.is_limit(), "{error}");
        let todo = "needs more than 128 MiB of memory; decompress it with xz -d";
        assert!(error.to_string().ends_with(todo), "{error}");
    }
}

#[test]
fn json_costs_no_more_than_pickles() {
    for unit in [&b"{},"[..], b"[],", b"1,", b"{\"a\":1},"] {
        let error = refused(&gzip(b"{\"segments\":[", unit, 130 << 20));
        assert!(error.is_limit(), "{unit:?}: {error}");
    }
    let endless = refused(&gzip(b"{\"segments\":\"", b"xy", 40 << 20));
    assert!(
        endless.to_string().contains("a text has no end"),
        "{endless}"
    );
    // The limit on a number's digits holds for each number, not for all together.
    let numbers = b"0.000000000000000000001,".repeat(1 << 20);
    let numbers = [b"{\"segments\":[],\"others\":[", &numbers[..], b"null]}"].concat();
    read_from(&numbers[..]).expect("a snapshot of nothing");
    let deep = [&b"{\"segments\":"[..], &b"[".repeat(100_000)].concat();
    assert!(refused(&deep).is_malformed());
}

#[test]
fn a_page_justifies_the_memory_of_its_snapshot() {
    // Repeated `N` takes 312 MiB, which needs a larger file.
    let error = refused(&gzip(b"<script>[{\"base64\": \"gAQo", b"Tk5O", 26 << 20));
    assert!(error.is_limit(), "{error}");
}

#[cfg(feature = "zstd")]
#[test]
fn what_a_pickle_refers_to_in_python_is_counted() {
    for unit in [&b"ccollections\nOrderedDict\n)R"[..], b"ctorch\nSize\n\x94"] {
        assert!(refused(&bomb(unit, 100 << 20)).is_limit(), "{unit:?}");
    }
}

#[test]
fn claimed_lengths_reserve_nothing() {
    let lengths: [&[u8]; 6] = [
        b"\x80\x04X\xff\xff\xff\xff",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x80\x04\x8b\xff\xff\xff\xff",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff]",
        b"lowtide\n\x01\x00S\xff\xff\xff\xff",
    ];
    // Contents that are never used may be long; strings and sections may not.
    for (bytes, is_limit) in lengths.iter().zip([true, true, false, false, false, true]) {
        let error = refused(bytes);
        assert_eq!(
            (error.is_limit(), error.is_truncated()),
            (is_limit, !is_limit)
        );
    }
    let cut_off = read_from(&b"lowtide\n\x01\0S\xff\xff\xff\x03"[..]);
    let cut_off = cut_off.expect("a recorder may be killed at any time");
    assert!(cut_off.is_cut_off && cut_off.traces.is_empty());
}

#[test]
fn a_list_that_is_a_stack_of_its_own() {
    let event = "(dVaction\nValloc\nsVaddr\nI512\nsVsize\nI512\nsVstream\nI0\nsVframes\ng1\nsa";
    let bytes = format!("(dVdevice_traces\n(l(lp1\n{event}{event}as.");
    let error = refused(bytes.as_bytes());
    assert!(error.to_string().contains("an `action`"), "{error}");
}

#[test]
fn absurd_nesting() {
    let error = refused(&[&b"\x80\x04"[..], &b"(".repeat(100_000)].concat());
    assert!(error.is_limit());
    assert_eq!(
        error.to_string(),
        "byte 1002: containers are nested deeper than 1000"
    );
    // Nested lists, and a list that contains itself.
    let deep = [
        &b"\x80\x04"[..],
        &b"]".repeat(100_000),
        &b"a".repeat(99_999),
        b".",
    ]
    .concat();
    assert!(refused(&deep).is_not_a_recording());
    assert!(refused(b"\x80\x04]\x94h\x00a.").is_not_a_recording());
}

/// Returns the start of a pickle: keys and an action memoized as 0 to 4, and a list of `count` Nones as 5.
fn events_and_a_list(count: usize) -> Vec<u8> {
    let mut pickle = b"\x80\x04\x8c\x06action\x94\x8c\x04addr\x94\x8c\x04size\x94\
        \x8c\x05alloc\x94\x8c\x06frames\x9400000]\x94("
        .to_vec();
    pickle.extend(b"N".repeat(count));
    pickle.extend(b"e0}(\x8c\x0ddevice_traces](");
    pickle
}

#[test]
fn what_is_referred_to_many_times_is_looked_at_once() {
    // Takes 10^11 steps if the list is visited for each event.
    let event = b"}(h\x00h\x03h\x01K\x01h\x02K\x00h\x04h\x05u";
    let mut pickle = events_and_a_list(500_000);
    pickle.extend(b"](");
    pickle.extend(event.repeat(200_000));
    pickle.extend(b"eeu.");
    let snapshot = read_from(&pickle[..]).expect("a list of no frames is no stack");
    assert_eq!(snapshot.traces[0].events.len(), 200_000);

    // A dict in which each look-up of a key would take long.
    let refused = |pickle: &[&[u8]]| {
        let error = refused(&pickle.concat());
        assert!(error.is_limit() && error.to_string().contains("more than 64 keys"));
    };
    let large = &large_dict(1000)[..];
    refused(&[b"\x80\x04", large, b"."]);
    // The limit also holds for a recording's own dicts, built in one step or key by key.
    let slow = &[&b"}"[..], &b"K\x01Ns".repeat(65)].concat()[..];
    for dict in [large, slow] {
        refused(&[b"\x80\x04}(\x8c\x08segments](", dict, b"eu."]);
        refused(&[b"\x80\x04}(\x8c\x0ddevice_traces](](", dict, b"eeu."]);
        let settings = b"\x80\x04}(\x8c\x08segments]\x8c\x12allocator_settings";
        refused(&[settings, dict, b"u."]);
    }
}

/// Returns a dict with `count` numbers as keys.
fn large_dict(count: u16) -> Vec<u8> {
    let keys = (0..count).flat_map(|key| [b'M', key.to_le_bytes()[0], key.to_le_bytes()[1], b'N']);
    [&b"}("[..], &keys.collect::<Vec<u8>>(), b"u"].concat()
}

#[test]
fn what_an_owner_added_to_a_snapshot_is_passed_over() {
    // Like `snapshot["stats"] = torch.cuda.memory_stats()`: in parts of 1000 keys, as Python writes them, and
    // memoized so that it could be referred to.
    let mut pickle = events_and_a_list(0);
    pickle.extend(b"](}(h\x00h\x03h\x01K\x01h\x02K\x00uee\x8c\x05stats");
    pickle.extend(large_dict(1000));
    pickle.extend(b"\x94");
    pickle.extend(&large_dict(1000)[1..]);
    pickle.extend(b"\x8c\x05again");
    pickle.extend(b"h\x06u.");
    let snapshot = read_from(&pickle[..]).expect("nothing reads that dict");
    assert_eq!(snapshot.traces[0].events.len(), 1);
}

#[test]
fn a_list_of_events_belongs_to_one_device() {
    let event = b"}(h\x00h\x03h\x01K\x01h\x02K\x00u";
    let mut pickle = events_and_a_list(0);
    pickle.extend(b"]\x94(");
    pickle.extend(event.repeat(3));
    pickle.extend(b"eh\x06eu.");
    let error = refused(&pickle);
    assert_eq!(error.to_string(), "two devices list the same events");
    // One segment with all its blocks does not become a thousand either.
    let mut pickle = b"\x80\x04\x8c\x04size\x94\x8c\x05state\x94\x8c\x08inactive\x94000\
        }(\x8c\x08segments](}\x94(\x8c\x06deviceK\x00\x8c\x07addressJ\x00\x10\x00\x00\
        \x8c\x0atotal_sizeM\x10\x27\x8c\x06blocks]("
        .to_vec();
    pickle.extend(b"}(h\x00K\x01h\x01h\x02u".repeat(10_000));
    pickle.extend(b"eu");
    pickle.extend(b"h\x03".repeat(1000));
    pickle.extend(b"eu.");
    let error = refused(&pickle);
    assert!(error.is_limit(), "{error}");
}

#[test]
fn what_a_file_says_is_shown_on_one_line() {
    let number = [&b"\x80\x00I12\r\x1b[2J"[..], &b"x".repeat(100_000), b"\n."].concat();
    let message = refused(&number).to_string();
    assert!(
        message.starts_with("byte 2: `12\\r\\u{1b}[2Jxxx"),
        "{message}"
    );
    assert!(message.len() < 100, "{message}");
}

#[test]
fn programs_that_make_no_sense() {
    let programs: [&[u8]; 14] = [
        b"\x80\x04.",
        b"\x80\x04u",
        b"\x80\x04(u",
        b"\x80\x04s",
        b"\x80\x04}(K\x01u.",
        b"\x80\x04K\x01K\x02a",
        b"\x80\x04(0",
        b"\x80\x04h\x07.",
        b"\x80\x04j\xff\xff\xff\xff.",
        b"\x80\x04\x94",
        b"\x80\x04\x86",
        b"\x80\x04e",
        b"\x80\x04\x8c\x01\xff.",
        b"\x80\x04\x00",
    ];
    for program in programs {
        assert!(refused(program).is_malformed(), "{program:?}");
    }
    // A memo number far from the others does not create a table of that size.
    read_from(&b"\x80\x04]r\xff\xff\xff\xffj\xff\xff\xff\xff."[..])
        .expect("an empty list of segments");
}

/// A snapshot with many blocks and one event. Each block existed before the event. Computing that takes far more
/// memory than the file.
#[test]
fn many_blocks_from_before_the_first_event_are_no_fault() {
    const BLOCKS: usize = 600_000;
    let block = |place: usize| BlockSnapshot {
        address: DeviceAddress(0x7f00_0000_0000) + Bytes(512 * place as u64),
        size: Bytes(512),
        requested: Bytes(512),
        status: BlockStatus::Allocated,
    };
    let segment = SegmentSnapshot {
        address: block(0).address,
        size: Bytes(512 * BLOCKS as u64),
        stream: Stream::DEFAULT,
        pool: MempoolId::DEFAULT,
        is_large: true,
        is_expandable: false,
        blocks: (0..BLOCKS).map(block).collect(),
    };
    let event = Event {
        action: Action::Alloc,
        pool: MempoolId::DEFAULT,
        address: block(BLOCKS - 1).address,
        size: Bytes(512),
        stream: Stream::DEFAULT,
    };
    let event = TraceEvent {
        event,
        time_us: 1,
        note: NoteId::NONE,
        stack: StackId::NONE,
        pool_known: true,
    };
    let trace = Trace {
        events: vec![event],
        segments: vec![segment],
        ..Trace::default()
    };
    let snapshot = Snapshot {
        traces: vec![trace],
        ..Snapshot::default()
    };
    let mut pickle = Vec::new();
    write_pickle(&snapshot, &mut pickle).unwrap();
    let again = read_from(&pickle[..]).unwrap();
    assert_eq!(again.traces[0].initial.blocks.len(), BLOCKS - 1);
}
