//! The private pools whose segments are a region's memory: which they are, and what a pause and a resume do with each.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use lowtide_core::{AllocError, Allocation, Bytes, HeldPool, Lane, MempoolId, PoolSetting};
use lowtide_shared::SharedMemory;

use crate::backup::MemoryRange;
use crate::device::Device;
use crate::error::RegionError;

/// The part of a device's allocator that its private pools are in.
pub(crate) type PoolsLane<D> = Lane<SharedMemory<<D as Device>::Driver>>;

/// How often a pause looks whether other streams are done with what was freed.
const POLL_EVERY: Duration = Duration::from_micros(100);

/// What of a block is copied is whole units of this size.
const COPIED_UNIT: Bytes = Bytes(512);

/// The pools of one region on one device.
#[derive(Debug)]
pub(crate) struct RegionPools {
    /// The region's name, which errors of requests say while it is paused.
    pub(crate) tag: Arc<str>,
    /// The pool of requests in the region.
    own: MempoolId,
    /// Taken after any lock of an allocator.
    others: Mutex<OtherPools>,
}

/// Other pools than a region's own that have its memory.
#[derive(Default, Debug)]
struct OtherPools {
    all: Vec<MempoolId>,
    /// What they are set to, or are being set to: whether they refuse requests.
    is_paused: bool,
}

impl RegionPools {
    pub(crate) fn new(tag: Arc<str>, own: MempoolId) -> RegionPools {
        RegionPools {
            tag,
            own,
            others: Mutex::default(),
        }
    }

    /// Returns the pool of requests in the region.
    pub(crate) fn own(&self) -> MempoolId {
        self.own
    }

    /// Returns every pool that has the region's memory.
    pub(crate) fn all(&self) -> Vec<MempoolId> {
        let mut pools = vec![self.own];
        pools.extend(&self.others().all);
        pools
    }

    /// Returns whether a pool has the region's memory, which does not change under the lock of the pool's allocator.
    pub(crate) fn has(&self, pool: MempoolId) -> bool {
        pool == self.own || self.others().all.contains(&pool)
    }

    /// Adds a pool, and returns whether it is to refuse requests. The lock of its allocator is held until it does: a
    /// change that is noted from now on reaches this one, too, and after that.
    pub(crate) fn add(&self, pool: MempoolId) -> bool {
        let mut others = self.others();
        others.all.push(pool);
        others.is_paused
    }

    /// Forgets a pool that has ended, whose number may be another's from now on. The region's own stays.
    pub(crate) fn remove(&self, ended: MempoolId) {
        self.others().all.retain(|&pool| pool != ended);
    }

    /// Returns the setting of a pool whose memory is away, or back.
    pub(crate) fn paused(&self, is_paused: bool) -> PoolSetting {
        PoolSetting::Paused(is_paused.then(|| Arc::clone(&self.tag)))
    }

    /// Has every pool refuse requests, as its memory is away, or serve them again.
    pub(crate) fn set_paused(
        &self,
        device: &impl Device,
        is_paused: bool,
    ) -> Result<(), AllocError> {
        // A pool that is added after this is set by the thread that adds it.
        self.others().is_paused = is_paused;
        self.for_each(device, |lane, pool| {
            lane.set_pool(pool, self.paused(is_paused))
        })?;
        Ok(())
    }

    /// Waits until no stream, of whatever device, uses what was freed in the pools. Comes after the device was waited for:
    /// it is done, and streams of other devices may not be. Nobody is kept from the pools meanwhile.
    pub(crate) fn wait_for_pending(&self, device: &impl Device) -> Result<(), RegionError> {
        while self.has_pending(device)? {
            thread::sleep(POLL_EVERY);
        }
        Ok(())
    }

    /// Returns whether freed blocks of the region wait for other streams still.
    fn has_pending(&self, device: &impl Device) -> Result<bool, RegionError> {
        let answers = self.for_each(device, |lane, pool| {
            lane.process_events()?;
            Ok((lane.has_pending(pool)?, lane.is_capturing()))
        })?;
        if answers.contains(&(true, true)) {
            return Err(RegionError::PendingInCapture);
        }
        Ok(answers.contains(&(true, false)))
    }

    /// Releases the free segments of the pools that may lose them, and returns the contents of the blocks that the program
    /// holds in all of them, by rising addresses.
    pub(crate) fn trim_and_list(
        &self,
        device: &impl Device,
    ) -> Result<Vec<MemoryRange>, AllocError> {
        let held = self.for_each(device, |lane, pool| {
            lane.process_events()?;
            let held = lane.held_blocks(pool)?;
            lane.trim_pool(pool, self.when_held(pool))?;
            Ok(held)
        })?;
        let mut ranges: Vec<_> = held.iter().flatten().map(contents_of).collect();
        ranges.sort_unstable();
        Ok(ranges)
    }

    /// Returns the ranges of the segments that [`RegionPools::trim_and_list`] would leave now, by rising addresses.
    pub(crate) fn kept(&self, device: &impl Device) -> Result<Vec<MemoryRange>, AllocError> {
        let kept = self.for_each(device, |lane, pool| {
            // What other streams are done with by now does not come back. A driver that fails changes no figure.
            let _ = lane.process_events();
            lane.segments_after_trim(pool, self.when_held(pool))
        })?;
        let kept = kept.into_iter().flatten();
        let mut kept: Vec<_> = kept
            .map(|(address, size)| MemoryRange { address, size })
            .collect();
        kept.sort_unstable();
        Ok(kept)
    }

    /// Returns what happens to a pool that something holds where it is trimmed.
    fn when_held(&self, pool: MempoolId) -> HeldPool {
        if pool == self.own {
            HeldPool::IsTrimmed
        } else {
            // A graph may use what is free in its pool, as long as it is there.
            HeldPool::Stays
        }
    }

    /// Returns the bytes of the blocks that the program holds in the pools.
    pub(crate) fn live_bytes(&self, device: &impl Device) -> Result<Bytes, AllocError> {
        let held = self.for_each(device, |lane, pool| lane.held_blocks(pool))?;
        Ok(held.iter().flatten().map(|block| block.size).sum())
    }

    /// Returns what `act` does with each pool in turn, and nothing for one that has ended meanwhile.
    fn for_each<D: Device, R: Default>(
        &self,
        device: &D,
        mut act: impl FnMut(&mut PoolsLane<D>, MempoolId) -> Result<R, AllocError>,
    ) -> Result<Vec<R>, AllocError> {
        let mut answers = Vec::new();
        for pool in self.all() {
            let answer = device.allocator().with_pools(|lane| {
                // Its number may be another's by then.
                if self.has(pool) {
                    act(lane, pool)
                } else {
                    Ok(R::default())
                }
            });
            answers.push(answer??);
        }
        Ok(answers)
    }

    /// Under this lock nothing can panic.
    fn others(&self) -> MutexGuard<'_, OtherPools> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes the held blocks that begin with ranges of which a copy stays: each until a block is handed out there, which the
/// copy is not of; or (`is_watched` false) forgets that they were noted.
pub(crate) fn watch(device: &impl Device, ranges: &[MemoryRange], is_watched: bool) {
    let addresses = ranges.iter().map(|range| range.address);
    let allocator = device.allocator();
    // What fails here is a lock that a panic has poisoned, which the next call says.
    let _ = allocator.with_pools(|lane| lane.watch(addresses, is_watched));
}

/// Returns what of a block is kept: what was asked for, in units in which it may be copied.
pub(crate) fn contents_of(block: &Allocation) -> MemoryRange {
    MemoryRange {
        address: block.address,
        size: block.requested.round_up(COPIED_UNIT).min(block.size),
    }
}
