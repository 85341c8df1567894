//! What there was before a recording's first event, as a picture of segments.

use lowtide_core::{
    BlockSnapshot, BlockStatus, Bytes, CachingConfig, DeviceAddress, MempoolId, SegmentSnapshot,
};
use lowtide_trace::{InitialBlock, InitialSegment, Trace};

use crate::initial_sizes::{InitialSizes, UNSPLIT_END_MAX};
use crate::survey::config_of;

/// Returns the segments that were there before the first event, their blocks tiling them, in the pools
/// that the recording says or that were told from its addresses.
pub(crate) fn segments(trace: &Trace, told: Option<&[MempoolId]>) -> Vec<SegmentSnapshot> {
    let (config, sizes) = (config_of(trace), InitialSizes::new(trace));
    let segments = trace.initial.segments.iter().enumerate();
    let pool_of = |index: usize| told.map(|pools| pools[index]);
    segments
        .map(|(index, segment)| {
            let pool = pool_of(index).or(segment.pool).unwrap_or_default();
            SegmentSnapshot {
                pool,
                ..picture(segment, &trace.initial.blocks, &sizes, &config)
            }
        })
        .collect()
}

fn picture(
    segment: &InitialSegment,
    blocks: &[InitialBlock],
    sizes: &InitialSizes,
    config: &CachingConfig,
) -> SegmentSnapshot {
    let end = segment.address + segment.size;
    let first = blocks.partition_point(|block| block.address < segment.address);
    let count = blocks[first..].partition_point(|block| block.address < end);
    let blocks = &blocks[first..first + count];
    let mut tiles = Vec::new();
    let mut at = segment.address;
    for (index, block) in blocks.iter().enumerate() {
        push_gap(&mut tiles, segment, at, block.address);
        let room = blocks.get(index + 1).map_or(end, |next| next.address);
        let room = room.offset_from(block.address);
        let size = sizes.of(first + index, block, (segment, room), config);
        let (address, requested) = (block.address, block.requested);
        tiles.push(BlockSnapshot {
            address,
            size,
            requested,
            status: BlockStatus::Allocated,
        });
        at = address + size;
    }
    push_gap(&mut tiles, segment, at, end);
    SegmentSnapshot {
        address: segment.address,
        size: segment.size,
        stream: segment.stream,
        pool: MempoolId::DEFAULT,
        is_large: segment.is_large,
        is_expandable: segment.is_expandable,
        blocks: tiles,
    }
}

/// Adds the bytes from `start` to `end`: to the block before them, where they are the end of a block
/// whose exact size the recording does not say, or as a free block.
fn push_gap(
    tiles: &mut Vec<BlockSnapshot>,
    segment: &InitialSegment,
    start: DeviceAddress,
    end: DeviceAddress,
) {
    if start >= end {
        return;
    }
    let size = end.offset_from(start);
    let unsplit = segment.is_large && !segment.is_expandable && size <= UNSPLIT_END_MAX;
    match tiles.last_mut().filter(|_| unsplit) {
        Some(last) => last.size += size,
        None => tiles.push(BlockSnapshot {
            address: start,
            size,
            requested: Bytes::ZERO,
            status: BlockStatus::Inactive,
        }),
    }
}
