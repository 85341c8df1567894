//! Says at the end of a recorded command that nothing was recorded, where that is so.
//!
//! `lowtide record` becomes the command, so that exit code, signals and terminal are the command's own. What watches
//! it is a process beside it: no child of it, which it might wait for, and in a group of its own, so that what ends the
//! command's group leaves it. It holds the command's standard error, and what the command inherited above that, until
//! the command ends.

use std::env;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{self, Command, Stdio};

use lowtide_trace::{EarlierFiles, file_names};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::args::{WATCH, WatchArgs};
use crate::output;

/// A larger file has more than its beginning, and is not read to know that.
const BEGINNING_MAX: u64 = 1 << 16;

/// Has this process watched, which is to become `program` and to record to `file`, which its user calls `name` and
/// where `earlier` recordings are.
/// Where that cannot be, as on an old kernel, nothing will be said.
pub(crate) fn begin(program: &Path, file: &Path, name: &Path, earlier: &EarlierFiles) {
    // The first process of a container is everyone's parent in the end, and ends everyone with it.
    if process::id() == 1 {
        return;
    }
    let args = WatchArgs {
        is_alone: false,
        process: process::id().cast_signed(),
        program: program.to_owned(),
        file: file.to_owned(),
        name: name.to_owned(),
        earlier: earlier.to_string(),
    };
    let _ = command(&args).and_then(|mut watch| watch.stdout(Stdio::null()).status());
}

/// Watches, as [`begin`] has it: this process starts another like it and ends once that knows whom it watches, which
/// then is no child of the command.
///
/// # Errors
///
/// If the system does not let a process be watched.
pub(crate) fn run(args: &WatchArgs) -> io::Result<()> {
    if !args.is_alone {
        let mut watch = command(&WatchArgs {
            is_alone: true,
            ..args.clone()
        })?;
        let started = watch.process_group(0).stdout(Stdio::piped()).spawn()?;
        let mut until_ready = started.stdout.ok_or(Errno::PIPE)?;
        return until_ready.read_to_end(&mut Vec::new()).map(drop);
    }
    let process = open(args.process)?;
    // That is what the first waits for. Nothing is written there from now on.
    rustix::stdio::dup2_stdout(File::open("/dev/null")?)?;
    env::set_current_dir("/")?;
    wait_for(&process)?;
    if let Some(what) = what_is_missing(args) {
        output::note(&what);
    }
    Ok(())
}

/// Returns this program with `args`.
fn command(args: &WatchArgs) -> io::Result<Command> {
    let mut watch = Command::new(env::current_exe()?);
    watch.arg(WATCH).stdin(Stdio::null());
    if args.is_alone {
        watch.arg("--is-alone");
    }
    watch.arg("--").arg(args.process.to_string());
    watch.args([&args.program, &args.file, &args.name]);
    watch.arg(&args.earlier);
    Ok(watch)
}

fn open(process: i32) -> io::Result<OwnedFd> {
    let process = Pid::from_raw(process).ok_or(Errno::SRCH)?;
    Ok(pidfd_open(process, PidfdFlags::empty())?)
}

/// Returns when a process has ended.
fn wait_for(process: &OwnedFd) -> io::Result<()> {
    let mut ends = [PollFd::new(process, PollFlags::IN)];
    while let Err(error) = poll(&mut ends, None) {
        if error != Errno::INTR {
            return Err(error.into());
        }
    }
    Ok(())
}

/// Returns what there is to say where no file has anything in it.
fn what_is_missing(args: &WatchArgs) -> Option<String> {
    let (earlier, files): (Vec<_>, Vec<_>) = {
        let known = EarlierFiles::parse(&args.earlier);
        let files = file_names::files_of(&args.file).ok()?;
        files.into_iter().partition(|file| known.contain(file))
    };
    if files.iter().any(|file| has_any(file)) {
        return None;
    }
    let (name, program) = (args.name.display(), args.program.display());
    let stays = match earlier.is_empty() {
        true => "",
        false => "; what was recorded there before is as it was",
    };
    Some(match files.is_empty() {
        true => format!(
            "{name}: nothing was recorded: `{program}` used no GPU, or does not run on lowtide, as \
             `python -m lowtide run SCRIPT` and `lowtide run --preload PROGRAM` do{stays}"
        ),
        false => format!("{name}: nothing was recorded: `{program}` asked for no GPU memory"),
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
        Some(Ok(snapshot)) => snapshot.traces.iter().any(lowtide_trace::Trace::is_used),
        _ => true,
    }
}
