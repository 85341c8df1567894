//! The gate: a pair must not take more instructions than `baseline/instructions.toml` allows.

use anyhow::{Context, Result, bail};
use lowtide_bench::Definitions;
use serde::{Deserialize, Serialize};

use crate::instructions::{self, Counts};
use crate::machine;
use crate::output;

/// How much a count may grow before the gate fails, in percent. Compiling the same source in another order changes
/// counts by less.
const TOLERANCE_PERCENT: f64 = 3.0;

const HEADER: &str = "\
# Instructions of a free and an allocation, by benchmark and strategy: what the gate compares with.
# Written by
#     cargo run --release -p lowtide-bench -- instructions --update
# A change here comes with the change to the code that justifies it. Counts of another compiler or
# another kind of processor are not comparable.

";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Baseline {
    /// The compiler's version.
    compiler: String,
    /// The kind of processor and system.
    target: String,
    instructions_per_pair: Counts,
}

/// Counts instructions, and compares them with the baseline or replaces it.
pub(crate) fn run(definitions: &Definitions, update: bool) -> Result<()> {
    let mut counts = instructions::count_all(definitions)?;
    counts.insert("c-interface".into(), instructions::count_c_interface()?);
    let found = Baseline {
        compiler: machine::compiler()?,
        target: machine::target(),
        instructions_per_pair: counts,
    };
    let path = output::project("baseline/instructions.toml");
    if update {
        let text = format!("{HEADER}{}", toml::to_string(&found)?);
        return output::write(&path, &text);
    }
    let text = std::fs::read_to_string(&path).context("bench/baseline/instructions.toml")?;
    let baseline: Baseline = toml::from_str(&text).context("bench/baseline/instructions.toml")?;
    for (what, expected, found) in [
        ("compiler", &baseline.compiler, &found.compiler),
        ("target", &baseline.target, &found.target),
    ] {
        if expected != found {
            output::note(&format!(
                "the baseline's {what} is {expected}, this one's {found}"
            ));
        }
    }
    let comparison = Comparison::new(
        &baseline.instructions_per_pair,
        &found.instructions_per_pair,
    );
    output::print(&comparison.text())?;
    if !comparison.passes() {
        bail!(
            "instruction counts grew; mend that, or accept them with \
             `cargo run --release -p lowtide-bench -- instructions --update` and say why"
        );
    }
    Ok(())
}

/// The counts beside those of the baseline.
struct Comparison {
    lines: Vec<Line>,
}

struct Line {
    benchmark: String,
    /// `None` if the baseline does not have the benchmark.
    expected: Option<f64>,
    /// `None` if the benchmark does not exist any more.
    found: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Same,
    Less,
    More,
    /// The benchmark is in one of the two only.
    Unmatched,
}

impl Comparison {
    fn new(expected: &Counts, found: &Counts) -> Comparison {
        let keys = |counts: &Counts| -> Vec<(String, String)> {
            let cases = counts.iter();
            let keys = cases.flat_map(|(case, strategies)| {
                let keys = strategies.keys();
                keys.map(|strategy| (case.clone(), strategy.clone()))
            });
            keys.collect()
        };
        let mut all = [keys(expected), keys(found)].concat();
        all.sort();
        all.dedup();
        let lines = all.into_iter().map(|(case, strategy)| {
            let count = |counts: &Counts| counts.get(&case)?.get(&strategy).copied();
            Line {
                benchmark: format!("{case}, {strategy}"),
                expected: count(expected),
                found: count(found),
            }
        });
        Comparison {
            lines: lines.collect(),
        }
    }

    fn passes(&self) -> bool {
        let mut verdicts = self.lines.iter().map(Line::verdict);
        verdicts.all(|verdict| matches!(verdict, Verdict::Same | Verdict::Less))
    }

    fn text(&self) -> String {
        let number =
            |count: Option<f64>| count.map_or("-".to_owned(), |count| format!("{count:.1}"));
        let mut text = format!(
            "{:<46} {:>9} {:>9}\n",
            "instructions of a pair", "baseline", "now"
        );
        for line in &self.lines {
            let remark = match line.verdict() {
                Verdict::Same => "",
                Verdict::Less => "  less: `--update` keeps it so",
                Verdict::More => "  MORE",
                Verdict::Unmatched => "  IN ONE ONLY",
            };
            let (expected, found) = (number(line.expected), number(line.found));
            text += &format!("{:<46} {expected:>9} {found:>9}{remark}\n", line.benchmark);
        }
        text
    }
}

impl Line {
    fn verdict(&self) -> Verdict {
        let (Some(expected), Some(found)) = (self.expected, self.found) else {
            return Verdict::Unmatched;
        };
        let tolerance = expected * TOLERANCE_PERCENT / 100.0;
        if found > expected + tolerance {
            Verdict::More
        } else if found < expected - tolerance {
            Verdict::Less
        } else {
            Verdict::Same
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(entries: &[(&str, &str, f64)]) -> Counts {
        let mut counts = Counts::new();
        for &(case, strategy, count) in entries {
            let strategies = counts.entry(case.to_owned()).or_default();
            strategies.insert(strategy.to_owned(), count);
        }
        counts
    }

    fn verdict(expected: f64, found: f64) -> Verdict {
        let counts = |count| counts(&[("few", "bfc", count)]);
        let comparison = Comparison::new(&counts(expected), &counts(found));
        let verdict = comparison.lines[0].verdict();
        assert_eq!(comparison.passes(), verdict != Verdict::More);
        verdict
    }

    #[test]
    fn only_growth_beyond_the_tolerance_closes_the_gate() {
        assert_eq!(verdict(100.0, 100.0), Verdict::Same);
        assert_eq!(verdict(100.0, 102.9), Verdict::Same);
        assert_eq!(verdict(100.0, 103.1), Verdict::More);
        assert_eq!(verdict(100.0, 97.1), Verdict::Same);
        assert_eq!(verdict(100.0, 96.9), Verdict::Less);
    }

    #[test]
    fn a_benchmark_without_a_baseline_closes_the_gate() {
        let one = counts(&[("few", "bfc", 100.0)]);
        let two = counts(&[("few", "bfc", 100.0), ("few", "pool", 50.0)]);
        for comparison in [Comparison::new(&one, &two), Comparison::new(&two, &one)] {
            assert!(!comparison.passes());
            assert!(comparison.text().contains("few, pool"));
            assert_eq!(comparison.text().matches("IN ONE ONLY").count(), 1);
        }
        assert!(Comparison::new(&two, &two).passes());
    }

    #[test]
    fn the_projects_baseline_has_every_benchmark() {
        let text = include_str!("../baseline/instructions.toml");
        let baseline: Baseline = toml::from_str(text).unwrap();
        let definitions = Definitions::load().unwrap();
        for case in &definitions.pairs {
            let strategies = &baseline.instructions_per_pair[&case.name];
            for config in definitions.strategies_of(case) {
                assert!(strategies.contains_key(&config.to_string()), "{config}");
            }
        }
    }
}
