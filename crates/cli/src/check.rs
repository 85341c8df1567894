//! `lowtide check`: whether a job keeps to limits, for continuous integration.

mod finding;
mod junit;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use lowtide_core::Bytes;
use lowtide_history::{BlockSizes, History, Leaks};

use crate::args::CheckArgs;
use crate::job::Job;
use crate::recording::{self, Recording};
use crate::{format, leaks, output};
use finding::Finding;

/// The figures of one device that are checked.
struct Measured {
    job: Job,
    leaks: Leaks,
    out_of_memory: usize,
}

/// Runs `lowtide check`. The exit code is 1 if a check failed.
///
/// # Errors
///
/// If an argument or a recording is bad, or the JUnit file cannot be written.
pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode> {
    if !args.asks_for_any() {
        bail!(
            "nothing to check: name a limit, such as --max-reserved 40GiB, --no-oom or --no-leak"
        );
    }
    let recordings = args.against.iter().chain([&args.trace]);
    let recordings: Vec<PathBuf> = recordings.cloned().collect();
    recording::refuse_stdin_twice(&recordings)?;
    if let Some(file) = &args.junit {
        output::refuse_recordings(file, &recordings, "the JUnit report")?;
    }
    let baseline = args
        .against
        .as_ref()
        .map(|path| measure(path))
        .transpose()?;
    let mut findings = Vec::new();
    for measured in measure(&args.trace)? {
        findings.extend(limits(args, &measured));
        if let Some(baseline) = &baseline {
            findings.extend(comparisons(args, &measured, baseline)?);
        }
    }
    if let Some(file) = &args.junit {
        output::write_file(file, |writer| junit::write(&findings, writer))?;
    }
    let lines: String = findings.iter().map(Finding::line).collect();
    output::print(&lines)?;
    let all_passed = findings.iter().all(|finding| finding.passed);
    Ok(ExitCode::from(u8::from(!all_passed)))
}

/// Returns the figures of each device.
fn measure(path: &Path) -> Result<Vec<Measured>> {
    let measure = |mut recording: Recording| {
        recording.note_lost_beginning();
        output::notes(&recording.notes);
        let trace = &recording.trace;
        let history = History::new(trace, &BlockSizes::estimated(trace));
        Measured {
            job: Job::new(&recording).with_history(&history),
            leaks: Leaks::find(trace, &history),
            out_of_memory: history.refusals.len(),
        }
    };
    let recordings = Recording::open_all(path, None)?;
    Ok(recordings.into_iter().map(measure).collect())
}

/// Returns what the checks against fixed limits found.
fn limits(args: &CheckArgs, measured: &Measured) -> Vec<Finding> {
    let job = &measured.job;
    let at_most = |name, what, bytes: Bytes, limit: Option<Bytes>| {
        let limit = limit?;
        let what = format!("{what} {bytes}, at most {limit} allowed");
        Some(Finding::new(name, job, bytes <= limit, what))
    };
    let fragmentation = args.max_fragmentation.map(|limit| {
        let unused = job.peak_reserved_bytes.saturating_sub(job.peak_live_bytes);
        let share = format::ratio(unused, job.peak_reserved_bytes.max(Bytes(1)));
        let [share_text, limit_text] = [share, limit].map(format::percent);
        let what = format!(
            "{share_text} of the peak of reserved memory is above the peak of live bytes, at most {limit_text} allowed"
        );
        Finding::new("--max-fragmentation", job, share <= limit, what)
    });
    let leak = args.no_leak.then(|| {
        let passed = leaks::is_without(&measured.leaks);
        Finding::new("--no-leak", job, passed, leaks::verdict(&measured.leaks))
    });
    let out_of_memory = args.no_oom.then(|| {
        let count = measured.out_of_memory;
        let requests = format::counted(count as u64, "request");
        Finding::new(
            "--no-oom",
            job,
            count == 0,
            format!("{requests} ran out of memory"),
        )
    });
    let (allocated, reserved) = (job.peak_live_bytes, job.peak_reserved_bytes);
    let found = [
        at_most(
            "--max-allocated",
            "peak live",
            allocated,
            args.max_allocated,
        ),
        at_most(
            "--max-reserved",
            "peak reserved",
            reserved,
            args.max_reserved,
        ),
        fragmentation,
        leak,
        out_of_memory,
    ];
    found.into_iter().flatten().collect()
}

/// Returns what the checks against the same device of an earlier recording found.
///
/// # Errors
///
/// If that has no such device.
fn comparisons(
    args: &CheckArgs,
    measured: &Measured,
    baseline: &[Measured],
) -> Result<[Finding; 2]> {
    let job = &measured.job;
    let mut devices = baseline.iter().map(|measured| &measured.job);
    let Some(before) = devices.find(|before| before.device == job.device) else {
        bail!(
            "the baseline has no device {}, which {} has",
            job.device,
            job.path
        );
    };
    let compared = |what, of: fn(&Job) -> Bytes| {
        let [before, after] = [before, job].map(of);
        let limit = before.scale(1.0 + args.tolerance);
        let tolerance = format::percent(args.tolerance);
        let what =
            format!("{what} {after}, {before} in the baseline, at most {tolerance} more allowed");
        Finding::new("--against", job, after <= limit, what)
    };
    Ok([
        compared("peak live", |job| job.peak_live_bytes),
        compared("peak reserved", |job| job.peak_reserved_bytes),
    ])
}
