//! Finds the program of a command, and says why one does not run.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::process::ExitCode;

use rustix::fs::Access;
use rustix::io::Errno;

use crate::output;

/// Prints why a program cannot be run, and returns the exit code that shells use for that.
pub(crate) fn not_run(program: &OsStr, error: &io::Error) -> ExitCode {
    output::note(&format!("{}: {error}", program.display()));
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    ExitCode::from(if is_missing { 127 } else { 126 })
}

/// Returns the path of the program that a command would run, before anything is done for it.
///
/// # Errors
///
/// If no such program exists, or none may be executed.
pub(crate) fn find_program(program: &OsStr) -> io::Result<PathBuf> {
    if program.is_empty() {
        return Err(Errno::NOENT.into());
    }
    if program.as_bytes().contains(&b'/') {
        return check_executable(PathBuf::from(program));
    }
    // The C library's default if the variable is not set.
    let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut found = Err(Errno::NOENT.into());
    for directory in env::split_paths(&path) {
        match check_executable(directory.join(program)) {
            Ok(path) => return Ok(path),
            // A later directory may have one that may be executed.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => found = Err(error),
            Err(_) => {}
        }
    }
    found
}

/// Returns the path if it is that of a file that may be executed.
fn check_executable(path: PathBuf) -> io::Result<PathBuf> {
    rustix::fs::access(&path, Access::EXEC_OK)?;
    if path.is_dir() {
        Err(Errno::ACCESS.into())
    } else {
        Ok(path)
    }
}
