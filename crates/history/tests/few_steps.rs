//! Tests that a layer is not taken for a step: recordings of few steps, and of one forward pass.

mod common;

use common::{Held, Job, MIB};
use lowtide_history::{BlockSizes, Doubt, History, Leaks, StepSource, TrainingState, Trend};
use lowtide_trace::{AnnotationStage, Trace};

const LAYERS: u32 = 24;
const STEP: &str = "Optimizer.step#AdamW.step";

type Frames = [(&'static str, &'static str, u32)];

const PROGRAM: &Frames = &[("<module>", "train.py", 7)];
const OPTIMIZER: &Frames = &[
    ("_init_group", "site-packages/torch/optim/adam.py", 183),
    ("<module>", "train.py", 9),
];

/// A step of a user-defined optimizer. PyTorch calls it from a function in `torch.optim`.
const OWN_OPTIMIZER: &Frames = &[
    ("step", "sgd.py", 12),
    ("wrapper", "site-packages/torch/optim/optimizer.py", 517),
    ("<module>", "train.py", 9),
];

/// A program with a model, and with stacks as PyTorch records them: backward has none.
struct Program {
    job: Job,
    /// Whether stacks contain PyTorch's functions that call a module: `stacks="all"` leaves some out.
    has_module_calls: bool,
    gradients: Vec<Held>,
    states: Vec<Held>,
    /// The stack of a block of 512 KiB that each step of the optimizer keeps.
    keeps: Option<&'static Frames>,
}

impl Program {
    fn new(has_stacks: bool) -> Program {
        Program {
            job: Job::new(has_stacks),
            has_module_calls: true,
            gradients: Vec::new(),
            states: Vec::new(),
            keeps: None,
        }
    }

    fn program(&mut self, size: u64) -> Held {
        self.job.alloc_in(size, PROGRAM)
    }

    /// Makes a request of a layer. All layers are called from one line of the model.
    fn layer(&mut self, size: u64, line: u32) -> Held {
        let module = "site-packages/torch/nn/modules/module.py";
        let mut frames = vec![
            ("forward", "layer.py", line),
            ("_call_impl", module, 1798),
            ("forward", "model.py", 20),
            ("_call_impl", module, 1798),
            ("<module>", "train.py", 8),
        ];
        frames.retain(|frame| self.has_module_calls || frame.1 != module);
        self.job.alloc_in(size, &frames)
    }

    /// Runs a forward pass. Each layer makes ten requests and keeps `kept` of them.
    fn forward(&mut self, kept: u32) -> Vec<Held> {
        let input = self.program(MIB);
        let mut activations = vec![input];
        for _ in 0..LAYERS {
            for line in 0..10 {
                let block = self.layer(MIB / 2 + 4096 * u64::from(line), line);
                if line < kept {
                    activations.push(block);
                } else {
                    self.job.free(block);
                }
            }
        }
        activations
    }

    fn backward(&mut self, mut activations: Vec<Held>) {
        let is_first = self.gradients.is_empty();
        while let Some(block) = activations.pop() {
            let gradient = self.job.alloc_in(block.size, &[]);
            self.job.free(block);
            self.job.free(gradient);
            if is_first {
                self.gradients.push(self.job.alloc_in(MIB / 4, &[]));
            }
        }
    }

    fn optimizer(&mut self, is_marked: bool) {
        let name = if is_marked { STEP } else { "something else" };
        self.job.mark(name, AnnotationStage::Start);
        for _ in 0..2 * LAYERS {
            if self.states.len() < 4 * LAYERS as usize {
                self.states.push(self.job.alloc_in(MIB / 4, OPTIMIZER));
                self.states.push(self.job.alloc_in(MIB / 4, OPTIMIZER));
            }
            let update = self.job.alloc_in(MIB / 4, OPTIMIZER);
            self.job.free(update);
        }
        if let Some(frames) = self.keeps {
            self.job.alloc_in(MIB / 2, frames);
        }
        self.job.mark(name, AnnotationStage::End);
    }

    fn step(&mut self, is_marked: bool) {
        let activations = self.forward(4);
        self.backward(activations);
        self.optimizer(is_marked);
    }

    fn leaks(self) -> Leaks {
        leaks(&self.job.into_trace())
    }
}

fn leaks(trace: &Trace) -> Leaks {
    Leaks::find(trace, &History::new(trace, &BlockSizes::estimated(trace)))
}

/// Checks that nothing is called a leak.
fn check_none(leaks: &Leaks, what: &str) {
    assert_eq!(leaks.leaks().next(), None, "{what}");
    let is_steady = leaks.spread.as_ref().is_some_and(Trend::is_steady);
    assert!(!is_steady, "{what}: {:?}", leaks.spread);
}

#[test]
fn few_marked_steps_are_counted_and_too_few() {
    for has_stacks in [true, false] {
        for count in 1..=12 {
            let mut program = Program::new(has_stacks);
            (0..count).for_each(|_| program.step(true));
            let found = program.leaks();
            check_none(&found, &format!("{count} steps"));
            let doubt = (count < 4).then_some(Doubt::FewSteps(count));
            assert_eq!(found.doubt, doubt, "{count} steps");
            assert_eq!(found.steps.source, StepSource::Annotation(STEP.into()));
        }
    }
    let few = Doubt::FewSteps(1).to_string();
    assert_eq!(
        few,
        "1 step is recorded: too few to tell; record at least 4"
    );
}

#[test]
fn a_leak_is_named_from_four_marked_steps_on() {
    for count in [4, 5, 8] {
        let mut program = Program::new(true);
        for _ in 0..count {
            program.step(true);
            program
                .job
                .alloc_in(MIB, &[("keep", "train.py", 12), PROGRAM[0]]);
        }
        let found = program.leaks();
        assert_eq!(found.leaks().count(), 1, "{count}: {:?}", found.growths);
        assert_eq!(found.doubt, None);
    }
}

#[test]
fn what_training_makes_once_is_named_and_no_leak() {
    for is_marked in [true, false] {
        let mut program = Program::new(true);
        program.step(is_marked);
        let found = program.leaks();
        check_none(&found, "one step");
        let TrainingState {
            optimizer,
            gradients,
        } = found.training;
        assert_eq!(optimizer.blocks, 4 * u64::from(LAYERS));
        assert_eq!(optimizer.bytes, u64::from(LAYERS) * MIB);
        // One for each activation, and one for the input.
        assert_eq!(gradients.blocks, 4 * u64::from(LAYERS) + 1);
    }
}

#[test]
fn what_every_step_of_an_optimizer_keeps_leaks() {
    for (is_marked, has_stacks) in [(true, true), (true, false), (false, true)] {
        for count in [5_u32, 8, 30] {
            let mut program = Program::new(has_stacks);
            program.keeps = Some(OWN_OPTIMIZER);
            (0..count).for_each(|_| program.step(is_marked));
            let found = program.leaks();
            let what = format!("{count} steps, marked: {is_marked}, stacks: {has_stacks}");
            // Steps without marks are known only if there are many.
            if is_marked || count == 30 {
                let sizes: Vec<u64> = found.leaks().map(|leak| leak.trend.end_bytes).collect();
                assert_eq!(
                    sizes,
                    [u64::from(count) * MIB / 2],
                    "{what}: {:?}",
                    found.doubt
                );
            }
            let states = if has_stacks { 4 * u64::from(LAYERS) } else { 0 };
            assert_eq!(found.training.optimizer.blocks, states, "{what}");
        }
    }
}

#[test]
fn what_is_beside_the_optimizers_makes_no_state() {
    for file in ["lr_scheduler.py", "swa_utils.py"] {
        let file = format!("site-packages/torch/optim/{file}");
        for kept in [1, 30] {
            let mut program = Program::new(true);
            for step in 0..30 {
                program.step(false);
                let block = program
                    .job
                    .alloc_in(MIB / 2, &[("step", &*file, 99), PROGRAM[0]]);
                if step >= kept {
                    program.job.free(block);
                }
            }
            let found = program.leaks();
            let leaks = usize::from(kept == 30);
            assert_eq!(found.leaks().count(), leaks, "{file}: {:?}", found.doubt);
            let states = found.training.optimizer.blocks;
            assert_eq!(states, 4 * u64::from(LAYERS), "{file}");
        }
    }
}

/// One line steps several optimizers. Each has a mark, and stacks show one call.
#[test]
fn states_that_optimizers_make_in_a_row_are_no_leak() {
    for (count, has_stacks) in [(5, true), (6, false), (8, true), (8, false)] {
        let mut program = Program::new(has_stacks);
        let activations = program.forward(1);
        program.backward(activations);
        for _ in 0..count {
            program.job.mark(STEP, AnnotationStage::Start);
            for _ in 0..4 {
                program.job.alloc_in(MIB, OPTIMIZER);
            }
            program.job.mark(STEP, AnnotationStage::End);
        }
        let found = program.leaks();
        let what = format!("{count} optimizers, stacks: {has_stacks}");
        check_none(&found, &what);
        assert_eq!(found.training.optimizer.blocks, 4 * count, "{what}");
    }
}

/// Hooks run an optimizer for each parameter as soon as backward has its gradient.
#[test]
fn states_that_optimizers_make_within_backward_are_no_leak() {
    let hook = [OPTIMIZER[0], ("optimizer_hook", "train.py", 30)];
    for steps in [1, 2, 4, 5, 8, 12] {
        let mut program = Program::new(true);
        for step in 0..steps {
            for activation in program.forward(1).into_iter().rev() {
                let gradient = program.job.alloc_in(activation.size, &[]);
                program.job.free(activation);
                program.job.mark(STEP, AnnotationStage::Start);
                if step == 0 {
                    program.job.alloc_in(MIB, &hook);
                    program.job.alloc_in(MIB, &hook);
                }
                let update = program.job.alloc_in(MIB / 2, &hook);
                program.job.free(update);
                program.job.mark(STEP, AnnotationStage::End);
                program.job.free(gradient);
            }
        }
        let found = program.leaks();
        let what = format!("{steps} steps");
        check_none(&found, &what);
        let states = 2 * u64::from(LAYERS + 1);
        assert_eq!(found.training.optimizer.blocks, states, "{what}");
        assert_eq!(found.training.gradients.blocks, 0, "{what}");
    }
}

/// One optimizer that keeps memory in each of four steps looks like four that take turns.
#[test]
fn what_four_marked_steps_of_optimizers_keep_is_not_known() {
    let mut program = Program::new(true);
    program.keeps = Some(OWN_OPTIMIZER);
    (0..4).for_each(|_| program.step(true));
    let found = program.leaks();
    check_none(&found, "four steps");
    assert_eq!(found.doubt, Some(Doubt::States));
    assert_eq!(found.training.optimizer.blocks, 4 * u64::from(LAYERS));
}

/// No stack begins in the program, and no step is marked.
#[test]
fn what_optimizers_keep_in_calls_that_stacks_do_not_show_is_not_known() {
    let mut program = Program::new(true);
    for _ in 0..30 {
        for line in 0..10 {
            let block = program.job.alloc_in(MIB, &[("compute", "train.py", line)]);
            program.job.free(block);
        }
        program.job.alloc_in(MIB / 2, &OWN_OPTIMIZER[..2]);
    }
    let found = program.leaks();
    check_none(&found, "no program");
    assert_eq!(found.doubt, Some(Doubt::Calls));
    assert_eq!(found.training.optimizer.blocks, 0);
}

/// Four optimizers take turns. Each makes its state in its first step.
#[test]
fn states_of_several_optimizers_are_no_leak() {
    let mut program = Program::new(false);
    for _ in 0..4 {
        let activations = program.forward(1);
        program.backward(activations);
        program.job.mark(STEP, AnnotationStage::Start);
        for _ in 0..20 {
            program.job.alloc_in(MIB, &[]);
        }
        program.job.mark(STEP, AnnotationStage::End);
    }
    let found = program.leaks();
    check_none(&found, "four optimizers");
    assert_eq!(found.doubt, Some(Doubt::States));
}

#[test]
fn unmarked_steps_are_not_layers() {
    for has_stacks in [true, false] {
        for count in 1..=8 {
            let mut program = Program::new(has_stacks);
            (0..count).for_each(|_| program.step(false));
            let found = program.leaks();
            let what = format!("{count} steps");
            check_none(&found, &what);
            if let StepSource::Period(_) = found.steps.source {
                assert!(found.steps.len() <= count, "{what}: {}", found.steps.len());
            }
        }
    }
}

/// A forward pass for training keeps most of its requests. A pass with a cache keeps a little in each layer.
#[test]
fn what_layers_of_one_forward_pass_keep_is_no_leak() {
    for (has_stacks, has_module_calls) in [(true, true), (true, false), (false, false)] {
        for kept in [1, 2, 4, 8] {
            let mut program = Program::new(has_stacks);
            program.has_module_calls = has_module_calls;
            program.forward(kept);
            let found = program.leaks();
            check_none(&found, &format!("{kept} are kept"));
            if !has_stacks || kept > 2 {
                assert!(found.doubt.is_some(), "{kept} are kept");
            }
        }
    }
}

/// A program calls the modules of 24 layers itself, one after another, and keeps a part of a cache.
#[test]
fn layers_that_the_program_loops_over_itself_are_not_taken_for_steps() {
    let module = "site-packages/torch/nn/modules/module.py";
    for (calls, has_module_calls) in [(1, true), (1, false), (2, true), (4, true), (8, true)] {
        let mut job = Job::new(true);
        for _ in 0..calls * LAYERS {
            for line in 0..4 {
                let mut frames = vec![
                    ("forward", "layer.py", 3),
                    ("_call_impl", module, 1798),
                    ("prefill", "generate.py", 20 + line),
                    ("<module>", "generate.py", 7),
                ];
                frames.retain(|frame| has_module_calls || frame.1 != module);
                let block = job.alloc_in(MIB / 2, &frames);
                job.free(block);
            }
            job.alloc_in(MIB / 4, &[("prefill", "generate.py", 30), PROGRAM[0]]);
        }
        let found = leaks(&job.into_trace());
        check_none(&found, &format!("{calls} calls"));
        assert_eq!(found.doubt, Some(Doubt::Layers), "{calls} calls");
    }
}

/// Backward makes a gradient in each layer. A forward pass that is recomputed in it keeps none.
#[test]
fn gradients_of_one_backward_pass_are_no_leak() {
    let mut program = Program::new(true);
    let activations = program.forward(1);
    for block in activations.into_iter().rev() {
        let again: Vec<Held> = (0..12)
            .map(|line| {
                program
                    .job
                    .alloc_in(MIB, &[("backward", "checkpoint.py", line)])
            })
            .collect();
        let gradient = program.job.alloc_in(MIB / 4, &[]);
        again.into_iter().for_each(|block| program.job.free(block));
        program.job.free(block);
        program.gradients.push(gradient);
    }
    check_none(&program.leaks(), "one backward pass");
}

/// Each token extends each layer's cache by copying it.
#[test]
fn a_cache_that_is_copied_is_not_known_to_leak() {
    for has_stacks in [true, false] {
        let mut program = Program::new(has_stacks);
        let mut caches: Vec<Held> = (0..LAYERS).map(|_| program.layer(MIB, 50)).collect();
        for token in 1..=60 {
            let input = program.program(4096);
            for cache in &mut caches {
                for line in 0..10 {
                    let block = program.layer(MIB / 2 + 4096 * u64::from(line), line);
                    program.job.free(block);
                }
                let longer = program.layer(MIB + 8192 * token, 50);
                program.job.free(std::mem::replace(cache, longer));
            }
            let choice = program.program(4096);
            program.job.free(input);
            program.job.free(choice);
        }
        let found = program.leaks();
        check_none(&found, "tokens");
        assert_eq!(found.doubt, Some(Doubt::Copied));
    }
}

#[test]
fn forward_passes_whose_results_are_kept_leak() {
    let mut program = Program::new(true);
    for _ in 0..20 {
        for block in program.forward(0) {
            program.job.free(block);
        }
        program.layer(2 * MIB, 99);
    }
    let found = program.leaks();
    assert_eq!(found.leaks().count(), 1, "{:?}", found.growths);
    let trend = found.leaks().next().unwrap().trend;
    assert!(trend.confidence > 0.9, "{trend:?}");
    assert!(
        (18..=20).contains(&found.steps.len()),
        "{}",
        found.steps.len()
    );
}

/// Only the module allocates memory, and frees have no stack.
#[test]
fn calls_of_a_module_that_stacks_show_as_one_are_not_counted() {
    let mut program = Program::new(true);
    for _ in 0..100 {
        for line in 0..10 {
            let block = program.layer(MIB, line);
            program.job.free(block);
        }
        program.layer(MIB / 2, 99);
    }
    let found = program.leaks();
    check_none(&found, "calls in a row");
    assert_eq!(found.doubt, Some(Doubt::Calls));
    let text = found.doubt.unwrap().to_string();
    assert!(
        text.contains("how many calls these are is not known"),
        "{text}"
    );
}

/// An evaluation: the program's marks show its steps, although stacks show all passes as one call.
#[test]
fn marked_passes_whose_results_are_kept_leak() {
    for count in [5, 20] {
        let mut program = Program::new(true);
        for step in 0..count {
            let name = format!("ProfilerStep#{step}");
            program.job.mark(&name, AnnotationStage::Start);
            for line in 0..10 {
                let block = program.layer(MIB, line);
                program.job.free(block);
            }
            program.layer(MIB / 2, 99);
            program.job.mark(&name, AnnotationStage::End);
        }
        let found = program.leaks();
        assert_eq!(found.leaks().count(), 1, "{count}: {:?}", found.doubt);
        assert_eq!(found.doubt, None);
        let source = StepSource::Annotation("ProfilerStep#".into());
        assert_eq!(found.steps.source, source);
    }
}
