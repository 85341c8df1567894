//! Tests recordings of real jobs with numbers and bytes changed at random, as files from outside may have them.
//! Each is refused in one line, or becomes a page, replays and files that read back. Overflow checks are on, as in
//! all tests.
//!
//! The inputs are the same in every run. `LOWTIDE_MUTATED_INPUTS` sets their number, for a longer run.
//! `LOWTIDE_MUTATED_FROM` sets the first one, to repeat an input.
//!
//! Not covered: files of millions of events, and damage to compressed bytes, which their checksums find.

mod common {
    pub(crate) mod everything;
}

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs, panic};

use common::everything::{Made, make_everything};
use flate2::Crc;
use lowtide_core::{Action, Bytes, DeviceAddress, MempoolId, Stream};
use lowtide_trace::{
    AllocatorSettings, Snapshot, StreamWriter, Trace, TraceEvent, read, write_compact, write_pickle,
};

/// The default number of inputs.
const INPUTS: u64 = 2000;

/// The number of last events that are kept of each recording: few events are enough for every error.
const EVENTS: usize = 150;

/// The most memory of a process that runs everything on one input after another.
const PEAK_KIB_MAX: u64 = 1 << 20;

/// Numbers at the edges of ranges.
const EDGES: [u64; 18] = [
    0,
    1,
    511,
    512,
    (2 << 20) - 1,
    2 << 20,
    20 << 20,
    1 << 32,
    1 << 44,
    1 << 46,
    1 << 47,
    1 << 53,
    1 << 60,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 511,
    u64::MAX,
];

/// Random numbers, the same for each seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).expect("it is below a usize")
    }

    /// Returns a replacement for `old`: an edge, a number nearby, its negation, or any number.
    fn instead_of(&mut self, old: u64) -> u64 {
        match self.below(6) {
            0 | 1 => EDGES[self.below(EDGES.len())],
            2 => old.wrapping_add(self.next() % 1024),
            3 => old.wrapping_sub(self.next() % 1024),
            4 => old.wrapping_neg(),
            _ => self.next() >> self.below(64),
        }
    }
}

/// A recording to change.
struct Base {
    name: String,
    snapshot: Snapshot,
    pickle: Vec<u8>,
    compact: Vec<u8>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the recordings in the tree that can be read and written, sorted by name.
fn bases() -> Vec<Base> {
    let directories = [
        "crates/replay/tests/data",
        "crates/trace/tests/data",
        "fuzz/corpus/snapshot",
    ];
    let files = directories.iter().flat_map(|directory| {
        let files = fs::read_dir(root().join(directory)).expect("the tree has it");
        files.map(|file| file.expect("it can be listed").path())
    });
    let sample = root().join("traces/gpt2_train.stacks.pickle.zst");
    let mut paths: Vec<PathBuf> = files.chain([sample]).collect();
    paths.sort();
    let bases: Vec<Base> = { paths.iter() }.filter_map(|path| base(path)).collect();
    assert!(bases.len() > 50, "{} recordings", bases.len());
    bases
}

fn base(path: &Path) -> Option<Base> {
    let mut snapshot = read(path).ok()?;
    for trace in &mut snapshot.traces {
        *trace = trace.last_events(EVENTS).expect("it was read");
    }
    let mut base = Base {
        name: path.file_name()?.to_string_lossy().into_owned(),
        snapshot,
        pickle: Vec::new(),
        compact: Vec::new(),
    };
    // lowtide cannot write several gathered snapshots into one file.
    write_pickle(&base.snapshot, &mut base.pickle).ok()?;
    write_compact(&base.snapshot, &mut base.compact).ok()?;
    Some(base)
}

/// Returns an input: the name of its recording and of the change, and its bytes.
fn input(bases: &[Base], number: u64) -> (String, Vec<u8>) {
    let mut random = Random(number);
    let base = &bases[random.below(bases.len())];
    let changes = 1 + random.below(4);
    let (how, bytes) = match random.below(6) {
        0 => (
            "pickle, bytes",
            changed_bytes(&base.pickle, changes, &mut random),
        ),
        1 | 2 => (
            "pickle, numbers",
            changed_numbers(&base.pickle, changes, &mut random),
        ),
        3 => (
            "lowtide, bytes",
            changed_sections(&base.compact, changes, &mut random),
        ),
        _ => (
            "lowtide, events",
            changed_events(&base.snapshot, changes, &mut random),
        ),
    };
    (format!("input {number}: {}, {how}", base.name), bytes)
}

fn changed_bytes(bytes: &[u8], changes: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..changes {
        if bytes.is_empty() {
            break;
        }
        let at = random.below(bytes.len());
        match random.below(4) {
            0 => bytes.truncate(at.max(1)),
            1 => drop(bytes.remove(at)),
            2 => bytes[at] ^= 1 << random.below(8),
            _ => bytes[at] = random.next().to_le_bytes()[0],
        }
    }
    bytes
}

/// Changes bytes within sections, and corrects their checksums.
fn changed_sections(bytes: &[u8], changes: usize, random: &mut Random) -> Vec<u8> {
    const HEADER: usize = 10;
    let mut sections = Vec::new();
    let mut at = HEADER;
    while at < bytes.len() {
        let length = bytes[at + 1..at + 5].try_into().expect("four bytes");
        let length = u32::from_le_bytes(length) as usize;
        sections.push((bytes[at], bytes[at + 5..at + 5 + length].to_vec()));
        at += 9 + length;
    }
    for _ in 0..changes {
        let chosen = random.below(sections.len());
        match random.below(8) {
            0 => drop(sections.remove(chosen)),
            1 => sections.swap(0, chosen),
            _ if sections[chosen].1.is_empty() => {}
            _ => sections[chosen].1 = changed_bytes(&sections[chosen].1, 1, random),
        }
        if sections.is_empty() {
            break;
        }
    }
    let mut changed = bytes[..HEADER].to_vec();
    for (kind, payload) in sections {
        let mut crc = Crc::new();
        crc.update(&payload);
        changed.push(kind);
        let length = u32::try_from(payload.len()).expect("it is short");
        changed.extend(length.to_le_bytes());
        changed.extend(&payload);
        changed.extend(crc.sum().to_le_bytes());
    }
    changed
}

/// Changes integers of a pickle by lowtide.
fn changed_numbers(pickle: &[u8], changes: usize, random: &mut Random) -> Vec<u8> {
    let numbers = numbers(pickle);
    let mut chosen: Vec<usize> = (0..changes).map(|_| random.below(numbers.len())).collect();
    chosen.sort_unstable();
    chosen.dedup();
    let mut changed = Vec::new();
    let mut done = 0;
    for index in chosen {
        let (start, end, old) = numbers[index];
        changed.extend(&pickle[done..start]);
        done = end;
        // Sometimes another number of the file, which is likelier to be of the same kind.
        let new = match random.below(3) {
            0 => numbers[random.below(numbers.len())].2,
            _ => random.instead_of(old),
        };
        // With a ninth byte it is from 0 to 2^64 - 1, without it is signed.
        match random.below(2) {
            0 => changed.extend([&[0x8a, 8][..], &new.to_le_bytes()].concat()),
            _ => changed.extend([&[0x8a, 9][..], &new.to_le_bytes(), &[0]].concat()),
        }
    }
    changed.extend(&pickle[done..]);
    changed
}

/// Returns the start, end and value of each integer of a pickle by lowtide.
fn numbers(pickle: &[u8]) -> Vec<(usize, usize, u64)> {
    let mut numbers = Vec::new();
    let mut at = 0;
    while at < pickle.len() {
        let operand = &pickle[at + 1..];
        let (length, is_number) = match pickle[at] {
            // A string: its length in four bytes, and that many bytes.
            b'X' => {
                let count = operand[..4].try_into().expect("four bytes");
                (4 + u32::from_le_bytes(count) as usize, false)
            }
            b'K' => (1, true),
            b'M' => (2, true),
            b'J' => (4, true),
            0x8a => (1 + usize::from(operand[0]), true),
            b'q' | b'h' | 0x80 => (1, false),
            b'r' | b'j' => (4, false),
            b'G' => (8, false),
            _ => (0, false),
        };
        let end = at + 1 + length;
        if is_number {
            let skipped = usize::from(pickle[at] == 0x8a);
            let mut value = [0; 8];
            let bytes = &operand[skipped..length];
            let kept = bytes.len().min(8);
            value[..kept].copy_from_slice(&bytes[..kept]);
            numbers.push((at, end, u64::from_le_bytes(value)));
        }
        at = end;
    }
    numbers
}

/// Changes events, and writes them like a job that is being recorded. The memory before the first event is then
/// unknown.
fn changed_events(snapshot: &Snapshot, changes: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::new(&mut bytes).expect("memory takes everything");
    for trace in &snapshot.traces {
        let (mut events, settings) = (trace.events.clone(), changed_settings(trace, random));
        for _ in 0..changes {
            change_event(&mut events, random);
        }
        let paused = &trace.initial.paused;
        let held = match random.below(3) {
            // The segments at the end, as if they had existed from the start.
            0 => &trace.segments[..],
            _ => &[],
        };
        let begun = writer.begin_device(trace.device, &settings, held, paused, &trace.stacks);
        begun.expect("memory takes everything");
        for event in &events {
            let pushed = writer.push(trace.device, event, &trace.stacks, &trace.stacks);
            pushed.expect("memory takes everything");
        }
        let tag: Arc<str> = "a tag".into();
        let pool = MempoolId(random.next() >> random.below(64), 0);
        writer
            .push_region(trace.device, pool, &tag)
            .expect("memory takes everything");
    }
    writer.finish().expect("memory takes everything");
    bytes
}

fn changed_settings(trace: &Trace, random: &mut Random) -> AllocatorSettings {
    let mut settings = trace.settings.clone();
    match random.below(12) {
        0 => settings.max_split_size = Some(Some(Bytes(random.instead_of(20 << 20)))),
        1 => settings.garbage_collection_threshold = Some(f64::from_bits(random.next())),
        2 => settings.garbage_collection_threshold = Some([0.0, 1e-300, 0.5, 2.0][random.below(4)]),
        3 => {
            let divisions = (random.instead_of(1), random.instead_of(4));
            settings.roundup_power2_divisions = vec![divisions; 1 + random.below(80)];
        }
        4 => {
            let mib = random.next() >> random.below(64);
            settings.conf = format!("large_segment_size_mb:{mib},expandable_segments:True").into();
        }
        5 => {
            let names = [
                "direct",
                "pool",
                "buddy",
                "slab",
                "bfc",
                "tide",
                "no strategy",
            ];
            settings.strategy = names[random.below(names.len())].into();
        }
        _ => {}
    }
    settings
}

fn change_event(events: &mut Vec<TraceEvent>, random: &mut Random) {
    if events.is_empty() {
        return;
    }
    let (at, other) = (random.below(events.len()), random.below(events.len()));
    let (there, event) = (events[other].event, &mut events[at]);
    match random.below(12) {
        0 => event.event.size = Bytes(random.instead_of(event.event.size.get())),
        1 => event.event.address = DeviceAddress(random.instead_of(event.event.address.get())),
        2 => event.event.address = there.address,
        3 => {
            event.event.address =
                DeviceAddress(there.address.get().wrapping_add(there.size.get() / 2));
        }
        4 => event.event.size = there.size,
        5 => event.event.stream = Stream(random.instead_of(event.event.stream.0)),
        6 => event.event.action = Action::ALL[random.below(Action::ALL.len())],
        7 => event.time_us = random.next().cast_signed() >> random.below(64),
        8 => events.swap(at, other),
        9 => drop(events.remove(at)),
        10 => {
            let copy = events[at];
            events.insert(other, copy);
        }
        _ => {
            let (pool, is_known) = (random.next() >> random.below(64), random.below(2) == 0);
            event.event.pool = MempoolId(if is_known { pool } else { 0 }, 0);
            event.pool_known = is_known;
        }
    }
}

fn variable(name: &str, otherwise: u64) -> u64 {
    env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

#[test]
fn whatever_a_file_says_it_is_refused_or_everything_is_made_of_it() {
    let from = variable("LOWTIDE_MUTATED_FROM", 0);
    let inputs = variable("LOWTIDE_MUTATED_INPUTS", INPUTS);
    let bases = bases();
    let (mut refused, mut failed) = (0, Vec::new());
    for number in from..from + inputs {
        let (what, bytes) = input(&bases, number);
        match panic::catch_unwind(|| make_everything(&bytes)) {
            Ok(Made::Refused) => refused += 1,
            Ok(Made::Recording(_)) => {}
            Err(_) => failed.push(what),
        }
    }
    assert!(
        failed.is_empty(),
        "{} fail:\n{}",
        failed.len(),
        failed.join("\n")
    );
    let taken = inputs - refused;
    assert!(
        taken * 10 > inputs,
        "only {taken} of {inputs} are recordings"
    );
    let peak = peak_kib();
    assert!(peak <= PEAK_KIB_MAX, "{peak} KiB");
}

/// Returns the peak memory of this process by Linux's count, in KiB; 0 on other systems.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.map(|peak| peak.trim().trim_end_matches(" kB"));
    peak.map_or(0, |peak| peak.parse().expect("Linux says it"))
}
