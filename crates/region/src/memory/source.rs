//! Pools that have a region's memory: the region's own, and others that a program or a graph capture allocates in.

use std::sync::Arc;

use lowtide_core::{
    AllocError, Bytes, DeviceAddress, MempoolId, PoolSetting, RouteOrder, SegmentSource, Stream,
};

use crate::device::Device;
use crate::memory::RegionMemory;
use crate::pools::PoolsLane;
use crate::state::RegionState;

impl<D: Device> RegionMemory<D> {
    /// Makes the pool of requests in the region, held once. `lane` is the one of the device's pools.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolHasSource`] for a pool that has segments or a source already.
    pub fn create_pool(self: &Arc<Self>, lane: &mut PoolsLane<D>) -> Result<(), AllocError> {
        let pool = self.pools.own();
        lane.create_or_retain_pool(pool);
        self.set_source(lane, pool)?;
        lane.set_pool(pool, PoolSetting::GivesBack)
    }

    /// Gives a pool the region's memory, unless it has that already. A pool that is not there is made, held once.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolHasSource`] for a pool that has other segments or another source, and
    /// [`AllocError::Poisoned`].
    pub fn add_pool(self: &Arc<Self>, pool: MempoolId) -> Result<(), AllocError> {
        // Under one lock, so that nothing is allocated in it in between.
        self.device.allocator().with_pools(|lane| {
            if lane.pool_use_count(pool).is_err() {
                lane.create_or_retain_pool(pool);
            }
            self.join(lane, pool)
        })?
    }

    /// Serves requests of the streams that `accepts` names from a pool, which has the region's memory from then on, if it
    /// has no other yet.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolInUse`] when requests are being routed to the pool already, and [`AllocError::Poisoned`].
    pub fn begin_allocate_to_pool(
        self: &Arc<Self>,
        pool: MempoolId,
        accepts: impl Fn(Stream) -> bool + Send + 'static,
    ) -> Result<(), AllocError> {
        self.device.allocator().with_pools(|lane| {
            // First, as one that others have begun is not to become the region's by an attempt that fails.
            lane.begin_allocate_to_pool(pool, RouteOrder::BeforeOthers, accepts)?;
            match self.join(lane, pool) {
                // It was begun outside of the region before, or its memory is somebody's own.
                Err(AllocError::PoolHasSource { .. }) => Ok(()),
                outcome => outcome,
            }
        })?
    }

    /// Gives a pool that is there the region's memory, unless it has that already.
    fn join(self: &Arc<Self>, lane: &mut PoolsLane<D>, pool: MempoolId) -> Result<(), AllocError> {
        if self.pools.has(pool) {
            // Graphs share a pool, and each says so.
            return Ok(());
        }
        self.set_source(lane, pool)?;
        let is_away = self.pools.add(pool);
        lane.set_pool(pool, self.pools.paused(is_away))
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

/// Where the segments of a pool come from that has a region's memory. It ends with the pool, whose number may then be
/// another's.
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
        Some(&self.memory.pools.tag)
    }
}
