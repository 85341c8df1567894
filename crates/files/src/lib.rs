//! Creates and removes every file that lowtide writes, safely in directories that other users may write.
//!
//! - A new file is created with `O_CREAT|O_EXCL|O_NOFOLLOW`, and nothing planted under its name is opened.
//! - A file that replaces another is created under a name that cannot be guessed, and renamed ([`NewFile`]).
//! - Only a regular file of this user is replaced. Symbolic links, FIFOs, sockets, devices and other users' files are
//!   refused.
//! - A symbolic link to a directory is followed, unless another user made it in a directory to which others than root and
//!   this user may write, including its owner. In a user namespace, users without a number there look like the machine's
//!   root. A link in `/proc` leads where the kernel says, not where its text does.
//!
//! Every refusal is an [`io::Error`] that reads well after `PATH: `.
//!
//! Nothing here waits, except [`open_stream`], which opens FIFOs for the command. No job calls that.
#![forbid(unsafe_code)]

mod directory;
mod place;
mod stream;
#[cfg(test)]
mod tests;
mod unguessable;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, fchmod, linkat, openat, renameat, unlinkat};
use rustix::io::Errno;

use place::Place;
pub use stream::open_stream;
pub use unguessable::unguessable_number;

/// Who may read a new file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Readers {
    /// The user alone: the file holds a job's data.
    User,
    /// Whoever the user's umask lets: the user asked for the file by its name.
    Umask,
}

impl Readers {
    fn mode(self) -> Mode {
        Mode::from_raw_mode(match self {
            Readers::User => 0o600,
            Readers::Umask => 0o666,
        })
    }
}

/// A file under a name that nobody can guess. It is removed with this, unless it was renamed.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    temporary: Temporary,
}

/// The name that a file has until it is renamed.
#[derive(Debug)]
struct Temporary {
    place: Place,
    name: Option<OsString>,
}

impl NewFile {
    /// Creates a file beside `path`, for [`NewFile::rename`] to put there. With [`Readers::Umask`] it has the
    /// permissions of the file that it replaces, if there is one that has no other name.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, or `path` is anything but a regular file that this user owns and may write.
    pub fn create(path: &Path, readers: Readers) -> io::Result<NewFile> {
        let place = Place::of(path)?;
        let replaced = place.own_file(OFlags::WRONLY)?;
        // Another user may have planted a second name of a file that all may write.
        let is_own_name = |there: &Stat| there.st_nlink == 1;
        let kept = replaced.filter(|(_, there)| readers == Readers::Umask && is_own_name(there));
        let kept = kept.map(|(_, there)| Mode::from_raw_mode(there.st_mode & 0o777));
        let mode = readers.mode() & kept.unwrap_or(Mode::all());
        let (file, name) = place.create_unguessable(mode)?;
        let new = NewFile {
            file,
            temporary: Temporary {
                place,
                name: Some(name),
            },
        };
        // The umask does not count for permissions that the user has given.
        kept.map_or(Ok(()), |mode| fchmod(&new.file, mode))?;
        Ok(new)
    }

    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to its path, in place of what is there.
    ///
    /// # Errors
    ///
    /// If it cannot be renamed: then it is removed.
    pub fn rename(mut self) -> io::Result<File> {
        let Temporary { place, name } = &mut self.temporary;
        if let Some(name) = name {
            renameat(&place.directory, &*name, &place.directory, &place.name)?;
        }
        *name = None;
        Ok(self.file)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // A file that cannot be removed stays.
            let _ = unlinkat(&self.place.directory, name, AtFlags::empty());
        }
    }
}

/// Creates a file at `path`, where nothing is, for it to grow there.
///
/// # Errors
///
/// If the file cannot be created; of the kind `AlreadyExists` where anything has its name.
pub fn create_new(path: &Path, readers: Readers) -> io::Result<File> {
    let place = Place::of(path)?;
    place.create(&place.name, readers.mode())
}

/// Creates a file without a name in a directory, for this user alone. It lasts as long as it is open.
///
/// # Errors
///
/// If the file cannot be created.
pub fn create_unnamed(directory: &Path) -> io::Result<File> {
    let place = Place::inside(directory)?;
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match openat(&place.directory, ".", flags, Readers::User.mode()) {
        // What file systems answer that have no such files, mostly network ones; and old kernels.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {}
        created => return Ok(created?.into()),
    }
    let (file, temporary) = place.create_unguessable(Readers::User.mode())?;
    unlinkat(&place.directory, temporary, AtFlags::empty())?;
    Ok(file)
}

/// Gives a file of [`create_unnamed`] a name, where nothing is.
///
/// # Errors
///
/// If something has the name, or the file system gives such a file none.
pub fn link(file: &File, path: &Path) -> io::Result<()> {
    let place = Place::of(path)?;
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(
        CWD,
        open,
        &place.directory,
        &place.name,
        AtFlags::SYMLINK_FOLLOW,
    )?;
    Ok(())
}

/// Opens the regular file of this user at `path` for reading; `None` if nothing is there.
///
/// # Errors
///
/// If anything else is there, or it cannot be opened.
pub fn open_own(path: &Path) -> io::Result<Option<File>> {
    let found = Place::of(path)?.own_file(OFlags::RDONLY)?;
    Ok(found.map(|(file, _)| file))
}

/// Removes what has the name `path`, a symbolic link as such.
///
/// # Errors
///
/// If it cannot be removed, or is a directory.
pub fn remove(path: &Path) -> io::Result<()> {
    let place = Place::of(path)?;
    Ok(unlinkat(&place.directory, &place.name, AtFlags::empty())?)
}

/// Creates a directory and those above it that are missing, for this user alone.
///
/// # Errors
///
/// If one cannot be created, or the path leads through something else.
pub fn create_directory(path: &Path) -> io::Result<()> {
    directory::open(path, directory::Missing::IsCreated).map(drop)
}

/// Opens a directory as what names in it are looked up by, not for reading.
///
/// # Errors
///
/// If it cannot be opened, or the way leads through a symbolic link that another user may have planted.
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    directory::open(path, directory::Missing::IsAnError)
}
