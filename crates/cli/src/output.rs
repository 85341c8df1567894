//! What the command writes: its answer, notes beside it, and files.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};

/// Writes `text` to standard output. A reader that has seen enough (`| head`) is no error.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("standard output")
        }
        _ => Ok(()),
    }
}

/// Writes one line to standard error, in the command's name.
pub(crate) fn note(line: &str) {
    // Where nobody can be told, there is nobody to tell that.
    let _ = writeln!(io::stderr(), "lowtide: {line}");
}

/// Makes `write`'s output the file at `path`, or leaves what was there: it is written beside and
/// renamed.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<()>,
) -> Result<()> {
    let in_file = || path.display().to_string();
    let name = path
        .file_name()
        .context("is not the name of a file")
        .with_context(in_file)?;
    let mut beside = OsString::from(".");
    beside.push(name);
    beside.push(format!(".{}.tmp", std::process::id()));
    let beside = path.with_file_name(beside);

    let result = File::create(&beside)
        .map_err(anyhow::Error::from)
        .and_then(|file| {
            let mut writer = BufWriter::new(file);
            write(&mut writer)?;
            writer.flush()?;
            Ok(fs::rename(&beside, path)?)
        });
    if result.is_err() {
        // It may not exist; the error that matters is `result`.
        let _ = fs::remove_file(&beside);
    }
    result.with_context(in_file)
}
