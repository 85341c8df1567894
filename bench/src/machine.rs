//! The machine and the date of a record. Nothing here identifies the machine's owner.

use std::fs;
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result};

use crate::child::finish;
use crate::output;

/// Returns a directory name made of the processor's model and the number of cores.
pub(crate) fn slug() -> String {
    let cores = cores();
    let unit = if cores == 1 { "core" } else { "cores" };
    slug_of(&format!("{} {cores} {unit}", processor()))
}

/// Returns how many threads can run at once.
pub(crate) fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Returns the processor's model name, or its architecture if that is unknown.
pub(crate) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "model name").then(|| value.trim().to_owned())
    });
    model.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Returns the text in lower case, with a hyphen for each run of characters other than letters and digits.
fn slug_of(text: &str) -> String {
    let lower = text.to_lowercase();
    let words = lower.split(|character: char| !character.is_ascii_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    words.join("-")
}

/// Returns today's date in UTC, as `2026-11-21`.
pub(crate) fn date() -> Result<String> {
    first_line(Command::new("date").args(["--utc", "+%F"]))
}

/// Returns the compiler's version.
pub(crate) fn compiler() -> Result<String> {
    let mut command = Command::new("rustc");
    first_line(command.arg("--version").current_dir(output::project("")))
}

/// Returns the architecture and the operating system.
pub(crate) fn target() -> String {
    format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)
}

/// Returns the checked-out commit, with the suffix `-dirty` if files differ from it.
pub(crate) fn commit() -> Result<String> {
    let mut command = Command::new("git");
    command.args([
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
        "--abbrev=12",
    ]);
    first_line(command.current_dir(output::project("")))
}

fn first_line(command: &mut Command) -> Result<String> {
    let text = String::from_utf8(finish(command)?.stdout)?;
    let line = text.lines().next().context("nothing was printed")?;
    Ok(line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs() {
        assert_eq!(
            slug_of("Intel(R) Xeon(R) CPU @ 2.20GHz 2 cores"),
            "intel-r-xeon-r-cpu-2-20ghz-2-cores"
        );
        assert_eq!(slug_of("AMD EPYC  1 core"), "amd-epyc-1-core");
    }
}
