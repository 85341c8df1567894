//! Every driver call of a program fails once, with out-of-memory and with another error.
//!
//! After the failed operation, the program's blocks are at the same addresses, the device may access them, and
//! the statistics add up. The rest of the program runs, and at the end all memory is released to the device.
//!
//! Two failures in one operation are tried while pages are mapped (`million.rs` has more). Not covered: a driver
//! call that has an effect although it returns an error.

use std::collections::BTreeSet;
use std::ops::Range;

use lowtide_core::{
    AllocError, BlockSnapshot, BlockStatus, Bytes, CheckLevel, Config, DeviceAddress,
    DeviceAllocator, DriverError, Handle, MempoolId, SegmentSnapshot, Stream,
};
use lowtide_sim::program::{CAPACITY, Effect, Op, Runner, configs, random_program};
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver, Step, StepKind};

const RANDOM_PROGRAMS: u64 = if cfg!(miri) { 0 } else { 6 };
const RANDOM_LENGTH: usize = 60;

fn alloc(size: Bytes, stream: u64) -> Op {
    Op::Alloc {
        size,
        stream: Stream(stream),
        pool: None,
    }
}

/// Fills the device, frees, and allocates a block that fits only after cached memory is released.
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

/// Blocks that other streams use, freed during and outside of a capture.
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
        Op::CaptureBegin { stream: Stream(0) },
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

/// A request that needs frames of `tide` from everywhere.
const MIXED: Bytes = Bytes::mib(20);

/// Prepares [`MIXED`]. While work is queued, no view is unmapped, so each larger request gets addresses behind the last
/// block of 2 MiB. Idle frames move there. The frames at each place, by the size of its request:
///
/// ```text
/// 4 MiB: ab   6 MiB: abc   8 MiB: abcd   10 MiB: abcde   12 MiB: cdefgh
/// ```
///
/// Then `c` and `d` are in use in the place of 8 MiB, and the work is done. The request extends the last place. It
/// unmaps `c` and `d` there, uses `e` to `h`, moves `a` and `b`, which lose one of their four views, and creates four.
fn before_mixed() -> Vec<Op> {
    let mut program = vec![Op::Launch {
        stream: Stream(0),
        ns: 1_000_000,
    }];
    for (separators, size) in (0..).zip([4, 6, 8, 10]) {
        program.push(alloc(Bytes::mib(size), 0));
        program.push(alloc(Bytes::mib(2), 0));
        program.push(Op::Free { index: separators });
    }
    program.extend([
        // `a` and `b` are in use while `c` moves for the fourth time.
        alloc(Bytes::mib(4), 0),
        alloc(Bytes::mib(12), 0),
        Op::Free { index: 5 },
        alloc(Bytes::mib(4), 0),
        Op::Free { index: 4 },
        Op::Advance { ns: 1_000_000 },
    ]);
    program
}

/// Random programs without failures of their own.
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
        fail_every_call_of(&config, program);
    }
}

fn fail_every_call_of(config: &Config, program: &[Op]) {
    let calls = count_driver_calls(config, program);
    assert!(calls > 3, "{config} never misses: {calls} calls");
    for nth in 1..=calls {
        for out_of_memory in [false, true] {
            let mut faulty = vec![Op::Fault { nth, out_of_memory }];
            faulty.extend(program);
            assert_eq!(Runner::run(config, CAPACITY, &faulty), Ok(()), "{faulty:?}");
        }
    }
}

/// What a driver call does for a block.
#[derive(PartialEq, Eq, Debug)]
enum Way {
    Retire,
    UnmapStale(Bytes),
    Move,
    MapNew,
}

/// Returns what a driver call does for the block at some addresses. `known` are the handles that were mapped before.
fn way_of(step: &Step, block: &Range<DeviceAddress>, known: &BTreeSet<Handle>) -> Option<Way> {
    match step.kind {
        StepKind::Unmap { address, size } if block.contains(&address) => {
            Some(Way::UnmapStale(size))
        }
        StepKind::Unmap { .. } => Some(Way::Retire),
        StepKind::Map { handle, .. } if known.contains(&handle) => Some(Way::Move),
        StepKind::Map { .. } => Some(Way::MapNew),
        StepKind::Record { .. } | StepKind::Wait { .. } => None,
    }
}

/// One request reuses, moves, retires, unmaps and creates.
#[test]
fn when_a_request_takes_frames_from_everywhere() {
    let config: Config = "tide".parse().expect("a strategy");
    let mut program = before_mixed();
    let mut runner = Runner::new(&config, CAPACITY);
    let mut known = BTreeSet::new();
    for op in &program {
        runner.apply(op).expect("nothing fails yet");
        known.extend(runner.steps().iter().filter_map(|step| match step.kind {
            StepKind::Map { handle, .. } => Some(handle),
            _ => None,
        }));
    }
    let request = alloc(MIXED, 0);
    assert_eq!(runner.apply(&request), Ok(Effect::Done));
    let held = runner.allocator().lane().held_blocks(MempoolId::DEFAULT);
    let held = held.expect("the default pool exists");
    let block = held.iter().find(|block| block.size == MIXED);
    let start = block.expect("the request was served").address;
    let steps = runner.steps().iter();
    let ways: Vec<Way> = steps
        .filter_map(|step| way_of(step, &(start..start + MIXED), &known))
        .collect();
    // The other four of its ten pages had their frames.
    assert_eq!(
        ways,
        [
            Way::Retire,
            Way::Retire,
            Way::UnmapStale(Bytes::mib(4)),
            Way::Move,
            Way::Move,
            Way::MapNew,
            Way::MapNew,
            Way::MapNew,
            Way::MapNew,
        ]
    );
    // A second request follows the one that fails.
    program.extend([request, request]);
    fail_every_call_of(&config, &program);
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

/// Addresses are reserved before their memory is created, and that may fail.
#[test]
fn addresses_without_memory_go_back() {
    let config = "caching:expandable_segments:True".parse().unwrap();
    let program = [alloc(CAPACITY, 0), alloc(Bytes::mib(1), 0)];
    assert_eq!(Runner::run(&config, CAPACITY, &program), Ok(()));
}

/// The driver refuses to make pages accessible and to unmap them, but allows both later.
#[test]
fn pages_that_are_neither_mapped_nor_unmapped_go_back() -> Result<(), AllocError> {
    let config: Config = "caching:expandable_segments:True".parse().unwrap();
    for seed in 0..400 {
        let mut allocator = allocator(&config);
        let block = allocator.allocate(Bytes::mib(4), Stream(1))?;
        let failed = DriverError::Failed {
            call: "a call",
            code: 1,
            message: String::new(),
        };
        let faults = FaultPlan::random(seed, 2, failed);
        allocator.driver().set_faults(faults);
        let more = allocator.allocate(Bytes::mib(70), Stream(1));
        allocator.driver().set_faults(FaultPlan::none());
        // The same pages are mapped again.
        let more = more.or_else(|_| allocator.allocate(Bytes::mib(70), Stream(1)))?;
        allocator.free(more)?;
        allocator.free(block)?;
        allocator.empty_cache(None)?;
        assert_eq!(allocator.driver().leaks(), [""; 0], "seed {seed}");
    }
    Ok(())
}

/// Pages that the driver neither maps nor unmaps block only their own segment.
#[test]
fn a_segment_that_is_half_mapped_is_passed_over() -> Result<(), AllocError> {
    let config: Config = "caching:expandable_segments:True".parse().unwrap();
    let mut allocator = allocator(&config);
    let failed = DriverError::Failed {
        call: "a call",
        code: 1,
        message: String::new(),
    };
    let before = allocator.allocate(Bytes::mib(4), Stream(1))?;
    let both = FaultPlan::every(&[Call::SetAccess, Call::Unmap], failed.clone());
    allocator.driver().set_faults(both);
    let refused = allocator.allocate(Bytes::mib(30), Stream(1));
    assert!(matches!(refused, Err(AllocError::Driver(_))));
    let unmap = FaultPlan::every(&[Call::Unmap], failed);
    allocator.driver().set_faults(unmap);
    let own = allocator.allocate(Bytes::mib(30), Stream(1))?;
    let others = allocator.allocate(Bytes::mib(20), Stream(2))?;
    assert_eq!(
        allocator.lane().check_invariants(CheckLevel::Everything),
        Ok(())
    );
    allocator.driver().set_faults(FaultPlan::none());
    for block in [before, own, others] {
        allocator.free(block)?;
    }
    allocator.empty_cache(None)?;
    assert_eq!(allocator.driver().leaks(), [""; 0]);
    Ok(())
}

fn allocator(config: &Config) -> DeviceAllocator<SimDriver> {
    let capacity = Some(CAPACITY);
    DeviceAllocator::new(
        SimDriver::new(SimConfig {
            capacity,
            ..SimConfig::default()
        }),
        0,
        config,
    )
}

/// Returns the snapshot of a job with free blocks and, with expandable segments, a hole in one.
fn recorded_job(config: &Config) -> Result<Vec<SegmentSnapshot>, AllocError> {
    let mut allocator = allocator(config);
    let mut blocks = Vec::new();
    for _ in 0..4 {
        blocks.push(allocator.allocate(Bytes::mib(20), Stream(1))?);
    }
    blocks.push(allocator.allocate(Bytes::kib(3), Stream(2))?);
    blocks.push(allocator.allocate(Bytes::mib(3), Stream(2))?);
    allocator.free(blocks[1])?;
    allocator.empty_cache(None)?;
    allocator.free(blocks[3])?;
    Ok(allocator.segments())
}

/// Returns the contents of a snapshot without addresses, because the driver chooses those.
fn shape(segments: &[SegmentSnapshot]) -> Vec<(Stream, Bytes, BlockStatus)> {
    let of_segment = |segment: &SegmentSnapshot| {
        let stream = segment.stream;
        let of_block = move |block: &BlockSnapshot| (stream, block.size, block.status);
        segment.blocks.iter().map(of_block).collect::<Vec<_>>()
    };
    segments.iter().flat_map(of_segment).collect()
}

#[test]
fn a_segment_is_adopted_as_a_whole_or_not_at_all() -> Result<(), AllocError> {
    for config in ["caching", "caching:expandable_segments:True"] {
        let config = config.parse().expect("the configurations are valid");
        let job = recorded_job(&config)?;
        assert!(job.len() > 3, "{config}");
        let mut untouched = allocator(&config);
        for segment in &job {
            assert_eq!(untouched.lane_mut().adopt(segment), Ok(true));
        }
        assert_eq!(shape(&untouched.segments()), shape(&job), "{config}");
        for nth in 1..60 {
            let mut allocator = allocator(&config);
            let plan = FaultPlan::nth_of_any(nth, DriverError::OutOfMemory);
            allocator.driver().set_faults(plan);
            for segment in &job {
                let before = allocator.segments();
                if allocator.lane_mut().adopt(segment).is_err() {
                    let checked = allocator.lane().check_invariants(CheckLevel::Everything);
                    assert_eq!(checked, Ok(()), "{config}: call {nth} failed");
                    assert_eq!(allocator.segments(), before, "{config}: call {nth} failed");
                    assert_eq!(
                        allocator.lane_mut().adopt(segment),
                        Ok(true),
                        "{config}: call {nth} failed"
                    );
                }
            }
            allocator.driver().set_faults(FaultPlan::none());
            let checked = allocator.lane().check_invariants(CheckLevel::Everything);
            assert_eq!(checked, Ok(()), "{config}: call {nth} failed");
            let adopted = allocator.segments();
            assert_eq!(shape(&adopted), shape(&job), "{config}: call {nth} failed");
            let blocks = adopted.iter().flat_map(|segment| &segment.blocks);
            for block in blocks.filter(|block| block.status == BlockStatus::Allocated) {
                allocator.free(block.address)?;
            }
            allocator.empty_cache(None)?;
            let leaks = allocator.driver().leaks();
            assert!(leaks.is_empty(), "{config}: call {nth} failed: {leaks:?}");
        }
    }
    Ok(())
}

/// A snapshot of 3 MiB, active or free, with pages of 2 and of 20 MiB: the rest of the last page is free.
#[test]
fn what_whole_pages_hold_beyond_a_picture_is_free() -> Result<(), AllocError> {
    let config = "caching:expandable_segments:True".parse().expect("valid");
    let statuses = [BlockStatus::Allocated, BlockStatus::Inactive];
    for (status, is_large) in statuses.into_iter().flat_map(|s| [(s, false), (s, true)]) {
        let mut allocator = allocator(&config);
        for place in [0, 5] {
            let address = DeviceAddress(0x7f00_0000_0000) + Bytes::mib(place);
            let block = |offset: Bytes, size, status| BlockSnapshot {
                address: address + offset,
                size,
                requested: size,
                status,
            };
            let segment = SegmentSnapshot {
                address,
                size: Bytes::mib(3),
                stream: Stream::DEFAULT,
                pool: MempoolId::DEFAULT,
                is_large,
                is_expandable: true,
                blocks: vec![
                    block(Bytes::ZERO, Bytes::mib(1), BlockStatus::Allocated),
                    block(Bytes::mib(1), Bytes::mib(2), status),
                ],
            };
            assert_eq!(allocator.lane_mut().adopt(&segment), Ok(true));
            assert_eq!(
                allocator.lane().check_invariants(CheckLevel::Everything),
                Ok(())
            );
        }
        let picture = allocator.segments();
        let blocks = picture.iter().flat_map(|segment| &segment.blocks);
        for block in blocks.filter(|block| block.status == BlockStatus::Allocated) {
            allocator.free(block.address)?;
        }
        allocator.empty_cache(None)?;
        assert!(allocator.driver().leaks().is_empty());
        assert_eq!(allocator.stats().reserved(), Bytes::ZERO);
    }
    Ok(())
}
