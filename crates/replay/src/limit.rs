//! Finds the limit under which a job ran, if its recording does not say it.

use lowtide_core::{Bytes, Config};

use crate::job::{Job, Options};
use crate::progress::Progress;
use crate::run::{Ages, Miss, Run};

/// Reserved bytes are a multiple of this.
const STEP: Bytes = Bytes::mib(2);

/// More than any device has, because a threshold near zero would lead to a larger bound.
const LIMIT_MAX: Bytes = Bytes::gib(1 << 20);

/// Returns the limit under which a replay with `config` collects garbage as recorded for the most events.
/// Returns `None` if garbage is not collected, or if a replay without a limit does as well.
///
/// The limit decides how much is garbage, and no recording has it: PyTorch releases old segments once reserved
/// memory exceeds a fraction of the limit. Up to its first difference, a replay has done what was recorded. Whether
/// it releases too much or too little at that difference shows on which side the limit lies. The search takes about
/// fifteen replays, each up to its first difference.
pub(crate) fn search(job: &Job<'_>, config: &Config, progress: &dyn Progress) -> Option<Bytes> {
    let threshold = garbage_threshold(config)?;
    let low = job.program.limit_min;
    let high = low.scale(1.0 / threshold).min(LIMIT_MAX) + STEP;
    let events = job.trace.events.len() as u64;
    let expected = u64::from(replays_max(low, high)) * events;
    progress.expect(expected);
    let mut replays = 0;
    let found = bisect(job, config, (low, high), &mut |run: Run<'_>| {
        replays += 1;
        run.first_miss(progress).ok()
    });
    progress.advance(expected.saturating_sub(replays * events));
    found
}

/// Returns the most replays that a search between two limits takes: one without a limit, one under the lower limit,
/// and those that halve the interval.
fn replays_max(low: Bytes, high: Bytes) -> u32 {
    let steps = high.saturating_sub(low).get() / STEP.get();
    2 + (u64::BITS - steps.leading_zeros())
}

/// Returns the limit between two under which a replay's first difference comes latest; `None` if no limit delays
/// it.
fn bisect(
    job: &Job<'_>,
    config: &Config,
    (mut low, mut high): (Bytes, Bytes),
    first_miss: &mut dyn FnMut(Run<'_>) -> Option<Option<Miss>>,
) -> Option<Bytes> {
    let ages = Ages::guess(job);
    let mut miss_under = |capacity: Option<Bytes>| -> Option<Option<Miss>> {
        let options = Options {
            capacity,
            verify: true,
            timeline_points: 0,
        };
        first_miss(Run::new(job, config, &options, &ages))
    };
    let mut latest = miss_under(None)??.difference.event;
    let mut found = None;
    // Just above the lower limit, the range of limits that reproduce the recording may be narrower than a step.
    let mut limit = low;
    while low <= high {
        // A replay that breaks off says nothing about the limit.
        let Some(miss) = miss_under(Some(limit)) else {
            break;
        };
        let Some(miss) = miss else {
            return Some(limit);
        };
        if miss.difference.event > latest {
            (latest, found) = (miss.difference.event, Some(limit));
        }
        if miss.releases_too_much {
            low = limit + STEP
        } else {
            high = limit.saturating_sub(STEP)
        }
        limit = low + Bytes(high.saturating_sub(low).get() / 2);
    }
    found
}

/// Returns the fraction of the limit above which garbage is collected; `None` if garbage is not collected, or if
/// the configuration sets the limit.
fn garbage_threshold(config: &Config) -> Option<f64> {
    let Config::Caching(options) = config else {
        return None;
    };
    let threshold = options.garbage_collection_threshold;
    let collects = threshold > 0.0 && !options.expandable_segments;
    (collects && config.memory_fraction().is_none()).then_some(threshold)
}
