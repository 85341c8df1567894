//! The categories of a job's memory are those that the program itself knows.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs::File;
use std::path::{Path, PathBuf};

use common::{Job, MIB};
use flate2::read::GzDecoder;
use lowtide_core::{BlockStatus, Bytes};
use lowtide_history::{BlockSizes, Categories, Category, History};
use lowtide_trace::{InitialBlock, StackId, Trace};

/// A storage: the time in microseconds at which the program had it, its address and size, and its category.
type Mark = (i64, u64, u64, String);

/// What `data/categories.py` ran: trainings with stacks of several kinds, and a generation of tokens.
const JOBS: [&str; 19] = [
    "plain.all",
    "accumulate.python",
    "checkpoint.all",
    "checkpoint.python",
    "autocast.all",
    "sgd.python",
    "late.python",
    "generate.python",
    "convolution.all",
    "convolution.python",
    "recorded.all",
    "recorded.sgd",
    "plain.said",
    "accumulate.said",
    "checkpoint.said",
    "autocast.said",
    "sgd.said",
    "late.said",
    "convolution.said",
];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

fn recording(job: &str) -> (Trace, History) {
    let snapshot = lowtide_trace::read(&data(&format!("{job}.pickle.gz"))).unwrap();
    let trace = snapshot.traces.into_iter().next().unwrap();
    let history = History::new(&trace, &BlockSizes::estimated(&trace));
    (trace, history)
}

/// Returns the category that the program knew for each block.
fn known(job: &str, trace: &Trace, history: &History) -> Vec<Option<Category>> {
    let marks = GzDecoder::new(File::open(data(&format!("{job}.json.gz"))).unwrap());
    let marks: Vec<Mark> = serde_json::from_reader(marks).unwrap();
    let mut known = vec![None; history.blocks.len()];
    // A tensor without bytes has no block.
    for (time_us, address, _, name) in marks.into_iter().filter(|mark| mark.2 > 0) {
        let instant = trace
            .events
            .partition_point(|event| event.time_us <= time_us);
        let instant = u32::try_from(instant).unwrap();
        let mut held = history.held_at(instant);
        let (index, _) = held
            .find(|(_, block)| (block.address..block.address + block.size.get()).contains(&address))
            .unwrap();
        let category = Category::ALL.into_iter().find(|it| it.name() == name);
        known[index] = Some(category.unwrap());
    }
    known
}

#[test]
fn each_block_has_the_category_that_the_program_knew() {
    // Which block of one size is a parameter and which a moment is not in a recording without its beginning.
    for job in JOBS.into_iter().filter(|job| !job.starts_with("late")) {
        let (trace, history) = recording(job);
        let categories = Categories::of(&trace, &history);
        for (index, known) in known(job, &trace, &history).into_iter().enumerate() {
            let found = categories.of_block(index);
            if let Some(known) = known {
                assert_eq!(found, known, "{job}: {:?}", history.blocks[index]);
            }
        }
    }
}

/// What the program does not know are operators' temporary tensors, and the memory of libraries.
#[test]
fn the_sums_at_the_peak_are_those_that_the_program_knew() {
    for job in JOBS {
        let (trace, history) = recording(job);
        let peak = history.peak_live.instant;
        let held = Categories::of(&trace, &history).held_at(&history, peak);
        let known = known(job, &trace, &history);
        let mut sums = [0; Category::ALL.len()];
        for (index, block) in history.held_at(peak) {
            let category = known[index].unwrap_or(Category::Temporaries);
            sums[category as usize] += block.live_bytes().get();
        }
        let others = [
            Category::Temporaries,
            Category::Workspaces,
            Category::Unknown,
        ];
        let sum = |category: Category| sums[category as usize];
        let is_known = |category: &Category| !others.contains(category);
        for category in Category::ALL.into_iter().filter(is_known) {
            // In the generation, the program marks only some of what it makes.
            let is_marked = !job.starts_with("generate") || sum(category) > 0;
            // The gradient of the loss is made before backward begins.
            let loss_gradient = if category == Category::Activations {
                512
            } else {
                0
            };
            let difference = held[category].bytes.abs_diff(sum(category));
            assert!(
                !is_marked || difference <= loss_gradient,
                "{job}: {category:?}, {difference}"
            );
        }
        assert_eq!(held[Category::Unknown].bytes, 0, "{job}");
        let all: u64 = Category::ALL
            .map(|category| held[category].bytes)
            .iter()
            .sum();
        assert_eq!(all, history.peak_live.fragmentation.live.get(), "{job}");
    }
}

#[test]
fn without_stacks_all_is_unknown() {
    let mut job = Job::new(false);
    let kept = job.alloc(MIB, "main", 1);
    job.alloc(2 * MIB, "step", 2);
    job.free(kept);
    let trace = job.into_trace();
    let history = History::new(&trace, &BlockSizes::estimated(&trace));
    let held = Categories::of(&trace, &history).held_at(&history, history.peak_live.instant);
    assert_eq!(held[Category::Unknown].bytes, 3 * MIB);
}

/// Stacks of a training: what Python calls, innermost first, and backward, in which no function of Python runs.
const MODULE: &str = "site-packages/torch/nn/modules/module.py";
const MAIN: (&str, &str, u32) = ("<module>", "train.py", 1);

#[test]
fn what_each_step_keeps_is_no_input() {
    let mut job = Job::new(true);
    job.alloc_in(MIB, &[("__init__", "model.py", 1), MAIN]);
    for _ in 0..5 {
        let batch = job.alloc_in(4 * MIB, &[("load", "train.py", 2), MAIN]);
        let output = job.alloc_in(
            2 * MIB,
            &[("forward", "model.py", 5), ("_call_impl", MODULE, 9), MAIN],
        );
        let gradient = job.alloc_in(MIB, &[]);
        job.alloc_in(512, &[("remember", "train.py", 7), MAIN]);
        for block in [output, batch, gradient] {
            job.free(block);
        }
    }
    let trace = job.into_trace();
    let history = History::new(&trace, &BlockSizes::estimated(&trace));
    let categories = Categories::of(&trace, &history);
    let held = categories.held_at(&history, history.peak_live.instant);
    let bytes = |category: Category| held[category].bytes;
    assert_eq!(bytes(Category::Inputs), 4 * MIB);
    assert_eq!(bytes(Category::Activations), 2 * MIB);
    assert_eq!(bytes(Category::Parameters), MIB);
    assert_eq!(bytes(Category::Gradients), MIB);
    let at_end = categories.held_at(&history, history.events);
    assert_eq!(at_end[Category::Unknown].bytes, 5 * 512);
}

const FORWARD: &str = r#"{"module": "layers.0"}"#;
const PROGRAM: &str = r#"{"phase": "program"}"#;
const BACKWARD: &str = r#"{"phase": "backward"}"#;
const OPTIMIZER: &str = r#"{"phase": "optimizer"}"#;

fn label(category: &str) -> String {
    format!(r#"{{"category": "{category}", "module": "layers.0", "name": "weight"}}"#)
}

/// A training that says what its memory is for. Its stacks would say nothing, or something else: `stack` is that of
/// each request.
fn said(stack: Option<(&str, &str, u32)>) -> Trace {
    let mut job = Job::new(stack.is_some());
    let stack: Vec<_> = stack.into_iter().collect();
    let weight = job.alloc_in(MIB, &stack);
    let mut state = None;
    for step in 0..4 {
        job.annotate(weight, &label("parameters"));
        job.say(PROGRAM);
        let batch = job.alloc_in(3 * MIB, &stack);
        job.annotate(batch, r#"{"category": "inputs"}"#);
        job.say(FORWARD);
        let scratch = job.alloc_in(5 * MIB, &stack);
        let output = job.alloc_in(7 * MIB, &stack);
        job.free(scratch);
        job.say(PROGRAM);
        let loss = job.alloc_in(512, &stack);
        job.say(BACKWARD);
        let of_loss = job.alloc_in(1024, &stack);
        job.free(of_loss);
        job.free(output);
        let gradient = job.alloc_in(MIB, &stack);
        job.annotate(gradient, &label("gradients"));
        job.say(OPTIMIZER);
        let made = *state.get_or_insert_with(|| job.alloc_in(2 * MIB, &stack));
        if step == 0 {
            job.annotate(made, &label("optimizer_state"));
        }
        let update = job.alloc_in(MIB, &stack);
        job.free(update);
        job.say(PROGRAM);
        for block in [gradient, loss, batch] {
            job.free(block);
        }
    }
    job.into_trace()
}

#[test]
fn what_the_program_says_needs_no_stacks_and_goes_before_them() {
    for stack in [None, Some(("step", "train.py", 1))] {
        let trace = said(stack);
        let history = History::new(&trace, &BlockSizes::estimated(&trace));
        let categories = Categories::of(&trace, &history);
        let is_second = |block: &lowtide_history::Block| block.start > 20;
        let blocks = history.blocks.iter().enumerate();
        let second = blocks
            .filter(|(_, block)| is_second(block))
            .map(|(index, block)| {
                let module = categories.module_of_block(index) as usize;
                let path = &*categories.module_paths()[module];
                (block.requested.get(), categories.of_block(index), path)
            });
        let of_a_step = [
            (3 * MIB, Category::Inputs, ""),
            (5 * MIB, Category::Temporaries, "layers.0"),
            (7 * MIB, Category::Activations, "layers.0"),
            (512, Category::Activations, ""),
            (1024, Category::Temporaries, ""),
            (MIB, Category::Gradients, "layers.0"),
            (MIB, Category::Temporaries, ""),
        ];
        let found: Vec<_> = second.collect();
        assert_eq!(found[found.len() - 7..], of_a_step, "{stack:?}");
        let held = categories.held_at(&history, history.events);
        assert_eq!(held[Category::Parameters].bytes, MIB, "{stack:?}");
        assert_eq!(held[Category::OptimizerState].bytes, 2 * MIB, "{stack:?}");
    }
}

/// Sizes alone would make the unnamed block a moment of the named one.
#[test]
fn beside_named_parameters_an_unnamed_block_is_none() {
    let mut trace = said(None);
    let named = trace.events.remove(1).event;
    let block = |address| InitialBlock {
        address,
        size: named.size,
        requested: named.size,
        stream: named.stream,
        pool: Some(named.pool),
        status: BlockStatus::Allocated,
        stack: StackId::NONE,
    };
    let unnamed = named.address + Bytes(1 << 44);
    trace.initial.blocks = vec![block(named.address), block(unnamed)];
    let history = History::new(&trace, &BlockSizes::estimated(&trace));
    let held = Categories::of(&trace, &history).held_at(&history, history.events);
    assert_eq!(held[Category::Parameters].bytes, MIB);
    assert_eq!(held[Category::OptimizerState].bytes, 2 * MIB);
    assert_eq!(held[Category::Workspaces].bytes, MIB, "as large as one");
}

/// Metadata is the program's own: it may be any text.
#[test]
fn other_texts_say_nothing() {
    for text in [
        "weights",
        "{",
        "[1]",
        r#"{"category": 7}"#,
        r#"["parameters", "backward", "layers.0"]"#,
        r#"{"category": "secret", "step": 3}"#,
    ] {
        let mut job = Job::new(false);
        job.say(text);
        let block = job.alloc(3 * MIB, "main", 1);
        job.annotate(block, text);
        let trace = job.into_trace();
        let history = History::new(&trace, &BlockSizes::estimated(&trace));
        let categories = Categories::of(&trace, &history);
        assert_eq!(categories.of_block(0), Category::Unknown, "{text}");
        assert_eq!(categories.module_paths(), [""], "{text}");
    }
}
