//! What there was before a recording's first event, as a picture of segments.

use lowtide_core::{
    BlockSnapshot, BlockStatus, Bytes, CachingConfig, DeviceAddress, MempoolId, SegmentSnapshot,
};
use lowtide_trace::{InitialBlock, InitialSegment, Trace};

use crate::survey::config_of;

/// Free ends of large blocks up to this size are not split off, so no free block is this small.
const UNSPLIT_END_MAX: Bytes = Bytes::mib(1);

/// Returns the segments that were there before the first event, their blocks tiling them, in the pools
/// that the recording says or that were told from its addresses.
pub(crate) fn segments(trace: &Trace, told: Option<&[MempoolId]>) -> Vec<SegmentSnapshot> {
    let config = config_of(trace);
    let segments = trace.initial.segments.iter().enumerate();
    let pool_of = |index: usize| told.map(|pools| pools[index]);
    segments
        .map(|(index, segment)| {
            let pool = pool_of(index).or(segment.pool).unwrap_or_default();
            SegmentSnapshot {
                pool,
                ..picture(segment, &trace.initial.blocks, &config)
            }
        })
        .collect()
}

fn picture(
    segment: &InitialSegment,
    blocks: &[InitialBlock],
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
        let size = size_of(block, segment, room.offset_from(block.address), config);
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

/// Returns how long a block is, of the `room` up to the next: all of it where blocks of its size are not split.
fn size_of(
    block: &InitialBlock,
    segment: &InitialSegment,
    room: Bytes,
    config: &CachingConfig,
) -> Bytes {
    let least = block.size.max(config.block_size(block.requested));
    let splits = config.max_split_size.is_none_or(|max| least < max);
    let takes_all = segment.is_large && !segment.is_expandable && !splits;
    if takes_all { room } else { least.min(room) }
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
