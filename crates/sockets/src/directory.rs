//! A directory of sockets.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process;

use rustix::fs::{AtFlags, Dir, Mode, OFlags, fstat, mkdirat, openat, renameat, unlinkat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::path::Arg;
use rustix::process::geteuid;

use crate::is_same_user;

/// The number of connections that the kernel queues for a process that does not accept them yet.
const BACKLOG: i32 = 16;

/// A directory that belongs to this process's user and that no other user can enter.
#[derive(Debug)]
pub struct Directory {
    file: OwnedFd,
}

/// A listening socket's name in a [`Directory`].
#[derive(Debug)]
pub struct Entry {
    directory: Directory,
    name: String,
    /// The process that listens. A forked child does not listen.
    process: u32,
}

impl Directory {
    /// Opens a directory that belongs to this user and that no other user can enter.
    ///
    /// # Errors
    ///
    /// `PermissionDenied` if another user owns it or could enter it; the system's error otherwise. A symbolic link
    /// is an error.
    pub(crate) fn open(parent: impl AsFd, name: impl Arg) -> io::Result<Directory> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(parent, name, flags, Mode::empty())?;
        let found = fstat(&file)?;
        let others = Mode::RWXG | Mode::RWXO;
        let is_own = found.st_uid == geteuid().as_raw();
        if !is_own || Mode::from_raw_mode(found.st_mode).intersects(others) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        Ok(Directory { file })
    }

    /// Opens a directory like [`Directory::open`], by its path. The path must not lead through another user's link.
    ///
    /// # Errors
    ///
    /// Like [`Directory::open`].
    pub(crate) fn open_path(path: &Path) -> io::Result<Directory> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(ErrorKind::InvalidInput.into());
        };
        Directory::open(lowtide_files::open_directory(parent)?, name)
    }

    /// Opens a directory like [`Directory::open`], and creates it first if it does not exist.
    ///
    /// # Errors
    ///
    /// Like [`Directory::open`].
    pub(crate) fn open_or_make(parent: impl AsFd, name: &str) -> io::Result<Directory> {
        match mkdirat(&parent, name, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Directory::open(parent, name),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the directory's device and inode, which identify it.
    pub(crate) fn identity(&self) -> io::Result<(u64, u64)> {
        let found = fstat(&self.file)?;
        Ok((found.st_dev, found.st_ino))
    }

    /// Creates a listening socket of this name, and returns it with its entry. The socket gets its name only once
    /// it listens, so a socket that refuses connections belongs to a process that ended.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn listen(self, name: &str) -> io::Result<(UnixListener, Entry)> {
        let unfinished = format!(".{name}");
        let listener = UnixListener::bind(self.path_of(unfinished.as_ref()))?;
        let named = rustix::net::listen(&listener, BACKLOG)
            .and_then(|()| renameat(&self.file, unfinished.as_str(), &self.file, name));
        if let Err(error) = named {
            let _ = unlinkat(&self.file, unfinished.as_str(), AtFlags::empty());
            return Err(error.into());
        }
        let entry = Entry {
            directory: self,
            name: name.to_owned(),
            process: process::id(),
        };
        Ok((listener, entry))
    }

    /// Returns the names of all entries, whether sockets or not.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        names_in(&self.file)
    }

    /// Connects to a socket of this user, without blocking. The returned stream does not block either.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the socket's queue is full, `ConnectionRefused` if its process ended, `PermissionDenied` if
    /// the process belongs to another user; the system's error otherwise.
    pub fn connect(&self, name: &OsStr) -> io::Result<UnixStream> {
        let address = SocketAddrUnix::new(self.path_of(name))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        rustix::net::connect(&socket, &address)?;
        let stream = UnixStream::from(socket);
        if is_same_user(&stream)? {
            Ok(stream)
        } else {
            Err(ErrorKind::PermissionDenied.into())
        }
    }

    /// Removes the sockets whose names begin with `prefix` and whose processes ended. Processes that still listen
    /// see a connection that sends nothing.
    pub fn remove_dead(&self, prefix: &str) {
        let names = self.names().unwrap_or_default();
        let is_meant = |name: &&OsString| name.as_bytes().starts_with(prefix.as_bytes());
        for name in names.iter().filter(is_meant) {
            let outcome = self.connect(name);
            if outcome.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                // Another process of the user may have removed it already.
                let _ = self.remove(name);
            }
        }
    }

    /// Removes a socket that refused a connection, because its process ended.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn remove(&self, name: &OsStr) -> io::Result<()> {
        Ok(unlinkat(&self.file, name, AtFlags::empty())?)
    }

    /// Returns a path to an entry that leads through the open directory, even if the directory was renamed since.
    /// It is short, because a socket's path may have at most 107 bytes.
    pub(crate) fn path_of(&self, name: &OsStr) -> PathBuf {
        let file = self.file.as_raw_fd();
        PathBuf::from(format!("/proc/thread-self/fd/{file}")).join(name)
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Entry {
    /// Removes the name, if this is the process that listens.
    pub fn remove(&self) {
        if self.process == process::id() {
            // Another process of the user may have removed it already.
            let _ = self.directory.remove(self.name.as_ref());
        }
    }
}

/// Returns the names of all entries of an open directory.
pub(crate) fn names_in(directory: impl AsFd) -> io::Result<Vec<OsString>> {
    let name_of = |entry: rustix::io::Result<rustix::fs::DirEntry>| {
        let bytes = entry?.file_name().to_bytes().to_vec();
        Ok(OsString::from_vec(bytes))
    };
    let names: io::Result<Vec<OsString>> = Dir::read_from(directory)?.map(name_of).collect();
    let mut names = names?;
    names.retain(|name| name != "." && name != "..");
    names.sort_unstable();
    Ok(names)
}
