//! How a region's memory leaves: what it holds is saved by rising addresses, in the steps that its backup takes, and
//! after each the pieces go back of which all is saved. The device erases what goes back, and copies to it are at half
//! their speed meanwhile: so most of that is done beside the copies from it, and little is left for those that follow.
//!
//! What is not saved leaves last, and all at once: while the handles are held, nothing is lost.

use std::time::Instant;

use crate::backing::Backing;
use crate::backup::{BackupKind, Backups, MemoryRange};
use crate::device::Device;
use crate::error::RegionError;
use crate::figures::Copied;
use crate::memory::saved::Saved;
use crate::memory::{BackupOf, RegionMemory, supply_all};
use crate::pools::watch;
use crate::reservation::Reservation;
use crate::state::RegionState;

impl<D: Device> RegionMemory<D> {
    /// Pauses the region, and saves what it holds in backups of this kind, or nothing.
    pub(super) fn take_away(&self, kind: Option<BackupKind>) -> Result<(), RegionError> {
        let mut locked = self.device.lock_backups()?;
        let backups = &mut *locked;
        self.finish_copies(backups)?;
        if self.holds_unsaved()? {
            match kind {
                Some(_) => self.come_back(backups)?,
                None => self.forget(backups)?,
            }
        }
        if self.state()? != RegionState::Mapped {
            return self.give_rest_away();
        }
        let start = Instant::now();
        self.books()?.refuses = true;
        // Before the books say so: a request for a segment would be refused without a reason.
        let set = self.pools.set_paused(&self.device, true);
        let set = set.map_err(RegionError::from);
        self.books()?.state = RegionState::Pausing;
        let begun = set.and_then(|()| self.begin(backups, kind));
        let (saved, outcome) = match begun {
            Ok(mut saved) => {
                let outcome = self.leave(&mut saved, backups);
                (saved, outcome)
            }
            Err(error) => (None, Err(error)),
        };
        let mut books = self.books()?;
        if outcome.as_ref().err().is_none_or(RegionError::is_paused) {
            let copied = saved.as_ref().map_or_else(Copied::default, Saved::copied);
            books.state = RegionState::Paused;
            books.holds_unsaved = matches!(outcome, Err(RegionError::NotPutBack { .. }))
                && saved.as_ref().is_none_or(Saved::is_partial);
            books.saved = saved;
            books.figures.count_pause(copied, start.elapsed());
            return outcome;
        }
        books.state = RegionState::Mapped;
        books.tidy(&self.device);
        drop(books);
        if let Some(saved) = saved {
            backups.discard(saved.backup);
        }
        // Why it was not paused says more than why nothing can be allocated.
        outcome.and(self.admit())
    }

    /// Returns whether the region is paused and some of its contents are on the device alone.
    fn holds_unsaved(&self) -> Result<bool, RegionError> {
        let books = self.books()?;
        Ok(books.holds_unsaved && books.state == RegionState::Paused)
    }

    /// Forgets what a region that is paused held, in its backup and on the device.
    fn forget(&self, backups: &mut D::Backups) -> Result<(), RegionError> {
        let mut books = self.books()?;
        books.holds_unsaved = false;
        let saved = books.saved.take();
        drop(books);
        if let Some(saved) = saved {
            backups.discard(saved.backup);
        }
        Ok(())
    }

    /// Waits for those who may use the memory, and begins to save what it holds.
    fn begin(
        &self,
        backups: &mut D::Backups,
        kind: Option<BackupKind>,
    ) -> Result<Option<Saved<BackupOf<D>>>, RegionError> {
        let is_empty = self.books()?.reservations.is_empty();
        if !is_empty {
            self.device.synchronize()?;
            self.pools.wait_for_pending(&self.device)?;
        }
        let mut ranges = self.pools.trim_and_list(&self.device)?;
        ranges.retain(|range| !range.size.is_zero());
        // Its memory is the next one's.
        let retained = self.books()?.saved.take();
        if let Some(retained) = retained {
            watch(&self.device, retained.ranges(), false);
            backups.discard(retained.backup);
        }
        let kind = kind.filter(|_| !ranges.is_empty());
        let begun = kind.map(|kind| Saved::begin(ranges, kind, backups));
        Ok(begun.transpose()?)
    }

    /// Saves what is to be saved, and gives everything back; after an error brings back what has left by then.
    fn leave(
        &self,
        saved: &mut Option<Saved<BackupOf<D>>>,
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        self.notify(true);
        let needed: Vec<_> = self
            .books()?
            .reservations
            .iter()
            .map(Reservation::needed)
            .collect();
        let mut backings = self.take_backings()?;
        backings.iter_mut().for_each(Backing::forget_streams);
        let left = self.save(saved, &mut backings, backups);
        let left = left.and_then(|()| self.unmap(&mut backings));
        let outcome = match left {
            Err(error) if !error.is_paused() => {
                self.have_copies_ended(backups)?;
                Err(self.put_back(error, saved, &mut backings, &needed, backups))
            }
            left => left,
        };
        self.put_backings(backings)?;
        if outcome.as_ref().is_err_and(|error| !error.is_paused()) {
            // Most failures pass: what was put back can be handed out then.
            let _ = self.finish_copies(backups);
            self.notify(false);
        }
        outcome
    }

    /// Saves everything, and gives back the pieces of which that was done, as far as the driver takes them.
    fn save(
        &self,
        saved: &mut Option<Saved<BackupOf<D>>>,
        backings: &mut [Backing],
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        let Some(saved) = saved else {
            return Ok(());
        };
        while let Some(end) = saved.go_on(backups)? {
            for backing in &mut *backings {
                backing.reduce_from(&self.device, end);
            }
        }
        Ok(())
    }

    /// Unmaps everything and gives it back. While not all is unmapped, the handles are held with their contents.
    fn unmap(&self, backings: &mut [Backing]) -> Result<(), RegionError> {
        let mut unmapped = backings.iter_mut();
        unmapped.try_for_each(|backing| backing.unmap_all(&self.device))?;
        give_all_back(backings, &self.device)
    }

    /// Brings back what has left before a pause failed. Returns why it did, or that this failed, too: what was
    /// saved is then in the backup, and the rest on the device.
    fn put_back(
        &self,
        error: RegionError,
        saved: &mut Option<Saved<BackupOf<D>>>,
        backings: &mut [Backing],
        needed: &[Vec<MemoryRange>],
        backups: &mut D::Backups,
    ) -> RegionError {
        let before: Vec<_> = backings.iter().map(Backing::starts).collect();
        let supplied = supply_all(backings, &self.device, needed);
        let is_whole = backings
            .iter()
            .map(Backing::starts)
            .eq(before.iter().cloned());
        let restored = supplied.and_then(|()| match saved.as_mut().filter(|_| !is_whole) {
            Some(saved) => self.restore_saved(saved, backups),
            None => Ok(()),
        });
        let Err(putting_back) = restored else {
            return error;
        };
        if matches!(self.have_copies_ended(backups), Ok(true)) {
            // What is new holds nothing yet.
            for (backing, before) in backings.iter_mut().zip(&before) {
                // What is not taken back now is offered with the next pause.
                let _ = backing.reduce_to(&self.device, before);
            }
        }
        RegionError::not_put_back(error, putting_back)
    }

    /// Copies back what is saved. Of a segment that went back after its blocks were asked for nothing is: it may have no
    /// memory, and what it held is nobody's.
    fn restore_saved(
        &self,
        saved: &mut Saved<BackupOf<D>>,
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        let books = self.books()?;
        let mut ranges = saved.ranges().to_vec();
        ranges.retain(|&range| books.has(range));
        drop(books);
        saved.restore(&ranges, backups)?;
        Ok(())
    }

    /// Gives away what an earlier pause left on the device.
    fn give_rest_away(&self) -> Result<(), RegionError> {
        let mut backings = self.take_backings()?;
        let outcome = give_all_back(&mut backings, &self.device);
        self.put_backings(backings)?;
        outcome
    }
}

/// Gives everything back, or as much as the driver takes.
fn give_all_back(backings: &mut [Backing], device: &impl Device) -> Result<(), RegionError> {
    let mut outcome = Ok(());
    for backing in backings.iter_mut() {
        outcome = outcome.and(backing.reduce_to(device, &Default::default()));
    }
    let size = backings.iter().map(Backing::bytes).sum();
    outcome.map_err(|error| RegionError::StillHeld { size, error })
}
