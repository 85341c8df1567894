//! Writes the command's output: its answer, notes and files.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow};
use lowtide_files::{NewFile, Readers};
use lowtide_trace::OneLine;

use crate::format;

/// Writes `text` to standard output. Paths in it need not be UTF-8. A reader that closes the pipe early (`| head`)
/// is not an error.
pub(crate) fn print<T: AsRef<[u8]> + ?Sized>(text: &T) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_ref());
    match written.and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("standard output")
        }
        _ => Ok(()),
    }
}

/// Writes one line to standard error, after the command's name.
pub(crate) fn note(line: &str) {
    // In one write, because others may write to standard error. A failed write has nowhere to be reported.
    let line = format!("lowtide: {}\n", OneLine(line));
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Writes each of these lines as [`note`] does.
pub(crate) fn notes(lines: &[String]) {
    for line in lines {
        note(line);
    }
}

/// Returns the error and its causes on one line. A cause that the text before it already ends with is not repeated.
pub(crate) fn line(error: &Error) -> String {
    let causes = error.chain().map(ToString::to_string);
    causes.fold(String::new(), |line, cause| match line.as_str() {
        "" => cause,
        _ if line.ends_with(&cause) => line,
        _ => format!("{line}: {cause}"),
    })
}

/// Writes the output of `write` to the file at `path`. The output is written to a new file that replaces the old
/// one by a rename, so on failure the old file stays.
///
/// A pipe or a terminal is written to directly. So is a file that is this process's standard output or standard
/// error: replacing it would lose what is written there later.
///
/// # Errors
///
/// If `write` fails, or if the file cannot be opened for writing.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    write_to(path, write).with_context(|| format::path(path))
}

/// Refuses `path`, the target of `what`, if it is one of the recordings that `what` is made from.
///
/// # Errors
///
/// If it is one of them: the recording would be lost.
pub(crate) fn refuse_recordings(path: &Path, recordings: &[PathBuf], what: &str) -> Result<()> {
    let (Ok(there), Ok(target)) = (fs::metadata(path), path.canonicalize()) else {
        return Ok(());
    };
    let is_target = |recording: &PathBuf| recording.canonicalize().is_ok_and(|it| it == target);
    if there.is_file() && recordings.iter().any(is_target) {
        let error = anyhow!("is the recording itself; choose another name for {what}");
        return Err(error.context(format::path(path)));
    }
    Ok(())
}

fn write_to(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    if let Some(stream) = standard_stream(path) {
        return write_straight(stream, write);
    }
    if let Some(stream) = lowtide_files::open_stream(path)? {
        return write_straight(stream, write);
    }
    let new = NewFile::create(path, Readers::Umask)?;
    let mut writer = BufWriter::new(new.file());
    write(&mut writer)?;
    writer.flush()?;
    drop(writer);
    new.rename()?;
    Ok(())
}

/// Returns standard output or standard error, if `path` names it.
fn standard_stream(path: &Path) -> Option<File> {
    let there = fs::metadata(path).ok()?;
    let (stdout, stderr) = (io::stdout(), io::stderr());
    [stdout.as_fd(), stderr.as_fd()]
        .into_iter()
        .filter_map(|stream| stream.try_clone_to_owned().ok().map(File::from))
        .find(|stream| {
            let stream = stream.metadata();
            stream.is_ok_and(|stream| (stream.dev(), stream.ino()) == (there.dev(), there.ino()))
        })
}

/// Writes to a target that cannot be replaced. As with [`print`], its reader may close it early.
fn write_straight(out: impl Write, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut writer = BufWriter::new(out);
    let result = write(&mut writer).and_then(|()| Ok(writer.flush()?));
    // Dropping the writer itself would try to write the rest again.
    drop(writer.into_parts());
    result.or_else(|error| {
        let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
        if causes.any(|cause: &io::Error| cause.kind() == io::ErrorKind::BrokenPipe) {
            Ok(())
        } else {
            Err(error)
        }
    })
}
