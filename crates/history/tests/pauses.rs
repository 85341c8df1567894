//! Tests of memory that is paused.

mod common;

use std::sync::Arc;

use common::MIB;
use common::changes::check_changes;
use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, MempoolId, Stream};
use lowtide_history::{BlockSizes, CURVES, Difference, History};
use lowtide_trace::{
    Frame, InitialBlock, InitialSegment, Note, StackId, StackTable, Trace, TraceEvent,
};

/// Returns a recording of events, each with its action, address and size.
fn trace(events: &[(Action, u64, u64)]) -> Trace {
    let mut stacks = StackTable::new();
    let mut line = 0;
    let recorded = events.iter().map(|&(action, address, size)| {
        line += 1;
        let stack = match action {
            Action::Alloc => stacks.intern([Frame {
                name: "forward".into(),
                filename: "train.py".into(),
                line,
            }]),
            _ => StackId::NONE,
        };
        common::recorded(action, address, size, stack)
    });
    let mut trace = Trace {
        events: recorded.collect(),
        ..Trace::default()
    };
    trace.stacks = Arc::new(stacks);
    trace
}

fn history(trace: &Trace) -> History {
    let history = History::new(trace, &BlockSizes::estimated(trace));
    check_changes(&history);
    history
}

/// Returns such a recording's history, with addresses and sizes in MiB.
fn history_of(events: &[(Action, u64, u64)]) -> History {
    let events = events.iter();
    let events = events.map(|&(action, address, size)| (action, address * MIB, size * MIB));
    history(&trace(&events.collect::<Vec<_>>()))
}

/// Returns the reserved, live and paused bytes at the end, in MiB.
fn at_end(history: &History) -> [u64; 3] {
    let end = history.end;
    [
        end.fragmentation.reserved,
        end.fragmentation.live,
        end.paused,
    ]
    .map(|bytes| bytes.get() / MIB)
}

#[test]
fn a_part_of_what_is_paused_may_go_back() {
    let gone_at = |address: u64| {
        vec![
            (Action::SegmentAlloc, 10, 6),
            (Action::SegmentMap, 100, 60),
            (Action::Alloc, 100, 5),
            (Action::Alloc, 140, 7),
            (
                Action::FreeRequested,
                if address == 140 { 140 } else { 100 },
                0,
            ),
            (
                Action::FreeCompleted,
                if address == 140 { 140 } else { 100 },
                0,
            ),
            (Action::SegmentPaused, 100, 60),
            (Action::SegmentUnmap, address, 20),
        ]
    };
    for (address, live, left) in [
        (120, 7, vec![(100, 20), (140, 20)]),
        (140, 5, vec![(100, 40)]),
        (100, 7, vec![(120, 40)]),
    ] {
        let mut events = gone_at(address);
        let away = history_of(&events);
        assert_eq!(at_end(&away), [6, 0, 40]);
        assert_eq!(away.contradictions, 0);
        let last = away.events;
        let pauses = away.pauses.iter().filter(|pause| pause.end > last);
        let mut pauses: Vec<(u64, u64)> = pauses
            .map(|pause| (pause.address / MIB, pause.size.get() / MIB))
            .collect();
        pauses.sort_unstable();
        assert_eq!(pauses, left);
        // The resume is of the whole range, as the pause was.
        events.push((Action::SegmentResumed, 100, 60));
        let back = history_of(&events);
        assert_eq!(at_end(&back), [46, live, 0]);
        assert_eq!(back.contradictions, 0);
    }
}

#[test]
fn a_block_has_its_regions_tag_unless_the_program_said_another() {
    let pool = MempoolId(2, 2);
    let mut trace = trace(&[
        (Action::SegmentAlloc, 10 * MIB, 30 * MIB),
        (Action::Alloc, 10 * MIB, MIB),
        (Action::Alloc, 20 * MIB, MIB),
        (Action::Alloc, 30 * MIB, MIB),
    ]);
    trace.regions = [(pool, "kv cache".into())].into();
    trace.initial.blocks = vec![InitialBlock {
        address: DeviceAddress(100 * MIB),
        size: Bytes(MIB),
        requested: Bytes(MIB),
        stream: Stream::DEFAULT,
        pool: Some(pool),
        status: BlockStatus::Allocated,
        stack: StackId::NONE,
    }];
    for recorded in &mut trace.events[..3] {
        recorded.event.pool = pool;
    }
    let mut stacks = StackTable::clone(&trace.stacks);
    trace.events[2].note = stacks.intern_note(Note {
        compile_context: None,
        user_metadata: Some("prefix".into()),
    });
    trace.stacks = Arc::new(stacks);
    let history = history(&trace);
    let tags = { history.blocks.iter() }.map(|block| &*history.tags[block.tag as usize]);
    let tags: Vec<&str> = tags.collect();
    assert_eq!(tags, ["kv cache", "kv cache", "prefix", ""]);
}

#[test]
fn what_was_paused_before_the_first_event_is_in_no_peak() {
    let event =
        |action, address, size| common::recorded(action, address * MIB, size * MIB, StackId::NONE);
    let mut trace = trace(&[
        (Action::SegmentAlloc, 10 * MIB, 30 * MIB),
        (Action::Alloc, 10 * MIB, 20 * MIB),
    ]);
    let paused = event(Action::SegmentPaused, 100, 60);
    trace.initial.segments = vec![InitialSegment {
        address: paused.event.address,
        size: paused.event.size,
        stream: paused.event.stream,
        pool: None,
        is_large: true,
        is_expandable: false,
    }];
    let stacks = Arc::make_mut(&mut trace.stacks);
    trace.initial.paused = vec![TraceEvent::with_metadata(paused.event, 0, "kv", stacks)];
    let away = history(&trace);
    assert_eq!(away.contradictions, 0);
    assert_eq!(at_end(&away), [30, 20, 60]);
    assert_eq!(away.peak_reserved.fragmentation.reserved, Bytes::mib(30));
    assert_eq!(away.levels.most(CURVES - 1), [60 * MIB; 3]);
    assert_eq!((away.pauses[0].start, away.pauses[0].end), (0, 3));
    assert_eq!(
        (away.tags, away.regions),
        (vec![String::new()], vec!["kv".to_owned()])
    );
    trace.events.push(event(Action::SegmentResumed, 100, 60));
    assert_eq!(at_end(&history(&trace)), [90, 20, 0]);
}

#[test]
fn what_cannot_go_back_stays_paused() {
    let mut events = vec![
        (Action::SegmentMap, 100, 40),
        (Action::Alloc, 120, 5),
        (Action::SegmentPaused, 100, 40),
        (Action::SegmentUnmap, 120, 20),
    ];
    let away = history_of(&events);
    assert_eq!(at_end(&away), [0, 0, 40]);
    assert_eq!(away.contradictions, 1);
    events.push((Action::SegmentResumed, 100, 40));
    assert_eq!(at_end(&history_of(&events)), [40, 5, 0]);
}

/// Takes more than a minute if each pause visits all blocks.
#[test]
fn pauses_among_many_blocks_and_requests_count_what_is_paused() {
    let blocks = 50_000;
    let start = 1 << 40;
    let mut events = vec![
        (Action::SegmentAlloc, start, (blocks + 1) * 512),
        (Action::SegmentAlloc, MIB, MIB),
        (Action::Alloc, MIB, 1024),
    ];
    events.extend((0..blocks).map(|block| (Action::Alloc, start + block * 512, 512)));
    let last = start + blocks * 512;
    for _ in 0..20_000 {
        events.push((Action::SegmentPaused, MIB, MIB));
        events.push((Action::Alloc, last, 512));
        events.push((Action::SegmentResumed, MIB, MIB));
        events.push((Action::FreeRequested, last, 512));
        events.push((Action::FreeCompleted, last, 512));
    }
    let history = history(&trace(&events));
    assert_eq!(history.contradictions, 0);
    assert_eq!(history.end.fragmentation.live, Bytes(1024 + blocks * 512));
    assert_eq!(history.pauses.len(), 20_000);
    // The last block exists only while the other segment is paused.
    assert_eq!(
        history.peak_live.fragmentation.live,
        Bytes(1024 + (blocks + 1) * 512)
    );
}

#[test]
fn what_is_paused_is_no_part_of_a_peak() {
    let events = [
        (Action::SegmentAlloc, 100 * MIB, 30 * MIB),
        (Action::SegmentAlloc, 200 * MIB, 50 * MIB),
        (Action::Alloc, 100 * MIB, 30 * MIB),
        (Action::SegmentPaused, 100 * MIB, 30 * MIB),
        (Action::Alloc, 200 * MIB, 40 * MIB),
        (Action::FreeRequested, 200 * MIB, 40 * MIB),
        (Action::FreeCompleted, 200 * MIB, 40 * MIB),
        (Action::SegmentResumed, 100 * MIB, 30 * MIB),
    ];
    let trace = trace(&events);
    let history = history(&trace);
    assert_eq!(history.peak_live.fragmentation.live, Bytes(40 * MIB));
    assert_eq!(history.peak_requested, Bytes(40 * MIB));
    let difference = Difference::new([(&trace, &history), (&trace, &history)]);
    let at_peak = difference
        .sites
        .iter()
        .map(|site| (site.peak_bytes, site.peak_blocks));
    assert_eq!(at_peak.collect::<Vec<_>>(), [([40 * MIB; 2], [1; 2])]);
}

#[test]
fn a_block_that_is_freed_while_it_is_paused_does_not_come_back() {
    let history = history_of(&[
        (Action::SegmentAlloc, 10, 6),
        (Action::Alloc, 10, 2),
        (Action::Alloc, 12, 1),
        (Action::SegmentPaused, 10, 6),
        (Action::FreeRequested, 10, 2),
        (Action::FreeCompleted, 10, 2),
        (Action::SegmentResumed, 10, 6),
    ]);
    assert_eq!(at_end(&history), [6, 1, 0]);
}
