//! What a process of its own does, and how it is started.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lowtide_bench::{Definitions, PairBench, ReplayAnswer, ReplayBench};
use lowtide_core::Config;
use serde::{Deserialize, Serialize};

use crate::output;

/// What one process says about one recording and strategy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ReplayRun {
    pub(crate) events: u64,
    pub(crate) read_s: f64,
    pub(crate) replay_s: f64,
    /// The most memory that the process held; `None` where the system does not say.
    pub(crate) memory_peak_bytes: Option<u64>,
    pub(crate) answer: ReplayAnswer,
}

/// Runs a pair benchmark `count` times after its first round.
pub(crate) fn pair(
    definitions: &Definitions,
    case: &str,
    strategy: &str,
    count: usize,
) -> Result<()> {
    let mut bench = PairBench::start(definitions.pair(case)?, &strategy.parse()?)?;
    bench.run(count)?;
    // Taking it apart would be counted, and differs with what it holds.
    std::mem::forget(bench);
    Ok(())
}

/// Reads and replays a recording and prints a [`ReplayRun`].
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

/// Returns the most memory that this process has held, or `None` where the system does not say.
fn memory_peak_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Reads and replays a recording in a process of its own.
pub(crate) fn start_replay(path: &Path, config: &Config) -> Result<ReplayRun> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("replay").arg(path).arg(config.to_string());
    let output = finish(&mut command)?;
    let text = String::from_utf8(output.stdout)?;
    toml::from_str(&text).context("what a replay printed")
}

/// Runs a command to its end.
///
/// # Errors
///
/// If it does not start, or does not end well: with what it wrote to standard error.
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
