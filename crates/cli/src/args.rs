//! The command line.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use lowtide_core::{Bytes, CachingConfig, Config, StrategyName};

use crate::capacity::Capacity;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  lowtide summary snapshot.pickle                 where the memory went, and what would help
  lowtide advise snapshot.pickle                  the PYTORCH_CUDA_ALLOC_CONF to choose
  lowtide replay --capacity 24GB snapshot.pickle  whether the job fits in 24 GB
  lowtide run train.py                            the script on lowtide";

const RUN_EXAMPLES: &str = "\
Examples:
  lowtide run train.py --epochs 3
  lowtide run torchrun --nproc-per-node 8 train.py
  lowtide run --strategy caching:expandable_segments:True -m package.train
  lowtide run --preload ./solver input.txt";

const RECORD_EXAMPLES: &str = "\
Examples:
  lowtide record -o job.lowtide --stacks --categories train.py
  lowtide record lowtide run --preload ./solver";

const CHECK_EXAMPLES: &str = "\
Examples:
  lowtide check --max-reserved 40GiB --no-oom --no-leak job.pickle
  lowtide check --against main.pickle --tolerance 2% --junit memory.xml job.pickle";

const CONVERT_EXAMPLES: &str = "\
Examples:
  lowtide convert job.pickle job.lowtide
  lowtide convert job.pickle job.perfetto.json
  lowtide convert --profile trace.json.gz job.pickle job.perfetto.json.gz";

const COMPLETION_EXAMPLES: &str = "\
Examples:
  lowtide completion bash > ~/.local/share/bash-completion/completions/lowtide
  lowtide completion zsh > ~/.zfunc/_lowtide
  lowtide completion fish > ~/.config/fish/completions/lowtide.fish";

const REPLAY_EXAMPLES: &str = "\
Examples:
  lowtide replay job.pickle
  lowtide replay --capacity 24GB job.pickle
  lowtide replay --strategy tide --strategy caching:expandable_segments:True job.pickle
  lowtide replay --verify job.pickle";

/// Runs PyTorch scripts on lowtide's GPU memory allocator, and shows from recordings of jobs, without a GPU, where memory
/// went and which allocator or setting needs less.
///
/// A recording is what torch.cuda.memory._dump_snapshot() writes after torch.cuda.memory._record_memory_history(),
/// or what `lowtide record` or lowtide.record() writes for a program that runs on lowtide.
#[derive(Parser, Debug)]
#[command(name = "lowtide", version, max_term_width = 100, after_help = EXAMPLES)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

/// The subcommands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    Summary(SummaryArgs),
    Replay(ReplayArgs),
    Advise(AdviseArgs),
    Convert(ConvertArgs),
    Report(ReportArgs),
    Diff(DiffArgs),
    Leaks(LeaksArgs),
    Check(CheckArgs),
    Run(RunArgs),
    Record(RecordArgs),
    Top(TopArgs),
    Doctor(DoctorArgs),
    /// Build the shim for the PyTorch that is installed, ahead of its first use
    ///
    /// The shim connects PyTorch to lowtide. It is built once for each version, in half a minute, and needs a C++ compiler.
    Build,
    Completion(CompletionArgs),
    /// Print the manual page, for `man -l -`
    Man,
}

/// Show on one screen what a recorded job's memory was for, and what would help
///
/// Prints the peaks, why reserved memory was not live, what the peak consists of by category and by call site, what
/// grows, out-of-memory errors, and what other settings take. Several recordings, or one of several devices, are
/// compared in a table. Categories follow from stacks: record with torch.cuda.memory._record_memory_history().
#[derive(Args, Debug)]
pub(crate) struct SummaryArgs {
    /// A PyTorch memory snapshot or a trace of lowtide's own, plain or compressed (zstd, gzip, xz, bzip2);
    /// `-` reads standard input. May be repeated
    #[arg(value_name = "TRACE", required = true)]
    pub(crate) traces: Vec<PathBuf>,

    /// The device, if a recording has several [default: all]
    #[arg(long, value_name = "N", value_parser = device, allow_hyphen_values = true)]
    pub(crate) device: Option<u32>,

    /// Print one JSON object for each device, in a list
    #[arg(long)]
    pub(crate) json: bool,
}

/// Compare what allocators would have done with a recorded job
///
/// Runs the job's requests through each allocator on a simulated device and prints how much memory each would have
/// reserved, the best first. Exits with 0 if the replay ran, even if the job ran out of memory or an address
/// differed; with 2 for a bad argument or file.
#[derive(Args, Debug)]
#[command(after_help = REPLAY_EXAMPLES)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// An allocator to try: `tide`, `direct`, `pool`, `buddy`, `slab`, `bfc`, `caching` (PyTorch's own) or `all`.
    /// May be repeated [default: all]
    ///
    /// CONF is everything after the first colon, in the syntax of PYTORCH_CUDA_ALLOC_CONF:
    /// `caching:expandable_segments:True,roundup_power2_divisions:4`. `all` is every allocator, and
    /// `caching:expandable_segments:True`. Several are replayed at once, which disturbs `ns_per_op`: name a single
    /// one to measure that.
    #[arg(long = "strategy", value_name = "NAME[:CONF]")]
    pub(crate) strategies: Vec<StrategyChoice>,

    /// Compare every block's address with the recorded one
    ///
    /// The simulated driver then allocates segments at their recorded addresses. Only PyTorch's own allocator can
    /// be verified. Without --strategy, and for a `caching` without CONF, this uses the settings of the recording;
    /// `caching:` stands for PyTorch's defaults. Without --capacity, the limit of a job that collected garbage is
    /// searched for.
    #[arg(long)]
    pub(crate) verify: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,

    /// Also write the page of `lowtide report` to FILE, with these allocators. `-` prints it in place of the table
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

/// Find the PYTORCH_CUDA_ALLOC_CONF that minimizes a recorded job's memory
///
/// Replays PyTorch's own allocator with different settings: expandable segments, rounding, split sizes, segment
/// sizes, and with --capacity also garbage collection. Prints the best, what it saves and what it costs. A setting
/// that saves less than 1 % more than a simpler one is not recommended. Also prints what lowtide's own `tide` takes.
#[derive(Args, Debug)]
pub(crate) struct AdviseArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Convert a recording between formats
///
/// The names decide the formats. IN is a PyTorch memory snapshot or a trace of lowtide's own. OUT ends in `.pickle`
/// for a PyTorch memory snapshot, which pytorch.org/memory_viz shows, or in `.lowtide` for lowtide's own format,
/// which is about a tenth of the size. It ends in `.perfetto.json` for counters and slices that ui.perfetto.dev shows,
/// by themselves or under the kernels of PyTorch's profiler. A further `.zst` or `.gz` compresses it.
#[derive(Args, Debug)]
#[command(after_help = CONVERT_EXAMPLES)]
pub(crate) struct ConvertArgs {
    /// The recording to read; `-` reads standard input
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,

    /// The file to write; an existing file is replaced once everything is written. Not `-`, because the name
    /// decides the format. Not IN itself
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,

    /// Write only this device [default: all]
    #[arg(long, value_name = "N", value_parser = device, allow_hyphen_values = true)]
    pub(crate) device: Option<u32>,

    /// Put the memory into a copy of this profile: a file by export_chrome_trace() of torch.profiler in the same run,
    /// plain or compressed by gzip. OUT ends in `.perfetto.json`. Not a pipe, because it is read twice
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
}

/// Show where a recorded job's memory went, as one page for a browser
///
/// The page works offline. It shows memory over time down to single events, and the blocks at every address with
/// the code that allocated them. It also shows why reserved memory was not live, and what other allocators would
/// have reserved. Several recordings (ranks; before and after) are compared. Exits with 0 if the page was written
/// and, with --open, opened; with 2 for a bad argument or file.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// A PyTorch memory snapshot or a trace of lowtide's own, plain or compressed (zstd, gzip, xz, bzip2);
    /// `-` reads standard input. May be repeated
    #[arg(value_name = "TRACE", required = true)]
    pub(crate) traces: Vec<PathBuf>,

    /// The page to write; an existing file is replaced. `-` prints it [default: named after the first recording, in
    /// the working directory]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Open the page in the browser
    #[arg(long)]
    pub(crate) open: bool,
}

/// Show what a recorded job had more of than another one, or than itself before
///
/// Compares live memory at the peaks, by the stack that allocated it, or by size and stream if no stacks are
/// recorded. The confidence is 1 if every step of the second recording holds more of it than every step of the
/// first (or less, if it shrank), and 0 if as many hold more as hold less. Exits with 0 whether or not they differ;
/// with 2 for a bad argument or file.
#[derive(Args, Debug)]
pub(crate) struct DiffArgs {
    /// The recording to compare with: a PyTorch memory snapshot or a trace of lowtide's own
    #[arg(value_name = "BEFORE")]
    pub(crate) before: PathBuf,

    /// The recording to describe
    #[arg(value_name = "AFTER")]
    pub(crate) after: PathBuf,

    /// The device, if the recordings have several [default: the one with the most events]
    #[arg(long, value_name = "N", value_parser = device, allow_hyphen_values = true)]
    pub(crate) device: Option<u32>,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show what grows from step to step of a recorded job and is not freed
///
/// Steps are those that the program (or its optimizer) marked, or else the period of its requests. The first
/// quarter of the steps is left out, because they may fill caches. Growth is named by the stack that allocated it,
/// or by size and stream if no stacks are recorded. The confidence, from 0 to 1, is high if it grew in many steps,
/// evenly, to the end, and never shrank; from 0.7 on it is called a leak. Exits with 0 whether or not there is one;
/// with 2 for a bad argument or file.
#[derive(Args, Debug)]
pub(crate) struct LeaksArgs {
    #[command(flatten)]
    pub(crate) recording: RecordingArgs,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Check that a recorded job keeps to limits, for continuous integration
///
/// Prints a line for each limit and device. Exits with 0 if all are kept, with 1 if one is not, and with 2 for a bad argument
/// or file.
#[derive(Args, Debug)]
#[command(after_help = CHECK_EXAMPLES)]
pub(crate) struct CheckArgs {
    /// A PyTorch memory snapshot or a trace of lowtide's own, plain or compressed (zstd, gzip, xz, bzip2);
    /// `-` reads standard input
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,

    /// The most that may be live at once: the tensors, each request rounded up to 512 bytes. `40GiB`, `40G`, `43GB`
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_allocated: Option<Bytes>,

    /// The most that may be reserved from the driver
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_reserved: Option<Bytes>,

    /// The largest share of the peak of reserved memory that may be above the peak of live bytes, for example `10%`
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) max_fragmentation: Option<f64>,

    /// Nothing may grow from step to step, as `lowtide leaks` finds it
    #[arg(long)]
    pub(crate) no_leak: bool,

    /// No request may run out of memory
    #[arg(long)]
    pub(crate) no_oom: bool,

    /// An earlier recording: the peaks of live and of reserved memory may not be larger, but for the tolerance
    #[arg(long, value_name = "BASELINE")]
    pub(crate) against: Option<PathBuf>,

    /// By how much the peaks may be larger than those of the baseline
    #[arg(long, value_name = "SHARE", default_value = "2%", value_parser = share)]
    pub(crate) tolerance: f64,

    /// Also write the results to FILE as JUnit XML
    #[arg(long, value_name = "FILE")]
    pub(crate) junit: Option<PathBuf>,
}

/// Run a script, or any program that calls CUDA, with lowtide as its allocator
///
/// PROGRAM is a Python script, `-m MODULE`, or a command that starts Python, such as `python train.py` or `torchrun train.py`.
/// Every Python that it starts has lowtide as PyTorch's allocator. A line on standard error says so. The exit code is the
/// program's; 127 if there is no such program, 126 if it cannot be started.
///
/// With --preload it is any program, in any language: its memory from cudaMalloc, cudaMallocAsync or cuMemAlloc comes from
/// lowtide. At the end, a summary on standard error says what that saved.
#[derive(Args, Debug)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// Put lowtide in front of the driver, by LD_PRELOAD; processes that the program starts inherit it. For programs
    /// without PyTorch
    #[arg(long)]
    pub(crate) preload: bool,

    /// The allocator: `tide`, `direct`, `pool`, `buddy`, `slab`, `bfc` or `caching` [default: LOWTIDE_STRATEGY and
    /// LOWTIDE_CONF, else tide; with --preload caching]
    #[arg(long, value_name = "NAME[:CONF]", value_parser = configuration)]
    pub(crate) strategy: Option<String>,

    /// The options of the allocator, in the syntax of PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, value_name = "CONF")]
    pub(crate) config: Option<String>,

    /// Write into recordings which module made each allocation, and which are parameters, gradients, optimizer state and
    /// inputs, as lowtide.categorize does for one model
    #[arg(long, conflicts_with = "preload")]
    pub(crate) categories: bool,

    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) program: Vec<OsString>,
}

/// Record all memory events of a program that runs on lowtide
///
/// Every process of the command that uses a GPU through lowtide writes its events, as they happen, to a file of its
/// own. The file is FILE, or has the process's rank (`.rank3`) or, for further processes, its process id
/// (`.pid1234`) before the extension. Every other command reads it, also while it is written and after the process was
/// killed. A Python program is put on lowtide, as by `lowtide run`; another has to run on it: `lowtide record lowtide run
/// --preload PROGRAM`. The exit code is the command's, or 128 plus the number of the signal that ended it. One line at the
/// end says what was recorded, or that nothing was.
#[derive(Args, Debug)]
#[command(after_help = RECORD_EXAMPLES)]
pub(crate) struct RecordArgs {
    /// The file to write. An earlier recording of this name is replaced once the command begins to record. A file
    /// that is not a recording of lowtide's is refused
    #[arg(short, long, value_name = "FILE", default_value = "recording.lowtide")]
    pub(crate) output: PathBuf,

    /// Record with each request the functions that led to it: those of Python (3.11 or newer) or, if there are
    /// none, those of the program
    #[arg(long)]
    pub(crate) stacks: bool,

    /// Record which module made each allocation, and which are parameters, gradients, optimizer state and inputs, as
    /// lowtide.categorize does for one model
    #[arg(long)]
    pub(crate) categories: bool,

    /// The command and its arguments
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) command: Vec<OsString>,
}

/// Show the processes of this machine that run on lowtide, and their memory
///
/// By device, region and stream: live and reserved memory, and the rates of requests to lowtide and to the driver.
/// Shows this user's processes in the same network namespace (a container has one of its own), except those with
/// LOWTIDE_PUBLISH=0. A reading costs a process the sum of a few counters.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// Take one reading, over one interval, and print that
    #[arg(long)]
    pub(crate) once: bool,

    /// Print one JSON object for each process, in a list, instead of a table; takes one reading
    #[arg(long)]
    pub(crate) json: bool,

    /// The time between two readings, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub(crate) interval: f64,
}

/// Print what a shell needs to complete the arguments of `lowtide`
#[derive(Args, Debug)]
#[command(after_help = COMPLETION_EXAMPLES)]
pub(crate) struct CompletionArgs {
    /// The shell
    pub(crate) shell: Shell,
}

/// Check what lowtide finds on this machine, and say what to do about missing parts
///
/// Checks the driver and the cards, and, if a Python has lowtide's package, PyTorch, the compiler and the shim. Exits with 0
/// if lowtide works here, even with features missing; with 1 if it does not.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Leave out the checks that need Python. The Python package calls this command so
    #[arg(long, hide = true)]
    pub(crate) without_python: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// The recording and its device.
#[derive(Args, Debug)]
pub(crate) struct RecordingArgs {
    /// A PyTorch memory snapshot or a trace of lowtide's own, plain or compressed (zstd, gzip, xz, bzip2);
    /// `-` reads standard input
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,

    /// The device, if the recording has several [default: the one with the most events]
    #[arg(long, value_name = "N", value_parser = device, allow_hyphen_values = true)]
    pub(crate) device: Option<u32>,
}

/// The job to replay, and the device to replay it on.
#[derive(Args, Debug)]
pub(crate) struct SourceArgs {
    #[command(flatten)]
    pub(crate) recording: RecordingArgs,

    /// The memory of the simulated device: bytes, `12GiB` or `12G` (powers of 1024), `80GB` (powers of 1000), or `1.02x`
    /// the job's peak live bytes [default: no limit; for `advise`, the limit that the job died under]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) capacity: Option<Capacity>,
}

/// The strategies that `--strategy` names.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum StrategyChoice {
    /// `all`.
    All,
    /// One strategy.
    One {
        /// Its options.
        config: Config,
        /// Whether options were given, even as an empty text after a colon.
        has_conf: bool,
    },
}

/// Checks that `text` names a strategy with valid options, and returns it unchanged.
fn configuration(text: &str) -> Result<String, String> {
    let config = text.parse::<Config>().map_err(|error| error.to_string());
    config.map(|_| text.to_owned())
}

fn interval(text: &str) -> Result<f64, &'static str> {
    let seconds = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.ok_or("expected seconds, from 0.01 to 3600")
}

fn size(text: &str) -> Result<Bytes, String> {
    match text.parse()? {
        Capacity::Absolute(bytes) => Ok(bytes),
        Capacity::TimesPeakLive(_) => Err("expected bytes, or a size such as 12GiB".into()),
    }
}

fn share(text: &str) -> Result<f64, &'static str> {
    let number = text
        .strip_suffix('%')
        .map(|number| number.trim().parse::<f64>());
    let percent = number.and_then(Result::ok);
    let percent = percent.filter(|percent| (0.0..=1000.0).contains(percent));
    percent
        .map(|percent| percent / 100.0)
        .ok_or("expected a share in percent, such as 10%")
}

fn device(text: &str) -> Result<u32, &'static str> {
    text.parse()
        .map_err(|_| "expected the number of a device, 0 for the first")
}

impl CheckArgs {
    /// Returns whether a limit is named.
    pub(crate) fn asks_for_any(&self) -> bool {
        let sizes = self.max_allocated.is_some() || self.max_reserved.is_some();
        let others = self.max_fragmentation.is_some() || self.against.is_some();
        sizes || others || self.no_leak || self.no_oom
    }
}

impl SourceArgs {
    /// Returns the memory of the simulated device for a job with this peak of live bytes; `None` for no limit.
    pub(crate) fn resolve_capacity(&self, peak_live: Bytes) -> Option<Bytes> {
        self.capacity.map(|capacity| capacity.resolve(peak_live))
    }
}

impl FromStr for StrategyChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<StrategyChoice, String> {
        if text == "all" {
            return Ok(StrategyChoice::All);
        }
        let config = text.parse::<Config>().map_err(|error| error.to_string())?;
        let has_conf = text.contains(':');
        Ok(StrategyChoice::One { config, has_conf })
    }
}

impl ReplayArgs {
    /// Returns the configurations to replay, each once, in the order they were named.
    ///
    /// `recorded` returns the settings of the recording; it is called only if they are needed.
    ///
    /// # Errors
    ///
    /// If another allocator than PyTorch's is to be verified.
    pub(crate) fn configs(
        &self,
        mut recorded: impl FnMut() -> CachingConfig,
    ) -> anyhow::Result<Vec<Config>> {
        let mut configs = Vec::new();
        for choice in &self.strategies {
            match choice {
                StrategyChoice::All if self.verify => return Err(only_caching("all")),
                StrategyChoice::All => configs.extend(all_configs()),
                StrategyChoice::One { config, .. }
                    if self.verify && config.name() != StrategyName::Caching =>
                {
                    return Err(only_caching(config.name().as_str()));
                }
                StrategyChoice::One {
                    has_conf: false, ..
                } if self.verify => configs.push(Config::Caching(recorded())),
                StrategyChoice::One { config, .. } => configs.push(config.clone()),
            }
        }
        if configs.is_empty() {
            if self.verify {
                configs.push(Config::Caching(recorded()));
            } else {
                configs.extend(all_configs());
            }
        }

        let mut distinct: Vec<Config> = Vec::new();
        for config in configs {
            if !distinct.contains(&config) {
                distinct.push(config);
            }
        }
        Ok(distinct)
    }
}

/// Returns the configurations that `all` stands for, the default strategy first.
pub(crate) fn all_configs() -> impl Iterator<Item = Config> {
    let expandable = Config::Caching(CachingConfig {
        expandable_segments: true,
        ..CachingConfig::default()
    });
    StrategyName::ALL
        .into_iter()
        .rev()
        .map(|name| Config::parse(name.as_str(), "").expect("every default is a configuration"))
        .chain([expandable])
}

fn only_caching(named: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "--strategy {named} cannot be verified: a recording has the addresses of PyTorch's own \
         allocator, `caching`"
    )
}

/// Returns the text of a script that completes the arguments in a shell.
pub(crate) fn completion(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut CommandLine::command(), "lowtide", &mut script);
    script
}

/// Returns the manual page: of the command, then of each subcommand.
///
/// # Errors
///
/// If it cannot be written, which does not happen in memory.
pub(crate) fn manual() -> std::io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let mut command = CommandLine::command();
    command.build();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        writeln!(page, ".SH LOWTIDE {}", subcommand.get_name().to_uppercase())?;
        let manual = clap_mangen::Man::new(subcommand.clone());
        manual.render_description_section(&mut page)?;
        manual.render_synopsis_section(&mut page)?;
        manual.render_options_section(&mut page)?;
    }
    Ok(page)
}

/// Parses the command line. If it asks for help or is wrong, prints that and returns the exit code.
pub(crate) fn parse() -> Result<Command, ExitCode> {
    CommandLine::try_parse()
        .map(|line| line.command)
        .map_err(|error| match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                let _ = error.print();
                ExitCode::SUCCESS
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                let _ = error.print();
                ExitCode::from(2)
            }
            _ => {
                output::note(&one_line(&error));
                ExitCode::from(2)
            }
        })
}

/// Returns the error without the usage that clap appends.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let (what, _) = text.split_once("\n\nUsage:").unwrap_or((&text, ""));
    let (what, _) = what.split_once("\n\nFor more").unwrap_or((what, ""));
    let paragraphs: Vec<String> = what
        .split("\n\n")
        // No argument of these commands looks like an option.
        .filter(|paragraph| !paragraph.contains("tip: to pass"))
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let what = paragraphs.join("; ");
    what.strip_prefix("error: ").unwrap_or(&what).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the configurations that a command line replays, for a recording with expandable segments.
    fn configs(arguments: &[&str]) -> Result<Vec<String>, String> {
        let line = ["lowtide", "replay", "TRACE"].iter().chain(arguments);
        let line = CommandLine::try_parse_from(line).map_err(|error| one_line(&error))?;
        let Command::Replay(args) = line.command else {
            panic!("not a replay");
        };
        let recorded = || CachingConfig {
            expandable_segments: true,
            ..CachingConfig::default()
        };
        let configs = args.configs(recorded).map_err(|error| error.to_string())?;
        Ok(configs.iter().map(Config::to_string).collect())
    }

    fn check(arguments: &[&str], expected: &[&str]) {
        let expected = expected.iter().map(|&text| text.to_owned()).collect();
        assert_eq!(configs(arguments), Ok(expected), "{arguments:?}");
    }

    #[test]
    fn completions_and_the_manual_page_have_every_command() {
        let manual = String::from_utf8(manual().unwrap()).unwrap();
        let shells = [Shell::Bash, Shell::Zsh, Shell::Fish];
        let scripts = shells.map(|shell| String::from_utf8(completion(shell)).unwrap());
        for command in CommandLine::command().get_subcommands() {
            let name = command.get_name();
            assert!(
                manual.contains(&format!(".SH LOWTIDE {}\n", name.to_uppercase())),
                "{name}"
            );
            assert!(scripts.iter().all(|script| script.contains(name)), "{name}");
        }
    }

    #[test]
    fn all_is_every_strategy_and_expandable_segments() {
        let mut all: Vec<&str> = StrategyName::ALL.map(StrategyName::as_str).to_vec();
        all.reverse();
        assert_eq!(all[0], "tide");
        all.push("caching:expandable_segments:True");
        check(&[], &all);
        check(&["--strategy", "all"], &all);
        check(&["--strategy", "all", "--strategy", "bfc"], &all);
    }

    #[test]
    fn options_follow_the_first_colon() {
        check(
            &[
                "--strategy",
                "caching:expandable_segments:True,roundup_power2_divisions:4",
                "--strategy",
                "direct",
                "--strategy",
                "direct:",
            ],
            &[
                "caching:roundup_power2_divisions:4,expandable_segments:True",
                "direct",
            ],
        );
    }

    #[test]
    fn verification_takes_the_recorded_settings() {
        let recorded = ["caching:expandable_segments:True"];
        check(&["--verify"], &recorded);
        check(&["--verify", "--strategy", "caching"], &recorded);
        check(&["--verify", "--strategy", "caching:"], &["caching"]);
        check(
            &["--verify", "--strategy", "caching:max_split_size_mb:64"],
            &["caching:max_split_size_mb:64"],
        );
    }

    #[test]
    fn only_pytorchs_allocator_is_verified() {
        for name in ["all", "bfc"] {
            let error = configs(&["--verify", "--strategy", name]).unwrap_err();
            let expected = format!("--strategy {name} cannot be verified");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
