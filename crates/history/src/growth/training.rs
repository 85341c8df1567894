//! What stays of what an optimizer and backward made.

use std::ops::RangeInclusive;

use lowtide_trace::{AnnotationStage, Trace};

use crate::growth::callers::Callers;
use crate::growth::steps::{OPTIMIZER_STEP, instant_of};
use crate::history::{Block, History};

/// Memory that training makes once and keeps.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TrainingState {
    /// What the optimizers' steps made, such as Adam's moments.
    pub optimizer: Kept,
    /// What backward made before the end of the first of these steps, as far as stacks tell.
    pub gradients: Kept,
}

/// Memory that is allocated at the end.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Kept {
    /// How much, each block rounded up.
    pub bytes: u64,
    /// In how many blocks.
    pub blocks: u64,
}

/// Which memory an optimizer's steps make, by the program's marks and by stacks.
#[derive(Debug)]
pub(super) struct Optimizers<'a> {
    callers: &'a Callers,
    /// The instants of what came in a marked step, ascending.
    marked: Vec<RangeInclusive<u32>>,
}

impl TrainingState {
    /// Returns what stays at the end. O(n log m) for n blocks and m steps.
    pub(super) fn of(history: &History, optimizers: &Optimizers<'_>) -> TrainingState {
        let kept = || {
            let blocks = history.blocks.iter().filter(|block| block.start > 0);
            blocks.filter(|block| block.freed > history.events)
        };
        let is_state = |block: &&Block| optimizers.made(block);
        let first_step = match optimizers.marked.first() {
            Some(step) => *step.end(),
            None => kept().find(is_state).map_or(0, |block| block.start),
        };
        let is_gradient = |block: &&Block| {
            block.start <= first_step && optimizers.callers.is_backward(block.stack)
        };
        TrainingState {
            optimizer: kept().filter(is_state).collect(),
            gradients: kept().filter(is_gradient).collect(),
        }
    }
}

impl<'a> Optimizers<'a> {
    /// Returns the optimizers of a recording. O(n log m) for n blocks and m marks.
    pub(super) fn of(trace: &Trace, history: &History, callers: &'a Callers) -> Optimizers<'a> {
        let mut optimizers = Optimizers {
            callers,
            marked: marked_steps(trace),
        };
        let blocks = || history.blocks.iter().filter(|block| block.start > 0);
        let inside = blocks()
            .filter(|block| optimizers.is_marked(block.start))
            .count();
        if 2 * inside > blocks().count() {
            // Its steps run the model themselves, as LBFGS's do.
            optimizers.marked.clear();
        }
        optimizers
    }

    /// Returns whether an optimizer's step made a block.
    pub(super) fn made(&self, block: &Block) -> bool {
        !self.callers.is_backward(block.stack)
            && (self.callers.is_optimizer(block.stack) || self.is_marked(block.start))
    }

    fn is_marked(&self, instant: u32) -> bool {
        let next = self.marked.partition_point(|step| *step.end() < instant);
        self.marked
            .get(next)
            .is_some_and(|step| step.contains(&instant))
    }
}

impl<'b> FromIterator<&'b Block> for Kept {
    fn from_iter<I: IntoIterator<Item = &'b Block>>(blocks: I) -> Kept {
        blocks
            .into_iter()
            .fold(Kept::default(), |kept, block| Kept {
                bytes: kept.bytes + block.live_bytes().get(),
                blocks: kept.blocks + 1,
            })
    }
}

/// Returns the instants of what came in each marked step of an optimizer.
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
