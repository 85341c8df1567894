//! What live private pools keep free, and what would release it.

use std::cmp::Reverse;
use std::fmt;

use lowtide_core::{Bytes, KeptPool, MempoolId, SegmentSnapshot};

/// The most pools that are named.
const NAMED_MAX: usize = 3;

/// What a live private pool keeps free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PoolShare {
    pool: KeptPool,
    free: Bytes,
}

/// Returns what `pools` keep free of `segments`, those that keep the most first.
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

/// Writes a line, with a line break before it; nothing where no pool keeps anything.
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
    /// Returns what makes the memory free for others, in PyTorch's words. PyTorch names the pool of a graph by its first
    /// number, and one that the program made by its second.
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
