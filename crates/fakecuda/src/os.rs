//! Host memory: unnamed files, and address ranges that map them.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The page size of the host's mappings. Every file's length is a multiple of it.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// The access rights to an address range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Access {
    None,
    Read,
    ReadWrite,
}

impl Access {
    fn protection(self) -> libc::c_int {
        match self {
            Self::None => libc::PROT_NONE,
            Self::Read => libc::PROT_READ,
            Self::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// An address range that we own until this is dropped. At first, any access faults.
#[derive(Debug)]
pub(crate) struct HostRange {
    start: u64,
    bytes: u64,
}

impl HostRange {
    /// Reserves `bytes` unused addresses, aligned to `alignment`. They start at `hint` if it is aligned and the
    /// addresses are free there.
    pub(crate) fn reserve(bytes: u64, alignment: u64, hint: u64) -> io::Result<Self> {
        if hint != 0 && hint.is_multiple_of(alignment) {
            let start = find_addresses(bytes, hint)?;
            if start == hint {
                return Ok(Self { start, bytes });
            }
            release(start, bytes);
        }
        let Some(wide) = bytes.checked_add(alignment) else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let found = find_addresses(wide, 0)?;
        let start = found.next_multiple_of(alignment);
        release(found, start - found);
        release(start + bytes, found + wide - (start + bytes));
        Ok(Self { start, bytes })
    }

    /// Maps `bytes` of `file` at unused addresses, readable and writable.
    pub(crate) fn of_file(bytes: u64, alignment: u64, file: &File) -> io::Result<Self> {
        let range = Self::reserve(bytes, alignment, 0)?;
        range.map(range.start, bytes, file)?;
        range.protect(range.start, bytes, Access::ReadWrite)?;
        Ok(range)
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps the first `bytes` of `file` at `address`. There is no access until [`HostRange::protect`].
    pub(crate) fn map(&self, address: u64, bytes: u64, file: &File) -> io::Result<()> {
        self.place(address, bytes, libc::MAP_SHARED, file.as_raw_fd())
    }

    /// Unmaps a part of the range: any later access faults.
    pub(crate) fn unmap(&self, address: u64, bytes: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.place(address, bytes, flags, -1)
    }

    fn place(&self, address: u64, bytes: u64, flags: libc::c_int, file: i32) -> io::Result<()> {
        self.assert_holds(address, bytes);
        let flags = flags | libc::MAP_FIXED;
        // SAFETY: 1. These addresses are ours: asserted above. 2. Nothing in Rust refers to what is there now: it
        // is device memory, accessed by address only.
        let placed = unsafe {
            libc::mmap(
                address as *mut _,
                length(bytes),
                libc::PROT_NONE,
                flags,
                file,
                0,
            )
        };
        if placed == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Sets the access rights of addresses in the range.
    pub(crate) fn protect(&self, address: u64, bytes: u64, access: Access) -> io::Result<()> {
        self.assert_holds(address, bytes);
        // SAFETY: as in `place`.
        let status =
            unsafe { libc::mprotect(address as *mut _, length(bytes), access.protection()) };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    fn assert_holds(&self, address: u64, bytes: u64) {
        let offset = address.checked_sub(self.start);
        let end = offset.and_then(|offset| offset.checked_add(bytes));
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "outside the range"
        );
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        release(self.start, self.bytes);
    }
}

/// Maps `bytes` unused addresses, at `hint` if they are free there. Returns the start.
fn find_addresses(bytes: u64, hint: u64) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let hint = hint as *mut libc::c_void;
    // SAFETY: without MAP_FIXED, the kernel chooses unused addresses.
    let start = unsafe { libc::mmap(hint, length(bytes), libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(start as u64)
}

fn release(start: u64, bytes: u64) {
    if bytes == 0 {
        return;
    }
    // SAFETY: 1. The callers own these addresses and no longer use them. 2. Nothing in Rust refers to device
    // memory.
    let status = unsafe { libc::munmap(start as *mut _, length(bytes)) };
    assert_eq!(status, 0, "munmap: {}", io::Error::last_os_error());
}

/// Returns an unnamed file of `bytes` zeros. `name` is shown in `/proc/self/fd`.
pub(crate) fn create_file(name: &str, bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.set_len(bytes)?;
    Ok(file)
}

/// Raises the limit on open files as far as allowed. Each piece of device memory is a file, and the usual limit of
/// 1024 would allow only 2 GiB in pages of 2 MiB.
pub(crate) fn raise_file_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    // If this fails, the limit stays.
    let _ = setrlimit(Resource::Nofile, raised);
}

/// Duplicates a file descriptor of this process.
pub(crate) fn duplicate(number: i32) -> io::Result<File> {
    // SAFETY: this reads no memory; a descriptor that is not open is an error.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened above, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(copy) })
}

/// Copies `bytes` bytes. The two ranges may overlap.
pub(crate) fn copy(destination: u64, source: u64, bytes: u64) {
    // SAFETY: 1. The caller has looked up any device memory of both ranges in the table, and keeps the table
    // locked. 2. For host memory, CUDA's contract makes the program responsible.
    unsafe { ptr::copy(source as *const u8, destination as *mut u8, length(bytes)) }
}

/// Returns a copy of `bytes` bytes.
pub(crate) fn read(source: u64, bytes: u64) -> Box<[u8]> {
    // SAFETY: 1. This is host memory that a program asked to copy from; CUDA's contract makes the program
    // responsible. 2. The slice is copied before anyone else can run.
    unsafe { std::slice::from_raw_parts(source as *const u8, length(bytes)) }.into()
}

/// Fills `bytes` bytes with the repeated bytes of `value`.
pub(crate) fn fill(destination: u64, value: u32, bytes: u64) {
    let [first, ..] = value.to_ne_bytes();
    if value == u32::from_ne_bytes([first; 4]) {
        // SAFETY: as in `copy`.
        unsafe { ptr::write_bytes(destination as *mut u8, first, length(bytes)) }
    } else {
        for word in (destination..destination + bytes).step_by(size_of::<u32>()) {
            // SAFETY: as in `copy`; only calls that fill aligned words have a value whose bytes differ.
            unsafe { ptr::write(word as *mut u32, value) }
        }
    }
}

/// Calls `call` when the process exits, before earlier registered functions.
pub(crate) fn call_at_exit(call: extern "C" fn()) {
    // SAFETY: the function is ours, and the shared object is never unloaded (build.rs).
    let status = unsafe { libc::atexit(call) };
    assert_eq!(status, 0, "atexit takes at least 32 functions");
}

/// Returns a length as a `usize`. The build fails on machines without 64 bits.
fn length(bytes: u64) -> usize {
    const { assert!(size_of::<usize>() == size_of::<u64>()) };
    usize::try_from(bytes).expect("a usize has 64 bits")
}
