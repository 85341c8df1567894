//! Tests real recordings against independent counts: at the end by PyTorch's own list of segments, in between block
//! by block and segment by segment.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its data fails")]

mod common {
    pub(crate) mod changes;
}

use std::path::{Path, PathBuf};

use common::changes::check_changes;
use lowtide_core::{Action, Bytes, Fragmentation};
use lowtide_history::{BlockSizes, History};
use lowtide_trace::Trace;

/// Returns the paths of the project's recordings: the samples and those for verifying replays.
fn recordings() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let directories = ["traces", "crates/replay/tests/data"].map(|directory| root.join(directory));
    let entries = directories
        .iter()
        .flat_map(|directory| std::fs::read_dir(directory).unwrap());
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.to_string_lossy().contains(".pickle"));
    paths.sort();
    assert!(paths.len() >= 23, "{paths:?}");
    paths
}

fn large_page(trace: &Trace) -> Bytes {
    trace.config_in_force().unwrap().large_segment_size
}

/// Returns the live and reserved bytes after `instant` events, from the events alone: the initial bytes, plus
/// allocated, minus freed.
fn count_events(trace: &Trace, instant: u32) -> (u64, u64) {
    let rounded = |size: Bytes| size.get().next_multiple_of(512);
    let held =
        |block: &&lowtide_trace::InitialBlock| block.status == lowtide_core::BlockStatus::Allocated;
    let initial = trace.initial.blocks.iter().filter(held);
    let mut live: u64 = initial.map(|block| rounded(block.requested)).sum();
    let mut reserved: u64 = trace
        .initial
        .segments
        .iter()
        .map(|segment| segment.size.get())
        .sum();
    for recorded in &trace.events[..instant as usize] {
        let size = recorded.event.size;
        match recorded.event.action {
            Action::Alloc => live += rounded(size),
            Action::FreeRequested => live -= rounded(size),
            Action::SegmentAlloc | Action::SegmentMap => reserved += size.get(),
            Action::SegmentFree | Action::SegmentUnmap => reserved -= size.get(),
            _ => {}
        }
    }
    (live, reserved)
}

/// Returns the instants that a report shows, and others from the whole recording.
fn instants(history: &History) -> Vec<u32> {
    let mut instants = vec![0, history.peak_live.instant, history.peak_reserved.instant];
    instants.extend(
        history
            .refusals
            .iter()
            .map(|refusal| refusal.moment.instant),
    );
    instants.push(history.events);
    let step = (history.events / 17).max(1);
    instants.extend((1..history.events).step_by(step as usize));
    instants
}

fn check(path: &Path) {
    let name = path.file_name().unwrap().to_string_lossy();
    let snapshot = lowtide_trace::read(path).unwrap();
    let trace = &snapshot.traces[0];
    let sizes = BlockSizes::of(trace, &());
    let history = History::new(trace, &sizes);
    assert_eq!(history.contradictions, 0, "{name}");
    check_changes(&history);
    for instant in instants(&history) {
        let (live, reserved) = count_events(trace, instant);
        let blocks = history
            .blocks
            .iter()
            .filter(|block| block.is_allocated_at(instant));
        let of_blocks: u64 = blocks.map(|block| block.live_bytes().get()).sum();
        let there = |start: u32, end: u32| (start..end).contains(&instant);
        let segments = history.segments.iter();
        let segments = segments.filter(|segment| there(segment.start, segment.end));
        let of_segments: u64 = segments.map(|segment| segment.size.get()).sum();
        assert_eq!(
            (of_blocks, of_segments),
            (live, reserved),
            "{name} at {instant}"
        );
        let part = usize::try_from(u64::from(instant) / history.levels.part_instants()).unwrap();
        for (curve, value) in [(0, reserved), (1, live)] {
            let range = history.levels.least(curve)[part]..=history.levels.most(curve)[part];
            assert!(
                range.contains(&value),
                "{name} at {instant}: {value}, {range:?}"
            );
        }
    }
    for moment in [history.peak_live, history.peak_reserved, history.end] {
        let counted = count_events(trace, moment.instant);
        let said = (
            moment.fragmentation.live.get(),
            moment.fragmentation.reserved.get(),
        );
        assert_eq!(said, counted, "{name} at {}", moment.instant);
        let causes: u64 = moment
            .fragmentation
            .causes
            .iter()
            .map(|bytes| bytes.get())
            .sum();
        assert_eq!(said.0 + causes, said.1, "{name} at {}", moment.instant);
    }
    assert_eq!(
        history.peak_live.fragmentation.live,
        trace.peak_live_bytes(),
        "{name}"
    );
    // For the end, PyTorch lists every segment and block itself.
    let listed = Fragmentation::of(&trace.segments, history.main_stream, large_page(trace));
    assert_eq!(history.end.fragmentation, listed, "{name}");
}

#[test]
fn every_recording_agrees_with_an_independent_count() {
    for path in recordings() {
        check(&path);
    }
}

/// Also holds if garbage was collected under a limit that is not recorded.
#[test]
fn how_long_the_blocks_were_is_known() {
    for path in recordings() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let trace = &lowtide_trace::read(&path).unwrap().traces[0];
        let sizes = BlockSizes::of(trace, &());
        assert!(sizes.are_verified(), "{name}");
    }
}

/// Unknown sizes are rounded as little as addresses allow, and never below the request.
#[test]
fn estimates_keep_the_sums() {
    for path in recordings() {
        let trace = &lowtide_trace::read(&path).unwrap().traces[0];
        let known = History::new(trace, &BlockSizes::of(trace, &()));
        let estimated = History::new(trace, &BlockSizes::estimated(trace));
        assert_eq!(estimated.contradictions, 0, "{}", path.display());
        assert_eq!(
            estimated.end.fragmentation,
            known.end.fragmentation,
            "{}",
            path.display()
        );
        for (known, estimated) in known.blocks.iter().zip(&estimated.blocks) {
            assert!(estimated.requested <= estimated.size && estimated.size <= known.size);
        }
    }
}
