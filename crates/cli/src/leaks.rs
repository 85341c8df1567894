//! `lowtide leaks`: memory that grows from step to step.

use std::fmt::Write as _;

use anyhow::Result;
use console::style;
use lowtide_core::Bytes;
use lowtide_history::{BlockSizes, Growth, History, Leaks, StepSource, TrainingState, Trend};
use lowtide_trace::{Frame, StackTable};
use serde::Serialize;

use crate::args::LeaksArgs;
use crate::job::Job;
use crate::recording::Recording;
use crate::sites::frames::{self, Common};
use crate::sites::{SiteRow, Sizes, StepsRow, site_texts, stack_of, steps_text};
use crate::{format, json, output};

/// The number of leaks described one by one. The JSON has all.
const LEAKS_MAX: usize = 20;

/// The number of call sites named for growth that many share.
const SPREAD_SITES: usize = 3;

const SPREAD_IS_STEADY: &str = "no call site grows steadily, but all that is live does";

/// Runs `lowtide leaks`.
///
/// # Errors
///
/// If an argument or the recording is bad.
pub(crate) fn run(args: &LeaksArgs) -> Result<()> {
    let mut recording = Recording::open(&args.recording.trace, args.recording.device)?;
    recording.note_lost_beginning();
    output::notes(&recording.notes);
    let trace = &recording.trace;
    // Rounding does not change which call sites grow, so the sizes of blocks are estimated.
    let history = History::new(trace, &BlockSizes::estimated(trace));
    let leaks = Leaks::find(trace, &history);
    let job = Job::new(&recording).with_history(&history);
    let histories = [history];
    let findings = Findings {
        leaks: &leaks,
        stacks: &trace.stacks,
        sizes: Sizes::new(&histories, false),
    };
    output::print(&if args.json {
        json::text(&LeaksReport::new(&job, &findings))?
    } else {
        findings.text(&job)
    })
}

/// The leaks to describe, and the tables that name their call sites.
struct Findings<'a> {
    leaks: &'a Leaks,
    stacks: &'a StackTable,
    sizes: Sizes,
}

/// All leaks taken together.
#[derive(Clone, Copy, Debug, Serialize)]
struct Total<'a> {
    sites: usize,
    bytes: u64,
    bytes_per_step: f64,
    confidence_min: f64,
    confidence_max: f64,
    /// The function outside of libraries that all are called from.
    common: Option<Common<'a>>,
}

impl<'a> Findings<'a> {
    fn text(&self, job: &Job) -> String {
        let leaks = self.leaks;
        let mut text = format!("{}\n{}", job.headline(), steps_text(&leaks.steps));
        let _ = match leaks.warm_up_steps {
            _ if leaks.steps.are_too_few() => writeln!(text, "\n"),
            1 => writeln!(text, "; the first is left out\n"),
            count => writeln!(text, "; the first {count} are left out\n"),
        };
        let spread_is_steady = leaks.spread.as_ref().is_some_and(Trend::is_steady);
        let verdict = style(verdict(leaks)).bold();
        match self.total() {
            Some(total) => text += &format!("{verdict}, {}\n\n", total_text(&total)),
            // Further down, the growth of all that is live has its own sentence.
            None if spread_is_steady && leaks.doubt.is_none() => {}
            None => text += &format!("{verdict}\n"),
        }
        text += &training_text(&leaks.training);
        text += &self.growths_text(leaks.leaks().take(LEAKS_MAX));
        let named = leaks.leaks().count();
        if named > LEAKS_MAX {
            let others = format::counted((named - LEAKS_MAX) as u64, "smaller leak");
            let _ = writeln!(text, "and {others}, which --json lists\n");
        }
        if let Some(spread) = &leaks.spread {
            text += &self.spread_text(spread);
        }
        let others = leaks.others().count() as u64;
        if others > 0 {
            let sites = format::counted(others, "call site");
            let verb = if others == 1 { "has" } else { "have" };
            let _ = writeln!(
                text,
                "{sites} {verb} more than after the first steps, but no steady growth (--json lists them)"
            );
        }
        text
    }

    /// Returns all leaks taken together; `None` if there are none.
    fn total(&self) -> Option<Total<'a>> {
        let leaks: Vec<&Growth> = self.leaks.leaks().collect();
        let trends = || leaks.iter().map(|leak| leak.trend);
        let confidences = || trends().map(|trend| trend.confidence);
        let stacks = leaks.iter().map(|leak| stack_of(leak.site, self.stacks));
        let stacks: Vec<Vec<Frame<'a>>> = stacks.collect();
        Some(Total {
            sites: leaks.len(),
            bytes: trends().map(|trend| trend.bytes).sum(),
            bytes_per_step: trends().map(|trend| trend.bytes_per_step).sum(),
            confidence_min: confidences().reduce(f64::min)?,
            confidence_max: confidences().reduce(f64::max)?,
            common: frames::common(&stacks),
        })
    }

    fn growths_text<'g>(&self, growths: impl Iterator<Item = &'g Growth>) -> String {
        let growths: Vec<&Growth> = growths.collect();
        let sites = growths.iter().map(|growth| (growth.site, self.stacks));
        let texts = site_texts(&sites.collect::<Vec<_>>(), &self.sizes);
        let named = growths.iter().zip(texts);
        named
            .map(|(growth, site)| format!("{}\n{site}\n", self.trend_text(&growth.trend)))
            .collect()
    }

    /// Returns the text about growth outside of the leaks, shared by many call sites.
    fn spread_text(&self, spread: &Trend) -> String {
        let leaks = self.leaks;
        let verdict = match (spread.is_steady(), leaks.leaks().next()) {
            (true, None) => SPREAD_IS_STEADY,
            (true, Some(_)) => {
                "all else that is live grows steadily, too, though no other call site does"
            }
            (false, None) => "all that is live grew, but not steadily",
            (false, Some(_)) => "all else that is live grew, too, but not steadily",
        };
        let mut text = format!(
            "{verdict}, {}:\n{}\n",
            self.looked_at_text(),
            self.trend_text(spread)
        );
        let sites = leaks.others().count();
        if sites > 1 {
            let sites = format::counted(sites as u64, "call site");
            let _ = writeln!(text, "spread over {sites}, of which grew most:");
        }
        text.push('\n');
        text + &self.growths_text(leaks.others().take(SPREAD_SITES))
    }

    /// Returns the range of steps in which growth is measured.
    fn looked_at_text(&self) -> String {
        let what = match self.leaks.steps.source {
            StepSource::Parts => "part",
            _ => "step",
        };
        let first = format::count(self.leaks.warm_up_steps as u64 + 1);
        let last = format::count(self.leaks.steps.len() as u64);
        format!("from {what} {first} to {what} {last}")
    }

    fn trend_text(&self, trend: &Trend) -> String {
        let what = match self.leaks.steps.source {
            StepSource::Parts => "parts",
            _ if self.leaks.span_steps == 1 => "steps",
            _ => "spans of steps",
        };
        let headline = format!(
            "{} {}",
            bytes_text(trend.bytes_per_step),
            step_text(self.leaks)
        );
        let given_back = match trend.times_given_back {
            0 => String::new(),
            times => format!(", was given back {}", format::counted(times as u64, "time")),
        };
        let at_end = match trend.end_blocks {
            0 => "none of it".to_owned(),
            blocks => {
                let blocks = format::counted(blocks, "block");
                format!("{} in {blocks}", Bytes(trend.end_bytes))
            }
        };
        format!(
            "{}: {} in all, grew in {} of {} {what}{given_back}, confidence {:.2}; {at_end} at the end",
            style(headline).bold(),
            Bytes(trend.bytes),
            format::count(trend.grown_steps as u64),
            format::count(trend.steps as u64),
            trend.confidence,
        )
    }
}

/// Returns a sentence about what grows, without a full stop, as on the page of `lowtide report`.
pub(crate) fn verdict(leaks: &Leaks) -> String {
    let found = leaks.leaks().count();
    let are_parts = leaks.steps.source == StepSource::Parts;
    let from = if are_parts {
        "from part to part of the recording"
    } else {
        "from step to step"
    };
    match leaks.doubt {
        _ if found > 0 => {
            let sites = format::counted(found as u64, "call site");
            let verb = if found == 1 { "grows" } else { "grow" };
            let by: f64 = leaks.leaks().map(|leak| leak.trend.bytes_per_step).sum();
            format!(
                "{sites} {verb} {from}, by {} {}",
                bytes_text(by),
                step_text(leaks)
            )
        }
        Some(doubt) => doubt.to_string(),
        None if leaks.spread.as_ref().is_some_and(Trend::is_steady) => SPREAD_IS_STEADY.to_owned(),
        // A part holds a few steps or passes, or less than one.
        None if are_parts => {
            "nothing grows steadily from part to part; record more steps, or mark them, to be sure"
                .to_owned()
        }
        None => "no leak: nothing grows steadily".to_owned(),
    }
}

/// Returns whether it is known that nothing leaks.
pub(crate) fn is_without(leaks: &Leaks) -> bool {
    let is_known = leaks.doubt.is_none() && !leaks.steps.are_too_few();
    let is_spread = leaks.spread.as_ref().is_some_and(Trend::is_steady);
    is_known && !is_spread && leaks.leaks().next().is_none()
}

/// Returns the unit in which growth is counted.
fn step_text(leaks: &Leaks) -> String {
    match leaks.steps.source {
        StepSource::Parts => format!("in 1/{} of the recording", leaks.steps.len()),
        _ => "a step".to_owned(),
    }
}

/// Returns how sure the leaks are, and the frame that they share.
fn total_text(total: &Total<'_>) -> String {
    let confidences = [total.confidence_min, total.confidence_max];
    let [least, most] = confidences.map(|confidence| format!("{confidence:.2}"));
    let confidence = if least == most {
        most
    } else {
        format!("{least} to {most}")
    };
    let common = match total.common {
        Some(Common { name, file, line }) => match line {
            None => format!("\nall in {name}  {file}"),
            Some(line) => format!("\nall called from {name}  {file}:{line}"),
        },
        None => String::new(),
    };
    format!("with confidence {confidence}{common}")
}

/// Returns a line about the memory that training allocates in few calls and keeps; the empty text if it keeps none.
fn training_text(training: &TrainingState) -> String {
    let named = [
        (training.optimizer, "optimizer state"),
        (training.gradients, "gradients"),
    ];
    let parts = named.iter().filter(|(kept, _)| kept.blocks > 0);
    let parts = parts.map(|(kept, name)| {
        let blocks = format::counted(kept.blocks, "block");
        format!("{} of {name} in {blocks}", Bytes(kept.bytes))
    });
    match parts.collect::<Vec<_>>().join(" and ") {
        kept if kept.is_empty() => kept,
        kept => format!("training keeps {kept}: no leak\n"),
    }
}

/// Formats an average number of bytes for people.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "averages of sizes are no larger than sizes"
)]
pub(crate) fn bytes_text(bytes: f64) -> String {
    Bytes(bytes.round() as u64).to_string()
}

/// The JSON that `lowtide leaks --json` prints.
#[derive(Debug, Serialize)]
struct LeaksReport<'a> {
    trace: &'a Job,
    steps: StepsRow<'a>,
    /// Whether there are too few steps or events for a result.
    are_too_few: bool,
    /// The reason why leaks are unknown, as a sentence.
    doubt: Option<String>,
    warm_up_steps: usize,
    /// The number of steps that are measured together as one.
    span_steps: usize,
    /// All leaks taken together, if there are any.
    total: Option<Total<'a>>,
    leaks: Vec<GrowthRow<'a>>,
    /// The growth of everything outside of the leaks, if it is steady or large.
    spread: Option<TrendRow>,
    /// The memory that training allocates in few calls and keeps.
    training: TrainingRow,
    /// Call sites that hold more than after the first steps, but without steady growth. The largest growth comes
    /// first.
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
    #[serde(flatten)]
    trend: Trend,
    end_bytes: u64,
    end_blocks: u64,
}

#[derive(Debug, Serialize)]
struct TrainingRow {
    state_bytes: u64,
    state_blocks: u64,
    gradient_bytes: u64,
    gradient_blocks: u64,
}

impl<'a> LeaksReport<'a> {
    fn new(job: &'a Job, findings: &Findings<'a>) -> LeaksReport<'a> {
        let leaks = findings.leaks;
        let row = |growth: &Growth| GrowthRow {
            trend: TrendRow::new(&growth.trend),
            site: SiteRow::new(growth.site, findings.stacks, &findings.sizes),
        };
        LeaksReport {
            trace: job,
            steps: StepsRow::new(&leaks.steps),
            are_too_few: leaks.steps.are_too_few(),
            doubt: leaks.doubt.map(|doubt| doubt.to_string()),
            warm_up_steps: leaks.warm_up_steps,
            span_steps: leaks.span_steps,
            total: findings.total(),
            leaks: leaks.leaks().map(row).collect(),
            spread: leaks.spread.as_ref().map(TrendRow::new),
            training: TrainingRow::new(&leaks.training),
            others: leaks.others().map(row).collect(),
        }
    }
}

impl TrainingRow {
    fn new(training: &TrainingState) -> TrainingRow {
        TrainingRow {
            state_bytes: training.optimizer.bytes,
            state_blocks: training.optimizer.blocks,
            gradient_bytes: training.gradients.bytes,
            gradient_blocks: training.gradients.blocks,
        }
    }
}

impl TrendRow {
    fn new(trend: &Trend) -> TrendRow {
        TrendRow {
            trend: *trend,
            end_bytes: trend.end_bytes,
            end_blocks: trend.end_blocks,
        }
    }
}
