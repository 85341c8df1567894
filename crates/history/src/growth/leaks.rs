//! Finds memory that grows from step to step and is never freed.

use std::collections::BTreeSet;

use crate::callers::Callers;
use crate::categories::Categories;
use crate::growth::doubt::Doubt;
use crate::growth::line::as_float;
use crate::growth::review::{self, Review, Verdict};
use crate::growth::sites::{Site, Sites};
use crate::growth::steps::{SPANS_MAX, StepSource, Steps};
use crate::growth::training::{Optimizers, TrainingState};
use crate::growth::trend::{Course, Trend};
use crate::history::History;
use lowtide_trace::Trace;

/// The first steps fill caches, so the first of all steps are left out: one in this many.
const WARM_UP_SHARE: usize = 4;

/// The number of consecutive parts that are likelier than one to contain the end of a step, if steps are unknown.
const PARTS_TOGETHER: usize = 4;

/// The share of the bytes at the end from which growth that is not steady is reported. Beside leaks, growth is
/// reported from this share of the leaks' growth on.
const MUCH: f64 = 0.05;

/// The growth over the steps of a recording.
#[derive(Clone, Debug)]
pub struct Leaks {
    /// The steps.
    pub steps: Steps,
    /// The number of first steps that were left out.
    pub warm_up_steps: usize,
    /// The number of steps that are treated as one, if there are very many; otherwise 1.
    pub span_steps: usize,
    /// The sites that grew: leaks first, by growth, then the others, by growth.
    pub growths: Vec<Growth>,
    /// The growth of all sites together that are no leaks, if it is steady or large.
    pub spread: Option<Trend>,
    /// The reason why leaks cannot be told from other growth. Nothing is called a leak then.
    pub doubt: Option<Doubt>,
    /// The memory that training makes in few calls and keeps, which is no leak.
    pub training: TrainingState,
    /// The category of each block, which tells that memory.
    pub categories: Categories,
}

/// A site that has more live bytes in the last step than after the first ones.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Growth {
    /// The call site.
    pub site: Site,
    /// Its growth.
    pub trend: Trend,
}

impl Growth {
    /// Returns whether this is called a leak.
    pub fn is_leak(&self) -> bool {
        self.trend.is_steady()
    }
}

impl Leaks {
    /// Returns the growth over the steps of a recording. O(n log n) for n blocks.
    ///
    /// Growth is measured on each call site's minimum of live bytes per step, so temporary memory does not count.
    pub fn find(trace: &Trace, history: &History) -> Leaks {
        let callers = Callers::of(trace);
        let optimizers = Optimizers::of(trace, history, &callers);
        let categories = Categories::by_callers(trace, history, &callers);
        let steps = Steps::by_callers(trace, history, &callers);
        let (boundaries, span_steps) = steps.spans();
        let warm_up_steps = (steps.len() / WARM_UP_SHARE).max(1);
        let warm_up_spans = warm_up_steps.div_ceil(span_steps);
        let review = Review {
            history,
            callers: &callers,
            optimizers: &optimizers,
            boundaries: boundaries.get(warm_up_spans..).unwrap_or_default(),
            is_marked: matches!(steps.source, StepSource::Annotation(_)),
            doubt: review::doubt(&steps, history, &callers),
        };
        let before = boundaries_before(&boundaries);
        let watch = Watch {
            history,
            unseen_steps: steps_behind(&steps, &boundaries, history),
            are_parts: steps.source == StepSource::Parts,
            warm_up_spans: before.len() + warm_up_spans,
            boundaries: [&*before, &*boundaries].concat(),
            span_steps,
        };
        let (growths, refused) = watch.growths(&review);
        let spread = watch.spread(&growths, &review, !refused.is_empty());
        let is_known = growths.iter().any(Growth::is_leak)
            || spread.is_some_and(|(trend, _)| trend.is_steady());
        let verdicts = refused
            .into_iter()
            .chain(spread.map(|(_, verdict)| verdict));
        let doubts = verdicts.filter_map(Verdict::doubt);
        let doubt = review.doubt.or_else(|| {
            let few_events = Doubt::FewEvents(history.events);
            doubts.max().or(steps.are_too_few().then_some(few_events))
        });
        Leaks {
            warm_up_steps: (warm_up_spans * span_steps).min(steps.len()),
            span_steps,
            growths,
            spread: spread.map(|(trend, _)| trend),
            doubt: doubt.filter(|_| !is_known),
            training: TrainingState::of(history, &optimizers, &categories),
            categories,
            steps,
        }
    }

    /// Returns the leaks.
    pub fn leaks(&self) -> impl Iterator<Item = &Growth> {
        self.growths.iter().filter(|growth| growth.is_leak())
    }

    /// Returns the growth that is no leak, the largest first.
    pub fn others(&self) -> impl Iterator<Item = &Growth> {
        self.growths.iter().filter(|growth| !growth.is_leak())
    }
}

/// The steps of a recording over which growth is measured.
struct Watch<'h> {
    history: &'h History,
    boundaries: Vec<u32>,
    span_steps: usize,
    /// The number of first spans that are left out.
    warm_up_spans: usize,
    /// The number of spans of steps that the recording continues for after the last boundary.
    unseen_steps: usize,
    /// Whether these are not steps but equal parts of the recording.
    are_parts: bool,
}

impl Watch<'_> {
    /// Returns the growth of a site; `None` if it did not grow.
    fn trend_of(&self, sites: &Sites, number: usize) -> Option<Trend> {
        let extremes = sites.extremes(self.history, number, &self.boundaries);
        let floors: Vec<u64> = extremes.iter().map(|extremes| extremes.least).collect();
        let kept = sites.kept(self.history, number, &self.boundaries);
        let course = Course {
            floors: &floors,
            kept: &kept,
            warm_up_steps: self.warm_up_spans,
            // Paused memory is kept, too.
            at_end: sites.live_at(self.history, number, self.history.events, &[]),
            unseen_steps: self.unseen_steps,
        };
        let trend = if self.are_parts {
            of_parts(course)
        } else {
            course.trend()
        };
        Some(trend?.over_spans_of(self.span_steps))
    }

    /// Returns the growth of all sites, leaks first, and the verdicts on steady growth that is not called a leak.
    fn growths(&self, review: &Review<'_>) -> (Vec<Growth>, Vec<Verdict>) {
        let sites = Sites::new(self.history);
        let mut refused = Vec::new();
        let mut growths = Vec::new();
        for (number, &site) in sites.sites.iter().enumerate() {
            let Some(mut trend) = self.trend_of(&sites, number) else {
                continue;
            };
            if trend.is_steady() {
                let verdict = review.of_site(&sites, number, &trend);
                if verdict != Verdict::Leak {
                    trend = trend.in_doubt();
                    refused.push(verdict);
                }
            }
            growths.push(Growth { site, trend });
        }
        growths.sort_by_key(|growth| {
            let rank = (growth.is_leak(), growth.trend.bytes, growth.site);
            std::cmp::Reverse(rank)
        });
        (growths, refused)
    }

    /// Returns the growth of all sites together that are no leaks, with its verdict, if it is worth reporting.
    /// Memory that grows at one call site now and at another later grows steadily at none.
    fn spread(
        &self,
        growths: &[Growth],
        review: &Review<'_>,
        is_in_doubt: bool,
    ) -> Option<(Trend, Verdict)> {
        let leaks = || growths.iter().filter(|growth| growth.is_leak());
        let leak_sites: BTreeSet<Site> = leaks().map(|leak| leak.site).collect();
        let others = Sites::together(self.history, |site| !leak_sites.contains(&site));
        let mut trend = self.trend_of(&others, 0)?;
        let mut verdict = review.of_blocks(others.blocks_of(self.history, 0), &trend);
        if verdict == Verdict::TrainingState {
            // It is reported as training state.
            return None;
        }
        if !trend.is_steady() {
            verdict = Verdict::Leak;
        } else if is_in_doubt || verdict != Verdict::Leak {
            trend = trend.in_doubt();
        }
        let leaked: u64 = leaks().map(|leak| leak.trend.bytes).sum();
        let least = if trend.is_steady() {
            leaked
        } else {
            leaked.max(trend.end_bytes)
        };
        let is_much = as_float(trend.bytes) >= MUCH * as_float(least);
        is_much.then_some((trend, verdict))
    }
}

/// Returns how many spans of steps the recording continues for after the last of `boundaries`.
fn steps_behind(steps: &Steps, boundaries: &[u32], history: &History) -> usize {
    let (StepSource::Period(_), [_, .., last]) = (&steps.source, boundaries) else {
        // After a program's last mark there is no step, and after the last part there is nothing.
        return 0;
    };
    let length = length_of(boundaries) as usize;
    ((history.events - last) as usize + length / 2) / length
}

/// Returns further boundaries before the first, at the same distance as the others: memory that was freed then may
/// be freed again. At most [`SPANS_MAX`].
fn boundaries_before(boundaries: &[u32]) -> Vec<u32> {
    let [first, _, ..] = boundaries else {
        return Vec::new();
    };
    let length = length_of(boundaries);
    // Steps may be few, short and late.
    let spans = (first / length).min(SPANS_MAX);
    let boundary = |span| first - (spans - span) * length;
    (0..spans).map(boundary).collect()
}

/// Returns the average length of a step, or of a span of steps.
fn length_of(boundaries: &[u32]) -> u32 {
    let spans = boundaries.len() - 1;
    let covered = boundaries[spans] - boundaries[0];
    (covered / u32::try_from(spans).unwrap_or(u32::MAX)).max(1)
}

/// Returns the growth of a site from part to part. A part may lie within a step, and its minimum may then be the
/// step's temporary memory, which varies at random. If that hides the growth, it may show in the kept bytes and in
/// the minimum of several parts.
fn of_parts(course: Course<'_>) -> Option<Trend> {
    let least = |parts: &[u64]| parts.iter().copied().min();
    let parts = course.floors.windows(PARTS_TOGETHER);
    let floors: Vec<u64> = parts.filter_map(least).collect();
    let together = Course {
        floors: &floors,
        // Blocks allocated in the last parts may be in use.
        unseen_steps: PARTS_TOGETHER - 1,
        ..course
    };
    let part_by_part = course.trend_of_least();
    if part_by_part.is_some_and(|trend| trend.is_steady()) {
        return part_by_part;
    }
    let together = together.trend_of_kept().filter(Trend::is_steady);
    together.or(part_by_part)
}
