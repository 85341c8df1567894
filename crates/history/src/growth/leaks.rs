//! What grows from step to step and is never given back.

use std::collections::BTreeSet;

use crate::growth::line::{Fit, as_float};
use crate::growth::sites::{Site, Sites};
use crate::growth::steps::{StepSource, Steps};
use crate::history::History;
use lowtide_trace::Trace;

/// The first steps fill caches: so many are left out, one in four.
const WARM_UP_SHARE: usize = 4;

/// So many parts of a recording are likelier to have the end of a step in them than one, if steps are not known.
const PARTS_TOGETHER: usize = 4;

/// Growth that is not steady is much where it is this share of what there is at the end, and beside leaks any is where it
/// is this share of theirs.
const MUCH: f64 = 0.05;

/// What paused for so many times as long as it does between growth and growth has stopped.
const PAUSES_MAX: f64 = 2.0;

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
}

/// A site that had more in the last step than after the first ones.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Growth {
    /// Where it is.
    pub site: Site,
    /// How it grew.
    pub trend: Trend,
}

/// How live bytes grew from step to step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Trend {
    /// By how much a step's least bytes grew from the first step looked at to the last.
    pub bytes: u64,
    /// That for one step, on average.
    pub bytes_per_step: f64,
    /// From how many steps, or spans of steps, to the next it grew.
    pub grown_steps: usize,
    /// Of how many.
    pub steps: usize,
    /// How sure it is that it goes on growing, in [0, 1].
    pub confidence: f64,
    /// What there was at the end.
    pub end_bytes: u64,
    /// In how many blocks.
    pub end_blocks: u64,
}

impl Growth {
    /// Returns whether this is called a leak.
    pub fn is_leak(&self) -> bool {
        self.trend.is_steady()
    }
}

impl Trend {
    /// From this confidence on growth is called a leak.
    pub const LEAK_CONFIDENCE: f64 = 0.7;

    /// Returns whether what is one site's is called a leak.
    pub fn is_steady(&self) -> bool {
        self.confidence >= Trend::LEAK_CONFIDENCE
    }

    /// Returns it for one step, if it is over spans of so many.
    fn over_spans_of(self, steps: usize) -> Trend {
        Trend {
            bytes_per_step: self.bytes_per_step / as_float(steps as u64),
            ..self
        }
    }
}

impl Leaks {
    /// Returns what grew. O(n log n) for n blocks.
    ///
    /// Of each site the least live bytes of every step count: what a step itself uses comes and goes, and
    /// what is left is what no step gives back.
    pub fn find(trace: &Trace, history: &History) -> Leaks {
        let steps = Steps::find(trace, history);
        let warm_up_steps = (steps.len() / WARM_UP_SHARE).max(1).min(steps.len());
        let (boundaries, span_steps) = steps.spans(warm_up_steps);
        let watch = Watch {
            history,
            unseen_steps: steps_behind(&steps, &boundaries, history),
            are_parts: steps.source == StepSource::Parts,
            boundaries,
            span_steps,
        };
        let sites = Sites::new(history);
        let growth_of = |number: usize| {
            Some(Growth {
                site: sites.sites[number],
                trend: watch.trend_of(&sites, number)?,
            })
        };
        let mut growths: Vec<Growth> = (0..sites.sites.len()).filter_map(growth_of).collect();
        growths.sort_by_key(|growth| {
            let rank = (growth.is_leak(), growth.trend.bytes, growth.site);
            std::cmp::Reverse(rank)
        });
        let spread = watch.spread(&growths);
        Leaks {
            steps,
            warm_up_steps,
            span_steps,
            growths,
            spread,
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
        // What is paused is kept all the same.
        let at_end = sites.live_at(self.history, number, self.history.events, &[]);
        let step_by_step = trend(&floors, at_end, self.unseen_steps);
        let is_told = !self.are_parts || step_by_step.as_ref().is_some_and(Trend::is_steady);
        let of_together = match is_told {
            true => None,
            false => {
                let kept = sites.kept(self.history, number, &self.boundaries);
                of_parts_together(&floors, &kept, at_end)
            }
        };
        let trend = of_together.or(step_by_step)?;
        Some(trend.over_spans_of(self.span_steps))
    }

    /// Returns how all that is in no leak grew together, if that is worth telling: what grows in one place now and in
    /// another then grows steadily in none.
    fn spread(&self, growths: &[Growth]) -> Option<Trend> {
        let leaks = || growths.iter().filter(|growth| growth.is_leak());
        let leak_sites: BTreeSet<Site> = leaks().map(|leak| leak.site).collect();
        let others = Sites::together(self.history, |site| !leak_sites.contains(&site));
        let trend = self.trend_of(&others, 0)?;
        let leaked: u64 = leaks().map(|leak| leak.trend.bytes).sum();
        let least = match trend.is_steady() {
            true => leaked,
            false => leaked.max(trend.end_bytes),
        };
        Some(trend).filter(|trend| as_float(trend.bytes) >= MUCH * as_float(least))
    }
}

/// Returns how many spans of steps the recording goes on for behind the last of `boundaries`.
fn steps_behind(steps: &Steps, boundaries: &[u32], history: &History) -> usize {
    let (StepSource::Period(_), [first, .., last]) = (&steps.source, boundaries) else {
        // What is behind a program's last mark is no step, and behind the last part there is nothing.
        return 0;
    };
    let length = ((last - first) as usize / (boundaries.len() - 1)).max(1);
    ((history.events - last) as usize + length / 2) / length
}

/// Returns how the least bytes of several parts at a time grew, if that is steady and is in blocks that were kept: a
/// part may lie within a step, and its least be what the step uses, which goes up and down as chance has it.
fn of_parts_together(floors: &[u64], kept: &[u64], at_end: (u64, u64)) -> Option<Trend> {
    let least = |parts: &[u64]| parts.iter().copied().min();
    let floors: Vec<u64> = floors.windows(PARTS_TOGETHER).filter_map(least).collect();
    // What came in the last parts may be what is in use.
    let kept = &kept[..floors.len()];
    let mut trend = trend(&floors, at_end, PARTS_TOGETHER - 1)?;
    let kept_share = as_float(kept[kept.len() - 1] - kept[0]) / as_float(trend.bytes);
    trend.confidence *= kept_share.min(1.0) * Fit::of(kept).straightness();
    Some(trend).filter(Trend::is_steady)
}

/// Returns how the least bytes of the steps grew, given how many bytes and blocks there are `at_end`, `unseen_steps`
/// behind the last; `None` where they did not.
fn trend(floors: &[u64], at_end: (u64, u64), unseen_steps: usize) -> Option<Trend> {
    let (end_bytes, end_blocks) = at_end;
    let (&first, &last) = (floors.first()?, floors.last()?);
    let bytes = last.checked_sub(first).filter(|&bytes| bytes > 0)?;
    let changes = || floors.windows(2).map(|pair| pair[1].abs_diff(pair[0]));
    let grown_steps = floors.windows(2).filter(|pair| pair[1] > pair[0]).count();
    let steps = floors.len() - 1;

    // Each step in which it grows makes it half as likely that this was chance.
    let evidence = 1.0 - 0.5_f64.powi(i32::try_from(grown_steps).unwrap_or(i32::MAX));
    // What also shrinks is a cache, or a queue.
    let moved: u64 = changes().sum();
    let one_way = as_float(bytes) / as_float(moved);
    // What has its fill stops growing.
    let late_steps = steps.div_ceil(3);
    let before_late = floors[steps - late_steps];
    let late = as_float(last.saturating_sub(before_late)) / as_float(late_steps as u64);
    let average = as_float(bytes) / as_float(steps as u64);
    let goes_on = (late / average).min(1.0);
    let grown_until = 1 + floors.windows(2).rposition(|pair| pair[1] > pair[0])?;
    let unseen = if end_bytes == last { unseen_steps } else { 0 };
    let pause = as_float((steps - grown_until + unseen) as u64);
    let pause_max = PAUSES_MAX * as_float(grown_until as u64) / as_float(grown_steps as u64);
    let goes_on = goes_on.min(pause_max / pause);
    Some(Trend {
        bytes,
        bytes_per_step: average,
        grown_steps,
        steps,
        confidence: evidence * one_way * goes_on * Fit::of(floors).straightness(),
        end_bytes,
        end_blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the confidence that `floors` go on growing.
    fn confidence(floors: impl IntoIterator<Item = u64>) -> f64 {
        let floors: Vec<u64> = floors.into_iter().collect();
        trend(&floors, (0, 0), 0).map_or(0.0, |trend| trend.confidence)
    }

    #[test]
    fn steady_growth_is_a_leak() {
        assert!(confidence((0..30).map(|step| 7 + step)) > 0.95);
        // Only every fifth step.
        assert!(confidence((0..40).map(|step| step / 5)) > 0.8);
        // More in some steps than in others.
        assert!(confidence((0..40).map(|step| 100 * step + step * step % 37)) > 0.9);
    }

    #[test]
    fn what_stops_shrinks_or_happened_once_is_none() {
        let check = |floors: Vec<u64>| {
            let confidence = confidence(floors.clone());
            assert!(
                confidence < Trend::LEAK_CONFIDENCE,
                "{confidence}: {floors:?}"
            );
        };
        // A cache that has its fill.
        check((0..40).map(|step: u64| step.min(25)).collect());
        // One that is emptied now and then.
        check((0..40).map(|step| step % 10 + step / 10).collect());
        // Something that came once, or twice, and stays.
        check((0..40).map(|step| u64::from(step > 20)).collect());
        check(
            (0..40)
                .map(|step| u64::from(step > 10) + u64::from(step > 30))
                .collect(),
        );
        // Ever slower.
        check((1..40).map(|step: u64| 1000 - 1000 / step).collect());
        check(vec![5; 10]);
        check(vec![5]);
        check(vec![]);
    }
}
