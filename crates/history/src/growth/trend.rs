//! The growth of live bytes from step to step, and the confidence that it continues.

use serde::Serialize;

use crate::growth::line::{Fit, as_float};

/// Growth starts anew when this share of it is freed.
const GIVEN_BACK_SHARE: f64 = 0.75;

/// The probability that memory grows in a step and is not freed, by chance.
const CHANCE: f64 = 0.5;

/// The same for a call site with other blocks that are freed, some of which live longer than others.
const CHANCE_AMONG_OTHERS: f64 = 0.8;

/// The factor on the confidence of growth that may be within a step.
const CONFIDENCE_IN_DOUBT: f64 = 0.5;

/// The growth of live bytes from step to step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Trend {
    /// The growth of a step's minimum, from the first step considered to the last.
    pub bytes: u64,
    /// The same per step, on average.
    pub bytes_per_step: f64,
    /// The number of steps, or spans of steps, at which it grew.
    pub grown_steps: usize,
    /// The number of steps, or spans of steps, considered.
    pub steps: usize,
    /// How many times most of the growth was freed, also in the steps that are not considered.
    pub times_given_back: usize,
    /// The confidence that it continues to grow, in [0, 1].
    pub confidence: f64,
    /// The bytes at the end.
    #[serde(skip)]
    pub end_bytes: u64,
    /// The number of those blocks.
    #[serde(skip)]
    pub end_blocks: u64,
}

/// The bytes of a call site, step by step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Course<'a> {
    /// The minimum of each step.
    pub(super) floors: &'a [u64],
    /// The bytes allocated before each step that were live after the last one; empty if they are not considered.
    pub(super) kept: &'a [u64],
    /// The number of first steps that only show what was freed.
    pub(super) warm_up_steps: usize,
    /// The bytes and blocks at the end, and the number of steps from the last one to the end.
    pub(super) at_end: (u64, u64),
    pub(super) unseen_steps: usize,
}

impl Trend {
    /// Growth with at least this confidence is called a leak.
    pub const LEAK_CONFIDENCE: f64 = 0.7;

    /// Returns whether the growth is called a leak, if it is that of one site.
    pub fn is_steady(&self) -> bool {
        self.confidence >= Trend::LEAK_CONFIDENCE
    }

    /// Returns the trend for spans that may not be steps: its confidence is too low for a leak.
    pub(super) fn in_doubt(self) -> Trend {
        Trend {
            confidence: self.confidence * CONFIDENCE_IN_DOUBT,
            ..self
        }
    }

    /// Returns the trend per step, if it is over spans of `steps` steps.
    pub(super) fn over_spans_of(self, steps: usize) -> Trend {
        Trend {
            bytes_per_step: self.bytes_per_step / as_float(steps as u64),
            ..self
        }
    }
}

impl Course<'_> {
    /// Returns the growth of each step's minimum or of the kept bytes, whichever has more confidence; `None` if
    /// neither grew.
    pub(super) fn trend(&self) -> Option<Trend> {
        let grown = self.trend_of_least()?;
        let kept = self.trend_of_kept();
        let surer = kept.filter(|kept| kept.confidence > grown.confidence);
        Some(surer.unwrap_or(grown))
    }

    /// Returns the growth of each step's minimum. It also includes memory that is copied to larger blocks.
    pub(super) fn trend_of_least(&self) -> Option<Trend> {
        let floors = self.floors.get(self.warm_up_steps..)?;
        Some(self.seen_before(self.of(floors, CHANCE)?))
    }

    /// Returns the growth of the kept bytes, if each step's minimum also grew. It shows a leak among temporary
    /// blocks of its call site.
    pub(super) fn trend_of_kept(&self) -> Option<Trend> {
        let floors = self.floors.get(self.warm_up_steps..)?;
        let grown = self.of(floors, CHANCE)?;
        let kept = self.kept.get(self.warm_up_steps..self.floors.len())?;
        let trend = self.of(kept, CHANCE_AMONG_OTHERS)?;
        let likeness = likeness(Fit::of(floors).rise(), as_float(trend.bytes));
        // In a cache that frees its oldest blocks, the kept bytes grow although the cache does not.
        let steps = grown.steps + self.unseen_after(floors);
        let goes_on = pause(&grown_steps(floors), steps);
        let confidence = trend.confidence * likeness * early_share(kept) * goes_on;
        Some(self.seen_before(Trend {
            confidence,
            ..trend
        }))
    }

    /// Returns the trend with the confidence that follows from what was freed before.
    fn seen_before(&self, trend: Trend) -> Trend {
        let past = GivenBack::of(self.floors);
        Trend {
            confidence: trend.confidence * past.is_over(),
            times_given_back: past.times,
            ..trend
        }
    }

    /// Returns the number of unseen steps, if the last value is that of the end; otherwise 0.
    fn unseen_after(&self, values: &[u64]) -> usize {
        if values.last() == Some(&self.at_end.0) {
            self.unseen_steps
        } else {
            0
        }
    }

    /// Returns the growth of `values`, one per step. Each growth may happen by chance with probability `chance`.
    /// Returns `None` if they did not grow.
    fn of(&self, values: &[u64], chance: f64) -> Option<Trend> {
        let (end_bytes, end_blocks) = self.at_end;
        let (&first, &last) = (values.first()?, values.last()?);
        let bytes = last.checked_sub(first).filter(|&bytes| bytes > 0)?;
        let steps = values.len() - 1;
        let grown = grown_steps(values);
        // A site that also shrinks is a cache, or a queue.
        let moves = values.windows(2).map(|pair| pair[1].abs_diff(pair[0]));
        let moved: u64 = moves.sum();
        let one_way = as_float(bytes) / as_float(moved);
        let goes_on = late_share(values, &grown) * pause(&grown, steps + self.unseen_after(values));
        Some(Trend {
            bytes,
            bytes_per_step: as_float(bytes) / as_float(steps as u64),
            grown_steps: grown.len(),
            steps,
            times_given_back: 0,
            confidence: evidence(grown.len(), steps, chance)
                * one_way
                * goes_on
                * Fit::of(values).straightness(),
            end_bytes,
            end_blocks,
        })
    }
}

/// Returns the smaller value as a share of the larger; 0 if one is negative.
fn likeness(left: f64, right: f64) -> f64 {
    (left.min(right) / left.max(right)).max(0.0)
}

/// Returns the confidence that growth in `grown_steps` of `steps` is not by chance. If some steps did not grow, one
/// growth does not count: it takes two to show their distance.
fn evidence(grown_steps: usize, steps: usize, chance: f64) -> f64 {
    let telling = grown_steps - usize::from(grown_steps != steps);
    1.0 - chance.powi(i32::try_from(telling).unwrap_or(i32::MAX))
}

/// Returns the rate of the first third of the growths, relative to all of them; at most 1. Memory that
/// lives long and is then freed is mostly young, which makes this small.
fn early_share(values: &[u64]) -> f64 {
    match &*grown_steps(values) {
        [] => 0.0,
        grown => share_of_rate(values, grown, (0, grown[grown.len().div_ceil(3) - 1])),
    }
}

/// Returns the same for the last third. A cache grows ever slower as it fills.
fn late_share(values: &[u64], grown: &[usize]) -> f64 {
    let early_times = grown.len() - grown.len().div_ceil(3);
    let from = early_times.checked_sub(1).map_or(0, |time| grown[time]);
    share_of_rate(values, grown, (from, grown[grown.len() - 1]))
}

/// Returns the rate of growth between two steps, relative to that until the last growth; at most 1.
fn share_of_rate(values: &[u64], grown: &[usize], (from, to): (usize, usize)) -> f64 {
    let rate = |from: usize, to: usize| {
        as_float(values[to].saturating_sub(values[from])) / as_float((to - from) as u64)
    };
    (rate(from, to) / rate(0, grown[grown.len() - 1])).min(1.0)
}

/// Returns the indices of `values` that exceed the value before.
fn grown_steps(values: &[u64]) -> Vec<usize> {
    let steps = 1..values.len();
    steps
        .filter(|&step| values[step] > values[step - 1])
        .collect()
}

/// Returns the confidence that growth has not stopped before the last of `steps`. It is 1 if growth has paused
/// for as long before, and 0.5 if the current pause is twice the longest before.
fn pause(grown: &[usize], steps: usize) -> f64 {
    let (Some(&first), Some(&last)) = (grown.first(), grown.last()) else {
        return 0.0;
    };
    let between = grown.windows(2).map(|pair| pair[1] - pair[0]);
    let longest = between.fold(first, usize::max);
    let next = steps + 1 - last;
    as_float(longest.min(next) as u64) / as_float(next as u64)
}

/// The part of a call site's growth that was freed.
#[derive(Clone, Copy, Default, Debug)]
struct GivenBack {
    times: usize,
    /// The largest growth that was freed: in bytes, and in steps.
    grown_max: Grown,
    /// The growth since then.
    grown_since: Grown,
}

#[derive(Clone, Copy, Default, Debug)]
struct Grown {
    bytes: u64,
    steps: usize,
}

impl GivenBack {
    /// Returns the freed growth for steps with these minimums.
    fn of(floors: &[u64]) -> GivenBack {
        let mut past = GivenBack::default();
        let Some(&first) = floors.first() else {
            return past;
        };
        let (mut base, mut top) = (first, first);
        for pair in floors.windows(2) {
            let floor = pair[1];
            past.grown_since.steps += usize::from(floor > pair[0]);
            top = top.max(floor);
            past.grown_since.bytes = top - base;
            let fallen = as_float(top - floor);
            if floor < top && fallen >= GIVEN_BACK_SHARE * as_float(top - base) {
                past.end_growth();
                (base, top) = (floor, floor);
            }
        }
        past
    }

    fn end_growth(&mut self) {
        if self.grown_since.bytes > 0 {
            self.times += 1;
            self.grown_max.bytes = self.grown_max.bytes.max(self.grown_since.bytes);
            self.grown_max.steps = self.grown_max.steps.max(self.grown_since.steps);
        }
        self.grown_since = Grown::default();
    }

    /// Returns the confidence that the growth since then will not be freed as earlier growth was: it is far larger,
    /// or has lasted far longer.
    fn is_over(self) -> f64 {
        let share = |before: u64, since: u64| (as_float(before) / as_float(since.max(1))).min(1.0);
        let bytes = share(self.grown_max.bytes, self.grown_since.bytes);
        let steps = share(self.grown_max.steps as u64, self.grown_since.steps as u64);
        1.0 - bytes.min(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the confidence that `floors` go on growing.
    fn confidence(floors: impl IntoIterator<Item = u64>) -> f64 {
        let floors: Vec<u64> = floors.into_iter().collect();
        let course = Course {
            floors: &floors,
            kept: &[],
            warm_up_steps: 0,
            at_end: (0, 0),
            unseen_steps: 0,
        };
        course.trend().map_or(0.0, |trend| trend.confidence)
    }

    #[test]
    fn steady_growth_is_a_leak() {
        assert!(confidence((0..30).map(|step| 7 + step)) > 0.95);
        // Growth in every fifth step only.
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
        // A cache that is full.
        check((0..40).map(|step: u64| step.min(25)).collect());
        // A cache that is emptied now and then.
        check((0..40).map(|step| step % 10 + step / 10).collect());
        // A block that was allocated once, or two, and kept.
        check((0..40).map(|step| u64::from(step > 20)).collect());
        check(
            (0..40)
                .map(|step| u64::from(step > 10) + u64::from(step > 30))
                .collect(),
        );
        // Ever slower growth.
        check((1..40).map(|step: u64| 1000 - 1000 / step).collect());
        check(vec![5; 10]);
        check(vec![5]);
        check(vec![]);
    }
}
