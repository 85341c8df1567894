//! Records the benchmarks' results, and keeps the gate on instruction counts.
//!
//! - `record` times everything and writes `bench/record/<machine>/<date>`.
//! - `instructions` counts the instructions of a pair under valgrind, and fails if they grew.
//! - `answers` checks every benchmark's answer.
//! - `pair` and `replay` are the child processes of these commands.
#![forbid(unsafe_code)]

mod args;
mod baseline;
mod c_interface;
mod child;
mod instructions;
mod machine;
mod measure;
mod output;
mod record;
mod table;

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser as _;
use lowtide_bench::{Answers, Definitions, PairBench, Recording, ReplayBench};

use args::{Arguments, Command};

fn main() -> ExitCode {
    match run(&Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<()> {
    let definitions = Definitions::load()?;
    match command {
        Command::Record { traces, notes } => record::run(&definitions, traces, notes.as_deref()),
        Command::Instructions { update } => baseline::run(&definitions, *update),
        Command::Answers { update, traces } => {
            let recordings = Recording::find(&definitions, traces)?;
            answers(&definitions, &recordings, *update)
        }
        Command::Pair {
            case,
            strategy,
            count,
        } => child::pair(&definitions, case, strategy, *count),
        Command::Replay { path, strategy } => child::replay(path, strategy),
    }
}

/// Checks every benchmark's answer, or writes the answers. Answers for missing recordings are kept.
fn answers(definitions: &Definitions, recordings: &[Recording], update: bool) -> Result<()> {
    let expected = Answers::load()?;
    let mut found = Answers {
        replays: expected.replays.clone(),
        ..Answers::default()
    };
    for case in &definitions.pairs {
        for config in definitions.strategies_of(case) {
            let bench = PairBench::start(case, config)?;
            bench.check()?;
            let answers = found.pairs.entry(case.name.clone()).or_default();
            answers.insert(config.to_string(), bench.answer());
        }
    }
    for recording in recordings {
        let bench = ReplayBench::read(&recording.path)?;
        let answers = found.replays.entry(recording.case.name.clone());
        let answers = answers.or_default();
        for config in &definitions.strategies {
            answers.insert(config.to_string(), bench.run(config)?);
        }
    }
    if update {
        return output::write(&output::project("answers.toml"), &found.to_toml()?);
    }
    if found != expected {
        bail!("the answers are not those of bench/answers.toml; `answers --update` writes them");
    }
    output::note("every answer is the expected one");
    Ok(())
}
