//! The steps of a job, which a recording does not contain: one iteration of a training loop, the work on one batch,
//! or the generation of one token.
//!
//! If the program marked its optimizer's steps, those are the steps. Otherwise they are found by what repeats.

use hashbrown::HashMap;
use lowtide_trace::{Annotation, AnnotationStage, RecordedText, Trace, TraceEvent};

use crate::callers::Callers;
use crate::growth::period::{self, STEPS_MIN};
use crate::history::History;

/// If there are more steps than this, several are treated as one.
pub(super) const SPANS_MAX: u32 = 1024;

/// The prefixes of the marks that PyTorch's optimizers and its profiler set at each step.
pub(super) const OPTIMIZER_STEP: &str = "Optimizer.step#";
const PROFILER_STEP: &str = "ProfilerStep#";

/// The number of equal parts of a recording whose steps are not found.
const PARTS: u32 = 40;

/// The instants at which a job's steps begin and end.
#[derive(Clone, PartialEq, Debug)]
pub struct Steps {
    /// Ascending. Step `i` is from `boundaries[i]` to before `boundaries[i + 1]`. The time before the first and
    /// after the last boundary is in no whole step.
    pub boundaries: Vec<u32>,
    /// How the steps were found.
    pub source: StepSource,
}

/// How steps were found.
#[derive(Clone, PartialEq, Debug)]
pub enum StepSource {
    /// The program's own marks of this name.
    Annotation(RecordedText),
    /// The period of the allocations. This share of their kinds repeats from step to step, in [0, 1].
    Period(f64),
    /// Not found: these are equal parts of the recording.
    Parts,
}

impl Steps {
    /// Returns the steps of a job. O(n log n) for n events.
    pub fn find(trace: &Trace, history: &History) -> Steps {
        Steps::by_callers(trace, history, &Callers::of(trace))
    }

    /// Like [`Steps::find`], with the callers of `trace`.
    pub(super) fn by_callers(trace: &Trace, history: &History, callers: &Callers) -> Steps {
        by_annotation(trace)
            .or_else(|| {
                let (repeated_share, boundaries) = period::find(history, callers)?;
                let source = StepSource::Period(repeated_share);
                Some(Steps { boundaries, source })
            })
            .unwrap_or_else(|| equal_parts(history))
    }

    /// Returns the boundaries of the steps, or of spans of several steps if there are very many. Also returns the
    /// number of steps in a span.
    pub(super) fn spans(&self) -> (Vec<u32>, usize) {
        let span_steps = self.len().div_ceil(SPANS_MAX as usize).max(1);
        let boundaries = self.boundaries.iter().copied();
        (boundaries.step_by(span_steps).collect(), span_steps)
    }

    /// Returns the number of whole steps.
    pub fn len(&self) -> usize {
        self.boundaries.len().saturating_sub(1)
    }

    /// Returns whether the steps are too few to show growth. Either the program marked too few, or there are no steps
    /// and too few events for the parts that replace them.
    pub fn are_too_few(&self) -> bool {
        match self.source {
            StepSource::Annotation(_) => self.len() < STEPS_MIN,
            StepSource::Period(_) => false,
            StepSource::Parts => self.len() < PARTS as usize,
        }
    }

    /// Returns whether there is no whole step.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns the steps from one mark of an optimizer's or a profiler's step to the next.
fn by_annotation(trace: &Trace) -> Option<Steps> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let starts = || {
        let annotations = trace.annotations.iter();
        annotations.filter(|annotation| annotation.stage == AnnotationStage::Start)
    };
    for annotation in starts() {
        let name = common_name(annotation.name.raw());
        *counts.entry(name).or_default() += 1;
    }
    let is_step = |name: &str| name.starts_with(OPTIMIZER_STEP) || name == PROFILER_STEP;
    let named = counts.iter().filter(|(name, _)| is_step(name));
    // Among equals, the first name: no order may depend on a hash table.
    let (&name, _) = named.max_by_key(|&(name, &count)| (count, std::cmp::Reverse(*name)))?;
    let marks = starts().filter(|annotation| common_name(annotation.name.raw()) == name);
    let mut boundaries: Vec<u32> = marks.map(|mark| instant_of(trace, mark)).collect();
    boundaries.sort_unstable();
    boundaries.dedup();
    if boundaries.len() <= STEPS_MIN {
        // So few steps are all counted, although the recording may lack the start of the first or the end of the
        // last.
        match boundaries[0] {
            0 => boundaries.push(u32::try_from(trace.events.len()).unwrap_or(u32::MAX)),
            _ => boundaries.insert(0, 0),
        }
    }
    Some(Steps {
        boundaries,
        source: StepSource::Annotation(name.into()),
    })
}

/// Returns the instant at which the program set a mark.
pub(crate) fn instant_of(trace: &Trace, mark: &Annotation) -> u32 {
    let before = |event: &TraceEvent| event.time_us <= mark.time_us;
    u32::try_from(trace.events.partition_point(before)).unwrap_or(u32::MAX)
}

/// Returns a mark's name without the number that a profiler gives each step.
fn common_name(name: &str) -> &str {
    if name.starts_with(PROFILER_STEP) {
        PROFILER_STEP
    } else {
        name
    }
}

fn equal_parts(history: &History) -> Steps {
    let parts = PARTS.min(history.events.max(1));
    let boundary = |part: u32| {
        let instant = u64::from(part) * u64::from(history.events) / u64::from(parts);
        u32::try_from(instant).unwrap_or(history.events)
    };
    Steps {
        boundaries: (0..=parts).map(boundary).collect(),
        source: StepSource::Parts,
    }
}
