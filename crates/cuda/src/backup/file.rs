//! A backup on disk: a file, without a name unless it is shown, and a checksum of each piece.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use lowtide_core::{Bytes, DeviceAddress};
use lowtide_region::BackupError;
use rustix::fs::{FallocateFlags, FsWord, OFlags, fallocate, fcntl_setfl, fstatfs};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Resource, getrlimit};

use crate::backup::available::Promise;
use crate::backup::names::Names;

/// The file operations that backups need. Tests have an implementation that fails.
pub(super) trait Storage: Debug + Send + Sync {
    /// Writes all of `content`. Its address, its length and `offset` are multiples of [`UNIT_BYTES`].
    fn write_all(&self, content: &[u8], offset: u64) -> io::Result<()>;

    /// Fills `content` with bytes from `offset`. The multiples are as for `write_all`.
    fn read_all(&self, content: &mut [u8], offset: u64) -> io::Result<()>;

    /// Waits until everything written is durable, so that an error is found now and not at a read.
    fn finish(&self) -> io::Result<()>;

    /// Gives the file another name.
    fn link(&self, path: &Path) -> io::Result<()>;
}

/// Creates a [`Storage`] of this size in a directory, or fails if there is no room.
pub(super) type OpenStorage = fn(&Path, Bytes) -> Result<Box<dyn Storage>, BackupError>;

/// The unit of direct I/O, which bypasses the page cache. No device has a larger one.
pub(super) const UNIT_BYTES: usize = 4096;

/// The contents of a backup in a file.
#[derive(Debug)]
pub(super) struct FileBackup {
    storage: Box<dyn Storage>,
    directory: PathBuf,
    /// The size of a piece, which is written and read at once.
    piece_bytes: usize,
    /// The file's length, a multiple of [`UNIT_BYTES`].
    bytes: usize,
    checksums: Vec<AtomicU32>,
    names: Names,
}

impl FileBackup {
    /// Creates a file of `bytes` bytes, rounded up to [`UNIT_BYTES`], and reserves room for them.
    pub(super) fn create(
        directory: &Path,
        bytes: usize,
        piece_bytes: usize,
        open: OpenStorage,
    ) -> Result<FileBackup, BackupError> {
        let bytes = bytes.max(1).next_multiple_of(UNIT_BYTES);
        Ok(FileBackup {
            storage: open(directory, Bytes(bytes as u64))?,
            directory: directory.to_path_buf(),
            piece_bytes,
            bytes,
            checksums: (0..bytes.div_ceil(piece_bytes))
                .map(|_| AtomicU32::new(0))
                .collect(),
            names: Names::default(),
        })
    }

    /// Gives the file a name in its directory for each address. The names are removed with the backup.
    pub(super) fn show(&mut self, addresses: impl Iterator<Item = DeviceAddress>) {
        let process = std::process::id();
        for address in addresses {
            let path = self.directory.join(format!("lowtide-{process}-{address}"));
            self.names.add(path, |path| self.storage.link(path));
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the piece that contains an offset.
    pub(super) fn piece_at(&self, offset: usize) -> Range<usize> {
        let start = offset / self.piece_bytes * self.piece_bytes;
        start..self.bytes.min(start + self.piece_bytes)
    }

    /// Writes a piece.
    pub(super) fn write(&self, piece: &Range<usize>, content: &[u8]) -> Result<(), BackupError> {
        let checksum = crc32fast::hash(content);
        self.checksums[piece.start / self.piece_bytes].store(checksum, Ordering::Relaxed);
        let written = self.storage.write_all(content, piece.start as u64);
        written.map_err(|error| self.error("written", &error))
    }

    /// Waits until everything written is durable.
    pub(super) fn finish(&self) -> Result<(), BackupError> {
        let finished = self.storage.finish();
        finished.map_err(|error| self.error("written", &error))
    }

    /// Reads a piece and compares its checksum. `address` is the device address to name in an error.
    pub(super) fn read(
        &self,
        piece: &Range<usize>,
        content: &mut [u8],
        address: DeviceAddress,
    ) -> Result<(), BackupError> {
        let read = self.storage.read_all(content, piece.start as u64);
        read.map_err(|error| self.error("read", &error))?;
        let checksum = self.checksums[piece.start / self.piece_bytes].load(Ordering::Relaxed);
        if crc32fast::hash(content) != checksum {
            let directory = self.directory.clone();
            return Err(BackupError::Corrupt { directory, address });
        }
        Ok(())
    }

    fn error(&self, action: &'static str, error: &io::Error) -> BackupError {
        BackupError::io(&self.directory, action, Bytes(self.bytes as u64), error)
    }
}

/// A file without a name, or whose name was removed at once: it disappears with the process, however that ends.
#[derive(Debug)]
pub(super) struct TemporaryFile {
    file: File,
    /// Whether I/O is direct. The page cache would double the host's work and evict pages that the job needs.
    is_direct: AtomicBool,
    /// The bytes that will still take host memory, if the file system keeps files there.
    promise: Option<Promise>,
}

impl TemporaryFile {
    /// Creates a file of `bytes` bytes.
    pub(super) fn open(directory: &Path, bytes: Bytes) -> Result<Box<dyn Storage>, BackupError> {
        let failed = |error| BackupError::io(directory, "made", bytes, &error);
        refuse_beyond_limit(bytes.get()).map_err(failed)?;
        let file = lowtide_files::create_unnamed(directory).map_err(failed)?;
        let promise = is_in_memory(&file).then(|| Promise::new(bytes)).transpose();
        let promise = promise.map_err(|left| BackupError::NoHostMemory {
            needed: bytes,
            message: format!("{left} is available"),
            directory: Some(directory.to_path_buf()),
        })?;
        let is_allocated = allocate(&file, bytes.get()).map_err(failed)?;
        let storage = TemporaryFile {
            is_direct: AtomicBool::new(set_direct(&file, true).is_ok()),
            file,
            promise: promise.filter(|_| !is_allocated),
        };
        Ok(Box::new(storage))
    }

    /// Runs a transfer. If the file system rejects direct I/O, runs it again through the page cache: some file
    /// systems reject only the first transfer.
    fn transfer(&self, mut transfer: impl FnMut(&File) -> io::Result<()>) -> io::Result<()> {
        let was_direct = self.is_direct.load(Ordering::Acquire);
        match transfer(&self.file) {
            Err(error) if was_direct && Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                set_direct(&self.file, false)?;
                self.is_direct.store(false, Ordering::Release);
                transfer(&self.file)
            }
            outcome => outcome,
        }
    }
}

impl Storage for TemporaryFile {
    fn write_all(&self, content: &[u8], offset: u64) -> io::Result<()> {
        self.transfer(|file| file.write_all_at(content, offset))?;
        if let Some(promise) = &self.promise {
            promise.keep(|| Bytes(content.len() as u64));
        }
        Ok(())
    }

    fn read_all(&self, content: &mut [u8], offset: u64) -> io::Result<()> {
        self.transfer(|file| file.read_exact_at(content, offset))
    }

    fn finish(&self) -> io::Result<()> {
        // Direct writes have reached the disk already.
        if self.is_direct.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.file.sync_data()
    }

    fn link(&self, path: &Path) -> io::Result<()> {
        lowtide_files::link(&self.file, path)
    }
}

/// The system ends a process by a signal if it writes beyond its file size limit, so this fails first.
fn refuse_beyond_limit(bytes: u64) -> io::Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| bytes > limit) {
        return Err(Errno::FBIG.into());
    }
    Ok(())
}

/// Returns whether the file system keeps file contents in host memory. Returns `false` if the system does not say.
fn is_in_memory(file: &File) -> bool {
    // The values of `linux/magic.h`.
    const TMPFS: FsWord = 0x0102_1994;
    const RAMFS: FsWord = 0x8584_58f6;
    fstatfs(file).is_ok_and(|found| [TMPFS, RAMFS].contains(&found.f_type))
}

/// Sets the file's length and reserves its room, so that a full disk is found before the first copy. Returns
/// whether the room is reserved.
fn allocate(file: &File, bytes: u64) -> io::Result<bool> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Ok(()) => Ok(true),
        // The file system cannot reserve room. The first write without room reports the error.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes).map(|()| false),
        Err(error) => Err(error.into()),
    }
}

fn set_direct(file: &File, is_direct: bool) -> io::Result<()> {
    let flags = if is_direct {
        OFlags::DIRECT
    } else {
        OFlags::empty()
    };
    Ok(fcntl_setfl(file, flags)?)
}
