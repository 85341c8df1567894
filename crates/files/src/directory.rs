//! Opens directories without following a symbolic link that another user may have planted.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    CWD, FileType, Mode, OFlags, PROC_SUPER_MAGIC, fstat, fstatfs, mkdirat, openat, readlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The number of links that Linux follows, too.
const LINKS_MAX: usize = 40;
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// What to do if a directory is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    IsAnError,
    /// It is created for this user alone.
    IsCreated,
}

/// Opens a directory by its path, one name at a time.
///
/// # Errors
///
/// If it cannot be opened, or the path leads through a symbolic link that another user may have planted.
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
                    // Another process created it first.
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
                let link = open_link(&here, &name)?;
                if fstatfs(&here)?.f_type == PROC_SUPER_MAGIC {
                    // The kernel's target may differ from the link's text: the root of another mount namespace has
                    // the text `/`.
                    here = openat(&here, &name, DIRECTORY, Mode::empty())?;
                    continue;
                }
                let target = readlinkat(&link, "", Vec::new())?;
                let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
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

/// Opens a directory, but not through a symbolic link. With `O_DIRECTORY` an automount happens first, if need be.
fn open_at(here: impl std::os::fd::AsFd, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    openat(here, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())
}

/// Pushes a path's names onto `left`, the first name last.
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

/// Opens a symbolic link in the directory `here`, unless another user may have planted it.
fn open_link(here: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = openat(here, name, flags, Mode::empty())?;
    let found = fstat(&link)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
        return Err(Errno::NOTDIR.into());
    }
    let directory = fstat(here)?;
    let others_may_write = directory.st_mode & 0o022 != 0
        || !is_trusted(directory.st_uid) && Some(directory.st_uid) != unknown_user();
    if is_trusted(found.st_uid) || !others_may_write {
        return Ok(link);
    }
    let text = format!(
        "leads through `{}`, a symbolic link of another user (uid {}) in a directory that others may write: choose \
         another path",
        name.display(),
        found.st_uid
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Returns whether a user's links may be followed: root's, and this user's.
fn is_trusted(user: u32) -> bool {
    user == 0 || user == geteuid().as_raw()
}

/// Returns the user id that a container shows for the machine's root, and for all other users that the container
/// does not map; `None` if all users are mapped.
fn unknown_user() -> Option<u32> {
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    if map.split_whitespace().eq(["0", "0", "4294967295"]) {
        return None;
    }
    let user = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
    user.trim().parse().ok()
}
