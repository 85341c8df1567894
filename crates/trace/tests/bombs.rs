//! Tests that files of lowtide's own format that expand ten-thousandfold count with their expanded size.
#![cfg(feature = "zstd")]

use std::io::Write;

use flate2::Crc;
use lowtide_core::{BlockSnapshot, SegmentSnapshot};
use lowtide_trace::{Annotation, TraceError, TraceEvent, read_from};

/// The memory limit of a file that is short itself.
const BUDGET: usize = 256 << 20;

fn section(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a test's section is short");
    let mut crc = Crc::new();
    crc.update(payload);
    let sum = crc.sum().to_le_bytes();
    [&[kind], &length.to_le_bytes()[..], payload, &sum].concat()
}

/// Returns the error of a file with a section of `count` equal items, if there is one. The items follow `begin`.
fn read(kind: u8, begin: &[u8], item: &[u8], count: usize) -> Option<TraceError> {
    let sections = [
        b"lowtide\n\x04\0".to_vec(),
        // One string, a frame with it, and a stack of that frame.
        section(b'S', b"\x01a"),
        section(b'F', &[0, 0, 0]),
        section(b'K', &[1, 0]),
        section(b'D', &[0]),
        section(kind, &[begin, &item.repeat(count)].concat()),
    ];
    let mut zstd = zstd::Encoder::new(Vec::new(), 1).expect("level 1 exists");
    zstd.write_all(&sections.concat())
        .expect("memory takes everything");
    let file = zstd.finish().expect("memory takes everything");
    read_from(&file[..]).err()
}

/// Asserts that `item` counts as about `bytes`.
#[track_caller]
fn check(kind: u8, begin: &[u8], item: &[u8], bytes: usize) {
    let is_limit = |budget: usize| {
        let refused = read(kind, begin, item, budget / bytes);
        refused.is_some_and(|error| error.is_limit())
    };
    assert!(is_limit(BUDGET / 4 * 5), "{bytes} bytes do not count");
    assert!(!is_limit(BUDGET / 4 * 3), "more than {bytes} bytes count");
}

/// The first byte of an [`Action::Snapshot`](lowtide_core::Action) and of a `SegmentPaused`, each with the address,
/// stream and stack of the event before.
const SNAPSHOT: u8 = 7 | 16 | 32 | 64;
const PAUSED: u8 = 9 | 16 | 32 | 64;

#[test]
fn what_a_section_expands_to_counts() {
    check(b'E', &[], &[SNAPSHOT, 0], size_of::<TraceEvent>());
    check(b'P', &[], &[PAUSED, 0], size_of::<TraceEvent>());
    check(b'A', &[], &[0, 0, 0], size_of::<Annotation>());
    // Segments without blocks, at the end and before the first event.
    for kind in [b'M', b'I'] {
        check(kind, &[], &[0; 7], size_of::<SegmentSnapshot>());
    }
}

/// Returns the header of a segment with `count` blocks of one byte.
fn of_blocks(count: usize) -> Vec<u8> {
    let mut count = count as u64;
    let mut number = Vec::new();
    while count >= 128 {
        number.push(count.to_le_bytes()[0] | 128);
        count >>= 7;
    }
    number.push(count.to_le_bytes()[0]);
    [&[0x80, 0x80, 1], &number[..], &[0; 4], &number].concat()
}

#[test]
fn blocks_count() {
    let is_limit = |kind, count, stack| {
        // A free block: a block in use takes more memory in the result.
        let block = [1, 1, 2, stack];
        let refused = read(kind, &of_blocks(count), &block, count);
        refused.is_some_and(|error| error.is_limit())
    };
    // Each block counts with its place among the stacks, with or without a stack.
    let fit = BUDGET / (size_of::<BlockSnapshot>() + 20);
    for kind in [b'M', b'I'] {
        assert!(is_limit(kind, fit / 4 * 5, 0));
        assert!(is_limit(kind, fit / 4 * 5, 1));
        assert!(!is_limit(kind, fit / 4 * 3, 0));
    }
}
