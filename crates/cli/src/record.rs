//! `lowtide record`: a program that runs on lowtide, recorded as it runs.

use std::env;
use std::fs::{self, File};
use std::path::{self, Path};
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
/// If nothing can be written to the file.
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
    // The program may go elsewhere before it uses a device.
    let file = path::absolute(&args.output)?;
    let name = || args.output.display().to_string();
    // Where each rank is started by a command of its own, others may be at work already.
    let variable = |name: &str| Some(env::var_os(name)?.to_string_lossy().into_owned());
    let own = file_names::of_rank(&file, variable);
    remove_earlier(&own).with_context(name)?;
    // Better now than in a line between those of the program.
    File::create_new(&own).with_context(name)?;
    fs::remove_file(&own).with_context(name)?;
    let mut command = Command::new(program);
    command.args(arguments).env(FILE, &file);
    command.env(STACKS, if args.stacks { "1" } else { "0" });
    Ok(run::become_program(&mut command))
}

/// Removes what an earlier recording of this name has left: its files would be taken for ranks of this one.
fn remove_earlier(file: &Path) -> std::io::Result<()> {
    let directory = file.parent().unwrap_or(Path::new("/"));
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if file_names::is_of(file, &path) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}
