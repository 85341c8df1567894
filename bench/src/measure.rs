//! Times, measured side by side. Each repeat measures everything once, so that a disturbance affects all strategies
//! and not one.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lowtide_bench::{Answers, Definitions, PairBench, PairCase, Recording, check_answer};
use lowtide_core::Config;

use crate::child::{self, ReplayRun};
use crate::output;

/// The number of timings of each pair benchmark.
pub(crate) const PAIR_REPEATS: usize = 15;
/// The number of times that each recording is read and replayed.
pub(crate) const REPLAY_REPEATS: usize = 5;

const TIMED_PAIRS: usize = 100_000;

/// The times of one pair benchmark with one strategy.
#[derive(Debug)]
pub(crate) struct PairTimes<'a> {
    pub(crate) case: &'a PairCase,
    pub(crate) config: &'a Config,
    /// The time of a pair in nanoseconds, one sample per repeat.
    pub(crate) ns: Samples,
}

/// The times of one recording with one strategy.
#[derive(Debug)]
pub(crate) struct ReplayTimes<'a> {
    pub(crate) recording: &'a Recording,
    pub(crate) config: &'a Config,
    pub(crate) events: u64,
    pub(crate) read_s: Samples,
    pub(crate) replay_s: Samples,
    pub(crate) read_and_replay_s: Samples,
    pub(crate) memory_peak_bytes: Option<u64>,
}

/// Several measurements of the same quantity.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Samples {
    rising: Vec<f64>,
}

impl Samples {
    /// Returns the samples in rising order.
    ///
    /// # Panics
    ///
    /// If there are no samples.
    pub(crate) fn new(samples: impl IntoIterator<Item = f64>) -> Samples {
        let mut rising: Vec<f64> = samples.into_iter().collect();
        assert!(!rising.is_empty(), "measured at least once");
        rising.sort_by(f64::total_cmp);
        Samples { rising }
    }

    /// Returns the smallest sample, which is the least disturbed.
    pub(crate) fn min(&self) -> f64 {
        self.rising[0]
    }

    /// Returns the median: the sample in the middle, or the lower one of two.
    pub(crate) fn median(&self) -> f64 {
        self.rising[(self.rising.len() - 1) / 2]
    }
}

/// Times every pair benchmark.
///
/// # Errors
///
/// If a benchmark gives a wrong answer or fails.
pub(crate) fn pairs<'a>(
    definitions: &'a Definitions,
    answers: &Answers,
) -> Result<Vec<PairTimes<'a>>> {
    let mut benches = Vec::new();
    for case in &definitions.pairs {
        for config in definitions.strategies_of(case) {
            let bench = PairBench::start(case, config)?;
            check_answer(&answers.pairs, &case.name, config, &bench.answer())?;
            benches.push((case, config, bench, Vec::new()));
        }
    }
    for repeat in 1..=PAIR_REPEATS {
        output::note(&format!("timing pairs, {repeat} of {PAIR_REPEATS}"));
        for (_, _, bench, samples) in &mut benches {
            // The caches contain the other benchmarks' memory. With many live blocks, less than a round would leave
            // most of it there.
            bench.run_round()?;
            let started = Instant::now();
            bench.run(TIMED_PAIRS)?;
            samples.push(started.elapsed().as_secs_f64() * 1e9 / TIMED_PAIRS as f64);
        }
    }
    let times = benches
        .into_iter()
        .map(|(case, config, _, samples)| PairTimes {
            case,
            config,
            ns: Samples::new(samples),
        });
    Ok(times.collect())
}

/// Times reading and replaying every recording, each time in a child process.
///
/// # Errors
///
/// If a replay gives a wrong answer or fails.
pub(crate) fn replays<'a>(
    definitions: &'a Definitions,
    recordings: &'a [Recording],
    answers: &Answers,
) -> Result<Vec<ReplayTimes<'a>>> {
    let mut runs: Vec<(&Recording, &Config, Vec<ReplayRun>)> = Vec::new();
    for recording in recordings {
        let configs = definitions.strategies.iter();
        runs.extend(configs.map(|config| (recording, config, Vec::new())));
    }
    for repeat in 1..=REPLAY_REPEATS {
        output::note(&format!("timing replays, {repeat} of {REPLAY_REPEATS}"));
        for (recording, config, runs) in &mut runs {
            let run = child::start_replay(&recording.path, config)?;
            let name = &recording.case.name;
            match runs.first() {
                // A recording that is not one of the project's has no expected answer, but its answer must not
                // change.
                Some(first) => ensure!(first.answer == run.answer, "{name}: answers differ"),
                None if answers.replays.contains_key(name) => {
                    check_answer(&answers.replays, name, config, &run.answer)?;
                }
                None => {}
            }
            runs.push(run);
        }
    }
    let times = runs.into_iter().map(|(recording, config, runs)| {
        let first = runs.first().context("measured at least once")?;
        Ok(ReplayTimes {
            recording,
            config,
            events: first.events,
            read_s: Samples::new(runs.iter().map(|run| run.read_s)),
            replay_s: Samples::new(runs.iter().map(|run| run.replay_s)),
            read_and_replay_s: Samples::new(runs.iter().map(|run| run.read_s + run.replay_s)),
            memory_peak_bytes: runs.iter().filter_map(|run| run.memory_peak_bytes).max(),
        })
    });
    times.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_minimum() {
        let samples = Samples::new([3.0, 1.0, 2.0]);
        assert_eq!((samples.min(), samples.median()), (1.0, 2.0));
        assert_eq!(Samples::new([4.0, 1.0, 3.0, 2.0]).median(), 2.0);
        assert_eq!(Samples::new([5.0]).median(), 5.0);
    }
}
