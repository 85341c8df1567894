//! What grows from step to step and is never given back.

use std::collections::BTreeSet;

use crate::growth::callers::Callers;
use crate::growth::doubt::Doubt;
use crate::growth::line::as_float;
use crate::growth::review::{self, Review, Verdict};
use crate::growth::sites::{Site, Sites};
use crate::growth::steps::{SPANS_MAX, StepSource, Steps};
use crate::growth::training::{Optimizers, TrainingState};
use crate::growth::trend::{Course, Trend};
use crate::history::History;
use lowtide_trace::Trace;

/// The first steps fill caches: so many are left out, one in four.
const WARM_UP_SHARE: usize = 4;

/// So many parts of a recording are likelier to have the end of a step in them than one, if steps are not known.
const PARTS_TOGETHER: usize = 4;

/// Growth that is not steady is much where it is this share of what there is at the end, and beside leaks any is where it
/// is this share of theirs.
const MUCH: f64 = 0.05;

/// What grew over the steps of a recording.
#[derive(Clone, Debug)]
pub struct Leaks {
    /// The steps.
    pub steps: Steps,
    /// How many of them, the first, were left out.
    pub warm_up_steps: usize,
    /// How many of the others are looked at as one, if there are very many; else 1.
    pub span_steps: usize,
    /// What grew, leaks first, and of those the one that grew most.
    pub growths: Vec<Growth>,
    /// How all that is in no leak grew together, if that is steady or much.
    pub spread: Option<Trend>,
    /// Why it is not known what leaks; nothing is called a leak then.
    pub doubt: Option<Doubt>,
    /// What training makes in few calls and keeps, which is no leak.
    pub training: TrainingState,
}

/// A site that had more in the last step than after the first ones.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Growth {
    /// Where it is.
    pub site: Site,
    /// How it grew.
    pub trend: Trend,
}

impl Growth {
    /// Returns whether this is called a leak.
    pub fn is_leak(&self) -> bool {
        self.trend.is_steady()
    }
}

impl Leaks {
    /// Returns what grew. O(n log n) for n blocks.
    ///
    /// Of each site the least live bytes of every step count: what a step itself uses comes and goes, and
    /// what is left is what no step gives back.
    pub fn find(trace: &Trace, history: &History) -> Leaks {
        let callers = Callers::of(trace);
        let optimizers = Optimizers::of(trace, history, &callers);
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
        let doubts = refused
            .into_iter()
            .chain(spread.map(|(_, verdict)| verdict))
            .filter_map(Verdict::doubt);
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
            training: TrainingState::of(history, &optimizers),
            steps,
        }
    }

    /// Returns what is called a leak.
    pub fn leaks(&self) -> impl Iterator<Item = &Growth> {
        self.growths.iter().filter(|growth| growth.is_leak())
    }

    /// Returns what is not, what grew most first.
    pub fn others(&self) -> impl Iterator<Item = &Growth> {
        self.growths.iter().filter(|growth| !growth.is_leak())
    }
}

/// The steps that are looked at, of a recording.
struct Watch<'h> {
    history: &'h History,
    boundaries: Vec<u32>,
    span_steps: usize,
    /// How many of the first spans are left out.
    warm_up_spans: usize,
    /// How many spans of steps the recording goes on for behind the last boundary.
    unseen_steps: usize,
    /// Whether these are no steps but equal parts of the recording.
    are_parts: bool,
}

impl Watch<'_> {
    /// Returns how a site grew; `None` if it did not.
    fn trend_of(&self, sites: &Sites, number: usize) -> Option<Trend> {
        let extremes = sites.extremes(self.history, number, &self.boundaries);
        let floors: Vec<u64> = extremes.iter().map(|extremes| extremes.least).collect();
        let kept = sites.kept(self.history, number, &self.boundaries);
        let course = Course {
            floors: &floors,
            kept: &kept,
            warm_up_steps: self.warm_up_spans,
            // What is paused is kept all the same.
            at_end: sites.live_at(self.history, number, self.history.events, &[]),
            unseen_steps: self.unseen_steps,
        };
        let trend = match self.are_parts {
            false => course.trend(),
            true => of_parts(course),
        };
        Some(trend?.over_spans_of(self.span_steps))
    }

    /// Returns what grew, leaks first, and why steady growth was not called a leak.
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

    /// Returns how all that is in no leak grew together, and what that is, if it is worth telling: what grows in one place
    /// now and in another then grows steadily in none.
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
            // It is named as that.
            return None;
        }
        if !trend.is_steady() {
            verdict = Verdict::Leak;
        } else if is_in_doubt || verdict != Verdict::Leak {
            trend = trend.in_doubt();
        }
        let leaked: u64 = leaks().map(|leak| leak.trend.bytes).sum();
        let least = match trend.is_steady() {
            true => leaked,
            false => leaked.max(trend.end_bytes),
        };
        let is_much = as_float(trend.bytes) >= MUCH * as_float(least);
        is_much.then_some((trend, verdict))
    }
}

/// Returns how many spans of steps the recording goes on for behind the last of `boundaries`.
fn steps_behind(steps: &Steps, boundaries: &[u32], history: &History) -> usize {
    let (StepSource::Period(_), [_, .., last]) = (&steps.source, boundaries) else {
        // What is behind a program's last mark is no step, and behind the last part there is nothing.
        return 0;
    };
    let length = length_of(boundaries) as usize;
    ((history.events - last) as usize + length / 2) / length
}

/// Returns more boundaries, of what is before the first and as long as what is behind: what was given back then may be
/// given back again. At most [`SPANS_MAX`].
fn boundaries_before(boundaries: &[u32]) -> Vec<u32> {
    let [first, _, ..] = boundaries else {
        return Vec::new();
    };
    let length = length_of(boundaries);
    // Steps may be few, short and late.
    let spans = (first / length).min(SPANS_MAX);
    (0..spans)
        .map(|span| first - (spans - span) * length)
        .collect()
}

/// Returns how long a step, or a span of steps, is on average.
fn length_of(boundaries: &[u32]) -> u32 {
    let spans = boundaries.len() - 1;
    let covered = boundaries[spans] - boundaries[0];
    (covered / u32::try_from(spans).unwrap_or(u32::MAX)).max(1)
}

/// Returns how a site grew from part to part. A part may lie within a step, and its least be what the step uses, which
/// goes up and down as chance has it: where that hides what grew, what is kept may tell, beside the least of several
/// parts.
fn of_parts(course: Course<'_>) -> Option<Trend> {
    let least = |parts: &[u64]| parts.iter().copied().min();
    let parts = course.floors.windows(PARTS_TOGETHER);
    let floors: Vec<u64> = parts.filter_map(least).collect();
    let together = Course {
        floors: &floors,
        // What came in the last parts may be what is in use.
        unseen_steps: PARTS_TOGETHER - 1,
        ..course
    };
    let part_by_part = course.trend_of_least();
    match part_by_part.is_some_and(|trend| trend.is_steady()) {
        true => part_by_part,
        false => together
            .trend_of_kept()
            .filter(Trend::is_steady)
            .or(part_by_part),
    }
}
