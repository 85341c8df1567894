//! The work of child processes, and how they are started.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lowtide_bench::{Definitions, PairBench, ReplayAnswer, ReplayBench};
use lowtide_core::Config;
use serde::{Deserialize, Serialize};

use crate::output;

/// The results of one process for one recording and strategy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ReplayRun {
    pub(crate) events: u64,
    pub(crate) read_s: f64,
    pub(crate) replay_s: f64,
    /// The process's peak memory, or `None` if the system does not report it.
    pub(crate) memory_peak_bytes: Option<u64>,
    pub(crate) answer: ReplayAnswer,
}

/// Runs `count` pairs of a benchmark after its first round.
pub(crate) fn pair(
    definitions: &Definitions,
    case: &str,
    strategy: &str,
    count: usize,
) -> Result<()> {
    let mut bench = PairBench::start(definitions.pair(case)?, &strategy.parse()?)?;
    bench.run(count)?;
    // Dropping the benchmark would be counted, and takes longer the more it holds.
    std::mem::forget(bench);
    Ok(())
}

/// Reads and replays a recording, and prints a [`ReplayRun`].
pub(crate) fn replay(path: &Path, strategy: &str) -> Result<()> {
    let config: Config = strategy.parse()?;
    let started = Instant::now();
    let bench = ReplayBench::read(path)?;
    let read_s = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let answer = bench.run(&config)?;
    let replay_s = started.elapsed().as_secs_f64();
    let run = ReplayRun {
        events: bench.events(),
        read_s,
        replay_s,
        memory_peak_bytes: memory_peak_bytes(),
        answer,
    };
    output::print(&toml::to_string(&run)?)
}

/// Returns this process's peak memory, or `None` if the system does not report it.
fn memory_peak_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Reads and replays a recording in a child process.
pub(crate) fn start_replay(path: &Path, config: &Config) -> Result<ReplayRun> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("replay").arg(path).arg(config.to_string());
    let output = finish(&mut command)?;
    let text = String::from_utf8(output.stdout)?;
    toml::from_str(&text).context("what a replay printed")
}

/// Runs a command and waits for it.
///
/// # Errors
///
/// If the command does not start or fails, with its standard error.
pub(crate) fn finish(command: &mut Command) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| program.clone())?;
    ensure!(
        output.status.success(),
        "{program}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output)
}
