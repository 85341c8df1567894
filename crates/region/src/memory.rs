//! A region's memory on one device: its state, and what pausing and resuming do, in order.
//!
//! Segments are added only while the region is mapped, so all of them are in the region's state:
//!
//! | state | a segment is wanted | one goes back | `pause` | `resume` |
//! |---|---|---|---|---|
//! | mapped | given | its memory, too, where nothing else uses it | → pausing | does nothing² |
//! | pausing | refused | its memory leaves as the others' does | waits, then as found | waits, then as found |
//! | paused | refused | its memory does not come back | does nothing¹ | → resuming |
//! | resuming | refused | its memory goes back at the end | waits, then as found | waits, then as found |
//!
//! [`RegionMemory::trim`] makes *mapped* of *paused* where no segment is left.
//!
//! Pausing ends in *paused* or, after an error, in *mapped*; resuming in *mapped* or, after an error, in *paused*.
//! Two errors leave *paused* behind with some of the memory still on the device, which the table of pieces knows
//! of: [`RegionError::StillHeld`] and [`RegionError::NotPutBack`]. ¹ Pausing again gives that away, or, if not all of
//! what it holds is saved and it is to be, resumes the region first. One leaves *mapped* behind with pools that refuse requests:
//! [`RegionError::NotTold`]. ² Resuming again tells them.
//!
//! The pieces are taken out of the books while driver calls and copies are made for all of them, so that the
//! lock of the books is held for moments only: a thread that frees a block never waits for a copy.

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
mod leaving;
mod saved;
mod source;

/// New memory comes in pieces of at least this part of what the region has, so that many small segments are
/// few pieces, but takes no more ahead of segments to come than this part of what the device has left.
const GROWTH_PART: u64 = 8;

/// Which copies of a region that is mapped are meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// Any.
    All,
    /// Of which [`RegionMemory::host_copy`] has returned no address: nobody may read it.
    Unshown,
    /// What was retained until the region's last segment went, by a thread that had no backups to give it to.
    Ended,
}

/// The memory of one region on one device, and the private pools whose segments it is. These stay where they are, whether
/// there is memory behind them or not.
///
/// Locks are taken in this order: the operation that is under way, those of the pools' allocator, the
/// books, the driver's.
pub struct RegionMemory<D: Device> {
    device: D,
    kind: Option<BackupKind>,
    pools: RegionPools,
    books: Mutex<Books<BackupOf<D>>>,
}

/// A backup of one region.
type BackupOf<D> = <<D as Device>::Backups as Backups>::Backup;

#[derive(Debug)]
struct Books<K> {
    state: RegionState,
    /// Whether the pools may take the memory to be away, and refuse requests. While the region is mapped that
    /// is so only after a call to tell them has failed.
    refuses: bool,
    /// Whether a pause failed and could not be undone, and some contents are on the device alone. Of no meaning while
    /// the region is mapped.
    holds_unsaved: bool,
    /// Whether copies of a backup that failed may still be under way: what is mapped stays so.
    is_copied: bool,
    reservations: Vec<Reservation>,
    /// What the blocks held when the region was last paused: while it is paused, and after that as long as
    /// it is retained.
    saved: Option<Saved<K>>,
    figures: RegionFigures,
}

impl<D: Device> RegionMemory<D> {
    /// Returns the memory of the region called `tag`, which has nothing yet. `kind` says what becomes of contents while it
    /// is paused: they are lost where it is `None`. `own_pool` is the pool of requests in the region, which
    /// [`RegionMemory::create_pool`] makes. The device is called for nothing yet.
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
            books: Mutex::new(Books {
                state: RegionState::Mapped,
                refuses: false,
                holds_unsaved: false,
                is_copied: false,
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

    /// Returns whether a pool has the region's memory, which does not change under the lock of the device's pools.
    pub fn has_pool(&self, pool: MempoolId) -> bool {
        self.pools.has(pool)
    }

    /// Takes the memory off the device: waits for the device's work, keeps what the blocks of its pools hold,
    /// and gives everything back. Does nothing where that was done before. One call for each run of
    /// adjacent pieces of what is saved at once, and one for each piece.
    ///
    /// # Errors
    ///
    /// [`RegionError`]; the region is then mapped as before, but where the error says that it is not.
    pub fn pause(&self) -> Result<(), RegionError> {
        self.take_away(self.kind)
    }

    /// As [`RegionMemory::pause`], and keeps nothing, whatever the region's kind is: of a region that an earlier pause left
    /// half on the device nothing of either half.
    ///
    /// # Errors
    ///
    /// As [`RegionMemory::pause`].
    pub fn pause_and_drop(&self) -> Result<(), RegionError> {
        self.take_away(None)
    }

    /// Brings the memory back, and what the blocks held that the program still holds. Does nothing where
    /// the region is mapped, but for pools that could not be set to serve requests again. Waits for no work of the device.
    ///
    /// # Errors
    ///
    /// [`RegionError`]; the region is then paused as before, but where the error says that it is not.
    pub fn resume(&self) -> Result<(), RegionError> {
        let mut backups = self.device.lock_backups()?;
        let finished = self.finish_copies(&mut backups);
        if self.state()? == RegionState::Mapped {
            return self.admit();
        }
        finished?;
        self.come_back(&mut backups)
    }

    /// Resumes a region that is paused.
    fn come_back(&self, backups: &mut D::Backups) -> Result<(), RegionError> {
        let start = Instant::now();
        let mut books = self.books()?;
        books.state = RegionState::Resuming;
        drop(books);
        let restored = self.bring_back(backups);
        let mut books = self.books()?;
        let copied = match restored {
            Ok(copied) => copied,
            Err(error) => {
                books.state = RegionState::Paused;
                books.tidy(&self.device);
                return Err(error);
            }
        };
        books.state = RegionState::Mapped;
        books.tidy(&self.device);
        books.figures.count_resume(copied, start.elapsed());
        let is_empty = books.has_no_segments();
        let is_over = |saved: &mut Saved<_>| is_empty || !backups.retains(&saved.backup);
        let saved = books.saved.take_if(is_over);
        let retained = books.saved.as_ref().map(|saved| saved.ranges().to_vec());
        drop(books);
        if let Some(saved) = saved {
            backups.discard(saved.backup);
        }
        if let Some(ranges) = retained {
            // Before anything is handed out again.
            watch(&self.device, &ranges, true);
        }
        self.notify(false);
        self.admit()
    }

    /// Discards what is retained of a region that is mapped, if it is one of those. Of another nothing is.
    ///
    /// # Errors
    ///
    /// [`RegionError::Stopped`].
    pub fn release_copy(&self, copies: Copies) -> Result<(), RegionError> {
        let is_it = |saved: &Saved<_>| match copies {
            Copies::All => true,
            Copies::Unshown => saved.is_over || !saved.is_shown,
            Copies::Ended => saved.is_over,
        };
        let mut backups = self.device.lock_backups()?;
        // As in `trim`.
        let _ = self.finish_copies(&mut backups);
        let mut books = self.books()?;
        let is_mapped = books.state == RegionState::Mapped;
        let saved = books.saved.take_if(|saved| is_mapped && is_it(saved));
        drop(books);
        if let Some(saved) = saved {
            watch(&self.device, saved.ranges(), false);
            backups.discard(saved.backup);
        }
        Ok(())
    }

    /// Gives back what no block uses. Where that is all of it, the copy of its contents is discarded, too,
    /// and a region that was paused is mapped: nothing is left to come back.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools; what was given back by then is, and the next call does the rest.
    pub fn trim(&self) -> Result<(), RegionError> {
        let mut backups = self.device.lock_backups()?;
        self.pools.trim_and_list(&self.device)?;
        // Where nobody can tell, the next call gives it back.
        let _ = self.finish_copies(&mut backups);
        let mut books = self.books()?;
        // A pause may have left memory on the device.
        books.tidy(&self.device);
        if !books.has_no_segments() {
            drop(books);
            return self.admit();
        }
        let was_paused = mem::replace(&mut books.state, RegionState::Mapped) == RegionState::Paused;
        let saved = books.saved.take();
        drop(books);
        if let Some(saved) = saved {
            watch(&self.device, saved.ranges(), false);
            backups.discard(saved.backup);
        }
        if was_paused {
            self.notify(false);
        }
        self.admit()
    }

    /// Has the pools of a region that is mapped serve requests again, where they may refuse them. Comes after the
    /// books say so, as a pool that served a request before would find no memory; and as blocks are handed out
    /// by the first pool while the second cannot be told, nothing is rolled back, but noted.
    fn admit(&self) -> Result<(), RegionError> {
        let books = self.books()?;
        let is_owed = books.refuses && books.state == RegionState::Mapped;
        drop(books);
        if is_owed {
            let set = self.pools.set_paused(&self.device, false);
            set.map_err(|error| RegionError::NotTold { error })?;
            self.books()?.refuses = false;
        }
        Ok(())
    }

    fn notify(&self, is_leaving: bool) {
        let has_pool = |pool| self.pools.has(pool);
        self.device.notify(&self.pools.tag, is_leaving, has_pool);
    }

    /// Makes memory for every segment and restores what it held. Returns what that was.
    fn bring_back(&self, backups: &mut D::Backups) -> Result<Copied, RegionError> {
        let mut held = self.pools.trim_and_list(&self.device)?;
        let mut books = self.books()?;
        // What an earlier pause left where no segment is any more would be missing elsewhere. Nobody used it since.
        let reservations = books.reservations.iter_mut();
        reservations.for_each(|reservation| reservation.backing.forget_streams());
        books.tidy(&self.device);
        // What was freed since has no memory, where its segment went with it.
        held.retain(|&block| books.has(block));
        let reservations = books.reservations.iter();
        let needed: Vec<_> = reservations.map(Reservation::needed).collect();
        let mut saved = books.saved.take();
        drop(books);
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
            // What was there before may be all that is left of contents that were never saved.
            for (backing, before) in backings.iter_mut().zip(&before) {
                // The first error says more. What is not taken back now is offered with the next pause.
                let _ = backing.reduce_to(&self.device, before);
            }
        }
        if matches!(outcome, Err(RegionError::Driver(DriverError::OutOfMemory))) {
            outcome = Err(self.no_room(&backings, &needed));
        }
        self.put_backings(backings)?;
        self.books()?.saved = saved;
        outcome.map(|()| restored)
    }

    /// Returns why what is needed could not be supplied, once all is as it was before.
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

    /// Waits for the copies of a backup that failed, where they may be under way. They may be after an error, which
    /// leaves all as it is.
    fn finish_copies(&self, backups: &mut D::Backups) -> Result<(), RegionError> {
        let mut books = self.books()?;
        if !books.is_copied {
            return Ok(());
        }
        drop(books);
        backups.finish()?;
        books = self.books()?;
        books.is_copied = false;
        if books.state == RegionState::Mapped {
            books.tidy(&self.device);
        }
        Ok(())
    }

    /// Returns whether the copies of a backup that has just failed have ended. Otherwise what is mapped stays so.
    fn have_copies_ended(&self, backups: &mut D::Backups) -> Result<bool, RegionError> {
        let ended = backups.finish();
        self.books()?.is_copied = ended.is_err();
        Ok(ended.is_ok())
    }

    fn take_backings(&self) -> Result<Vec<Backing>, RegionError> {
        let mut books = self.books()?;
        let reservations = books.reservations.iter_mut();
        Ok(reservations
            .map(|reservation| mem::take(&mut reservation.backing))
            .collect())
    }

    fn put_backings(&self, backings: Vec<Backing>) -> Result<(), RegionError> {
        let mut books = self.books()?;
        for (reservation, backing) in books.reservations.iter_mut().zip(backings) {
            reservation.backing = backing;
        }
        books.count_mapped();
        Ok(())
    }

    fn books(&self) -> Result<MutexGuard<'_, Books<BackupOf<D>>>, RegionError> {
        Ok(self.books.lock()?)
    }
}

impl<D: Device> fmt::Debug for RegionMemory<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut memory = f.debug_struct("RegionMemory");
        memory.field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl<K> Books<K> {
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
        // As much as the region can ever have at once.
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
                self.tidy(device);
                Err(error)
            }
        }
    }

    /// Gives back the memory and the addresses that no segment uses, unless copies may use them. What the driver
    /// refuses stays and is offered again.
    fn tidy(&mut self, device: &impl Device) {
        if self.is_copied {
            return self.count_mapped();
        }
        for reservation in &mut self.reservations {
            reservation.sweep(device);
        }
        self.reservations.retain(|reservation| {
            let range = reservation.range;
            let give_back =
                || device.with_driver(|driver| driver.unreserve(range.address, range.size));
            !reservation.is_vacant() || give_back().is_err()
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

/// Returns how much memory to take at once for a segment of `size` bytes: `wanted`, or less where the device
/// has little left; fails where it has too little for the segment besides its margin. No call to the driver
/// where it has no margin and no more is wanted than the segment takes.
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
    // What is taken ahead is nobody else's.
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
