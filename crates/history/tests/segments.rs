//! What is kept of a segment: since when it is there, and who asked for it.

mod common;

use std::sync::Arc;

use common::{MIB, recorded};
use lowtide_core::Action;
use lowtide_history::{BlockSizes, History};
use lowtide_trace::{Frame, StackId, StackTable, Trace};

#[test]
fn what_is_left_of_a_segment_is_as_old_as_all_of_it_was() {
    let mut stacks = StackTable::new();
    let stack = stacks.intern([Frame {
        name: "forward",
        filename: "train.py",
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
