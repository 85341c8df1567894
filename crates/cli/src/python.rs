//! The Python that has lowtide's package: it runs scripts on lowtide, and builds the shim for PyTorch.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::Result;

use crate::program::{find_program, not_run};

/// Fails if a Python does not find the package. Does not import it. A directory of that name has no origin.
const HAS_PACKAGE: &str = "import importlib.util as u; s = u.find_spec('lowtide'); raise SystemExit(not (s and s.origin))";

/// The most of a program's first line that is read.
const FIRST_LINE_MAX: u64 = 256;

/// Replaces this process by `python -m lowtide` with these arguments. Returns only if that fails, with the exit code that
/// shells use for it.
///
/// # Errors
///
/// If no Python has the package.
pub(crate) fn become_package<S: AsRef<OsStr>>(arguments: &[S]) -> Result<ExitCode> {
    let command = package_command()?;
    let mut process = Command::new(&command[0]);
    process.args(&command[1..]).args(arguments);
    Ok(not_run(&command[0], &process.exec()))
}

/// Returns the words of `python -m lowtide`.
///
/// # Errors
///
/// If no Python has the package.
pub(crate) fn package_command() -> Result<[OsString; 3]> {
    let python = candidates().into_iter().find(|python| has_package(python));
    let python = python.ok_or_else(|| {
        anyhow::anyhow!(
            "no Python here has the package lowtide: `pip install lowtide` in the environment of the script, and start \
             this from there"
        )
    })?;
    Ok([python.into(), "-m".into(), "lowtide".into()])
}

/// Returns the Pythons to look at: the one that this command was installed with, then that of the active environment, then
/// those on the path.
fn candidates() -> Vec<PathBuf> {
    let beside = env::current_exe().ok();
    let beside = beside.and_then(|command| Some(command.parent()?.to_owned()));
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].map(|name| {
        let prefix = env::var_os(name)?;
        Some(Path::new(&prefix).join("bin"))
    });
    let directories = [beside].into_iter().chain(active).flatten();
    let named = |directory: PathBuf| ["python", "python3"].map(|name| directory.join(name));
    let on_path = ["python", "python3"].map(PathBuf::from);
    directories.flat_map(named).chain(on_path).collect()
}

fn has_package(python: &Path) -> bool {
    let mut look = Command::new(python);
    look.args(["-c", HAS_PACKAGE])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    look.status().is_ok_and(|status| status.success())
}

/// Returns whether a command starts Python itself: a script, the interpreter, or a program that Python runs, such as
/// `torchrun`.
pub(crate) fn is_started_by(program: &OsStr) -> bool {
    let path = Path::new(program);
    let is_script = path.extension().is_some_and(|extension| extension == "py");
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    is_script
        || name.starts_with("python")
        || find_program(program).is_ok_and(|path| names_python(&path))
}

/// Returns whether a file's first line says that Python runs it.
fn names_python(path: &Path) -> bool {
    let mut first = Vec::new();
    let read = File::open(path).and_then(|file| file.take(FIRST_LINE_MAX).read_to_end(&mut first));
    let line = first
        .split(|&byte| byte == b'\n')
        .next()
        .unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    read.is_ok() && line.starts_with("#!") && line.contains("python")
}
