//! `lowtide record`: a program that runs on lowtide, recorded as it runs.

pub(crate) mod watch;

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{self, Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use lowtide_trace::file_names;

use crate::args::RecordArgs;
use crate::run;

/// What liblowtide.so looks for in its environment.
const FILE: &str = "LOWTIDE_RECORD";

const STACKS: &str = "LOWTIDE_RECORD_STACKS";

/// Becomes the program, each of whose processes records what it does on lowtide. Returns only where there is
/// none to become.
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
    make_way(&own).with_context(|| args.output.display().to_string())?;
    let mut command = Command::new(program);
    command.args(arguments).env(FILE, &file);
    command.env(STACKS, if args.stacks { "1" } else { "0" });
    watch::begin(program.as_ref(), &own, &args.output);
    Ok(run::become_program(&mut command))
}

/// Removes what an earlier recording of this name has left, whose files would be taken for ranks of this one, and sees
/// that there can be a new one.
///
/// # Errors
///
/// If something else has the name, and then nothing is removed; or if no file can be there.
fn make_way(file: &Path) -> io::Result<()> {
    file_names::check_replaceable(file)?;
    for earlier in files_of(file)? {
        fs::remove_file(earlier)?;
    }
    // What is no file, as a pipe, is written to as it is.
    if !file.exists() {
        // Better now than in a line between those of the program.
        File::create_new(file)?;
        fs::remove_file(file)?;
    }
    Ok(())
}

/// Returns the recordings that are there of this name, of its processes and ranks.
///
/// # Errors
///
/// If the directory cannot be read.
fn files_of(file: &Path) -> io::Result<Vec<PathBuf>> {
    let directory = file.parent().unwrap_or(Path::new("/"));
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_recording = || path.is_file() && file_names::check_replaceable(&path).is_ok();
        if file_names::is_of(file, &path) && is_recording() {
            files.push(path);
        }
    }
    Ok(files)
}
