//! How live bytes grew from step to step, and how sure it is that they go on growing.

use crate::growth::line::{Fit, as_float};

/// What gives back this share of what had grown starts anew.
const GIVEN_BACK_SHARE: f64 = 0.75;

/// How likely it is that what comes and is not given back does so by chance, in one step.
const CHANCE: f64 = 0.5;

/// The same where other blocks of its place come and go, of which some live longer than others.
const CHANCE_AMONG_OTHERS: f64 = 0.8;

/// What is left of how sure growth is, where what grows may be within a step.
const CONFIDENCE_IN_DOUBT: f64 = 0.5;

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
    /// How many times most of what had grown was given back, in the steps that are not looked at, too.
    pub times_given_back: usize,
    /// How sure it is that it goes on growing, in [0, 1].
    pub confidence: f64,
    /// What there was at the end.
    pub end_bytes: u64,
    /// In how many blocks.
    pub end_blocks: u64,
}

/// What is known of the bytes of a place, step by step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Course<'a> {
    /// The least of each step.
    pub(super) floors: &'a [u64],
    /// What came before each step, and was live when the last had ended; nothing where that is not to be asked.
    pub(super) kept: &'a [u64],
    /// How many of the first steps only tell what was given back.
    pub(super) warm_up_steps: usize,
    /// What there is at the end, in how many blocks, so many steps behind the last.
    pub(super) at_end: (u64, u64),
    pub(super) unseen_steps: usize,
}

impl Trend {
    /// From this confidence on growth is called a leak.
    pub const LEAK_CONFIDENCE: f64 = 0.7;

    /// Returns whether what is one site's is called a leak.
    pub fn is_steady(&self) -> bool {
        self.confidence >= Trend::LEAK_CONFIDENCE
    }

    /// Returns it for spans of which it is not known that they are steps: it may be steady and is not called so.
    pub(super) fn in_doubt(self) -> Trend {
        Trend {
            confidence: self.confidence * CONFIDENCE_IN_DOUBT,
            ..self
        }
    }

    /// Returns it for one step, if it is over spans of so many.
    pub(super) fn over_spans_of(self, steps: usize) -> Trend {
        Trend {
            bytes_per_step: self.bytes_per_step / as_float(steps as u64),
            ..self
        }
    }
}

impl Course<'_> {
    /// Returns how it grew, by the least of each step or by what was kept, whichever is surer; `None` where it did not.
    pub(super) fn trend(&self) -> Option<Trend> {
        let grown = self.trend_of_least()?;
        let kept = self.trend_of_kept();
        let surer = kept.filter(|kept| kept.confidence > grown.confidence);
        Some(surer.unwrap_or(grown))
    }

    /// Returns how the least of each step grew, which tells what is copied to where there is room for more, too.
    pub(super) fn trend_of_least(&self) -> Option<Trend> {
        let floors = self.floors.get(self.warm_up_steps..)?;
        Some(self.seen_before(self.of(floors, CHANCE)?))
    }

    /// Returns how what was kept grew, where the least of each step did: that tells a leak among other blocks of its
    /// place, which come and go.
    pub(super) fn trend_of_kept(&self) -> Option<Trend> {
        let floors = self.floors.get(self.warm_up_steps..)?;
        let grown = self.of(floors, CHANCE)?;
        let kept = self.kept.get(self.warm_up_steps..self.floors.len())?;
        let trend = self.of(kept, CHANCE_AMONG_OTHERS)?;
        let likeness = likeness(Fit::of(floors).rise(), as_float(trend.bytes));
        // Of a cache that gives back the oldest, what is kept grows though the cache does not.
        let goes_on = pause(
            &grown_steps(floors),
            grown.steps + self.unseen_after(floors),
        );
        let confidence = trend.confidence * likeness * early_share(kept) * goes_on;
        Some(self.seen_before(Trend {
            confidence,
            ..trend
        }))
    }

    /// Returns it as sure as it is in view of what was given back before.
    fn seen_before(&self, trend: Trend) -> Trend {
        let past = GivenBack::of(self.floors);
        Trend {
            confidence: trend.confidence * past.is_over(),
            times_given_back: past.times,
            ..trend
        }
    }

    /// Returns how many steps are not seen in which there was as much as there is at the end.
    fn unseen_after(&self, values: &[u64]) -> usize {
        match values.last() == Some(&self.at_end.0) {
            true => self.unseen_steps,
            false => 0,
        }
    }

    /// Returns how `values`, one of each step, grew, of which each time may be `chance`; `None` where they did not.
    fn of(&self, values: &[u64], chance: f64) -> Option<Trend> {
        let (end_bytes, end_blocks) = self.at_end;
        let (&first, &last) = (values.first()?, values.last()?);
        let bytes = last.checked_sub(first).filter(|&bytes| bytes > 0)?;
        let steps = values.len() - 1;
        let grown = grown_steps(values);
        // What also shrinks is a cache, or a queue.
        let moved: u64 = values
            .windows(2)
            .map(|pair| pair[1].abs_diff(pair[0]))
            .sum();
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

/// Returns which share the less is of the more; 0 where one is less than nothing.
fn likeness(left: f64, right: f64) -> f64 {
    (left.min(right) / left.max(right)).max(0.0)
}

/// Returns how sure it is that growth in so many of some steps is none by chance, as each of them may be. Where some steps
/// have none, it takes two to say how far they are from each other.
fn evidence(grown_steps: usize, steps: usize, chance: f64) -> f64 {
    let telling = match grown_steps == steps {
        true => grown_steps,
        false => grown_steps - 1,
    };
    1.0 - chance.powi(i32::try_from(telling).unwrap_or(i32::MAX))
}

/// Returns how fast `values` grew the first third of the times they did, beside all of them; at most 1. Of what lives for
/// long and then goes, little is left that is old.
fn early_share(values: &[u64]) -> f64 {
    match &*grown_steps(values) {
        [] => 0.0,
        grown => share_of_rate(values, grown, (0, grown[grown.len().div_ceil(3) - 1])),
    }
}

/// Returns the same of the last third. What has its fill grows ever slower.
fn late_share(values: &[u64], grown: &[usize]) -> f64 {
    let early_times = grown.len() - grown.len().div_ceil(3);
    let from = early_times.checked_sub(1).map_or(0, |time| grown[time]);
    share_of_rate(values, grown, (from, grown[grown.len() - 1]))
}

/// Returns how fast `values` grew between two steps, beside all of them until they grew last; at most 1.
fn share_of_rate(values: &[u64], grown: &[usize], (from, to): (usize, usize)) -> f64 {
    let rate = |from: usize, to: usize| {
        as_float(values[to].saturating_sub(values[from])) / as_float((to - from) as u64)
    };
    (rate(from, to) / rate(0, grown[grown.len() - 1])).min(1.0)
}

/// Returns at which of `values` there is more than at the one before.
fn grown_steps(values: &[u64]) -> Vec<usize> {
    let steps = 1..values.len();
    steps
        .filter(|&step| values[step] > values[step - 1])
        .collect()
}

/// Returns how sure it is that growth has not stopped before the last of so many steps: 1 if it has paused for as long
/// before, and half of that if twice as long is the longest that it had.
fn pause(grown: &[usize], steps: usize) -> f64 {
    let (Some(&first), Some(&last)) = (grown.first(), grown.last()) else {
        return 0.0;
    };
    let between = grown.windows(2).map(|pair| pair[1] - pair[0]);
    let longest = between.fold(first, usize::max);
    let next = steps + 1 - last;
    as_float(longest.min(next) as u64) / as_float(next as u64)
}

/// What a place gave back of what had grown.
#[derive(Clone, Copy, Default, Debug)]
struct GivenBack {
    times: usize,
    /// How much had grown at most when it was given back, and in how many steps.
    grown_max: Grown,
    /// What has grown since the last time.
    grown_since: Grown,
}

#[derive(Clone, Copy, Default, Debug)]
struct Grown {
    bytes: u64,
    steps: usize,
}

impl GivenBack {
    /// Returns what was given back in steps of which the least bytes are given.
    fn of(floors: &[u64]) -> GivenBack {
        let mut past = GivenBack::default();
        let (mut base, mut top) = match floors.first() {
            Some(&first) => (first, first),
            None => return past,
        };
        for pair in floors.windows(2) {
            let floor = pair[1];
            past.grown_since.steps += usize::from(floor > pair[0]);
            top = top.max(floor);
            past.grown_since.bytes = top - base;
            let fallen = as_float(top - floor);
            if floor < top && fallen >= GIVEN_BACK_SHARE * as_float(top - base) {
                past.give_back();
                (base, top) = (floor, floor);
            }
        }
        past
    }

    fn give_back(&mut self) {
        if self.grown_since.bytes > 0 {
            self.times += 1;
            self.grown_max.bytes = self.grown_max.bytes.max(self.grown_since.bytes);
            self.grown_max.steps = self.grown_max.steps.max(self.grown_since.steps);
        }
        self.grown_since = Grown::default();
    }

    /// Returns how sure it is that what has grown since will not be given back as what had grown before: it grew far
    /// more, or for far longer.
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
