//! A record: all measurements on one machine on one day.

use std::path::PathBuf;

use anyhow::Result;
use lowtide_bench::{Answers, Definitions, Recording};
use serde::Serialize;

use crate::instructions::{self, Counts};
use crate::machine;
use crate::measure::{self, PAIR_REPEATS, PairTimes, REPLAY_REPEATS, ReplayTimes};
use crate::output;
use crate::table::Table;

/// The content of `record.toml`: how the results beside it were measured.
#[derive(Debug, Serialize)]
struct Circumstances {
    date: String,
    processor: String,
    cores: usize,
    target: String,
    compiler: String,
    version: &'static str,
    commit: String,
    pair_repeats: usize,
    replay_repeats: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    notes: Option<String>,
}

/// Measures everything, writes the record, and prints it. A limit that is exceeded is reported but is no error,
/// because times depend on the machine.
pub(crate) fn run(
    definitions: &Definitions,
    traces: &[PathBuf],
    notes: Option<&str>,
) -> Result<()> {
    let answers = Answers::load()?;
    let recordings = Recording::find(definitions, traces)?;
    let circumstances = Circumstances {
        date: machine::date()?,
        processor: machine::processor(),
        cores: machine::cores(),
        target: machine::target(),
        compiler: machine::compiler()?,
        version: env!("CARGO_PKG_VERSION"),
        commit: machine::commit()?,
        pair_repeats: PAIR_REPEATS,
        replay_repeats: REPLAY_REPEATS,
        notes: notes.map(str::to_owned),
    };
    let pairs = measure::pairs(definitions, &answers)?;
    let replays = measure::replays(definitions, &recordings, &answers)?;
    let counts = if instructions::is_available() {
        instructions::count_all(definitions)?
    } else {
        output::note("no instruction counts: valgrind is not there");
        Counts::new()
    };
    let directory = format!("record/{}/{}", machine::slug(), circumstances.date);
    let (pairs, replays) = (pair_table(&pairs, &counts), replay_table(&replays));
    for (name, text) in [
        ("record.toml", toml::to_string(&circumstances)?),
        ("pairs.csv", pairs.to_csv()),
        ("replays.csv", replays.to_csv()),
    ] {
        output::write(&output::project(&format!("{directory}/{name}")), &text)?;
    }
    output::print(&format!("{}\n{}", pairs.to_text(), replays.to_text()))?;
    output::note(&format!("written to bench/{directory}"));
    Ok(())
}

fn pair_table(pairs: &[PairTimes<'_>], counts: &Counts) -> Table {
    let mut table = Table::new(&[
        "benchmark",
        "strategy",
        "ns_median",
        "ns_min",
        "limit_ns",
        "met",
        "instructions",
    ]);
    for PairTimes { case, config, ns } in pairs {
        let strategy = config.to_string();
        let limit = case.limit_ns.get(&strategy).copied();
        let instructions = counts
            .get(&case.name)
            .and_then(|counts| counts.get(&strategy));
        table.push(vec![
            case.name.clone(),
            strategy,
            format!("{:.1}", ns.median()),
            format!("{:.1}", ns.min()),
            limit.map_or(String::new(), |limit| limit.to_string()),
            limit
                .map_or("", |limit| met(ns.median() <= limit))
                .to_owned(),
            instructions.map_or(String::new(), |count| format!("{count:.1}")),
        ]);
    }
    table
}

fn replay_table(replays: &[ReplayTimes<'_>]) -> Table {
    let mut table = Table::new(&[
        "recording",
        "strategy",
        "events",
        "replay_s_median",
        "replay_s_min",
        "read_s_median",
        "read_s_min",
        "memory_peak_bytes",
        "memory_per_pickle_byte",
        "met",
    ]);
    for times in replays {
        let memory = times.memory_peak_bytes;
        table.push(vec![
            times.recording.file_name(),
            times.config.to_string(),
            times.events.to_string(),
            format!("{:.4}", times.replay_s.median()),
            format!("{:.4}", times.replay_s.min()),
            format!("{:.4}", times.read_s.median()),
            format!("{:.4}", times.read_s.min()),
            memory.map_or(String::new(), |bytes| bytes.to_string()),
            memory_per_pickle_byte(times).map_or(String::new(), |ratio| format!("{ratio:.2}")),
            verdict(times).to_owned(),
        ]);
    }
    table
}

/// Returns whether a replay met its limits, or an empty string if it has none. A compressed recording is judged by
/// time alone, because its size is not the pickle's.
fn verdict(times: &ReplayTimes<'_>) -> &'static str {
    let limit = times.recording.case.limit.as_ref();
    let Some(limit) = limit.filter(|limit| limit.strategy == times.config.to_string()) else {
        return "";
    };
    let in_memory =
        memory_per_pickle_byte(times).is_none_or(|ratio| ratio <= limit.memory_per_pickle_byte);
    let in_time = times.replay_s.median() <= limit.replay_s
        && times.read_and_replay_s.median() <= limit.read_and_replay_s;
    met(in_time && in_memory)
}

/// Returns the process's memory divided by the size of the recording, if that is a plain pickle.
fn memory_per_pickle_byte(times: &ReplayTimes<'_>) -> Option<f64> {
    let path = &times.recording.path;
    let is_plain = path
        .extension()
        .is_some_and(|extension| extension == "pickle");
    let size = std::fs::metadata(path).ok().filter(|_| is_plain)?.len();
    #[expect(clippy::cast_precision_loss, reason = "two decimals are written")]
    let ratio = times.memory_peak_bytes? as f64 / size as f64;
    Some(ratio)
}

fn met(is_met: bool) -> &'static str {
    if is_met { "yes" } else { "no" }
}
