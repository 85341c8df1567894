//! `lowtide record`: a program that runs on lowtide, recorded as it runs.

pub(crate) mod watch;

use std::env;
use std::io;
use std::path::{self, Path};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use lowtide_files::{NewFile, Readers};
use lowtide_trace::{EarlierFiles, file_names};

use crate::args::RecordArgs;
use crate::run;

/// What liblowtide.so looks for in its environment.
const FILE: &str = "LOWTIDE_RECORD";

/// The recordings that are there already: each stays until a process of the program begins one.
const EARLIER: &str = "LOWTIDE_RECORD_EARLIER";

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
    let name = || args.output.display().to_string();
    check_place(&own).with_context(name)?;
    let earlier = EarlierFiles::of(&own).with_context(name)?;
    let mut command = Command::new(program);
    command.args(arguments).env(FILE, &file);
    command.env(STACKS, if args.stacks { "1" } else { "0" });
    command.env(EARLIER, earlier.to_string());
    watch::begin(program.as_ref(), &own, &args.output, &earlier);
    Ok(run::become_program(&mut command))
}

/// Sees that there can be a new recording.
///
/// # Errors
///
/// If something else has the name, or no file can be there.
fn check_place(file: &Path) -> io::Result<()> {
    file_names::check_replaceable(file)?;
    // Better now than in a line between those of the program.
    NewFile::create(file, Readers::User).map(drop)
}
