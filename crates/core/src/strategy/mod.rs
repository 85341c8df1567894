//! The policies that decide which bytes serve a request, and what is asked of each.
//!
//! A strategy decides; it does not account. Blocks, segments, figures and events are kept by
//! [`Heap`], and the order in which things are tried is that of
//! [`DeviceAllocator::allocate`](crate::DeviceAllocator::allocate).
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

pub(crate) mod bfc;
mod bit_set;
pub(crate) mod buddy;
pub(crate) mod caching;
mod contract;
mod direct;
mod free_blocks;
pub(crate) mod pool;
mod recent_blocks;
mod shared_segment;
pub(crate) mod slab;

#[cfg(test)]
pub(crate) mod test_driver;

pub use contract::Request;
pub(crate) use contract::{CheckpointBlock, Placement, Release, Strategy};

use crate::block::{Block, BlockId, BlockTable, SegmentId};
use crate::config::Config;
use crate::domain::DomainId;
use crate::driver::{Driver, DriverError};
use crate::physical::Physical;
use crate::segment::Heap;
use crate::snapshot::SegmentSnapshot;
use crate::units::{Bytes, DeviceAddress};

impl Config {
    /// Returns how long a block was, rounding included, that a request was answered with: of the `free` bytes at its
    /// start, in which nothing was in use, in a segment of `segment` bytes. `None` where more decides that: for
    /// `caching`, which a replay tells, and with BFC's `fragmentation_fraction`. Memory pools whose blocks are handed
    /// out whole are left out.
    pub fn block_size(&self, requested: Bytes, free: Bytes, segment: Bytes) -> Option<Bytes> {
        let size = match self {
            Config::Direct => Some(direct::rounded(requested)),
            Config::Pool(_) => Some(pool::rounded(requested)),
            Config::Buddy(options) => Some(buddy::size_in(options, requested, segment)),
            Config::Slab(options) => Some(slab::size_in(options, requested, segment)),
            Config::Bfc(options) => bfc::size_in(options, requested, free),
            Config::Caching(_) => None,
        };
        size.filter(|&size| requested <= size && size <= free)
    }
}

/// The strategy in use: a closed set, chosen at run time.
///
/// No variant is boxed: one exists for each device, and a box would cost every request a load. Nor is the
/// variant hidden in a field's unused values, which every dispatch would have to decode.
#[derive(Debug)]
#[repr(u8)]
pub(crate) enum ActiveStrategy {
    Direct(direct::Direct),
    Pool(pool::PoolStrategy),
    Buddy(buddy::Buddy),
    Slab(slab::Slabs),
    Bfc(bfc::Bfc),
    Caching(caching::Caching),
}

/// Calls a method of whichever strategy is in use.
macro_rules! dispatch {
    ($active:expr, $strategy:ident => $call:expr) => {
        match $active {
            ActiveStrategy::Direct($strategy) => $call,
            ActiveStrategy::Pool($strategy) => $call,
            ActiveStrategy::Buddy($strategy) => $call,
            ActiveStrategy::Slab($strategy) => $call,
            ActiveStrategy::Bfc($strategy) => $call,
            ActiveStrategy::Caching($strategy) => $call,
        }
    };
}

impl ActiveStrategy {
    /// Returns the strategy that a configuration asks for, on a heap that is empty.
    pub(crate) fn new(config: &Config, heap: &mut Heap) -> ActiveStrategy {
        match config {
            Config::Direct => ActiveStrategy::Direct(direct::Direct),
            Config::Pool(config) => ActiveStrategy::Pool(pool::PoolStrategy::new(config)),
            Config::Buddy(config) => ActiveStrategy::Buddy(buddy::Buddy::new(config)),
            Config::Slab(config) => ActiveStrategy::Slab(slab::Slabs::new(config)),
            Config::Bfc(config) => ActiveStrategy::Bfc(bfc::Bfc::new(config.clone())),
            Config::Caching(config) => {
                ActiveStrategy::Caching(caching::Caching::new(config.clone(), heap))
            }
        }
    }

    /// Takes over other options while it runs, and returns whether it did: only `caching` can, and only
    /// its own.
    pub(crate) fn reconfigure(&mut self, config: &Config, heap: &mut Heap) -> bool {
        match (self, config) {
            (ActiveStrategy::Caching(caching), Config::Caching(config)) => {
                caching.reconfigure(config.clone(), heap);
                true
            }
            _ => false,
        }
    }
}

impl Strategy for ActiveStrategy {
    #[inline(always)]
    fn block_size(&self, requested: Bytes) -> Bytes {
        dispatch!(self, strategy => Strategy::block_size(strategy, requested))
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        dispatch!(self, strategy => Strategy::segment_size(strategy, request))
    }

    #[inline(always)]
    fn find(&self, blocks: &BlockTable, address: DeviceAddress) -> Option<BlockId> {
        dispatch!(self, strategy => strategy.find(blocks, address))
    }

    #[inline(always)]
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        dispatch!(self, strategy => strategy.take(heap, request))
    }

    fn grow<D: Driver>(
        &mut self,
        heap: &mut Heap,
        physical: &mut Physical<D>,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        dispatch!(self, strategy => strategy.grow(heap, physical, request))
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId> {
        dispatch!(self, strategy => strategy.put(heap, id, block))
    }

    fn release<D: Driver>(
        &mut self,
        heap: &mut Heap,
        physical: &mut Physical<D>,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError> {
        dispatch!(self, strategy => strategy.release(heap, physical, wanted))
    }

    fn largest_free(&self, heap: &Heap, domain: DomainId) -> Bytes {
        dispatch!(self, strategy => strategy.largest_free(heap, domain))
    }

    fn describe(&self, heap: &Heap, request: &Request) -> String {
        dispatch!(self, strategy => strategy.describe(heap, request))
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        dispatch!(self, strategy => strategy.check(heap))
    }
}

impl Placement for ActiveStrategy {
    fn take_at(&mut self, heap: &mut Heap, block: BlockId, size: Bytes) -> bool {
        dispatch!(self, strategy => strategy.take_at(heap, block, size))
    }

    fn take_around(
        &mut self,
        heap: &mut Heap,
        request: &Request,
        address: DeviceAddress,
    ) -> Option<BlockId> {
        dispatch!(self, strategy => strategy.take_around(heap, request, address))
    }

    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId {
        dispatch!(self, strategy => strategy.take_again(heap, wanted, around))
    }

    fn restores_free_blocks(&self) -> bool {
        dispatch!(self, strategy => strategy.restores_free_blocks())
    }

    fn adopt<D: Driver>(
        &mut self,
        heap: &mut Heap,
        physical: &mut Physical<D>,
        domain: DomainId,
        segment: &SegmentSnapshot,
    ) -> Result<Option<Vec<(BlockId, Bytes)>>, DriverError> {
        dispatch!(self, strategy => strategy.adopt(heap, physical, domain, segment))
    }

    fn block_number(&self, id: BlockId) -> Option<u64> {
        dispatch!(self, strategy => strategy.block_number(id))
    }

    fn order_blocks(&mut self, heap: &Heap, oldest: &[DeviceAddress]) {
        dispatch!(self, strategy => strategy.order_blocks(heap, oldest));
    }
}
