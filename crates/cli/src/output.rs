//! What the command writes: its answer, notes beside it, and files.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow};
use lowtide_trace::{OneLine, file_names};

use crate::recording;

/// Writes `text`, in which paths may be no UTF-8, to standard output. A reader that has seen enough (`| head`) is no
/// error.
pub(crate) fn print<T: AsRef<[u8]> + ?Sized>(text: &T) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_ref())
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
    // At once, as others may write there. Where nobody can be told, there is nobody to tell that.
    let line = format!("lowtide: {}\n", OneLine(line));
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Returns what went wrong, and what of it each cause adds: some already say what caused them.
pub(crate) fn line(error: &Error) -> String {
    let causes = error.chain().map(ToString::to_string);
    causes.fold(String::new(), |line, cause| match line.as_str() {
        "" => cause,
        _ if line.ends_with(&cause) => line,
        _ => format!("{line}: {cause}"),
    })
}

/// Makes `write`'s output the file at `path`, or leaves what was there: it is written beside and
/// renamed, through symbolic links. What is no file (a pipe, a terminal) is written to as it is, and so
/// is what this process has open already: another in its place would lose the rest of what goes there.
///
/// # Errors
///
/// If `write` fails, or the file could not be opened for writing.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    write_to(path, write).with_context(|| recording::name(path))
}

/// Fails if `path`, where `what` is to go, is one of the recordings that it is made from.
///
/// # Errors
///
/// If it is: the recording would be lost.
pub(crate) fn refuse_recordings(path: &Path, recordings: &[PathBuf], what: &str) -> Result<()> {
    let (Ok(there), Ok(target)) = (fs::metadata(path), path.canonicalize()) else {
        return Ok(());
    };
    let is_target = |recording: &PathBuf| recording.canonicalize().is_ok_and(|it| it == target);
    if there.is_file() && recordings.iter().any(is_target) {
        let error = anyhow!("is the recording itself; choose another name for {what}");
        return Err(error.context(recording::name(path)));
    }
    Ok(())
}

fn write_to(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let Ok(there) = fs::metadata(path) else {
        return replace(&follow_links(path)?, None, write);
    };
    if there.is_dir() {
        return Err(anyhow!("is a directory"));
    }
    if let Some(stream) = standard_stream(&there) {
        return write_straight(stream, write);
    }
    let path = follow_links(path)?;
    let mut options = OpenOptions::new();
    if !there.is_file() {
        return write_straight(options.write(true).open(path)?, write);
    }
    if is_descriptor(&path) {
        // Where whoever opened it is in the file is not to be learnt; it is mostly at the end.
        return write_straight(options.append(true).open(path)?, write);
    }
    // A rename asks only whether the directory may be written to.
    options.write(true).open(&path)?;
    replace(&path, Some(there.permissions()), write)
}

/// Returns standard output or standard error, if that is what `there` is of.
#[cfg(unix)]
fn standard_stream(there: &Metadata) -> Option<File> {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    let (stdout, stderr) = (io::stdout(), io::stderr());
    [stdout.as_fd(), stderr.as_fd()]
        .into_iter()
        .filter_map(|stream| stream.try_clone_to_owned().ok().map(File::from))
        .find(|stream| {
            let stream = stream.metadata();
            stream.is_ok_and(|stream| (stream.dev(), stream.ino()) == (there.dev(), there.ino()))
        })
}

#[cfg(not(unix))]
fn standard_stream(_there: &Metadata) -> Option<File> {
    None
}

/// Returns whether `path` is the name of one of this process's open files, such as `/dev/fd/3`.
fn is_descriptor(path: &Path) -> bool {
    let directory = path.parent().and_then(|parent| parent.canonicalize().ok());
    directory.is_some() && directory == Path::new("/dev/fd").canonicalize().ok()
}

/// Writes to what cannot be replaced. As with [`print`], its reader may have seen enough.
fn write_straight(out: impl Write, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut writer = BufWriter::new(out);
    let result = write(&mut writer).and_then(|()| Ok(writer.flush()?));
    // It would only be tried again.
    drop(writer.into_parts());
    result.or_else(|error| {
        let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
        match causes.any(|cause: &io::Error| cause.kind() == io::ErrorKind::BrokenPipe) {
            true => Ok(()),
            false => Err(error),
        }
    })
}

/// Makes the file at `path`, which is no symbolic link.
fn replace(
    path: &Path,
    permissions: Option<Permissions>,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    path.file_name().context("is not the name of a file")?;
    let beside = file_names::beside(path);

    let result = File::create(&beside)
        .map_err(anyhow::Error::from)
        .and_then(|file| {
            if let Some(permissions) = permissions {
                file.set_permissions(permissions)?;
            }
            let mut writer = BufWriter::new(file);
            write(&mut writer)?;
            writer.flush()?;
            Ok(fs::rename(&beside, path)?)
        });
    if result.is_err() {
        // It may not exist; the error that matters is `result`.
        let _ = fs::remove_file(&beside);
    }
    result
}

/// Returns the path of what `path` names, which need not be there, past all symbolic links but those that
/// name an open file of this process.
fn follow_links(path: &Path) -> Result<PathBuf> {
    // As many as Linux follows.
    const LINKS_MAX: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        if is_descriptor(&path) {
            return Ok(path);
        }
        match fs::read_link(&path) {
            Ok(target) => path = path.with_file_name(target),
            Err(_) => return Ok(path),
        }
    }
    Err(anyhow!("too many symbolic links"))
}
