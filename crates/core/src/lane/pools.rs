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

/// A private pool whose free memory does not go back to the driver while the pool lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeptPool {
    /// Its name.
    pub id: MempoolId,
    /// Whether its free blocks serve requests of the default pool before they fail.
    pub use_on_oom: bool,
}

/// Which of several routes that accept a stream decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouteOrder {
    /// This one before those that began earlier: where routes nest, the innermost decides.
    BeforeOthers,
    /// Every other one, even one that began earlier.
    AfterOthers,
}

/// What is set for a pool.
pub enum PoolSetting {
    /// Whether requests of the default pool are served from this one before they fail.
    UseOnOom(bool),
    /// Its blocks are handed out whole from now on.
    NoSplit,
    /// Its free segments go back from now on when the default pool's do, though it is held.
    GivesBack,
    /// Its segments come from a source in place of the driver. They are never expandable, and count as those from the
    /// driver do; the source ends with the pool.
    Source(Box<dyn SegmentSource>),
    /// The region of this name, whose memory the pool has, is paused; `None` where it is resumed. While it is paused
    /// nothing is allocated in the pool, its segments stay whatever else goes back, and the limit does not count them.
    /// Blocks are freed as ever. Not for the default pool: its requests do not look whether it is paused.
    Paused(Option<Arc<str>>),
}

impl fmt::Debug for PoolSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolSetting::UseOnOom(allow) => f.debug_tuple("UseOnOom").field(allow).finish(),
            PoolSetting::NoSplit => f.write_str("NoSplit"),
            PoolSetting::GivesBack => f.write_str("GivesBack"),
            PoolSetting::Source(_) => f.debug_tuple("Source").finish_non_exhaustive(),
            PoolSetting::Paused(region) => f.debug_tuple("Paused").field(region).finish(),
        }
    }
}

/// A pool as it is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolState {
    /// How often it is held.
    pub use_count: u32,
    /// Whether something holds it, or requests are routed to it.
    pub is_held: bool,
    /// What its freed blocks wait for.
    pub pending: Pending,
}

/// What the freed blocks of a pool wait for before they are free.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Pending {
    /// No block waits.
    #[default]
    Nothing,
    /// Other streams that used a block.
    Streams,
    /// The end of a graph capture, and other streams then.
    CaptureEnd,
}

impl<M: Memory> Lane<M> {
    /// Returns the pool that serves a stream: where routes nest, the innermost decides.
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

    /// Makes the pool called `pool`, held once, or holds it once more.
    pub fn create_or_retain_pool(&mut self, pool: MempoolId) {
        match self.heap.domains.find_pool(pool) {
            Some(index) => self.heap.domains.pool_mut(index).use_count += 1,
            None => {
                self.heap.domains.insert_pool(pool);
            }
        }
    }

    /// Serves from now on the requests of the streams that `accepts` names from the pool called
    /// `pool`, which is made if need be and held once more. `order` says which route decides where several accept a
    /// stream.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolInUse`] when requests are being routed to the pool already.
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

    /// Serves requests as before [`Lane::begin_allocate_to_pool`]. The pool stays held.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::PoolNotRouted`] when no requests
    /// are being routed to it.
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

    /// Lets go of a pool. Once nothing holds it, its free segments go back with the next
    /// [`Device::empty_cache`](crate::Device::empty_cache) or when memory runs out, and it ends with the last of them.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::PoolNotHeld`] for one that was
    /// released as often as it was held.
    pub fn release_pool(&mut self, pool: MempoolId) -> Result<(), AllocError> {
        let index = self.find_pool(pool)?;
        let held = &mut self.heap.domains.pool_mut(index).use_count;
        *held = held
            .checked_sub(1)
            .ok_or(AllocError::PoolNotHeld { pool })?;
        Ok(())
    }

    /// Returns the state of a pool. Linear in the blocks of any pool that wait.
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
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::PoolHasSource`] for a
    /// [source](PoolSetting::Source) of the default pool, or of one that has segments or a source already.
    pub fn set_pool(&mut self, pool: MempoolId, setting: PoolSetting) -> Result<(), AllocError> {
        let index = self.find_pool(pool)?;
        let domains = &mut self.heap.domains;
        match setting {
            PoolSetting::UseOnOom(allow) => domains.pool_mut(index).use_on_oom = allow,
            PoolSetting::NoSplit => domains.set_no_split(index),
            PoolSetting::GivesBack => domains.pool_mut(index).gives_back = true,
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

    /// Keeps among the last events that all of a pool's memory left, or is back.
    fn keep_pause(&mut self, pool: PoolIndex, is_paused: bool) {
        let action = if is_paused {
            Action::SegmentPaused
        } else {
            Action::SegmentResumed
        };
        // A pool in which nothing ever was has no memory either.
        if let Some(&domain) = self.heap.domains.of_pool(pool).first() {
            let recent = &mut self.heap.log.recent;
            recent.push(action, domain, DeviceAddress::NULL, Bytes::ZERO);
        }
    }

    /// Returns the pools whose memory is away. Linear in the number of pools.
    pub(crate) fn paused_pools(&self) -> Vec<MempoolId> {
        let pools = self.heap.domains.pools();
        let paused = pools.filter(|(_, pool)| pool.paused.is_some());
        paused.map(|(_, pool)| pool.id).collect()
    }

    /// Returns the private pools that keep what is free in them, which is on the device. Linear in the number of pools.
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

    /// Releases a private pool's free segments, even if something holds the pool or its memory is away. Ends a pool that
    /// nothing holds with the last one.
    ///
    /// # Errors
    ///
    /// [`AllocError::NoSuchPool`] for a pool that does not exist; [`AllocError::Driver`] when the driver
    /// refuses a call.
    pub fn trim_pool(&mut self, pool: MempoolId) -> Result<(), AllocError> {
        let index = self.find_pool(pool)?;
        Ok(self.release_pool_segments(index, None)?)
    }

    /// Returns the blocks that the program holds in a pool, by rising addresses. O(n log n) for n blocks of
    /// any pool.
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

    /// Returns whether a graph is captured, during which no event is asked whether it has passed.
    pub(crate) fn is_capturing(&self) -> bool {
        self.heap.captures > 0
    }

    /// Refuses to hand out what is away.
    pub(super) fn refuse_paused(&self, pool: PoolIndex) -> Result<(), AllocError> {
        match &self.heap.domains.pool(pool).paused {
            None => Ok(()),
            Some(region) => Err(AllocError::Paused {
                region: Arc::clone(region),
            }),
        }
    }

    /// Returns the pool called `pool`, held once if nothing held it and made if need be, and how often it
    /// was held, for [`Lane::undo_hold`].
    pub(crate) fn hold_pool(&mut self, pool: MempoolId) -> (PoolIndex, Option<u32>) {
        let Some(index) = self.heap.domains.find_pool(pool) else {
            return (self.heap.domains.insert_pool(pool), None);
        };
        let use_count = &mut self.heap.domains.pool_mut(index).use_count;
        let held_before = mem::replace(use_count, (*use_count).max(1));
        debug_assert!(*use_count > 0);
        (index, Some(held_before))
    }

    /// Leaves a pool as it was before [`Lane::hold_pool`]; one that was made then has no memory.
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
