//! Graph captures: blocks that only captured work used wait for no event. Such a block may be reused in the
//! capture if the graph orders all its uses before the reuse.
//!
//! The model uses vector clocks, while the allocator follows the graph's nodes. Random programs do not change the
//! order of a captured stream by hand; single tests do.

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, DeviceAllocator, Driver, DriverError, Stream,
};
use lowtide_sim::program::{CAPACITY, Op, Runner};
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};
use proptest::prelude::*;

const OWN: Stream = Stream(1);
const SIDE: Stream = Stream(2);
const THIRD: Stream = Stream(3);
const SIZE: Bytes = Bytes::mib(4);

type Outcome = Result<(), AllocError>;

fn allocator(conf: &str) -> DeviceAllocator<SimDriver> {
    let config: Config = conf.parse().expect("the options exist");
    DeviceAllocator::new(SimDriver::new(SimConfig::default()), 0, &config)
}

fn reusing() -> DeviceAllocator<SimDriver> {
    allocator("caching:graph_capture_record_stream_reuse:True")
}

fn begin(allocator: &mut DeviceAllocator<SimDriver>) {
    allocator.lane_mut().capture_begin();
    assert!(allocator.driver().begin_capture(OWN));
}

fn end(allocator: &mut DeviceAllocator<SimDriver>) -> Outcome {
    assert!(allocator.driver().end_capture(OWN));
    allocator.lane_mut().capture_end()
}

/// Allocates a block of [`OWN`], uses it in captured work of `streams`, and frees it.
fn use_in(
    allocator: &mut DeviceAllocator<SimDriver>,
    streams: &[Stream],
) -> Result<DeviceAddress, AllocError> {
    let block = allocator.allocate(SIZE, OWN)?;
    share(allocator, block, streams)?;
    allocator.free(block)?;
    Ok(block)
}

/// Uses a block in captured work of [`OWN`], then in work of `streams`, which waits for it.
fn share(
    allocator: &mut DeviceAllocator<SimDriver>,
    block: DeviceAddress,
    streams: &[Stream],
) -> Outcome {
    allocator.driver().launch(OWN, 1);
    for &stream in streams {
        assert!(allocator.driver().wait(stream, OWN));
        allocator.driver().launch(stream, 1);
        allocator.lane_mut().record_stream(block, stream)?;
    }
    Ok(())
}

/// Returns whether a request now gets `block`. The request's block is freed again.
fn is_free(
    allocator: &mut DeviceAllocator<SimDriver>,
    block: DeviceAddress,
) -> Result<bool, AllocError> {
    let taken = allocator.allocate(SIZE, OWN)?;
    allocator.free(taken)?;
    Ok(taken == block)
}

/// The graph orders its own streams, so a block that only a capture shared needs no event.
#[test]
fn what_only_a_capture_shared_is_free_when_it_ends() -> Outcome {
    let mut allocator = allocator("caching");
    begin(&mut allocator);
    let block = use_in(&mut allocator, &[SIDE])?;
    assert!(allocator.driver().wait(OWN, SIDE));
    assert!(!is_free(&mut allocator, block)?);
    end(&mut allocator)?;
    allocator.driver().launch(SIDE, u64::MAX / 4);
    assert!(is_free(&mut allocator, block)?);
    Ok(())
}

/// Work of a stream outside the capture runs at once, and no graph orders it.
#[test]
fn work_that_is_not_captured_is_waited_for_after_the_capture() -> Outcome {
    for mut allocator in [allocator("caching"), reusing()] {
        let block = allocator.allocate(SIZE, OWN)?;
        allocator.lane_mut().capture_begin();
        allocator.driver().begin_capture(THIRD);
        allocator.driver().launch(SIDE, 1_000_000_000);
        allocator.lane_mut().record_stream(block, SIDE)?;
        allocator.free(block)?;
        allocator.driver().end_capture(THIRD);
        allocator.lane_mut().capture_end()?;
        assert!(!is_free(&mut allocator, block)?);
        allocator.driver().advance(1_000_000_000);
        assert!(is_free(&mut allocator, block)?);
    }
    Ok(())
}

#[test]
fn a_block_serves_its_capture_again_once_all_streams_are_joined() -> Outcome {
    let mut allocator = reusing();
    begin(&mut allocator);
    let block = use_in(&mut allocator, &[SIDE, THIRD])?;
    assert!(!is_free(&mut allocator, block)?);
    assert!(allocator.driver().wait(OWN, SIDE));
    allocator.driver().launch(OWN, 1);
    assert!(!is_free(&mut allocator, block)?);
    assert!(allocator.driver().wait(OWN, THIRD));
    assert!(is_free(&mut allocator, block)?);
    end(&mut allocator)
}

#[test]
fn without_the_option_a_block_serves_its_capture_once() -> Outcome {
    let mut allocator = allocator("caching");
    begin(&mut allocator);
    let block = use_in(&mut allocator, &[SIDE])?;
    assert!(allocator.driver().wait(OWN, SIDE));
    assert!(!is_free(&mut allocator, block)?);
    end(&mut allocator)
}

/// A library may capture a stream without telling the allocator. An event of that stream would break the capture.
#[test]
fn a_capture_that_nobody_announced_is_left_alone() -> Outcome {
    let mut allocator = allocator("tide");
    let block = allocator.allocate(SIZE, OWN)?;
    assert!(allocator.driver().begin_capture(OWN));
    allocator.free(block)?;
    allocator.allocate(SIZE + SIZE, OWN)?;
    for call in [Call::RecordEvent, Call::QueryEvent] {
        assert_eq!(allocator.driver().stats(call).count, 0, "{call}");
    }
    assert!(allocator.driver().end_capture(OWN));
    allocator.allocate(SIZE + SIZE + SIZE, OWN)?;
    assert_eq!(allocator.driver().stats(Call::RecordEvent).count, 1);
    Ok(())
}

/// Two graphs share a pool: the second capture reuses a block that the first freed, without a request in between.
#[test]
fn the_next_capture_finds_what_the_last_one_freed() -> Outcome {
    for (mut allocator, is_expected) in [(reusing(), true), (allocator("caching"), false)] {
        begin(&mut allocator);
        let block = use_in(&mut allocator, &[SIDE])?;
        assert!(allocator.driver().wait(OWN, SIDE));
        end(&mut allocator)?;
        begin(&mut allocator);
        assert_eq!(is_free(&mut allocator, block)?, is_expected);
        end(&mut allocator)?;
    }
    Ok(())
}

/// Work from before the capture is in no graph, and may still run when the graph is launched.
#[test]
fn what_work_outside_the_capture_used_waits_for_an_event() -> Outcome {
    let mut allocator = reusing();
    let block = allocator.allocate(SIZE, OWN)?;
    allocator.driver().launch(SIDE, 1_000_000_000);
    allocator.lane_mut().record_stream(block, SIDE)?;
    begin(&mut allocator);
    share(&mut allocator, block, &[SIDE])?;
    allocator.free(block)?;
    assert!(allocator.driver().wait(OWN, SIDE));
    assert!(!is_free(&mut allocator, block)?);
    end(&mut allocator)?;
    assert!(!is_free(&mut allocator, block)?);
    allocator.driver().advance(1_000_000_000);
    assert!(is_free(&mut allocator, block)?);
    Ok(())
}

/// After a capture has ended, the program uses its block in the same stream again.
#[test]
fn what_a_stream_did_between_two_captures_waits_for_an_event() -> Outcome {
    for (mut allocator, joins) in [
        (reusing(), true),
        (reusing(), false),
        (allocator("caching"), true),
        (allocator("caching"), false),
    ] {
        begin(&mut allocator);
        let block = allocator.allocate(SIZE, OWN)?;
        share(&mut allocator, block, &[SIDE])?;
        assert!(allocator.driver().wait(OWN, SIDE));
        end(&mut allocator)?;
        allocator.driver().launch(SIDE, 1_000_000_000);
        begin(&mut allocator);
        allocator.driver().launch(OWN, 1);
        if joins {
            assert!(allocator.driver().wait(SIDE, OWN));
            allocator.driver().launch(SIDE, 1);
        }
        allocator.free(block)?;
        if joins {
            assert!(allocator.driver().wait(OWN, SIDE));
        }
        assert!(!is_free(&mut allocator, block)?);
        end(&mut allocator)?;
        assert!(!is_free(&mut allocator, block)?);
        allocator.driver().advance(1_000_000_000);
        assert!(is_free(&mut allocator, block)?);
    }
    Ok(())
}

/// As in PyTorch, a position in a graph with no work before it counts as none.
#[test]
fn what_is_freed_before_any_captured_work_waits_for_the_end() -> Outcome {
    let mut allocator = reusing();
    begin(&mut allocator);
    let block = allocator.allocate(SIZE, OWN)?;
    assert!(allocator.driver().wait(SIDE, OWN));
    allocator.lane_mut().record_stream(block, SIDE)?;
    allocator.free(block)?;
    allocator.driver().launch(SIDE, 1);
    assert!(allocator.driver().wait(OWN, SIDE));
    assert!(!is_free(&mut allocator, block)?);
    end(&mut allocator)?;
    assert!(is_free(&mut allocator, block)?);
    Ok(())
}

/// A node of a later capture may have the name of an earlier capture's node, while a third capture continues.
#[test]
fn names_of_nodes_mean_what_they_do_in_their_capture() -> Outcome {
    let mut allocator = reusing();
    allocator.lane_mut().capture_begin();
    assert!(allocator.driver().begin_capture(THIRD));
    begin(&mut allocator);
    let block = use_in(&mut allocator, &[SIDE])?;
    assert!(allocator.driver().wait(OWN, SIDE));
    // The next capture's first node has the name of this one's last.
    allocator.driver().launch(OWN, 1);
    assert!(is_free(&mut allocator, block)?);
    end(&mut allocator)?;

    begin(&mut allocator);
    let block = use_in(&mut allocator, &[SIDE])?;
    assert!(!is_free(&mut allocator, block)?);
    assert!(allocator.driver().wait(OWN, SIDE));
    assert!(is_free(&mut allocator, block)?);
    end(&mut allocator)?;
    assert!(allocator.driver().end_capture(THIRD));
    allocator.lane_mut().capture_end()?;
    assert!(allocator.driver().violations().is_empty());
    Ok(())
}

/// With two captures at once, neither orders the other's work.
#[test]
fn a_stream_of_another_capture_keeps_a_block_until_both_have_ended() -> Outcome {
    let mut allocator = reusing();
    begin(&mut allocator);
    allocator.lane_mut().capture_begin();
    assert!(allocator.driver().begin_capture(SIDE));
    let block = allocator.allocate(SIZE, OWN)?;
    allocator.driver().launch(OWN, 1);
    allocator.driver().launch(SIDE, 1);
    allocator.lane_mut().record_stream(block, SIDE)?;
    allocator.free(block)?;
    assert!(!is_free(&mut allocator, block)?);
    end(&mut allocator)?;
    assert!(!is_free(&mut allocator, block)?);
    assert!(allocator.driver().end_capture(SIDE));
    allocator.lane_mut().capture_end()?;
    assert!(is_free(&mut allocator, block)?);
    Ok(())
}

/// `cudaStreamUpdateCaptureDependencies` can set a stream's position to before a join.
#[test]
fn a_stream_whose_order_is_set_anew_comes_after_less() -> Outcome {
    let mut allocator = reusing();
    begin(&mut allocator);
    let block = allocator.allocate(SIZE, OWN)?;
    allocator.driver().launch(OWN, 1);
    let start = allocator.driver().capture_point(OWN).unwrap().after;
    let first = use_in(&mut allocator, &[SIDE])?;
    assert!(allocator.driver().wait(OWN, SIDE));
    assert!(is_free(&mut allocator, first)?);
    // From here on the stream's work no longer comes after that of the other stream.
    allocator.driver().set_capture_order(OWN, &start);
    allocator.lane_mut().record_stream(block, SIDE)?;
    allocator.free(block)?;
    assert!(!is_free(&mut allocator, block)?);
    assert!(allocator.driver().wait(OWN, SIDE));
    let both = [
        allocator.allocate(SIZE, OWN)?,
        allocator.allocate(SIZE, OWN)?,
    ];
    assert!(both.contains(&block));
    for block in both {
        allocator.free(block)?;
    }
    end(&mut allocator)
}

/// The block's own stream counts like the others.
#[test]
fn a_stream_whose_order_is_set_anew_may_not_come_after_its_own_work() -> Outcome {
    let mut allocator = reusing();
    begin(&mut allocator);
    let block = allocator.allocate(SIZE, OWN)?;
    share(&mut allocator, block, &[SIDE])?;
    let side = allocator.driver().capture_point(SIDE).unwrap().after;
    allocator.driver().launch(OWN, 1);
    allocator.free(block)?;
    allocator.driver().set_capture_order(OWN, &side);
    assert!(!is_free(&mut allocator, block)?);
    end(&mut allocator)
}

/// If an event passed before the capture, but was not queried, its block is freed during the capture.
#[test]
fn what_had_passed_before_a_capture_is_free_in_it() {
    let alloc = |stream| Op::Alloc {
        size: Bytes(512),
        stream: Stream(stream),
        pool: None,
    };
    let record = |index, stream| Op::RecordStream {
        index,
        stream: Stream(stream),
    };
    let program = [
        alloc(2),
        alloc(2),
        record(0, 1),
        record(1, 3),
        Op::Free { index: 0 },
        Op::Free { index: 0 },
        Op::Fault {
            nth: 2,
            out_of_memory: false,
        },
        alloc(0),
        Op::CaptureBegin { stream: Stream(0) },
        alloc(0),
    ];
    for conf in ["caching:graph_capture_record_stream_reuse:True", "caching"] {
        let config: Config = conf.parse().expect("the options exist");
        assert_eq!(Runner::run(&config, CAPACITY, &program), Ok(()));
    }
}

/// If an event cannot be recorded, the next request frees the block.
#[test]
fn a_failure_at_the_end_of_a_capture_loses_nothing() -> Outcome {
    let mut allocator = reusing();
    let block = allocator.allocate(SIZE, OWN)?;
    allocator.lane_mut().record_stream(block, SIDE)?;
    begin(&mut allocator);
    allocator.free(block)?;
    let fault = DriverError::Unsupported { call: "event" };
    let plan = FaultPlan::nth(Call::RecordEvent, 1, fault.clone());
    allocator.driver().set_faults(plan);
    assert_eq!(end(&mut allocator), Err(AllocError::Driver(fault)));
    assert!(is_free(&mut allocator, block)?);
    assert_eq!(allocator.stats().active_bytes.all.current, 0);
    Ok(())
}

/// Generates operations for programs on three streams whose work is mostly captured.
fn captured_ops() -> impl Strategy<Value = Op> {
    let stream = || (0..3u64).prop_map(Stream);
    let size = prop::sample::select(vec![Bytes(512), Bytes::kib(700), Bytes::mib(3)]);
    prop_oneof![
        4 => (size, stream()).prop_map(|(size, stream)| Op::Alloc { size, stream, pool: None }),
        4 => any::<u16>().prop_map(|index| Op::Free { index }),
        4 => (any::<u16>(), stream())
            .prop_map(|(index, stream)| Op::RecordStream { index, stream }),
        3 => stream().prop_map(|stream| Op::Launch { stream, ns: 100_000 }),
        5 => (stream(), stream()).prop_map(|(stream, other)| Op::Wait { stream, other }),
        1 => stream().prop_map(|stream| Op::CaptureBegin { stream }),
        1 => Just(Op::CaptureEnd),
        1 => Just(Op::ProcessEvents),
        1 => (1..9u64).prop_map(|nth| Op::Fault { nth, out_of_memory: false }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 600 },
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    })]

    /// The model rejects a reuse of memory that the graph does not order after all its uses.
    #[test]
    fn captures_reuse_only_what_their_order_allows(
        program in prop::collection::vec(captured_ops(), 1..if cfg!(miri) { 8 } else { 150 }),
    ) {
        for conf in [
            "caching:graph_capture_record_stream_reuse:True",
            "caching:graph_capture_record_stream_reuse:True,expandable_segments:True",
            "caching",
            "bfc",
            "tide",
        ] {
            let config: Config = conf.parse().expect("the options exist");
            let mut begun = vec![Op::CaptureBegin { stream: Stream(0) }];
            begun.extend(program.iter().cloned());
            prop_assert_eq!(Runner::run(&config, CAPACITY, &begun), Ok(()));
        }
    }
}
