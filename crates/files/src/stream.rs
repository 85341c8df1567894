//! Outputs of the command line that are not regular files.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, openat};

use crate::directory::{self, Missing};
use crate::place::{Place, check_owner};

/// Opens `path` if it is an output to write into rather than to replace: a descriptor of this process
/// (`/dev/fd/3`), a character device (`/dev/null`), or a FIFO of this user. Blocks until a FIFO has a reader, so
/// only the command line calls this. Returns `None` if `path` is anything else or does not exist.
///
/// # Errors
///
/// If it cannot be opened, or is another user's FIFO.
pub fn open_stream(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    if let Some(number) = descriptor(path) {
        // Opening it anew loses the position of the original descriptor, which is mostly at the end.
        let opened = open(
            format!("/proc/self/fd/{number}"),
            flags | OFlags::APPEND,
            Mode::empty(),
        );
        return Ok(Some(opened?.into()));
    }
    // The caller then replaces the file, and reports the error.
    let Ok(place) = Place::of(path) else {
        return Ok(None);
    };
    let Some(there) = place.stat()? else {
        return Ok(None);
    };
    if !is_stream(&there)? {
        return Ok(None);
    }
    let stream = openat(
        &place.directory,
        &place.name,
        flags | OFlags::NOFOLLOW,
        Mode::empty(),
    )?;
    // Another process may have replaced it since.
    let is_stream = is_stream(&fstat(&stream)?)?;
    Ok(is_stream.then(|| stream.into()))
}

/// Returns the number of the descriptor of this process that `path` names.
fn descriptor(path: &Path) -> Option<u32> {
    let own = directory::open("/proc/self/fd".as_ref(), Missing::IsAnError).ok()?;
    let named = directory::open(path.parent()?, Missing::IsAnError).ok()?;
    let (own, named) = (fstat(own).ok()?, fstat(named).ok()?);
    if (own.st_dev, own.st_ino) != (named.st_dev, named.st_ino) {
        return None;
    }
    path.file_name()?.to_str()?.parse().ok()
}

/// Returns whether `there` is a stream: a device, which only root can create, or a FIFO of this user.
fn is_stream(there: &Stat) -> io::Result<bool> {
    match FileType::from_raw_mode(there.st_mode) {
        FileType::CharacterDevice => Ok(true),
        FileType::Fifo => check_owner(there).map(|()| true),
        _ => Ok(false),
    }
}
