//! Private pools: what CUDA graph captures and `torch.cuda.MemPool` need.

use std::fmt;
use std::mem;
use std::sync::Arc;

use super::{Allocation, Lane, Route};
use crate::block::BlockId;
use crate::domain::{PoolIndex, SegmentSource};
use crate::error::AllocError;
use crate::event::Action;
use crate::physical::Memory;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// A private pool that keeps its free memory while it exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeptPool {
    /// Its name.
    pub id: MempoolId,
    /// Whether its free blocks serve requests of the default pool before they fail.
    pub use_on_oom: bool,
}

/// The order of two routes that accept the same stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouteOrder {
    /// The new route decides before all existing ones: of nested routes, the innermost decides.
    BeforeOthers,
    /// The new route decides after all existing ones.
    AfterOthers,
}

/// A setting of a pool.
pub enum PoolSetting {
    /// Whether requests of the default pool may use this pool's free blocks before they fail.
    UseOnOom(bool),
    /// Its blocks are not split from now on.
    NoSplit,
    /// Its free segments are released with the default pool's from now on, even while it is held.
    ReleasesFree,
    /// Its segments come from this source instead of the driver. They are never expandable, and count like the
    /// driver's. The source is dropped with the pool.
    Source(Box<dyn SegmentSource>),
    /// The region that is paused with this pool; `None` resumes it. A paused pool refuses requests and keeps its
    /// segments, which do not count against the limit. Its blocks can be freed. Not for the default pool, whose
    /// requests do not check whether it is paused.
    Paused(Option<Arc<str>>),
}

impl fmt::Debug for PoolSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolSetting::UseOnOom(allow) => f.debug_tuple("UseOnOom").field(allow).finish(),
            PoolSetting::NoSplit => f.write_str("NoSplit"),
            PoolSetting::ReleasesFree => f.write_str("ReleasesFree"),
            PoolSetting::Source(_) => f.debug_tuple("Source").finish_non_exhaustive(),
            PoolSetting::Paused(region) => f.debug_tuple("Paused").field(region).finish(),
        }
    }
}

/// The state of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolState {
    /// Its use count.
    pub use_count: u32,
    /// Whether something holds it, or requests are routed to it.
    pub is_held: bool,
    /// What its pending blocks wait for.
    pub pending: Pending,
}

/// What the pending blocks of a pool wait for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Pending {
    /// No block waits.
    #[default]
    Nothing,
    /// Other streams that used a block.
    Streams,
    /// The end of a graph capture, then other streams.
    CaptureEnd,
}

impl<M: Memory> Lane<M> {
    /// Returns the pool that serves a stream: with nested routes, that of the innermost.
    #[inline]
    pub(crate) fn route(&self, stream: Stream) -> PoolIndex {
        if self.routes.is_empty() {
            return PoolIndex::DEFAULT;
        }
        let mut innermost_first = self.routes.iter().rev();
        let route = innermost_first.find(|route| (route.accepts)(stream));
        route.map_or(PoolIndex::DEFAULT, |route| route.pool)
    }

    /// Returns whether a private pool serves a stream's requests.
    pub fn is_routed(&self, stream: Stream) -> bool {
        self.route(stream) != PoolIndex::DEFAULT
    }

    /// Creates the pool with a use count of 1, or adds 1 to its use count.
    pub fn create_or_retain_pool(&mut self, pool: MempoolId) {
        match self.heap.domains.find_pool(pool) {
            Some(index) => self.heap.domains.pool_mut(index).use_count += 1,
            None => {
                self.heap.domains.insert_pool(pool);
            }
        }
    }

    /// Routes requests of the accepted streams to `pool`, created if needed. Adds 1 to its use count. `order` decides
    /// between routes that accept the same stream.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolInUse`] when requests are already routed to the pool.
    pub fn begin_allocate_to_pool(
        &mut self,
        pool: MempoolId,
        order: RouteOrder,
        accepts: impl Fn(Stream) -> bool + Send + 'static,
    ) -> Result<(), AllocError> {
        if self.position_of_route(pool).is_some() {
            return Err(AllocError::PoolInUse { pool });
        }
        self.create_or_retain_pool(pool);
        let route = Route {
            pool: self.find_pool(pool)?,
            accepts: Box::new(accepts),
        };
        debug_assert!(self.heap.domains.pool(route.pool).use_count > 0);
        let position = match order {
            RouteOrder::BeforeOthers => self.routes.len(),
            RouteOrder::AfterOthers => 0,
        };
        self.routes.insert(position, route);
        debug_assert!(self.position_of_route(pool).is_some());
        Ok(())
    }

    /// Removes the route to a pool. The pool's use count does not change.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::PoolNotRouted`] when no requests are
    /// routed to it.
    pub fn end_allocate_to_pool(&mut self, pool: MempoolId) -> Result<(), AllocError> {
        self.find_pool(pool)?;
        let position = self
            .position_of_route(pool)
            .ok_or(AllocError::PoolNotRouted { pool })?;
        self.routes.remove(position);
        debug_assert!(
            self.position_of_route(pool).is_none(),
            "one route leads to a pool"
        );
        Ok(())
    }

    /// Subtracts 1 from a pool's use count. At zero, [`Device::empty_cache`](crate::Device::empty_cache) or lack of
    /// memory releases its free segments. The pool ends with its last segment.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::PoolNotHeld`] if its use count is zero.
    pub fn release_pool(&mut self, pool: MempoolId) -> Result<(), AllocError> {
        let index = self.find_pool(pool)?;
        let held = &mut self.heap.domains.pool_mut(index).use_count;
        *held = held
            .checked_sub(1)
            .ok_or(AllocError::PoolNotHeld { pool })?;
        Ok(())
    }

    /// Returns the state of a pool. Linear in the pending blocks of all pools.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist.
    pub fn pool(&self, pool: MempoolId) -> Result<PoolState, AllocError> {
        let index = self.find_pool(pool)?;
        Ok(PoolState {
            use_count: self.heap.domains.pool(index).use_count,
            is_held: self.is_held(index),
            pending: self.pending(index),
        })
    }

    /// Changes one of a pool's settings.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::PoolHasSource`] when a
    /// [source](PoolSetting::Source) is set for the default pool, or for a pool that has memory or a source already.
    pub fn set_pool(&mut self, pool: MempoolId, setting: PoolSetting) -> Result<(), AllocError> {
        let index = self.find_pool(pool)?;
        let domains = &mut self.heap.domains;
        match setting {
            PoolSetting::UseOnOom(allow) => domains.pool_mut(index).use_on_oom = allow,
            PoolSetting::NoSplit => domains.set_no_split(index),
            PoolSetting::ReleasesFree => domains.pool_mut(index).releases_free = true,
            PoolSetting::Source(source) => {
                let is_set = index != PoolIndex::DEFAULT && domains.set_source(index, source);
                return is_set
                    .then_some(())
                    .ok_or(AllocError::PoolHasSource { pool });
            }
            PoolSetting::Paused(region) => {
                let is_paused = region.is_some();
                let before = mem::replace(&mut domains.pool_mut(index).paused, region);
                if before.is_some() != is_paused {
                    self.keep_pause(index, is_paused);
                }
            }
        }
        Ok(())
    }

    /// Adds the pause or the resume of all of a pool's memory to the recent events.
    fn keep_pause(&mut self, pool: PoolIndex, is_paused: bool) {
        let action = if is_paused {
            Action::SegmentPaused
        } else {
            Action::SegmentResumed
        };
        // A pool without domains has no memory either.
        if let Some(&domain) = self.heap.domains.of_pool(pool).first() {
            let recent = &mut self.heap.log.recent;
            recent.push(action, domain, DeviceAddress::NULL, Bytes::ZERO);
        }
    }

    /// Returns the paused pools. Linear in the number of pools.
    pub(crate) fn paused_pools(&self) -> Vec<MempoolId> {
        let pools = self.heap.domains.pools();
        let paused = pools.filter(|(_, pool)| pool.paused.is_some());
        paused.map(|(_, pool)| pool.id).collect()
    }

    /// Returns the private pools that keep their free memory, except paused ones. Linear in the number of pools.
    pub(crate) fn kept_pools(&self) -> Vec<KeptPool> {
        let pools = self.heap.domains.pools();
        let kept = pools.filter(|&(index, pool)| self.keeps(index) && pool.paused.is_none());
        let private = kept.filter(|&(index, _)| index != PoolIndex::DEFAULT);
        let kept = private.map(|(_, pool)| KeptPool {
            id: pool.id,
            use_on_oom: pool.use_on_oom,
        });
        kept.collect()
    }

    /// Releases a private pool's free segments, even if the pool is held or paused. Removes the pool if no segment is
    /// left and nothing holds it.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::Driver`] when the driver
    /// refuses a call.
    pub fn trim_pool(&mut self, pool: MempoolId) -> Result<(), AllocError> {
        let index = self.find_pool(pool)?;
        Ok(self.release_pool_segments(index, None)?)
    }

    /// Returns the allocated blocks of a pool, sorted by address. O(n log n) for n blocks of all pools.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist.
    pub fn held_blocks(&self, pool: MempoolId) -> Result<Vec<Allocation>, AllocError> {
        let held = self.held_in_pool(self.find_pool(pool)?);
        Ok(held.into_iter().map(|id| self.allocation_of(id)).collect())
    }

    fn pending(&self, pool: PoolIndex) -> Pending {
        let (blocks, domains) = (&self.heap.blocks, &self.heap.domains);
        let is_of_pool = |&id: &BlockId| domains.domain(blocks.get(id).domain).pool == pool;
        if !self.uses.waiting().iter().any(is_of_pool) {
            Pending::Nothing
        } else if self.is_capturing() {
            Pending::CaptureEnd
        } else {
            Pending::Streams
        }
    }

    /// Returns whether a graph is being captured. No event may then be queried.
    pub(crate) fn is_capturing(&self) -> bool {
        self.heap.captures > 0
    }

    /// Returns an error if the pool is paused.
    pub(super) fn refuse_paused(&self, pool: PoolIndex) -> Result<(), AllocError> {
        match &self.heap.domains.pool(pool).paused {
            None => Ok(()),
            Some(region) => Err(AllocError::Paused {
                region: Arc::clone(region),
            }),
        }
    }

    /// Creates the pool if it does not exist. Its use count is then at least 1. Returns the pool, and its earlier use
    /// count for [`Lane::undo_hold`] (`None` if it was created).
    pub(crate) fn hold_pool(&mut self, pool: MempoolId) -> (PoolIndex, Option<u32>) {
        let Some(index) = self.heap.domains.find_pool(pool) else {
            return (self.heap.domains.insert_pool(pool), None);
        };
        let use_count = &mut self.heap.domains.pool_mut(index).use_count;
        let held_before = mem::replace(use_count, (*use_count).max(1));
        debug_assert!(*use_count > 0);
        (index, Some(held_before))
    }

    /// Undoes [`Lane::hold_pool`]. A pool that it created has no memory, and is removed.
    #[cold]
    pub(crate) fn undo_hold(&mut self, index: PoolIndex, held_before: Option<u32>) {
        match held_before {
            Some(count) => {
                debug_assert!(count <= self.heap.domains.pool(index).use_count);
                self.heap.domains.pool_mut(index).use_count = count;
            }
            None => self.heap.domains.remove_pool(index),
        }
    }

    pub(super) fn find_pool(&self, pool: MempoolId) -> Result<PoolIndex, AllocError> {
        self.heap
            .domains
            .find_pool(pool)
            .ok_or(AllocError::NoSuchPool { pool })
    }

    fn position_of_route(&self, pool: MempoolId) -> Option<usize> {
        let index = self.heap.domains.find_pool(pool)?;
        self.routes.iter().position(|route| route.pool == index)
    }
}
