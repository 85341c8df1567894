//! The program's output: results, notes, and files of the project.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Returns a path in the project's `bench/`.
pub(crate) fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Writes `text` to standard output.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    written.context("standard output")
}

/// Writes one line to standard error.
pub(crate) fn note(line: &str) {
    // If standard error cannot be written to, the error cannot be reported either.
    let _ = writeln!(io::stderr(), "lowtide-bench: {line}");
}

/// Writes a file, and creates its parent directories.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    let directory = path.parent().context("is not the path of a file")?;
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(path, text))
        .with_context(|| path.display().to_string())
}
