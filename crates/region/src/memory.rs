//! A region's memory on one device: its state, and the steps of a resume.
//!
//! Segments are added only while the region is mapped. So all segments have the region's state:
//!
//! | state | a segment is requested | a segment is released | `pause` | `resume` |
//! |---|---|---|---|---|
//! | mapped | added | so is its memory, unless another segment shares it | → pausing | does nothing² |
//! | pausing | refused | its memory is released with the rest | waits, then as the new state | waits, then as the new state |
//! | paused | refused | a resume maps no memory for it | does nothing¹ | → resuming |
//! | resuming | refused | its memory is released at the end | waits, then as the new state | waits, then as the new state |
//!
//! If a paused region has no segments left, [`RegionMemory::trim`] makes it mapped.
//!
//! A pause ends in *paused*, or after an error in *mapped*. A resume ends in *mapped*, or after an error in *paused*.
//! The exceptions are:
//!
//! - After [`RegionError::NotReleased`] and [`RegionError::NotUndone`] the region is paused with some of its memory still
//!   on the device, which [`Backing`] lists. ¹ Pausing again releases that memory. If some of it still has to be saved,
//!   the region is resumed first.
//! - After [`RegionError::PoolsStillPaused`] the region is mapped and its pools refuse requests. ² Resuming again resumes
//!   the pools.
//!
//! During driver calls and copies, a region's pieces are taken out from under its lock. So this lock is held only briefly,
//! and a thread that frees a block never waits for a copy.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use lowtide_core::{Bytes, DeviceAddress, Driver, DriverError, MempoolId, Stream};

use crate::backing::Backing;
use crate::backup::{BackupKind, Backups, MemoryRange};
use crate::device::Device;
use crate::error::RegionError;
use crate::figures::{Copied, RegionFigures};
use crate::pools::{RegionPools, watch};
use crate::reservation::Reservation;
use crate::state::RegionState;
use saved::Saved;

mod inspect;
mod pausing;
mod saved;
mod source;

/// New memory comes in pieces of at least one part in this many of the region's memory, so that many small segments share
/// few pieces. Memory for later segments is at most one part in this many of the device's free memory.
const GROWTH_PART: u64 = 8;

/// Which copies of mapped regions to release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// All.
    All,
    /// Those that the program does not read: [`RegionMemory::host_copy`] has not returned their address.
    Unread,
    /// Those of regions without segments. The thread that released the last segment could not lock the backups.
    Ended,
}

/// The memory of one region on one device, and the private pools whose segments it backs. A segment keeps its addresses
/// while the region is paused.
///
/// Locks are taken in this order: the device's backups, the pools' allocator, the region, the physical memory.
pub struct RegionMemory<D: Device> {
    device: D,
    kind: Option<BackupKind>,
    pools: RegionPools,
    inner: Mutex<Inner<BackupOf<D>>>,
}

/// A backup of one region.
type BackupOf<D> = <<D as Device>::Backups as Backups>::Backup;

#[derive(Debug)]
struct Inner<K> {
    state: RegionState,
    /// Whether the pools may refuse requests. In a mapped region they do so only after a call to resume them has failed.
    may_refuse: bool,
    /// Whether a pause failed and could not be undone, and some contents are only on the device. Meaningless while the
    /// region is mapped.
    has_unsaved: bool,
    /// Whether copies of a failed backup may still be in progress. No memory is unmapped then.
    may_be_copying: bool,
    reservations: Vec<Reservation>,
    /// The contents of the blocks at the last pause: while the region is paused, and afterwards while the copy is
    /// retained.
    saved: Option<Saved<K>>,
    figures: RegionFigures,
}

impl<D: Device> RegionMemory<D> {
    /// Returns the region called `tag`, which has no memory yet. `kind` says where contents are kept while the region is
    /// paused; if it is `None`, they are lost. `own_pool` serves the requests in the region;
    /// [`RegionMemory::create_pool`] creates it. Does not use the device.
    pub fn new(
        device: D,
        tag: Arc<str>,
        kind: Option<BackupKind>,
        own_pool: MempoolId,
    ) -> RegionMemory<D> {
        RegionMemory {
            device,
            kind,
            pools: RegionPools::new(tag, own_pool),
            inner: Mutex::new(Inner {
                state: RegionState::Mapped,
                may_refuse: false,
                has_unsaved: false,
                may_be_copying: false,
                reservations: Vec::new(),
                saved: None,
                figures: RegionFigures::default(),
            }),
        }
    }

    /// Returns the device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the region's name.
    pub fn tag(&self) -> &Arc<str> {
        &self.pools.tag
    }

    /// Returns where contents are kept while the region is paused; `None` if they are lost.
    pub fn kind(&self) -> Option<BackupKind> {
        self.kind
    }

    /// Returns every pool that has the region's memory.
    pub fn pools(&self) -> Vec<MempoolId> {
        self.pools.all()
    }

    /// Returns whether a pool has the region's memory. The answer does not change under the lock of the device's pools.
    pub fn has_pool(&self, pool: MempoolId) -> bool {
        self.pools.has(pool)
    }

    /// Maps new memory and restores the contents of the blocks that are still allocated. If the region is mapped, only
    /// resumes pools that still refuse requests. Does not wait for work of the device. `backups` are the device's.
    ///
    /// # Errors
    ///
    /// [`RegionError`]. Unless the error says otherwise, the region is paused as before.
    pub fn resume(&self, backups: &mut D::Backups) -> Result<(), RegionError> {
        let finished = self.finish_copies(backups);
        if self.state()? == RegionState::Mapped {
            return self.resume_pools();
        }
        finished?;
        self.resume_paused(backups)
    }

    /// Resumes a paused region.
    fn resume_paused(&self, backups: &mut D::Backups) -> Result<(), RegionError> {
        let start = Instant::now();
        let mut inner = self.lock()?;
        inner.state = RegionState::Resuming;
        drop(inner);
        let restored = self.map_and_restore(backups);
        let mut inner = self.lock()?;
        let copied = match restored {
            Ok(copied) => copied,
            Err(error) => {
                inner.state = RegionState::Paused;
                inner.release_unused(&self.device);
                return Err(error);
            }
        };
        inner.state = RegionState::Mapped;
        inner.release_unused(&self.device);
        inner.figures.count_resume(copied, start.elapsed());
        let is_empty = inner.has_no_segments();
        let has_ended = |saved: &mut Saved<_>| is_empty || !backups.retains(&saved.backup);
        let saved = inner.saved.take_if(has_ended);
        let retained = inner.saved.as_ref().map(|saved| saved.ranges().to_vec());
        drop(inner);
        if let Some(saved) = saved {
            backups.release(saved.backup);
        }
        if let Some(ranges) = retained {
            // Before the pools serve requests.
            watch(&self.device, &ranges, true);
        }
        self.notify(false);
        self.resume_pools()
    }

    /// Releases the retained copy of a mapped region, if `copies` includes it. A paused region keeps its copy.
    /// `backups` are the device's.
    ///
    /// # Errors
    ///
    /// [`RegionError::Poisoned`].
    pub fn release_copy(
        &self,
        copies: Copies,
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        let is_it = |saved: &Saved<_>| match copies {
            Copies::All => true,
            Copies::Unread => saved.has_ended || !saved.may_be_read,
            Copies::Ended => saved.has_ended,
        };
        // If this fails, unused memory stays until the next call.
        let _ = self.finish_copies(backups);
        let mut inner = self.lock()?;
        let is_mapped = inner.state == RegionState::Mapped;
        let saved = inner.saved.take_if(|saved| is_mapped && is_it(saved));
        drop(inner);
        if let Some(saved) = saved {
            watch(&self.device, saved.ranges(), false);
            backups.release(saved.backup);
        }
        Ok(())
    }

    /// Releases the memory that no block uses. If that is all of it, also releases the copy of the contents, and a paused
    /// region becomes mapped, because nothing is left to resume.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools. Memory released before the error stays released; the next call releases the rest.
    pub fn trim(&self) -> Result<(), RegionError> {
        let mut backups = self.device.lock_backups()?;
        self.pools.trim_and_list(&self.device)?;
        // If this fails, unused memory stays until the next call.
        let _ = self.finish_copies(&mut backups);
        let mut inner = self.lock()?;
        // Releases memory that a failed pause left on the device.
        inner.release_unused(&self.device);
        if !inner.has_no_segments() {
            drop(inner);
            return self.resume_pools();
        }
        let was_paused = mem::replace(&mut inner.state, RegionState::Mapped) == RegionState::Paused;
        let saved = inner.saved.take();
        drop(inner);
        if let Some(saved) = saved {
            watch(&self.device, saved.ranges(), false);
            backups.release(saved.backup);
        }
        if was_paused {
            self.notify(false);
        }
        self.resume_pools()
    }

    /// Lets the pools of a mapped region serve requests again. Comes after the region is mapped, because before that a
    /// pool would find no memory. An error is not rolled back, because the first pool may have served requests when the
    /// second fails. `may_refuse` stays set, so that the next call tries again.
    fn resume_pools(&self) -> Result<(), RegionError> {
        let inner = self.lock()?;
        let may_refuse = inner.may_refuse && inner.state == RegionState::Mapped;
        drop(inner);
        if may_refuse {
            let set = self.pools.set_paused(&self.device, false);
            set.map_err(|error| RegionError::PoolsStillPaused { error })?;
            self.lock()?.may_refuse = false;
        }
        Ok(())
    }

    fn notify(&self, is_leaving: bool) {
        let has_pool = |pool| self.pools.has(pool);
        self.device.notify(&self.pools.tag, is_leaving, has_pool);
    }

    /// Maps memory for every segment and restores the contents. Returns the size and time of the restore.
    fn map_and_restore(&self, backups: &mut D::Backups) -> Result<Copied, RegionError> {
        let mut held = self.pools.trim_and_list(&self.device)?;
        let mut inner = self.lock()?;
        // Memory that an earlier pause left without a segment may be needed by others. No stream has used it since.
        let reservations = inner.reservations.iter_mut();
        reservations.for_each(|reservation| reservation.backing.forget_streams());
        inner.release_unused(&self.device);
        // A block freed since the list was made may have lost its segment, and so its memory.
        held.retain(|&block| inner.has(block));
        let reservations = inner.reservations.iter();
        let needed: Vec<_> = reservations.map(Reservation::needed).collect();
        let mut saved = inner.saved.take();
        drop(inner);
        let mut backings = self.take_backings()?;
        let before: Vec<_> = backings.iter().map(Backing::starts).collect();
        let mut outcome = supply_all(&mut backings, &self.device, &needed);
        let mut restored = Copied::default();
        if outcome.is_ok()
            && let Some(saved) = &mut saved
        {
            let copied = saved.restore(&held, backups);
            outcome = copied
                .map(|copied| restored = copied)
                .map_err(RegionError::from);
        }
        if outcome.is_err() && self.have_copies_ended(backups)? {
            // The pieces from before are kept: they may hold contents that were never saved.
            for (backing, before) in backings.iter_mut().zip(&before) {
                // The first error is returned. What the driver refuses now is released by the next pause.
                let _ = backing.release_except(&self.device, before);
            }
        }
        if matches!(outcome, Err(RegionError::Driver(DriverError::OutOfMemory))) {
            outcome = Err(self.no_room(&backings, &needed));
        }
        self.put_backings(backings)?;
        self.lock()?.saved = saved;
        outcome.map(|()| restored)
    }

    /// Returns the error for memory that could not be supplied, after the attempt was undone.
    fn no_room(&self, backings: &[Backing], needed: &[Vec<MemoryRange>]) -> RegionError {
        let all = backings.iter().zip(needed);
        let missing = all.map(|(backing, needed)| backing.missing(needed));
        match self.device.with_driver(Driver::memory_info) {
            Ok(info) => RegionError::NoRoom {
                needed: missing.sum(),
                free: info.free,
            },
            Err(_) => DriverError::OutOfMemory.into(),
        }
    }

    /// Waits for copies of a failed backup that may still be in progress. After an error they still may be, and nothing
    /// has changed.
    fn finish_copies(&self, backups: &mut D::Backups) -> Result<(), RegionError> {
        let mut inner = self.lock()?;
        if !inner.may_be_copying {
            return Ok(());
        }
        drop(inner);
        backups.finish()?;
        inner = self.lock()?;
        inner.may_be_copying = false;
        if inner.state == RegionState::Mapped {
            inner.release_unused(&self.device);
        }
        Ok(())
    }

    /// Returns whether the copies of a backup that has just failed have ended. If not, no memory is unmapped until they
    /// have.
    fn have_copies_ended(&self, backups: &mut D::Backups) -> Result<bool, RegionError> {
        let ended = backups.finish();
        self.lock()?.may_be_copying = ended.is_err();
        Ok(ended.is_ok())
    }

    fn take_backings(&self) -> Result<Vec<Backing>, RegionError> {
        let mut inner = self.lock()?;
        let reservations = inner.reservations.iter_mut();
        Ok(reservations
            .map(|reservation| mem::take(&mut reservation.backing))
            .collect())
    }

    fn put_backings(&self, backings: Vec<Backing>) -> Result<(), RegionError> {
        let mut inner = self.lock()?;
        for (reservation, backing) in inner.reservations.iter_mut().zip(backings) {
            reservation.backing = backing;
        }
        inner.count_mapped();
        Ok(())
    }

    fn lock(&self) -> Result<MutexGuard<'_, Inner<BackupOf<D>>>, RegionError> {
        Ok(self.inner.lock()?)
    }
}

impl<D: Device> fmt::Debug for RegionMemory<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut memory = f.debug_struct("RegionMemory");
        memory.field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl<K> Inner<K> {
    fn allocate(
        &mut self,
        device: &impl Device,
        size: Bytes,
        stream: Stream,
        is_limited: bool,
    ) -> Result<DeviceAddress, DriverError> {
        for reservation in &mut self.reservations {
            if let Some(address) = reservation.reuse(device, size, stream)? {
                return Ok(address);
            }
        }
        let wanted = if is_limited {
            size
        } else {
            size.max(Bytes(self.mapped().get() / GROWTH_PART))
        };
        let piece = piece_for(device, size, wanted)?;
        for reservation in &mut self.reservations {
            if let Some(address) = reservation.grow(device, size, stream, piece)? {
                return Ok(address);
            }
        }
        let granularity = device.with_driver(|driver| driver.granularity());
        let total = device.with_driver(Driver::memory_info)?.total;
        // The region can never have more at once.
        let range_size = total.max(size).round_up(granularity);
        let address = device.with_driver(|driver| driver.reserve(range_size))?;
        let range = MemoryRange {
            address,
            size: range_size,
        };
        let mut reservation = Reservation::new(range, granularity);
        let grown = reservation.grow(device, size, stream, piece);
        self.reservations.push(reservation);
        match grown {
            Ok(address) => address.ok_or(DriverError::OutOfMemory),
            Err(error) => {
                self.release_unused(device);
                Err(error)
            }
        }
    }

    /// Releases the memory and the addresses that no segment uses, unless copies may use them. What the driver refuses
    /// stays, and is released by a later call.
    fn release_unused(&mut self, device: &impl Device) {
        if self.may_be_copying {
            return self.count_mapped();
        }
        for reservation in &mut self.reservations {
            reservation.release_unused(device);
        }
        self.reservations.retain(|reservation| {
            let range = reservation.range;
            let unreserve =
                || device.with_driver(|driver| driver.unreserve(range.address, range.size));
            !reservation.is_vacant() || unreserve().is_err()
        });
        self.count_mapped();
    }

    /// Returns whether a block lies in a segment.
    fn has(&self, block: MemoryRange) -> bool {
        let mut reservations = self.reservations.iter();
        reservations.any(|reservation| reservation.has(block))
    }

    fn has_no_segments(&self) -> bool {
        let mut reservations = self.reservations.iter();
        reservations.all(|reservation| reservation.bytes().is_zero())
    }

    fn count_mapped(&mut self) {
        self.figures.mapped = self.mapped();
    }

    fn mapped(&self) -> Bytes {
        let reservations = self.reservations.iter();
        reservations
            .map(|reservation| reservation.backing.bytes())
            .sum()
    }
}

/// Returns the size of the piece for a segment of `size` bytes: `wanted`, or less if the device has little left. Makes no
/// driver call if there is no margin and `wanted` is no more than `size`.
///
/// # Errors
///
/// The driver's error, or [`DriverError::OutOfMemory`] if the segment would reach into the margin.
fn piece_for(device: &impl Device, size: Bytes, wanted: Bytes) -> Result<Bytes, DriverError> {
    let margin = device.margin();
    if margin.is_zero() && wanted <= size {
        return Ok(size);
    }
    let free = device.with_driver(Driver::memory_info)?.free;
    let room = free.saturating_sub(margin);
    if !margin.is_zero() && room < size {
        return Err(DriverError::OutOfMemory);
    }
    // Memory for later segments is missing elsewhere.
    let left = room.saturating_sub(size);
    Ok(wanted.min(size + Bytes(left.get() / GROWTH_PART)))
}

fn supply_all(
    backings: &mut [Backing],
    device: &impl Device,
    needed: &[Vec<MemoryRange>],
) -> Result<(), RegionError> {
    let mut all = backings.iter_mut().zip(needed);
    Ok(all.try_for_each(|(backing, needed)| backing.supply(device, needed))?)
}
