//! `lowtide record`: a program that runs on lowtide, recorded as it runs.

use std::fs::{self, File};
use std::path::{self, Path};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};

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
    remove_earlier(&file).with_context(name)?;
    // Better now than in a line between those of the program.
    File::create_new(&file).with_context(name)?;
    fs::remove_file(&file).with_context(name)?;
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
        if is_of_recording(file, &path) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Returns whether a path is `file`, or that with a process's mark before the extension.
fn is_of_recording(file: &Path, path: &Path) -> bool {
    path == file || path.parent() == file.parent() && mark(file, path).is_some_and(is_mark)
}

/// Returns `rank3` for `job.lowtide` and `job.rank3.lowtide`.
fn mark<'a>(file: &Path, path: &'a Path) -> Option<&'a str> {
    let name = path.file_name()?.to_str()?;
    let rest = name.strip_prefix(file.file_stem()?.to_str()?)?;
    let rest = rest.strip_prefix('.')?;
    match file.extension() {
        Some(extension) => rest.strip_suffix(extension.to_str()?)?.strip_suffix('.'),
        None => Some(rest),
    }
}

fn is_mark(text: &str) -> bool {
    let digits = text
        .strip_prefix("rank")
        .or_else(|| text.strip_prefix("pid"));
    digits.is_some_and(|digits| {
        !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_recording_made_is_of_it() {
        let file = Path::new("/data/a.job.lowtide");
        let are = [
            "a.job.lowtide",
            "a.job.rank0.lowtide",
            "a.job.pid1234.lowtide",
        ];
        for name in are {
            assert!(
                is_of_recording(file, &Path::new("/data").join(name)),
                "{name}"
            );
        }
        let are_not = [
            "b.job.lowtide",
            "a.job.rank.lowtide",
            "a.job.rank1b.lowtide",
            "a.job.rank1.pickle",
            "a.job.old.lowtide",
            "a.rank1.lowtide",
            "rank1.lowtide",
        ];
        for name in are_not {
            assert!(
                !is_of_recording(file, &Path::new("/data").join(name)),
                "{name}"
            );
        }
        assert!(!is_of_recording(
            file,
            Path::new("/other/a.job.rank0.lowtide")
        ));
        assert!(is_of_recording(
            Path::new("/x/job"),
            Path::new("/x/job.rank3")
        ));
    }
}
