//! Every driver call of a program fails once, for lack of memory and otherwise.
//!
//! After the operation in which it fails, the program's blocks are where they were, the device may touch
//! them, and everything adds up; the rest of the program runs, and at the end the device has
//! everything back.
//!
//! Not covered: two failures in one operation (`million.rs` has some), and a driver that does something
//! although it says that it failed.

use lowtide_core::{Bytes, Config, MempoolId, Stream};
use lowtide_sim::program::{CAPACITY, Op, Runner, configs, random_program};

const RANDOM_PROGRAMS: u64 = if cfg!(miri) { 0 } else { 6 };
const RANDOM_LENGTH: usize = 60;

fn alloc(size: Bytes, stream: u64) -> Op {
    Op::Alloc {
        size,
        stream: Stream(stream),
        pool: None,
    }
}

/// Fills the device, frees, and asks for what fits only after cached memory went back.
fn tight_program() -> Vec<Op> {
    let mut program = vec![alloc(Bytes::mib(30), 0); 4];
    program.push(alloc(Bytes::kib(3), 1));
    program.extend([
        Op::Free { index: 1 },
        Op::Free { index: 2 },
        Op::Free { index: 0 },
    ]);
    program.extend([
        alloc(Bytes::mib(90), 0),
        alloc(Bytes::mib(45), 1),
        Op::EmptyCache,
    ]);
    program.extend([alloc(Bytes::mib(15), 0), alloc(Bytes::mib(16), 0)]);
    program
}

/// Blocks that other streams use, freed in and out of a capture.
fn stream_program() -> Vec<Op> {
    let shared = |index| Op::RecordStream {
        index,
        stream: Stream(2),
    };
    let launch = Op::Launch {
        stream: Stream(2),
        ns: 1_000_000,
    };
    vec![
        alloc(Bytes::mib(6), 0),
        alloc(Bytes::mib(12), 0),
        alloc(Bytes::kib(7), 1),
        shared(0),
        shared(1),
        shared(2),
        Op::RecordStream {
            index: 1,
            stream: Stream(3),
        },
        launch,
        Op::Free { index: 1 },
        Op::CaptureBegin,
        Op::Free { index: 0 },
        Op::CaptureEnd,
        alloc(Bytes::mib(12), 0),
        Op::Advance { ns: 2_000_000 },
        Op::ProcessEvents,
        Op::Free { index: 0 },
        alloc(Bytes::mib(6), 0),
        Op::EmptyCache,
    ]
}

/// A private pool from its first block to its end.
fn pool_program() -> Vec<Op> {
    let pool = MempoolId(0, 1);
    vec![
        Op::BeginPool {
            pool,
            stream: Stream(1),
        },
        alloc(Bytes::mib(21), 1),
        alloc(Bytes::kib(7), 1),
        Op::EndPool { pool },
        alloc(Bytes::mib(21), 1),
        Op::Free { index: 0 },
        Op::UseOnOom { pool, allow: true },
        alloc(Bytes::mib(70), 1),
        alloc(Bytes::mib(20), 1),
        Op::ReleasePool { pool },
        Op::Free { index: 0 },
        Op::EmptyCache,
    ]
}

/// Random programs with no failures but those that are planned here.
fn random_programs() -> impl Iterator<Item = Vec<Op>> {
    let plain = |op: &Op| !matches!(op, Op::Fault { .. });
    (0..RANDOM_PROGRAMS).map(move |seed| {
        random_program(seed)
            .filter(plain)
            .take(RANDOM_LENGTH)
            .collect()
    })
}

fn count_driver_calls(config: &Config, program: &[Op]) -> u64 {
    let mut runner = Runner::new(config, CAPACITY);
    for op in program {
        runner.apply(op).expect("nothing fails yet");
    }
    runner.driver_calls()
}

fn fail_every_call(program: &[Op]) {
    for config in configs() {
        let calls = count_driver_calls(&config, program);
        assert!(calls > 3, "{config} never misses: {calls} calls");
        for nth in 1..=calls {
            for out_of_memory in [false, true] {
                let mut faulty = vec![Op::Fault { nth, out_of_memory }];
                faulty.extend(program);
                assert_eq!(
                    Runner::run(&config, CAPACITY, &faulty),
                    Ok(()),
                    "{faulty:?}"
                );
            }
        }
    }
}

#[test]
fn when_memory_is_tight() {
    fail_every_call(&tight_program());
}

#[test]
fn when_streams_share_blocks() {
    fail_every_call(&stream_program());
}

#[test]
fn in_the_life_of_a_private_pool() {
    fail_every_call(&pool_program());
}

#[test]
fn in_random_programs() {
    for program in random_programs() {
        fail_every_call(&program);
    }
}

/// Addresses are reserved before the memory behind them is created, which may fail.
#[test]
fn addresses_without_memory_go_back() {
    let config = "caching:expandable_segments:True".parse().unwrap();
    let program = [alloc(CAPACITY, 0), alloc(Bytes::mib(1), 0)];
    assert_eq!(Runner::run(&config, CAPACITY, &program), Ok(()));
}
