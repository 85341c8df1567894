//! The host memory of backups: ordinary memory in huge pages, page-locked block by block.
//!
//! **Invariant:** memory that the driver has page-locked is never unmapped.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use lowtide_core::{Bytes, DriverError};
use lowtide_region::BackupError;

use crate::backup::available::Promise;
use crate::backup::release::ReleaseQueue;
use crate::library::call;

/// A range of host memory. A page becomes resident when it is first written to.
#[derive(Debug)]
pub(super) struct HostMemory {
    queue: Arc<ReleaseQueue>,
    /// The start address, as a number because threads and the device share it.
    start: usize,
    bytes: usize,
    /// The size of a block, which is page-locked at once; a multiple of the huge page size.
    block_bytes: usize,
    /// Whether each block is page-locked. Once it is, it stays so for the life of `self`.
    locked: Box<[AtomicBool]>,
    /// How many bytes have been written to each block. A block that was written completely is resident.
    written: Box<[AtomicUsize]>,
    /// The bytes that are not resident yet.
    promise: Promise,
}

/// The size of a huge page, on x86-64 and on ARM with 4 KiB pages.
const LARGE_PAGE_BYTES: usize = 2 << 20;

impl HostMemory {
    /// Returns how many bytes are mapped for a backup: up to a quarter more than needed, so that a slightly larger
    /// next one fits. The excess costs only addresses.
    pub(super) fn bytes_for(needed_bytes: usize) -> usize {
        let step = (needed_bytes.next_power_of_two() / 8).max(LARGE_PAGE_BYTES);
        needed_bytes.max(1).next_multiple_of(step)
    }

    /// Maps zeroed memory for a backup of `needed_bytes` bytes.
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

    /// Returns for each block whether it is page-locked.
    pub(super) fn locked_blocks(&self) -> Vec<bool> {
        let locked = self.locked.iter();
        locked.map(|flag| flag.load(Ordering::Acquire)).collect()
    }

    /// Returns whether the block that contains `offset` is page-locked.
    pub(super) fn is_locked(&self, offset: usize) -> bool {
        self.locked[offset / self.block_bytes].load(Ordering::Acquire)
    }

    /// Returns whether a block was written completely.
    pub(super) fn is_resident(&self, block: usize) -> bool {
        self.written[block].load(Ordering::Acquire) >= self.block(block).len()
    }

    /// Resets the count of bytes written to blocks that were written in part, and promises the bytes again: the
    /// next backup writes them again.
    ///
    /// No one may write meanwhile. Blocks may be page-locked meanwhile, which makes them resident.
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

    /// Page-locks a block that is not page-locked, so that the device copies to and from it directly. Takes up to
    /// 0.8 s per GiB, or 0.04 s if the memory is resident in huge pages.
    ///
    /// Only one thread at a time may call this.
    pub(super) fn lock(&self, block: usize) -> Result<(), DriverError> {
        let context = self.queue.context();
        let _scope = context.enter_relaxed()?;
        let range = self.block(block);
        // SAFETY: 1. the memory is mapped for the life of `self`, whose drop unregisters it first. 2. The
        // registered range consists of whole pages that no one registered before.
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

    /// Copies `content` to `offset`, all of it into one block. Returns whether this made the block resident.
    ///
    /// Pages become resident one by one as they are written. With sixteen threads, making them resident first
    /// (`MADV_POPULATE_WRITE`) takes 1.4 to 2.8 times as long.
    ///
    /// # Safety
    ///
    /// No one else may use this part of the memory meanwhile.
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

    /// Copies the bytes at `offset` to `content`.
    ///
    /// # Safety
    ///
    /// No one else may write to this part of the memory meanwhile.
    pub(super) unsafe fn read(&self, offset: usize, content: &mut [u8]) {
        assert!(offset + content.len() <= self.bytes);
        let source = ptr::with_exposed_provenance(self.start + offset);
        // SAFETY: 1. the part is mapped and lies within `self`; all bytes are valid, because fresh pages are zero.
        // 2. No one writes to it, by the contract of this function. 3. `content` does not overlap it.
        unsafe { ptr::copy_nonoverlapping(source, content.as_mut_ptr(), content.len()) };
    }

    /// Returns a part of the memory as a slice.
    ///
    /// # Safety
    ///
    /// No one else, including the device, may use this part for the life of the returned slice.
    #[expect(
        clippy::mut_from_ref,
        reason = "threads have parts of it, by the contract"
    )]
    pub(super) unsafe fn slice(&self, part: Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= self.bytes);
        let start = ptr::with_exposed_provenance_mut(self.start + part.start);
        // SAFETY: 1. the part is mapped for the life of `self`, and lies within it; all bytes are valid, because
        // fresh pages are zero. 2. It is the caller's alone, by the contract of this function.
        unsafe { std::slice::from_raw_parts_mut(start, part.len()) }
    }

    fn block(&self, block: usize) -> Range<usize> {
        let start = block * self.block_bytes;
        start..self.bytes.min(start + self.block_bytes)
    }
}

impl Drop for HostMemory {
    /// The addresses must not be reused before the driver has unregistered every block.
    fn drop(&mut self) {
        let (start, bytes) = (self.start, self.bytes);
        let locked = (0..).zip(self.locked_blocks());
        let locked = locked.filter(|&(_, is_locked)| is_locked);
        let mut locked: Vec<usize> = locked
            .map(|(block, _)| start + self.block(block).start)
            .collect();
        if locked.is_empty() {
            // SAFETY: the range was mapped by `map`, and neither the driver nor anyone but `self` uses it.
            unsafe { unmap_pages(start, bytes) };
            return;
        }
        self.queue.release(bytes, move |context| {
            while let Some(&block) = locked.last() {
                let address = ptr::with_exposed_provenance_mut(block);
                // SAFETY: 1. `lock` registered it. 2. No copy uses it any more: the code that begins a copy holds
                // the memory until the copy has ended.
                unsafe { call!(context.device().library(), cuMemHostUnregister(address)) }?;
                locked.pop();
            }
            // SAFETY: as above, and the queue does not call this again.
            unsafe { unmap_pages(start, bytes) };
            Ok(())
        });
    }
}

/// Unmaps pages.
///
/// # Safety
///
/// [`map_pages`] must have mapped them, and no one may use them.
unsafe fn unmap_pages(start: usize, bytes: usize) {
    // SAFETY: by the contract of this function.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), bytes) };
}

/// Maps `bytes` bytes of zeroed memory, aligned to a huge page. Returns the start.
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
            // SAFETY: it was mapped above, and no one uses it.
            unsafe { libc::munmap(ptr::with_exposed_provenance_mut(excess), length) };
        }
    }
    // Huge pages make page faults and page-locking cheap. A forked child needs none of this memory: without
    // `MADV_DONTFORK`, the system would copy every page-locked page for it.
    for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
        // The system may ignore the advice; the memory works without it.
        // SAFETY: changes no contents; the range is ours.
        unsafe { libc::madvise(ptr::with_exposed_provenance_mut(start), bytes, advice) };
    }
    Ok(start)
}
