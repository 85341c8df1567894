//! `lowtide replay`: the outcome of a job with each strategy.

use std::path::Path;
use std::slice;

use anyhow::{Result, bail};
use lowtide_core::{Bytes, Config};
use lowtide_history::{PageData, PageTrace, trace_name};
use lowtide_replay::{Options, Outcome};
use lowtide_trace::Trace;

use crate::args::{RecordingArgs, ReplayArgs};
use crate::job::Job;
use crate::json::{Report, ResultRow};
use crate::page::{self, Findings};
use crate::progress::Progress;
use crate::ranking::{self, Ranking};
use crate::recording::{self, Recording};
use crate::replays::{Failure, replay_all};
use crate::{json, output, table};

/// Runs `lowtide replay`.
///
/// # Errors
///
/// If an argument or the recording is bad, or the report cannot be written.
pub(crate) fn run(args: &ReplayArgs) -> Result<()> {
    let RecordingArgs { trace, device } = &args.source.recording;
    let prints_page = args.html.as_deref().is_some_and(page::is_stdout);
    if prints_page && args.json {
        bail!("--html - and --json both print in place of the table; name a file for the page");
    }
    if let Some(path) = &args.html {
        output::refuse_recordings(path, slice::from_ref(trace), "the page")?;
    }
    let mut recording = Recording::open(trace, *device)?;
    let configs = configs(args, &mut recording);
    output::notes(&recording.notes);
    let (configs, trace) = (configs?, &recording.trace);
    let job = Job::new(&recording);
    let options = Options {
        capacity: args.source.resolve_capacity(job.peak_live_bytes),
        verify: args.verify,
        timeline_points: args.html.as_ref().map_or(0, |_| page::TIMELINE_POINTS),
    };

    note_whole_device(&configs, options.capacity);

    let total = trace.events.len() as u64 * configs.len() as u64;
    let progress = Progress::new("replaying", total);
    let steps = lowtide_replay::Job::new(trace);
    let results = replay_all(&steps, &configs, &options, &progress);
    drop(progress);

    let (mut ranked, failures) = split(&results);
    if let (true, Some(failure)) = (ranked.is_empty(), failures.first()) {
        bail!("{}: {failure}", recording.name);
    }
    let ranking = Ranking::new(&job, ranking::baseline(&ranked.clone()));
    ranked.sort_by(|left, right| ranking.compare(left, right));
    if let Some(path) = &args.html {
        let remarks = table::remarks(&job, &ranked, &failures);
        let notes = [page_notes(args, trace, options.capacity), remarks].concat();
        write_page(path, &recording, &ranked, &notes)?;
        if prints_page {
            return Ok(());
        }
    }
    if args.json {
        let (trace, results) = (&job, results.iter().map(ResultRow::new).collect());
        return output::print(&json::text(&Report { trace, results })?);
    }
    output::print(&table::report(&job, &ranked, &failures, options.capacity))
}

/// Returns the configurations to replay, and adds notes about how replays treat the recording.
fn configs(args: &ReplayArgs, recording: &mut Recording) -> Result<Vec<Config>> {
    recording.note(recording::pauses_text(&recording.trace));
    if args.verify {
        recording.refuse_other_strategy()?;
    } else {
        recording.note(recording::refusals_text(&recording.trace));
    }
    args.configs(|| recording.config())
}

/// Returns notes for the page about all replays, each a sentence without capital and full stop.
fn page_notes(args: &ReplayArgs, trace: &Trace, capacity: Option<Bytes>) -> Vec<String> {
    let capacity = capacity.map(|capacity| format!("the simulated device has {capacity}"));
    let refusals = recording::refusals_text(trace).filter(|_| !args.verify);
    let notes = [capacity, refusals, recording::pauses_text(trace)];
    notes.into_iter().flatten().collect()
}

/// Writes the page of `lowtide report` about the recording, with these outcomes as its strategies.
fn write_page(
    path: &Path,
    recording: &Recording,
    ranked: &[Outcome],
    notes: &[String],
) -> Result<()> {
    let trace = &recording.trace;
    let progress = Progress::new("replaying", trace.events.len() as u64);
    let findings = Findings::of(trace, false, &progress);
    drop(progress);
    let replayed = ranked
        .iter()
        .map(|outcome| (ranking::label(outcome), outcome));
    let replayed: Vec<(String, &Outcome)> = replayed.collect();
    let mut data = PageData::new(env!("CARGO_PKG_VERSION"));
    let trace = PageTrace {
        name: &trace_name(&recording.name, trace, 1),
        trace,
        is_host: false,
        sizes: &findings.sizes,
        history: &findings.history,
        replayed: &replayed,
        replay_notes: notes,
        leaks: &findings.leaks,
        is_cut_off: recording.is_cut_off,
        lengths: &[],
    };
    page::add(&mut data, &trace);
    page::write(&mut data, path)
}

/// Separates outcomes and failures.
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

/// Prints a note if a configuration reserves the whole device at once and no capacity is given.
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
