//! Mutation testing: makes one small change to the source at a time, and checks whether a test fails.

use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, value_parser};

use crate::process::{Stop, cargo, is_available};

/// The crates whose source is mutated. The tests of a mutant's own crate run first.
const MUTATED: [&str; 3] = ["lowtide-core", "lowtide-region", "lowtide-trace"];

/// The crates above those. Their tests run for mutants that the own crate's tests miss.
const ABOVE: [&str; 5] = [
    "lowtide-sim",
    "lowtide-shared",
    "lowtide-replay",
    "lowtide-history",
    "lowtide-capi",
];

/// The percentage of mutants that the tests must catch. Some mutants change nothing that a program could observe.
const CAUGHT_PERCENT_MIN: usize = 95;

/// The number and the choice of mutants, and the time limit.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Number of mutants to try.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = value_parser!(u32).range(1..))]
    pub(crate) sample: u32,
    /// Seed that chooses them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u32,
    /// Time limit in minutes.
    #[arg(long, value_name = "N", default_value_t = 120, value_parser = value_parser!(u32).range(1..))]
    pub(crate) minutes: u32,
}

/// Tries a sample of all mutants. Fails if the tests catch too few of them.
pub(crate) fn run(root: &Path, options: Options) -> Result<(), Stop> {
    if !is_available(root, &["mutants"]) {
        let line = "mutants needs cargo-mutants: cargo install cargo-mutants --locked";
        return Err(Stop::new(1, line));
    }
    let all = list(root)?;
    let sampled = sample(&all, options);
    let (count, total) = (sampled.len(), all.len());
    eprintln!("xtask: mutants: {count} of {total}, seed {}", options.seed);
    let limit = Duration::from_secs(60 * u64::from(options.minutes));
    let start = Instant::now();
    // The second round is for the few mutants that the first one misses, and takes longer to build.
    let own = try_mutants(root, "own", (&all, &sampled), &[], limit * 3 / 4)?;
    let left = limit.saturating_sub(start.elapsed());
    let above = try_mutants(root, "above", (&all, &own.missed), &ABOVE, left)?;
    let summary = Summary::new(count, own, above);
    eprint!("{summary}");
    summary.verdict()
}

/// Returns the names of all mutants, as `FILE:LINE:COLUMN: CHANGE`.
fn list(root: &Path) -> Result<Vec<String>, Stop> {
    let failed = |reason: String| Stop::new(1, format!("could not list the mutants: {reason}"));
    let output = cargo(root, &["mutants", "--list", "--colors=never"])
        .args(packages("--package", &MUTATED))
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(output.status.to_string()));
    }
    Ok(lines(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns a sample of `options.sample` mutants, chosen by the seed.
fn sample(all: &[String], options: Options) -> Vec<String> {
    let rank = |mutant: &String| {
        let mut hasher = DefaultHasher::new();
        (options.seed, mutant).hash(&mut hasher);
        hasher.finish()
    };
    let mut sampled = all.to_vec();
    sampled.sort_by_cached_key(rank);
    sampled.truncate(options.sample as usize);
    sampled
}

/// Tries `mutants`, a subset of `all`, until the time is over, and returns the outcomes. Runs the tests of the
/// crates in `tested`, or of the mutant's own crate if `tested` is empty.
fn try_mutants(
    root: &Path,
    name: &str,
    (all, mutants): (&[String], &[String]),
    tested: &[&str],
    limit: Duration,
) -> Result<Outcome, Stop> {
    if mutants.is_empty() || limit.as_secs() == 0 {
        return Ok(Outcome::default());
    }
    let output = root.join("target/mutants").join(name);
    let outcomes = output.join("mutants.out");
    leave_out(&outcomes, all, mutants).map_err(|error| {
        let line = format!("could not write {}: {error}", outcomes.display());
        Stop::new(1, line)
    })?;
    // On SIGTERM, cargo-mutants ends its tests and removes its copy of the source.
    let mut command = Command::new("timeout");
    command
        .arg(limit.as_secs().to_string())
        .args(["cargo", "mutants", "--iterate"])
        .args(["--profile=mutants", "--gitignore=true"])
        .args(packages("--package", &MUTATED))
        .args(packages("--test-package", tested))
        .arg("--output")
        .arg(&output)
        .current_dir(root)
        .stdin(Stdio::null());
    if is_available(root, &["nextest"]) {
        // nextest stops at the first test that fails.
        command.arg("--test-tool=nextest");
    }
    let status = command
        .status()
        .map_err(|error| Stop::new(1, format!("timeout did not start: {error}")))?;
    // All caught; some missed; some timed out; no time left.
    if !matches!(status.code(), Some(0 | 2 | 3 | 124)) {
        return Err(Stop::new(1, format!("cargo-mutants failed ({status})")));
    }
    Ok(Outcome::read(&outcomes))
}

/// Creates a directory for cargo-mutants in which all other mutants are listed as caught before, so that
/// `--iterate` leaves them out. Its regular expressions do not match every kind of mutant.
fn leave_out(directory: &Path, all: &[String], mutants: &[String]) -> io::Result<()> {
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let mut others = String::new();
    for mutant in all.iter().filter(|mutant| !mutants.contains(mutant)) {
        others.push_str(mutant);
        others.push('\n');
    }
    fs::write(directory.join("previously_caught.txt"), others)
}

fn packages(option: &str, names: &[&str]) -> Vec<String> {
    names
        .iter()
        .map(|name| format!("{option}={name}"))
        .collect()
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

/// The names of mutants by outcome.
#[derive(Debug, Default)]
struct Outcome {
    caught: Vec<String>,
    missed: Vec<String>,
    timed_out: Vec<String>,
    unviable: Vec<String>,
}

impl Outcome {
    /// Reads the outcomes from the directory that cargo-mutants writes. It has no file for an outcome without
    /// mutants.
    fn read(directory: &Path) -> Outcome {
        let read = |name: &str| {
            let path: PathBuf = directory.join(name);
            lines(&fs::read_to_string(path).unwrap_or_default())
        };
        Outcome {
            caught: read("caught.txt"),
            missed: read("missed.txt"),
            timed_out: read("timeout.txt"),
            unviable: read("unviable.txt"),
        }
    }
}

/// The outcome of a sample.
#[derive(Debug)]
struct Summary {
    own: usize,
    above: usize,
    timed_out: usize,
    unviable: usize,
    untried: usize,
    missed: Vec<String>,
}

impl Summary {
    fn new(sampled: usize, own: Outcome, above: Outcome) -> Summary {
        let outcomes = [&own.caught, &own.missed, &own.timed_out, &own.unviable];
        let tried: usize = outcomes.map(Vec::len).iter().sum();
        let mut missed = own.missed;
        missed.retain(|mutant| !above.caught.contains(mutant) && !above.timed_out.contains(mutant));
        Summary {
            own: own.caught.len(),
            above: above.caught.len(),
            timed_out: own.timed_out.len() + above.timed_out.len(),
            unviable: own.unviable.len(),
            untried: sampled.saturating_sub(tried),
            missed,
        }
    }

    /// Checks that enough mutants were caught. Tests that do not end catch the mutant as well. Mutants that do not
    /// compile do not count.
    fn verdict(&self) -> Result<(), Stop> {
        let caught = self.own + self.above + self.timed_out;
        let viable = caught + self.missed.len();
        if viable == 0 {
            return Err(Stop::new(1, "no mutant was tried"));
        }
        let line = format!("mutants: the tests catch {caught} of {viable}");
        if self.untried > viable {
            let line = format!("{line}, and most are not tried: give more --minutes");
            return Err(Stop::new(1, line));
        }
        if 100 * caught < CAUGHT_PERCENT_MIN * viable {
            let line = format!("{line}, fewer than {CAUGHT_PERCENT_MIN} %");
            return Err(Stop::new(1, line));
        }
        eprintln!("xtask: {line}");
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "caught by the crate's own tests: {}", self.own)?;
        writeln!(f, "caught by the tests of crates above: {}", self.above)?;
        writeln!(f, "timed out: {}", self.timed_out)?;
        writeln!(f, "unviable: {}", self.unviable)?;
        writeln!(f, "not tried, for lack of time: {}", self.untried)?;
        writeln!(f, "missed: {}", self.missed.len())?;
        let mut missed = self.missed.iter();
        missed.try_for_each(|mutant| writeln!(f, "  {mutant}"))
    }
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_seed_chooses_a_sample() {
        let all: Vec<String> = (0..100).map(|number| format!("mutant {number}")).collect();
        let options = |seed| Options {
            sample: 10,
            seed,
            minutes: 1,
        };
        let one = sample(&all, options(1));
        assert_eq!(one.len(), 10);
        assert_eq!(one, sample(&all, options(1)));
        let other = sample(&all, options(2));
        assert!(one.iter().any(|mutant| !other.contains(mutant)));
        // No mutant occurs twice.
        let mut distinct = one.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 10);
        assert_eq!(sample(&all[..3], options(1)).len(), 3);
    }

    #[test]
    fn the_others_are_left_out() {
        let directory = env::temp_dir().join(format!("lowtide-mutants-{}", process::id()));
        let all = names(&["one", "another", "third"]);
        fs::create_dir_all(&directory).expect("a directory of this test's own");
        fs::write(directory.join("caught.txt"), "one").expect("it is there");
        leave_out(&directory, &all, &all[1..2]).expect("it is there");
        let others = fs::read_to_string(directory.join("previously_caught.txt"));
        let is_left = directory.join("caught.txt").exists();
        fs::remove_dir_all(&directory).expect("it is there");
        assert_eq!(others.expect("it was written"), "one\nthird\n");
        assert!(!is_left);
    }

    #[test]
    fn what_is_missed_is_named_and_fails() {
        let own = Outcome {
            caught: (0..18).map(|number| number.to_string()).collect(),
            missed: names(&["one", "other", "endless"]),
            timed_out: names(&["hangs"]),
            unviable: names(&["does not compile"]),
        };
        let above = Outcome {
            caught: names(&["other"]),
            missed: names(&["one"]),
            timed_out: names(&["endless"]),
            unviable: Vec::new(),
        };
        let mut summary = Summary::new(25, own, above);
        let expected = "\
            caught by the crate's own tests: 18\n\
            caught by the tests of crates above: 1\n\
            timed out: 2\n\
            unviable: 1\n\
            not tried, for lack of time: 2\n\
            missed: 1\n  one\n";
        assert_eq!(summary.to_string(), expected);
        assert!(summary.verdict().is_ok());
        summary.missed.push("another".to_owned());
        let stop = summary.verdict().expect_err("21 of 23 are 91 %");
        assert_eq!(stop.status, 1);
        let line = stop.line.expect("it says why");
        assert_eq!(line, "mutants: the tests catch 21 of 23, fewer than 95 %");
    }

    #[test]
    fn nothing_that_was_tried_is_no_success() {
        let nothing = Summary::new(5, Outcome::default(), Outcome::default());
        assert!(nothing.verdict().is_err());
        let own = Outcome {
            caught: names(&["one"]),
            ..Outcome::default()
        };
        let little = Summary::new(200, own, Outcome::default());
        assert!(little.verdict().is_err());
    }
}
