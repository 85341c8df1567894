//! `lowtide replay`: what each strategy makes of a job.

use std::fmt;
use std::path::Path;
use std::slice;

use anyhow::{Result, bail};
use lowtide_core::{Bytes, Config};
use lowtide_replay::{Options, Outcome, ReplayError};
use rayon::prelude::*;

use crate::args::ReplayArgs;
use crate::json::{Report, ResultRow};
use crate::progress::Progress;
use crate::ranking::{self, Ranking};
use crate::recording::{self, Job};
use crate::{html, json, output, table};

/// So many points over time are enough for the width of a screen.
const TIMELINE_POINTS: usize = 2000;

/// Carries out `lowtide replay`.
///
/// # Errors
///
/// If an argument or the recording is bad, or the report cannot be written.
pub(crate) fn run(args: &ReplayArgs) -> Result<()> {
    let source = &args.source;
    let prints_page = args.html.as_deref() == Some(Path::new("-"));
    if prints_page && args.json {
        bail!("--html - and --json both print in place of the table; name a file for the page");
    }
    if let Some(path) = &args.html {
        output::refuse_recordings(path, slice::from_ref(&source.trace), "the page")?;
    }
    let recorded = recording::read_device(&source.trace, source.device)?;
    let trace = &recorded.trace;
    recording::note_pauses(&source.trace, trace);
    if args.verify {
        recording::refuse_other_strategy(&source.trace, trace)?;
    } else {
        recording::note_refusals(&source.trace, trace);
    }
    let configs = args.configs(|| recording::recorded_config(&source.trace, trace))?;
    let job = Job::new(&source.trace, &recorded);
    let options = Options {
        capacity: source.resolve_capacity(&job),
        verify: args.verify,
        timeline_points: if args.html.is_some() {
            TIMELINE_POINTS
        } else {
            0
        },
    };

    note_whole_device(&configs, options.capacity);

    let total = trace.events.len() as u64 * configs.len() as u64;
    let progress = Progress::new("replaying", total);
    let results = replay_all(
        &lowtide_replay::Job::new(trace),
        &configs,
        &options,
        &progress,
    );
    drop(progress);

    let (mut ranked, failures) = split(&results);
    if let (true, Some(failure)) = (ranked.is_empty(), failures.first()) {
        bail!("{}: {failure}", recording::name(&source.trace));
    }
    let ranking = Ranking::new(&job, ranking::baseline(&ranked.clone()));
    ranked.sort_by(|left, right| ranking.compare(left, right));
    if let Some(path) = &args.html {
        let page = html::page(&job, &ranked, &failures, options.capacity)?;
        if prints_page {
            return output::print(&page);
        }
        output::write_file(path, |file| Ok(file.write_all(page.as_bytes())?))?;
    }
    if args.json {
        let results = results.iter().map(ResultRow::new).collect();
        return output::print(&json::text(&Report {
            trace: &job,
            results,
        })?);
    }
    output::print(&table::report(&job, &ranked, &failures, options.capacity))
}

/// A configuration with which a recording cannot be replayed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) config: Config,
    pub(crate) error: ReplayError,
}

/// The configuration, and why.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.config, self.error)
    }
}

/// Returns the outcomes and the failures apart.
fn split(results: &[Result<Outcome, Box<Failure>>]) -> (Vec<Outcome>, Vec<Failure>) {
    let (mut outcomes, mut failures) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(outcome) => outcomes.push(outcome.clone()),
            Err(failure) => failures.push(Failure::clone(failure)),
        }
    }
    (outcomes, failures)
}

/// Says that what takes all of a device at once takes one of any size, where nobody says which.
fn note_whole_device(configs: &[Config], capacity: Option<Bytes>) {
    let takes_all = |config: &&Config| matches!(config, Config::Bfc(bfc) if !bfc.allow_growth);
    if capacity.is_none()
        && let Some(config) = configs.iter().find(takes_all)
    {
        output::note(&format!(
            "{config} takes the whole device with its first request: --capacity says how large that is, \
             which is 64 TiB without"
        ));
    }
}

/// Returns the outcome of each configuration, in their order, or why there is none; several are replayed at once.
pub(crate) fn replay_all(
    steps: &lowtide_replay::Job<'_>,
    configs: &[Config],
    options: &Options,
    progress: &Progress,
) -> Vec<Result<Outcome, Box<Failure>>> {
    let replay = |config: &Config| {
        let outcome = steps.replay(config, options, progress);
        outcome.map_err(|error| {
            let config = config.clone();
            Box::new(Failure { config, error })
        })
    };
    configs.par_iter().map(replay).collect()
}
