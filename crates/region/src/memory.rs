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

use lowtide_core::{Bytes, DeviceAddress, Driver, DriverError, SegmentSource, Stream};

use crate::backing::Backing;
use crate::backup::{BackupKind, Backups, MemoryRange};
use crate::device::{Device, Pools};
use crate::error::RegionError;
use crate::figures::{Copied, RegionFigures};
use crate::reservation::Reservation;
use crate::state::RegionState;
use saved::Saved;

mod leaving;
mod saved;

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

/// The memory of one region on one device. Its segments stay where they are, whether there is memory behind
/// them or not.
///
/// Locks are taken in this order: the operation that is under way, those of the pools' allocator, the
/// books, the driver's.
pub struct RegionMemory<D, B: Backups> {
    device: D,
    kind: Option<BackupKind>,
    /// Held while the region is being paused or resumed.
    operation: Mutex<()>,
    books: Mutex<Books<B::Backup>>,
}

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

impl<D: Device, B: Backups> RegionMemory<D, B> {
    /// Returns a memory that has nothing yet. `kind` says what becomes of contents while it is paused: they
    /// are lost where it is `None`.
    pub fn new(device: D, kind: Option<BackupKind>) -> RegionMemory<D, B> {
        RegionMemory {
            device,
            kind,
            operation: Mutex::new(()),
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

    /// Takes the memory off the device: waits for the device's work, keeps what the blocks of `pools` hold,
    /// and gives everything back. Does nothing where that was done before. One call for each run of
    /// adjacent pieces of what is saved at once, and one for each piece.
    ///
    /// # Errors
    ///
    /// [`RegionError`]; the region is then mapped as before, but where the error says that it is not.
    pub fn pause(&self, pools: &mut impl Pools, backups: &mut B) -> Result<(), RegionError> {
        self.take_away(pools, backups, self.kind)
    }

    /// As [`RegionMemory::pause`], and keeps nothing, whatever the region's kind is: of a region that an earlier pause left
    /// half on the device nothing of either half.
    ///
    /// # Errors
    ///
    /// As [`RegionMemory::pause`].
    pub fn pause_and_drop(
        &self,
        pools: &mut impl Pools,
        backups: &mut B,
    ) -> Result<(), RegionError> {
        self.take_away(pools, backups, None)
    }

    /// Brings the memory back, and what the blocks held that the program still holds. Does nothing where
    /// the region is mapped, but for telling pools that could not be told. Waits for no work of the device.
    ///
    /// # Errors
    ///
    /// [`RegionError`]; the region is then paused as before, but where the error says that it is not.
    pub fn resume(&self, pools: &mut impl Pools, backups: &mut B) -> Result<(), RegionError> {
        let _operation = self.operation.lock()?;
        let finished = self.finish_copies(backups);
        if self.state()? == RegionState::Mapped {
            return self.admit(pools);
        }
        finished?;
        self.come_back(pools, backups)
    }

    /// Resumes a region that is paused.
    fn come_back(&self, pools: &mut impl Pools, backups: &mut B) -> Result<(), RegionError> {
        let start = Instant::now();
        let mut books = self.books()?;
        books.state = RegionState::Resuming;
        drop(books);
        let restored = self.bring_back(pools, backups);
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
            pools.watch(&ranges, true);
        }
        pools.notify(false);
        self.admit(pools)
    }

    /// Discards what is retained of a region that is mapped, if it is one of those. Of another nothing is.
    ///
    /// # Errors
    ///
    /// [`RegionError::Stopped`].
    pub fn release_retained(
        &self,
        copies: Copies,
        pools: &mut impl Pools,
        backups: &mut B,
    ) -> Result<(), RegionError> {
        let is_it = |saved: &Saved<_>| match copies {
            Copies::All => true,
            Copies::Unshown => saved.is_over || !saved.is_shown,
            Copies::Ended => saved.is_over,
        };
        let _operation = self.operation.lock()?;
        // As in `trim`.
        let _ = self.finish_copies(backups);
        let mut books = self.books()?;
        let is_mapped = books.state == RegionState::Mapped;
        let saved = books.saved.take_if(|saved| is_mapped && is_it(saved));
        drop(books);
        if let Some(saved) = saved {
            pools.watch(saved.ranges(), false);
            backups.discard(saved.backup);
        }
        Ok(())
    }

    /// Gives back what no block of `pools` uses. Where that is all of it, the copy of its contents is discarded, too,
    /// and a region that was paused is mapped: nothing is left to come back.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools; what was given back by then is, and the next call does the rest.
    pub fn trim(&self, pools: &mut impl Pools, backups: &mut B) -> Result<(), RegionError> {
        let _operation = self.operation.lock()?;
        pools.trim_and_list()?;
        // Where nobody can tell, the next call gives it back.
        let _ = self.finish_copies(backups);
        let mut books = self.books()?;
        // A pause may have left memory on the device.
        books.tidy(&self.device);
        if !books.has_no_segments() {
            drop(books);
            return self.admit(pools);
        }
        let was_paused = mem::replace(&mut books.state, RegionState::Mapped) == RegionState::Paused;
        let saved = books.saved.take();
        drop(books);
        if let Some(saved) = saved {
            pools.watch(saved.ranges(), false);
            backups.discard(saved.backup);
        }
        if was_paused {
            pools.notify(false);
        }
        self.admit(pools)
    }

    /// Returns the figures as they are now.
    ///
    /// # Errors
    ///
    /// [`RegionError::Stopped`].
    pub fn figures(&self) -> Result<RegionFigures, RegionError> {
        let books = self.books()?;
        let (host, disk) = match &books.saved {
            Some(saved) if !saved.is_over => B::bytes(&saved.backup),
            _ => (Bytes::ZERO, Bytes::ZERO),
        };
        let segments = books.reservations.iter().map(Reservation::bytes).sum();
        let is_paused = books.state == RegionState::Paused;
        Ok(RegionFigures {
            state: books.state,
            paused: if is_paused { segments } else { Bytes::ZERO },
            host,
            disk,
            ..books.figures
        })
    }

    /// Returns how much of the device's memory a resume of a region that is paused would take now, of another nothing.
    /// `kept` are the ranges, by rising addresses, of the segments that its pools keep by
    /// [`Pools::trim_and_list`]: the others do not come back. O(s log n) for s segments and n ranges.
    ///
    /// # Errors
    ///
    /// [`RegionError::Stopped`].
    pub fn needed_to_resume(&self, kept: &[MemoryRange]) -> Result<Bytes, RegionError> {
        let books = self.books()?;
        if books.state != RegionState::Paused {
            return Ok(Bytes::ZERO);
        }
        // A segment may be longer here than its pool asked for, and is a part of one there where several adjoin.
        let is_kept = |address| {
            let begun = kept.partition_point(|range| range.address <= address);
            let last = kept[..begun].last();
            last.is_some_and(|range| address < range.end())
        };
        let missing = |reservation: &Reservation| {
            let needed = reservation.needed_for(is_kept);
            reservation.backing.missing(&needed)
        };
        Ok(books.reservations.iter().map(missing).sum())
    }

    /// Returns where the region is.
    ///
    /// # Errors
    ///
    /// [`RegionError::Stopped`].
    pub fn state(&self) -> Result<RegionState, RegionError> {
        Ok(self.books()?.state)
    }

    /// Returns the address of the host's copy of a block, where there is one: while the region is paused, and
    /// after that as long as the copy is retained, which is then of what lay at the block's address when the
    /// region was paused, in a block of the same size. Whether it was the same block, [`Pools::watch`] was to note.
    /// Valid until the copy is discarded.
    ///
    /// # Errors
    ///
    /// [`RegionError::Stopped`].
    pub fn host_copy(&self, block: MemoryRange) -> Result<Option<usize>, RegionError> {
        let mut books = self.books()?;
        let state = books.state;
        let Some(saved) = books.saved.as_mut().filter(|saved| !saved.is_over) else {
            return Ok(None);
        };
        let range = match state {
            RegionState::Paused => saved.around(block),
            RegionState::Mapped => saved.exactly(block),
            // It is being made, or read.
            RegionState::Pausing | RegionState::Resuming => None,
        };
        let copy = range.and_then(|range| B::host_copy(&saved.backup, range));
        saved.is_shown |= copy.is_some();
        Ok(copy)
    }

    /// Has the pools of a region that is mapped serve requests again, where they may refuse them. Comes after the
    /// books say so, as a pool that served a request before would find no memory; and as blocks are handed out
    /// by the first pool while the second cannot be told, nothing is rolled back, but noted.
    fn admit(&self, pools: &mut impl Pools) -> Result<(), RegionError> {
        let books = self.books()?;
        let is_owed = books.refuses && books.state == RegionState::Mapped;
        drop(books);
        if is_owed {
            let told = pools.set_paused(false);
            told.map_err(|error| RegionError::NotTold { error })?;
            self.books()?.refuses = false;
        }
        Ok(())
    }

    /// Makes memory for every segment and restores what it held. Returns what that was.
    fn bring_back(&self, pools: &mut impl Pools, backups: &mut B) -> Result<Copied, RegionError> {
        let mut held = pools.trim_and_list()?;
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
    fn finish_copies(&self, backups: &mut B) -> Result<(), RegionError> {
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
    fn have_copies_ended(&self, backups: &mut B) -> Result<bool, RegionError> {
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

    fn books(&self) -> Result<MutexGuard<'_, Books<B::Backup>>, RegionError> {
        Ok(self.books.lock()?)
    }
}

impl<D, B: Backups> fmt::Debug for RegionMemory<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut memory = f.debug_struct("RegionMemory");
        memory.field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// Where the segments of a pool come from that has a region's memory.
#[derive(Debug)]
pub struct RegionSource<D, B: Backups> {
    memory: Arc<RegionMemory<D, B>>,
    region: Arc<str>,
}

impl<D: Device, B: Backups> RegionSource<D, B> {
    /// Returns a source of segments in the memory of the region of this name; there may be several.
    pub fn new(memory: Arc<RegionMemory<D, B>>, region: Arc<str>) -> RegionSource<D, B> {
        RegionSource { memory, region }
    }
}

impl<D, B> SegmentSource for RegionSource<D, B>
where
    D: Device + Send + Sync,
    B: Backups,
    B::Backup: Send,
{
    fn allocate(&mut self, size: Bytes, stream: Stream, is_limited: bool) -> Option<DeviceAddress> {
        let mut books = self.memory.books().ok()?;
        // Copies that put something back may go on, and would change what is written there.
        if books.state != RegionState::Mapped || books.is_copied {
            return None;
        }
        // The pool is told of no reason: what failed but for lack of memory is tried again with the next.
        let device = &self.memory.device;
        let address = books.allocate(device, size, stream, is_limited).ok();
        books.count_mapped();
        address
    }

    fn release(&mut self, address: DeviceAddress, _size: Bytes) {
        let Ok(mut books) = self.memory.books() else {
            return;
        };
        let mut reservations = books.reservations.iter_mut();
        let _ = reservations.any(|reservation| reservation.remove(address));
        if books.state == RegionState::Mapped {
            books.tidy(&self.memory.device);
            if books.has_no_segments()
                && let Some(retained) = &mut books.saved
            {
                // To give its memory back takes a while, and the next backup may use it.
                retained.is_over = true;
            }
        }
    }

    fn region(&self) -> Option<&Arc<str>> {
        Some(&self.region)
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
        let wanted = match is_limited {
            true => size,
            false => size.max(Bytes(self.mapped().get() / GROWTH_PART)),
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
