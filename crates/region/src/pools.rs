//! The private pools that have a region's memory, and what a pause and a resume do with each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use lowtide_core::{
    AllocError, Allocation, BlockStatus, Bytes, Lane, Memory, MempoolId, Pending, PoolSetting,
    SegmentSnapshot,
};
use lowtide_shared::{LaneOf, SharedMemory};

use crate::backup::MemoryRange;
use crate::device::Device;
use crate::error::RegionError;

/// The part of a device's allocator that its private pools are in.
pub(crate) type PoolsLane<D> = Lane<SharedMemory<<D as Device>::Driver>>;

/// The interval at which a pause checks whether other streams are done with freed blocks.
const POLL_EVERY: Duration = Duration::from_micros(100);

/// Copies are a multiple of this size.
const COPIED_UNIT: Bytes = Bytes(512);

/// The pools of one region on one device.
#[derive(Debug)]
pub(crate) struct RegionPools {
    /// The region's name, for errors of requests while the region is paused.
    pub(crate) tag: Arc<str>,
    /// The pool of requests in the region.
    own: MempoolId,
    /// Taken after any lock of an allocator.
    others: Mutex<OtherPools>,
}

/// The pools that have a region's memory, besides its own.
#[derive(Default, Debug)]
struct OtherPools {
    all: Vec<MempoolId>,
    /// Whether they refuse requests, or are being set to refuse them.
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

    /// Returns whether a pool has the region's memory. The answer does not change under the lock of the pool's allocator.
    pub(crate) fn has(&self, pool: MempoolId) -> bool {
        pool == self.own || self.others().all.contains(&pool)
    }

    /// Adds a pool, and returns whether the caller must set it to refuse requests. The caller holds the lock of the
    /// pool's allocator until then: a pause that starts from now on sets this pool, too, but only after the caller.
    pub(crate) fn add(&self, pool: MempoolId) -> bool {
        let mut others = self.others();
        others.all.push(pool);
        others.is_paused
    }

    /// Removes a pool that has ended. Its number may be used for another pool from now on. The region's own pool stays.
    pub(crate) fn remove(&self, ended: MempoolId) {
        self.others().all.retain(|&pool| pool != ended);
    }

    /// Returns the setting of a pool that refuses requests because the region is paused, or of one that serves them.
    pub(crate) fn paused(&self, is_paused: bool) -> PoolSetting {
        PoolSetting::Paused(is_paused.then(|| Arc::clone(&self.tag)))
    }

    /// Sets every pool to refuse requests, or to serve them again.
    pub(crate) fn set_paused(
        &self,
        device: &impl Device,
        is_paused: bool,
    ) -> Result<(), AllocError> {
        // The thread that adds a pool after this sets it.
        self.others().is_paused = is_paused;
        self.for_each(device, |lane, pool| {
            lane.set_pool(pool, self.paused(is_paused))
        })?;
        Ok(())
    }

    /// Waits until no stream of any device uses freed blocks of the pools. The device has been waited for, but streams of
    /// other devices may still use the blocks. The pools are not locked meanwhile.
    pub(crate) fn wait_for_pending(&self, device: &impl Device) -> Result<(), RegionError> {
        while self.has_pending(device)? {
            thread::sleep(POLL_EVERY);
        }
        Ok(())
    }

    /// Returns whether freed blocks of the region are still pending.
    fn has_pending(&self, device: &impl Device) -> Result<bool, RegionError> {
        let answers = self.for_each(device, |lane, pool| {
            lane.process_events()?;
            Ok(lane.pool(pool)?.pending)
        })?;
        if answers.contains(&Pending::CaptureEnd) {
            return Err(RegionError::PendingInCapture);
        }
        Ok(answers.contains(&Pending::Streams))
    }

    /// Releases the free segments of the pools that are [trimmed](RegionPools::is_trimmed). Returns the contents of the
    /// allocated blocks in all pools, in address order.
    pub(crate) fn trim_and_list(
        &self,
        device: &impl Device,
    ) -> Result<Vec<MemoryRange>, AllocError> {
        let held = self.for_each(device, |lane, pool| {
            lane.process_events()?;
            let held = lane.held_blocks(pool)?;
            if self.is_trimmed(lane, pool)? {
                lane.trim_pool(pool)?;
            }
            Ok(held)
        })?;
        let mut ranges: Vec<_> = held.iter().flatten().map(contents_of).collect();
        ranges.sort_unstable();
        Ok(ranges)
    }

    /// Returns the ranges of the segments that [`RegionPools::trim_and_list`] would leave now, in address order.
    pub(crate) fn kept(&self, device: &impl Device) -> Result<Vec<MemoryRange>, AllocError> {
        let pools = self.for_each(device, |lane, pool| {
            // A block that other streams are done with may free its segment. If this fails, the figure is too high.
            let _ = lane.process_events();
            Ok(Some((pool, self.is_trimmed(lane, pool)?)))
        })?;
        let is_trimmed: BTreeMap<MempoolId, bool> = pools.into_iter().flatten().collect();
        let segments = device
            .allocator()
            .with_lane(LaneOf::Pools, |lane| Ok(lane.segments()))?;
        let stays = |segment: &SegmentSnapshot| {
            let is_trimmed = is_trimmed.get(&segment.pool);
            is_trimmed.is_some_and(|&is_trimmed| !is_trimmed || has_active_block(segment))
        };
        let ranges = segments
            .into_iter()
            .filter(stays)
            .map(|segment| MemoryRange {
                address: segment.address,
                size: segment.size,
            });
        let mut ranges: Vec<_> = ranges.collect();
        ranges.sort_unstable();
        Ok(ranges)
    }

    /// Returns whether a pool's free segments are released: always those of the region's own pool.
    fn is_trimmed(&self, lane: &Lane<impl Memory>, pool: MempoolId) -> Result<bool, AllocError> {
        // A graph may use free memory of its pool while something holds the pool.
        Ok(pool == self.own || !lane.pool(pool)?.is_held)
    }

    /// Returns the bytes of the blocks that are allocated in the pools.
    pub(crate) fn live_bytes(&self, device: &impl Device) -> Result<Bytes, AllocError> {
        let held = self.for_each(device, |lane, pool| lane.held_blocks(pool))?;
        Ok(held.iter().flatten().map(|block| block.size).sum())
    }

    /// Calls `act` for each pool in turn. Returns the results; the default for a pool that has ended meanwhile.
    fn for_each<D: Device, R: Default>(
        &self,
        device: &D,
        mut act: impl FnMut(&mut PoolsLane<D>, MempoolId) -> Result<R, AllocError>,
    ) -> Result<Vec<R>, AllocError> {
        let mut answers = Vec::new();
        for pool in self.all() {
            let answer = device.allocator().with_lane(LaneOf::Pools, |lane| {
                // The pool may have ended, and its number may be used for another.
                if self.has(pool) {
                    act(lane, pool)
                } else {
                    Ok(R::default())
                }
            });
            answers.push(answer?);
        }
        Ok(answers)
    }

    /// No code under this lock panics.
    fn others(&self) -> MutexGuard<'_, OtherPools> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches the allocated blocks at the start of ranges whose copy is retained, or stops watching them. A block is watched
/// until another block is allocated at its address, because the copy is not of that one.
pub(crate) fn watch(device: &impl Device, ranges: &[MemoryRange], is_watched: bool) {
    let addresses = ranges.iter().map(|range| range.address);
    let allocator = device.allocator();
    // Fails only if a panic has poisoned the lock, which the next call reports.
    let _ = allocator.with_lane(LaneOf::Pools, |lane| {
        lane.watch(addresses, is_watched);
        Ok(())
    });
}

/// Returns whether the program, or work of its streams, may still use a block of a segment.
fn has_active_block(segment: &SegmentSnapshot) -> bool {
    let mut blocks = segment.blocks.iter();
    blocks.any(|block| block.status != BlockStatus::Inactive)
}

/// Returns the part of a block that is saved: the requested bytes, rounded up to the unit of copies.
pub(crate) fn contents_of(block: &Allocation) -> MemoryRange {
    MemoryRange {
        address: block.address,
        size: block.requested.round_up(COPIED_UNIT).min(block.size),
    }
}
