//! `lowtide record`: records a program that runs on lowtide, while it runs.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{self, Path};
use std::process::{Child, Command, ExitCode, ExitStatus};

use anyhow::{Context as _, bail};
use lowtide_files::{NewFile, Readers};
use lowtide_trace::{JobStart, Trace, file_names};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::RecordArgs;
use crate::program::{find_program, not_run};
use crate::{output, python};

/// The environment variable from which liblowtide.so gets the file's path.
const FILE: &str = "LOWTIDE_RECORD";

const STACKS: &str = "LOWTIDE_RECORD_STACKS";

/// The variable that makes the package's hooks write categories into recordings.
const CATEGORIES: &str = "LOWTIDE_CATEGORIES";

/// A larger file has more than its beginning, so it is not read to find that out.
const BEGINNING_MAX: u64 = 1 << 16;

/// Runs the program. Each of its processes records its own memory events. Prints a line if no process recorded any.
/// Returns the program's exit code, or 128 plus the number of the signal that ended it.
///
/// # Errors
///
/// If the file cannot be written, or if it exists and is not a recording.
pub(crate) fn run(args: &RecordArgs) -> anyhow::Result<ExitCode> {
    let [program, ..] = &*args.command else {
        bail!("no command given");
    };
    if program.to_string_lossy().starts_with('-') && program != "-m" {
        bail!(
            "unknown option `{}`; options of the command come after its name",
            program.display()
        );
    }
    let is_script = program == "-m" || python::is_started_by(program);
    if !is_script && let Err(error) = find_program(program) {
        return Ok(not_run(program, &error));
    }
    let words = on_lowtide(&args.command, is_script)?;
    // The program may change its working directory before it uses a device.
    let file = path::absolute(&args.output)?;
    // If each rank is started by its own command, other ranks may be running already.
    let variable = |name: &str| Some(env::var_os(name)?.to_string_lossy().into_owned());
    let own = file_names::of_rank(&file, variable);
    let start = check_place(&own).with_context(|| args.output.display().to_string())?;
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).env(FILE, &file);
    command.env(STACKS, if args.stacks { "1" } else { "0" });
    if args.categories {
        command.env(CATEGORIES, "1");
    }
    command.env(JobStart::VARIABLE, start.to_text());
    let status = match command.spawn() {
        Ok(child) => wait_for(child)?,
        Err(error) => return Ok(not_run(program, &error)),
    };
    if let Some(what) = what_is_missing(&own, start) {
        let (name, program) = (args.output.display(), program.display());
        output::note(&format!("{name}: nothing was recorded: `{program}` {what}"));
    }
    Ok(exit_code(status))
}

/// Returns the words to start: `python -m lowtide run` before the command, unless that runs on lowtide itself.
///
/// # Errors
///
/// If no Python has lowtide's package, and the command is a script. Another program may be linked to lowtide.
fn on_lowtide(command: &[OsString], is_script: bool) -> anyhow::Result<Vec<OsString>> {
    if runs_on_lowtide(command) {
        return Ok(command.to_vec());
    }
    match python::package_command() {
        Ok(package) => Ok([&package[..], &["run".into(), "--".into()], command].concat()),
        Err(error) if is_script => Err(error),
        Err(_) => Ok(command.to_vec()),
    }
}

/// Returns whether a command is `lowtide`, or `python -m lowtide` with options of Python's.
fn runs_on_lowtide(command: &[OsString]) -> bool {
    let [program, arguments @ ..] = command else {
        return false;
    };
    let name = Path::new(program).file_name().unwrap_or_default();
    let is_python = name.to_string_lossy().starts_with("python");
    let is_option = |word: &&OsString| word.to_string_lossy().starts_with('-');
    let mut options = arguments.iter().take_while(is_option);
    let module = options.position(|word| word == "-m" || word == "-mlowtide");
    let is_package = |index: usize| {
        arguments[index] == "-mlowtide"
            || arguments
                .get(index + 1)
                .is_some_and(|word| word == "lowtide")
    };
    name == "lowtide" || is_python && module.is_some_and(is_package)
}

/// Checks that a new recording can be created, and returns the present time by the clock of its file system.
///
/// # Errors
///
/// If another kind of file has the name, or no file can be created there.
fn check_place(file: &Path) -> io::Result<JobStart> {
    file_names::check_replaceable(file)?;
    // An error here comes before the program's output and not in the middle of it.
    JobStart::of(NewFile::create(file, Readers::User)?.file())
}

/// Waits for the program. The terminal sends its signals to the program too, so this process ignores them. A
/// request to end is passed on.
fn wait_for(mut program: Child) -> io::Result<ExitStatus> {
    // Only after the program has started: it must inherit signals that are ignored, as `nohup` sets them.
    let mut signals = Signals::new([SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGCHLD])?;
    loop {
        if let Some(status) = program.try_wait()? {
            return Ok(status);
        }
        for signal in signals.wait() {
            let passed_on = match signal {
                SIGTERM => Signal::TERM,
                SIGHUP => Signal::HUP,
                _ => continue,
            };
            // The program may have ended, which the next iteration finds.
            let _ = kill_process(Pid::from_child(&program), passed_on);
        }
    }
}

/// Returns the exit code that shells use for a program's end.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = { status.code() }.or_else(|| Some(128 + status.signal()?));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Returns what the program did not do, if none of its processes recorded anything in a file of this name.
fn what_is_missing(file: &Path, start: JobStart) -> Option<&'static str> {
    let mut files = file_names::files_of(file).ok()?;
    files.retain(|file| { file.symlink_metadata() }.is_ok_and(|file| !start.is_after(&file)));
    if files.iter().any(|file| has_any(file)) {
        return None;
    }
    Some(if files.is_empty() {
        "used no GPU, or does not run on lowtide, as `lowtide run SCRIPT` and \
             `lowtide run --preload PROGRAM` do"
    } else {
        "asked for no GPU memory"
    })
}

/// Returns whether anything was allocated in a recording. If that is unknown, returns true, so that nothing is
/// reported.
fn has_any(file: &Path) -> bool {
    let file = lowtide_files::open_own(file).ok().flatten();
    let is_beginning = |file: &File| {
        let metadata = file.metadata();
        metadata.is_ok_and(|file| file.len() <= BEGINNING_MAX)
    };
    match file.filter(is_beginning).map(lowtide_trace::read_from) {
        Some(Ok(snapshot)) => snapshot.traces.iter().any(Trace::is_used),
        _ => true,
    }
}
