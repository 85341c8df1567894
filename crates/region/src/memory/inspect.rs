//! What can be asked of a region's memory: its figures, and where the copy of a block is.

use lowtide_core::{Allocation, Bytes, OutOfMemory};

use crate::backup::Backups;
use crate::device::Device;
use crate::error::RegionError;
use crate::figures::RegionFigures;
use crate::memory::RegionMemory;
use crate::pools::{PoolsLane, contents_of};
use crate::reservation::Reservation;
use crate::state::RegionState;

impl<D: Device> RegionMemory<D> {
    /// Returns the figures as they are now.
    ///
    /// # Errors
    ///
    /// [`RegionError::Stopped`].
    pub fn figures(&self) -> Result<RegionFigures, RegionError> {
        let books = self.books()?;
        let (host, disk) = match &books.saved {
            Some(saved) if !saved.is_over => D::Backups::bytes(&saved.backup),
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
    /// Segments in which all was freed since do not come back. O(n log n) for n blocks of any pool.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn needed_to_resume(&self) -> Result<Bytes, RegionError> {
        if self.state()? != RegionState::Paused {
            return Ok(Bytes::ZERO);
        }
        let kept = self.pools.kept(&self.device)?;
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

    /// Returns the bytes of the blocks that the program holds in the region. O(n log n) for n blocks of any pool.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn live_bytes(&self) -> Result<Bytes, RegionError> {
        Ok(self.pools.live_bytes(&self.device)?)
    }

    /// Returns how many bytes of the segments of a region that is paused are in no block: they count as reserved and not
    /// as active, and are not on the device. O(n log n) for n blocks of any pool.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn free_bytes_away(&self) -> Result<Bytes, RegionError> {
        let paused = self.figures()?.paused;
        if paused.is_zero() {
            return Ok(Bytes::ZERO);
        }
        Ok(paused.saturating_sub(self.live_bytes()?))
    }

    /// Returns the address of the host's copy of a block that the program holds, where there is one: while the region is
    /// paused, and after that as long as the copy is retained and the block is the one that was paused. The copy is of
    /// what was asked for with the block, and valid until it is discarded.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn host_copy(&self, block: &Allocation) -> Result<Option<usize>, RegionError> {
        let is_mapped = self.state()? == RegionState::Mapped;
        let is_watched = |lane: &mut PoolsLane<D>| lane.is_watched(block.address);
        if is_mapped && !self.device.allocator().with_pools(is_watched)? {
            // What was handed out since the pause is another block, whatever its place.
            return Ok(None);
        }
        let block = contents_of(block);
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
        let copy = range.and_then(|range| D::Backups::host_copy(&saved.backup, range));
        saved.is_shown |= copy.is_some();
        Ok(copy)
    }

    /// Returns how much of what is free on the device the margin keeps, where nothing but that refused a request of the
    /// region.
    pub fn kept_by_margin(&self, refused: &OutOfMemory) -> Option<Bytes> {
        let (free, size) = (refused.device_free, refused.segment_size);
        let kept = self.device.margin().min(free);
        let is_by_margin = free - kept < size && size <= free;
        (is_by_margin && !refused.is_rejected && !is_above_limit(refused)).then_some(kept)
    }
}

/// Returns whether the device's limit refused a request: what is paused does not count against that.
fn is_above_limit(refused: &OutOfMemory) -> bool {
    let paused: Bytes = refused.paused.iter().map(|&(_, bytes)| bytes).sum();
    let limited = refused.reserved.saturating_sub(paused);
    let is_above = |limit| limited.saturating_add(refused.segment_size) > limit;
    refused.limit.is_some_and(is_above)
}
