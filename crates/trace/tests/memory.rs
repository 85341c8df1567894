//! How much memory plain pickles take that are made to take a lot, as the operating system counts it.
//!
//! Each is read by a process of its own: this test's program, started again with the number of a case.
#![cfg(target_os = "linux")]

use std::process::Command;
use std::{env, fs};

use lowtide_trace::read_from;

const CASE: &str = "LOWTIDE_MEMORY_TEST_CASE";

/// How long each file is.
const FILE_BYTES: usize = 16 << 20;

/// The file itself, what is documented for it, and what a process takes anyway.
const PEAK_KIB_MAX: usize = (FILE_BYTES + (256 << 20) + 4 * FILE_BYTES + (8 << 20)) >> 10;

/// Keys and actions under the numbers 0 to 6, and the beginning of a list of events.
const EVENTS: &[u8] =
    b"\x80\x04\x8c\x06action\x94\x8c\x04addr\x94\x8c\x04size\x94\x8c\x05alloc\x94\
    \x8c\x0efree_completed\x94\x8c\x06stream\x94\x8c\x07time_us\x940000000\
    }(\x8c\x0ddevice_traces](](";

/// What each file begins with, and what follows again and again.
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
    // Values, and numbers for them.
    (b"\x80\x04N", b"2"),
    (b"\x80\x04", b"N\x94"),
    (b"\x80\x04\x8c\x01a", b"\x94"),
    (b"\x80\x04(", b"N"),
    // The shortest events, and the same event again and again.
    (EVENTS, b"}(h\x00h\x03h\x01K\x01h\x02K\x00u"),
    (
        EVENTS,
        b"}(h\x00h\x03h\x01K\x01h\x02K\x00u\x94(h\x07h\x07h\x07h\x07h\x07h\x07h\x07h\x07e0h\x07",
    ),
    // Blocks that were there before; what follows `J` counts up.
    (
        EVENTS,
        b"}\x94(h\x00h\x04h\x01J....h\x02K\x01h\x05K\x00h\x06J\x01\x00\x00\x00u",
    ),
];

#[test]
fn no_pickle_takes_more_than_its_size_justifies() {
    if let Ok(case) = env::var(CASE) {
        read_case(case.parse().unwrap());
        return;
    }
    for (case, (_, unit)) in CASES.iter().enumerate() {
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", "no_pickle_takes_more_than_its_size_justifies"])
            .arg("--nocapture")
            .env(CASE, case.to_string())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let peak = text.lines().find_map(|line| line.split_once("peak KiB: "));
        let peak: usize = peak.expect("the process says it").1.parse().unwrap();
        assert!(
            peak <= PEAK_KIB_MAX,
            "{:?}: {peak} KiB, more than {PEAK_KIB_MAX}",
            unit.escape_ascii().to_string()
        );
    }
}

#[expect(
    clippy::print_stdout,
    reason = "the process tells the one that started it"
)]
fn read_case(case: usize) {
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
    // The ends of the lists and the dict, where there are any.
    file.extend_from_slice(b"eeu.");
    let _ = read_from(&file[..]);
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.expect("Linux says it").trim().trim_end_matches(" kB");
    println!("\npeak KiB: {peak}");
}
