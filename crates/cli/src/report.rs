//! `lowtide report`: where the memory of a job went, as one self-contained page.

use std::fs::{self, Metadata};
use std::io::{self, IsTerminal as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use lowtide_core::Config;
use lowtide_history::{PageData, PageTrace, trace_name};
use lowtide_replay::{ImpliedLimit, Options, Outcome};
use lowtide_trace::{OneLine, Trace};

use crate::args::{self, ReportArgs};
use crate::job::{self, Job};
use crate::page::{self, Findings, TIMELINE_POINTS};
use crate::progress::Progress;
use crate::recording::{self, RecordedFile};
use crate::replays::{self, Replayed};
use crate::summary::figures::{self, Summary};
use crate::summary::text;
use crate::{output, ranking};

/// How long to wait for the program that opens a page, to see whether it fails. It may be the browser itself and
/// keep running.
const OPENING: Duration = Duration::from_secs(3);

/// Runs `lowtide report`.
///
/// # Errors
///
/// If a recording is bad, or the page cannot be written.
pub(crate) fn run(args: &ReportArgs) -> Result<()> {
    let target = args.output.clone();
    let target = target.unwrap_or_else(|| default_output(&args.traces[0]));
    let prints_page = page::is_stdout(&target);
    if prints_page && args.open {
        bail!("-o - prints the page, which --open cannot open; name a file for it");
    }
    recording::refuse_stdin_twice(&args.traces)?;
    output::refuse_recordings(&target, &args.traces, "the page")?;
    let mut data = PageData::new(env!("CARGO_PKG_VERSION"));
    // The space that a pipe or another special file needs is unknown.
    let length = |path: &PathBuf| {
        let file = fs::metadata(path).ok().filter(Metadata::is_file);
        file.map_or(u64::MAX, |file| file.len())
    };
    let lengths: Vec<u64> = args.traces.iter().map(length).collect();
    let mut summaries = Vec::new();
    for (index, path) in args.traces.iter().enumerate() {
        summaries.extend(add_recording(&mut data, path, &lengths[index..])?);
    }
    page::write(&mut data, &target)?;
    if prints_page {
        return Ok(());
    }
    if args.open {
        open(&target)?;
    }
    match &*summaries {
        [] => {}
        [summary] => output::print(&(text::one(summary) + "\n"))?,
        _ => output::print(&(text::several(&summaries) + "\n"))?,
    }
    output::print(&path_line(&target))
}

/// Returns a path as one line of output. Control characters are escaped. On a terminal, bytes that are not UTF-8
/// are escaped too; elsewhere they stay, so that a program can open the path.
fn path_line(path: &Path) -> Vec<u8> {
    let mut line = Vec::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        line.extend(OneLine(chunk.valid()).to_string().into_bytes());
        let escaped = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}"));
        if io::stdout().is_terminal() {
            line.extend(escaped.collect::<String>().into_bytes())
        } else {
            line.extend(chunk.invalid())
        }
    }
    line.push(b'\n');
    line
}

/// Returns the default name of a recording's page: in the working directory, without the extensions for the
/// recording's format and compression.
fn default_output(trace: &Path) -> PathBuf {
    let mut path = PathBuf::from(trace.file_name().unwrap_or_default());
    // A page that `torch.cuda._memory_viz` wrote must not be overwritten.
    let mut is_page = false;
    for extension in [
        "zst", "gz", "xz", "bz2", "pickle", "lowtide", "json", "html", "pt",
    ] {
        if path.extension().is_some_and(|known| known == extension) {
            path.set_extension("");
            is_page |= extension == "html";
        }
    }
    let mut name = path.into_os_string();
    match name.as_encoded_bytes() {
        b"" | b"-" => "report.html".into(),
        _ => {
            name.push(if is_page { ".report.html" } else { ".html" });
            name.into()
        }
    }
}

/// Adds to the page every device of the recording at `path` that allocated or held memory, and then pinned host
/// memory. `lengths` are the lengths of this file and of the files after it. Returns the summary of each device that made
/// requests, for a terminal.
fn add_recording(data: &mut PageData, path: &Path, lengths: &[u64]) -> Result<Vec<Summary>> {
    let file = RecordedFile::read(path)?;
    let (name, snapshot) = (&file.name, &file.snapshot);
    let traces = snapshot.traces.iter().filter(|trace| trace.is_used());
    let mut traces: Vec<&Trace> = traces.collect();
    let devices = traces.len();
    traces.extend(&snapshot.host);
    if traces.is_empty() {
        bail!(file.nothing_recorded());
    }
    output::notes(&file.missing_notes());
    let mut lengths = lengths_of(&traces, lengths);
    let mut summaries = Vec::new();
    for (index, trace) in traces.iter().enumerate() {
        let is_host = index >= devices;
        let label = if is_host {
            format!("{}, pinned host memory", trace_name(name, trace, 1))
        } else {
            trace_name(name, trace, devices)
        };
        let progress = Progress::new("replaying", trace.events.len() as u64);
        let limit = ImpliedLimit::of(trace);
        let (findings, results) = rayon::join(
            || Findings::of(trace, is_host, &progress),
            || replay_all(trace, is_host, limit.as_ref(), &progress),
        );
        drop(progress);
        let outcomes = results.iter().filter_map(|result| result.as_ref().ok());
        let replayed = outcomes.map(|outcome| (ranking::label(outcome), outcome));
        let replayed: Vec<(String, &Outcome)> = replayed.collect();
        let failures = results.iter().filter_map(|result| result.as_ref().err());
        let failures = failures.map(ToString::to_string);
        let limit_note = limit.as_ref().map(recording::limit_text);
        let replay_notes = recording::replay_notes(trace).into_iter().chain(limit_note);
        let replay_notes = replay_notes.filter(|_| !replayed.is_empty());
        let notes: Vec<String> = replay_notes.chain(failures).collect();
        for note in &notes {
            output::note(&format!("{label}: {note}"));
        }
        let is_bounded = !replayed.is_empty() && !trace.has_pauses();
        let at_least = is_bounded.then(|| job::at_least(trace.peak_live_bytes()));
        let notes: Vec<String> = at_least.into_iter().chain(notes).collect();
        let page_trace = PageTrace {
            name: &label,
            trace,
            is_host,
            sizes: &findings.sizes,
            history: &findings.history,
            replayed: &replayed,
            replay_notes: &notes,
            leaks: &findings.leaks,
            is_cut_off: snapshot.is_cut_off,
            lengths: &lengths,
        };
        page::add(data, &page_trace);
        lengths.remove(0);
        if !results.is_empty() && io::stdout().is_terminal() {
            let job = Job::of_trace(path, trace, snapshot.is_cut_off);
            let others = others(trace, results);
            summaries.push(Summary::new(job, trace, findings, limit, others));
        }
    }
    Ok(summaries)
}

/// Returns the results that a summary has.
fn others(trace: &Trace, results: Vec<Replayed>) -> Vec<Replayed> {
    let configs = figures::other_configs(trace);
    let labels: Vec<String> = configs.iter().map(Config::to_string).collect();
    let is_other = |result: &Replayed| match result {
        Ok(outcome) => labels.contains(&ranking::label(outcome)),
        Err(failure) => configs.contains(&failure.config),
    };
    results.into_iter().filter(is_other).collect()
}

/// Returns the first of `lengths`, divided among the traces by their events and initial blocks, and then the other
/// lengths.
fn lengths_of(traces: &[&Trace], lengths: &[u64]) -> Vec<u64> {
    let weight = |trace: &Trace| (trace.events.len() + trace.initial.blocks.len()) as u128;
    let all: u128 = traces.iter().map(|trace| weight(trace)).sum();
    let part = |trace: &&Trace| {
        let part = u128::from(lengths[0]) * weight(trace) / all.max(1);
        u64::try_from(part).unwrap_or(u64::MAX)
    };
    let following = lengths[1..].iter().copied();
    traces.iter().map(part).chain(following).collect()
}

/// Returns the result with each allocator, under the limit that the job had. None if no request is recorded, and for host
/// memory, whose allocators cannot be replayed.
fn replay_all(
    trace: &Trace,
    is_host: bool,
    limit: Option<&ImpliedLimit>,
    progress: &Progress,
) -> Vec<Replayed> {
    if is_host || trace.allocs() == 0 {
        return Vec::new();
    }
    let configs: Vec<Config> = args::all_configs().collect();
    let options = Options {
        capacity: limit.map(|limit| limit.least),
        timeline_points: TIMELINE_POINTS,
        ..Options::default()
    };
    progress.extend(trace.events.len() as u64 * configs.len() as u64);
    let steps = lowtide_replay::Job::new(trace);
    replays::replay_all(&steps, &configs, &options, progress)
}

/// Opens the page with the program that shows pages on this machine.
fn open(page: &Path) -> Result<()> {
    let program = if cfg!(target_os = "macos") {
        "open"
    } else {
        "xdg-open"
    };
    let name = page.display();
    let failed = || format!("{program}: cannot open {name}; open it in a browser");
    let mut command = Command::new(program);
    command
        .arg(page)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut started = command.spawn().with_context(failed)?;
    let until = Instant::now() + OPENING;
    while Instant::now() < until {
        match started.try_wait().with_context(failed)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(anyhow!("{status}").context(failed())),
            None => thread::sleep(Duration::from_millis(10)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_named_after_the_recording() {
        let check = |trace: &str, expected: &str| {
            assert_eq!(
                default_output(Path::new(trace)),
                Path::new(expected),
                "{trace}"
            );
        };
        check("dir/job.pickle.zst", "job.html");
        check("job.expandable.pickle", "job.expandable.html");
        check("job.lowtide.gz", "job.html");
        check("job.pickle.xz", "job.html");
        check("viz/job.html", "job.report.html");
        check("job.html.gz", "job.report.html");
        check("-", "report.html");
    }
}
