//! Tests of what is kept of segments: their start and stack, and the free bytes when a request failed.

mod common;

use std::sync::Arc;

use common::{MIB, recorded};
use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, MempoolId, SegmentSnapshot, Stream,
};
use lowtide_history::{BlockSizes, History, Leaks, PageData, PageTrace};
use lowtide_trace::{Frame, StackId, StackTable, Trace};

#[test]
fn what_is_left_of_a_segment_is_as_old_as_all_of_it_was() {
    let mut stacks = StackTable::new();
    let stack = stacks.intern([Frame {
        name: "forward".into(),
        filename: "train.py".into(),
        line: 7,
    }]);
    let none = StackId::NONE;
    let trace = Trace {
        events: vec![
            recorded(Action::SegmentMap, 100 * MIB, 60 * MIB, stack),
            recorded(Action::SegmentUnmap, 120 * MIB, 20 * MIB, none),
            recorded(Action::SegmentAlloc, 200 * MIB, 20 * MIB, none),
        ],
        stacks: Arc::new(stacks),
        ..Trace::default()
    };
    let history = History::new(&trace, &BlockSizes::estimated(&trace));
    let found = history.segments.iter().map(|segment| {
        let life = (segment.made, segment.start, segment.end);
        (segment.address / MIB, life, segment.stack)
    });
    let expected = [
        (100, (1, 1, 2), stack),
        (100, (1, 2, 4), stack),
        (140, (1, 2, 4), stack),
        (200, (3, 3, 4), none),
    ];
    let mut found: Vec<_> = found.collect();
    found.sort_unstable_by_key(|&(address, life, _)| (address, life));
    assert_eq!(found, expected);
}

#[test]
fn the_largest_free_block_is_that_of_the_stream_and_pool_of_what_failed() {
    let none = StackId::NONE;
    let event = |action, mib: u64, size: u64| recorded(action, mib * MIB, size * MIB, none);
    let mut other_stream = event(Action::SegmentAlloc, 300, 50);
    other_stream.event.stream = Stream(7);
    let mut other_pool = event(Action::SegmentAlloc, 400, 60);
    other_pool.event.pool = MempoolId(1, 1);
    let mut later = event(Action::OutOfMemory, 5, 90);
    later.event.pool = MempoolId(1, 1);
    // Each of the first refusals visits all blocks. For a fourth, the largest free block is not computed.
    let fourth = event(Action::OutOfMemory, 6, 90);
    let trace = Trace {
        events: vec![
            // In a plain segment, the space between blocks counts. Adjacent ranges that grow in place count as one.
            event(Action::SegmentAlloc, 100, 20),
            event(Action::Alloc, 108, 4),
            event(Action::SegmentAlloc, 120, 9),
            event(Action::SegmentMap, 200, 6),
            event(Action::SegmentMap, 206, 5),
            other_stream,
            other_pool,
            event(Action::OutOfMemory, 3, 90),
            event(Action::SegmentPaused, 200, 11),
            event(Action::OutOfMemory, 4, 90),
            later,
            fourth,
        ],
        ..Trace::default()
    };
    let history = History::new(&trace, &BlockSizes::estimated(&trace));
    let refusals = history.refusals.iter().map(|refusal| {
        let mib = |bytes: Bytes| bytes.get() / MIB;
        (
            mib(refusal.device_free),
            refusal.largest_free.map(mib),
            mib(refusal.requested),
        )
    });
    let expected = [
        (3, Some(11), 90),
        (4, Some(9), 90),
        (5, Some(60), 90),
        (6, None, 90),
    ];
    assert_eq!(refusals.collect::<Vec<_>>(), expected);
}

/// Returns the history of a block with a request of `requested` MiB, in a segment of 2 MiB.
fn history_of_block(requested: u64, at_end: Vec<SegmentSnapshot>) -> History {
    let none = StackId::NONE;
    let trace = Trace {
        events: vec![
            recorded(Action::SegmentAlloc, 100 * MIB, 2 * MIB, none),
            recorded(Action::Alloc, 100 * MIB, requested * MIB, none),
        ],
        segments: at_end,
        ..Trace::default()
    };
    let sizes = BlockSizes::estimated(&trace);
    let history = History::new(&trace, &sizes);
    let leaks = Leaks::find(&trace, &history);
    let mut page = PageData::new("0");
    // A page stores how much each block exceeds its request.
    page.add(&PageTrace {
        name: "made up",
        trace: &trace,
        is_host: false,
        sizes: &sizes,
        history: &history,
        replayed: &[],
        replay_notes: &[],
        leaks: &leaks,
        is_cut_off: false,
        lengths: &[],
    });
    history
}

#[test]
fn a_block_is_no_shorter_than_its_request() {
    let block = |history: &History| (history.blocks[0].requested, history.blocks[0].size);
    // The part of the block beyond its segment is left out.
    let history = history_of_block(3, Vec::new());
    assert_eq!(block(&history), (Bytes::mib(2), Bytes::mib(2)));
    assert_eq!(history.contradictions, 1);
    // The block at the end is another one.
    let other = BlockSnapshot {
        address: DeviceAddress(100 * MIB),
        size: Bytes(512),
        requested: Bytes(512),
        status: BlockStatus::Allocated,
    };
    let at_end = SegmentSnapshot {
        address: other.address,
        size: Bytes::mib(2),
        stream: Stream::DEFAULT,
        pool: MempoolId::DEFAULT,
        is_large: false,
        is_expandable: false,
        blocks: vec![other],
    };
    let history = history_of_block(1, vec![at_end]);
    assert_eq!(block(&history), (Bytes::mib(1), Bytes::mib(1)));
    assert_eq!(history.contradictions, 0);
}
