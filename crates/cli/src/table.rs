//! The results as a table, for people.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use console::{Term, style};
use lowtide_core::Bytes;
use lowtide_replay::Outcome;

use crate::format::{self, SizeUnit};
use crate::ranking;
use crate::recording::Job;

/// What there is no figure for.
const NONE: &str = "–";

/// Returns what `lowtide replay` prints about `ranked`, the outcomes from best to worst.
pub(crate) fn report(job: &Job, ranked: &[Outcome], capacity: Option<Bytes>) -> String {
    let mut text = format!("{}\n", job.headline());
    if let Some(capacity) = capacity {
        let _ = writeln!(text, "on a device of {capacity}");
    }
    let _ = writeln!(text, "\n{}\n", outcomes_table(job, ranked).trim_fmt());
    if let Some(verdict) = ranking::verdict(ranked, capacity) {
        let _ = writeln!(text, "{}", style(verdict).bold());
    }
    for line in verifications(ranked).chain(out_of_memory_messages(ranked)) {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(text, "\n{}", legend(ranked));
    text
}

fn outcomes_table(job: &Job, ranked: &[Outcome]) -> Table {
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
    header.extend(["driver calls", "driver time", "host ns/op", "note"].map(str::to_owned));

    let note_column = header.len() - 1;
    let mut table = new_table(header, &[0, note_column]);
    for outcome in ranked {
        let mut row = vec![ranking::label(outcome)];
        row.extend(reserved_and_ratio(outcome, unit));
        if let Some(baseline) = baseline {
            let (peak, default) = (outcome.peak_reserved_bytes, baseline.peak_reserved_bytes);
            row.push(match outcome.completed {
                true => format::percent_change(peak, default),
                false => NONE.into(),
            });
        }
        row.push(format::count(driver_calls(outcome)));
        row.push(format::duration(outcome.driver_time_us));
        row.push(format!("{:.0}", outcome.ns_per_op));
        row.push(notes(job, outcome));
        table.add_row(row);
    }
    table
}

/// Returns an empty table as wide as the terminal, or as wide as it needs where there is none. Columns
/// are set right, but for those in `text_columns`.
pub(crate) fn new_table(header: Vec<String>, text_columns: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')));
    if let Some((_, columns)) = Term::stdout().size_checked() {
        table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(columns);
    }
    table.set_header(header.into_iter().map(Cell::new));
    for (index, column) in table.column_iter_mut().enumerate() {
        if index == 0 {
            // Where there is no room for a long name, it breaks between options.
            column.set_padding((0, 1)).set_delimiter(',');
        }
        if !text_columns.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Returns peak reserved bytes and the reserved ratio of a job that completed: those of another say
/// nothing that could be compared.
pub(crate) fn reserved_and_ratio(outcome: &Outcome, unit: SizeUnit) -> [String; 2] {
    if !outcome.completed {
        return [NONE.into(), NONE.into()];
    }
    [
        unit.number(outcome.peak_reserved_bytes),
        format!("{:.3}", outcome.reserved_ratio),
    ]
}

/// Returns how often the driver was called for memory.
pub(crate) fn driver_calls(outcome: &Outcome) -> u64 {
    outcome.device_allocs + outcome.device_frees + outcome.maps + outcome.unmaps
}

/// Returns what else is to be known about `outcome`, in a few words.
pub(crate) fn notes(job: &Job, outcome: &Outcome) -> String {
    let mut notes = Vec::new();
    if ranking::is_default(outcome) {
        notes.push("PyTorch's default".into());
    }
    if let Some(event) = outcome.oom_at_event {
        notes.push(format!(
            "out of memory at event {}",
            format::count(event as u64)
        ));
    }
    if let Some(share) = ranking::driver_share(job, outcome)
        && ranking::is_slow(job, outcome)
    {
        notes.push(format!(
            "slow: driver calls would take {:.0} % of the job's time",
            100.0 * share
        ));
    }
    if outcome.retries > 0 {
        notes.push(format!("gave back and retried {} ×", outcome.retries));
    }
    if !outcome.remapped_bytes.is_zero() {
        notes.push(format!("unmapped {}", outcome.remapped_bytes));
    }
    notes.join(", ")
}

/// Returns a line on each verification.
fn verifications(ranked: &[Outcome]) -> impl Iterator<Item = String> {
    ranked.iter().filter_map(|outcome| {
        let verified = outcome.verified.as_ref()?;
        let same = format!(
            "verified {}: {} of {} at the recorded address",
            ranking::label(outcome),
            format::count(verified.same_address),
            format::counted(verified.compared, "block"),
        );
        Some(match &verified.first_difference {
            Some(difference) => format!("{same}; first difference: {difference}"),
            None => same,
        })
    })
}

/// Returns what the allocator would have said, where only one was replayed and it ran out of memory.
fn out_of_memory_messages(ranked: &[Outcome]) -> impl Iterator<Item = String> {
    let single = ranked.iter().filter(|_| ranked.len() == 1);
    single.filter_map(|outcome| outcome.oom_message.clone())
}

fn legend(ranked: &[Outcome]) -> String {
    let mut lines = vec![
        "ratio: peak reserved / peak live bytes; 1.00 is perfect".to_owned(),
        "driver time: by the simulated device's cost of each call".to_owned(),
    ];
    let at_once = ranked.len().min(rayon::current_num_threads());
    lines.push(match at_once {
        0 | 1 => "host ns/op: this machine's time for one allocation or free".into(),
        _ => format!(
            "host ns/op: this machine's time for one allocation or free, with {at_once} replays at \
             once (replay one alone to measure it)"
        ),
    });
    lines.join("\n")
}
