//! The free memory that live private pools keep, and what would release it.

use std::cmp::Reverse;
use std::fmt;

use lowtide_core::{Bytes, KeptPool, MempoolId, SegmentSnapshot};

/// The most pools that are named.
const NAMED_MAX: usize = 3;

/// The free memory that a live private pool keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PoolShare {
    pool: KeptPool,
    free: Bytes,
}

/// Returns the free memory that each of `pools` keeps in `segments`, most first. Pools that keep nothing are left
/// out.
pub(crate) fn shares_of<'a>(
    pools: impl Iterator<Item = &'a KeptPool>,
    segments: &[SegmentSnapshot],
) -> Vec<PoolShare> {
    let free_in = |pool: MempoolId| {
        let segments = segments.iter().filter(|segment| segment.pool == pool);
        segments
            .map(|segment| segment.size.saturating_sub(segment.active_bytes()))
            .sum()
    };
    let shares = pools.map(|&pool| PoolShare {
        pool,
        free: free_in(pool.id),
    });
    let mut shares: Vec<PoolShare> = shares.filter(|share| !share.free.is_zero()).collect();
    shares.sort_by_key(|share| (Reverse(share.free), share.pool.id));
    shares
}

/// Writes one line, after a line break; writes nothing if no pool keeps anything.
pub(crate) fn fmt(shares: &[PoolShare], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (named, others) = shares.split_at(shares.len().min(NAMED_MAX));
    if named.is_empty() {
        return Ok(());
    }
    write!(f, "\nFree in live private pools, for their own requests: ")?;
    for (index, share) in named.iter().enumerate() {
        let before = if index == 0 { "" } else { "; " };
        let (free, id) = (share.free, share.pool.id);
        write!(f, "{before}{free} in pool {id}, until {}", share.release())?;
    }
    if !others.is_empty() {
        let free: Bytes = others.iter().map(|share| share.free).sum();
        let count = others.len();
        let pools = if count == 1 { "pool" } else { "pools" };
        write!(f, "; {free} in {count} more {pools}")?;
    }
    write!(f, ".")
}

impl PoolShare {
    /// Returns what would release the memory for others, in PyTorch's words. PyTorch sets the first number of a
    /// graph's pool id, and the second of a pool that the program made.
    fn release(&self) -> &'static str {
        match (self.pool.id, self.pool.use_on_oom) {
            (MempoolId(_, 0), _) => "graph.reset() of all torch.cuda.CUDAGraphs in it",
            (_, true) => {
                "every torch.cuda.MemPool and CUDAGraph of it is deleted (use_on_oom=True found no block that fits)"
            }
            (_, false) => {
                "every torch.cuda.MemPool and CUDAGraph of it is deleted (MemPool(use_on_oom=True) lends it, \
                 torch.cuda.use_mem_pool allocates in it)"
            }
        }
    }
}
