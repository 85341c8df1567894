//! Regions: memory that a program takes off its devices for a while, and gets back at the same addresses.
//!
//! ```text
//! lowtide_region_enter, leave       table.rs: every region, and which of them this thread is in
//! lowtide_pause, resume             change.rs: the regions of a tag, and what errors say
//! └─ Change::apply                  lowtide-region: every device of a region, at the same time
//!    ├─ RegionMemory::pause, resume one region's memory on one device
//!    └─ Device                      device.rs: its allocator, and who is notified
//!       ├─ CudaBackups              backups.rs: one device's backups
//!       └─ scrubbing::begin         scrubbing.rs: the driver's own work after it, in the background
//! ```
//!
//! Locks are taken in this order: a device's backups, the table, an allocator's, the books of a region's memory,
//! the driver's. The first is held while contents are copied and while a device is waited for, the others are
//! not: whoever allocates and frees, in other regions or in none, goes on meanwhile.

pub(crate) mod backups;
mod card;
mod change;
mod device;
pub(crate) mod figures;
mod scrubbing;
pub(crate) mod table;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::{AllocError, Allocation, Bytes, DeviceAddress};
use lowtide_region::{BackupKind, Change, Copies};

use crate::boundary::{Mempool, path_from_c, run, text_from_c, write_to_c};
use crate::error::{Error, Status};
use crate::pointers::{address_of, host_size};
use crate::{devices, start};

pub(crate) use change::begin_allocate_to_pool;
use figures::OnDeviceFigures;

/// What becomes of a region's contents while it is paused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum Backup {
    /// They are lost.
    None = 0,
    /// They are kept in the host's memory.
    Host = 1,
    /// They are kept in a file.
    Disk = 2,
}

/// Has this thread's requests served from a region until `lowtide_region_leave`: memory that
/// `lowtide_pause` takes off the device and `lowtide_resume` brings back at the same addresses. Regions nest,
/// and the innermost counts. If `tag` is null, requests are served as outside of any region.
///
/// `backup` is one of `lowtide_backup`. Regions of one tag and different backups are different regions,
/// which are paused and resumed together. Blocks of different regions never share a page.
///
/// This concerns requests of this thread alone, on every device, those that are not in use yet included. Not
/// in the region are requests of other threads (the threads that run PyTorch's backward passes among them),
/// and those that a memory pool or a graph capture takes: `lowtide_region_pool` is for these. What was
/// handed out stays in the region when the thread leaves it; a thread that ends has left.
///
/// A region takes memory of the device ahead of its requests, so that pausing it takes few calls: an eighth of
/// what it has, of what the device has left, and 1 GiB at most at once, and nothing where the device has a limit
/// (`lowtide_set_memory_fraction`). Statistics count as reserved what its segments have; `mapped_bytes` of
/// `lowtide_region` counts all.
///
/// While a region is paused, a request in it fails with `LOWTIDE_STATUS_PAUSED`. Blocks can be freed.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_region_enter(tag: *const c_char, backup: c_int) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        match unsafe { text_from_c("tag", tag) }? {
            Some(tag) => table::enter(tag, kind_of(backup)?),
            None => table::enter_none(),
        }
    })
}

/// Leaves the region that this thread entered last. `LOWTIDE_STATUS_INVALID_ARGUMENT` where it is in none.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_region_leave() -> Status {
    run(table::leave)
}

/// Gives a memory pool the memory of a region: what a graph capture or a `torch.cuda.MemPool` allocates in the
/// pool is paused and resumed with the region. A pool that is not there is made, held once.
///
/// As long as something holds the pool, its free memory comes back with the region, too, as a graph may use it; what is
/// in it then is undefined. A pool that nothing holds ends with a pause or a resume, or `lowtide_empty_cache`, once it has
/// no blocks, and one of its number that is made after that is in no region.
///
/// Does nothing where the pool has that memory already. `LOWTIDE_STATUS_POOL` if it has other segments or
/// another source.
///
/// # Safety
///
/// `tag` ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_region_pool(
    device: c_int,
    pool: Mempool,
    tag: *const c_char,
    backup: c_int,
) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let tag = unsafe { text_from_c("tag", tag) }?.ok_or_else(|| Error::null("tag"))?;
        let kind = kind_of(backup)?;
        let allocator = start::device(device)?;
        let region = table::on_device(device, allocator, tag, kind)?;
        Ok(region.add_pool(pool.id())?)
    })
}

/// Gives back what a region has on a device and no block uses. Where no block uses any of it, the host's copy or the
/// file of its contents ends, too, and a region that was paused is no longer: requests in it are served.
///
/// The host's memory of such a copy waits for the next backup, as always (`lowtide_release_idle_backups`). Free memory
/// of other pools than the region's own counts as used while something holds them (`lowtide_region_pool`). Does nothing
/// for a region that was never on the device.
///
/// # Safety
///
/// `tag` ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_region_trim(
    device: c_int,
    tag: *const c_char,
    backup: c_int,
) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let tag = unsafe { text_from_c("tag", tag) }?.ok_or_else(|| Error::null("tag"))?;
        change::trim(device, tag, kind_of(backup)?)
    })
}

/// Takes the memory of a region off its devices, on all devices at the same time; of every region if `tag` is
/// null. Addresses stay. What the program holds of it is kept first as the region was entered for, and nothing
/// of it may be used until `lowtide_resume`.
///
/// Waits for all work of the devices on which the region has memory, which is that of each device's primary
/// context, and for the streams that blocks which were freed wait for (`lowtide_record_stream`), of whatever device:
/// other work in other contexts must have ended before. A region that is paused already stays so.
///
/// Not while a stream of such a device is captured: the device refuses the wait, `LOWTIDE_STATUS_DRIVER`, and the
/// capture is spoiled. A resume may come then.
///
/// Memory that other processes have attached (`lowtide_share`, CUDA's IPC) stays on the device until they let
/// go of it. The region has other memory after a resume, which is no longer shared with them.
///
/// After a failure a region is on each device either mapped as before or paused with its contents kept,
/// which `lowtide_visit_regions` shows; both this and `lowtide_resume` may then be called. A region that fails keeps
/// no other, and none on another device, from being paused, and those stay so. The first failure is the answer.
/// `LOWTIDE_STATUS_INVALID_ARGUMENT` for a tag that was never entered, `LOWTIDE_STATUS_BACKUP` where contents
/// could not be kept, `LOWTIDE_STATUS_DRIVER` where a device refused.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_pause(tag: *const c_char) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        change::change(unsafe { text_from_c("tag", tag) }?, Change::Pause)
    })
}

/// As `lowtide_pause`, and keeps nothing of what is in the memory, whatever the region was entered for.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_pause_and_drop(tag: *const c_char) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        change::change(unsafe { text_from_c("tag", tag) }?, Change::PauseAndDrop)
    })
}

/// Brings the memory of a region back to its addresses, with what was kept, on all devices at the same time;
/// of every region if `tag` is null. A region that is not paused stays as it is.
///
/// What was freed since does not come back. Where a device has too little memory, what is cached on it is given
/// back first. After a failure a region is on each device either mapped or paused as before, and this may be
/// called again: one that fails keeps no other, and none on another device, from coming back, and those stay mapped.
/// The first failure is the answer: `LOWTIDE_STATUS_OUT_OF_MEMORY` where a device has too little memory still,
/// `LOWTIDE_STATUS_BACKUP` where contents could not be read, and as `lowtide_pause`.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_resume(tag: *const c_char) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        change::change(unsafe { text_from_c("tag", tag) }?, Change::Resume)
    })
}

/// Writes where the host's copy of a block is, and how many bytes were asked for with the block, while its
/// region is paused with a backup in the host's memory; of an address within a block, where that lies in the copy,
/// and how many bytes are left from there. The copy is lowtide's, may be read and written, and is valid until the
/// region is resumed.
///
/// Where `lowtide_retain_backups` was in force at the resume, the copy stays, and is found, until the region is
/// paused again or has no memory any more, or `lowtide_release_backups`, and is what the block held when the region
/// was paused. A block that was handed out since then has none.
///
/// `LOWTIDE_STATUS_NOT_ALLOCATED` for an address in no block of the program's, `LOWTIDE_STATUS_INVALID_ARGUMENT` where
/// there is no copy. Takes time in proportion to the blocks for an address within one.
///
/// # Safety
///
/// `copy` and `size` are null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_backup_find(
    memory: *const c_void,
    copy: *mut *const c_void,
    size: *mut usize,
) -> Status {
    run(|| {
        if copy.is_null() {
            return Err(Error::null("copy"));
        }
        let start = address_of(memory.cast_mut());
        let (device, block) = find_around(start)?;
        let distance = start.offset_from(block.address);
        let found = copy_of(device, &block)?.ok_or_else(|| {
            let text = "the host has no copy of this block: its region has no backup there, or is not paused \
                        and retained none of this block";
            Error::new(Status::InvalidArgument, text)
        })?;
        let found = found + host_size(distance);
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("size", size, host_size(block.requested - distance)) }?;
        // SAFETY: as above.
        unsafe { write_to_c("copy", copy, ptr::with_exposed_provenance(found)) }
    })
}

/// Returns where the host's copy of a device's block is, if there is one.
fn copy_of(device: c_int, block: &Allocation) -> Result<Option<usize>, Error> {
    let Some(region) = table::memory_of(device, block.pool)? else {
        return Ok(None);
    };
    Ok(region.host_copy(block)?)
}

/// Refuses what needs the memory of a device's block, if that is not on the device.
pub(crate) fn refuse_paused(device: c_int, block: &Allocation) -> Result<(), Error> {
    let Some(tag) = paused_region(device, block)? else {
        return Ok(());
    };
    let text = format_args!("region {tag:?} is paused: resume it before sharing its blocks");
    Err(Error::new(Status::Paused, text))
}

/// Returns the tag of the region that a device's block is in, if the region's memory is not on the device.
fn paused_region(device: c_int, block: &Allocation) -> Result<Option<Arc<str>>, Error> {
    let Some(region) = table::memory_of(device, block.pool)? else {
        return Ok(None);
    };
    let is_paused = region.state()? != lowtide_region::RegionState::Mapped;
    Ok(is_paused.then(|| Arc::clone(region.tag())))
}

/// Returns where the host's copy of some bytes is, which lie in one block.
///
/// # Errors
///
/// As `lowtide_backup_find`, where there is none `Ok(None)`. Linear in the blocks for an address within one.
pub(crate) fn find_copy(start: DeviceAddress, size: Bytes) -> Result<Option<usize>, Error> {
    let (device, block) = match find_around(start) {
        Err(error) if error.status == Status::NotAllocated => return Ok(None),
        found => found?,
    };
    let distance = start.offset_from(block.address);
    if block.requested.saturating_sub(distance) < size {
        return Ok(None);
    }
    Ok(copy_of(device, &block)?.map(|copy| copy + host_size(distance)))
}

/// Returns the block that an address lies in, which is one of a region's if it does not begin there.
///
/// # Errors
///
/// If it lies in none, and as [`devices::with_block`]. Linear in the blocks for an address within one.
fn find_around(address: DeviceAddress) -> Result<(c_int, Allocation), Error> {
    match devices::find_allocation(address) {
        Err(missed) if missed.status == Status::NotAllocated => {
            let (device, block) = find_block_around(address)?;
            let is_inside = address.offset_from(block.address) < block.requested;
            is_inside.then_some((device, block)).ok_or(missed)
        }
        found => found,
    }
}

/// Returns the last block of a region that begins at or before an address in its segment. Linear in the blocks.
///
/// # Errors
///
/// If the address lies in no region or before its blocks, and as [`devices::with_block`].
fn find_block_around(address: DeviceAddress) -> Result<(c_int, Allocation), Error> {
    let missed = || Error::from(AllocError::NotAllocated { address });
    let (device, segment) = devices::find_segment(address)?;
    if table::memory_of(device, segment.pool)?.is_none() {
        return Err(missed());
    }
    let allocator = devices::get(device).expect("it has a segment");
    let held = allocator.with_pools(|lane| lane.held_blocks(segment.pool))??;
    let before = held.partition_point(|block| block.address <= address);
    let block = before.checked_sub(1).map(|last| held[last]);
    Ok((device, block.ok_or_else(missed)?))
}

/// Writes whether a block lies in a region with this tag, or in any region if `tag` is null.
///
/// `memory` is the pointer that was handed out. `LOWTIDE_STATUS_NOT_ALLOCATED` for one that the program does not
/// hold.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte, and is read before this returns. `is_in` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_is_in_region(
    memory: *const c_void,
    tag: *const c_char,
    is_in: *mut bool,
) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let tag = unsafe { text_from_c("tag", tag) }?;
        let (device, block) = devices::find_allocation(address_of(memory.cast_mut()))?;
        let found = table::memory_of(device, block.pool)?;
        let found = found.is_some_and(|region| tag.is_none_or(|tag| **region.tag() == *tag));
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("is_in", is_in, found) }
    })
}

/// Writes whether a block's memory is not on its device, as its region is paused, or leaves or comes back just now.
///
/// `memory` is the pointer that was handed out. `LOWTIDE_STATUS_NOT_ALLOCATED` for one that the program does not
/// hold.
///
/// # Safety
///
/// `is_away` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_is_away(memory: *const c_void, is_away: *mut bool) -> Status {
    run(|| {
        let (device, block) = devices::find_allocation(address_of(memory.cast_mut()))?;
        let found = paused_region(device, &block)?.is_some();
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("is_away", is_away, found) }
    })
}

/// Lets regions grow only while this many bytes of their device stay free: a request that needs more has
/// what is cached given back, and then fails for lack of memory. 0, the default, leaves nothing.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_memory_margin(bytes: u64) -> Status {
    run(|| {
        card::set_margin(bytes);
        Ok(())
    })
}

/// Says in which directory backups on disk are kept from now on; by default it is what `LOWTIDE_BACKUP_DIR`
/// says, or the system's for temporary files, as that is when the first region is entered.
///
/// # Safety
///
/// `path` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_set_backup_directory(path: *const c_char) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let path = unsafe { path_from_c(path) }.ok_or_else(|| Error::null("path"))?;
        backups::set_directory(path.to_owned())
    })
}

/// Says whether the host's memory of backups stays until `lowtide_release_backups`: a pause that finds such memory
/// is faster. Each region's copy then stays with a resume as it is, to be read (`lowtide_backup_find`), and its
/// memory is used by the next pause of that region. Otherwise, and by default unless `LOWTIDE_RETAIN_BACKUPS` is 1,
/// a resume ends the copy, and its memory goes back 30 seconds after it was last used.
///
/// This holds from now on, for what is idle already, too; what an earlier resume left to be read stays until the
/// region is paused again. It waits for a pause or a resume that is under way. Files are never kept: they go when
/// their region was resumed. The host's memory then has the copies of all regions at once. A pause for which it has
/// too little ends those of other regions whose addresses nobody was given, of its device first and then of every
/// device, gives back what is idle, and fails if it has too little still.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_retain_backups(retain: bool) -> Status {
    run(|| backups::set_retain(retain))
}

/// Writes to `bytes` how much of the host's memory the backups of a device that ended have left for the next ones: mapped,
/// and page-locked most of it. It counts in no region's `host_bytes`. Waits for no pause and no resume. 0 for a device
/// that is not in use.
///
/// # Safety
///
/// `bytes` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_kept_host_bytes(device: c_int, bytes: *mut u64) -> Status {
    run(|| {
        devices::get_checked(device)?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("bytes", bytes, backups::kept(device).get()) }
    })
}

/// Gives back the host's memory that waits for the next backups, retained or not, ends the copies of regions that
/// are not paused, and returns when that is done. Backups of regions that are paused are left alone. Waits for a
/// pause or a resume that is under way.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_release_backups() -> Status {
    run(|| change::release(Copies::All))
}

/// As `lowtide_release_backups`, and leaves the copies alone that can be read.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_release_idle_backups() -> Status {
    run(|| change::release(Copies::Ended))
}

/// Returns once the host's memory of backups is page-locked, as far as the system lets it be, on every device. That is
/// done beside the job, from a first pause on and slowly enough to leave it the driver, or at once where this waits for
/// it, and takes 0.03 to 0.8 s for a GiB the first time; who copies from `lowtide_backup_find`'s memory to a device is
/// faster then. Regions are not paused and resumed meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_page_lock_backups() -> Status {
    run(backups::finish_locking)
}

/// Where a region's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum RegionState {
    /// On the device.
    Mapped = 0,
    /// On its way from it.
    Pausing = 1,
    /// Nowhere.
    Paused = 2,
    /// On its way back.
    Resuming = 3,
}

/// A region's figures on one device. Sums are since it was first entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Region {
    /// Its name.
    pub tag: *const c_char,
    /// The device.
    pub device: c_int,
    /// What becomes of its contents.
    pub backup: Backup,
    /// Where its memory is.
    pub state: RegionState,
    /// The blocks that the program holds in it.
    pub live_bytes: u64,
    /// Physical memory of the device.
    pub mapped_bytes: u64,
    /// What a resume would take of the device's memory now: a segment in which all was freed since does not come back.
    pub paused_bytes: u64,
    /// What is kept of it in the host's memory.
    pub host_bytes: u64,
    /// What is kept of it on disk.
    pub disk_bytes: u64,
    /// How often it was paused.
    pub pauses: u64,
    /// How often it was resumed.
    pub resumes: u64,
    /// What was copied away.
    pub saved_bytes: u64,
    /// What was copied back.
    pub restored_bytes: u64,
    /// How long pausing took, the wait for the device included.
    pub pause_ns: u64,
    /// How long resuming took.
    pub resume_ns: u64,
    /// How long pausing took the last time.
    pub last_pause_ns: u64,
    /// How long resuming took the last time.
    pub last_resume_ns: u64,
    /// What was copied away the last time.
    pub last_saved_bytes: u64,
    /// What was copied back the last time.
    pub last_restored_bytes: u64,
    /// How long copying away took, a part of `pause_ns`: with `saved_bytes` it is the speed of that.
    pub save_ns: u64,
    /// How long copying back took, a part of `resume_ns`.
    pub restore_ns: u64,
    /// How long copying away took the last time; 0 where nothing was kept.
    pub last_save_ns: u64,
    /// How long copying back took the last time; 0 where nothing was kept.
    pub last_restore_ns: u64,
}

/// Is shown a region. Called with the `context` that was given with it, and without any lock; it must not
/// throw or unwind, nor keep the pointers.
pub type RegionVisitor = Option<unsafe extern "C" fn(context: *mut c_void, region: *const Region)>;

/// Shows `visit` every region on every device in use, in the order in which the regions were first entered.
///
/// # Safety
///
/// `visit` may be called with `context` until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_visit_regions(
    visit: RegionVisitor,
    context: *mut c_void,
) -> Status {
    run(|| {
        let visit = visit.ok_or_else(|| Error::null("visit"))?;
        for region in table::memories()? {
            let tag = CString::new(&**region.tag());
            let tag = tag.map_err(|error| Error::new(Status::Internal, error))?;
            let shown = Region::of(&tag, &figures::of(&region)?);
            // SAFETY: it may be called with the context, by the contract of this function.
            unsafe { visit(context, &raw const shown) };
        }
        Ok(())
    })
}

impl Region {
    fn of(tag: &CStr, region: &OnDeviceFigures) -> Region {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let figures = &region.memory;
        Region {
            tag: tag.as_ptr(),
            device: region.device,
            backup: Backup::of(region.kind),
            state: match figures.state {
                lowtide_region::RegionState::Mapped => RegionState::Mapped,
                lowtide_region::RegionState::Pausing => RegionState::Pausing,
                lowtide_region::RegionState::Paused => RegionState::Paused,
                lowtide_region::RegionState::Resuming => RegionState::Resuming,
            },
            live_bytes: region.live.get(),
            mapped_bytes: figures.mapped.get(),
            paused_bytes: region.needed_to_resume.get(),
            host_bytes: figures.host.get(),
            disk_bytes: figures.disk.get(),
            pauses: figures.pauses,
            resumes: figures.resumes,
            saved_bytes: figures.saved.get(),
            restored_bytes: figures.restored.get(),
            pause_ns: ns(figures.pause_time),
            resume_ns: ns(figures.resume_time),
            last_pause_ns: ns(figures.last_pause_time),
            last_resume_ns: ns(figures.last_resume_time),
            last_saved_bytes: figures.last_saved.get(),
            last_restored_bytes: figures.last_restored.get(),
            save_ns: ns(figures.save_time),
            restore_ns: ns(figures.restore_time),
            last_save_ns: ns(figures.last_save_time),
            last_restore_ns: ns(figures.last_restore_time),
        }
    }
}

impl Backup {
    pub(crate) fn of(kind: Option<BackupKind>) -> Backup {
        match kind {
            None => Backup::None,
            Some(BackupKind::Host) => Backup::Host,
            Some(BackupKind::Disk) => Backup::Disk,
        }
    }
}

fn kind_of(backup: c_int) -> Result<Option<BackupKind>, Error> {
    let kinds = [None, Some(BackupKind::Host), Some(BackupKind::Disk)];
    let found = kinds
        .into_iter()
        .find(|&kind| Backup::of(kind) as c_int == backup);
    found.ok_or_else(|| {
        let text = format_args!("{backup} is not one of lowtide_backup");
        Error::new(Status::InvalidArgument, text)
    })
}
