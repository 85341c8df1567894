//! The memory that an optimizer and backward made and that is kept.

use std::ops::RangeInclusive;

use hashbrown::HashMap;
use lowtide_core::Action;
use lowtide_trace::{AnnotationStage, Trace, TraceEvent};
use serde::Serialize;

use crate::callers::Callers;
use crate::categories::{Categories, Category};
use crate::growth::doubt::Doubt;
use crate::growth::period::STEPS_MIN;
use crate::growth::steps::{OPTIMIZER_STEP, instant_of};
use crate::history::{Block, History, Kept};

/// Memory that training makes in few calls and keeps.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct TrainingState {
    /// The memory that the optimizers' steps made, such as Adam's moments.
    pub optimizer: Kept,
    /// The memory that backward made before the end of the first of these steps, as far as stacks show it.
    pub gradients: Kept,
}

/// Identifies the memory that optimizers' steps make, by the program's marks and by stacks.
#[derive(Debug)]
pub(super) struct Optimizers<'a> {
    callers: &'a Callers,
    /// The instants of the allocations in each marked step, ascending.
    marked: Vec<RangeInclusive<u32>>,
    /// The number of each marked step in training. Optimizers that step one right after another have the same
    /// number.
    numbers: Vec<usize>,
    /// The number of calls that made the kept blocks of each call site in an optimizer. `None` is for blocks that
    /// only marks identify.
    calls: HashMap<Option<u32>, Calls>,
}

/// Bounds for the number of calls that made some blocks. Stacks show consecutive calls as one. Marks count each
/// optimizer of a step, but consecutive ones as one.
#[derive(Clone, Copy, Debug)]
struct Calls {
    least: usize,
    most: usize,
}

/// Whether a block is an optimizer's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Made {
    /// An optimizer's state: few of its calls made such blocks.
    State,
    /// It may be an optimizer's state.
    Unknown(Doubt),
    /// No optimizer made it, or every step makes such a block.
    Other,
}

impl TrainingState {
    /// Returns the training state that is kept at the end. O(n log m) for n blocks and m steps.
    pub(super) fn of(
        history: &History,
        optimizers: &Optimizers<'_>,
        categories: &Categories,
    ) -> TrainingState {
        let kept = || {
            let blocks = history.blocks.iter().enumerate();
            blocks.filter(|(_, block)| block.start > 0 && block.freed > history.events)
        };
        let is_state = |block: &Block| optimizers.made(block) == Made::State;
        let first_step = match optimizers.marked.first() {
            Some(step) => *step.end(),
            None => {
                { kept().find(|(_, block)| is_state(block)) }.map_or(0, |(_, block)| block.start)
            }
        };
        let is_gradient = |&(index, block): &(usize, &Block)| {
            block.start <= first_step && categories.of_block(index) == Category::Gradients
        };
        let blocks = |(_, block)| block;
        TrainingState {
            optimizer: kept().map(blocks).filter(|block| is_state(block)).collect(),
            gradients: kept().filter(is_gradient).map(blocks).collect(),
        }
    }
}

impl<'a> Optimizers<'a> {
    /// Returns the optimizers of a recording. O(n log m) for n blocks and m marks.
    pub(super) fn of(trace: &Trace, history: &History, callers: &'a Callers) -> Optimizers<'a> {
        let mut optimizers = Optimizers {
            callers,
            marked: marked_steps(trace),
            numbers: Vec::new(),
            calls: HashMap::new(),
        };
        let blocks = || history.blocks.iter().filter(|block| block.start > 0);
        let is_marked = |block: &&Block| optimizers.marked_step(block.start).is_some();
        let inside = blocks().filter(is_marked).count();
        if 2 * inside > blocks().count() {
            // The steps run the model themselves, as those of LBFGS do.
            optimizers.marked.clear();
        }
        optimizers.numbers = numbers_in_training(trace, callers, &optimizers.marked);
        let mut kept: HashMap<Option<u32>, Vec<&Block>> = HashMap::new();
        for block in blocks().filter(|block| block.freed > history.events) {
            if optimizers.is_maker(block) {
                let place = callers.optimizer(block.stack);
                kept.entry(place).or_default().push(block);
            }
        }
        let counted = |(place, blocks): (_, Vec<_>)| (place, optimizers.count(place, &blocks));
        optimizers.calls = kept.into_iter().map(counted).collect();
        optimizers
    }

    /// Returns whether a block is an optimizer's state.
    pub(super) fn made(&self, block: &Block) -> Made {
        if !self.is_maker(block) {
            return Made::Other;
        }
        match self.calls.get(&self.callers.optimizer(block.stack)) {
            Some(calls) if calls.most == STEPS_MIN => Made::Unknown(Doubt::States),
            Some(calls) if calls.most > STEPS_MIN && calls.least > STEPS_MIN => Made::Other,
            Some(calls) if calls.most > STEPS_MIN => Made::Unknown(Doubt::Calls),
            // Few or none of its call site's blocks are kept.
            _ => Made::State,
        }
    }

    /// Returns whether an optimizer's step made a block.
    fn is_maker(&self, block: &Block) -> bool {
        !self.callers.is_backward(block.stack)
            && (self.callers.optimizer(block.stack).is_some()
                || self.marked_step(block.start).is_some())
    }

    /// Returns how many calls made `blocks`, which are in order of allocation and from one call site.
    fn count(&self, place: Option<u32>, blocks: &[&Block]) -> Calls {
        let instants: Vec<u32> = blocks.iter().map(|block| block.start).collect();
        let mut marked: Vec<usize> = instants
            .iter()
            .filter_map(|&instant| self.marked_step(instant))
            .map(|step| self.numbers[step])
            .collect();
        marked.dedup();
        let marked = Some(marked.len()).filter(|&steps| steps > 0);
        let shown = place.and_then(|_| self.callers.calls(blocks[0].stack, &instants));
        let known = || marked.into_iter().chain(shown);
        Calls {
            least: known().min().unwrap_or(0),
            most: known().max().unwrap_or(usize::MAX),
        }
    }

    /// Returns the index of the marked step at an instant.
    fn marked_step(&self, instant: u32) -> Option<usize> {
        let next = self.marked.partition_point(|step| *step.end() < instant);
        let step = self.marked.get(next)?;
        step.contains(&instant).then_some(next)
    }
}

/// Returns the numbers of marked steps. The next number begins if the program allocates between two steps. If
/// backward runs the optimizers itself, its allocations do not count.
fn numbers_in_training(
    trace: &Trace,
    callers: &Callers,
    marked: &[RangeInclusive<u32>],
) -> Vec<usize> {
    let goes_on = |events: &[TraceEvent]| {
        let mut allocs = { events.iter() }.filter(|event| event.event.action == Action::Alloc);
        allocs.any(|event| !callers.is_backward(event.stack))
    };
    let mut numbers = vec![0; marked.len()];
    for next in 1..marked.len() {
        let end = *marked[next - 1].end() as usize;
        let start = *marked[next].start() as usize - 1;
        let is_another = end < start && goes_on(&trace.events[end..start]);
        numbers[next] = numbers[next - 1] + usize::from(is_another);
    }
    numbers
}

/// Returns the instants of the allocations in each marked step of an optimizer.
fn marked_steps(trace: &Trace) -> Vec<RangeInclusive<u32>> {
    let marks = trace.annotations.iter();
    let mut steps: Vec<RangeInclusive<u32>> = Vec::new();
    let mut start = None;
    for mark in marks.filter(|mark| mark.name.raw().starts_with(OPTIMIZER_STEP)) {
        let instant = instant_of(trace, mark);
        start = match (mark.stage, start) {
            (AnnotationStage::Start, _) => Some(instant + 1),
            (AnnotationStage::End, Some(start)) => {
                steps.push(start..=instant);
                None
            }
            (AnnotationStage::End, None) => None,
        };
    }
    steps
}
