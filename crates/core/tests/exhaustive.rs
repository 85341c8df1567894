//! Every program of up to six operations from an alphabet of six. The device has memory for two large segments of
//! PyTorch's. With options that are not a strategy's defaults, programs have up to five operations.
//!
//! There are four alphabets: sizes, streams, pools, failures. Programs with an operation that does nothing are
//! left out, because they equal shorter programs. Results, events and statistics are checked after each
//! operation. After the last one everything is checked, and that all memory is released to the device.
//!
//! Not covered: programs of seven operations, or with two of these alphabets at once. `programs.rs` and
//! `million.rs` test such programs at random.

use lowtide_core::{Bytes, Config, MempoolId, Stream};
use lowtide_sim::program::{Effect, Op, Runner, configs};

const CAPACITY: Bytes = Bytes::mib(44);
const LETTERS: usize = 6;

const POOL: MempoolId = MempoolId(0, 1);
const OTHER: Stream = Stream(1);

const fn alloc(size: Bytes) -> Op {
    Op::Alloc {
        size,
        stream: Stream::DEFAULT,
        pool: None,
    }
}

/// Small, medium and large requests; two large ones fill the device.
const SIZES: [Op; LETTERS] = [
    alloc(Bytes(513)),
    alloc(Bytes::kib(1536)),
    alloc(Bytes::mib(21)),
    Op::Free { index: 0 },
    Op::Free { index: 1 },
    Op::EmptyCache,
];

/// Work of other streams, and captures.
const STREAMS: [Op; LETTERS] = [
    alloc(Bytes::mib(21)),
    Op::Free { index: 0 },
    Op::RecordStream {
        index: 0,
        stream: OTHER,
    },
    Op::Launch {
        stream: OTHER,
        ns: 10_000_000,
    },
    Op::CaptureBegin { stream: OTHER },
    Op::CaptureEnd,
];

/// The life of a private pool.
const POOLS: [Op; LETTERS] = [
    Op::BeginPool {
        pool: POOL,
        stream: Stream::DEFAULT,
    },
    alloc(Bytes::mib(21)),
    Op::EndPool { pool: POOL },
    Op::Free { index: 0 },
    Op::ReleasePool { pool: POOL },
    Op::UseOnOom {
        pool: POOL,
        allow: true,
    },
];

/// Driver calls that fail.
const FAILURES: [Op; LETTERS] = [
    Op::Fault {
        nth: 1,
        out_of_memory: false,
    },
    Op::Fault {
        nth: 2,
        out_of_memory: true,
    },
    alloc(Bytes::mib(21)),
    Op::RecordStream {
        index: 0,
        stream: OTHER,
    },
    Op::Free { index: 0 },
    Op::EmptyCache,
];

/// Executes every program of `length` letters and returns how many there were.
fn run_all(config: &Config, alphabet: &[Op; LETTERS], length: usize) -> u64 {
    let mut letters = vec![0; length];
    let mut programs = 0;
    loop {
        let program = letters.iter().map(|&letter| alphabet[letter]);
        let last = match run(config, program) {
            Ok(None) => {
                programs += 1;
                length - 1
            }
            // All programs with this beginning are skipped.
            Ok(Some(idle)) => {
                letters[idle + 1..].fill(0);
                idle
            }
            Err(error) => {
                let program: Vec<_> = letters.iter().map(|&letter| alphabet[letter]).collect();
                panic!("{config}: {program:?}: {error}");
            }
        };
        let Some(turning) = (0..=last).rev().find(|&place| letters[place] + 1 < LETTERS) else {
            return programs;
        };
        letters[turning] += 1;
        letters[turning + 1..].fill(0);
    }
}

/// Executes a program. Returns the index of the first operation that does nothing, if there is one.
fn run(config: &Config, program: impl Iterator<Item = Op>) -> Result<Option<usize>, String> {
    let mut runner = Runner::new(config, CAPACITY);
    for (place, op) in program.enumerate() {
        if runner.apply(&op)? == Effect::Nothing {
            return Ok(Some(place));
        }
    }
    runner.check()?;
    runner.finish()?;
    Ok(None)
}

fn length_max(config: &Config) -> usize {
    match config.to_conf().as_str() {
        _ if cfg!(miri) => 2,
        // Expandable segments are practically a strategy of their own.
        "" | "expandable_segments:True" => 6,
        _ => 5,
    }
}

fn run_alphabet(alphabet: &[Op; LETTERS]) {
    for config in configs() {
        let lengths = 1..=length_max(&config);
        let programs: u64 = lengths
            .map(|length| run_all(&config, alphabet, length))
            .sum();
        assert!(
            programs > 6,
            "{config}: only {programs} programs make sense"
        );
    }
}

#[test]
fn sizes() {
    run_alphabet(&SIZES);
}

#[test]
fn streams_and_captures() {
    run_alphabet(&STREAMS);
}

#[test]
fn private_pools() {
    run_alphabet(&POOLS);
}

#[test]
fn failures() {
    run_alphabet(&FAILURES);
}
