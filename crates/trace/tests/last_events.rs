//! Tests that the last events of a recording start with the memory that the whole recording has there.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its data fails")]

use std::collections::BTreeMap;
use std::path::Path;

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress};
use lowtide_trace::{StackId, Trace};

fn sample(name: &str) -> Trace {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.join(format!("traces/{name}.pickle.zst"));
    lowtide_trace::read(&path).unwrap().traces.remove(0)
}

/// Returns the blocks that the program holds after the first `events` events: the requested bytes and call stack of
/// each.
fn held(trace: &Trace, events: usize) -> BTreeMap<DeviceAddress, (Bytes, StackId)> {
    let initial = trace.initial.blocks.iter();
    let mut held: BTreeMap<_, _> = initial
        .filter(|block| block.status == BlockStatus::Allocated)
        .map(|block| (block.address, (block.requested, block.stack)))
        .collect();
    for event in &trace.events[..events] {
        match event.event.action {
            Action::Alloc => {
                held.insert(event.event.address, (event.event.size, event.stack));
            }
            Action::FreeRequested => {
                held.remove(&event.event.address);
            }
            _ => {}
        }
    }
    held
}

#[test]
fn what_was_there_before_the_last_events_is_known() {
    for name in ["gpt2_train.stacks", "mnist_mlp"] {
        let trace = sample(name);
        let all = trace.events.len();
        for count in [0, 1, 10, 5_000, all - 1, all, all + 1] {
            let last = trace.last_events(count).unwrap();
            let left_out = all.saturating_sub(count);
            assert_eq!(last.events.len(), count.min(all));
            assert_eq!(held(&last, 0), held(&trace, left_out), "{name}: {count}");
            assert_eq!(held(&last, last.events.len()), held(&trace, all));
            assert_eq!(last.segments, trace.segments);
            assert_eq!(last.settings, trace.settings);
        }
        assert_eq!(trace.last_events(all).unwrap().events, trace.events);
        let last = trace.last_events(5_000).unwrap();
        let since = last.events[0].time_us;
        let marks = { trace.annotations.iter() }.filter(|mark| mark.time_us >= since);
        assert!(last.annotations.iter().eq(marks), "{name}");
        assert!(last.annotations.len() < trace.annotations.len());
    }
}
