//! Programs that a command starts, and how the command ends.

use std::path::Path;
use std::process::{self, Stdio};

/// The reason why a command failed.
#[derive(Debug)]
pub(crate) struct Stop {
    /// The exit status of the whole command.
    pub(crate) status: u8,
    /// The line to print last; `None` if the failed program has printed everything.
    pub(crate) line: Option<String>,
}

impl Stop {
    pub(crate) fn new(status: u8, line: impl Into<String>) -> Self {
        Self {
            status,
            line: Some(line.into()),
        }
    }
}

/// Returns a cargo command that will run in `root`, without input.
pub(crate) fn cargo(root: &Path, arguments: &[&str]) -> process::Command {
    let mut command = process::Command::new("cargo");
    command
        .args(arguments)
        .current_dir(root)
        .stdin(Stdio::null());
    command
}

/// Returns whether cargo has a subcommand, for instance `["+nightly", "miri"]`.
pub(crate) fn is_available(root: &Path, subcommand: &[&str]) -> bool {
    answers(&mut cargo(root, subcommand))
}

/// Returns whether a program exists and prints its version.
pub(crate) fn answers(program: &mut process::Command) -> bool {
    let asked = program.arg("--version").stdin(Stdio::null());
    let asked = asked.stdout(Stdio::null()).stderr(Stdio::null());
    asked.status().is_ok_and(|status| status.success())
}

/// Prints and runs a command. If it fails, stops the whole command with its exit status.
pub(crate) fn step(name: &str, command: &mut process::Command) -> Result<(), Stop> {
    let program = Path::new(command.get_program()).file_name();
    let program = program.unwrap_or_default().to_string_lossy().into_owned();
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    eprintln!("xtask: {name}: {program} {}", words.join(" "));
    let status = command
        .status()
        .map_err(|error| Stop::new(1, format!("{name}: {program} did not start: {error}")))?;
    if status.success() {
        return Ok(());
    }
    // There is no exit code if the process was killed by a signal.
    let code = status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(1);
    Err(Stop::new(code, format!("{name} failed ({status})")))
}
