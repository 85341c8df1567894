//! Tests of each rule of the walk on a few events, and of each contradiction.

use lowtide_core::{BlockSnapshot, MempoolId, Stream};

use super::*;
use crate::notes::NoteId;

mod meanwhile;
mod memory;

const SEGMENT: u64 = 0x10_0000;
const EXPANDABLE: u64 = 0x4000_0000;

fn event(action: Action, address: u64, size: u64) -> TraceEvent {
    TraceEvent {
        event: Event {
            action,
            pool: MempoolId::DEFAULT,
            address: DeviceAddress(address),
            size: Bytes(size),
            stream: Stream::DEFAULT,
        },
        time_us: 0,
        stack: StackId::NONE,
        pool_known: false,
        note: NoteId::NONE,
    }
}

/// A segment of 2 MiB at [`SEGMENT`] with blocks of 512 bytes from its start on.
fn segment(statuses: &[BlockStatus]) -> SegmentSnapshot {
    let mut address = DeviceAddress(SEGMENT);
    let mut blocks = Vec::new();
    let mut left = Bytes::mib(2);
    let mut add = |size, status| {
        blocks.push(BlockSnapshot {
            address,
            size,
            requested: size,
            status,
        });
        address = address + size;
        left -= size;
        left
    };
    for &status in statuses {
        add(Bytes(512), status);
    }
    let rest = Bytes::mib(2) - Bytes(512 * statuses.len() as u64);
    add(rest, BlockStatus::Inactive);
    SegmentSnapshot {
        address: DeviceAddress(SEGMENT),
        size: Bytes::mib(2),
        stream: Stream::DEFAULT,
        pool: MempoolId(0, 3),
        is_large: false,
        is_expandable: false,
        blocks,
    }
}

fn run(segments: &[SegmentSnapshot], events: &[TraceEvent]) -> Result<Recovered> {
    check_events(0, events)?;
    let budget = &mut Budget::new(256 << 20);
    recover(
        0,
        events.to_vec(),
        segments,
        false,
        &BlockStacks::default(),
        budget,
    )
}

fn actions(recovered: &Recovered) -> Vec<Action> {
    recovered
        .events
        .iter()
        .map(|event| event.event.action)
        .collect()
}

#[track_caller]
fn check_contradiction(segments: &[SegmentSnapshot], events: &[TraceEvent], expected: &str) {
    let error = run(segments, events).expect_err("the recording contradicts itself");
    assert!(error.is_contradiction());
    // Most lists here are too short to have frees.
    let without_reason = error.to_string().replace(NO_FREES, "");
    assert_eq!(without_reason, expected);
}

/// The prefix of errors about memory that is allocated while it is in use, if no frees are recorded.
const NO_FREES: &str = "no frees are recorded, so record without skip_actions=[\"free_requested\", \"free_completed\"]: ";

use Action::{
    Alloc, FreeCompleted, FreeRequested, OutOfMemory, SegmentAlloc, SegmentFree, SegmentMap,
    SegmentUnmap,
};
use BlockStatus::{Allocated, Inactive, PendingFree};

#[test]
fn memory_that_two_blocks_have_at_once_though_the_end_does_not_show_it() {
    check_contradiction(
        &[],
        &[
            event(SegmentAlloc, SEGMENT, 2 << 20),
            event(Alloc, SEGMENT, 1000),
            event(Alloc, SEGMENT + 512, 500),
        ],
        "device 0, event 2: allocates 500 bytes at 0x100200, where a block of 1000 bytes at 0x100000 is in use",
    );
    // The block at the end is half as long, as if another had replaced it.
    check_contradiction(
        &[segment(&[Allocated, Allocated])],
        &[
            event(Alloc, SEGMENT, 1024),
            event(Alloc, SEGMENT + 512, 512),
        ],
        "device 0, event 1: allocates 512 bytes at 0x100200, where a block of 1.00 KiB at 0x100000 is in use",
    );
    // One half of each free may be missing.
    for half in [FreeRequested, FreeCompleted] {
        let again = [Alloc, half, Alloc].map(|action| event(action, SEGMENT, 512));
        run(&[], &again).unwrap();
    }
}

#[test]
fn allocation_over_a_block_in_use() {
    check_contradiction(
        &[segment(&[Allocated, Allocated])],
        &[
            event(Alloc, SEGMENT, 512),
            event(Alloc, SEGMENT + 512, 512),
            event(Alloc, SEGMENT + 512, 100),
        ],
        "device 0, event 1: allocates 512 bytes at 0x100200, which is neither freed later nor alive \
         at the end, or is allocated twice",
    );
    check_contradiction(
        &[segment(&[Allocated, Allocated])],
        &[
            event(Alloc, SEGMENT, 1024),
            event(Alloc, SEGMENT + 512, 512),
            event(Alloc, SEGMENT, 512),
        ],
        "device 0, event 0: allocates 1.00 KiB at 0x100000, which is neither freed later nor \
         alive at the end, or is allocated twice",
    );
    check_contradiction(
        &[segment(&[Inactive, Allocated])],
        &[
            event(Alloc, SEGMENT, 1024),
            event(FreeRequested, SEGMENT, 512),
            event(FreeCompleted, SEGMENT, 512),
        ],
        "device 0, event 0: allocates 1.00 KiB at 0x100000, where a block of 512 bytes at \
         0x100200 is in use to the end",
    );
}

#[test]
fn free_of_a_block_that_is_free() {
    let free = [
        event(FreeRequested, SEGMENT, 512),
        event(FreeCompleted, SEGMENT, 512),
    ];
    check_contradiction(
        &[segment(&[])],
        &[
            event(Alloc, SEGMENT, 512),
            free[0],
            free[1],
            free[0],
            free[1],
        ],
        "device 0, event 2: frees 512 bytes at 0x100000, where a block of 512 bytes at 0x100000 is \
         in use until event 4",
    );
    check_contradiction(
        &[segment(&[])],
        &[free[0], free[0], free[1]],
        "device 0, event 0: frees 512 bytes at 0x100000, where a block of 512 bytes at 0x100000 is \
         in use until event 2",
    );
    check_contradiction(
        &[segment(&[PendingFree])],
        &[free[0], free[1], free[0]],
        "device 0, event 1: frees 512 bytes at 0x100000, where a block of 512 bytes at 0x100000 is \
         in use to the end",
    );
    check_contradiction(
        &[segment(&[])],
        &[
            event(FreeRequested, SEGMENT + 512, 512),
            event(Alloc, SEGMENT + 512, 512),
            event(FreeRequested, SEGMENT + 512, 512),
            event(FreeCompleted, SEGMENT + 512, 512),
        ],
        "device 0, event 0: lets go of the block at 0x100200, which is neither freed later nor \
         waits at the end",
    );
}

/// A block that was never allocated may be from before the first event, unless its segment was allocated later.
#[test]
fn free_of_a_block_that_was_never_allocated() {
    let free = [
        event(FreeRequested, SEGMENT + 512, 512),
        event(FreeCompleted, SEGMENT + 512, 512),
    ];
    run(&[segment(&[])], &free).expect("it was there before");
    check_contradiction(
        &[segment(&[Allocated])],
        &[
            event(SegmentAlloc, SEGMENT, 2 << 20),
            event(Alloc, SEGMENT, 512),
            free[0],
            free[1],
        ],
        "device 0, event 0: takes a segment of 2.00 MiB at 0x100000, where a block of 512 bytes at 0x100200 is in use \
         until event 3",
    );
    let without_allocations = [event(SegmentAlloc, SEGMENT, 2 << 20), free[0], free[1]];
    run(&[segment(&[])], &without_allocations).expect("kinds of events were left out");
}

/// Another thread may allocate after PyTorch has read the events and before it reads the segments.
#[test]
fn a_block_that_is_younger_than_the_last_event() {
    let events = [
        event(SegmentAlloc, SEGMENT, 2 << 20),
        event(Alloc, SEGMENT, 512),
    ];
    run(&[segment(&[Allocated, Allocated])], &events).expect("it came later");
}

/// Takes 10^10 steps if each block is visited for each range.
#[test]
fn many_blocks_in_a_range_that_comes_many_times() {
    const COUNT: u64 = 100_000;
    let size = 512 * COUNT;
    let block = |number| BlockSnapshot {
        address: DeviceAddress(EXPANDABLE + 512 * number),
        size: Bytes(512),
        requested: Bytes(512),
        status: Allocated,
    };
    let shown = SegmentSnapshot {
        address: DeviceAddress(EXPANDABLE),
        size: Bytes(size),
        is_expandable: true,
        blocks: (0..COUNT).map(block).collect(),
        ..segment(&[])
    };
    let again = [SegmentUnmap, SegmentMap].map(|action| event(action, EXPANDABLE, size));
    let mut events = again.repeat(100_000);
    events.push(event(Alloc, EXPANDABLE, 512));
    let recovered = run(&[shown], &events).expect("too many came later to tell");
    assert_eq!(recovered.initial.blocks.len(), 99_999);
}

#[test]
fn segments_that_overlap() {
    check_contradiction(
        &[segment(&[])],
        &[
            event(SegmentAlloc, SEGMENT, 2 << 20),
            event(SegmentFree, SEGMENT + 512, 4096),
        ],
        "device 0, event 1: the segments at 0x100200 (4.00 KiB) and 0x100000 (2.00 MiB) overlap",
    );
    check_contradiction(
        &[segment(&[])],
        &[
            event(SegmentAlloc, SEGMENT, 2 << 20),
            event(SegmentAlloc, SEGMENT, 2 << 20),
        ],
        "device 0, event 0: a segment of 2.00 MiB at 0x100000 comes, which neither goes later nor \
         is there at the end, or comes twice",
    );
    check_contradiction(
        &[segment(&[])],
        &[
            event(SegmentMap, EXPANDABLE, 2 << 20),
            event(SegmentMap, EXPANDABLE, 2 << 20),
        ],
        "device 0, event 1: 2.00 MiB at 0x40000000 is mapped, which is neither unmapped later nor \
         there at the end, or is mapped twice",
    );
    let at_the_end = run(&[segment(&[]), segment(&[])], &[]).unwrap_err();
    assert_eq!(
        at_the_end.to_string(),
        "the segments at 0x100000 (2.00 MiB) and 0x100000 (2.00 MiB) overlap"
    );
}

#[test]
fn places_that_are_no_memory() {
    check_contradiction(
        &[],
        &[event(SegmentFree, u64::MAX - 4095, 8192)],
        "device 0, event 0: segment_free of 8.00 KiB at 0xfffffffffffff000 is no memory",
    );
    check_contradiction(
        &[],
        &[event(Alloc, SEGMENT, u64::MAX)],
        "device 0, event 0: alloc of 16.00 EiB at 0x100000 is no memory",
    );
    check_contradiction(
        &[],
        &[event(OutOfMemory, 0, u64::MAX)],
        "device 0, event 0: oom of 16.00 EiB at 0x0 is no memory",
    );
    check_contradiction(
        &[],
        &[event(Alloc, SEGMENT, (8 << 40) + 1)],
        "device 0, event 0: alloc of 8.00 TiB at 0x100000 is no memory",
    );
    // Sums of sizes stay in range. Refused requests are in no sum.
    let refused = (0..3).map(|_| event(OutOfMemory, 0, 1 << 60));
    let all: Vec<TraceEvent> = refused
        .chain((0..=1 << 18).map(|_| event(SegmentAlloc, SEGMENT, 8 << 40)))
        .collect();
    check_contradiction(
        &[],
        &all,
        "device 0, event 262147: the events up to here are about 2.00 EiB, which no job handles",
    );
    let mut small = segment(&[Allocated]);
    small.blocks[0].requested = Bytes(513);
    assert_eq!(
        run(&[small], &[]).unwrap_err().to_string(),
        "the block of 512 bytes at 0x100000 is for a request of 513 bytes"
    );
}

#[test]
fn a_block_may_wait_at_the_end() {
    let events = [
        event(Alloc, SEGMENT, 512),
        event(FreeRequested, SEGMENT, 512),
    ];
    let recovered = run(&[segment(&[PendingFree])], &events).unwrap();
    assert_eq!(actions(&recovered), [Alloc, FreeRequested]);
    assert_eq!(recovered.initial.blocks, []);
    assert_eq!(recovered.events[1].pool(), Some(MempoolId(0, 3)));
}

#[test]
fn missing_halves_of_frees_are_put_in() {
    let (alloc, requested) = (
        event(Alloc, SEGMENT, 512),
        event(FreeRequested, SEGMENT, 512),
    );
    let completed = event(FreeCompleted, SEGMENT, 512);
    let expected = [
        Alloc,
        FreeRequested,
        FreeCompleted,
        Alloc,
        FreeRequested,
        FreeCompleted,
    ];
    for half in [requested, completed] {
        let later = TraceEvent { time_us: 7, ..half };
        let recovered = run(&[segment(&[])], &[alloc, later, alloc, half]).unwrap();
        assert_eq!(actions(&recovered), expected);
        let times: Vec<_> = recovered.events.iter().map(|event| event.time_us).collect();
        assert_eq!(times, [0, 7, 7, 0, 0, 0]);
        assert_eq!(recovered.initial.blocks, []);
        assert!(
            recovered
                .events
                .iter()
                .all(|event| event.event.size == Bytes(512))
        );
    }
    // Only the first completion is missing: the second block waits at the end.
    let recovered = run(
        &[segment(&[PendingFree])],
        &[alloc, requested, alloc, requested],
    )
    .unwrap();
    assert_eq!(actions(&recovered), expected[..5]);
}

#[test]
fn without_segments_at_the_end_blocks_may_stay() {
    let events = [
        event(Alloc, SEGMENT, 512),
        event(FreeRequested, SEGMENT + 1024, 700),
        event(FreeCompleted, SEGMENT + 1024, 700),
    ];
    let recovered = run(&[], &events).unwrap();
    let [block] = recovered.initial.blocks[..] else {
        panic!(
            "one block was in use before: {:?}",
            recovered.initial.blocks
        );
    };
    assert_eq!((block.requested, block.size), (Bytes(700), Bytes(1024)));
    let [segment] = recovered.initial.segments[..] else {
        panic!(
            "the block has a segment of its own: {:?}",
            recovered.initial.segments
        );
    };
    assert_eq!((segment.address, segment.size), (block.address, block.size));
    assert_eq!(segment.pool, None);
}

#[test]
fn ranges_are_mapped_and_unmapped_in_parts() {
    let mib = |count: u64| count << 20;
    let range = |address, size| SegmentSnapshot {
        address: DeviceAddress(address),
        size: Bytes(size),
        stream: Stream::DEFAULT,
        pool: MempoolId(0, 5),
        is_large: true,
        is_expandable: true,
        blocks: Vec::new(),
    };
    // 40 MiB before. Then 20 MiB more are mapped, and 20 MiB in the middle are unmapped and their first half mapped
    // again.
    let events = [
        event(SegmentMap, EXPANDABLE + mib(40), mib(20)),
        event(SegmentUnmap, EXPANDABLE + mib(20), mib(20)),
        event(SegmentMap, EXPANDABLE + mib(20), mib(10)),
    ];
    let ends = [
        range(EXPANDABLE, mib(30)),
        range(EXPANDABLE + mib(40), mib(20)),
    ];
    let recovered = run(&ends, &events).unwrap();
    let [before] = recovered.initial.segments[..] else {
        panic!(
            "one range was mapped before: {:?}",
            recovered.initial.segments
        );
    };
    assert_eq!(
        (before.address.get(), before.size),
        (EXPANDABLE, Bytes::mib(40))
    );
    assert!(before.is_expandable && before.is_large);
    assert!(
        recovered
            .events
            .iter()
            .all(|event| event.pool() == Some(MempoolId(0, 5)))
    );
    // A range unmapped at the end of another was of its pool.
    let events = [event(SegmentUnmap, EXPANDABLE + mib(20), mib(20))];
    let recovered = run(&[range(EXPANDABLE, mib(20))], &events).unwrap();
    assert_eq!(recovered.events[0].pool(), Some(MempoolId(0, 5)));
    assert_eq!(recovered.initial.segments[0].size, Bytes::mib(40));
}

/// The error names the event, however many come before it.
#[test]
fn a_contradiction_is_named_by_its_event() {
    let shown = [segment(&[Inactive])];
    for before in [0, 1, 2 * CHECK_EVERY_EVENTS] {
        let mut events = vec![event(Action::Snapshot, 0, 0); before];
        events.push(event(Alloc, SEGMENT, 500));
        events.extend(vec![event(Action::Snapshot, 0, 0); 5]);
        let error = check(0, &events, &shown, &BlockStacks::default());
        let line = error.expect_err("it is not alive at the end").to_string();
        assert!(line.contains(&format!("event {before}: ")), "{line}");
    }
}

/// The segments before the first event are known, and each event must be possible with them.
#[test]
fn events_contradict_what_was_there_before() {
    let held = [segment(&[Allocated, PendingFree])];
    let at = |action, block: u64| event(action, SEGMENT + 512 * block, 500);
    let walk = |events: &[TraceEvent]| {
        let left = left_at_end(0, &held, events, &mut Budget::new(1 << 20));
        left.map(drop).map_err(|error| error.to_string())
    };
    let possible = [
        at(FreeRequested, 0),
        at(FreeCompleted, 1),
        at(FreeCompleted, 0),
        at(Alloc, 1),
        at(Alloc, 0),
    ];
    assert_eq!(walk(&possible), Ok(()));
    let twice =
        "device 0, event 0: free_requested of 500 bytes at 0x100200, where there is no such thing";
    assert_eq!(walk(&[at(FreeRequested, 1)]), Err(twice.to_owned()));
    let refused = walk(&[event(Alloc, SEGMENT + 256, 500)]).expect_err("it is in use");
    assert!(refused.contains("in use"), "{refused}");
    let refused = walk(&[at(FreeRequested, 0), at(FreeRequested, 0)]);
    assert!(refused.is_err());
}
