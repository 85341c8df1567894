//! `lowtide replay`: what each strategy makes of a job.

use std::path::Path;
use std::slice;

use anyhow::{Result, bail};
use lowtide_core::{Bytes, Config};
use lowtide_replay::{Options, Outcome};

use crate::args::ReplayArgs;
use crate::job::Job;
use crate::json::{Report, ResultRow};
use crate::progress::Progress;
use crate::ranking::{self, Ranking};
use crate::recording::Recording;
use crate::replays::{Failure, replay_all};
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
    let mut recording = Recording::open(&source.trace, source.device)?;
    let configs = configs(args, &mut recording);
    output::notes(&recording.notes);
    let (configs, trace) = (configs?, &recording.trace);
    let job = Job::new(&recording);
    let options = Options {
        capacity: source.resolve_capacity(job.peak_live_bytes),
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
        bail!("{}: {failure}", recording.name);
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

/// Returns the configurations to replay, and notes what replays make of the recording.
fn configs(args: &ReplayArgs, recording: &mut Recording) -> Result<Vec<Config>> {
    recording.note_pauses();
    if args.verify {
        recording.refuse_other_strategy()?;
    } else {
        recording.note_refusals();
    }
    args.configs(|| recording.config())
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
