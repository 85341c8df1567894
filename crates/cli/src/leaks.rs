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
    if let Some(spread) = &leaks.spread {
        text += &spread_text(spread, leaks, &trace.stacks);
    } else if named == 0 {
        let _ = writeln!(text, "{}", style("no leak: nothing grows steadily").bold());
    } else if named > LEAKS_MAX {
        let others = format::counted((named - LEAKS_MAX) as u64, "smaller leak");
        let _ = writeln!(text, "and {others}, which --json lists");
    }
    let others = (leaks.growths.len() - named) as u64;
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

/// Returns what there is to say of what grows in no place steadily, and in all of them together.
fn spread_text(spread: &Trend, leaks: &Leaks, stacks: &StackTable) -> String {
    let places = format::counted(leaks.growths.len() as u64, "place");
    let mut text = format!(
        "no place grows steadily, but all that is live does:\n{}\nspread over {places}, of which grew most:\n\n",
        trend_text(spread, leaks),
    );
    for growth in leaks.growths.iter().take(SPREAD_PLACES) {
        text += &growth_text(growth, leaks, stacks);
    }
    text
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
    format!(
        "{}: {} in all, grew in {} of {} {what}, confidence {:.2}; {} in {} at the end",
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
    warm_up_steps: usize,
    /// So many steps are looked at as one.
    span_steps: usize,
    leaks: Vec<GrowthRow<'a>>,
    /// How all that is live grew, where that is steady and there is no leak.
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
    confidence: f64,
    end_bytes: u64,
    end_blocks: u64,
}

impl<'a> LeaksReport<'a> {
    fn new(job: &'a Job, leaks: &'a Leaks, trace: &'a Trace) -> LeaksReport<'a> {
        let rows = |is_leak: bool| {
            let growths = leaks.growths.iter();
            let chosen = growths.filter(move |growth| growth.is_leak() == is_leak);
            chosen
                .map(|growth| GrowthRow::new(growth, &trace.stacks))
                .collect()
        };
        LeaksReport {
            trace: job,
            steps: StepsRow::new(&leaks.steps),
            warm_up_steps: leaks.warm_up_steps,
            span_steps: leaks.span_steps,
            leaks: rows(true),
            spread: leaks.spread.as_ref().map(TrendRow::new),
            others: rows(false),
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
            confidence: trend.confidence,
            end_bytes: trend.end_bytes,
            end_blocks: trend.end_blocks,
        }
    }
}
