//! The memory pools that a region's blocks are in.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use lowtide_core::{AllocError, Allocation, Bytes, HeldPool, MempoolId, PoolSetting};
use lowtide_region::{MemoryRange, Pools, PoolsError, RegionError, RegionState};

use super::card::allocator;
use super::table::OnDevice;
use crate::devices::Lane;
use crate::error::Error;
use crate::events;
use crate::record::now_us;

/// How often a pause looks whether other streams are done with what was freed.
const POLL_EVERY: Duration = Duration::from_micros(100);

/// The pools that a region's blocks are in.
pub(super) struct RegionPools<'a>(pub(super) &'a OnDevice);

impl RegionPools<'_> {
    /// Returns what `act` does with each pool in turn, and nothing for one that has ended meanwhile.
    fn for_each<R: Default>(
        &self,
        mut act: impl FnMut(&mut Lane, MempoolId) -> Result<R, AllocError>,
    ) -> Result<Vec<R>, PoolsError> {
        let mut answers = Vec::new();
        for pool in self.0.all_pools().map_err(|error| error.text)? {
            let allocator = allocator(self.0.device);
            let answer = allocator.with_pools(|lane| {
                // Its number may be another's by then.
                if !self.0.has_pool(pool).map_err(|error| error.text)? {
                    return Ok(R::default());
                }
                Ok(act(lane, pool)?)
            });
            let answer: Result<R, PoolsError> = answer?;
            answers.push(answer?);
        }
        Ok(answers)
    }

    /// Returns the ranges of the segments that [`Pools::settle`] leaves, by rising addresses.
    fn kept(&self) -> Result<Vec<MemoryRange>, PoolsError> {
        let own_pool = self.0.own_pool;
        let kept = self.for_each(|lane, pool| {
            // What other streams are done with by now does not come back. A driver that fails changes no figure.
            let _ = lane.process_events();
            match pool == own_pool {
                true => lane.segments_after_trim(pool, HeldPool::IsTrimmed),
                false => lane.segments_after_trim(pool, HeldPool::Stays),
            }
        })?;
        let kept = kept.into_iter().flatten();
        let mut kept: Vec<_> = kept
            .map(|(address, size)| MemoryRange { address, size })
            .collect();
        kept.sort_unstable();
        Ok(kept)
    }

    /// Returns whether freed blocks of the region wait for other streams still.
    fn has_pending(&mut self) -> Result<bool, PoolsError> {
        let answers = self.for_each(|lane, pool| {
            lane.process_events()?;
            Ok((lane.has_pending(pool)?, lane.is_capturing()))
        })?;
        if answers.contains(&(true, true)) {
            return Err("a graph is captured, and memory that was freed waits for its end".into());
        }
        Ok(answers.contains(&(true, false)))
    }
}

impl Pools for RegionPools<'_> {
    fn set_paused(&mut self, is_paused: bool) -> Result<(), PoolsError> {
        // One that comes after this is told by who adds it.
        let noted = self.0.note_paused(is_paused);
        noted.map_err(|error| error.text)?;
        self.for_each(|lane, pool| {
            let tag = is_paused.then(|| Arc::clone(&self.0.name.tag));
            lane.set_pool(pool, PoolSetting::Paused(tag))
        })?;
        Ok(())
    }

    /// The device is done with it; streams of other devices may not be. Nobody is kept from the pools meanwhile.
    fn wait_for_pending(&mut self) -> Result<(), PoolsError> {
        while self.has_pending()? {
            thread::sleep(POLL_EVERY);
        }
        Ok(())
    }

    fn trim_and_list(&mut self) -> Result<Vec<MemoryRange>, PoolsError> {
        let own_pool = self.0.own_pool;
        let held = self.for_each(|lane, pool| {
            lane.process_events()?;
            let held = lane.held_blocks(pool)?;
            match pool == own_pool {
                true => lane.trim_pool(pool, HeldPool::IsTrimmed)?,
                // A graph may use what is free in its pool, as long as it is there.
                false => lane.trim_pool(pool, HeldPool::Stays)?,
            }
            Ok(held)
        })?;
        let mut ranges: Vec<_> = held.iter().flatten().map(contents_of).collect();
        ranges.sort_unstable();
        Ok(ranges)
    }

    fn watch(&mut self, ranges: &[MemoryRange], is_watched: bool) {
        let addresses = ranges.iter().map(|range| range.address);
        // As below.
        let _ = allocator(self.0.device).with_pools(|lane| lane.watch(addresses, is_watched));
    }

    fn notify(&mut self, is_leaving: bool) {
        let OnDevice { device, .. } = *self.0;
        // What fails here is a lock of lowtide's that a panic has poisoned, which the next call says.
        let _ = events::with_listeners(|listeners| {
            let away_us = if is_leaving { now_us() } else { 0 };
            self.0.told_away_us.store(away_us, Ordering::Relaxed);
            if listeners.is_empty() {
                // To picture all blocks takes a while, under the lock under which threads allocate.
                return Ok(());
            }
            allocator(device).with_pools(|lane| {
                let pools = self.0.all_pools()?;
                let mut segments = lane.segments();
                segments.retain(|segment| pools.contains(&segment.pool));
                let event = |segment| events::pause_event(is_leaving, segment);
                let events: Vec<_> = segments.iter().map(event).collect();
                listeners.notify_of_pause(device, &self.0.name.tag, events);
                Ok(())
            })?
        });
    }
}

/// Returns what of a block is kept: what was asked for, in units in which it may be copied.
pub(super) fn contents_of(block: &Allocation) -> MemoryRange {
    let size = block.requested.round_up(Bytes(512)).min(block.size);
    MemoryRange {
        address: block.address,
        size,
    }
}

/// Returns the bytes of the blocks that the program holds in a region.
pub(super) fn live_bytes(region: &OnDevice) -> Result<Bytes, Error> {
    let held = RegionPools(region).for_each(|lane, pool| lane.held_blocks(pool));
    let held = held.map_err(RegionError::Pools)?;
    Ok(held.iter().flatten().map(|block| block.size).sum())
}

/// Returns how much of its device's memory a resume of a region would take now: what the error says where there is less.
pub(super) fn needed_to_resume(region: &OnDevice) -> Result<Bytes, Error> {
    if region.memory.state()? != RegionState::Paused {
        return Ok(Bytes::ZERO);
    }
    let kept = RegionPools(region).kept().map_err(RegionError::Pools)?;
    Ok(region.memory.needed_to_resume(&kept)?)
}
