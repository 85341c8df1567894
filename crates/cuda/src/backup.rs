//! [`CudaBackups`]: copies of a device's memory in host memory or in a file, made at the link's speed.
//!
//! ```text
//! begin, save_next, restore
//! ├─ sizes.rs          how much is copied, page-locked or written at once
//! ├─ layout.rs         the offset of each range in the backup
//! ├─ link.rs           the device's side: two streams, a ring of page-locked slots
//! ├─ pipeline.rs       copies through the ring, and the threads at its other end
//! ├─ host_memory.rs    ordinary memory, page-locked block by block; available.rs: how much there is
//! └─ file.rs           a file without a name, checksums; names.rs: names for people who look for the file
//! release, and the time between two backups
//! ├─ keeper.rs         page-locks in the background, keeps memory for the next backup, releases it
//! └─ release.rs        retries what the driver refuses to release
//! ```
//!
//! The device copies at the link's speed only to and from page-locked memory, but page-locking takes the driver far
//! longer than the copy. So the first backup goes through a small page-locked ring into ordinary memory. Threads
//! fill that memory as fast as the system provides pages.
//!
//! A background thread page-locks the memory block by block. During the backup, it takes blocks that have been
//! filled. Afterwards, while the job runs, it takes the rest.
//!
//! Each later copy goes directly to and from page-locked blocks. Other blocks go through the ring, from the end, at
//! the same time. When the ring reaches a block that has been page-locked meanwhile, that block is copied directly.

mod available;
mod file;
mod host_memory;
mod keeper;
mod layout;
mod link;
mod names;
mod pipeline;
mod release;
mod sizes;

#[cfg(test)]
mod tests;

use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::{Bytes, DriverError};
use lowtide_region::{BackupError, BackupKind, Backups, MemoryRange};

use crate::context::PrimaryContext;
use crate::device::Device;
use file::{FileBackup, OpenStorage, TemporaryFile};
use host_memory::HostMemory;
pub use keeper::KeptMemory;
use keeper::{Copying, Keeper, Times};
use layout::Layout;
use link::{Link, Way};
use pipeline::Staged;
use release::ReleaseQueue;
use sizes::Sizes;

/// Backups of one device's memory.
///
/// Host memory that a backup no longer needs is kept for the next one: it is page-locked, which makes backups fast.
/// It is kept for 30 seconds, or, if it is [retained](CudaBackups::set_retain), until
/// [`release_retained`](CudaBackups::release_retained) is called. A backup on disk is a file without a name, which
/// disappears with the backup or the process.
#[derive(Debug)]
pub struct CudaBackups {
    /// Copies whose wait failed. `None` between calls otherwise.
    unfinished: Option<Unfinished>,
    keeper: Keeper,
    queue: Arc<ReleaseQueue>,
    directory: PathBuf,
    shows_files: bool,
    sizes: Sizes,
    open_storage: OpenStorage,
}

/// Copies that may still be in progress although their call has returned, because the wait for them failed.
#[derive(Debug)]
struct Unfinished {
    link: Link,
    /// The memory that they copy to or from, besides the link's slots.
    memory: Option<Arc<HostMemory>>,
    /// Whether the backup in this memory has been released meanwhile.
    is_released: bool,
}

/// A backup made by [`CudaBackups`].
#[derive(Debug)]
pub struct CudaBackup {
    layout: Layout,
    contents: Contents,
    /// The contents before this offset have been saved.
    saved_bytes: usize,
    /// The copies of a save in progress.
    copying: Option<Copying>,
}

#[derive(Debug)]
enum Contents {
    Host(Arc<HostMemory>),
    Disk(FileBackup),
}

/// How long memory that is not retained waits for the next backup. This is longer than a phase of most jobs that
/// take turns on a card, and short enough for a job that makes no further backup.
const IDLE_TIME: Duration = Duration::from_secs(30);

/// How long after copies the job has the driver to itself. This is longer than the job needs to query the free memory
/// and to start using it. It is short compared with page-locking, which makes the next backup faster.
const QUIET_TIME: Duration = Duration::from_millis(50);

/// The longest time that the job has the driver to itself while copies follow one another: a few backups.
const PATIENCE: Duration = Duration::from_secs(1);

impl CudaBackups {
    /// Returns the backups of a device. Before the first backup, this uses only the device's primary context, which
    /// is created if it does not exist.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// - Each range that is saved or restored must be mapped, and the device must be able to read and write it.
    /// - Until the call returns, nothing else may write to a range that is saved, or use a range that is restored.
    /// - The device's primary context must not be reset while the returned value or one of its backups exists.
    pub unsafe fn new(device: Device) -> Result<CudaBackups, DriverError> {
        let context = Arc::new(PrimaryContext::retain(device)?);
        Ok(CudaBackups::with(
            context,
            Sizes::default(),
            Times {
                idle: IDLE_TIME,
                quiet: QUIET_TIME,
                patience: PATIENCE,
            },
            TemporaryFile::open,
        ))
    }

    fn with(
        context: Arc<PrimaryContext>,
        sizes: Sizes,
        times: Times,
        open_storage: OpenStorage,
    ) -> CudaBackups {
        assert!(sizes.block_bytes.is_multiple_of(sizes.piece_bytes));
        assert!(sizes.step_bytes.is_multiple_of(sizes.block_bytes));
        CudaBackups {
            unfinished: None,
            keeper: Keeper::new(times),
            queue: Arc::new(ReleaseQueue::new(context)),
            directory: std::env::temp_dir(),
            shows_files: false,
            sizes,
            open_storage,
        }
    }

    /// Sets the directory of new backup files. The default is the system's temporary directory. A directory in host
    /// memory (tmpfs) uses that memory. A backup that does not fit there is refused like a backup in host memory.
    pub fn set_directory(&mut self, directory: PathBuf) {
        self.directory = directory;
    }

    /// Sets whether a backup's file has names while the backup exists: one for each range in it, if the file system
    /// supports that. By default it has none. The names are removed with the backup and when the process exits. A
    /// process that is killed, or calls `_exit`, leaves the names and so the file.
    pub fn set_shows_files(&mut self, shows: bool) {
        self.shows_files = shows;
    }

    /// Sets whether host memory is kept after a backup until it is released, and whether a restored backup in host
    /// memory is kept until the next one. By default, neither is.
    pub fn set_retain(&mut self, retain: bool) {
        self.keeper.set_retains(retain);
    }

    /// Returns a handle to the host memory that is kept for later backups, or that the driver refused to release.
    pub fn kept(&self) -> KeptMemory {
        self.keeper.kept(Arc::clone(&self.queue))
    }

    /// Waits until all backup memory that the system allows is page-locked, so that the next copies run at the
    /// link's speed.
    pub fn finish_locking(&self) {
        self.keeper.finish_locking();
    }

    /// Runs `copy` with the link, which is created if there is none, and waits for its copies. Besides the link's
    /// slots, they use no host memory but `memory`.
    fn with_link(
        &mut self,
        memory: Option<&Arc<HostMemory>>,
        copy: impl FnOnce(&mut Link, &Sizes) -> Result<(), BackupError>,
    ) -> Result<(), BackupError> {
        self.finish_copies()?;
        let context = Arc::clone(self.queue.context());
        let _scope = context.enter_relaxed()?;
        let mut link = match self.keeper.take_link() {
            Some(link) => link,
            None => self.with_room(|| Link::new(Arc::clone(&self.queue), &self.sizes))?,
        };
        let copied = catch_unwind(AssertUnwindSafe(|| copy(&mut link, &self.sizes)));
        // Also after an error or a panic: what the copies use must stay until they have ended.
        self.unfinished = Some(Unfinished {
            link,
            memory: memory.map(Arc::clone),
            is_released: false,
        });
        let ended = self.finish_copies();
        let copied = copied.unwrap_or_else(|panic| resume_unwind(panic));
        copied.and(ended.map_err(BackupError::Driver))
    }

    /// Waits for copies that may be in progress, and keeps their link and released memory for the next backup.
    fn finish_copies(&mut self) -> Result<(), DriverError> {
        let Some(Unfinished { link, .. }) = &self.unfinished else {
            return Ok(());
        };
        let scope = self.queue.context().enter_relaxed()?;
        link.synchronize()?;
        drop(scope);
        if let Some(finished) = self.unfinished.take() {
            // A ring with fewer slots was created when host memory was short, and is not kept.
            if finished.link.slots_max() == self.sizes.slots {
                self.keeper.keep_link(finished.link);
            }
            if let Some(memory) = finished.memory.filter(|_| finished.is_released) {
                self.keeper.keep(memory);
            }
        }
        Ok(())
    }

    /// Returns host memory for `needed_bytes` bytes.
    fn host_memory(&self, needed_bytes: usize) -> Result<Arc<HostMemory>, BackupError> {
        if let Some(memory) = self.keeper.take(needed_bytes) {
            return Ok(memory);
        }
        let memory = self.with_room(|| {
            let queue = Arc::clone(&self.queue);
            HostMemory::map(queue, needed_bytes, self.sizes.block_bytes)
        });
        memory.map(Arc::new)
    }

    /// Returns the part of a backup to save next: one step, or the rest if some of that is not page-locked. The
    /// ring is the slower way, and direct copies beside it take no extra time.
    fn step(&self, layout: &Layout, memory: &HostMemory, start: usize) -> Range<usize> {
        let block_bytes = memory.block_bytes();
        let rest = start..layout.bytes();
        let blocks = rest.start / block_bytes..rest.end.div_ceil(block_bytes);
        if memory.locked_blocks()[blocks].contains(&false) {
            rest
        } else {
            layout.step(start, self.sizes.step_bytes, block_bytes)
        }
    }

    /// Saves the contents of a step. No block of memory and no piece of the ring lies in two steps.
    fn save_to_host(
        &mut self,
        layout: &Layout,
        copying: &Copying,
        step: &Range<usize>,
    ) -> Result<(), BackupError> {
        let memory = copying.memory();
        self.with_link(Some(memory), |link, sizes| {
            let parts = Parts::of(layout, step, memory, sizes);
            for span in &parts.direct {
                link.begin_direct(Way::ToHost, layout, span, memory)?;
            }
            let staged = Staged::new(layout, &parts.staged, Some(memory));
            pipeline::load(link, sizes, &staged, |span, content| {
                // SAFETY: each span is given to one thread, and no direct copy is within it.
                unsafe { copying.write(span.start, content) };
                Ok(())
            })
        })
    }

    /// Returns what `make` creates in host memory. If host memory is short, releases the memory kept for other
    /// backups and tries again.
    fn with_room<T>(&self, make: impl Fn() -> Result<T, BackupError>) -> Result<T, BackupError> {
        match make() {
            Err(BackupError::NoHostMemory { .. }) if self.keeper.idle_bytes() > 0 => {
                self.keeper.release();
                make()
            }
            outcome => outcome,
        }
    }

    fn restore_from_host(&mut self, layout: &Layout, copying: &Copying) -> Result<(), BackupError> {
        let memory = copying.memory();
        self.with_link(Some(memory), |link, sizes| {
            let parts = Parts::of(layout, &(0..layout.bytes()), memory, sizes);
            for span in &parts.direct {
                link.begin_direct(Way::ToDevice, layout, span, memory)?;
            }
            let staged = Staged::new(layout, &parts.staged, Some(memory));
            pipeline::store(link, sizes, &staged, |span, content| {
                // SAFETY: nothing writes to a backup.
                unsafe { memory.read(span.start, content) };
                Ok(())
            })
        })
    }

    fn save_to_disk(&mut self, layout: &Layout, file: &FileBackup) -> Result<(), BackupError> {
        let pieces = pieces(layout, file, self.sizes.piece_bytes);
        self.with_link(None, |link, sizes| {
            let staged = Staged::new(layout, &pieces, None);
            pipeline::load(link, sizes, &staged, |piece, content| {
                file.write(piece, content)
            })
        })?;
        file.finish()
    }

    fn restore_from_disk(&mut self, layout: &Layout, file: &FileBackup) -> Result<(), BackupError> {
        let pieces = pieces(layout, file, self.sizes.piece_bytes);
        self.with_link(None, |link, sizes| {
            let staged = Staged::new(layout, &pieces, None);
            pipeline::store(link, sizes, &staged, |piece, content| {
                let mut copies = layout.copies(piece.clone());
                let first = copies.next().expect("a piece that is read has a range");
                file.read(piece, content, first.address)
            })
        })
    }
}

impl Backups for CudaBackups {
    type Backup = CudaBackup;

    fn begin(
        &mut self,
        ranges: &[MemoryRange],
        kind: BackupKind,
    ) -> Result<CudaBackup, BackupError> {
        let layout = Layout::new(ranges);
        let contents = match kind {
            BackupKind::Host => Contents::Host(self.host_memory(layout.bytes())?),
            BackupKind::Disk => Contents::Disk(self.with_room(|| {
                FileBackup::create(
                    &self.directory,
                    layout.bytes(),
                    self.sizes.piece_bytes,
                    self.open_storage,
                )
            })?),
        };
        Ok(CudaBackup {
            layout,
            contents,
            saved_bytes: 0,
            copying: None,
        })
    }

    fn save_next(&mut self, backup: &mut CudaBackup) -> Result<usize, BackupError> {
        let layout = &backup.layout;
        let step = match &mut backup.contents {
            Contents::Host(memory) => {
                let copying = backup.copying.take();
                let copying =
                    copying.unwrap_or_else(|| self.keeper.begin_saving(memory, layout.bytes()));
                let step = self.step(layout, memory, backup.saved_bytes);
                self.save_to_host(layout, &copying, &step)?;
                if step.end == layout.bytes() {
                    copying.end_saved();
                } else {
                    backup.copying = Some(copying);
                }
                step
            }
            // One step: compared with a disk's time, releasing device memory earlier gains nothing.
            Contents::Disk(file) => {
                self.save_to_disk(layout, file)?;
                if self.shows_files {
                    file.show(layout.addresses());
                }
                0..layout.bytes()
            }
        };
        backup.saved_bytes = step.end;
        Ok(layout.ranges_within(step.end))
    }

    fn restore(
        &mut self,
        backup: &mut CudaBackup,
        ranges: &[MemoryRange],
    ) -> Result<(), BackupError> {
        let layout = backup.layout.select(ranges);
        match &backup.contents {
            Contents::Host(memory) => {
                self.restore_from_host(&layout, &self.keeper.begin_copying(memory))
            }
            Contents::Disk(file) => self.restore_from_disk(&layout, file),
        }
    }

    fn finish(&mut self) -> Result<(), BackupError> {
        Ok(self.finish_copies()?)
    }

    fn release(&mut self, backup: CudaBackup) {
        let CudaBackup {
            contents, copying, ..
        } = backup;
        drop(copying);
        let Contents::Host(memory) = contents else {
            return;
        };
        let is_used = |unfinished: &&mut Unfinished| {
            let used = unfinished.memory.as_ref();
            used.is_some_and(|used| Arc::ptr_eq(used, &memory))
        };
        match self.unfinished.as_mut().filter(is_used) {
            Some(unfinished) => unfinished.is_released = true,
            None => self.keeper.keep(memory),
        }
    }

    fn release_retained(&mut self) {
        // If the wait for copies fails, their memory stays.
        let _ = self.finish_copies();
        self.keeper.release();
        self.queue.retry();
    }

    fn retains(&mut self, backup: &CudaBackup) -> bool {
        self.keeper.retains() && matches!(backup.contents, Contents::Host(_))
    }

    fn host_copy(backup: &CudaBackup, range: MemoryRange) -> Option<usize> {
        let offset = backup.layout.offset_of(range)?;
        match &backup.contents {
            Contents::Host(memory) => Some(memory.address(offset)),
            Contents::Disk(_) => None,
        }
    }

    fn bytes(backup: &CudaBackup) -> (Bytes, Bytes) {
        match &backup.contents {
            Contents::Host(_) => (Bytes(backup.saved_bytes as u64), Bytes::ZERO),
            Contents::Disk(file) => (Bytes::ZERO, Bytes(file.bytes() as u64)),
        }
    }
}

impl Drop for CudaBackups {
    fn drop(&mut self) {
        if self.finish_copies().is_err() {
            // The device may still copy to and from this memory.
            mem::forget(self.unfinished.take());
        }
    }
}

impl CudaBackup {
    /// Returns how many bytes of the backup the device copies directly, because they are page-locked now.
    pub fn locked(&self) -> Bytes {
        let Contents::Host(memory) = &self.contents else {
            return Bytes::ZERO;
        };
        let locked = memory.locked_blocks();
        let spans = self
            .layout
            .spans(0..self.layout.bytes(), memory.block_bytes())
            .into_iter();
        let direct = spans.filter(|span| locked[span.start / memory.block_bytes()]);
        Bytes(direct.map(|span| span.len() as u64).sum())
    }
}

/// A backup's spans, divided by how they are copied.
struct Parts {
    /// Spans within one block each, which is page-locked.
    direct: Vec<Range<usize>>,
    /// Spans within one piece each, last first, because blocks are page-locked from the first one.
    staged: Vec<Range<usize>>,
}

impl Parts {
    /// Returns the spans of a part of the backup that begins and ends with a block.
    fn of(layout: &Layout, within: &Range<usize>, memory: &HostMemory, sizes: &Sizes) -> Parts {
        // Read once for both lists, because blocks are page-locked meanwhile.
        let locked = memory.locked_blocks();
        let is_direct = |span: &Range<usize>| locked[span.start / memory.block_bytes()];
        let mut direct = layout.spans(within.clone(), memory.block_bytes());
        direct.retain(is_direct);
        let mut staged = layout.spans(within.clone(), sizes.piece_bytes);
        staged.retain(|span| !is_direct(span));
        staged.reverse();
        Parts { direct, staged }
    }
}

/// Returns the pieces of the file that contain a layout's ranges.
fn pieces(layout: &Layout, file: &FileBackup, piece_bytes: usize) -> Vec<Range<usize>> {
    let spans = layout.spans(0..layout.bytes(), piece_bytes);
    let starts = spans.into_iter().map(|span| span.start);
    starts.map(|start| file.piece_at(start)).collect()
}
