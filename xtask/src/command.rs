//! The commands and what they run.

use std::path::Path;
use std::process::Stdio;

use clap::{Parser, Subcommand, value_parser};

use crate::process::{Stop, cargo, is_available, step};
use crate::{header, mutants, python, tidy, tsan, web};

/// The processors that wheels are released for, as `uname -m` names them.
const MACHINES: [&str; 2] = ["x86_64", "aarch64"];

/// The project's own commands.
#[derive(Debug, Parser, PartialEq, Eq)]
#[command(bin_name = "cargo xtask", disable_help_subcommand = true)]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// One command with its arguments.
#[derive(Debug, Subcommand, PartialEq, Eq)]
pub(crate) enum Command {
    /// Checks formatting, tidy, clippy, documentation, the Python package and the report's page, then runs all
    /// tests.
    Test,
    /// Checks the project's own rules, which no other tool checks.
    Tidy,
    /// Generates crates/capi/include/lowtide.h, which `test` checks, from the source.
    Header,
    /// Builds the page of `lowtide report`, which `test` checks, from its sources in `web`.
    Web,
    /// Takes screenshots of that page's views into `docs/report`; needs chromium.
    Screenshots,
    /// Builds the Python package into `dist`, for this system, or for every Linux with the MACHINES.
    Wheel {
        /// The processors to build for, with manylinux_2_28's libraries.
        #[arg(value_name = "MACHINE", value_parser = MACHINES)]
        machines: Vec<String>,
    },
    /// Builds the shims that the next wheels have, for every release of PyTorch that lowtide supports.
    Shims {
        /// The processors to build for.
        #[arg(value_name = "MACHINE", value_parser = MACHINES, required = true)]
        machines: Vec<String>,
    },
    /// Tests and measures on a GPU, and records the results; `gpu --help` lists ARGS.
    #[command(disable_help_flag = true)]
    Gpu {
        /// What and how to measure.
        #[arg(
            value_name = "ARGS",
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        arguments: Vec<String>,
    },
    /// Tests the shim on a release of PyTorch from PyPI, without a GPU.
    Torch {
        /// PyTorch's version, and arguments for pytest.
        #[arg(
            value_name = "VERSION [ARGS]",
            required = true,
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        arguments: Vec<String>,
    },
    /// Runs every fuzz target; needs nightly and cargo-fuzz.
    Fuzz {
        /// How long each target runs.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
        minutes: u32,
    },
    /// Mutates the source in one place after another, and counts the mutants that tests catch; needs cargo-mutants.
    Mutants(mutants::Options),
    /// Runs the unit tests of lowtide-core under Miri; needs nightly with the miri component.
    Miri,
    /// Runs the tests of lowtide-capi under ThreadSanitizer; needs nightly with rust-src.
    Tsan {
        /// Number of requests of each thread; the default takes some minutes.
        #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = value_parser!(u32).range(1..))]
        operations: u32,
    },
    /// Runs the benchmarks, and records them unless there are arguments.
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments for `cargo bench`.
        #[arg(
            value_name = "ARGS",
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        arguments: Vec<String>,
    },
}

impl Command {
    /// Runs the command in the workspace at `root`.
    pub(crate) fn run(&self, root: &Path) -> Result<(), Stop> {
        match self {
            Self::Test => test(root),
            Self::Tidy => tidy::run(root),
            Self::Header => header::write(root),
            Self::Web => web::write(root),
            Self::Screenshots => web::screenshots(root),
            Self::Fuzz { minutes } => fuzz(root, *minutes),
            Self::Mutants(options) => mutants::run(root, *options),
            Self::Miri => miri(root),
            Self::Tsan { operations } => tsan::run(root, *operations),
            Self::Bench { arguments } => bench(root, arguments),
            Self::Wheel { machines } => python::wheel(root, machines),
            Self::Shims { machines } => python::shims(root, machines),
            Self::Gpu { arguments } => python::gpu(root, arguments),
            Self::Torch { arguments } => python::torch(root, arguments),
        }
    }
}

/// The cheapest check runs first. The tests run last and nothing is printed after them: the output then ends with
/// the test runner's summary, and the exit status is the runner's.
fn test(root: &Path) -> Result<(), Stop> {
    step("formatting", &mut cargo(root, &["fmt", "--all", "--check"]))?;
    if root.join("fuzz/Cargo.toml").exists() {
        let arguments = ["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"];
        step("formatting of fuzz", &mut cargo(root, &arguments))?;
    }
    tidy::run(root)?;
    let arguments = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ];
    step("clippy", &mut cargo(root, &arguments))?;
    let mut documentation = cargo(root, &["doc", "--workspace", "--no-deps"]);
    step(
        "documentation",
        documentation.env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    python::test(root)?;
    web::test(root)?;
    // Before the tests, because nextest does not run documentation examples.
    let arguments = ["test", "--workspace", "--doc", "--no-fail-fast"];
    step("documentation examples", &mut cargo(root, &arguments))?;

    let mut runner = if is_available(root, &["nextest"]) {
        cargo(root, &["nextest", "run", "--workspace", "--no-fail-fast"])
    } else {
        cargo(root, &["test", "--workspace", "--tests", "--no-fail-fast"])
    };
    step("tests", &mut runner).map_err(|stop| Stop { line: None, ..stop })
}

fn fuzz(root: &Path, minutes: u32) -> Result<(), Stop> {
    if !is_available(root, &["+nightly", "fuzz"]) {
        let line = "fuzz needs nightly and cargo-fuzz: \
                    rustup toolchain install nightly, then cargo install cargo-fuzz";
        return Err(Stop::new(1, line));
    }
    let list = cargo(root, &["+nightly", "fuzz", "list"])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| Stop::new(1, format!("could not list the fuzz targets: {error}")))?;
    let targets = String::from_utf8_lossy(&list.stdout);
    if targets.trim().is_empty() {
        return Err(Stop::new(1, "no fuzz targets found"));
    }
    let limit = format!("-max_total_time={}", u64::from(minutes) * 60);
    for target in targets.split_whitespace() {
        let arguments = ["+nightly", "fuzz", "run", target, "--", &limit];
        step(
            &format!("fuzz target {target}"),
            &mut cargo(root, &arguments),
        )?;
    }
    Ok(())
}

fn miri(root: &Path) -> Result<(), Stop> {
    if !is_available(root, &["+nightly", "miri"]) {
        let line = "miri needs nightly and its component: \
                    rustup toolchain install nightly --component miri";
        return Err(Stop::new(1, line));
    }
    let mut tests = cargo(
        root,
        &["+nightly", "miri", "test", "-p", "lowtide-core", "--lib"],
    );
    // Proptest reads recorded failures from files, so isolation is off. Miri is some hundred times slower than the
    // processor, so proptest's default of 256 programs per test takes too long.
    tests
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .env("PROPTEST_CASES", "4");
    step("miri", &mut tests)
}

/// Records only a whole run. A run that arguments narrow is not recorded.
fn bench(root: &Path, arguments: &[String]) -> Result<(), Stop> {
    let mut benches = cargo(root, &["bench", "-p", "lowtide-bench"]);
    step("benchmarks", benches.args(arguments))?;
    if !arguments.is_empty() {
        return Ok(());
    }
    let arguments = ["run", "--release", "-p", "lowtide-bench", "--", "record"];
    step("record", &mut cargo(root, &arguments))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use clap::error::ErrorKind;

    use super::{Arguments, Command};
    use crate::mutants::Options;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        let words = ["cargo xtask"].into_iter().chain(line.split_whitespace());
        Arguments::try_parse_from(words).map(|arguments| arguments.command)
    }

    #[track_caller]
    fn check(line: &str, expected: Command) {
        assert_eq!(parse(line).expect(line), expected);
    }

    #[test]
    fn commands_are_read() {
        check("test", Command::Test);
        check("fuzz", Command::Fuzz { minutes: 1 });
        check("fuzz --minutes 30", Command::Fuzz { minutes: 30 });
        let mutants = |sample, seed, minutes| {
            Command::Mutants(Options {
                sample,
                seed,
                minutes,
            })
        };
        check("mutants", mutants(200, 1, 120));
        check("mutants --seed 7 --sample 5", mutants(5, 7, 120));
        check(
            "tsan",
            Command::Tsan {
                operations: 100_000,
            },
        );
        let arguments = vec!["--bench".into(), "hit".into()];
        check("bench --bench hit", Command::Bench { arguments });
        let arguments = vec!["--help".into()];
        check("gpu --help", Command::Gpu { arguments });
        let arguments = vec!["2.15.0".into(), "-k".into(), "graphs".into()];
        check("torch 2.15.0 -k graphs", Command::Torch { arguments });
        let machines = Vec::new();
        check("wheel", Command::Wheel { machines });
        let machines = vec!["x86_64".into(), "aarch64".into()];
        check("shims x86_64 aarch64", Command::Shims { machines });
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for (line, kind) in [
            ("", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("tests", ErrorKind::InvalidSubcommand),
            ("test --fast", ErrorKind::UnknownArgument),
            ("torch", ErrorKind::MissingRequiredArgument),
            ("shims", ErrorKind::MissingRequiredArgument),
            ("wheel arm64", ErrorKind::InvalidValue),
            ("fuzz 30", ErrorKind::UnknownArgument),
            ("fuzz --minutes 0", ErrorKind::ValueValidation),
            ("mutants --seed", ErrorKind::InvalidValue),
        ] {
            assert_eq!(parse(line).expect_err(line).kind(), kind, "{line}");
        }
    }
}
