//! The program's pools: their use counts, the routes to them, and the memory that must stay theirs.

use std::collections::BTreeMap;

use lowtide_core::{Allocation, Config, DeviceAddress, Handle, MempoolId, StrategyName, Stream};

/// The program's pools.
///
/// A graph may use its pool's memory whenever it is replayed, also what its capture freed. So while a private pool is
/// held, its handles have no block of another pool. A request that gets a block of a pool with `use_on_oom` is no
/// exception: the block stays one of that pool.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// The use count of each pool. A pool with a count of zero may have ended.
    pub(super) use_counts: BTreeMap<MempoolId, u32>,
    /// In the order in which they began. The last one that matches a stream applies.
    pub(super) routes: Vec<(MempoolId, Stream)>,
    /// The pools that were ever allowed to serve other requests.
    pub(super) open: Vec<MempoolId>,
    /// Whether memory of a pool may be released while its use count is above zero.
    pub(super) may_lose_memory: bool,
    /// The held private pool whose block was handed out on a handle.
    owners: BTreeMap<Handle, MempoolId>,
    /// The addresses of blocks of held private pools that were allocated during a capture: starts, each with the end and
    /// the pool. They do not overlap.
    captured: BTreeMap<DeviceAddress, (DeviceAddress, MempoolId)>,
}

impl Pools {
    pub(super) fn new(config: &Config) -> Pools {
        Pools {
            may_lose_memory: match config {
                // With this option, a request may release the pool's own segments to make room.
                Config::Caching(caching) => caching.max_split_size.is_some(),
                config => config.name() == StrategyName::Direct,
            },
            ..Pools::default()
        }
    }

    pub(super) fn route(&self, stream: Stream) -> MempoolId {
        let route = self
            .routes
            .iter()
            .rev()
            .find(|&&(_, routed)| routed == stream);
        route.map_or(MempoolId::DEFAULT, |&(pool, _)| pool)
    }

    pub(super) fn use_count(&self, pool: MempoolId) -> u32 {
        let unheld = u32::from(pool.is_default());
        self.use_counts.get(&pool).copied().unwrap_or(unheld)
    }

    pub(super) fn is_routed(&self, pool: MempoolId) -> bool {
        self.routes.iter().any(|&(routed, _)| routed == pool)
    }

    /// Records that a pool's use count became zero: other pools may have its memory.
    pub(super) fn end_hold(&mut self, pool: MempoolId) {
        self.owners.retain(|_, owner| *owner != pool);
        self.captured.retain(|_, (_, owner)| *owner != pool);
    }

    /// Records that any pool may lose memory from now on.
    pub(super) fn lose_memory(&mut self) {
        self.may_lose_memory = true;
        self.owners.clear();
        self.captured.clear();
    }

    /// Gives a new block's handle to the block's pool. Returns whether it was not that pool's before.
    ///
    /// # Errors
    ///
    /// A sentence if the handle belongs to another pool.
    pub(super) fn give(&mut self, handle: Handle, block: &Allocation) -> Result<bool, String> {
        match self.owners.get(&handle) {
            Some(&owner) if owner == block.pool => Ok(false),
            Some(owner) => Err(format!("{block:?} has {handle:?}, which is {owner:?}'s")),
            None if self.keeps(block.pool) => {
                self.owners.insert(handle, block.pool);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Records that a capture may use a block.
    pub(super) fn capture(&mut self, block: &Allocation) {
        if !self.keeps(block.pool) {
            return;
        }
        let (mut start, mut end) = (block.address, block.address + block.size);
        while let Some((at, pool)) = self.captured_in(start, end) {
            debug_assert_eq!(pool, block.pool, "a held pool keeps its addresses");
            let (last, _) = self.captured.remove(&at).expect("it was just found");
            (start, end) = (start.min(at), end.max(last));
        }
        self.captured.insert(start, (end, block.pool));
    }

    /// Returns where a captured block lies in a range, and its pool.
    pub(super) fn captured_in(
        &self,
        start: DeviceAddress,
        end: DeviceAddress,
    ) -> Option<(DeviceAddress, MempoolId)> {
        let below = self.captured.range(..end).next_back();
        let found = below.filter(|&(_, &(last, _))| last > start);
        found.map(|(&at, &(_, pool))| (at, pool))
    }

    /// Returns whether memory of a pool must stay its own.
    fn keeps(&self, pool: MempoolId) -> bool {
        !self.may_lose_memory && !pool.is_default() && self.use_count(pool) > 0
    }
}
