//! The strategy in use: one type for all strategies.

use super::contract::{
    CheckpointBlock, Configured, Placement, PyTorchPlacement, Release, Request, Strategy,
};
use super::strategies;
use crate::block::{Block, BlockId, BlockTable, SegmentId};
use crate::config::Config;
use crate::domain::DomainId;
use crate::driver::DriverError;
use crate::physical::Memory;
use crate::segment::Heap;
use crate::units::{Bytes, DeviceAddress};

/// Generates the enum of strategies and the functions that choose one by configuration.
macro_rules! define_active {
    ($($(#[$doc:meta])* $module:ident: $variant:ident($options:ident, $strategy:ident);)*) => {
        /// The strategy in use: a closed set, chosen at run time.
        ///
        /// Variants are not boxed: each lane has one strategy, and a box would cost every request a load.
        /// `repr(u8)` stores the variant in a byte of its own, so a dispatch need not decode it from a field's
        /// unused values.
        #[derive(Debug)]
        #[repr(u8)]
        pub(crate) enum ActiveStrategy {
            $($variant(super::$module::$strategy),)*
        }

        impl ActiveStrategy {
            /// Returns the strategy of a configuration. The heap must be empty.
            pub(crate) fn new(config: &Config, heap: &mut Heap) -> ActiveStrategy {
                match config {
                    $(Config::$variant(options) => {
                        ActiveStrategy::$variant(Configured::new(options, heap))
                    })*
                }
            }
        }

        fn size_in(config: &Config, requested: Bytes, free: Bytes, segment: Bytes) -> Option<Bytes> {
            match config {
                $(Config::$variant(options) => {
                    super::$module::$strategy::size_in(options, requested, free, segment)
                })*
            }
        }
    };
}
strategies!(define_active);

/// Calls a method of the strategy in use.
macro_rules! dispatch {
    ($active:expr, $strategy:ident => $call:expr) => {
        strategies!(match_active $active, $strategy => $call;)
    };
}

/// Generates the `match` of [`dispatch!`].
macro_rules! match_active {
    ($active:expr, $bound:ident => $call:expr;
     $($(#[$doc:meta])* $module:ident: $variant:ident($options:ident, $strategy:ident);)*) => {
        match $active {
            $(ActiveStrategy::$variant($bound) => $call,)*
        }
    };
}

impl Config {
    /// Returns the size of the block that served a request, rounding included. `free` is the number of free bytes
    /// from the block's address on, before the request. `segment` is the size of its segment.
    ///
    /// `None` if more than that decides the size: for `caching`, where a replay shows it, and for `bfc` with
    /// `fragmentation_fraction`. Private pools whose blocks are never split are not considered.
    pub fn block_size(&self, requested: Bytes, free: Bytes, segment: Bytes) -> Option<Bytes> {
        let size = size_in(self, requested, free, segment);
        size.filter(|&size| requested <= size && size <= free)
    }
}

impl ActiveStrategy {
    /// Returns the strategy, if it places blocks as PyTorch's allocator does.
    pub(crate) fn as_pytorch(&self) -> Option<&impl PyTorchPlacement> {
        match self {
            ActiveStrategy::Caching(caching) => Some(caching),
            _ => None,
        }
    }

    /// Returns the strategy, if it places blocks as PyTorch's allocator does.
    pub(crate) fn as_pytorch_mut(&mut self) -> Option<&mut impl PyTorchPlacement> {
        match self {
            ActiveStrategy::Caching(caching) => Some(caching),
            _ => None,
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

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        dispatch!(self, strategy => strategy.grow(heap, memory, request))
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId> {
        dispatch!(self, strategy => strategy.put(heap, id, block))
    }

    fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError> {
        dispatch!(self, strategy => strategy.release(heap, memory, wanted))
    }

    fn largest_free(&self, heap: &Heap, domain: DomainId) -> Bytes {
        dispatch!(self, strategy => strategy.largest_free(heap, domain))
    }

    fn largest_request(&self, heap: &Heap, domain: DomainId, new: Bytes) -> Bytes {
        dispatch!(self, strategy => strategy.largest_request(heap, domain, new))
    }

    fn describe(&self, heap: &Heap, request: &Request) -> String {
        dispatch!(self, strategy => strategy.describe(heap, request))
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        dispatch!(self, strategy => strategy.check(heap))
    }
}

impl Placement for ActiveStrategy {
    fn take_around(
        &mut self,
        heap: &mut Heap,
        request: &Request,
        address: DeviceAddress,
    ) -> Option<BlockId> {
        dispatch!(self, strategy => strategy.take_around(heap, request, address))
    }

    fn merge_recent(&mut self, heap: &mut Heap, domain: DomainId) -> bool {
        dispatch!(self, strategy => strategy.merge_recent(heap, domain))
    }

    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId {
        dispatch!(self, strategy => strategy.take_again(heap, wanted, around))
    }
}
