//! Decides whether steady growth is a leak, or the growth within one step, of a cache or of an optimizer's state.

use crate::callers::Callers;
use crate::growth::doubt::Doubt;
use crate::growth::period::STEPS_MIN;
use crate::growth::sites::{Site, Sites};
use crate::growth::steps::{StepSource, Steps};
use crate::growth::training::{Made, Optimizers};
use crate::growth::trend::Trend;
use crate::growth::turnover::is_given_back;
use crate::history::{Block, History};
use lowtide_trace::StackId;

/// The most requests of a layer, and the most layers of a model.
const LAYER_REQUESTS_MAX: usize = 100;
const LAYERS_MAX: usize = 200;

/// If memory accumulates, at least one in this many of the grown bytes is from the first half of the steps.
const ACCUMULATED_MIN: u64 = 4;

/// The facts that decide whether growth is a leak.
pub(super) struct Review<'a> {
    pub(super) history: &'a History,
    pub(super) callers: &'a Callers,
    pub(super) optimizers: &'a Optimizers<'a>,
    /// The boundaries of the steps over which growth is measured.
    pub(super) boundaries: &'a [u32],
    pub(super) is_marked: bool,
    /// The reason why no growth can be called a leak.
    pub(super) doubt: Option<Doubt>,
}

/// The verdict on steady growth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Leak,
    /// State of an optimizer, made in few of its calls.
    TrainingState,
    Unknown(Doubt),
}

impl Verdict {
    /// Returns the reason why the growth cannot be classified.
    pub(super) fn doubt(self) -> Option<Doubt> {
        match self {
            Verdict::Unknown(doubt) => Some(doubt),
            Verdict::Leak | Verdict::TrainingState => None,
        }
    }
}

impl Review<'_> {
    /// Returns the verdict on a site's growth.
    pub(super) fn of_site(&self, sites: &Sites, number: usize, trend: &Trend) -> Verdict {
        let stack = match sites.sites[number] {
            Site::Stack(stack) => stack,
            Site::Size { .. } => StackId::NONE,
        };
        let blocks = || sites.blocks_of(self.history, number);
        let instants: Vec<u32> = blocks().map(|block| block.start).collect();
        let calls = self.callers.calls(stack, &instants);
        match self.of_blocks(blocks(), trend) {
            Verdict::Leak if !self.is_marked && calls.is_some_and(|calls| calls < STEPS_MIN) => {
                Verdict::Unknown(Doubt::Calls)
            }
            verdict => verdict,
        }
    }

    /// Returns the verdict on the growth of `blocks`, from any call sites.
    pub(super) fn of_blocks<'b>(
        &self,
        blocks: impl Iterator<Item = &'b Block>,
        trend: &Trend,
    ) -> Verdict {
        if let Some(doubt) = self.doubt {
            return Verdict::Unknown(doubt);
        }
        let [first, .., last] = *self.boundaries else {
            return Verdict::Leak;
        };
        let middle = self.boundaries[self.boundaries.len() / 2];
        let (mut kept, mut states, mut accumulated) = (0, 0, 0);
        let (mut in_doubt, mut doubt) = (0, None);
        for block in blocks.filter(|block| (first + 1..last).contains(&block.start)) {
            if block.freed > last {
                let bytes = block.live_bytes().get();
                kept += bytes;
                match self.optimizers.made(block) {
                    Made::State => states += bytes,
                    Made::Unknown(why) => {
                        in_doubt += bytes;
                        doubt = doubt.max(Some(why));
                    }
                    Made::Other => {}
                }
                accumulated += if block.start < middle { bytes } else { 0 };
            }
        }
        if 2 * states > kept {
            Verdict::TrainingState
        } else if let Some(doubt) = doubt.filter(|_| 2 * (states + in_doubt) > kept) {
            Verdict::Unknown(doubt)
        } else if !self.is_marked && ACCUMULATED_MIN * accumulated < trend.bytes {
            // Half of accumulating memory is from the first half of the steps. Other memory is replaced again and
            // again.
            Verdict::Unknown(Doubt::Copied)
        } else {
            Verdict::Leak
        }
    }
}

/// Returns the reason why no growth can be called a leak.
pub(super) fn doubt(steps: &Steps, history: &History, callers: &Callers) -> Option<Doubt> {
    match steps.source {
        StepSource::Annotation(_) => {
            let are_few = steps.are_too_few();
            are_few.then_some(Doubt::FewSteps(steps.len()))
        }
        StepSource::Period(_) => may_be_layers(steps, history, callers).then_some(Doubt::Layers),
        StepSource::Parts => {
            let is_known = steps.are_too_few() || is_given_back(history, &steps.boundaries);
            (!is_known).then_some(Doubt::KeptForLong)
        }
    }
}

/// Returns whether steps may be layers: they are few and short enough, and most of them show no training.
fn may_be_layers(steps: &Steps, history: &History, callers: &Callers) -> bool {
    let [first, .., last] = *steps.boundaries else {
        return false;
    };
    let trains = |block: &Block| {
        callers.is_backward(block.stack) || callers.optimizer(block.stack).is_some()
    };
    let mut requests = 0;
    let mut trained = vec![false; steps.boundaries.len()];
    let inside = |block: &&Block| (first + 1..=last).contains(&block.start);
    for block in history.blocks.iter().filter(inside) {
        let step = steps
            .boundaries
            .partition_point(|&boundary| boundary < block.start);
        requests += 1;
        trained[step] |= trains(block);
    }
    let are_trained = 2 * trained.iter().filter(|&&trains| trains).count() > steps.len();
    !are_trained && steps.len() <= LAYERS_MAX && requests <= LAYER_REQUESTS_MAX * steps.len()
}
