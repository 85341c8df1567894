//! The results as a table, for people.

use std::fmt::Write as _;

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle, Width,
};
use console::{Term, style};
use lowtide_core::{Bytes, StrategyName};
use lowtide_replay::Outcome;

use crate::format::{self, SizeUnit};
use crate::job::{self, Job};
use crate::ranking;
use crate::replays::Failure;

/// The width of the terminal from which a configuration has one line.
const WIDE_COLUMNS: u16 = 120;

/// The most columns that a configuration gets on a narrow terminal.
const CONFIG_COLUMNS_MAX: usize = 40;

/// The title of the column with the driver's share of the job's time.
pub(crate) const SHARE: &str = "of job";

/// Stands for a missing figure.
pub(crate) const NONE: &str = "–";

/// Returns the text that `lowtide replay` prints about `failures` and `ranked`, the outcomes from best to worst.
pub(crate) fn report(
    job: &Job,
    ranked: &[Outcome],
    failures: &[Failure],
    capacity: Option<Bytes>,
) -> String {
    let mut text = format!("{}\n", job.headline());
    if let Some(capacity) = capacity {
        let _ = writeln!(text, "on a device of {capacity}");
    }
    let table = outcomes_table(job, ranked, failures);
    let _ = writeln!(text, "\n{}\n", table.trim_fmt());
    if let Some(verdict) = ranking::verdict(ranked, capacity) {
        let _ = writeln!(text, "{}", style(verdict).bold());
    }
    let remarks = remarks(job, ranked, failures).into_iter();
    for line in remarks.chain(out_of_memory_messages(ranked)) {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(text, "\n{}", legend(job, ranked));
    text
}

/// Returns the remarks about `ranked` and `failures` that are not in the table, one line each.
pub(crate) fn remarks(job: &Job, ranked: &[Outcome], failures: &[Failure]) -> Vec<String> {
    let notes = ranked.iter().filter_map(|outcome| {
        let notes = notes(job, outcome);
        (!notes.is_empty()).then(|| format!("{}: {notes}", ranking::label(outcome)))
    });
    let at_least = (!job.has_pauses).then(|| job::at_least(job.peak_live_bytes));
    let lines = at_least.into_iter();
    let lines = lines.chain(lost_beginning(job, ranked)).chain(notes);
    let lines = lines.chain(failures.iter().map(ToString::to_string));
    lines.chain(verifications(ranked)).collect()
}

fn outcomes_table(job: &Job, ranked: &[Outcome], failures: &[Failure]) -> Table {
    let unit = SizeUnit::for_sizes_up_to(job.peak_live_bytes);
    let baseline = ranking::baseline(ranked).filter(|_| ranked.len() > 1);
    let mut header = vec![
        "strategy".to_owned(),
        format!("reserved {}", unit.name()),
        "ratio".into(),
    ];
    if baseline.is_some() {
        header.push("vs default".into());
    }
    header.extend(["driver calls", "driver time"].map(str::to_owned));
    if job.duration_us.is_some() {
        header.push(SHARE.into());
    }
    header.push("host ns/op".into());
    let row = |outcome: &Outcome| {
        let mut row = vec![ranking::label(outcome)];
        row.extend(reserved_and_ratio(outcome, unit));
        if let Some(baseline) = baseline {
            let (peak, default) = (outcome.peak_reserved_bytes, baseline.peak_reserved_bytes);
            row.push(if outcome.completed {
                format::percent_change(peak, default)
            } else {
                NONE.into()
            });
        }
        row.push(format::count(driver_calls(outcome)));
        row.push(format::duration(outcome.driver_time_us));
        if job.duration_us.is_some() {
            let share = ranking::driver_share(job, outcome).map(format::percent);
            row.push(share.unwrap_or_else(|| NONE.into()));
        }
        row.push(format!("{:.0}", outcome.ns_per_op));
        row
    };
    let without_figures = |failure: &Failure| {
        let figures = vec![NONE.to_owned(); header.len() - 1];
        [vec![failure.config.to_string()], figures].concat()
    };
    let rows = { ranked.iter().map(row) }.chain(failures.iter().map(without_figures));
    let rows = rows.collect();
    new_table(header, rows)
}

/// Returns a table of `rows` that fits the terminal. Without a terminal, it is as wide as its contents. The first
/// column holds configurations, the others figures.
pub(crate) fn new_table(header: Vec<String>, mut rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')));
    if let Some((_, columns)) = Term::stdout().size_checked() {
        table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(columns);
        if columns < WIDE_COLUMNS {
            for row in &mut rows {
                row[0] = one_option_a_line(&row[0]);
            }
        }
    }
    let lines = rows.iter().flat_map(|row| row[0].lines());
    let widest = lines.map(|line| line.chars().count()).max().unwrap_or(0);
    table.set_header(header).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        } else if widest <= CONFIG_COLUMNS_MAX {
            // Otherwise words would be cut before the titles of the figures are wrapped.
            let width = u16::try_from(widest).unwrap_or(u16::MAX).saturating_add(1);
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(width)));
        }
    }
    table
}

/// Returns `config` with a line feed after the strategy's name, if it begins with one, and after each comma.
fn one_option_a_line(config: &str) -> String {
    let (name, options) = match config.split_once(':') {
        Some((name, options)) if name.parse::<StrategyName>().is_ok() => (name, options),
        _ => ("", config),
    };
    let name = match name {
        "" => String::new(),
        name => format!("{name}:\n"),
    };
    name + &options.replace(',', ",\n")
}

/// Returns peak reserved bytes and the reserved ratio of a job that completed. Those of other jobs cannot be
/// compared, so they are left out.
pub(crate) fn reserved_and_ratio(outcome: &Outcome, unit: SizeUnit) -> [String; 2] {
    if !outcome.completed {
        return [NONE.into(), NONE.into()];
    }
    [
        unit.number(outcome.peak_reserved_bytes),
        format!("{:.3}", outcome.reserved_ratio),
    ]
}

/// Returns the number of driver calls that allocate, free, map or unmap memory.
pub(crate) fn driver_calls(outcome: &Outcome) -> u64 {
    outcome.device_allocs + outcome.device_frees + outcome.maps + outcome.unmaps
}

/// Returns short notes about `outcome`.
fn notes(job: &Job, outcome: &Outcome) -> String {
    let mut notes = Vec::new();
    if let Some(event) = outcome.oom_at_event {
        let event = format::count(event as u64);
        notes.push(format!("out of memory at event {event}"));
    }
    notes.extend(ranking::driver_note(job, outcome));
    if outcome.retries > 0 {
        notes.push(format!("gave back and retried {} ×", outcome.retries));
    }
    if !outcome.remapped_bytes.is_zero() {
        notes.push(format!("unmapped {}", outcome.remapped_bytes));
    }
    notes.join(", ")
}

/// Returns the note about a lost beginning; `None` if all replays are verified, because those start with the
/// recorded blocks.
fn lost_beginning(job: &Job, ranked: &[Outcome]) -> Option<String> {
    let are_verified = ranked.iter().all(|outcome| outcome.verified.is_some());
    let lost = job.lost_beginning.filter(|_| !are_verified);
    lost.map(|lost| lost.note())
}

/// Returns a line about each verification.
fn verifications(ranked: &[Outcome]) -> impl Iterator<Item = String> {
    ranked.iter().filter_map(|outcome| {
        let verified = outcome.verified.as_ref()?;
        let limit = verified.limit_bytes;
        let limit = limit.map(|limit| format!(" under a limit of {limit}, found by trying"));
        let pools = verified.inferred_pools.filter(|&pools| pools > 1);
        let pools = pools.map(|pools| format!(", in {pools} pools inferred from addresses"));
        let same = format!(
            "verified {}: {} of {} at the recorded address{}{}",
            ranking::label(outcome),
            format::count(verified.same_address),
            format::counted(verified.compared, "block"),
            limit.unwrap_or_default(),
            pools.unwrap_or_default(),
        );
        Some(match &verified.first_difference {
            Some(difference) => format!("{same}; first difference: {difference}"),
            None => same,
        })
    })
}

/// Returns the allocator's error message, if only one was replayed and it ran out of memory.
fn out_of_memory_messages(ranked: &[Outcome]) -> impl Iterator<Item = String> {
    let single = ranked.iter().filter(|_| ranked.len() == 1);
    single.filter_map(|outcome| outcome.oom_message.clone())
}

fn legend(job: &Job, ranked: &[Outcome]) -> String {
    let mut lines = vec!["ratio: peak reserved / peak live bytes; 1.00 is perfect".to_owned()];
    if ranking::baseline(ranked).is_some() {
        lines.push("default: PyTorch's own allocator without settings, caching".into());
    }
    lines.push("driver time: by the simulated device's cost of each call".into());
    if let Some(duration_us) = job.duration_us {
        let duration = format::duration(duration_us);
        lines.push(format!(
            "{SHARE}: driver time as a share of the {duration} that the job took"
        ));
    }
    let at_once = ranked.len().min(rayon::current_num_threads());
    lines.push(match at_once {
        0 | 1 => "host ns/op: this machine's time for one allocation or free".into(),
        _ => format!(
            "host ns/op: this machine's time for one allocation or free, {at_once} replays at once\n\
             (replay one alone to measure it)"
        ),
    });
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_configurations_break_between_options() {
        let check = |config: &str, expected: &str| assert_eq!(one_option_a_line(config), expected);
        check("direct", "direct");
        check(
            "caching:max_split_size_mb:64,expandable_segments:True",
            "caching:\nmax_split_size_mb:64,\nexpandable_segments:True",
        );
        check(
            "max_split_size_mb:64,expandable_segments:True",
            "max_split_size_mb:64,\nexpandable_segments:True",
        );
    }
}
