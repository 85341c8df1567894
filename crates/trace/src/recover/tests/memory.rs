//! Tests how much memory each table counts: at least what it takes, and at most twice that.

use super::super::forward::left_at_end;
use super::super::meanwhile::rewind;
use super::*;
use crate::InitialSegment;

/// Several times the events between two checks, and one more, so that the last check sees all of them.
const COUNT: u64 = 2 * CHECK_EVERY_EVENTS as u64 + 1;
const PAGE: u64 = 2 << 20;

/// Returns [`COUNT`] events of a kind, each at an address of its own.
fn events(action: Action, size: u64) -> Vec<TraceEvent> {
    let apart = |number| event(action, EXPANDABLE + 2 * size * number, size);
    (0..COUNT).map(apart).collect()
}

/// Returns the smallest budget with which `works` succeeds.
fn least(works: impl Fn(Budget) -> bool) -> u64 {
    let (mut low, mut high) = (0, 64 << 20);
    while low < high {
        let middle = (low + high) / 2;
        if works(Budget::new(middle)) {
            high = middle
        } else {
            low = middle + 1
        }
    }
    low
}

#[track_caller]
fn check_counted(bytes: u64, of_each: usize) {
    let taken = COUNT * of_each as u64;
    assert!((taken..=2 * taken).contains(&bytes), "{bytes} of {taken}");
}

/// Returns the smallest budget of a walk backwards.
fn least_of_walk(shown: &[SegmentSnapshot], events: &[TraceEvent]) -> u64 {
    least(|budget| {
        let past = Past::from_end(shown, None, &BlockStacks::default()).expect("it is one");
        past.walk(0, &mut events.to_vec(), &budget).is_ok()
    })
}

#[test]
fn a_walk_counts_what_it_finds() {
    let block = size_of::<(u64, Block)>() + size_of::<InitialBlock>();
    let blocks = least_of_walk(&[], &events(FreeCompleted, 512));
    check_counted(blocks, block);
    // The other half of each free becomes an event.
    let halves = least_of_walk(&[], &events(FreeRequested, 512));
    check_counted(halves - blocks, size_of::<TraceEvent>());
    let segment = size_of::<(u64, InitialSegment)>() + size_of::<InitialSegment>();
    check_counted(least_of_walk(&[], &events(SegmentFree, PAGE)), segment);
}

/// Freed blocks are looked up by address once a segment is allocated around a block that exists at the end.
#[test]
fn a_walk_counts_the_places_of_what_was_freed() {
    let elsewhere = event(Alloc, SEGMENT + PAGE, 512);
    let came = event(SegmentAlloc, SEGMENT, PAGE);
    let walk = |first| {
        let events = [vec![first, elsewhere], events(FreeCompleted, 512)].concat();
        let budget = |shown: &[SegmentSnapshot]| least_of_walk(shown, &events);
        budget(&[segment(&[Allocated]), segment_with(SEGMENT + PAGE, 512)])
    };
    let without = walk(event(Action::Snapshot, 0, 0));
    check_counted(walk(came) - without, size_of::<u64>());
}

/// Returns a segment that begins with a block in use.
fn segment_with(address: u64, size: u64) -> SegmentSnapshot {
    let mut segment = segment(&[Allocated, Inactive]);
    segment.address = DeviceAddress(address);
    segment.blocks.truncate(1);
    segment.blocks[0].address = segment.address;
    segment.blocks[0].size = Bytes(size);
    segment.blocks[0].requested = Bytes(size);
    segment
}

#[test]
fn a_walk_forwards_counts_what_there_is() {
    let counted = |events: &[TraceEvent]| {
        least(|mut budget| left_at_end(0, &[], events, &mut budget).is_ok())
    };
    let block = size_of::<(u64, BlockSnapshot)>();
    check_counted(counted(&events(Alloc, 512)), block);
    let segment = size_of::<(u64, InitialSegment)>() + size_of::<InitialSegment>();
    check_counted(counted(&events(SegmentAlloc, PAGE)), segment);
}

#[test]
fn blocks_that_might_overlap_are_counted() {
    let (events, initial) = (events(Alloc, 512), InitialState::default());
    let counted = least(|budget| refuse_overlaps(0, &events, &initial, &budget).is_ok());
    check_counted(counted, size_of::<(u64, Bytes)>());
}

/// The final state of blocks and segments counts, beside the recorded segments.
#[test]
fn what_the_events_say_last_is_counted() {
    let gone = [
        event(SegmentAlloc, SEGMENT, PAGE),
        event(SegmentFree, SEGMENT, PAGE),
        event(SegmentAlloc, SEGMENT + PAGE, PAGE),
    ];
    let counted = |events: &[TraceEvent], shown: &[SegmentSnapshot]| {
        let events = [events, &gone].concat();
        least(|budget| rewind(&events, shown, true, &budget).is_some())
    };
    let came = events(SegmentAlloc, PAGE);
    let shown: Vec<_> = { came.iter() }
        .map(|came| segment_with(came.event.address.get(), 512))
        .collect();
    let without = counted(&[], &shown);
    // Each recorded block, one per segment, is in two tables and in their result.
    check_counted(without, 3 * size_of::<(u64, BlockSnapshot)>());
    let ranges = counted(&came, &shown) - without;
    check_counted(ranges, size_of::<(u64, InitialSegment)>());
    let allocated: Vec<_> = { came.iter() }
        .map(|came| event(Alloc, came.event.address.get(), 512))
        .collect();
    let blocks = counted(&allocated, &shown) - without;
    check_counted(blocks, size_of::<(u64, BlockSnapshot)>() + 16);
}
