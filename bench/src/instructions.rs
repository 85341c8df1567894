//! Instruction counts from valgrind's callgrind, which do not depend on the machine's load.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result};
use lowtide_bench::Definitions;

use crate::c_interface::{self, CProgram};
use crate::child::finish;
use crate::output;

/// The instructions of one pair, by benchmark and strategy.
pub(crate) type Counts = BTreeMap<String, BTreeMap<String, f64>>;

/// The number of counted pairs. This is a whole round or more with few live blocks. With many, it is enough to spread
/// rare work, such as the growth of a vector.
const PAIRS: usize = 50_000;

/// Returns whether valgrind is installed.
pub(crate) fn is_available() -> bool {
    finish(Command::new("valgrind").arg("--version")).is_ok()
}

/// Returns the instructions of one pair, for every pair benchmark and strategy. Takes minutes.
///
/// # Errors
///
/// If valgrind is missing or a benchmark fails.
pub(crate) fn count_all(definitions: &Definitions) -> Result<Counts> {
    let mut counts = Counts::new();
    let this = std::env::current_exe()?;
    for case in &definitions.pairs {
        output::note(&format!("counting the instructions of {}", case.name));
        for strategy in definitions.strategies_of(case).map(ToString::to_string) {
            let count = per_pair(|command, pairs| {
                command.arg(&this).args(["pair", &case.name, &strategy]);
                command.arg(pairs.to_string());
            })?;
            let strategies = counts.entry(case.name.clone()).or_default();
            strategies.insert(strategy, count);
        }
    }
    Ok(counts)
}

/// Returns the instructions of one pair at the C interface, by strategy.
///
/// # Errors
///
/// If valgrind or a C compiler is missing, or the program fails.
pub(crate) fn count_c_interface() -> Result<BTreeMap<String, f64>> {
    output::note("counting the instructions at the C interface");
    let program = CProgram::build()?;
    let counts = c_interface::STRATEGIES.map(|strategy| {
        let count = per_pair(|command, pairs| program.add_to(command, strategy, pairs));
        count.map(|count| (strategy.to_owned(), count))
    });
    counts.into_iter().collect()
}

/// Returns the instructions of a free and an allocation, to one decimal. This is the difference between a process
/// that runs [`PAIRS`] of them and one that does everything else, divided by [`PAIRS`]. `add_program` adds the program
/// that runs a number of pairs to a command.
fn per_pair(add_program: impl Fn(&mut Command, usize)) -> Result<f64> {
    let total = |pairs| {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
        add_program(&mut command, pairs);
        let output = finish(&mut command).context("valgrind counts instructions")?;
        let text = String::from_utf8_lossy(&output.stderr);
        collected(&text).with_context(|| format!("no instruction count in\n{text}"))
    };
    let instructions = total(PAIRS)?.checked_sub(total(0)?);
    let instructions = instructions.context("valgrind counted less for more pairs")?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let per_pair = instructions as f64 / PAIRS as f64;
    Ok((per_pair * 10.0).round() / 10.0)
}

/// Returns the number in callgrind's line `==PID== Collected : N`.
fn collected(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| {
        let (_, count) = line.split_once("Collected : ")?;
        count.trim().parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found() {
        let text = "==7== Events    : Ir\n==7== Collected : 193206\n==7== \n==7== I   refs:      193,206\n";
        assert_eq!(collected(text), Some(193_206));
        assert_eq!(collected("==7== Collected :\n"), None);
        assert_eq!(collected(""), None);
    }
}
