//! Regions: memory that a program pauses and resumes. A pause releases it from its devices, a resume maps new memory at
//! the same addresses.
//!
//! ```text
//! lowtide_region_enter, leave       table.rs: every region, and which of them this thread is in
//! lowtide_pause, resume             change.rs: the regions of a tag, and what errors say
//! └─ Change::apply                  lowtide-region: every device of a region, at the same time
//!    ├─ RegionMemory::pause, resume one region's memory on one device
//!    └─ Device                      device.rs: its allocator, and notifying observers
//!       ├─ CudaBackups              backups.rs: one device's backups
//!       └─ scrubbing::begin         scrubbing.rs: the driver's own work after it, in the background
//! ```
//!
//! Locks are taken in this order: a device's backups, the table, an allocator, a region's memory, the physical
//! memory. Only the first is held while contents are copied and while a device is waited for. So threads allocate and
//! free meanwhile, in other regions or in none.

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
use lowtide_shared::LaneOf;

use crate::boundary::{path_from_c, run, text_from_c, write_to_c};
use crate::error::{Error, Status};
use crate::pointers::{Mempool, address_of, host_size};
use crate::{devices, start};

pub(crate) use change::begin_allocate_to_pool;
use figures::OnDeviceFigures;

/// Where a region's contents are kept while it is paused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum Backup {
    /// They are lost.
    None = 0,
    /// They are kept in host memory.
    Host = 1,
    /// They are kept in a file.
    Disk = 2,
}

/// Serves this thread's requests from a region until `lowtide_region_leave`. `lowtide_pause` releases the region's
/// memory from the device, and `lowtide_resume` maps it again at the same addresses. Regions nest, and the innermost
/// counts. If `tag` is null, requests are served outside of any region.
///
/// `backup` is one of `lowtide_backup`. Regions with the same tag and different backups are different regions, which are
/// paused and resumed together. Blocks of different regions never share a page.
///
/// This applies to requests of this thread only, on every device, including devices that are not in use yet. Requests of
/// other threads are not in the region, such as those of the threads that run PyTorch's backward passes. Requests of a
/// memory pool or a graph capture are not in it either: use `lowtide_region_pool` for these. Blocks stay in their region
/// when the thread leaves it. A thread that ends leaves its regions.
///
/// A region takes device memory before it is requested, so that pausing it takes few calls. At once it takes at most an
/// eighth of its memory, an eighth of the device's free memory, and 1 GiB. If the device has a limit
/// (`lowtide_set_memory_fraction`), it takes nothing early. Statistics count the memory of its segments as reserved;
/// `mapped_bytes` of `lowtide_region` counts all.
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

/// Leaves the region that this thread entered last. Returns `LOWTIDE_STATUS_INVALID_ARGUMENT` if the thread is in none.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_region_leave() -> Status {
    run(table::leave)
}

/// Puts a memory pool into a region: what a graph capture or a `torch.cuda.MemPool` allocates in the pool is paused and
/// resumed with the region. A pool that does not exist is created, with a use count of 1.
///
/// While something holds the pool, a resume also maps its free memory, because a graph may use it. The contents of that
/// memory are undefined. A pool that nothing holds and that has no blocks ends with a pause, a resume or
/// `lowtide_empty_cache`. A pool that is created later with the same number is in no region.
///
/// Does nothing if the pool is in the region already. Returns `LOWTIDE_STATUS_POOL` if it has other segments or another
/// source.
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

/// Releases the memory of a region on a device that no block uses. If no block uses any of it, the copy of its contents
/// in host memory or on disk ends, too. A paused region is then not paused any more, and serves requests.
///
/// The host memory of such a copy is kept for the next backup (`lowtide_release_idle_backups` releases it). Free memory
/// of pools that something holds (`lowtide_region_pool`) counts as used, except in the region's own pool. Does nothing
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

/// Pauses every region with this tag, or every region if `tag` is null, on all devices at the same time. Saves the
/// contents of allocated blocks as the region's backup says, and releases the memory from the device. Addresses stay.
/// The memory must not be used until `lowtide_resume`. A region that is paused already stays paused.
///
/// Waits for all work in the primary context of each device on which a region has memory. Also waits for the streams, of
/// any device, for which freed blocks are pending (`lowtide_record_stream`). Work in other contexts must have ended
/// before.
///
/// Must not be called while a stream of such a device is being captured: the device refuses the wait
/// (`LOWTIDE_STATUS_DRIVER`), and the capture is invalidated. `lowtide_resume` may be called during a capture.
///
/// Memory that other processes have attached (`lowtide_share`, CUDA's IPC) stays on the device until they detach it.
/// After a resume the region has other memory, which is not shared with them.
///
/// If a region fails, the others are still paused and stay paused, on this device and on others. The first failure is
/// returned. On each device a region is then either mapped as before or paused with its contents kept, as
/// `lowtide_visit_regions` shows. Both this function and `lowtide_resume` may then be called.
///
/// Returns `LOWTIDE_STATUS_INVALID_ARGUMENT` for a tag that was never entered, `LOWTIDE_STATUS_BACKUP` if contents could
/// not be saved, and `LOWTIDE_STATUS_DRIVER` if a device refused.
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

/// Like `lowtide_pause`, but saves no contents, whatever the region's backup.
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

/// Resumes every region with this tag, or every region if `tag` is null, on all devices at the same time. Maps new memory
/// at the same addresses and restores the saved contents. A region that is not paused stays as it is.
///
/// Segments whose blocks have all been freed are not mapped. If a device has too little memory, its cache is emptied and
/// the region is tried again.
///
/// If a region fails, the others are still resumed and stay mapped, on this device and on others. The first failure is
/// returned. On each device a region is then either mapped or paused as before, and this function may be called again.
///
/// Returns `LOWTIDE_STATUS_OUT_OF_MEMORY` if a device still has too little memory, `LOWTIDE_STATUS_BACKUP` if contents
/// could not be read, and otherwise the statuses of `lowtide_pause`.
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

/// Writes to `copy` the address of the host's copy of a block, and to `size` the block's requested bytes. For an address
/// inside a block, writes the address of that byte in the copy, and the number of bytes from there. There is a copy while
/// the block's region is paused with a backup in host memory. The copy belongs to lowtide, may be read and written, and
/// is valid until the region is resumed.
///
/// If `lowtide_retain_backups` was on at the resume, the copy stays until the region is paused again or has no memory, or
/// until `lowtide_release_backups`. It has the block's contents at the pause. A block allocated after the pause has no
/// copy.
///
/// Returns `LOWTIDE_STATUS_NOT_ALLOCATED` for an address in no allocated block, and `LOWTIDE_STATUS_INVALID_ARGUMENT` if
/// there is no copy. For an address inside a block, takes time linear in the number of blocks.
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

/// Returns the address of the host's copy of a device's block, if there is one.
fn copy_of(device: c_int, block: &Allocation) -> Result<Option<usize>, Error> {
    let Some(region) = table::memory_of(device, block.pool)? else {
        return Ok(None);
    };
    Ok(region.host_copy(block)?)
}

/// Returns an error if the region of a device's block is paused, for callers that need the block's memory.
pub(crate) fn refuse_paused(device: c_int, block: &Allocation) -> Result<(), Error> {
    let Some(tag) = paused_region(device, block)? else {
        return Ok(());
    };
    let text = format_args!("region {tag:?} is paused: resume it before sharing its blocks");
    Err(Error::new(Status::Paused, text))
}

/// Returns the tag of the region that a device's block is in, if that is paused, or being paused or resumed.
fn paused_region(device: c_int, block: &Allocation) -> Result<Option<Arc<str>>, Error> {
    let Some(region) = table::memory_of(device, block.pool)? else {
        return Ok(None);
    };
    let is_paused = region.state()? != lowtide_region::RegionState::Mapped;
    Ok(is_paused.then(|| Arc::clone(region.tag())))
}

/// Returns the address of the host's copy of some bytes in one block; `None` if there is no copy. For an address inside a
/// block, linear in the number of blocks.
///
/// # Errors
///
/// Those of `lowtide_backup_find` except for a missing copy.
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

/// Returns the block that contains an address. For an address that is not a block's start, only blocks in regions are
/// found, in time linear in the number of blocks.
///
/// # Errors
///
/// If there is no such block, and as for [`devices::with_block`].
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

/// Returns the last block of a region that starts at or before an address in its segment. Linear in the number of blocks.
///
/// # Errors
///
/// If the address is in no region or before its blocks, and as for [`devices::with_block`].
fn find_block_around(address: DeviceAddress) -> Result<(c_int, Allocation), Error> {
    let missed = || Error::from(AllocError::NotAllocated { address });
    let (device, segment) = devices::find_segment(address)?;
    if table::memory_of(device, segment.pool)?.is_none() {
        return Err(missed());
    }
    let allocator = devices::get(device).expect("it has a segment");
    let held = allocator.with_lane(LaneOf::Pools, |lane| lane.held_blocks(segment.pool))?;
    let before = held.partition_point(|block| block.address <= address);
    let block = before.checked_sub(1).map(|last| held[last]);
    Ok((device, block.ok_or_else(missed)?))
}

/// Writes whether a block is in a region with this tag, or in any region if `tag` is null.
///
/// `memory` is the start of the block. Returns `LOWTIDE_STATUS_NOT_ALLOCATED` if no allocated block starts there.
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

/// Writes whether a block cannot be used because its region is paused, or is being paused or resumed.
///
/// `memory` is the start of the block. Returns `LOWTIDE_STATUS_NOT_ALLOCATED` if no allocated block starts there.
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

/// Sets how many bytes of each device stay free when regions grow. A request that needs more empties the cache and then
/// fails for lack of memory. The default is 0.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_memory_margin(bytes: u64) -> Status {
    run(|| {
        card::set_margin(bytes);
        Ok(())
    })
}

/// Sets the directory of backups on disk from now on. The default is `LOWTIDE_BACKUP_DIR`, or else the system's directory
/// for temporary files. The default is read when the first region is entered.
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

/// Sets whether the host memory of backups is retained until `lowtide_release_backups`. A pause that finds such memory is
/// faster. The default is off, or on if `LOWTIDE_RETAIN_BACKUPS` is 1.
///
/// On: a resume keeps the region's copy, which can be read (`lowtide_backup_find`). The next pause of the region uses its
/// memory. Host memory then has the copies of all regions at once. Off: a resume ends the copy, and its memory is
/// released 30 seconds after its last use. Files are never retained: a resume removes them.
///
/// The setting applies at once, also to idle memory. A copy that an earlier resume kept stays until the region is paused
/// again. Waits for a pause or a resume in progress.
///
/// If a pause finds too little host memory, it ends copies of other regions that `lowtide_backup_find` has not returned:
/// those of its device first, then those of every device. It also releases idle memory. If there is still too little, it
/// fails.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_retain_backups(retain: bool) -> Status {
    run(|| backups::set_retain(retain))
}

/// Writes to `bytes` how much host memory is kept for later backups of a device. It is mapped, and mostly page-locked. It
/// does not count in a region's `host_bytes`. The value is 0 for a device that is not in use. Does not wait for a pause
/// or a resume.
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

/// Releases the host memory that is kept for later backups, retained or not, and ends the copies of regions that are not
/// paused. Returns when that is done. Backups of paused regions stay. Waits for a pause or a resume in progress.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_release_backups() -> Status {
    run(|| change::release(Copies::All))
}

/// Like `lowtide_release_backups`, but keeps copies that can be read.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_release_idle_backups() -> Status {
    run(|| change::release(Copies::Ended))
}

/// Waits until the host memory of backups is page-locked, as far as the system allows, on every device. Copies from
/// `lowtide_backup_find`'s memory to a device are faster then. Without this call, a background thread page-locks the
/// memory after the first pause, slowly enough for the job to use the driver. Page-locking takes 0.03 to 0.8 s for a GiB,
/// the first time. Regions cannot be paused or resumed meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_page_lock_backups() -> Status {
    run(backups::finish_locking)
}

/// The state of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum RegionState {
    /// Its memory is on the device.
    Mapped = 0,
    /// A pause is in progress.
    Pausing = 1,
    /// Its memory is released.
    Paused = 2,
    /// A resume is in progress.
    Resuming = 3,
}

/// A region's figures on one device. Totals count from the region's first use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Region {
    /// The region's tag.
    pub tag: *const c_char,
    /// The device.
    pub device: c_int,
    /// Where contents are kept while the region is paused.
    pub backup: Backup,
    /// The region's state.
    pub state: RegionState,
    /// The bytes of its allocated blocks.
    pub live_bytes: u64,
    /// The bytes of the device that the region has.
    pub mapped_bytes: u64,
    /// The bytes of the device that a resume would take now. Segments whose blocks have all been freed are not counted.
    pub paused_bytes: u64,
    /// The bytes of its copy in host memory.
    pub host_bytes: u64,
    /// The bytes of its copy on disk.
    pub disk_bytes: u64,
    /// The number of pauses.
    pub pauses: u64,
    /// The number of resumes.
    pub resumes: u64,
    /// The bytes saved by pauses.
    pub saved_bytes: u64,
    /// The bytes restored by resumes.
    pub restored_bytes: u64,
    /// The time of the pauses, including the wait for the device.
    pub pause_ns: u64,
    /// The time of the resumes.
    pub resume_ns: u64,
    /// The time of the last pause.
    pub last_pause_ns: u64,
    /// The time of the last resume.
    pub last_resume_ns: u64,
    /// The bytes saved by the last pause.
    pub last_saved_bytes: u64,
    /// The bytes restored by the last resume.
    pub last_restored_bytes: u64,
    /// The time of saving, which is part of `pause_ns`. `saved_bytes` divided by it is the speed of saving.
    pub save_ns: u64,
    /// The time of restoring, which is part of `resume_ns`.
    pub restore_ns: u64,
    /// The time of saving in the last pause; 0 if nothing was saved.
    pub last_save_ns: u64,
    /// The time of restoring in the last resume; 0 if nothing was saved.
    pub last_restore_ns: u64,
}

/// Is called with a region and the `context` that was passed with it, without any lock. It must not throw or unwind, nor
/// keep the pointers.
pub type RegionVisitor = Option<unsafe extern "C" fn(context: *mut c_void, region: *const Region)>;

/// Calls `visit` for every region on every device in use, in the order in which the regions were first entered.
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
