//! Queries about a region: its figures, and the address of a block's copy.

use lowtide_core::{Allocation, Bytes, OutOfMemory};
use lowtide_shared::LaneOf;

use crate::backup::Backups;
use crate::device::Device;
use crate::error::RegionError;
use crate::figures::RegionFigures;
use crate::memory::RegionMemory;
use crate::pools::{PoolsLane, contents_of};
use crate::reservation::Reservation;
use crate::state::RegionState;

impl<D: Device> RegionMemory<D> {
    /// Returns the current figures.
    ///
    /// # Errors
    ///
    /// [`RegionError::Poisoned`].
    pub fn figures(&self) -> Result<RegionFigures, RegionError> {
        let inner = self.lock()?;
        let (host, disk) = match &inner.saved {
            Some(saved) if !saved.has_ended => D::Backups::bytes(&saved.backup),
            _ => (Bytes::ZERO, Bytes::ZERO),
        };
        let segments = inner.reservations.iter().map(Reservation::bytes).sum();
        let is_paused = inner.state == RegionState::Paused;
        Ok(RegionFigures {
            state: inner.state,
            paused: if is_paused { segments } else { Bytes::ZERO },
            host,
            disk,
            ..inner.figures
        })
    }

    /// Returns how many bytes of the device a resume would take now; zero if the region is not paused. A resume maps no
    /// memory for segments without allocated blocks. O(n log n) for n blocks of any pool.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn needed_to_resume(&self) -> Result<Bytes, RegionError> {
        if self.state()? != RegionState::Paused {
            return Ok(Bytes::ZERO);
        }
        let kept = self.pools.kept(&self.device)?;
        let inner = self.lock()?;
        if inner.state != RegionState::Paused {
            return Ok(Bytes::ZERO);
        }
        // A segment here may be longer than its pool requested. The pool may list several adjacent ones as one.
        let is_kept = |address| {
            let begun = kept.partition_point(|range| range.address <= address);
            let last = kept[..begun].last();
            last.is_some_and(|range| address < range.end())
        };
        let missing = |reservation: &Reservation| {
            let needed = reservation.needed_for(is_kept);
            reservation.backing.missing(&needed)
        };
        Ok(inner.reservations.iter().map(missing).sum())
    }

    /// Returns the region's state.
    ///
    /// # Errors
    ///
    /// [`RegionError::Poisoned`].
    pub fn state(&self) -> Result<RegionState, RegionError> {
        Ok(self.lock()?.state)
    }

    /// Returns the bytes of the blocks that are allocated in the region. O(n log n) for n blocks of any pool.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn live_bytes(&self) -> Result<Bytes, RegionError> {
        Ok(self.pools.live_bytes(&self.device)?)
    }

    /// Returns the free bytes in the segments of a paused region; zero if the region is not paused. They count as reserved
    /// and not as active, and are not on the device. O(n log n) for n blocks of any pool.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn paused_free_bytes(&self) -> Result<Bytes, RegionError> {
        let paused = self.figures()?.paused;
        if paused.is_zero() {
            return Ok(Bytes::ZERO);
        }
        Ok(paused.saturating_sub(self.live_bytes()?))
    }

    /// Returns the address of the host's copy of an allocated block, if there is one. There is one while the region is
    /// paused, and afterwards while the copy is retained, for blocks allocated before the pause. The copy has the
    /// requested bytes of the block, and is valid until it is released.
    ///
    /// # Errors
    ///
    /// [`RegionError`] of the pools.
    pub fn host_copy(&self, block: &Allocation) -> Result<Option<usize>, RegionError> {
        let is_mapped = self.state()? == RegionState::Mapped;
        let is_watched = |lane: &mut PoolsLane<D>| {
            let now = lane.allocation(block.address);
            Ok(now.is_ok_and(|now| now.is_watched))
        };
        if is_mapped
            && !self
                .device
                .allocator()
                .with_lane(LaneOf::Pools, is_watched)?
        {
            // The block was allocated after the pause, and the copy is of another block at its address.
            return Ok(None);
        }
        let block = contents_of(block);
        let mut inner = self.lock()?;
        let state = inner.state;
        let Some(saved) = inner.saved.as_mut().filter(|saved| !saved.has_ended) else {
            return Ok(None);
        };
        let range = match state {
            RegionState::Paused => saved.around(block),
            RegionState::Mapped => saved.exactly(block),
            // The copy is being written or read.
            RegionState::Pausing | RegionState::Resuming => None,
        };
        let copy = range.and_then(|range| D::Backups::host_copy(&saved.backup, range));
        saved.may_be_read |= copy.is_some();
        Ok(copy)
    }

    /// Returns how many of the device's free bytes the margin keeps, if the margin alone made the region refuse a request.
    pub fn kept_by_margin(&self, refused: &OutOfMemory) -> Option<Bytes> {
        let (free, size) = (refused.device_free, refused.segment_size);
        let kept = self.device.margin().min(free);
        let is_by_margin = free - kept < size && size <= free;
        (is_by_margin && !refused.is_rejected && !is_above_limit(refused)).then_some(kept)
    }
}

/// Returns whether the device's limit refused a request. Paused memory does not count against the limit.
fn is_above_limit(refused: &OutOfMemory) -> bool {
    let paused: Bytes = refused.paused.iter().map(|&(_, bytes)| bytes).sum();
    let limited = refused.reserved.saturating_sub(paused);
    let is_above = |limit| limited.saturating_add(refused.segment_size) > limit;
    refused.limit.is_some_and(is_above)
}
