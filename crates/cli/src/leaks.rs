//! `lowtide leaks`: what grows from step to step.

use std::fmt::Write as _;

use anyhow::Result;
use console::style;
use lowtide_core::Bytes;
use lowtide_history::{BlockSizes, Growth, History, Leaks, StepSource, Trend};
use lowtide_trace::{StackTable, Trace};
use serde::Serialize;

use crate::args::LeaksArgs;
use crate::recording::{self, Job};
use crate::sites::{SiteRow, StepsRow, site_text, steps_text};
use crate::{format, json, output};

/// So many leaks are told one by one; the JSON has all.
const LEAKS_MAX: usize = 20;

/// So many of the places that share growth are told.
const SPREAD_PLACES: usize = 3;

/// Carries out `lowtide leaks`.
///
/// # Errors
///
/// If an argument or the recording is bad.
pub(crate) fn run(args: &LeaksArgs) -> Result<()> {
    let trace = recording::read_device(&args.trace, args.device)?;
    recording::note_lost_beginning(&args.trace, &trace);
    // How much blocks are rounded does not tell what grows.
    let history = History::new(&trace, &BlockSizes::estimated(&trace));
    let leaks = Leaks::find(&trace, &history);
    let job = Job::of_history(&args.trace, &trace, &history);
    output::print(&match args.json {
        true => json::text(&LeaksReport::new(&job, &leaks, &trace))?,
        false => text(&job, &leaks, &trace),
    })
}

fn text(job: &Job, leaks: &Leaks, trace: &Trace) -> String {
    let mut text = format!("{}\n{}", job.headline(), steps_text(&leaks.steps));
    let _ = match leaks.warm_up_steps {
        1 => writeln!(text, "; the first is left out\n"),
        count => writeln!(text, "; the first {count} are left out\n"),
    };
    let named = leaks.leaks().count();
    for growth in leaks.leaks().take(LEAKS_MAX) {
        text += &growth_text(growth, leaks, &trace.stacks);
    }
    let is_told = leaks.spread.as_ref().is_some_and(Trend::is_steady);
    if named == 0 && !is_told && leaks.steps.are_too_few() {
        let events = format::counted(job.events as u64, "event");
        let verb = if job.events == 1 { "is" } else { "are" };
        let unknown = format!("it cannot be told what grows: {events} {verb} too few");
        let _ = writeln!(text, "{}", style(unknown).bold());
    } else if named == 0 && !is_told {
        let _ = writeln!(text, "{}", style("no leak: nothing grows steadily").bold());
    } else if named > LEAKS_MAX {
        let others = format::counted((named - LEAKS_MAX) as u64, "smaller leak");
        let _ = writeln!(text, "and {others}, which --json lists\n");
    }
    if let Some(spread) = &leaks.spread {
        text += &spread_text(spread, leaks, &trace.stacks);
    }
    let others = leaks.others().count() as u64;
    if others > 0 {
        let places = format::counted(others, "place");
        let verb = if others == 1 { "has" } else { "have" };
        let _ = writeln!(
            text,
            "{places} {verb} more than after the first steps, but no steady growth (--json lists them)"
        );
    }
    text
}

fn growth_text(growth: &Growth, leaks: &Leaks, stacks: &StackTable) -> String {
    let trend = trend_text(&growth.trend, leaks);
    format!("{trend}\n{}\n", site_text(growth.site, stacks))
}

/// Returns what there is to say of all that is in no leak, which grew together.
fn spread_text(spread: &Trend, leaks: &Leaks, stacks: &StackTable) -> String {
    let verdict = match (spread.is_steady(), leaks.leaks().next()) {
        (true, None) => "no place grows steadily, but all that is live does",
        (true, Some(_)) => "all else that is live grows steadily, too, though no other place does",
        (false, None) => "all that is live grew, but not steadily",
        (false, Some(_)) => "all else that is live grew, too, but not steadily",
    };
    let mut text = format!(
        "{verdict}, {}:\n{}\n",
        looked_at_text(leaks),
        trend_text(spread, leaks)
    );
    let places = leaks.others().count();
    if places > 1 {
        let places = format::counted(places as u64, "place");
        let _ = writeln!(text, "spread over {places}, of which grew most:");
    }
    text.push('\n');
    for growth in leaks.others().take(SPREAD_PLACES) {
        text += &growth_text(growth, leaks, stacks);
    }
    text
}

/// Returns from which step to which growth is looked at.
fn looked_at_text(leaks: &Leaks) -> String {
    let what = match leaks.steps.source {
        StepSource::Parts => "part",
        _ => "step",
    };
    let first = format::count(leaks.warm_up_steps as u64 + 1);
    let last = format::count(leaks.steps.len() as u64);
    format!("from {what} {first} to {what} {last}")
}

fn trend_text(trend: &Trend, leaks: &Leaks) -> String {
    let (step, what) = match leaks.steps.source {
        StepSource::Parts => (
            format!("in 1/{} of the recording", leaks.steps.len()),
            "parts",
        ),
        _ if leaks.span_steps == 1 => ("a step".to_owned(), "steps"),
        _ => ("a step".to_owned(), "spans of steps"),
    };
    let headline = format!("{} {step}", bytes_text(trend.bytes_per_step));
    let given_back = match trend.times_given_back {
        0 => String::new(),
        times => format!(", was given back {}", format::counted(times as u64, "time")),
    };
    format!(
        "{}: {} in all, grew in {} of {} {what}{given_back}, confidence {:.2}; {} in {} at the end",
        style(headline).bold(),
        Bytes(trend.bytes),
        format::count(trend.grown_steps as u64),
        format::count(trend.steps as u64),
        trend.confidence,
        Bytes(trend.end_bytes),
        format::counted(trend.end_blocks, "block"),
    )
}

/// Returns an average number of bytes for people.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "averages of sizes are no larger than sizes"
)]
pub(crate) fn bytes_text(bytes: f64) -> String {
    Bytes(bytes.round() as u64).to_string()
}

/// What `lowtide leaks --json` prints.
#[derive(Debug, Serialize)]
struct LeaksReport<'a> {
    trace: &'a Job,
    steps: StepsRow<'a>,
    /// Whether there are too few events for anything to be told.
    are_too_few: bool,
    warm_up_steps: usize,
    /// So many steps are looked at as one.
    span_steps: usize,
    leaks: Vec<GrowthRow<'a>>,
    /// How all that is in no leak grew together, where that is steady or much.
    spread: Option<TrendRow>,
    /// What has more than after the first steps, but is not sure to go on growing; what grew most comes first.
    others: Vec<GrowthRow<'a>>,
}

#[derive(Debug, Serialize)]
struct GrowthRow<'a> {
    #[serde(flatten)]
    trend: TrendRow,
    #[serde(flatten)]
    site: SiteRow<'a>,
}

#[derive(Debug, Serialize)]
struct TrendRow {
    bytes: u64,
    bytes_per_step: f64,
    grown_steps: usize,
    steps: usize,
    /// How many times most of what had grown was given back.
    times_given_back: usize,
    confidence: f64,
    end_bytes: u64,
    end_blocks: u64,
}

impl<'a> LeaksReport<'a> {
    fn new(job: &'a Job, leaks: &'a Leaks, trace: &'a Trace) -> LeaksReport<'a> {
        let row = |growth| GrowthRow::new(growth, &trace.stacks);
        LeaksReport {
            trace: job,
            steps: StepsRow::new(&leaks.steps),
            are_too_few: leaks.steps.are_too_few(),
            warm_up_steps: leaks.warm_up_steps,
            span_steps: leaks.span_steps,
            leaks: leaks.leaks().map(row).collect(),
            spread: leaks.spread.as_ref().map(TrendRow::new),
            others: leaks.others().map(row).collect(),
        }
    }
}

impl<'a> GrowthRow<'a> {
    fn new(growth: &Growth, stacks: &'a StackTable) -> GrowthRow<'a> {
        GrowthRow {
            trend: TrendRow::new(&growth.trend),
            site: SiteRow::new(growth.site, stacks),
        }
    }
}

impl TrendRow {
    fn new(trend: &Trend) -> TrendRow {
        TrendRow {
            bytes: trend.bytes,
            bytes_per_step: trend.bytes_per_step,
            grown_steps: trend.grown_steps,
            steps: trend.steps,
            times_given_back: trend.times_given_back,
            confidence: trend.confidence,
            end_bytes: trend.end_bytes,
            end_blocks: trend.end_blocks,
        }
    }
}
