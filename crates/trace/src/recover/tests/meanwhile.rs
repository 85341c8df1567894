//! Tests of recordings whose segments are of another moment than the last event: each kind of difference alone,
//! states that look like a difference but are none, and generated jobs.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const PAGE: u64 = 2 << 20;

fn allocated(address: u64, size: u64) -> [TraceEvent; 1] {
    [event(Alloc, address, size)]
}

fn freed(address: u64, size: u64) -> [TraceEvent; 2] {
    [
        event(FreeRequested, address, size),
        event(FreeCompleted, address, size),
    ]
}

fn expandable(address: u64, size: u64, blocks: &[(u64, BlockStatus)]) -> SegmentSnapshot {
    let mut segment = SegmentSnapshot {
        address: DeviceAddress(address),
        size: Bytes(size),
        is_expandable: true,
        ..super::segment(&[])
    };
    let mut at = segment.address;
    segment.blocks.clear();
    for &(size, status) in blocks {
        segment.blocks.push(BlockSnapshot {
            address: at,
            size: Bytes(size),
            requested: Bytes(size),
            status,
        });
        at = at + Bytes(size);
    }
    segment
}

/// Returns the segments with zero requested bytes in free blocks.
fn as_shown(mut segments: Vec<SegmentSnapshot>) -> Vec<SegmentSnapshot> {
    let blocks = segments.iter_mut().flat_map(|segment| &mut segment.blocks);
    let free = blocks.filter(|block| block.status == Inactive);
    free.for_each(|block| block.requested = Bytes::ZERO);
    segments
}

/// Returns one event of each kind, each at an address of its own. A recording that starts with them skipped no
/// kind.
fn all_kinds() -> Vec<TraceEvent> {
    let elsewhere = |action| event(action, 1 << 40, PAGE);
    [
        SegmentAlloc,
        Alloc,
        FreeRequested,
        FreeCompleted,
        SegmentFree,
        SegmentMap,
        SegmentUnmap,
    ]
    .map(elsewhere)
    .to_vec()
}

/// Asserts the result for a recording: the least number of missing events, and the addresses of segments and blocks
/// before the first event.
#[track_caller]
fn check(
    segments: &[SegmentSnapshot],
    events: &[TraceEvent],
    missed: u64,
    before: (&[u64], &[u64]),
) -> Recovered {
    let whole = [&all_kinds()[..], events].concat();
    let mut recovered = run(segments, &whole).expect("another thread went on");
    recovered.events.drain(..all_kinds().len());
    let found = recovered.rewound.as_ref();
    assert_eq!(found.map_or(0, |rewound| rewound.missed_events), missed);
    let initial = &recovered.initial;
    let starts: Vec<u64> = initial.segments.iter().map(|it| it.address.get()).collect();
    assert_eq!(starts, before.0);
    let starts: Vec<u64> = initial.blocks.iter().map(|it| it.address.get()).collect();
    assert_eq!(starts, before.1);
    recovered
}

#[test]
fn a_block_was_freed_meanwhile() {
    let came = [event(SegmentAlloc, SEGMENT, PAGE)];
    let events = [&came[..], &allocated(SEGMENT, 512)].concat();
    let recovered = check(&[segment(&[])], &events, 2, (&[], &[]));
    let rewound = recovered.rewound.expect("events are missing");
    assert_eq!(rewound.segments, as_shown(vec![segment(&[Allocated])]));
    // The program had requested to free it, and it waited.
    let other = [
        &allocated(SEGMENT + 512, 512)[..],
        &freed(SEGMENT + 512, 512),
    ]
    .concat();
    let events = [&events[..], &freed(SEGMENT, 512)[..1], &other].concat();
    let recovered = check(&[segment(&[])], &events, 1, (&[], &[]));
    let rewound = recovered.rewound.expect("an event is missing");
    assert_eq!(rewound.segments, as_shown(vec![segment(&[PendingFree])]));
    // Only the free's end shows that the block existed before the first event.
    let events = freed(SEGMENT + 512, 512);
    let events = [&events[..1], &freed(SEGMENT, 512)].concat();
    let before = [SEGMENT, SEGMENT + 512];
    check(&[segment(&[])], &events, 1, (&[SEGMENT], &before));
}

/// A larger block took the place of one, in a recording of which no block shows that it has requested bytes: each has a
/// multiple of 512.
#[test]
fn a_larger_block_came_meanwhile_where_one_was() {
    let larger = expandable(SEGMENT, PAGE, &[(1536, Allocated), (PAGE - 1536, Inactive)]);
    let events = [
        &[event(SegmentMap, SEGMENT, PAGE)][..],
        &allocated(SEGMENT, 700),
        &allocated(SEGMENT + 1024, 512),
        &freed(SEGMENT + 1024, 512),
    ]
    .concat();
    let recovered = check(&as_shown(vec![larger]), &events, 3, (&[], &[]));
    let rewound = recovered.rewound.expect("events are missing");
    let in_use = { rewound.segments[0].blocks.iter() }.filter(|block| block.status != Inactive);
    let in_use: Vec<u64> = in_use.map(|block| block.requested.get()).collect();
    assert_eq!(in_use, [700]);
}

#[test]
fn a_program_let_go_of_a_block_meanwhile() {
    let events = [
        event(Alloc, SEGMENT, 512),
        event(Alloc, SEGMENT + 512, 512),
        event(FreeRequested, SEGMENT + 512, 512),
        event(FreeCompleted, SEGMENT + 512, 512),
    ];
    let shown = [segment(&[PendingFree])];
    let recovered = check(&shown, &events, 1, (&[SEGMENT], &[]));
    let rewound = recovered.rewound.expect("an event is missing");
    assert_eq!(rewound.segments, as_shown(vec![segment(&[Allocated])]));
    // It waited, became free, and was allocated again.
    let events = [&events[..], &freed(SEGMENT, 512)[..1]].concat();
    check(&[segment(&[Allocated])], &events, 2, (&[SEGMENT], &[]));
}

#[test]
fn a_block_was_allocated_meanwhile_where_another_had_been() {
    let events = [&allocated(SEGMENT, 512)[..], &freed(SEGMENT, 512)].concat();
    check(&[segment(&[Allocated])], &events, 1, (&[SEGMENT], &[]));
    // The other block existed before the first event.
    let shown = [segment(&[Allocated])];
    check(&shown, &events[1..], 1, (&[SEGMENT], &[SEGMENT]));
    // The new block is longer or shorter, and the program has freed it since.
    let larger = [event(Alloc, SEGMENT, 1024)];
    let events = [&larger[..], &freed(SEGMENT, 1024)].concat();
    let shown = [segment(&[Inactive, PendingFree])];
    check(&shown, &events, 2, (&[SEGMENT], &[]));
    let mut shown = segment(&[Allocated]);
    shown.blocks[0].size = Bytes(1024);
    shown.blocks[0].requested = Bytes(1024);
    shown.blocks[1].address = DeviceAddress(SEGMENT + 1024);
    shown.blocks[1].size = Bytes(PAGE - 1024);
    let events = [
        &allocated(SEGMENT + 512, 512)[..],
        &freed(SEGMENT + 512, 512),
    ]
    .concat();
    check(&[shown.clone()], &events, 1, (&[SEGMENT], &[]));
    // The other block was freed meanwhile, too.
    let recovered = check(&[shown], &events[..1], 3, (&[SEGMENT], &[]));
    let rewound = recovered.rewound.expect("events are missing");
    let first_free = rewound.segments[0].blocks[0];
    assert_eq!((first_free.size, first_free.status), (Bytes(512), Inactive));
}

/// Without the rule, the block would be from before the first event, in a segment of its own over the allocated
/// one.
#[test]
fn a_block_was_allocated_meanwhile_in_a_segment_that_came() {
    let events = [
        event(SegmentAlloc, SEGMENT, PAGE),
        event(Alloc, SEGMENT, 512),
    ];
    let recovered = check(&[segment(&[Allocated, Allocated])], &events, 1, (&[], &[]));
    let rewound = recovered.rewound.expect("an event is missing");
    assert_eq!(rewound.segments, as_shown(vec![segment(&[Allocated])]));
    assert_eq!(
        rewound.younger,
        BTreeSet::from([DeviceAddress(SEGMENT + 512)])
    );
}

#[test]
fn a_segment_came_or_went_meanwhile() {
    let other = SegmentSnapshot {
        address: DeviceAddress(SEGMENT + 8 * PAGE),
        ..segment(&[])
    };
    let mut other = [other];
    other[0].blocks[0].address = other[0].address;
    let start = other[0].address.get();
    // It was released, after a block in it was freed.
    let events = [
        event(SegmentAlloc, SEGMENT, PAGE),
        event(Alloc, SEGMENT, 700),
    ];
    let recovered = check(&other, &events, 3, (&[start], &[]));
    let rewound = recovered.rewound.expect("events are missing");
    let block = rewound.segments[0].blocks[0];
    assert_eq!((block.requested, block.size), (Bytes(700), Bytes(1024)));
    // Nothing shows its pool.
    assert!(!recovered.events[1].pool_known);
    // It was allocated where another was released, with other bounds.
    let gone = [event(SegmentFree, SEGMENT + 512, 2 * PAGE)];
    let recovered = check(&[segment(&[Allocated])], &gone, 2, (&[SEGMENT + 512], &[]));
    assert!(!recovered.events[0].pool_known);
    let gone = [event(SegmentFree, SEGMENT, PAGE)];
    check(&[segment(&[])], &gone, 1, (&[SEGMENT], &[]));
}

/// A segment that is added for blocks is one for large requests if any of its blocks is large.
#[test]
fn a_segment_that_no_event_has_went_meanwhile() {
    let (other, large) = (8 * PAGE, 3 << 19);
    let events = [
        &[event(SegmentFree, EXPANDABLE, PAGE)][..],
        &freed(other, large),
        &freed(other + large, 512),
    ]
    .concat();
    let before = (
        &[SEGMENT, other, EXPANDABLE][..],
        &[other, other + large][..],
    );
    let recovered = check(&[segment(&[])], &events, 1, before);
    assert!(recovered.initial.segments[1].is_large);
}

#[test]
fn pages_came_or_went_meanwhile() {
    let map = |page: u64| event(SegmentMap, EXPANDABLE + page * PAGE, PAGE);
    let unmap = |page: u64| event(SegmentUnmap, EXPANDABLE + page * PAGE, PAGE);
    let pages = |pages: u64, status| {
        vec![expandable(
            EXPANDABLE,
            pages * PAGE,
            &[(PAGE, status), ((pages - 1) * PAGE, Inactive)],
        )]
    };
    let alloc = allocated(EXPANDABLE, PAGE);
    // One page more.
    let events = [map(0), alloc[0], map(1), unmap(1)];
    check(&pages(2, Allocated), &events, 1, (&[], &[]));
    // One page less: the last one mapped.
    let events = [map(0), alloc[0], map(1), map(2)];
    let recovered = check(&pages(2, Allocated), &events, 1, (&[], &[]));
    let rewound = recovered.rewound.expect("an event is missing");
    assert_eq!(rewound.segments, as_shown(pages(3, Allocated)));
    // One page between two others, of a segment from before the first event.
    let events = [unmap(1)];
    let recovered = check(
        &pages(3, Allocated),
        &events,
        1,
        (&[EXPANDABLE], &[EXPANDABLE]),
    );
    assert_eq!(recovered.initial.segments[0].size, Bytes(3 * PAGE));
    let rewound = recovered.rewound.expect("an event is missing");
    let sizes: Vec<Bytes> = rewound.segments.iter().map(|it| it.size).collect();
    assert_eq!(sizes, [Bytes(PAGE), Bytes(PAGE)]);
}

/// The segments may differ from the events by more than a race of PyTorch's explains.
#[test]
fn what_no_few_calls_can_have_done() {
    let blocks: Vec<_> = (0..2000)
        .map(|number| event(Alloc, SEGMENT + 512 * number, 512))
        .collect();
    let events = |count: usize| {
        let came = [event(SegmentAlloc, SEGMENT, PAGE)];
        [&all_kinds()[..], &came, &blocks[..count]].concat()
    };
    check(&[segment(&[])], &events(1000), 2000, (&[], &[]));
    check_contradiction(
        &[segment(&[])],
        &events(1001),
        "device 0, event 1008: allocates 512 bytes at 0x17d000, which is neither freed later nor alive at the end, or \
         is allocated twice",
    );
}

/// Takes 10^10 steps if each segment is visited for each block.
#[test]
fn many_large_blocks_over_many_segments() {
    const COUNT: u64 = 100_000;
    let apart = |number| EXPANDABLE + 2 * number * PAGE;
    let shown = (0..COUNT).map(|number| expandable(apart(number), PAGE, &[(PAGE, Inactive)]));
    let shown: Vec<_> = shown.collect();
    let size = 2 * COUNT * PAGE;
    let block = [
        &allocated(EXPANDABLE + PAGE, size)[..],
        &freed(EXPANDABLE + PAGE, size),
    ]
    .concat();
    let mut events = block.repeat(100_000);
    events.push(event(SegmentUnmap, apart(2 * COUNT), PAGE));
    let recovered = run(&shown, &events).expect("pages between them went later");
    let rewound = recovered.rewound.expect("events are missing");
    assert_eq!(rewound.missed_events, COUNT);
    let [before, _] = &recovered.initial.segments[..] else {
        panic!("the block was in one: {:?}", recovered.initial.segments);
    };
    assert_eq!(before.size, Bytes(PAGE + size));
}

/// Asserts that a recording without some kinds of events misses none at its end.
#[track_caller]
fn check_no_difference(segments: &[SegmentSnapshot], events: &[TraceEvent]) {
    let recovered = run(segments, events).expect("kinds of events were left out");
    let missed = recovered.rewound.map(|rewound| rewound.missed_events);
    assert_eq!(missed, None);
}

#[test]
fn what_kinds_that_are_left_out_explain() {
    let came = [
        event(SegmentAlloc, SEGMENT, PAGE),
        event(Alloc, SEGMENT, 512),
    ];
    // The block waits, although no free, or only one half of a free, is recorded.
    check_no_difference(&[segment(&[PendingFree])], &came);
    let other = [
        event(Alloc, SEGMENT + 512, 512),
        event(FreeCompleted, SEGMENT + 512, 512),
    ];
    let events = [&came[..], &other].concat();
    check_no_difference(&[segment(&[PendingFree])], &events);
    // A block was freed in a segment from before the first event that was released.
    let events = [&came[..], &freed(SEGMENT + 8 * PAGE, 512)].concat();
    check_no_difference(&[segment(&[Allocated])], &events);
    // Without frees, a block may have been freed at any time.
    check_contradiction(
        &[segment(&[])],
        &came,
        "device 0, event 1: allocates 512 bytes at 0x100000, which is neither freed later nor alive at the end, or is \
         allocated twice",
    );
    // Without allocations, a block may have been allocated at any time.
    check_contradiction(
        &[segment(&[Allocated])],
        &freed(SEGMENT, 512),
        "device 0, event 1: frees 512 bytes at 0x100000, where a block of 512 bytes at 0x100000 is in use to the end",
    );
}

/// If no release of a segment is recorded, a missing segment may have been released at any time.
#[test]
fn segments_may_have_gone_at_any_time() {
    let other = SEGMENT + 8 * PAGE;
    let came = [
        event(SegmentAlloc, SEGMENT, PAGE),
        event(Alloc, SEGMENT, 512),
        event(SegmentAlloc, other, PAGE),
    ];
    let events = [&came[..], &freed(SEGMENT, 512)].concat();
    check_contradiction(
        &[segment(&[])],
        &events,
        "device 0, event 2: a segment of 2.00 MiB at 0x1100000 comes, which neither goes later nor is there at the end, \
         or comes twice",
    );
    // The same holds for pages, whatever is recorded of segments.
    let pages = [
        event(SegmentMap, EXPANDABLE, PAGE),
        event(SegmentFree, other, PAGE),
    ];
    check_contradiction(
        &[segment(&[])],
        &pages,
        "device 0, event 0: 2.00 MiB at 0x40000000 is mapped, which is neither unmapped later nor there at the end, or \
         is mapped twice",
    );
    let missed = |shown: &[SegmentSnapshot], events: &[TraceEvent]| {
        let recovered = run(shown, events).expect("another thread went on");
        recovered.rewound.map_or(0, |rewound| rewound.missed_events)
    };
    // No segment was released. Only a block was freed meanwhile.
    let events = [
        &came[..2],
        &allocated(SEGMENT + 512, 512),
        &freed(SEGMENT, 512),
    ]
    .concat();
    assert_eq!(missed(&[segment(&[])], &events), 2);
    // A segment with a block in use was released meanwhile, and the other with it.
    let kept = expandable(EXPANDABLE, PAGE, &[(PAGE, Inactive)]);
    let events = [&freed(EXPANDABLE, 512)[..], &came].concat();
    assert_eq!(missed(&[kept], &events), 4);
}

/// Only the second walk knows a segment's pool: the first took it from a younger segment.
#[test]
fn pools_are_those_of_the_segments_of_then() {
    let events = [
        event(SegmentAlloc, SEGMENT, 2 * PAGE),
        event(Alloc, SEGMENT, 512),
        event(FreeRequested, SEGMENT, 512),
        event(FreeCompleted, SEGMENT, 512),
        event(SegmentFree, SEGMENT, 2 * PAGE),
        event(Alloc, SEGMENT + 8 * PAGE, 512),
    ];
    let recovered = run(&[segment(&[Allocated])], &events).expect("another thread went on");
    assert!(recovered.events.iter().all(|event| !event.pool_known));
}

/// The memory of a generated job at some event.
#[derive(Clone, Default)]
struct Moment {
    /// The segments and mapped pages, by first page: the number of pages, or `None` for a page of an expandable
    /// segment.
    segments: BTreeMap<u64, Option<u64>>,
    /// The blocks by address: the requested bytes, and whether the program holds the block.
    blocks: BTreeMap<u64, (u64, bool)>,
}

/// Pages from here on are those of an expandable segment.
const FIRST_EXPANDABLE_PAGE: u64 = 12;
const PAGES: u64 = 20;
/// Addresses of blocks are multiples of this.
const STEP: u64 = PAGE / 8;

fn page_address(page: u64) -> u64 {
    EXPANDABLE + page * PAGE
}

fn rounded(requested: u64) -> u64 {
    requested.next_multiple_of(512)
}

/// Returns whether two ranges overlap.
fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    one.0 < other.0 + other.1 && other.0 < one.0 + one.1
}

impl Moment {
    /// Returns the existing ranges, as (address, size, whether it is expandable).
    fn ranges(&self) -> Vec<(u64, u64, bool)> {
        let mut ranges: Vec<(u64, u64, bool)> = Vec::new();
        for (&page, pages) in &self.segments {
            let start = page_address(page);
            match (pages, ranges.last_mut()) {
                (Some(pages), _) => ranges.push((start, pages * PAGE, false)),
                (None, Some(last)) if last.2 && last.0 + last.1 == start => last.1 += PAGE,
                (None, _) => ranges.push((start, PAGE, true)),
            }
        }
        ranges
    }

    fn is_free(&self, address: u64, size: u64) -> bool {
        let mut blocks = self.blocks.iter();
        !blocks
            .any(|(&start, &(requested, _))| overlap((start, rounded(requested)), (address, size)))
    }

    fn is_there(&self, page: u64, count: u64) -> bool {
        let range = (page_address(page), count * PAGE);
        self.ranges()
            .into_iter()
            .any(|(start, size, _)| overlap((start, size), range))
    }

    fn live_bytes(&self) -> u64 {
        let held = self.blocks.values().filter(|block| block.1);
        held.map(|block| rounded(block.0)).sum()
    }

    fn snapshot(&self) -> Vec<SegmentSnapshot> {
        let ranges = self.ranges().into_iter();
        ranges.map(|range| self.segment(range)).collect()
    }

    fn segment(&self, (start, size, is_expandable): (u64, u64, bool)) -> SegmentSnapshot {
        let mut blocks = Vec::new();
        let mut at = start;
        for (&address, &(requested, is_held)) in self.blocks.range(start..start + size) {
            blocks.push((at, address - at, 0, Inactive));
            let status = if is_held { Allocated } else { PendingFree };
            blocks.push((address, rounded(requested), requested, status));
            at = address + rounded(requested);
        }
        blocks.push((at, start + size - at, 0, Inactive));
        blocks.retain(|block| block.1 > 0);
        let block = |(address, size, requested, status)| BlockSnapshot {
            address: DeviceAddress(address),
            size: Bytes(size),
            requested: Bytes(requested),
            status,
        };
        SegmentSnapshot {
            address: DeviceAddress(start),
            size: Bytes(size),
            is_expandable,
            blocks: blocks.into_iter().map(block).collect(),
            ..super::segment(&[])
        }
    }

    /// Performs the action that three numbers choose. Returns its events.
    fn act(&mut self, (kind, place, size): (u8, u64, u64)) -> Vec<TraceEvent> {
        let page = place % PAGES;
        let is_expandable = page >= FIRST_EXPANDABLE_PAGE;
        let pages = if is_expandable { 1 } else { 1 + size % 3 };
        match kind {
            0 => {
                let fits = is_expandable || page + pages <= FIRST_EXPANDABLE_PAGE;
                if !fits || self.is_there(page, pages) {
                    return Vec::new();
                }
                self.segments
                    .insert(page, (!is_expandable).then_some(pages));
                let action = if is_expandable {
                    SegmentMap
                } else {
                    SegmentAlloc
                };
                vec![event(action, page_address(page), pages * PAGE)]
            }
            1 => match self.segments.get(&page) {
                Some(&there) if self.is_free(page_address(page), there.unwrap_or(1) * PAGE) => {
                    self.segments.remove(&page);
                    let action = if is_expandable {
                        SegmentUnmap
                    } else {
                        SegmentFree
                    };
                    vec![event(action, page_address(page), there.unwrap_or(1) * PAGE)]
                }
                _ => Vec::new(),
            },
            2..=7 => self.allocate(place, size),
            _ => self.free(place, kind),
        }
    }

    fn allocate(&mut self, place: u64, requested: u64) -> Vec<TraceEvent> {
        // A block whose requested bytes are its size is one of a recording without requested bytes.
        let requested = requested | 1;
        let size = rounded(requested);
        let ranges = self.ranges();
        let count = ranges.len().max(1) as u64;
        let chosen = usize::try_from(place % count).expect("few ranges");
        let Some(&(start, length, _)) = ranges.get(chosen) else {
            return Vec::new();
        };
        let address = start + place / count * STEP % length;
        if address + size > start + length || !self.is_free(address, size) {
            return Vec::new();
        }
        self.blocks.insert(address, (requested, true));
        allocated(address, requested).to_vec()
    }

    fn free(&mut self, number: u64, kind: u8) -> Vec<TraceEvent> {
        let index = usize::try_from(number).expect("small") % self.blocks.len().max(1);
        let Some((&address, &(requested, is_held))) = self.blocks.iter().nth(index) else {
            return Vec::new();
        };
        let [let_go, done] = freed(address, requested);
        if kind == 8 && is_held {
            self.blocks.insert(address, (requested, false));
            return vec![let_go];
        }
        self.blocks.remove(&address);
        if is_held {
            vec![let_go, done]
        } else {
            vec![done]
        }
    }
}

/// Returns the events of a job, and the memory before the first event and after each call.
fn job(acts: &[(u8, u64, u64)]) -> (Vec<TraceEvent>, BTreeMap<usize, Moment>) {
    let mut now = Moment::default();
    let mut events = Vec::new();
    let mut moments = BTreeMap::from([(0, now.clone())]);
    for &act in acts {
        events.extend(now.act(act));
        moments.insert(events.len(), now.clone());
    }
    (events, moments)
}

/// Returns whether any of `events` overlaps a range.
fn touched(events: &[TraceEvent], range: (u64, u64)) -> bool {
    let mut events = events.iter().map(|it| it.event);
    events.any(|it| overlap((it.address.get(), it.size.get()), range))
}

/// Returns whether a block of `events` lies in a range only in part.
fn straddled(events: &[TraceEvent], (start, size): (u64, u64)) -> bool {
    let blocks = events.iter().map(|it| it.event);
    let mut blocks = blocks.filter(|it| !it.action.is_segment());
    blocks.any(|it| {
        let block = (it.address.get(), rounded(it.size.get()));
        let is_within = start <= block.0 && block.0 + block.1 <= start + size;
        overlap(block, (start, size)) && !is_within
    })
}

/// Returns the bytes of each block that nothing in the recording shows, and whether the block is live. Such a block
/// is in `one` and not in `other`, and its memory has no events.
fn unknowable(events: &[TraceEvent], one: &Moment, other: &Moment) -> Vec<(u64, bool)> {
    let segment_events = events.iter().filter(|it| it.event.action.is_segment());
    let segment_events: Vec<TraceEvent> = segment_events.copied().collect();
    let blocks = one.blocks.iter();
    let only = blocks.filter(|(address, block)| other.blocks.get(address) != Some(block));
    let untouched = only.filter(|&(&address, block)| {
        let mut ranges = one.ranges().into_iter();
        let around = ranges.find(|range| address >= range.0 && address < range.0 + range.1);
        // A segment that replaced another is known to be new, with all blocks in it. An event has the other, or a
        // block that reaches out of this one.
        let (start, size, is_expandable) = around.expect("blocks are in segments");
        let replaced = touched(&segment_events, (start, size)) || straddled(events, (start, size));
        let came = !is_expandable && replaced;
        !came && !touched(events, (address, rounded(block.0)))
    });
    untouched
        .map(|(_, block)| (rounded(block.0), block.1))
        .collect()
}

fn check_job(
    acts: &[(u8, u64, u64)],
    lost: usize,
    last: usize,
    shown: usize,
) -> Result<(), TestCaseError> {
    let (events, moments) = job(acts);
    let calls: Vec<usize> = moments.keys().copied().collect();
    let last = calls[last % calls.len()];
    let near: Vec<usize> = calls
        .iter()
        .copied()
        .filter(|it| it.abs_diff(last) <= 8)
        .collect();
    let shown = near[shown % near.len()];
    let before = calls
        .iter()
        .copied()
        .filter(|&it| it <= last)
        .collect::<Vec<_>>();
    let lost = before[lost % before.len()];
    let (recorded, at_last, shown) = (&events[lost..last], &moments[&last], &moments[&shown]);

    let recovered = run(&shown.snapshot(), &[&all_kinds()[..], recorded].concat());
    let recovered = recovered.map_err(|error| TestCaseError::fail(error.to_string()))?;
    let more = unknowable(recorded, shown, at_last);
    let less = unknowable(recorded, at_last, shown);
    let is_known = more.is_empty() && less.is_empty() && shown.segments == at_last.segments;
    let sum = |blocks: Vec<(u64, bool)>| -> u64 {
        blocks
            .into_iter()
            .filter(|block| block.1)
            .map(|block| block.0)
            .sum()
    };
    let (more, less) = (sum(more), sum(less));
    let held = recovered
        .initial
        .blocks
        .iter()
        .filter(|block| block.status == Allocated);
    let mut live: u64 = held.map(|block| rounded(block.requested.get())).sum();
    for index in lost..=last {
        if let Some(moment) = moments.get(&index) {
            prop_assert_eq!(
                live + less,
                moment.live_bytes() + more,
                "after event {}",
                index
            );
        }
        let Some(next) = events[..last].get(index) else {
            break;
        };
        match next.event.action {
            Alloc => live += rounded(next.event.size.get()),
            FreeRequested => live -= rounded(next.event.size.get()),
            _ => {}
        }
    }
    if is_known {
        let rewound = recovered
            .rewound
            .map_or_else(|| shown.snapshot(), |rewound| rewound.segments);
        prop_assert_eq!(rewound, at_last.snapshot());
    }
    let starts: BTreeSet<_> = recovered
        .initial
        .blocks
        .iter()
        .map(|it| it.address)
        .collect();
    prop_assert_eq!(starts.len(), recovered.initial.blocks.len());
    Ok(())
}

/// Returns whether events contradict each other, whatever existed before the first and after the last.
fn are_impossible(events: &[TraceEvent]) -> bool {
    let mut in_use: BTreeMap<u64, u64> = BTreeMap::new();
    let mut freed = BTreeSet::new();
    let mut there: BTreeMap<u64, u64> = BTreeMap::new();
    for event in events.iter().map(|it| it.event) {
        let range = (event.address.get(), event.size.get());
        let hits =
            |ranges: &BTreeMap<u64, u64>| ranges.iter().any(|it| overlap((*it.0, *it.1), range));
        match event.action {
            Alloc if hits(&in_use) => return true,
            Alloc => {
                in_use.insert(range.0, range.1);
                freed.remove(&range.0);
            }
            FreeRequested | FreeCompleted if freed.contains(&range.0) => return true,
            FreeCompleted => {
                in_use.remove(&range.0);
                freed.insert(range.0);
            }
            SegmentAlloc | SegmentMap if hits(&in_use) || hits(&there) => return true,
            SegmentAlloc | SegmentMap => {
                there.insert(range.0, range.1);
            }
            SegmentFree | SegmentUnmap => {
                there.remove(&range.0);
            }
            _ => {}
        }
    }
    false
}

/// Returns the result of the walk from the recorded segments, without the correction for other threads.
fn strict(segments: &[SegmentSnapshot], events: &[TraceEvent]) -> Result<()> {
    let stacks = BlockStacks::default();
    let past = Past::from_end(segments, None, &stacks).expect("segments of one moment");
    let budget = Budget::new(1 << 20);
    let walked = past.walk(0, &mut events.to_vec(), &budget)?;
    if segments.is_empty() || walked.saw_younger {
        refuse_overlaps(0, events, &walked.initial, &budget)
    } else {
        Ok(())
    }
}

fn act() -> impl Strategy<Value = (u8, u64, u64)> {
    (0..12_u8, 0..1000_u64, 1..=3 * STEP)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Segments from a few events before or after the last one, of recordings with and without their beginning.
    #[test]
    fn the_past_is_recovered_whatever_others_did_meanwhile(
        acts in prop::collection::vec(act(), 1..200),
        (lost, last, shown) in (any::<usize>(), any::<usize>(), any::<usize>()),
        is_whole in any::<bool>(),
    ) {
        check_job(&acts, if is_whole { 0 } else { lost }, last, shown)?;
    }

    /// No other thread runs in between. Kinds of events are skipped then, too.
    #[test]
    fn what_is_left_out_is_no_sign_of_other_threads(
        acts in prop::collection::vec(act(), 1..200),
        lost in any::<usize>(),
        kinds in 0..128_u8,
    ) {
        let (mut events, moments) = job(&acts);
        let shown = moments[&events.len()].snapshot();
        events.drain(..lost % (events.len() + 1));
        let whole = run(&shown, &events).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert!(whole.rewound.is_none());
        let is_recorded = |action| kinds & 1 << action as u8 != 0;
        events.retain(|event| is_recorded(event.event.action));
        // If releases of segments are recorded, pages without any event are unknown; and the other way round.
        let recorded = Kinds::of(&events);
        let is_unknown = |is_expandable, goes| {
            !is_recorded(goes) && !recorded.has_segment_allocations(is_expandable) && recorded.has_segment_releases(!is_expandable)
        };
        if is_unknown(true, SegmentUnmap) || is_unknown(false, SegmentFree) {
            return Ok(());
        }
        if let Ok(recovered) = run(&shown, &events) {
            prop_assert!(recovered.rewound.is_none());
        }
    }

    /// No race explains events that contradict each other: one repeated, moved or left out.
    #[test]
    fn what_cannot_have_happened_is_refused_as_ever(
        acts in prop::collection::vec(act(), 1..200),
        (from, to, kind) in (any::<usize>(), any::<usize>(), 0..3),
        missing in 0..9_usize,
    ) {
        let (mut events, moments) = job(&acts);
        let (from, to) = (from % events.len().max(1), to % events.len().max(1));
        let calls: Vec<&Moment> = moments.values().rev().take(1 + missing).collect();
        let shown = calls[calls.len() - 1].snapshot();
        if events.is_empty() {
            return Ok(());
        }
        let event = events[from];
        if kind > 0 {
            events.remove(from);
        }
        if kind < 2 {
            events.insert(to.min(events.len()), event);
        }
        if are_impossible(&events) {
            let events = [&all_kinds()[..], &events].concat();
            let expected = strict(&shown, &events).map_err(|error| error.to_string());
            let found = run(&shown, &events).map(drop).map_err(|error| error.to_string());
            prop_assert_eq!(found, expected);
        }
    }
}

/// The events mention one of a block's three pages, each in turn.
#[test]
fn pages_that_no_event_has_went_meanwhile() {
    for (page, parts) in [(0, 1), (1, 2), (2, 1)] {
        let unmapped = event(SegmentUnmap, EXPANDABLE + page * PAGE, PAGE);
        let events = [&freed(EXPANDABLE, 3 * PAGE)[..], &[unmapped]].concat();
        let before = (&[SEGMENT, EXPANDABLE][..], &[EXPANDABLE][..]);
        let recovered = check(&[segment(&[])], &events, parts, before);
        assert_eq!(recovered.initial.segments[1].size, Bytes(3 * PAGE));
    }
}

/// In either direction: the block and its memory were gone when the segment was allocated.
#[test]
fn a_segment_that_a_block_reaches_out_of_came_meanwhile() {
    let start = 8 * PAGE;
    let mut shown = segment(&[]);
    shown.address = DeviceAddress(start);
    shown.blocks[0].address = shown.address;
    for (block, before) in [(start - PAGE / 2, start - PAGE), (start + PAGE / 2, start)] {
        let before_free = (&[before][..], &[block][..]);
        let recovered = check(&[shown.clone()], &freed(block, PAGE), 2, before_free);
        assert_eq!(recovered.initial.segments[0].size, Bytes(2 * PAGE));
        // It was allocated after the first event.
        let events = [&allocated(block, PAGE)[..], &freed(block, PAGE)].concat();
        let recovered = check(&[shown.clone()], &events, 2, (&[before], &[]));
        assert_eq!(recovered.initial.segments[0].size, Bytes(2 * PAGE));
    }
}

/// No event has the page, and the block is neither from before the first event nor in use at the last.
#[test]
fn a_page_that_a_block_reaches_into_went_meanwhile() {
    let shown = [expandable(EXPANDABLE, PAGE, &[(PAGE, Inactive)])];
    let events = [
        &allocated(EXPANDABLE, 2 * PAGE)[..],
        &freed(EXPANDABLE, 2 * PAGE),
    ]
    .concat();
    let recovered = check(&shown, &events, 1, (&[EXPANDABLE], &[]));
    assert_eq!(recovered.initial.segments[0].size, Bytes(2 * PAGE));
}

/// A block without events in a segment that came meanwhile is as young as the segment. Only a block of the events
/// shows that the segment is another: it reaches out of it, at its start or at its end.
#[test]
fn a_block_in_a_segment_that_another_reaches_out_of_came_meanwhile() {
    for (first_page, place) in [(3, 1), (1, 0)] {
        let acts = [
            // Three pages from the first on. The block is on the second and the third.
            (0, 1, 2),
            (2, 15, STEP + 1),
            (9, 0, 1),
            (1, 1, 1),
            (0, first_page, 1),
            (2, place, 1),
        ];
        // The recording has the events of the block only.
        check_job(&acts, 1, 3, 6).expect("all is known");
    }
}
