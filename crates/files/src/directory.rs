//! The way to a directory, past no symbolic link that another user may have planted.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, mkdirat, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// As many as Linux follows.
const LINKS_MAX: usize = 40;

/// What becomes of a directory that is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    IsAnError,
    /// It is created for this user alone.
    IsCreated,
}

/// Opens a directory by its path, name by name.
///
/// # Errors
///
/// If it cannot be opened, or the way leads through a symbolic link that another user may have planted.
pub(crate) fn open(path: &Path, missing: Missing) -> io::Result<OwnedFd> {
    let mut here = open_at(CWD, if path.is_absolute() { "/" } else { "." })?;
    let mut left = Vec::new();
    push_names(&mut left, path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        match open_at(&here, &name) {
            Ok(directory) => here = directory,
            Err(Errno::NOENT) if missing == Missing::IsCreated => {
                match mkdirat(&here, &name, Mode::RWXU) {
                    // Another process was first.
                    Err(Errno::EXIST) => {}
                    created => created?,
                }
                here = open_at(&here, &name)?;
            }
            Err(Errno::NOTDIR) => {
                links += 1;
                if links > LINKS_MAX {
                    return Err(Errno::LOOP.into());
                }
                let target = read_link(&here, &name)?;
                if target.is_absolute() {
                    here = open_at(CWD, "/")?;
                }
                push_names(&mut left, &target);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(here)
}

/// Returns whether others than its owner may write to what `stat` is of.
pub(crate) fn others_may_write(stat: &Stat) -> bool {
    stat.st_mode & 0o022 != 0
}

/// Opens a directory, if it is none behind a symbolic link. With `O_DIRECTORY` it is mounted first, if need be.
fn open_at(here: impl std::os::fd::AsFd, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(here, name, flags, Mode::empty())
}

/// Puts a path's names on those that are left, the first last.
fn push_names(left: &mut Vec<OsString>, path: &Path) {
    let names = path
        .components()
        .rev()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        });
    left.extend(names);
}

/// Returns the target of a symbolic link in the directory `here`.
fn read_link(here: &OwnedFd, name: &OsStr) -> io::Result<PathBuf> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = openat(here, name, flags, Mode::empty())?;
    let found = fstat(&link)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
        return Err(Errno::NOTDIR.into());
    }
    let is_trusted = found.st_uid == geteuid().as_raw() || found.st_uid == 0;
    if !is_trusted && others_may_write(&fstat(here)?) {
        let text = format!(
            "leads through `{}`, a symbolic link of another user (uid {}) in a directory that others may write: choose \
             another path",
            name.display(),
            found.st_uid
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let target = readlinkat(&link, "", Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}
