//! `direct`: a driver allocation for every request, released when the block is freed. This is what a naive
//! pluggable allocator does, and the baseline for what caching saves.

use super::{CheckpointBlock, Configured, Placement, Release, Request, Strategy};
use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::Reader;
use crate::domain::DomainId;
use crate::driver::{DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::stats::SizeKind;
use crate::units::Bytes;

/// Requests are rounded up to this, the alignment of the driver's own addresses.
const ROUNDING: Bytes = Bytes(512);

/// The options of `direct`: none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirectConfig;

impl Options for DirectConfig {
    fn read(reader: &mut Reader<'_>) -> Result<DirectConfig, ConfigError> {
        reader.pairs("direct", &[], |_, _| Ok(false))?;
        Ok(DirectConfig)
    }

    fn pairs(&self) -> Vec<String> {
        Vec::new()
    }

    fn keeps_free_memory(&self) -> bool {
        false
    }

    /// No: freed memory is released to the driver, so it can serve the next request of any stream.
    fn keeps_streams_apart(&self) -> bool {
        false
    }
}

/// The strategy. It has no state: every block is a segment, and every segment is allocated.
#[derive(Debug)]
pub(crate) struct Direct;

/// Returns the size of a request's block.
fn rounded(requested: Bytes) -> Bytes {
    requested.round_up(ROUNDING)
}

impl Configured for Direct {
    type Options = DirectConfig;

    fn new(_options: &DirectConfig, _heap: &mut Heap) -> Direct {
        Direct
    }

    fn size_in(
        _options: &Self::Options,
        requested: Bytes,
        _free: Bytes,
        _segment: Bytes,
    ) -> Option<Bytes> {
        Some(rounded(requested))
    }
}

impl Strategy for Direct {
    fn block_size(&self, requested: Bytes) -> Bytes {
        rounded(requested)
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        request.size
    }

    fn take(&mut self, _heap: &mut Heap, _request: &Request) -> Option<BlockId> {
        None
    }

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let &Request { size, domain, .. } = request;
        let segment =
            unless_out_of_memory(heap.allocate_segment(memory, domain, size, SizeKind::of(size)))?;
        Ok(segment.map(|segment| heap.insert_whole_block(segment)))
    }

    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId> {
        debug_assert!(block.previous.is_none() && block.next.is_none());
        Some(heap.blocks.segment(id))
    }

    fn release<M: Memory>(
        &mut self,
        _heap: &mut Heap,
        _memory: &mut M,
        _wanted: Release<'_>,
    ) -> Result<bool, DriverError> {
        Ok(false)
    }

    fn largest_free(&self, _heap: &Heap, _domain: DomainId) -> Bytes {
        Bytes::ZERO
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        for (_, block) in heap.blocks.iter() {
            if block.state == BlockState::Free {
                return Err(format!("{} is kept although it is free", block.address));
            }
        }
        if heap.blocks.len() != heap.segments.iter().count() {
            return Err("a segment holds no block, or several".to_owned());
        }
        Ok(Bytes::ZERO)
    }
}

impl Placement for Direct {
    fn take_again(
        &mut self,
        _heap: &mut Heap,
        _wanted: &CheckpointBlock,
        _around: Option<BlockId>,
    ) -> BlockId {
        unreachable!("a block is held as long as its segment")
    }
}
