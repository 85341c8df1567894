//! Tests that steps without marks are found by what repeats, and are not claimed if nothing does.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its data fails")]

mod common;

use std::path::Path;

use common::{Held, Job, MIB};
use lowtide_history::{BlockSizes, History, StepSource, Steps};
use lowtide_trace::Trace;

fn steps(trace: &Trace) -> Steps {
    Steps::find(trace, &History::new(trace, &BlockSizes::estimated(trace)))
}

/// Checks that `expected` whole steps, or up to two fewer, are found by the period of the allocations.
fn check_steps(trace: &Trace, expected: usize, what: &str) {
    let found = steps(trace);
    assert!(
        matches!(found.source, StepSource::Period(_)),
        "{what}: {:?}",
        found.source
    );
    assert!(
        (expected - 2..=expected).contains(&found.len()),
        "{what}: {} steps and not {expected}",
        found.len()
    );
}

/// Trains a network. Its forward pass keeps the memory that backward needs.
fn train_network(job: &mut Job, name: &str, layers: u32, width: u64, has_temporary: bool) {
    let mut activations: Vec<Held> = Vec::new();
    for layer in 0..layers {
        activations.push(job.alloc(width * (3 + u64::from(layer)), name, layer));
        if has_temporary {
            let temporary = job.alloc(width, name, 100 + layer);
            job.free(temporary);
        }
    }
    for layer in (0..layers).rev() {
        let gradient = job.alloc(width * (3 + u64::from(layer)), name, 200 + layer);
        job.free(activations.pop().unwrap());
        job.free(gradient);
    }
}

/// Two networks take turns. The second makes the first one's requests and half as many more.
#[test]
fn halves_that_alternate_are_one_step() {
    for has_stacks in [true, false] {
        let mut job = Job::new(has_stacks);
        for _ in 0..40 {
            train_network(&mut job, "shared", 20, 4096, false);
            train_network(&mut job, "shared", 20, 4096, false);
            train_network(&mut job, "generator", 12, 5120, true);
        }
        check_steps(&job.into_trace(), 40, "two networks");
    }
}

/// Gradients accumulate over three batches before the optimizer's step.
#[test]
fn batches_that_are_gathered_are_one_step() {
    for has_stacks in [true, false] {
        let mut job = Job::new(has_stacks);
        for _ in 0..30 {
            for _ in 0..3 {
                train_network(&mut job, "model", 24, 8192, true);
            }
            for line in 0..24 {
                let square = job.alloc(1536 * (1 + u64::from(line)), "optimizer", line);
                let root = job.alloc(1536 * (1 + u64::from(line)), "optimizer", 50 + line);
                job.free(square);
                job.free(root);
            }
        }
        check_steps(&job.into_trace(), 30, "gathered batches");
    }
}

/// Generates tokens for several prompts, each of another length and in batches of another size. Every token extends
/// each layer's cache by one.
fn generate(has_stacks: bool, layers: u32) -> Trace {
    let mut job = Job::new(has_stacks);
    for _ in 0..12 {
        let (batch, start) = (1 + job.random(16), 16 + job.random(1500));
        let mut caches: Vec<Held> = (0..layers)
            .map(|_| job.alloc(batch * start * 512, "prefill", 2))
            .collect();
        for token in 1..=30 {
            let input = job.alloc(batch * 8, "embed", 1);
            let position = job.alloc(batch * 16, "embed", 2);
            let mask = job.alloc(batch * (start + token) * 4, "mask", 3);
            job.free(position);
            let mut hidden = job.alloc(batch * 2048, "embed", 4);
            for cache in &mut caches {
                let normed = job.alloc(batch * 2048, "layer", 5);
                let query = job.alloc(batch * 6144, "layer", 6);
                job.free(normed);
                let longer = job.alloc(batch * (start + token) * 512, "concatenate", 7);
                job.free(std::mem::replace(cache, longer));
                let scores = job.alloc(batch * (start + token) * 32, "layer", 8);
                let next = job.alloc(batch * 2048, "layer", 9);
                job.free(query);
                job.free(scores);
                job.free(std::mem::replace(&mut hidden, next));
            }
            let scores = job.alloc(batch * 128_000, "head", 10);
            job.free(hidden);
            let sorted = job.alloc(batch * 128_000, "sample", 11);
            let order = job.alloc(batch * 256_000, "sample", 12);
            job.free(scores);
            job.free(sorted);
            let choice = job.alloc(batch * 8, "sample", 13);
            job.free(order);
            job.free(mask);
            job.free(input);
            job.free(choice);
        }
        for cache in caches {
            job.free(cache);
        }
    }
    job.into_trace()
}

#[test]
fn tokens_are_steps_though_caches_grow() {
    for layers in [4, 16, 32] {
        for has_stacks in [true, false] {
            check_steps(&generate(has_stacks, layers), 12 * 30, "tokens");
        }
    }
}

/// Returns a recording of requests of a few kinds that are made and freed at random.
fn at_random(has_stacks: bool, kinds: u64, held_max: usize) -> Trace {
    let mut job = Job::new(has_stacks);
    let mut held: Vec<Held> = Vec::new();
    for _ in 0..40_000 {
        let is_full = held.len() >= held_max;
        if !held.is_empty() && (is_full || job.random(2) == 0) {
            let index = usize::try_from(job.random(held.len() as u64)).unwrap();
            let block = held.swap_remove(index);
            job.free(block);
        } else {
            let kind = job.random(kinds);
            let line = u32::try_from(kind).unwrap();
            held.push(job.alloc(512 * (1 + kind * kind), "serve", line));
        }
    }
    job.into_trace()
}

#[test]
fn nothing_is_claimed_where_nothing_repeats() {
    for has_stacks in [true, false] {
        for kinds in [1, 3, 20, 200, 5000] {
            for held_max in [1, 2, 10, 500] {
                let found = steps(&at_random(has_stacks, kinds, held_max));
                assert_eq!(
                    found.source,
                    StepSource::Parts,
                    "{kinds} kinds, {held_max} held: {} steps",
                    found.len()
                );
            }
        }
    }
}

/// The samples, whose programs marked their steps, without those marks.
#[test]
fn steps_of_recorded_jobs_are_those_that_the_programs_marked() {
    let samples = [
        ("gpt2_train", 30),
        ("gpt2_train.stacks", 6),
        ("llama_varlen", 60),
        ("mnist_mlp", 938),
    ];
    for (name, expected) in samples {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let path = root.join(format!("traces/{name}.pickle.zst"));
        let mut trace = lowtide_trace::read(&path).unwrap().traces.remove(0);
        trace.annotations.clear();
        check_steps(&trace, expected, name);
    }
}

/// The smaller recordings whose programs marked their steps: the same number is found, or none is claimed.
#[test]
fn what_is_found_is_what_was_marked() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../replay/tests/data");
    let mut compared = 0;
    for entry in std::fs::read_dir(data).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gz") {
            continue;
        }
        let mut trace = lowtide_trace::read(&path).unwrap().traces.remove(0);
        let marked = steps(&trace);
        if !matches!(marked.source, StepSource::Annotation(_)) {
            continue;
        }
        trace.annotations.clear();
        let found = steps(&trace);
        // For a job with an out-of-memory error halfway through each third step, 24 of 49 steps are found.
        let is_refused = path.to_string_lossy().contains("/shrinking");
        if found.source != StepSource::Parts && !is_refused {
            compared += 1;
            let what = path.display();
            assert!(
                found.len().abs_diff(marked.len()) <= 2,
                "{what}: {} steps and not {}",
                found.len(),
                marked.len()
            );
        }
    }
    assert_eq!(
        compared, 15,
        "recordings whose steps are found without their marks"
    );
}

/// A block per step that is never freed does not hide the steps.
#[test]
fn a_leak_does_not_hide_the_steps() {
    let mut job = Job::new(false);
    for _ in 0..40 {
        train_network(&mut job, "model", 24, 8192, true);
        job.alloc(MIB, "kept", 1);
    }
    check_steps(&job.into_trace(), 40, "a leak");
}

/// A step of two loops over the same operations. Blocks live longer than one iteration.
#[test]
fn a_loop_of_like_operations_within_a_step_is_no_step() {
    for has_stacks in [true, false] {
        let mut job = Job::new(has_stacks);
        for _ in 0..30 {
            for requests in [333, 667] {
                let mut held: Vec<Held> = Vec::new();
                for request in 0..requests {
                    let line = request % 37;
                    held.push(job.alloc(4096 * (1 + u64::from(line)), "operation", line));
                    if held.len() > 60 {
                        let index = usize::try_from(job.random(held.len() as u64)).unwrap();
                        let block = held.swap_remove(index);
                        job.free(block);
                    }
                }
                held.into_iter().for_each(|block| job.free(block));
            }
            job.alloc(MIB, "kept", 1);
        }
        check_steps(&job.into_trace(), 30, "a loop within a step");
    }
}
