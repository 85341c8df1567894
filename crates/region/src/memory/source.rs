//! The pools that have a region's memory: its own, and others that the program or a graph capture allocates in.

use std::sync::Arc;

use lowtide_core::{
    AllocError, Bytes, DeviceAddress, MempoolId, PoolSetting, RouteOrder, SegmentSource, Stream,
};
use lowtide_shared::LaneOf;

use crate::device::Device;
use crate::memory::RegionMemory;
use crate::pools::PoolsLane;
use crate::state::RegionState;

impl<D: Device> RegionMemory<D> {
    /// Creates the pool of requests in the region, with a use count of 1. `lane` is the lane of the device's pools.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolHasSource`] for a pool that has segments or a source already.
    pub fn create_pool(self: &Arc<Self>, lane: &mut PoolsLane<D>) -> Result<(), AllocError> {
        let pool = self.pools.own();
        lane.create_or_retain_pool(pool);
        self.set_source(lane, pool)?;
        lane.set_pool(pool, PoolSetting::ReleasesFree)
    }

    /// Makes the region the source of a pool's segments, if it is not already. Creates a pool that does not exist, with a
    /// use count of 1.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolHasSource`] for a pool that has other segments or another source, and
    /// [`AllocError::Poisoned`].
    pub fn add_pool(self: &Arc<Self>, pool: MempoolId) -> Result<(), AllocError> {
        // Under one lock, so that nothing is allocated in the new pool before it has its source.
        self.device.allocator().with_lane(LaneOf::Pools, |lane| {
            if lane.pool(pool).is_err() {
                lane.create_or_retain_pool(pool);
            }
            self.join(lane, pool)
        })
    }

    /// Serves requests of the streams that `accepts` names from a pool. The region becomes the source of its segments, if
    /// the pool has no other yet.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolInUse`] when requests are being routed to the pool already, and [`AllocError::Poisoned`].
    pub fn begin_allocate_to_pool(
        self: &Arc<Self>,
        pool: MempoolId,
        accepts: impl Fn(Stream) -> bool + Send + 'static,
    ) -> Result<(), AllocError> {
        self.device.allocator().with_lane(LaneOf::Pools, |lane| {
            // First, because a pool that is in use must not join the region if this fails.
            lane.begin_allocate_to_pool(pool, RouteOrder::BeforeOthers, accepts)?;
            match self.join(lane, pool) {
                // The pool has segments from outside the region, or another source.
                Err(AllocError::PoolHasSource { .. }) => Ok(()),
                outcome => outcome,
            }
        })
    }

    /// Makes the region the source of an existing pool's segments, if it is not already.
    fn join(self: &Arc<Self>, lane: &mut PoolsLane<D>, pool: MempoolId) -> Result<(), AllocError> {
        if self.pools.has(pool) {
            // Graphs that share a pool each begin with this call.
            return Ok(());
        }
        self.set_source(lane, pool)?;
        let is_paused = self.pools.add(pool);
        lane.set_pool(pool, self.pools.paused(is_paused))
    }

    fn set_source(
        self: &Arc<Self>,
        lane: &mut PoolsLane<D>,
        pool: MempoolId,
    ) -> Result<(), AllocError> {
        let source = RegionSource {
            memory: Arc::clone(self),
            pool,
        };
        lane.set_pool(pool, PoolSetting::Source(Box::new(source)))
    }
}

/// The source of a pool's segments. It is dropped with the pool, whose number may then be used for another.
#[derive(Debug)]
struct RegionSource<D: Device> {
    memory: Arc<RegionMemory<D>>,
    pool: MempoolId,
}

impl<D: Device> Drop for RegionSource<D> {
    fn drop(&mut self) {
        self.memory.pools.remove(self.pool);
    }
}

impl<D: Device> SegmentSource for RegionSource<D> {
    fn allocate(&mut self, size: Bytes, stream: Stream, is_limited: bool) -> Option<DeviceAddress> {
        let mut inner = self.memory.lock().ok()?;
        // Copies that restore contents may still be in progress, and would overwrite the new block.
        if inner.state != RegionState::Mapped || inner.may_be_copying {
            return None;
        }
        // The pool learns no reason. The next request tries again what failed for a reason other than lack of memory.
        let device = &self.memory.device;
        let address = inner.allocate(device, size, stream, is_limited).ok();
        inner.count_mapped();
        address
    }

    fn release(&mut self, address: DeviceAddress, _size: Bytes) {
        let Ok(mut inner) = self.memory.lock() else {
            return;
        };
        let mut reservations = inner.reservations.iter_mut();
        let _ = reservations.any(|reservation| reservation.remove(address));
        if inner.state == RegionState::Mapped {
            inner.release_unused(&self.memory.device);
            if inner.has_no_segments()
                && let Some(retained) = &mut inner.saved
            {
                // Not released here: the backups are not locked, and the next one may use its memory.
                retained.has_ended = true;
            }
        }
    }

    fn region(&self) -> Option<&Arc<str>> {
        Some(&self.memory.pools.tag)
    }
}
