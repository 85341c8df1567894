//! Which outcome is better, and in a sentence, by how much.

use std::cmp::Ordering;

use lowtide_core::{Bytes, StrategyName};
use lowtide_replay::Outcome;

use crate::format;
use crate::recording::Job;

/// A strategy whose driver calls take more than this share of the time that the job took is no choice,
/// however little memory it needs. That they also wait for the device is not even counted.
const SLOW_SHARE: f64 = 0.1;

/// Compares by what a user wants: first that the job completes, then that it is not slowed down a lot,
/// then little memory, then little time in the driver. Of two jobs that did not complete, the one that
/// came further is better.
pub(crate) fn compare(job: &Job, left: &Outcome, right: &Outcome) -> Ordering {
    let refusals_last = right.completed.cmp(&left.completed);
    refusals_last
        .then_with(|| right.oom_at_event.cmp(&left.oom_at_event))
        .then_with(|| is_slow(job, left).cmp(&is_slow(job, right)))
        .then_with(|| left.peak_reserved_bytes.cmp(&right.peak_reserved_bytes))
        .then_with(|| left.driver_time_us.total_cmp(&right.driver_time_us))
}

/// Returns whether the driver's calls would take so much of the job's time that nobody would want it.
pub(crate) fn is_slow(job: &Job, outcome: &Outcome) -> bool {
    driver_share(job, outcome).is_some_and(|share| share > SLOW_SHARE)
}

/// Returns the time of the driver's calls as a share of the recorded time, where that is known.
pub(crate) fn driver_share(job: &Job, outcome: &Outcome) -> Option<f64> {
    Some(outcome.driver_time_us / job.duration_us?)
}

/// Returns whether this is PyTorch's allocator with its default settings.
pub(crate) fn is_default(outcome: &Outcome) -> bool {
    outcome.strategy == StrategyName::Caching && outcome.config.is_empty()
}

/// Returns the outcome of PyTorch's default, if it was replayed and the job completed.
pub(crate) fn baseline(outcomes: &[Outcome]) -> Option<&Outcome> {
    outcomes
        .iter()
        .find(|outcome| outcome.completed && is_default(outcome))
}

/// Returns what the strategy is called: its name, and its options where it has any.
pub(crate) fn label(outcome: &Outcome) -> String {
    let colon = if outcome.config.is_empty() { "" } else { ":" };
    format!("{}{colon}{}", outcome.strategy, outcome.config)
}

/// Returns one sentence on `ranked`, which is sorted by [`compare`]: which is best, and what it saves.
pub(crate) fn verdict(ranked: &[Outcome], capacity: Option<Bytes>) -> Option<String> {
    let best = ranked.first()?;
    let name = label(best);
    let limit = capacity.map_or(String::new(), |capacity| format!(" in {capacity}"));
    if !best.completed {
        return Some(match ranked.len() {
            1 => format!("{name} does not fit the job{limit}"),
            _ => format!("none of them fits the job{limit}; {name} came furthest"),
        });
    }
    if ranked.len() == 1 {
        return None;
    }

    let peak = best.peak_reserved_bytes;
    let takes = format!("{name} is best: it takes {peak}");
    let Some(default) = ranked.iter().find(|outcome| is_default(outcome)) else {
        return Some(takes);
    };
    let default_peak = default.peak_reserved_bytes;
    Some(if !default.completed {
        format!("{takes}; PyTorch's default runs out of memory{limit}")
    } else if is_default(best) || default_peak == peak {
        format!("PyTorch's default is best: it takes {default_peak}, and none here takes less")
    } else {
        format!(
            "{takes}, {} less than PyTorch's default ({})",
            default_peak - peak,
            format::percent_change(peak, default_peak)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{job, outcome, refused};

    fn ranked(mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
        outcomes.sort_by(|left, right| compare(&job(), left, right));
        outcomes
    }

    #[test]
    fn completed_then_bearable_then_small_then_quick() {
        let slow = Outcome {
            driver_time_us: 11e6,
            ..outcome("direct", Bytes::mib(1024))
        };
        let quick = Outcome {
            driver_time_us: 999.0,
            ..outcome("bfc", Bytes::mib(1100))
        };
        let order = ranked(vec![
            refused("buddy", 10),
            slow,
            refused("slab", 20),
            outcome("caching", Bytes::mib(1200)),
            outcome("pool", Bytes::mib(1100)),
            quick,
        ]);
        let names: Vec<String> = order.iter().map(label).collect();
        assert_eq!(names, ["bfc", "pool", "caching", "direct", "slab", "buddy"]);
    }

    #[test]
    fn nothing_is_slow_where_the_recording_has_no_times() {
        let slow = Outcome {
            driver_time_us: 11e6,
            ..outcome("direct", Bytes::mib(1024))
        };
        let untimed = Job {
            duration_us: None,
            ..job()
        };
        assert!(is_slow(&job(), &slow));
        assert!(!is_slow(&untimed, &slow));
    }

    #[test]
    fn the_verdict_names_the_best_and_what_it_saves() {
        let check = |outcomes: Vec<Outcome>, expected: &str| {
            let verdict = verdict(&ranked(outcomes), Some(Bytes::gib(2)));
            assert_eq!(verdict.as_deref().unwrap_or("nothing"), expected);
        };
        let expandable = || outcome("caching:expandable_segments:True", Bytes::gib(1));
        check(
            vec![outcome("caching", Bytes::gib(2)), expandable()],
            "caching:expandable_segments:True is best: it takes 1024.00 MiB, 1024.00 MiB less than \
             PyTorch's default (-50.0 %)",
        );
        check(
            vec![refused("caching", 7), expandable()],
            "caching:expandable_segments:True is best: it takes 1024.00 MiB; PyTorch's default runs \
             out of memory in 2.00 GiB",
        );
        check(
            vec![outcome("caching", Bytes::gib(1)), expandable()],
            "PyTorch's default is best: it takes 1024.00 MiB, and none here takes less",
        );
        check(
            vec![outcome("bfc", Bytes::gib(2)), expandable()],
            "caching:expandable_segments:True is best: it takes 1024.00 MiB",
        );
        check(
            vec![refused("caching", 7), refused("bfc", 9)],
            "none of them fits the job in 2.00 GiB; bfc came furthest",
        );
        check(
            vec![refused("bfc", 9)],
            "bfc does not fit the job in 2.00 GiB",
        );
        check(vec![expandable()], "nothing");
    }
}
