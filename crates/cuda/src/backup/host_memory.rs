//! The host's memory that keeps backups: ordinary memory in large pages, block by block page-locked.
//!
//! **Invariant:** memory that the driver regards as page-locked is never unmapped.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use lowtide_core::{Bytes, DriverError};
use lowtide_region::BackupError;

use crate::backup::available::Promise;
use crate::backup::release::ReleaseQueue;
use crate::library::{Library, call};

/// A range of the host's memory. Nothing of it is resident before it is written to.
#[derive(Debug)]
pub(super) struct HostMemory {
    queue: Arc<ReleaseQueue>,
    /// Where it begins: a number, as threads and the device share it.
    start: usize,
    bytes: usize,
    /// What is page-locked at once; a multiple of the system's large page.
    block_bytes: usize,
    /// Whether each block is page-locked. It then stays so for the life of `self`.
    locked: Box<[AtomicBool]>,
    /// How much has been written to each block: one that has all of it is resident.
    written: Box<[AtomicUsize]>,
    /// What of it is not resident yet.
    promise: Promise,
}

/// The unit in which the system gives memory out where it can, on x86-64 and with 4 KiB pages on ARM.
const LARGE_PAGE_BYTES: usize = 2 << 20;

impl HostMemory {
    /// Returns how much memory is mapped for a backup: up to a quarter more, so that one that is a little
    /// larger next time still fits. That costs addresses only.
    pub(super) fn bytes_for(needed_bytes: usize) -> usize {
        let step = (needed_bytes.next_power_of_two() / 8).max(LARGE_PAGE_BYTES);
        needed_bytes.max(1).next_multiple_of(step)
    }

    /// Returns zeroed memory for a backup of so many bytes.
    pub(super) fn map(
        queue: Arc<ReleaseQueue>,
        needed_bytes: usize,
        block_bytes: usize,
    ) -> Result<HostMemory, BackupError> {
        queue.retry();
        let bytes = HostMemory::bytes_for(needed_bytes);
        let needed = Bytes(needed_bytes as u64);
        let refused = |message| BackupError::NoHostMemory {
            needed,
            message,
            directory: None,
        };
        let promise = Promise::new(needed);
        let promise = promise.map_err(|left| refused(format!("{left} is available")))?;
        let start = map_pages(bytes).map_err(|error| refused(error.to_string()))?;
        let blocks = bytes.div_ceil(block_bytes);
        Ok(HostMemory {
            queue,
            start,
            bytes,
            block_bytes,
            locked: (0..blocks).map(|_| AtomicBool::new(false)).collect(),
            written: (0..blocks).map(|_| AtomicUsize::new(0)).collect(),
            promise,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn address(&self, offset: usize) -> usize {
        debug_assert!(offset < self.bytes);
        self.start + offset
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns which blocks are page-locked.
    pub(super) fn locked_blocks(&self) -> Vec<bool> {
        let locked = self.locked.iter();
        locked.map(|flag| flag.load(Ordering::Acquire)).collect()
    }

    /// Returns whether the block is page-locked in which `offset` lies.
    pub(super) fn is_locked(&self, offset: usize) -> bool {
        self.locked[offset / self.block_bytes].load(Ordering::Acquire)
    }

    /// Returns whether all of a block has been written to.
    pub(super) fn is_resident(&self, block: usize) -> bool {
        self.written[block].load(Ordering::Acquire) >= self.block(block).len()
    }

    /// Forgets what has been written to blocks of which that is not all, and promises it again: another backup writes the
    /// same.
    ///
    /// Nobody writes meanwhile, and blocks may be page-locked, which makes all of one resident.
    pub(super) fn count_anew(&self) {
        for (block, written) in self.written.iter().enumerate() {
            let block_bytes = self.block(block).len();
            let in_part = |written| (written < block_bytes).then_some(0);
            self.promise.renew(|| {
                let before = written.fetch_update(Ordering::AcqRel, Ordering::Acquire, in_part);
                Bytes(before.unwrap_or(0) as u64)
            });
        }
    }

    /// Page-locks a block that is not: the device then copies to and from it by itself. Takes up to
    /// 0.8 s for a GiB, and 0.04 s where that is resident in large pages.
    ///
    /// One thread at a time calls this.
    pub(super) fn lock(&self, block: usize) -> Result<(), DriverError> {
        let context = self.queue.context();
        let _scope = context.enter_relaxed()?;
        let range = self.block(block);
        // SAFETY: 1. the memory is mapped for the life of `self`, whose end unregisters it first. 2. What
        // is registered are whole pages, which no one registered before.
        unsafe {
            call!(
                context.device().library(),
                cuMemHostRegister_v2(
                    ptr::with_exposed_provenance_mut(self.start + range.start),
                    range.len(),
                    0
                )
            )
        }?;
        self.locked[block].store(true, Ordering::Release);
        self.promise.keep(|| {
            let before = self.written[block].swap(range.len(), Ordering::AcqRel);
            Bytes((range.len() - before.min(range.len())) as u64)
        });
        Ok(())
    }

    /// Copies `content` to `offset`, all of it into one block. Returns whether that is resident now, and was not before.
    ///
    /// What is not resident yet becomes so with it, page by page: sixteen threads take 1.4 to 2.8 times as long to have that
    /// made resident first (`MADV_POPULATE_WRITE`).
    ///
    /// # Safety
    ///
    /// No one else uses this part of the memory meanwhile.
    pub(super) unsafe fn write(&self, offset: usize, content: &[u8]) -> bool {
        let block = offset / self.block_bytes;
        let block_bytes = self.block(block).len();
        assert!(offset % self.block_bytes + content.len() <= block_bytes);
        // SAFETY: by the contract of this function.
        let target = unsafe { self.slice(offset..offset + content.len()) };
        target.copy_from_slice(content);
        let mut becomes_resident = false;
        self.promise.keep(|| {
            let before = self.written[block].fetch_add(content.len(), Ordering::AcqRel);
            let now = before + content.len();
            becomes_resident = before < block_bytes && now >= block_bytes;
            Bytes((now.min(block_bytes) - before.min(block_bytes)) as u64)
        });
        becomes_resident
    }

    /// Copies what is at `offset` to `content`.
    ///
    /// # Safety
    ///
    /// No one else writes to this part of the memory meanwhile.
    pub(super) unsafe fn read(&self, offset: usize, content: &mut [u8]) {
        assert!(offset + content.len() <= self.bytes);
        let source = ptr::with_exposed_provenance(self.start + offset);
        // SAFETY: 1. the part is mapped and lies within `self`; all bytes are valid, as fresh pages are
        // zero. 2. No one writes to it, by the contract of this function. 3. `content` is another's.
        unsafe { ptr::copy_nonoverlapping(source, content.as_mut_ptr(), content.len()) };
    }

    /// Returns a part of the memory.
    ///
    /// # Safety
    ///
    /// No one else uses this part for the life of the answer, the device included.
    #[expect(
        clippy::mut_from_ref,
        reason = "threads have parts of it, by the contract"
    )]
    pub(super) unsafe fn slice(&self, part: Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= self.bytes);
        let start = ptr::with_exposed_provenance_mut(self.start + part.start);
        // SAFETY: 1. the part is mapped for the life of `self`, and lies within it; all bytes are valid,
        // as fresh pages are zero. 2. It is the caller's alone, by the contract of this function.
        unsafe { std::slice::from_raw_parts_mut(start, part.len()) }
    }

    fn block(&self, block: usize) -> Range<usize> {
        let start = block * self.block_bytes;
        start..self.bytes.min(start + self.block_bytes)
    }
}

impl Drop for HostMemory {
    /// Until the driver has let go of every block, the addresses must not become another's.
    fn drop(&mut self) {
        let (start, bytes) = (self.start, self.bytes);
        let locked = (0..).zip(self.locked_blocks());
        let locked = locked.filter(|&(_, is_locked)| is_locked);
        let mut locked: Vec<usize> = locked
            .map(|(block, _)| start + self.block(block).start)
            .collect();
        if locked.is_empty() {
            // SAFETY: the range was mapped by `map`, `self` is the last to know of it, and the driver does not.
            unsafe { unmap_pages(start, bytes) };
            return;
        }
        self.queue.release(bytes, move |context| {
            while let Some(&block) = locked.last() {
                // SAFETY: 1. `lock` registered it. 2. No copy uses it any more, as those who begin one wait
                // for its end, and hold the memory until then.
                unsafe { unlock(context.device().library(), block) }?;
                locked.pop();
            }
            // SAFETY: as above, and as the queue does not call this again.
            unsafe { unmap_pages(start, bytes) };
            Ok(())
        });
    }
}

/// Takes the page-lock off a block by its address.
///
/// # Safety
///
/// The block is page-locked, and no copy uses it.
unsafe fn unlock(library: &Library, block: usize) -> Result<(), DriverError> {
    // SAFETY: by the contract of this function.
    unsafe {
        call!(
            library,
            cuMemHostUnregister(ptr::with_exposed_provenance_mut(block))
        )
    }
}

/// Gives pages back to the system.
///
/// # Safety
///
/// [`map_pages`] mapped them, and no one uses them.
unsafe fn unmap_pages(start: usize, bytes: usize) {
    // SAFETY: by the contract of this function.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), bytes) };
}

/// Returns the start of so many bytes of zeroed memory, which begin at a large page.
fn map_pages(bytes: usize) -> io::Result<usize> {
    let wide = bytes
        .checked_add(LARGE_PAGE_BYTES)
        .ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: asks for new addresses.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            wide,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let found = start.expose_provenance();
    let start = found.next_multiple_of(LARGE_PAGE_BYTES);
    for (excess, length) in [
        (found, start - found),
        (start + bytes, found + wide - (start + bytes)),
    ] {
        if length > 0 {
            // SAFETY: it was mapped above, and no one knows of it.
            unsafe { libc::munmap(ptr::with_exposed_provenance_mut(excess), length) };
        }
    }
    // Large pages make faults and page-locking cheap. A child of a fork needs none of this: without the
    // second advice the system would copy every page-locked page for it.
    for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
        // Where the system does not follow, the memory serves as well.
        // SAFETY: changes no contents; the range is ours.
        unsafe { libc::madvise(ptr::with_exposed_provenance_mut(start), bytes, advice) };
    }
    Ok(start)
}
