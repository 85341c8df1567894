//! The text that `lowtide summary` prints.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::path::Path;

use console::style;
use lowtide_core::{Bytes, Cause, Fragmentation};
use lowtide_history::{Category, Held, Kept, Moment, Refusal};
use lowtide_replay::Outcome;
use lowtide_trace::{OneLine, ShellWord};

use super::figures::Summary;
use crate::format::{self, SizeUnit};
use crate::job::Job;
use crate::{leaks, moment, ranking, recording, table};

/// The number of call sites, and of modules, shown, so that a summary fits on a screen. The JSON has all.
const ROWS_MAX: usize = 10;

/// The share of the job's memory that another strategy has to save to be worth a command.
const WORTHWHILE: f64 = 0.01;

/// A job that is shorter than this, in microseconds, is no measure for the time of driver calls.
const SHARE_MIN_US: f64 = 1e6;

/// Returns the summary of one device.
pub(crate) fn one(summary: &Summary) -> String {
    let mut text = format!("{}\n", summary.job.headline());
    if let Some(limit) = &summary.limit {
        let _ = writeln!(text, "{}", recording::limit_text(limit));
    }
    text += &peaks(summary);
    if let Some(held) = &summary.held {
        text += &categories(held, summary.job.peak_live_bytes);
    }
    text += &modules(summary);
    text += &sites(summary);
    let largest = summary.largest_leak.as_ref();
    let at = largest.map(|line| format!("\n  {}", OneLine(line)));
    let _ = writeln!(
        text,
        "\n{} {}{}",
        style("growth:").bold(),
        leaks::verdict(&summary.leaks),
        at.unwrap_or_default()
    );
    text += &refusals(&summary.refusals);
    text += &others(summary);
    text += &next(summary);
    text
}

/// Returns a table with a row for each device, the most reserved bytes first, and what is wrong with each.
pub(crate) fn several(summaries: &[Summary]) -> String {
    let mut sorted: Vec<&Summary> = summaries.iter().collect();
    sorted.sort_by_key(|summary| Reverse(summary.job.peak_reserved_bytes));
    let peaks = sorted.iter().map(|summary| summary.job.peak_reserved_bytes);
    let unit = SizeUnit::for_sizes_up_to(peaks.max().unwrap_or_default());
    let header = [
        "recording",
        "device",
        &format!("live {}", unit.name()),
        &format!("reserved {}", unit.name()),
        "ratio",
        "leaks",
        "out of memory",
    ];
    let row = |summary: &&Summary| {
        let job = &summary.job;
        vec![
            format::path(Path::new(&job.path)),
            job.device.to_string(),
            unit.number(job.peak_live_bytes),
            unit.number(job.peak_reserved_bytes),
            format!(
                "{:.3}",
                format::ratio(job.peak_reserved_bytes, job.peak_live_bytes.max(Bytes(1)))
            ),
            summary.leaks.leaks().count().to_string(),
            summary.refusals.len().to_string(),
        ]
    };
    let rows = sorted.iter().map(row).collect();
    let table = table::new_table(header.map(str::to_owned).to_vec(), rows);
    let most = &sorted[0].job;
    format!(
        "{}\n\nmost reserved: {}\n\n{}\n  lowtide summary --device {} {}  # what its memory is for\n",
        table.trim_fmt(),
        most.headline(),
        style("next:").bold(),
        most.device,
        path_word(most),
    )
}

/// Returns a recording's path as a word of a shell, or a name for it: for standard input, which cannot be read again, and
/// for a path that a terminal would act on.
fn path_word(job: &Job) -> String {
    let path = &job.path;
    if path == "-" || OneLine(path).to_string() != *path {
        "TRACE".to_owned()
    } else if path.starts_with('-') {
        ShellWord(&format!("./{path}")).to_string()
    } else {
        ShellWord(path).to_string()
    }
}

/// Returns when the peaks were, and why reserved bytes were not live.
fn peaks(summary: &Summary) -> String {
    let of = format::count(summary.job.events as u64);
    let line = |name: &str, bytes: Bytes, moment: &Moment| {
        let event = format::count(moment.instant.into());
        format!(
            "{name:14} {:>12}  after event {event} of {of}",
            bytes.to_string()
        )
    };
    let live = &summary.peak_live;
    let reserved = &summary.peak_reserved;
    format!(
        "\n{}\n{}{}\n",
        line("peak live", live.fragmentation.live, live),
        line("peak reserved", reserved.fragmentation.reserved, reserved),
        causes(&reserved.fragmentation),
    )
}

/// Returns the reserved bytes that are not live, by cause, the largest first.
fn causes(fragmentation: &Fragmentation) -> String {
    let mut causes = Cause::ALL;
    causes.sort_by_key(|&cause| Reverse(fragmentation.of_cause(cause)));
    let causes = causes
        .into_iter()
        .map(|cause| (cause, fragmentation.of_cause(cause)));
    let parts = causes.filter(|(_, bytes)| !bytes.is_zero());
    let parts = parts.map(|(cause, bytes)| format!("{} {bytes}", moment::cause_text(cause)));
    let parts = parts.collect::<Vec<_>>().join(", ");
    if parts.is_empty() {
        return String::new();
    }
    let Fragmentation { live, reserved, .. } = *fragmentation;
    let rest = reserved - live;
    format!(": {live} live, {rest} not:\n{:14} {:>12}  {parts}", "", "")
}

/// Returns what is held at the peak of live bytes by category, the most first.
fn categories(held: &Held, peak: Bytes) -> String {
    let mut text = format!("\n{}\n", style("held at the peak of live bytes:").bold());
    let mut categories = Category::ALL;
    categories.sort_by_key(|&category| Reverse(held[category].bytes));
    for category in categories {
        if held[category].blocks > 0 {
            let row = held_row(&held[category], peak);
            let _ = writeln!(text, "{row}  {}", category_text(category));
        }
    }
    text
}

fn category_text(category: Category) -> String {
    category.name().replace('_', " ")
}

/// Returns the modules that hold most at the peak of live bytes; nothing if the program named none.
fn modules(summary: &Summary) -> String {
    if summary.modules.is_empty() {
        return String::new();
    }
    let title = style("the modules that hold most of it, numbers as *:").bold();
    let mut text = format!("\n{title}\n");
    let peak = summary.job.peak_live_bytes;
    for module in summary.modules.iter().take(ROWS_MAX) {
        let path = match &*module.path {
            "" => "outside of modules".to_owned(),
            path => OneLine(path).to_string(),
        };
        let _ = writeln!(text, "{}  {path}", held_row(&module.kept, peak));
    }
    let kept = summary.modules.iter().map(|module| &module.kept);
    text + &rest(kept, peak, "other module")
}

/// Returns a row with what is not shown of some rows; nothing if all are.
fn rest<'k>(kept: impl Iterator<Item = &'k Kept>, peak: Bytes, name: &str) -> String {
    let rest: Vec<&Kept> = kept.skip(ROWS_MAX).collect();
    let bytes = rest.iter().map(|kept| kept.bytes).sum();
    if bytes == 0 {
        return String::new();
    }
    let others = format::counted(rest.len() as u64, name);
    let row = held_row(&Kept { bytes, blocks: 0 }, peak);
    format!("{row}  {others}\n")
}

/// Returns the call sites that hold most at the peak of live bytes; nothing if only modules are known.
fn sites(summary: &Summary) -> String {
    if !summary.has_stacks && !summary.modules.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "\n{}\n",
        style("the call sites that hold most of it:").bold()
    );
    let peak = summary.job.peak_live_bytes;
    for site in summary.sites.iter().take(ROWS_MAX) {
        let category = site
            .category
            .map(|category| format!("{:15}  ", category_text(category)));
        let row = held_row(&site.kept, peak);
        let _ = writeln!(
            text,
            "{row}  {}{}",
            category.unwrap_or_default(),
            OneLine(&site.line)
        );
    }
    let kept = summary.sites.iter().map(|site| &site.kept);
    text += &rest(kept, peak, "other call site");
    if !summary.has_stacks {
        text += "no stacks are recorded, which show the program's lines and categories: \
                 torch.cuda.memory._record_memory_history() records them\n";
    }
    text
}

/// Returns a size, its share of the peak, and its number of blocks if that is not 0, in columns.
fn held_row(kept: &Kept, peak: Bytes) -> String {
    let share = format::percent(format::ratio(Bytes(kept.bytes), peak.max(Bytes(1))));
    let blocks = match kept.blocks {
        0 => String::new(),
        blocks => format::counted(blocks, "block"),
    };
    format!(
        "  {:>12} {share:>7}  {blocks:>12}",
        Bytes(kept.bytes).to_string()
    )
}

fn refusals(refusals: &[Refusal]) -> String {
    let Some(last) = refusals.last() else {
        return String::new();
    };
    let Fragmentation { live, reserved, .. } = last.moment.fragmentation;
    let largest = last.largest_free;
    let largest = largest.map(|largest| format!(", the largest free block {largest}"));
    format!(
        "{} {}; the last, of {}, after event {}\n  then {live} was live of {reserved} reserved{}, and {} left on the device\n",
        style("out of memory:").bold(),
        format::counted(refusals.len() as u64, "request"),
        last.requested,
        format::count(last.moment.instant.into()),
        largest.unwrap_or_default(),
        last.device_free,
    )
}

/// Returns what the job takes with other settings, under the limit that it had.
fn others(summary: &Summary) -> String {
    let died = !summary.refusals.is_empty();
    let under = match summary.limit {
        Some(_) => ", under that limit",
        None if died => ", without a limit: that of the job is not known",
        None => "",
    };
    let title = format!("with other settings{under}:");
    let mut text = format!("\n{}\n", style(title).bold());
    let row = |outcome: &Outcome| {
        let name = match ranking::label(outcome).as_str() {
            "caching" => "PyTorch's default settings".to_owned(),
            label => label.trim_start_matches("caching:").to_owned(),
        };
        let reserved = outcome.peak_reserved_bytes;
        let result = match outcome.oom_at_event {
            Some(event) => format!(
                "{:>12}  out of memory at event {}",
                "",
                format::count(event as u64)
            ),
            None => format!(
                "{:>12}  {}",
                reserved.to_string(),
                format::percent_change(reserved, summary.job.peak_reserved_bytes)
            ),
        };
        let is_long = summary.job.duration_us.is_some_and(|us| us >= SHARE_MIN_US);
        let share = ranking::driver_share(&summary.job, outcome).filter(|_| is_long);
        let share = share.map(|share| {
            format!(
                ", driver calls take {} of the job's time",
                format::percent(share)
            )
        });
        format!("  {name:26} {result}{}\n", share.unwrap_or_default())
    };
    for result in &summary.others {
        text += &match result {
            Ok(outcome) => row(outcome),
            Err(failure) => format!("  {failure}\n"),
        };
    }
    text
}

/// Returns the commands that help most.
fn next(summary: &Summary) -> String {
    let outcomes = summary
        .others
        .iter()
        .filter_map(|other| other.as_ref().ok());
    let worthwhile = summary.job.peak_reserved_bytes.scale(1.0 - WORTHWHILE);
    let died = !summary.refusals.is_empty();
    let saves =
        |outcome: &Outcome| outcome.completed && (died || outcome.peak_reserved_bytes < worthwhile);
    let commands = [
        (
            summary.leaks.leaks().next().is_some(),
            "leaks",
            "the lines that grow",
        ),
        (
            outcomes.clone().any(saves),
            "advise",
            "the setting to choose, and what it costs",
        ),
        (true, "report --open", "every block over time, as a page"),
    ];
    let mut text = format!("\n{}\n", style("next:").bold());
    let path = path_word(&summary.job);
    for (_, command, what) in commands.into_iter().filter(|(is_useful, ..)| *is_useful) {
        let _ = writeln!(text, "  lowtide {command} {path}  # {what}");
    }
    text
}
