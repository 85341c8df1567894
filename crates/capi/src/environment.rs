//! Variables of the environment, and paths as messages show them.

use std::env;
use std::path::{Path, PathBuf};

use lowtide_trace::OneLine;

/// Returns the path that a variable of the environment has: the bytes as they are, UTF-8 or not.
pub(crate) fn path_variable(name: &str) -> Option<PathBuf> {
    let path = env::var_os(name).filter(|path| !path.is_empty());
    path.map(PathBuf::from)
}

/// Returns a path as messages show it: on one line.
pub(crate) fn shown(path: &Path) -> String {
    OneLine(&path.to_string_lossy()).to_string()
}

/// Returns a variable of the environment.
pub(crate) fn variable(name: &str) -> Option<String> {
    Some(env::var_os(name)?.to_string_lossy().into_owned())
}
