//! Environment variables, and paths as they appear in messages.

use std::env;
use std::path::{Path, PathBuf};

use lowtide_trace::OneLine;

/// Returns the path in an environment variable, as raw bytes, UTF-8 or not; `None` if it is unset or empty.
pub(crate) fn path_variable(name: &str) -> Option<PathBuf> {
    let path = env::var_os(name).filter(|path| !path.is_empty());
    path.map(PathBuf::from)
}

/// Returns a path as one line for messages.
pub(crate) fn shown(path: &Path) -> String {
    OneLine(&path.to_string_lossy()).to_string()
}

/// Returns the value of an environment variable; invalid UTF-8 is replaced.
pub(crate) fn variable(name: &str) -> Option<String> {
    Some(env::var_os(name)?.to_string_lossy().into_owned())
}
