//! `lowtide record`: a program that runs on lowtide, recorded as it runs.

use std::env;
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
use crate::{output, run};

/// What liblowtide.so looks for in its environment.
const FILE: &str = "LOWTIDE_RECORD";

const STACKS: &str = "LOWTIDE_RECORD_STACKS";

/// A larger file has more than its beginning, and is not read to know that.
const BEGINNING_MAX: u64 = 1 << 16;

/// Runs the program, each of whose processes records what it does on lowtide, and prints a line if none has. Returns the
/// program's exit code, or 128 and the signal that ended it.
///
/// # Errors
///
/// If nothing can be written to the file, or it is something other than a recording.
pub(crate) fn run(args: &RecordArgs) -> anyhow::Result<ExitCode> {
    let [program, arguments @ ..] = &*args.command else {
        bail!("no command given");
    };
    if program.to_string_lossy().starts_with('-') {
        bail!(
            "unknown option `{}`; options of the command come after its name",
            program.display()
        );
    }
    if let Err(error) = run::find_program(program) {
        return Ok(run::not_run(program, &error));
    }
    // The program may go elsewhere before it uses a device.
    let file = path::absolute(&args.output)?;
    // Where each rank is started by a command of its own, others may be at work already.
    let variable = |name: &str| Some(env::var_os(name)?.to_string_lossy().into_owned());
    let own = file_names::of_rank(&file, variable);
    let start = check_place(&own).with_context(|| args.output.display().to_string())?;
    let mut command = Command::new(program);
    command.args(arguments).env(FILE, &file);
    command.env(STACKS, if args.stacks { "1" } else { "0" });
    command.env(JobStart::VARIABLE, start.to_text());
    let status = match command.spawn() {
        Ok(child) => wait_for(child)?,
        Err(error) => return Ok(run::not_run(program, &error)),
    };
    if let Some(what) = what_is_missing(&own, start) {
        let (name, program) = (args.output.display(), program.display());
        output::note(&format!("{name}: nothing was recorded: `{program}` {what}"));
    }
    Ok(exit_code(status))
}

/// Sees that there can be a new recording, and returns the time, by the clock of its file system.
///
/// # Errors
///
/// If something else has the name, or no file can be there.
fn check_place(file: &Path) -> io::Result<JobStart> {
    file_names::check_replaceable(file)?;
    // Better now than in a line between those of the program.
    JobStart::of(NewFile::create(file, Readers::User)?.file())
}

/// Waits for the program. The terminal sends its signals to the program, too, so those are ignored here; a request to
/// end is passed on.
fn wait_for(mut program: Child) -> io::Result<ExitStatus> {
    // After the program has started, which inherits what is ignored, as by `nohup`.
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
            // It may have ended, which is found next.
            let _ = kill_process(Pid::from_child(&program), passed_on);
        }
    }
}

/// Returns the code that shells have for a program's end.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = { status.code() }.or_else(|| Some(128 + status.signal()?));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Returns what the program did not do, if no process of it has recorded anything in a file of this name.
fn what_is_missing(file: &Path, start: JobStart) -> Option<&'static str> {
    let mut files = file_names::files_of(file).ok()?;
    files.retain(|file| { file.symlink_metadata() }.is_ok_and(|file| !start.is_after(&file)));
    if files.iter().any(|file| has_any(file)) {
        return None;
    }
    Some(match files.is_empty() {
        true => {
            "used no GPU, or does not run on lowtide, as `python -m lowtide run SCRIPT` and \
             `lowtide run --preload PROGRAM` do"
        }
        false => "asked for no GPU memory",
    })
}

/// Returns whether anything was allocated in a recording; where that cannot be told, it is not said to be missing.
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
