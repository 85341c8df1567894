//! The steps of a pause. Contents are saved in address order, in the steps of the backup. After each step, the pieces that
//! are saved completely are released. The device erases released memory, and copies to it run at half speed meanwhile. So
//! most of that happens during the copies from the device, and little is left for copies that follow the pause.
//!
//! Memory that is not saved is unmapped last. Its handles are released once all of it is unmapped; until then nothing is
//! lost.

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
    /// Waits for the device's work, saves the contents of the pools' blocks, and releases the memory. Does nothing if the
    /// region is paused. Makes one driver call for each run of adjacent pieces in a step, and one for each piece.
    ///
    /// `kind` is the kind of the backup. If it is `None`, the contents are lost, also those that an earlier pause left
    /// partly saved. `backups` are the device's.
    ///
    /// # Errors
    ///
    /// [`RegionError`]. Unless the error says otherwise, the region is mapped as before.
    pub fn pause(
        &self,
        kind: Option<BackupKind>,
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        self.finish_copies(backups)?;
        if self.has_unsaved()? {
            match kind {
                Some(_) => self.resume_paused(backups)?,
                None => self.release_contents(backups)?,
            }
        }
        if self.state()? != RegionState::Mapped {
            return self.release_rest();
        }
        let start = Instant::now();
        self.lock()?.may_refuse = true;
        // Before the region changes: otherwise a request for a segment would be refused without a reason.
        let set = self.pools.set_paused(&self.device, true);
        let set = set.map_err(RegionError::from);
        self.lock()?.state = RegionState::Pausing;
        let begun = set.and_then(|()| self.begin_backup(backups, kind));
        let (saved, outcome) = match begun {
            Ok(mut saved) => {
                let outcome = self.save_and_unmap(&mut saved, backups);
                (saved, outcome)
            }
            Err(error) => (None, Err(error)),
        };
        let mut inner = self.lock()?;
        if outcome.as_ref().err().is_none_or(RegionError::is_paused) {
            let copied = saved.as_ref().map_or_else(Copied::default, Saved::copied);
            inner.state = RegionState::Paused;
            inner.has_unsaved = matches!(outcome, Err(RegionError::NotUndone { .. }))
                && saved.as_ref().is_none_or(Saved::is_partial);
            inner.saved = saved;
            inner.figures.count_pause(copied, start.elapsed());
            return outcome;
        }
        inner.state = RegionState::Mapped;
        inner.release_unused(&self.device);
        drop(inner);
        if let Some(saved) = saved {
            backups.release(saved.backup);
        }
        // The error of the pause takes precedence over an error of resuming the pools.
        outcome.and(self.resume_pools())
    }

    /// Returns whether the region is paused and some of its contents are only on the device.
    fn has_unsaved(&self) -> Result<bool, RegionError> {
        let inner = self.lock()?;
        Ok(inner.has_unsaved && inner.state == RegionState::Paused)
    }

    /// Gives up the contents of a paused region, in its backup and on the device.
    fn release_contents(&self, backups: &mut D::Backups) -> Result<(), RegionError> {
        let mut inner = self.lock()?;
        inner.has_unsaved = false;
        let saved = inner.saved.take();
        drop(inner);
        if let Some(saved) = saved {
            backups.release(saved.backup);
        }
        Ok(())
    }

    /// Waits for work that may use the memory, and begins the backup. Returns `None` if nothing is to be saved.
    fn begin_backup(
        &self,
        backups: &mut D::Backups,
        kind: Option<BackupKind>,
    ) -> Result<Option<Saved<BackupOf<D>>>, RegionError> {
        let is_empty = self.lock()?.reservations.is_empty();
        if !is_empty {
            self.device.synchronize()?;
            self.pools.wait_for_pending(&self.device)?;
        }
        let mut ranges = self.pools.trim_and_list(&self.device)?;
        ranges.retain(|range| !range.size.is_zero());
        // The new backup uses its memory.
        let retained = self.lock()?.saved.take();
        if let Some(retained) = retained {
            watch(&self.device, retained.ranges(), false);
            backups.release(retained.backup);
        }
        let kind = kind.filter(|_| !ranges.is_empty());
        let begun = kind.map(|kind| Saved::begin(ranges, kind, backups));
        Ok(begun.transpose()?)
    }

    /// Saves the contents, and releases all memory. After an error, maps and restores what was released before it.
    fn save_and_unmap(
        &self,
        saved: &mut Option<Saved<BackupOf<D>>>,
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        self.notify(true);
        let needed: Vec<_> = self
            .lock()?
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
                Err(self.undo(error, saved, &mut backings, &needed, backups))
            }
            left => left,
        };
        self.put_backings(backings)?;
        if outcome.as_ref().is_err_and(|error| !error.is_paused()) {
            // If the copies have ended, the pools can allocate again.
            let _ = self.finish_copies(backups);
            self.notify(false);
        }
        outcome
    }

    /// Saves everything, and releases the pieces that are saved completely, except those that the driver refuses.
    fn save(
        &self,
        saved: &mut Option<Saved<BackupOf<D>>>,
        backings: &mut [Backing],
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        let Some(saved) = saved else {
            return Ok(());
        };
        while let Some(end) = saved.save_next(backups)? {
            for backing in &mut *backings {
                backing.release_until(&self.device, end);
            }
        }
        Ok(())
    }

    /// Unmaps everything, and then releases the handles. Until all is unmapped, the handles keep their contents.
    fn unmap(&self, backings: &mut [Backing]) -> Result<(), RegionError> {
        let mut unmapped = backings.iter_mut();
        unmapped.try_for_each(|backing| backing.unmap_all(&self.device))?;
        release_all(backings, &self.device)
    }

    /// Maps and restores what was released before a pause failed with `error`. Returns `error`, or
    /// [`RegionError::NotUndone`] if that fails. Contents are then partly in the backup and partly on the device.
    fn undo(
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
        let Err(undoing) = restored else {
            return error;
        };
        if matches!(self.have_copies_ended(backups), Ok(true)) {
            // New pieces have no contents yet.
            for (backing, before) in backings.iter_mut().zip(&before) {
                // What the driver refuses now is released by the next pause.
                let _ = backing.release_except(&self.device, before);
            }
        }
        RegionError::not_undone(error, undoing)
    }

    /// Restores what is saved, except for segments that were released since the blocks were listed: those may have no
    /// memory, and nothing needs their contents.
    fn restore_saved(
        &self,
        saved: &mut Saved<BackupOf<D>>,
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        let inner = self.lock()?;
        let mut ranges = saved.ranges().to_vec();
        ranges.retain(|&range| inner.has(range));
        drop(inner);
        saved.restore(&ranges, backups)?;
        Ok(())
    }

    /// Releases the memory that an earlier pause left on the device.
    fn release_rest(&self) -> Result<(), RegionError> {
        let mut backings = self.take_backings()?;
        let outcome = release_all(&mut backings, &self.device);
        self.put_backings(backings)?;
        outcome
    }
}

/// Releases everything that the driver does not refuse.
fn release_all(backings: &mut [Backing], device: &impl Device) -> Result<(), RegionError> {
    let mut outcome = Ok(());
    for backing in backings.iter_mut() {
        outcome = outcome.and(backing.release_except(device, &Default::default()));
    }
    let size = backings.iter().map(Backing::bytes).sum();
    outcome.map_err(|error| RegionError::NotReleased { size, error })
}
