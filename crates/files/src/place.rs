//! A name in an open directory, and the file that has this name.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, statat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::directory::{self, Missing};
use crate::unguessable::unguessable_name;

/// A name in an open directory. The directory stays the same when others rename it or its parents.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) directory: OwnedFd,
    pub(crate) name: OsString,
}

impl Place {
    /// Opens the directory of `path`.
    pub(crate) fn of(path: &Path) -> io::Result<Place> {
        let name = path
            .file_name()
            .ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "is not the name of a file"))?;
        Ok(Place {
            directory: directory::open(path.parent().unwrap_or(path), Missing::IsAnError)?,
            name: name.to_owned(),
        })
    }

    /// Opens a directory for files without a name.
    pub(crate) fn inside(path: &Path) -> io::Result<Place> {
        Ok(Place {
            directory: directory::open(path, Missing::IsAnError)?,
            name: OsString::new(),
        })
    }

    /// Creates a file. lowtide creates files only through this function.
    pub(crate) fn create(&self, name: &OsStr, mode: Mode) -> io::Result<File> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.directory, name, flags, mode)?.into())
    }

    /// Creates a file under a name that nobody can guess, and returns both.
    pub(crate) fn create_unguessable(&self, mode: Mode) -> io::Result<(File, OsString)> {
        let name = unguessable_name()?;
        Ok((self.create(&name, mode)?, name))
    }

    /// Opens the file with this name, if it is a regular file of this user. Returns `None` if nothing has the name.
    /// Anything else is refused without being opened.
    pub(crate) fn own_file(&self, flags: OFlags) -> io::Result<Option<(File, Stat)>> {
        let Some(there) = self.stat()? else {
            return Ok(None);
        };
        self.check_own_file(&there)?;
        // Another process may have replaced it since. A FIFO must not block this process.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(&self.directory, &self.name, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened?,
        };
        let there = fstat(&file)?;
        self.check_own_file(&there)?;
        Ok(Some((file.into(), there)))
    }

    /// Returns the status of the file with this name, of a symbolic link itself; `None` if nothing has the name.
    pub(crate) fn stat(&self) -> io::Result<Option<Stat>> {
        match statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            found => Ok(Some(found?)),
        }
    }

    /// Returns an error unless `there`, the status of this name, is that of a regular file of this user.
    fn check_own_file(&self, there: &Stat) -> io::Result<()> {
        let what = match FileType::from_raw_mode(there.st_mode) {
            FileType::RegularFile => return self.check_owner(there),
            FileType::Directory => return Err(ErrorKind::IsADirectory.into()),
            FileType::Symlink => "a symbolic link",
            FileType::Fifo => "a FIFO",
            FileType::Socket => "a socket",
            FileType::CharacterDevice | FileType::BlockDevice => "a device",
            FileType::Unknown => "no regular file",
        };
        let text = format!("is {what}, and only a regular file is written: choose another name");
        Err(io::Error::new(ErrorKind::InvalidInput, text))
    }

    /// Returns an error unless `there` is this user's. Some file systems assign a user's files to another user, as
    /// NFS does for root. So files with the owner of a new file also count as this user's.
    fn check_owner(&self, there: &Stat) -> io::Result<()> {
        check_owner(there).or_else(|error| match self.owner_of_new_file() {
            Ok(owner) if owner == there.st_uid => Ok(()),
            _ => Err(error),
        })
    }

    fn owner_of_new_file(&self) -> io::Result<u32> {
        let (file, name) = self.create_unguessable(Mode::RUSR | Mode::WUSR)?;
        unlinkat(&self.directory, name, AtFlags::empty())?;
        Ok(fstat(&file)?.st_uid)
    }
}

/// Returns an error unless `there` is this user's.
pub(crate) fn check_owner(there: &Stat) -> io::Result<()> {
    if there.st_uid == geteuid().as_raw() {
        return Ok(());
    }
    let text = format!(
        "belongs to another user (uid {}): choose another name",
        there.st_uid
    );
    Err(io::Error::new(ErrorKind::PermissionDenied, text))
}
