//! The segments and blocks before a recording's first event.

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{
    BlockSnapshot, BlockStatus, Bytes, CachingConfig, DeviceAddress, SegmentSnapshot,
};
use lowtide_trace::{InitialBlock, InitialSegment, Trace};

use crate::initial_sizes::{InitialSizes, UNSPLIT_END_MAX};
use crate::settings::config_of;

/// The state before the first event.
#[derive(Debug, Default)]
pub(crate) struct Initial {
    /// The segments, fully covered by their blocks. Their pools are those in the recording.
    pub(crate) segments: Vec<SegmentSnapshot>,
    /// Free blocks that may be up to [`UNSPLIT_END_MAX`] shorter than they are here. The blocks before them may be
    /// longer: no request was served from these free blocks while the blocks before them were allocated.
    pub(crate) uncertain: BTreeSet<DeviceAddress>,
}

impl Initial {
    /// Reads the events up to the free of the last initial block.
    pub(crate) fn new(trace: &Trace) -> Initial {
        let (config, sizes) = (config_of(trace), InitialSizes::new(trace));
        let mut uncertain = BTreeSet::new();
        let segments = trace.initial.segments.iter();
        let segments = segments.map(|segment| {
            let blocks = &trace.initial.blocks;
            picture(segment, blocks, (&sizes, &config), &mut uncertain)
        });
        Initial {
            segments: segments.collect(),
            uncertain,
        }
    }

    /// Moves the starts of free blocks up by the given bytes, by address, and extends the blocks before them.
    pub(crate) fn shorten(&mut self, by: &BTreeMap<DeviceAddress, Bytes>) {
        for segment in self.segments.iter_mut().filter(|_| !by.is_empty()) {
            for place in 1..segment.blocks.len() {
                if let Some(&end) = by.get(&segment.blocks[place].address) {
                    segment.blocks[place - 1].size += end;
                    segment.blocks[place].address = segment.blocks[place].address + end;
                    segment.blocks[place].size -= end;
                }
            }
        }
    }
}

fn picture(
    segment: &InitialSegment,
    blocks: &[InitialBlock],
    (sizes, config): (&InitialSizes, &CachingConfig),
    uncertain: &mut BTreeSet<DeviceAddress>,
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
        if sizes.may_be_longer(first + index, segment) && room > size + UNSPLIT_END_MAX {
            uncertain.insert(at);
        }
    }
    push_gap(&mut tiles, segment, at, end);
    segment.with_blocks(tiles)
}

/// Adds the bytes from `start` to `end` as a free block. If they can be the unsplit end of a block whose exact size
/// the recording does not say, adds them to the block before them.
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
