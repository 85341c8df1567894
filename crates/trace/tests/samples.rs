//! Tests of the project's sample recordings against counts by Python's own `pickle`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lowtide_core::{Action, BlockStatus, Bytes};
use lowtide_trace::{Snapshot, Trace, read, read_from, write_compact, write_pickle};

fn sample(name: &str) -> Trace {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../traces");
    let mut snapshot = read(&root.join(name)).expect("the sample is a recording");
    assert_eq!(snapshot.traces.len(), 1);
    snapshot.traces.remove(0)
}

#[track_caller]
fn check(
    name: &str,
    events: usize,
    allocs: usize,
    segments: usize,
    peak_live: u64,
    peak_requested: u64,
) {
    let trace = sample(name);
    assert_eq!(trace.device, 0);
    assert_eq!(trace.events.len(), events);
    assert_eq!(trace.allocs(), allocs);
    assert_eq!(trace.segments.len(), segments);
    assert_eq!(trace.streams(), 1);
    assert_eq!(trace.peak_live_bytes(), Bytes(peak_live));
    assert_eq!(trace.peak_requested_bytes(), Bytes(peak_requested));
    assert!(trace.initial.segments.is_empty() && trace.initial.blocks.is_empty());
    assert!(trace.events.iter().all(|event| event.pool_known));
    assert!(trace.events.is_sorted_by_key(|event| event.time_us));
}

#[test]
fn mnist_mlp() {
    check(
        "mnist_mlp.pickle.zst",
        160_745,
        53_601,
        12,
        411_284_992,
        411_278_512,
    );
}

#[test]
fn gpt2_train() {
    check(
        "gpt2_train.pickle.zst",
        116_097,
        39_146,
        145,
        13_594_295_808,
        13_594_207_512,
    );
}

#[test]
fn llama_varlen() {
    check(
        "llama_varlen.pickle.zst",
        474_075,
        158_341,
        236,
        12_813_298_688,
        12_813_296_152,
    );
}

/// A ring buffer that lost its first events: the memory before the remaining events is recovered.
#[test]
fn a_real_recording_without_its_beginning() {
    let whole = sample("gpt2_train.pickle.zst");
    for lost in [1, 1000, 50_001, whole.events.len()] {
        let mut held = BTreeMap::new();
        let mut segments = BTreeMap::new();
        for event in whole.events[..lost].iter().map(|event| event.event) {
            let status = match event.action {
                Action::Alloc => BlockStatus::Allocated,
                Action::FreeRequested => BlockStatus::PendingFree,
                Action::FreeCompleted => BlockStatus::Inactive,
                Action::SegmentAlloc => {
                    segments.insert(event.address, event.size);
                    continue;
                }
                other => panic!("the sample has no {other:?}"),
            };
            held.insert(event.address, (event.size, status));
        }
        held.retain(|_, &mut (_, status)| status != BlockStatus::Inactive);
        let mut rest = whole.clone();
        rest.events.drain(..lost);
        let rest = Snapshot {
            traces: vec![rest],
            ..Snapshot::default()
        };
        let mut pickle = Vec::new();
        write_pickle(&rest, &mut pickle).unwrap();
        let mut compact = Vec::new();
        write_compact(&rest, &mut compact).unwrap();
        for bytes in [pickle, compact] {
            let read_back = &read_from(&bytes[..]).unwrap().traces[0];
            assert_eq!(read_back.events, rest.traces[0].events);
            assert_eq!(read_back.segments, whole.segments);
            let blocks = read_back.initial.blocks.iter();
            let found: BTreeMap<_, _> = blocks
                .map(|block| (block.address, (block.requested, block.status)))
                .collect();
            assert_eq!(found, held);
            let found = read_back.initial.segments.iter();
            assert_eq!(
                found
                    .map(|segment| (segment.address, segment.size))
                    .collect::<BTreeMap<_, _>>(),
                segments
            );
        }
    }
}
