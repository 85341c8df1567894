//! `lowtide diff`: the call sites with more memory in one recording than in another.

mod figures;

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;
use console::style;
use lowtide_core::Bytes;
use lowtide_history::{BlockSizes, Difference, History, Site, SiteDifference};
use lowtide_trace::{StackTable, Trace};
use serde::Serialize;

use crate::args::DiffArgs;
use crate::job::Job;
use crate::leaks::bytes_text;
use crate::moment::MomentRow;
use crate::recording::{self, Recording};
use crate::sites::{SiteRow, Sizes, StepsRow, site_texts, steps_text};
use crate::{format, json, output};
use figures::Figures;

/// The number of call sites described one by one. The JSON has all.
const SITES_MAX: usize = 20;

/// Runs `lowtide diff`.
///
/// # Errors
///
/// If an argument or a recording is bad.
pub(crate) fn run(args: &DiffArgs) -> Result<()> {
    recording::refuse_stdin_twice([&args.before, &args.after])?;
    let open = |path: &Path| -> Result<Recording> {
        let mut recording = Recording::open(path, args.device)?;
        recording.note_lost_beginning();
        output::notes(&recording.notes);
        Ok(recording)
    };
    let recordings = [open(&args.before)?, open(&args.after)?];
    let traces = recordings.each_ref().map(|recording| &recording.trace);
    // Rounding does not change which call sites grow, so the sizes of blocks are estimated.
    let histories = traces.map(|trace| History::new(trace, &BlockSizes::estimated(trace)));
    let difference = Difference::new([(traces[0], &histories[0]), (traces[1], &histories[1])]);
    let job = |index: usize| Job::new(&recordings[index]).with_history(&histories[index]);
    let jobs = [job(0), job(1)];
    let [has_before, has_after] = difference.has_stacks;
    let sizes = Sizes::new(&histories, has_before != has_after);
    let figures = Figures::of(&jobs, traces, &histories);
    output::print(&if args.json {
        json::text(&DiffReport::new(&figures, &difference, traces, &sizes))?
    } else {
        text(&figures, &difference, traces, &sizes)
    })
}

/// Returns the call sites that have more or less than before.
fn changed(difference: &Difference) -> impl Iterator<Item = &SiteDifference> {
    let sites = difference.sites.iter();
    sites.filter(|site| site.growth_bytes() != 0)
}

fn text(
    figures: &Figures<'_>,
    difference: &Difference,
    traces: [&Trace; 2],
    sizes: &Sizes,
) -> String {
    let mut text = String::new();
    for (job, steps) in figures.jobs.iter().zip(&difference.steps) {
        let _ = writeln!(text, "{}\n  {}", job.headline(), steps_text(steps));
    }
    let only = match difference.has_stacks {
        [true, false] => Some("first"),
        [false, true] => Some("second"),
        _ => None,
    };
    if let Some(only) = only {
        text += &format!("\nonly the {only} recording has stacks, so both are compared by size\n");
    }
    let changed = || changed(difference);
    text += &figures.text();
    text += "\nlive at the second's peak, compared with the first's:\n";
    let listed = || changed().take(SITES_MAX);
    let names: Vec<_> = listed().map(|site| name(site, traces)).collect();
    for (site, named) in listed().zip(site_texts(&names, sizes)) {
        text += &site_difference_text(site, &named);
    }
    let rest: i64 = changed()
        .skip(SITES_MAX)
        .map(SiteDifference::growth_bytes)
        .sum();
    let others = changed().skip(SITES_MAX).count();
    if others > 0 {
        let sites = format::counted(others as u64, "other call site");
        let _ = writeln!(text, "{} in {sites}, which --json lists", signed(rest));
    }
    let moved = difference.sites.iter().filter(|site| site.lines_differ);
    let moved = moved.count() as u64;
    if moved > 0 {
        let sites = format::counted(moved, "call site");
        let _ = writeln!(
            text,
            "{sites} matched by file and function: the code is at other lines in the second recording"
        );
    }
    let total: i64 = changed().map(SiteDifference::growth_bytes).sum();
    let total = format!("{} in all", signed(total));
    let _ = writeln!(text, "{}", style(total).bold());
    text
}

fn site_difference_text(site: &SiteDifference, named: &str) -> String {
    let [before, after] = site.peak_bytes.map(Bytes);
    let [before_step, after_step] = site.bytes_per_step.map(bytes_text);
    let [before_blocks, after_blocks] = site.peak_blocks.map(format::count);
    let matched = if site.lines_differ {
        "; at other lines in the first"
    } else {
        ""
    };
    format!(
        "{}: {before} → {after} in {before_blocks} → {after_blocks} blocks; asks for {before_step} → \
         {after_step} a step; confidence {:.2}{matched}\n{named}",
        style(signed(site.growth_bytes())).bold(),
        site.confidence.abs(),
    )
}

/// Returns the call site and the stacks of the recording that names it.
fn name<'t>(difference: &SiteDifference, traces: [&'t Trace; 2]) -> (Site, &'t StackTable) {
    match difference.site {
        [_, Some(site)] => (site, &traces[1].stacks),
        [Some(site), None] => (site, &traces[0].stacks),
        [None, None] => unreachable!("a site is in one of the recordings"),
    }
}

/// Returns a number of bytes with its sign.
fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { '-' } else { '+' };
    format!("{sign}{}", Bytes(bytes.unsigned_abs()))
}

/// The JSON that `lowtide diff --json` prints. In each pair, the first recording comes first.
#[derive(Debug, Serialize)]
struct DiffReport<'a> {
    traces: &'a [Job; 2],
    /// The instants of the peak reserved bytes.
    peak_reserved: [MomentRow; 2],
    /// The number of times that memory was released to the driver.
    released: [usize; 2],
    /// The number of requests for which memory had to be released first; null if no stacks show that.
    retries: [Option<usize>; 2],
    /// The number of requests that failed.
    out_of_memory: [usize; 2],
    /// What most of the difference in reserved bytes is due to.
    reason: String,
    steps: [StepsRow<'a>; 2],
    /// If only one recording has stacks, both are compared by size.
    has_stacks: [bool; 2],
    total: TotalRow,
    /// The largest change comes first.
    sites: Vec<SiteDifferenceRow<'a>>,
}

/// All call sites taken together.
#[derive(Debug, Serialize)]
struct TotalRow {
    growth_bytes: i64,
    peak_bytes: [u64; 2],
    peak_blocks: [u64; 2],
    /// The number of call sites that have more or less than before. These are listed.
    changed_sites: usize,
    /// The number of call sites that have as much as before. These are left out.
    unchanged_sites: usize,
}

#[derive(Debug, Serialize)]
struct SiteDifferenceRow<'a> {
    growth_bytes: i64,
    peak_bytes: [u64; 2],
    peak_blocks: [u64; 2],
    /// The bytes requested in a step, on average, including memory freed in the step.
    requested_bytes_per_step: [f64; 2],
    /// From -1, each step of the second recording holds less, to 1, each holds more.
    confidence: f64,
    /// Whether it was matched by file and function because its lines differ. The lines of `stack` are the second
    /// recording's.
    lines_differ: bool,
    #[serde(flatten)]
    site: SiteRow<'a>,
}

impl<'a> DiffReport<'a> {
    fn new(
        figures: &'a Figures<'a>,
        difference: &'a Difference,
        traces: [&'a Trace; 2],
        sizes: &Sizes,
    ) -> DiffReport<'a> {
        let row = |site: &SiteDifference| {
            let (site_id, stacks) = name(site, traces);
            SiteDifferenceRow {
                growth_bytes: site.growth_bytes(),
                peak_bytes: site.peak_bytes,
                peak_blocks: site.peak_blocks,
                requested_bytes_per_step: site.bytes_per_step,
                confidence: site.confidence,
                lines_differ: site.lines_differ,
                site: SiteRow::new(site_id, stacks, sizes),
            }
        };
        let [before, after] = &difference.steps;
        DiffReport {
            traces: figures.jobs,
            peak_reserved: figures.peaks.map(MomentRow::new),
            released: figures.released,
            retries: figures.retries,
            out_of_memory: figures.out_of_memory,
            reason: figures.reason(),
            steps: [StepsRow::new(before), StepsRow::new(after)],
            has_stacks: difference.has_stacks,
            total: TotalRow::new(difference),
            sites: changed(difference).map(row).collect(),
        }
    }
}

impl TotalRow {
    fn new(difference: &Difference) -> TotalRow {
        let sites = || difference.sites.iter();
        let sum = |of: fn(&SiteDifference) -> [u64; 2]| {
            let add = |sum: [u64; 2], more: [u64; 2]| [sum[0] + more[0], sum[1] + more[1]];
            sites().map(of).fold([0, 0], add)
        };
        let changed_sites = changed(difference).count();
        TotalRow {
            growth_bytes: sites().map(SiteDifference::growth_bytes).sum(),
            peak_bytes: sum(|site| site.peak_bytes),
            peak_blocks: sum(|site| site.peak_blocks),
            changed_sites,
            unchanged_sites: difference.sites.len() - changed_sites,
        }
    }
}
