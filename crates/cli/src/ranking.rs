//! Ranks outcomes, and says in a sentence which is best and by how much.

use std::cmp::Ordering;

use lowtide_core::{Bytes, StrategyName};
use lowtide_replay::Outcome;

use crate::format;
use crate::job::Job;

/// A job is slow if its driver calls take more than this share of its time. The time that they wait for the device
/// is not counted.
const SLOW_SHARE: f64 = 0.1;

/// A job is also slow if it releases memory to the driver more often than this in a second; a job of less than a
/// second counts as one second. At each release the host waits for all work that it has queued. In the jobs
/// recorded on a card, PyTorch released memory up to 818 times a second. `direct` did so 8,000 to 13,000 times in
/// the five largest.
const WAITS_PER_SECOND_MAX: f64 = 1000.0;

/// A burden of at most this multiple of the present one does not make a job slow. A job that spends its time in the
/// driver anyway would gain nothing from rejecting an outcome that needs less memory.
const SLOW_FACTOR: f64 = 1.5;

/// The reference that the outcomes of one job are compared with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranking {
    /// The duration of the job, if known.
    duration_us: Option<f64>,
    /// The burden of the driver's calls with the present settings, if the job completes with them.
    usual: Option<Burden>,
}

/// The cost of the driver's calls for a job.
#[derive(Clone, Copy, Debug)]
struct Burden {
    /// Their share of the job's duration.
    share: f64,
    /// The number of times per second that they wait for the device.
    waits_per_second: f64,
}

impl Burden {
    fn of(outcome: &Outcome, duration_us: f64) -> Burden {
        #[expect(
            clippy::cast_precision_loss,
            reason = "no job gives memory back 2^52 times"
        )]
        let waits = outcome.device_frees as f64;
        Burden {
            share: outcome.driver_time_us / duration_us,
            waits_per_second: 1e6 * waits / duration_us.max(1e6),
        }
    }
}

impl Ranking {
    /// Returns the ranking of outcomes of `job`. `usual` is its outcome with the present settings, if they were
    /// replayed.
    pub(crate) fn new(job: &Job, usual: Option<&Outcome>) -> Ranking {
        let usual = usual.filter(|outcome| outcome.completed);
        let burden = |duration_us| usual.map(|outcome| Burden::of(outcome, duration_us));
        Ranking {
            duration_us: job.duration_us,
            usual: job.duration_us.and_then(burden),
        }
    }

    /// Compares by what a user wants: first a job that completes, then one that is not slowed down much, then
    /// little reserved memory, then little time in the driver. If neither job completes, the one that got further
    /// is better.
    pub(crate) fn compare(self, left: &Outcome, right: &Outcome) -> Ordering {
        let refusals_last = right.completed.cmp(&left.completed);
        refusals_last
            .then_with(|| self.is_slow(left).cmp(&self.is_slow(right)))
            .then_with(|| right.oom_at_event.cmp(&left.oom_at_event))
            .then_with(|| left.peak_reserved_bytes.cmp(&right.peak_reserved_bytes))
            .then_with(|| left.driver_time_us.total_cmp(&right.driver_time_us))
    }

    /// Returns whether the driver's calls would take much more of the job's time, or wait much more often, than is
    /// acceptable and than they do now. `direct`, which waits for the device at each free, is slow.
    pub(crate) fn is_slow(self, outcome: &Outcome) -> bool {
        if outcome.strategy == StrategyName::Direct {
            return true;
        }
        let Some(duration_us) = self.duration_us else {
            return false;
        };
        let burden = Burden::of(outcome, duration_us);
        let exceeds = |max: f64, part: fn(Burden) -> f64| {
            let is_usual = |usual| part(burden) <= SLOW_FACTOR * part(usual);
            part(burden) > max && !self.usual.is_some_and(is_usual)
        };
        exceeds(SLOW_SHARE, |burden| burden.share)
            || exceeds(WAITS_PER_SECOND_MAX, |burden| burden.waits_per_second)
    }
}

/// Returns the share of the job's time that the driver's calls would take; `None` if the recording has no times, or
/// the job does not complete.
pub(crate) fn driver_share(job: &Job, outcome: &Outcome) -> Option<f64> {
    let duration_us = job.duration_us.filter(|_| outcome.completed)?;
    Some(Burden::of(outcome, duration_us).share)
}

/// Returns a few words about the cost of the driver's calls, if that is high.
pub(crate) fn driver_note(job: &Job, outcome: &Outcome) -> Option<String> {
    let duration_us = job.duration_us?;
    let burden = Burden::of(outcome, duration_us);
    if !outcome.completed {
        None
    } else if burden.share > SLOW_SHARE {
        Some(format!(
            "driver calls would take {:.0} % of the job's time",
            100.0 * burden.share
        ))
    } else if burden.waits_per_second > WAITS_PER_SECOND_MAX {
        Some(format!(
            "driver calls would wait for the device {} times in {}",
            format::count(outcome.device_frees),
            format::duration(duration_us)
        ))
    } else {
        None
    }
}

/// Returns whether this is PyTorch's allocator with its default settings.
pub(crate) fn is_default(outcome: &Outcome) -> bool {
    outcome.strategy == StrategyName::Caching && outcome.config.is_empty()
}

/// Returns the outcome of PyTorch's default, if it was replayed and the job completed.
pub(crate) fn baseline(outcomes: &[Outcome]) -> Option<&Outcome> {
    let mut outcomes = outcomes.iter();
    outcomes.find(|outcome| outcome.completed && is_default(outcome))
}

/// Returns the strategy's name, with its options if it has any.
pub(crate) fn label(outcome: &Outcome) -> String {
    let colon = if outcome.config.is_empty() { "" } else { ":" };
    format!("{}{colon}{}", outcome.strategy, outcome.config)
}

/// Returns one sentence about `ranked`, sorted by [`Ranking::compare`]: which outcome is best, and what it saves.
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
    if !default.completed {
        return Some(format!(
            "{takes}; PyTorch's default runs out of memory{limit}"
        ));
    }
    let default_peak = default.peak_reserved_bytes;
    if !is_default(best) && default_peak != peak {
        let difference = format::difference(peak, default_peak);
        let percent = format::percent_change(peak, default_peak);
        return Some(format!(
            "{takes}, {difference} than PyTorch's default ({percent})"
        ));
    }
    let takes_less = |outcome: &Outcome| outcome.completed && outcome.peak_reserved_bytes < peak;
    let none = if ranked.iter().any(takes_less) {
        "none here that is not slow takes less"
    } else {
        "none here takes less"
    };
    Some(format!(
        "PyTorch's default is best: it takes {peak}, and {none}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{job, outcome, refused};

    fn ranked(mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
        let ranking = Ranking::new(&job(), baseline(&outcomes));
        outcomes.sort_by(|left, right| ranking.compare(left, right));
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
    fn only_direct_is_slow_where_the_recording_has_no_times() {
        let slow = Outcome {
            driver_time_us: 11e6,
            ..outcome("slab", Bytes::mib(1024))
        };
        let direct = outcome("direct", Bytes::mib(1024));
        let untimed = Job {
            duration_us: None,
            ..job()
        };
        assert!(Ranking::new(&job(), None).is_slow(&slow));
        assert!(!Ranking::new(&untimed, None).is_slow(&slow));
        assert!(
            Ranking::new(&untimed, Some(&direct)).is_slow(&direct),
            "always"
        );
    }

    /// As llama_generate of the recorded jobs: 2.41 s of 36 s are in the driver, and each of 13,000 frees a second
    /// waits.
    #[test]
    fn what_waits_for_the_device_again_and_again_is_slow() {
        let freeing = |device_frees, config: &str, peak| Outcome {
            device_frees,
            driver_time_us: 6.6e6,
            ..outcome(config, peak)
        };
        let slab = || freeing(1_300_000, "slab", Bytes::mib(900));
        let caching = || outcome("caching", Bytes::mib(1200));
        let names = |outcomes| -> Vec<String> { ranked(outcomes).iter().map(label).collect() };
        assert_eq!(names(vec![slab(), caching()]), ["caching", "slab"]);
        assert_eq!(
            driver_note(&job(), &slab()).unwrap(),
            "driver calls would wait for the device 1,300,000 times in 100.00 s"
        );
        // Waiting as often as now is no loss, and so is waiting rarely.
        let usual = freeing(1_000_000, "caching", Bytes::mib(1200));
        assert_eq!(names(vec![usual, slab()]), ["slab", "caching"]);
        let seldom = freeing(90_000, "bfc", Bytes::mib(900));
        assert_eq!(driver_note(&job(), &seldom), None);
        assert_eq!(names(vec![caching(), seldom]), ["bfc", "caching"]);
        // One release in a short job is not frequent.
        let short = Job {
            duration_us: Some(20_000.0),
            ..job()
        };
        let once = Outcome {
            driver_time_us: 100.0,
            ..freeing(21, "bfc", Bytes::mib(900))
        };
        assert_eq!(driver_note(&short, &once), None);
        assert!(!Ranking::new(&short, None).is_slow(&once));
    }

    #[test]
    fn what_takes_about_as_long_as_things_are_is_not_slow() {
        let with_driver_time = |seconds| Outcome {
            driver_time_us: seconds * 1e6,
            ..outcome("caching", Bytes::gib(1))
        };
        let check = |usual: &Outcome, seconds, expected| {
            let ranking = Ranking::new(&job(), Some(usual));
            assert_eq!(
                ranking.is_slow(&with_driver_time(seconds)),
                expected,
                "{seconds}"
            );
        };
        let usual = with_driver_time(20.0);
        check(&usual, 20.0, false);
        check(&usual, 29.0, false);
        check(&usual, 31.0, true);
        check(&with_driver_time(5.0), 9.0, false);
        // The driver time of a job that did not complete is no reference.
        check(&refused("caching", 7), 11.0, true);
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
            "caching:expandable_segments:True is best: it takes 1.00 GiB, 1.00 GiB less than \
             PyTorch's default (-50.0 %)",
        );
        check(
            vec![refused("caching", 7), expandable()],
            "caching:expandable_segments:True is best: it takes 1.00 GiB; PyTorch's default runs \
             out of memory in 2.00 GiB",
        );
        check(
            vec![outcome("caching", Bytes::gib(1)), expandable()],
            "PyTorch's default is best: it takes 1.00 GiB, and none here takes less",
        );
        let slow = Outcome {
            driver_time_us: 11e6,
            ..outcome("slab", Bytes::mib(900))
        };
        check(
            vec![outcome("caching", Bytes::gib(1)), slow.clone()],
            "PyTorch's default is best: it takes 1.00 GiB, and none here that is not slow takes less",
        );
        let slow_default = Outcome {
            driver_time_us: 50e6,
            ..outcome("caching", Bytes::gib(1))
        };
        check(
            vec![slow_default, outcome("buddy", Bytes::gib(2)), slow],
            "slab is best: it takes 900.00 MiB, 124.00 MiB less than PyTorch's default (-12.1 %)",
        );
        check(
            vec![outcome("bfc", Bytes::gib(2)), expandable()],
            "caching:expandable_segments:True is best: it takes 1.00 GiB",
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
