//! Creates and removes every file that lowtide writes, safely in directories that other users may write.
//!
//! - A new file is created with `O_CREAT|O_EXCL|O_NOFOLLOW`: a file planted under its name is never opened.
//! - A file that replaces another is created under a name that cannot be guessed, and renamed ([`NewFile`]).
//! - Only a regular file of this user is replaced. Symbolic links, FIFOs, sockets, devices and other users' files
//!   are refused.
//! - A symbolic link to a directory is followed, unless another user created it in a directory that users other
//!   than root and this user may write, its owner included. In a user namespace, unmapped users look like the
//!   machine's root. A link in `/proc` leads where the kernel says, not where its text says.
//!
//! Every refusal is an [`io::Error`] whose text reads well after `PATH: `.
//!
//! Nothing here blocks, except [`open_stream`], which opens FIFOs for the command line. No job calls that.
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

/// The users who may read a new file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Readers {
    /// The user alone: the file holds a job's data.
    User,
    /// Every user whom the umask permits: the user asked for the file by its name.
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

/// A file under a name that nobody can guess. Dropping this removes the file, unless it was renamed.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    temporary: Temporary,
}

/// The name of a file until it is renamed.
#[derive(Debug)]
struct Temporary {
    place: Place,
    name: Option<OsString>,
}

impl NewFile {
    /// Creates a file beside `path`. [`NewFile::rename`] then moves it to `path`. With [`Readers::Umask`] it takes
    /// the permissions of the file that it replaces, if that file has no other hard link.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, or `path` exists and is not a regular file that this user owns and may write.
    pub fn create(path: &Path, readers: Readers) -> io::Result<NewFile> {
        let place = Place::of(path)?;
        let replaced = place.own_file(OFlags::WRONLY)?;
        // Another user may have planted a hard link to a file that everyone may write.
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
        // The umask must not narrow permissions that the user has set before.
        kept.map_or(Ok(()), |mode| fchmod(&new.file, mode))?;
        Ok(new)
    }

    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to its path and replaces the file there.
    ///
    /// # Errors
    ///
    /// If it cannot be renamed. The new file is then removed.
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
            // A file that cannot be removed is left.
            let _ = unlinkat(&self.place.directory, name, AtFlags::empty());
        }
    }
}

/// Creates a file at `path`, under its final name. Nothing may exist there.
///
/// # Errors
///
/// If the file cannot be created: `AlreadyExists` if anything has its name.
pub fn create_new(path: &Path, readers: Readers) -> io::Result<File> {
    let place = Place::of(path)?;
    place.create(&place.name, readers.mode())
}

/// Creates a file without a name in a directory, for this user alone. It exists as long as it is open.
///
/// # Errors
///
/// If the file cannot be created.
pub fn create_unnamed(directory: &Path) -> io::Result<File> {
    let place = Place::inside(directory)?;
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match openat(&place.directory, ".", flags, Readers::User.mode()) {
        // The answers of old kernels and of file systems without unnamed files, mostly network ones.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {}
        created => return Ok(created?.into()),
    }
    let (file, temporary) = place.create_unguessable(Readers::User.mode())?;
    unlinkat(&place.directory, temporary, AtFlags::empty())?;
    Ok(file)
}

/// Gives a file of [`create_unnamed`] the name `path`. Nothing may exist there.
///
/// # Errors
///
/// If something has the name, or the file system cannot name such a file.
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

/// Opens this user's regular file at `path` for reading. Returns `None` if nothing exists there.
///
/// # Errors
///
/// If something else exists there, or the file cannot be opened.
pub fn open_own(path: &Path) -> io::Result<Option<File>> {
    let found = Place::of(path)?.own_file(OFlags::RDONLY)?;
    Ok(found.map(|(file, _)| file))
}

/// Removes the file at `path`. A symbolic link is removed itself, not its target.
///
/// # Errors
///
/// If it cannot be removed, or is a directory.
pub fn remove(path: &Path) -> io::Result<()> {
    let place = Place::of(path)?;
    Ok(unlinkat(&place.directory, &place.name, AtFlags::empty())?)
}

/// Creates a directory and its missing parents, for this user alone.
///
/// # Errors
///
/// If one cannot be created, or a name in the path is not a directory.
pub fn create_directory(path: &Path) -> io::Result<()> {
    directory::open(path, directory::Missing::IsCreated).map(drop)
}

/// Opens a directory with `O_PATH`: to look up names in it, not to read it.
///
/// # Errors
///
/// If it cannot be opened, or the path leads through a symbolic link that another user may have planted.
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    directory::open(path, directory::Missing::IsAnError)
}
