//! What each command runs.

use std::path::Path;
use std::process::{self, Stdio};

use crate::{header, mutants, python, tidy, tsan, web};

/// How many requests each thread makes under ThreadSanitizer where it is not said: some minutes' worth.
const OPERATIONS: u32 = 100_000;

/// One command with its arguments.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    Test,
    Tidy,
    Header,
    Web,
    Screenshots,
    Fuzz { minutes: u32 },
    Mutants(mutants::Options),
    Miri,
    Tsan { operations: u32 },
    Bench { arguments: Vec<String> },
    Wheel,
    Gpu { arguments: Vec<String> },
    Torch { arguments: Vec<String> },
}

/// Why a command did not end well.
#[derive(Debug)]
pub(crate) struct Stop {
    /// The exit status of the whole command.
    pub(crate) status: u8,
    /// What to print last; `None` if the program that failed has said it all.
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

impl Command {
    /// Returns the command that the arguments ask for, or one line that says what is wrong.
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, String> {
        let Some((name, rest)) = arguments.split_first() else {
            return Err("no command given".into());
        };
        let arguments = rest.to_vec();
        let command = match name.as_str() {
            "bench" => return Ok(Self::Bench { arguments }),
            "gpu" => return Ok(Self::Gpu { arguments }),
            "torch" if rest.is_empty() => return Err("`torch` needs PyTorch's version".into()),
            "torch" => return Ok(Self::Torch { arguments }),
            "fuzz" => {
                let [minutes] = parse_numbers(name, [("--minutes", 1)], rest)?;
                return Ok(Self::Fuzz { minutes });
            }
            "mutants" => {
                let options = [("--sample", 200), ("--seed", 1), ("--minutes", 120)];
                let [sample, seed, minutes] = parse_numbers(name, options, rest)?;
                return Ok(Self::Mutants(mutants::Options {
                    sample,
                    seed,
                    minutes,
                }));
            }
            "tsan" => {
                let options = [("--operations", OPERATIONS)];
                let [operations] = parse_numbers(name, options, rest)?;
                return Ok(Self::Tsan { operations });
            }
            "test" => Self::Test,
            "tidy" => Self::Tidy,
            "header" => Self::Header,
            "web" => Self::Web,
            "screenshots" => Self::Screenshots,
            "miri" => Self::Miri,
            "wheel" => Self::Wheel,
            "help" | "--help" | "-h" => Self::Help,
            other => return Err(format!("unknown command `{other}`")),
        };
        match rest.first() {
            None => Ok(command),
            Some(extra) => Err(format!("`{name}` takes no argument, got `{extra}`")),
        }
    }

    /// Runs the command in the workspace at `root`.
    pub(crate) fn run(&self, root: &Path) -> Result<(), Stop> {
        match self {
            Self::Help => Ok(()),
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
            Self::Wheel => python::wheel(root),
            Self::Gpu { arguments } => python::gpu(root, arguments),
            Self::Torch { arguments } => python::torch(root, arguments),
        }
    }
}

/// The cheapest check comes first. The tests come last, without a word after them, so that the
/// output closes on the test runner's own summary and the exit status is the runner's.
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
    // Before the tests, because nextest does not run examples of the documentation.
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
    // Proptest looks for the failures it has recorded, which are files; and Miri is some hundred
    // times slower than the processor, so that its default of 256 programs a test takes too long.
    tests
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .env("PROPTEST_CASES", "4");
    step("miri", &mut tests)
}

/// Only a whole run is recorded: one that was narrowed by arguments is for looking.
fn bench(root: &Path, arguments: &[String]) -> Result<(), Stop> {
    let mut benches = cargo(root, &["bench", "-p", "lowtide-bench"]);
    step("benchmarks", benches.args(arguments))?;
    if !arguments.is_empty() {
        return Ok(());
    }
    let arguments = ["run", "--release", "-p", "lowtide-bench", "--", "record"];
    step("record", &mut cargo(root, &arguments))
}

/// Returns the numbers above 0 that a command's options are given, or else their defaults.
fn parse_numbers<const N: usize>(
    name: &str,
    options: [(&str, u32); N],
    arguments: &[String],
) -> Result<[u32; N], String> {
    let mut numbers = options.map(|(_, default)| default);
    for pair in arguments.chunks(2) {
        let place = options.iter().position(|(option, _)| *option == pair[0]);
        let (Some(place), [option, number]) = (place, pair) else {
            let options = options.map(|(option, _)| format!("`{option} N`"));
            let (options, given) = (options.join(", "), arguments.join(" "));
            return Err(format!("`{name}` takes {options}, got `{given}`"));
        };
        numbers[place] = match number.parse() {
            Ok(number) if number > 0 => number,
            _ => {
                return Err(format!(
                    "`{option}` takes a whole number above 0, got `{number}`"
                ));
            }
        };
    }
    Ok(numbers)
}

/// Returns a cargo command that will run in `root`, with nothing to read.
pub(crate) fn cargo(root: &Path, arguments: &[&str]) -> process::Command {
    let mut command = process::Command::new("cargo");
    command
        .args(arguments)
        .current_dir(root)
        .stdin(Stdio::null());
    command
}

/// Returns whether cargo knows a subcommand, for instance `["+nightly", "miri"]`.
pub(crate) fn is_available(root: &Path, subcommand: &[&str]) -> bool {
    cargo(root, subcommand)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Says what runs, runs it, and stops the whole command with its exit status if it fails.
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
    // No code, or none that fits: the process was killed by a signal.
    let code = status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(1);
    Err(Stop::new(code, format!("{name} failed ({status})")))
}

#[cfg(test)]
mod tests {
    use super::Command;
    use crate::mutants::Options;

    fn parse(line: &str) -> Result<Command, String> {
        let words: Vec<String> = line.split_whitespace().map(String::from).collect();
        Command::parse(&words)
    }

    #[test]
    fn commands_are_read() {
        assert_eq!(parse("test"), Ok(Command::Test));
        assert_eq!(parse("tidy"), Ok(Command::Tidy));
        assert_eq!(parse("header"), Ok(Command::Header));
        assert_eq!(parse("web"), Ok(Command::Web));
        assert_eq!(parse("screenshots"), Ok(Command::Screenshots));
        assert_eq!(parse("miri"), Ok(Command::Miri));
        assert_eq!(parse("--help"), Ok(Command::Help));
        assert_eq!(parse("fuzz"), Ok(Command::Fuzz { minutes: 1 }));
        assert_eq!(
            parse("fuzz --minutes 30"),
            Ok(Command::Fuzz { minutes: 30 })
        );
        let mutants = |sample, seed, minutes| {
            Ok(Command::Mutants(Options {
                sample,
                seed,
                minutes,
            }))
        };
        assert_eq!(parse("mutants"), mutants(200, 1, 120));
        assert_eq!(parse("mutants --seed 7 --sample 5"), mutants(5, 7, 120));
        assert_eq!(parse("mutants --minutes 3"), mutants(200, 1, 3));
        let operations = |operations| Ok(Command::Tsan { operations });
        assert_eq!(parse("tsan"), operations(100_000));
        assert_eq!(parse("tsan --operations 7"), operations(7));
        let arguments = vec!["--bench".into(), "hit".into()];
        assert_eq!(parse("bench --bench hit"), Ok(Command::Bench { arguments }));
        assert_eq!(parse("wheel"), Ok(Command::Wheel));
        let arguments = vec!["doctor".into()];
        assert_eq!(parse("gpu doctor"), Ok(Command::Gpu { arguments }));
        let arguments = vec!["2.15.0".into(), "-k".into(), "graphs".into()];
        assert_eq!(
            parse("torch 2.15.0 -k graphs"),
            Ok(Command::Torch { arguments })
        );
    }

    #[test]
    fn a_wrong_argument_is_named() {
        let wrong = |line, named: &str| {
            let message = parse(line).expect_err(line);
            assert!(message.contains(named), "{line}: {message}");
            assert!(!message.contains('\n'), "{line}: {message}");
        };
        wrong("", "no command");
        wrong("tests", "`tests`");
        wrong("test --fast", "`--fast`");
        wrong("torch", "version");
        wrong("fuzz 30", "`30`");
        wrong("fuzz --minutes", "`--minutes`");
        wrong("fuzz --minutes 0", "`0`");
        wrong("fuzz --minutes ten", "`ten`");
        wrong("fuzz --minutes 1 2", "--minutes 1 2");
        wrong("fuzz --operations 1", "--operations 1");
        wrong("tsan --operations many", "`many`");
        wrong("mutants --seed", "`--sample N`, `--seed N`, `--minutes N`");
        wrong("mutants --seed 1 --sample all", "`all`");
        wrong("tsan 5", "`tsan` takes `--operations N`");
    }
}
