//! The project's sample recordings, against counts taken from them with Python's own `pickle`.

use std::path::PathBuf;

use lowtide_core::Bytes;
use lowtide_trace::{Trace, read};

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
