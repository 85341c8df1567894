//! [`CudaBackups`]: contents of a device's memory in the host's memory or in a file, at the link's speed.
//!
//! ```text
//! begin, save_next, restore
//! ├─ sizes.rs          how much is done at once
//! ├─ layout.rs         the ranges one behind the other: a backup is a row of bytes
//! ├─ link.rs           the device's side: two streams, a ring of page-locked slots
//! ├─ pipeline.rs       what goes through the ring, and the threads at its other end
//! ├─ host_memory.rs    ordinary memory, block by block page-locked; available.rs: how much there is
//! └─ file.rs           a file without a name, checksums; names.rs: names for who looks
//! discard, and the time between two backups
//! ├─ keeper.rs         page-locks beside the job, keeps for the next backup, gives back
//! └─ release.rs        what the driver refuses to take back, until it does
//! ```
//!
//! The device copies at the link's speed only to and from page-locked memory, and to page-lock takes the
//! driver far longer than the copy. So the first backup goes through a small ring into ordinary memory,
//! which threads fill as fast as the system gives it out. A thread page-locks that memory block by block, those that have
//! been filled meanwhile and afterwards, beside the job, the others. Each later copy goes directly to and from the blocks
//! that are done, and through the ring for the others, from the end, both at once; where the two ways meet, it
//! goes on directly.

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

/// Keeps contents of one device's memory.
///
/// Memory of the host that a backup no longer needs waits for the next one, as it is page-locked and that
/// is what makes backups fast: for 30 seconds, or until [`release_retained`](CudaBackups::release_retained)
/// if it is [retained](CudaBackups::set_retain). A backup on disk is a file without a name, which ends with
/// the backup or the process.
#[derive(Debug)]
pub struct CudaBackups {
    /// `None` but after a wait that failed.
    unfinished: Option<Unfinished>,
    keeper: Keeper,
    queue: Arc<ReleaseQueue>,
    directory: PathBuf,
    shows_files: bool,
    sizes: Sizes,
    open_storage: OpenStorage,
}

/// Copies that may be under way although their call has ended, as the wait for them failed.
#[derive(Debug)]
struct Unfinished {
    link: Link,
    /// What they copy to or from besides the link's slots.
    memory: Option<Arc<HostMemory>>,
    /// Whether the memory's backup has ended meanwhile.
    is_discarded: bool,
}

/// A backup by [`CudaBackups`].
#[derive(Debug)]
pub struct CudaBackup {
    layout: Layout,
    contents: Contents,
    /// Up to where it is saved.
    saved_bytes: usize,
    /// While it is.
    copying: Option<Copying>,
}

#[derive(Debug)]
enum Contents {
    Host(Arc<HostMemory>),
    Disk(FileBackup),
}

/// How long memory waits for the next backup that is not retained. Longer than a phase of most jobs that
/// take turns on a card, and soon enough for the job that will not come back to it.
const IDLE_TIME: Duration = Duration::from_secs(30);

/// How long after copies the job has the driver to itself. Longer than it takes to ask what has become free and to
/// begin with it, and short beside what page-locking takes, which the next backup is faster with.
const QUIET_TIME: Duration = Duration::from_millis(50);

/// How long the job has the driver to itself where copies follow one another: a few backups.
const PATIENCE: Duration = Duration::from_secs(1);

impl CudaBackups {
    /// Returns what keeps a device's contents. It takes nothing before the first backup but the device's
    /// primary context, which is made if there is none.
    ///
    /// # Errors
    ///
    /// What the driver says.
    ///
    /// # Safety
    ///
    /// Each range that is saved or restored must be memory that is mapped, that the device can read and
    /// write, and that nothing else writes to, or uses while it is restored, before the call returns. The
    /// device's primary context is not reset for the life of the answer and of all backups.
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

    /// Sets where files are made from now on: the system's temporary directory, unless this is called. One
    /// that is in the host's memory (tmpfs) takes that, and a backup that does not fit there is refused as one that is to
    /// be in the host's memory.
    pub fn set_directory(&mut self, directory: PathBuf) {
        self.directory = directory;
    }

    /// Sets whether a file has names as long as it is a backup, one for each range that is in it, where its file
    /// system can give it some; it has none unless this is called. They go when the process ends, too; one that is killed,
    /// or ends by `_exit`, leaves them, and with them the file.
    pub fn set_shows_files(&mut self, shows: bool) {
        self.shows_files = shows;
    }

    /// Sets whether the host's memory is kept after a backup until it is released, and a backup in it that was
    /// restored until the next; neither is unless this is called.
    pub fn set_retain(&mut self, retain: bool) {
        self.keeper.set_retains(retain);
    }

    /// Gives back what is kept for later backups, and returns when that is done.
    pub fn release_retained(&mut self) {
        // What cannot be waited for stays.
        let _ = self.finish_copies();
        self.keeper.release();
        self.queue.retry();
    }

    /// Returns the host's memory that is kept for later backups, or because the driver refused to let it go.
    pub fn kept(&self) -> KeptMemory {
        self.keeper.kept(Arc::clone(&self.queue))
    }

    /// Waits until all memory of backups is page-locked that the system lets be, so that the next copies
    /// are at the link's speed.
    pub fn finish_locking(&self) {
        self.keeper.finish_locking();
    }

    /// Does `copy` with the link, which is made if there is none, and waits for its copies. They use no other memory of
    /// the host than `memory`.
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
        // Even after an error or a panic: what the copies use must stay until they have ended.
        self.unfinished = Some(Unfinished {
            link,
            memory: memory.map(Arc::clone),
            is_discarded: false,
        });
        let ended = self.finish_copies();
        let copied = copied.unwrap_or_else(|panic| resume_unwind(panic));
        copied.and(ended.map_err(BackupError::Driver))
    }

    /// Waits for copies that may be under way, and takes back what they use.
    fn finish_copies(&mut self) -> Result<(), DriverError> {
        let Some(Unfinished { link, .. }) = &self.unfinished else {
            return Ok(());
        };
        let scope = self.queue.context().enter_relaxed()?;
        link.synchronize()?;
        drop(scope);
        if let Some(finished) = self.unfinished.take() {
            // A ring that is smaller than it should be was made when the host had little memory left.
            if finished.link.slots_max() == self.sizes.slots {
                self.keeper.keep_link(finished.link);
            }
            if let Some(memory) = finished.memory.filter(|_| finished.is_discarded) {
                self.keeper.keep(memory);
            }
        }
        Ok(())
    }

    /// Returns memory of the host for so many bytes.
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

    /// Returns what of a backup is saved next: a step, or all the rest if some of it is not page-locked, as what goes
    /// through the ring is the slower way and takes no longer beside what is copied directly.
    fn step(&self, layout: &Layout, memory: &HostMemory, start: usize) -> Range<usize> {
        let block_bytes = memory.block_bytes();
        let rest = start..layout.bytes();
        let blocks = rest.start / block_bytes..rest.end.div_ceil(block_bytes);
        match memory.locked_blocks()[blocks].contains(&false) {
            true => rest,
            false => layout.step(start, self.sizes.step_bytes, block_bytes),
        }
    }

    /// Saves what lies within a step of a backup: no unit of memory or of the ring is in two of them.
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

    /// Returns what `make` makes in the host's memory; where that has too little, what waits for other backups goes
    /// back for it.
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
            // What leaves the device later than it could is nothing beside a disk's time.
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

    fn discard(&mut self, backup: CudaBackup) {
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
            Some(unfinished) => unfinished.is_discarded = true,
            None => self.keeper.keep(memory),
        }
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
            // The device may still copy to it and from it.
            mem::forget(self.unfinished.take());
        }
    }
}

impl CudaBackup {
    /// Returns how much of the backup the device copies directly, because it is page-locked by now.
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

/// A backup's spans by the way they take.
struct Parts {
    /// Within a block each, all of it page-locked.
    direct: Vec<Range<usize>>,
    /// Within a piece each, from the end: blocks are page-locked from the beginning.
    staged: Vec<Range<usize>>,
}

impl Parts {
    /// Returns the spans of a part of the backup, which begins and ends with a block.
    fn of(layout: &Layout, within: &Range<usize>, memory: &HostMemory, sizes: &Sizes) -> Parts {
        // Once for both: blocks are page-locked meanwhile.
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

/// Returns the pieces of a file in which a layout's ranges lie.
fn pieces(layout: &Layout, file: &FileBackup, piece_bytes: usize) -> Vec<Range<usize>> {
    let spans = layout.spans(0..layout.bytes(), piece_bytes);
    let starts = spans.into_iter().map(|span| span.start);
    starts.map(|start| file.piece_at(start)).collect()
}
