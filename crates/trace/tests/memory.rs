//! Tests how much memory files take that are made to take a lot, as the operating system reports it: plain pickles,
//! and compressed files of both formats.
//!
//! A process of its own reads each file: this test program, started again with the number of a case.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

use std::io::Write;
use std::process::Command;
use std::{env, fs};

use flate2::write::GzEncoder;
use flate2::{Compression, Crc};
use lowtide_trace::read_from;

const CASE: &str = "LOWTIDE_MEMORY_TEST_CASE";

/// The size of each file.
const FILE_BYTES: usize = 16 << 20;

/// The file itself, the documented limit, and a process's own memory.
const PEAK_KIB_MAX: usize = (FILE_BYTES + (256 << 20) + 4 * FILE_BYTES + (8 << 20)) >> 10;

/// Keys and actions memoized as 0 to 6, and the start of a list of events.
const EVENTS: &[u8] =
    b"\x80\x04\x8c\x06action\x94\x8c\x04addr\x94\x8c\x04size\x94\x8c\x05alloc\x94\
    \x8c\x0efree_completed\x94\x8c\x06stream\x94\x8c\x07time_us\x940000000\
    }(\x8c\x0ddevice_traces](](";

/// The start of each file, and the bytes that are repeated after it.
const CASES: [(&[u8], &[u8]); 17] = [
    // Containers, on the stack or dropped from it.
    (b"\x80\x04", b"]"),
    (b"\x80\x04", b"]0"),
    (b"\x80\x04](", b"]Na"),
    (b"\x80\x04", b"]Na0"),
    (b"\x80\x04", b"}"),
    (b"\x80\x04", b"}NNs"),
    (b"\x80\x04", b")"),
    (b"\x80\x04", b"N\x850"),
    (b"\x80\x04", b"K\x01\x85"),
    (b"\x80\x04N", b"222\x870"),
    // Values, and memo numbers for them.
    (b"\x80\x04N", b"2"),
    (b"\x80\x04", b"N\x94"),
    (b"\x80\x04\x8c\x01a", b"\x94"),
    (b"\x80\x04(", b"N"),
    // The shortest events, and one event referred to many times.
    (EVENTS, b"}(h\x00h\x03h\x01K\x01h\x02K\x00u"),
    (
        EVENTS,
        b"}(h\x00h\x03h\x01K\x01h\x02K\x00u\x94(h\x07h\x07h\x07h\x07h\x07h\x07h\x07h\x07e0h\x07",
    ),
    // Blocks from before the first event. The number after `J` counts up.
    (
        EVENTS,
        b"}\x94(h\x00h\x04h\x01J....h\x02K\x01h\x05K\x00h\x06J\x01\x00\x00\x00u",
    ),
];

#[test]
fn no_pickle_takes_more_than_its_size_justifies() {
    const TEST: &str = "no_pickle_takes_more_than_its_size_justifies";
    if let Ok(case) = env::var(CASE) {
        read_and_say_peak(&plain_pickle(case.parse().unwrap()));
        return;
    }
    for (case, (_, unit)) in CASES.iter().enumerate() {
        let peak = peak_kib_of(TEST, case);
        assert!(
            peak <= PEAK_KIB_MAX,
            "{:?}: {peak} KiB, more than {PEAK_KIB_MAX}",
            unit.escape_ascii().to_string()
        );
    }
}

/// The claim of each compressed file in a few kilobytes, and the most memory that the file may take, in MiB.
const COMPRESSED: [(&str, usize); 5] = [
    ("a string of 200 MB", 64),
    ("bytes of 200 MB", 64),
    ("an integer of 200 MB", 64),
    ("a section of 200 MB", 64),
    // The limit of any file, and the section itself twice, because its buffer grows.
    ("a section of 30,000,000 events", 256 + 128 + 32),
];

#[test]
fn what_a_compressed_file_claims_costs_nothing_before_it_is_checked() {
    const TEST: &str = "what_a_compressed_file_claims_costs_nothing_before_it_is_checked";
    if let Ok(case) = env::var(CASE) {
        read_and_say_peak(&compressed(case.parse().unwrap()));
        return;
    }
    for (case, (what, mib_max)) in COMPRESSED.iter().enumerate() {
        let peak = peak_kib_of(TEST, case);
        assert!(peak <= mib_max << 10, "{what}: {peak} KiB");
    }
}

/// Snapshots that share long texts: a region's tag, and the name of a mark.
#[test]
fn what_gathered_snapshots_share_is_there_once() {
    const TEST: &str = "what_gathered_snapshots_share_is_there_once";
    if env::var(CASE).is_ok() {
        let file = gathered(300, 8 << 20);
        assert_eq!(read_from(&file[..]).unwrap().traces.len(), 300);
        read_and_say_peak(&file);
        return;
    }
    // The file, the texts as read, and the texts as kept.
    let peak = peak_kib_of(TEST, 0);
    assert!(peak <= (8 * 8 + 32) << 10, "{peak} KiB");
}

/// Returns a pickle of `count` snapshots. Each has a segment, and a tag and a mark with the same text.
fn gathered(count: usize, text_bytes: u32) -> Vec<u8> {
    let string = |text: &str| {
        let length = u8::try_from(text.len()).unwrap();
        [&[0x8c, length], text.as_bytes()].concat()
    };
    let dict = |entries: &[(&str, &[u8])]| {
        let entries = entries.iter();
        let entries = entries.map(|(key, value)| [&string(key)[..], value].concat());
        [b"}(", &entries.collect::<Vec<_>>().concat()[..], b"u"].concat()
    };
    let list = |item: &[u8]| [b"]", item, b"a"].concat();
    let (zero, text, large) = (b"K\0", b"h\0", string("large"));
    let block = dict(&[
        ("address", b"J\0\0\0\x40"),
        ("size", b"J\0\0\x20\0"),
        ("state", &string("inactive")),
    ]);
    let segment = dict(&[
        ("device", zero),
        ("address", b"J\0\0\0\x40"),
        ("total_size", b"J\0\0\x20\0"),
        ("stream", zero),
        ("segment_type", &large),
        ("blocks", &list(&block)),
    ]);
    let mark = dict(&[
        ("stage", &string("START")),
        ("name", text),
        ("device", zero),
        ("time_us", zero),
    ]);
    let region = dict(&[
        ("device", zero),
        ("pool_id", b"K\0K\x07\x86"),
        ("tag", text),
    ]);
    let snapshot = dict(&[
        ("segments", &list(&segment)),
        ("external_annotations", &list(&mark)),
        ("region_pools", &list(&region)),
    ]);
    let begin = [b"\x80\x04X", &text_bytes.to_le_bytes()[..]].concat();
    let long = vec![b'x'; text_bytes as usize];
    [
        &begin,
        &long,
        &b"\x940]("[..],
        &snapshot.repeat(count),
        b"e.",
    ]
    .concat()
}

/// Returns the compressed file of a case. The decompressed file is never in memory as a whole.
fn compressed(case: usize) -> Vec<u8> {
    const LONG: u32 = 200_000_000;
    const EVENTS: u32 = 30_000_000;
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    let begin = |opcode: u8| [&[0x80, 4, opcode][..], &LONG.to_le_bytes()].concat();
    let section = |kind: u8, length: u32| [&[kind][..], &length.to_le_bytes()].concat();
    let (begin, count, byte) = match case {
        0 => (begin(b'X'), LONG, b'a'),
        1 => (begin(b'B'), LONG, 0),
        2 => (begin(0x8b), LONG, 0),
        3 => (
            [&b"lowtide\n\x04\0"[..], &section(b'S', LONG)].concat(),
            LONG,
            0,
        ),
        _ => {
            let device = [&section(b'D', 1)[..], &[0], &crc(&[0], 1)].concat();
            let events = section(b'E', 2 * EVENTS);
            (
                [&b"lowtide\n\x04\0"[..], &device, &events].concat(),
                EVENTS,
                b'p',
            )
        }
    };
    gzip.write_all(&begin).unwrap();
    // An event of two bytes: equal to the one before, and at the same time.
    let unit = match case {
        4 => vec![byte, 0],
        _ => vec![byte],
    };
    let part = unit.repeat(100_000);
    for _ in 0..count / 100_000 {
        gzip.write_all(&part).unwrap();
    }
    gzip.write_all(&crc(&unit, count)).unwrap();
    gzip.write_all(b".").unwrap();
    gzip.finish().unwrap()
}

/// Returns the checksum of `unit` repeated `count` times.
fn crc(unit: &[u8], count: u32) -> [u8; 4] {
    let mut crc = Crc::new();
    let part = unit.repeat(count.min(100_000) as usize);
    for _ in 0..count.div_ceil(100_000) {
        crc.update(&part);
    }
    crc.sum().to_le_bytes()
}

/// Returns the peak memory of a process that reads the file of a case, in KiB. The process runs a test of this
/// program.
fn peak_kib_of(test: &str, case: usize) -> usize {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CASE, case.to_string())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let peak = text.lines().find_map(|line| line.split_once("peak KiB: "));
    peak.expect("the process says it").1.parse().unwrap()
}

fn plain_pickle(case: usize) -> Vec<u8> {
    let (begin, unit) = CASES[case];
    let mut file = begin.to_vec();
    let count_at = unit.windows(5).position(|bytes| bytes == b"J....");
    let mut count = 0_u32;
    while file.len() < FILE_BYTES {
        let start = file.len();
        file.extend_from_slice(unit);
        if let Some(at) = count_at {
            count += 512;
            file[start + at + 1..][..4].copy_from_slice(&count.to_le_bytes());
        }
    }
    // The ends of the lists and the dict, if there are any.
    file.extend_from_slice(b"eeu.");
    file
}

#[expect(
    clippy::print_stdout,
    reason = "the process reports to the one that started it"
)]
fn read_and_say_peak(file: &[u8]) {
    let _ = read_from(file);
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.expect("Linux says it").trim().trim_end_matches(" kB");
    println!("\npeak KiB: {peak}");
}
