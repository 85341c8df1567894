//! Under which limit a job ran, where its recording does not say.

use lowtide_core::{Bytes, CachingConfig, Config};

use crate::job::{Job, Options};
use crate::progress::Progress;
use crate::run::{Ages, Miss, Run};

/// What is held from the driver is a multiple of this.
const STEP: Bytes = Bytes::mib(2);

/// More than any device has: a threshold near zero would ask for more.
const LIMIT_MAX: Bytes = Bytes::gib(1 << 20);

/// Returns the limit under which a replay with `config` collects garbage as it was recorded, or for longest; `None`
/// where garbage is not collected, or as recorded without a limit.
///
/// How much is garbage depends on the limit, which no recording says: PyTorch lets old segments go once more is held
/// than a part of it. Up to the first difference a replay has done what was recorded, so whether it lets go of too
/// much there or too little tells on which side the limit lies: some fifteen replays, each up to its difference.
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

/// Returns how many replays a search between two limits takes at most: one without a limit, one under the lower, and
/// those that halve what lies between.
fn replays_max(low: Bytes, high: Bytes) -> u32 {
    let steps = high.saturating_sub(low).get() / STEP.get();
    2 + (u64::BITS - steps.leading_zeros())
}

/// Returns the limit between two under which a replay has its first miss latest, or none.
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
    // Just above the least there may be less than a step that will do.
    let mut limit = low;
    while low <= high {
        // What breaks off says nothing of the limit.
        let Some(miss) = miss_under(Some(limit)) else {
            break;
        };
        let Some(miss) = miss else {
            return Some(limit);
        };
        if miss.difference.event > latest {
            (latest, found) = (miss.difference.event, Some(limit));
        }
        match miss.lets_go_too_much {
            true => low = limit + STEP,
            false => high = limit.saturating_sub(STEP),
        }
        limit = low + Bytes(high.saturating_sub(low).get() / 2);
    }
    found
}

/// Returns the part of the limit above which garbage is collected.
fn garbage_threshold(config: &Config) -> Option<f64> {
    let Config::Caching(config) = config else {
        return None;
    };
    let CachingConfig {
        garbage_collection_threshold: threshold,
        per_process_memory_fraction: fraction,
        expandable_segments,
        ..
    } = *config;
    (threshold > 0.0 && fraction >= 1.0 && !expandable_segments).then_some(threshold)
}
