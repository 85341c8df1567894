//! `lowtide leaks`: what grows from step to step.

use std::fmt::Write as _;

use anyhow::Result;
use console::style;
use lowtide_core::Bytes;
use lowtide_history::{BlockSizes, Growth, History, Leaks};
use lowtide_trace::{StackTable, Trace};
use serde::Serialize;

use crate::args::LeaksArgs;
use crate::recording::{self, Job};
use crate::sites::{SiteRow, StepsRow, site_text, steps_text};
use crate::{format, json, output};

/// So many leaks are told one by one; the JSON has all.
const LEAKS_MAX: usize = 20;

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
        text += &growth_text(growth, leaks.span_steps, &trace.stacks);
    }
    if named == 0 {
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

fn growth_text(growth: &Growth, span_steps: usize, stacks: &StackTable) -> String {
    let what = if span_steps == 1 {
        "steps"
    } else {
        "spans of steps"
    };
    let headline = format!("{} a step", bytes_text(growth.bytes_per_step));
    format!(
        "{}: {} in all, grew in {} of {} {what}, confidence {:.2}; {} in {} at the end\n{}\n",
        style(headline).bold(),
        Bytes(growth.bytes),
        format::count(growth.grown_steps as u64),
        format::count(growth.steps as u64),
        growth.confidence,
        Bytes(growth.end_bytes),
        format::counted(growth.end_blocks, "block"),
        site_text(growth.site, stacks),
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
    /// What has more than after the first steps, but is not sure to go on growing.
    others: Vec<GrowthRow<'a>>,
}

#[derive(Debug, Serialize)]
struct GrowthRow<'a> {
    bytes: u64,
    bytes_per_step: f64,
    grown_steps: usize,
    steps: usize,
    confidence: f64,
    end_bytes: u64,
    end_blocks: u64,
    #[serde(flatten)]
    site: SiteRow<'a>,
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
            others: rows(false),
        }
    }
}

impl<'a> GrowthRow<'a> {
    fn new(growth: &Growth, stacks: &'a StackTable) -> GrowthRow<'a> {
        GrowthRow {
            bytes: growth.bytes,
            bytes_per_step: growth.bytes_per_step,
            grown_steps: growth.grown_steps,
            steps: growth.steps,
            confidence: growth.confidence,
            end_bytes: growth.end_bytes,
            end_blocks: growth.end_blocks,
            site: SiteRow::new(growth.site, stacks),
        }
    }
}
