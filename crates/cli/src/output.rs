//! What the command writes: its answer, notes beside it, and files.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use lowtide_trace::OneLine;

use crate::recording;

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
    let _ = writeln!(io::stderr(), "lowtide: {}", OneLine(line));
}

/// Makes `write`'s output the file at `path`, or leaves what was there: it is written beside and
/// renamed, through symbolic links. What is no file (a pipe, a terminal) is written to as it is.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let result = match fs::metadata(path) {
        // As the name of what standard output is redirected to, which has to stay that.
        _ if path == Path::new("/dev/stdout") => write_straight(io::stdout().lock(), write),
        Ok(there) if there.is_file() => replace(path, Some(there.permissions()), write),
        Ok(there) if there.is_dir() => Err(anyhow!("is a directory")),
        Ok(_) => open_existing(path).and_then(|file| write_straight(file, write)),
        Err(_) => replace(path, None, write),
    };
    result.with_context(|| recording::name(path))
}

fn open_existing(path: &Path) -> Result<File> {
    Ok(OpenOptions::new().write(true).open(path)?)
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

fn replace(
    path: &Path,
    permissions: Option<Permissions>,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let path = follow_links(path)?;
    let name = path.file_name().context("is not the name of a file")?;
    let mut beside = OsString::from(".");
    beside.push(name);
    beside.push(format!(".{}.tmp", std::process::id()));
    let beside = path.with_file_name(beside);

    let result = File::create(&beside)
        .map_err(anyhow::Error::from)
        .and_then(|file| {
            if let Some(permissions) = permissions {
                file.set_permissions(permissions)?;
            }
            let mut writer = BufWriter::new(file);
            write(&mut writer)?;
            writer.flush()?;
            Ok(fs::rename(&beside, &path)?)
        });
    if result.is_err() {
        // It may not exist; the error that matters is `result`.
        let _ = fs::remove_file(&beside);
    }
    result
}

/// Returns the path of what `path` names, which need not be there, past all symbolic links.
fn follow_links(path: &Path) -> Result<PathBuf> {
    // As many as Linux follows.
    const LINKS_MAX: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&path) {
            Ok(target) => path = path.with_file_name(target),
            Err(_) => return Ok(path),
        }
    }
    Err(anyhow!("too many symbolic links"))
}
