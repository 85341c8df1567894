//! A snapshot of all memory of an allocator.

use std::ops::Range;

use crate::block::{Block, BlockState, SegmentId};
use crate::segment::{Heap, Segment};
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// Whether a block is in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockStatus {
    /// The program holds it.
    Allocated,
    /// The program freed it, but a stream that used it has not passed its event yet.
    PendingFree,
    /// It can be allocated, or its segment released.
    Inactive,
}

impl BlockStatus {
    /// Returns the name that PyTorch's snapshots give the state.
    pub const fn name(self) -> &'static str {
        match self {
            BlockStatus::Allocated => "active_allocated",
            BlockStatus::PendingFree => "active_pending_free",
            BlockStatus::Inactive => "inactive",
        }
    }
}

/// A block in a [`SegmentSnapshot`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSnapshot {
    /// Where it starts.
    pub address: DeviceAddress,
    /// How long it is, rounding included.
    pub size: Bytes,
    /// The requested size; for an inactive block, that of its last holder, or zero.
    pub requested: Bytes,
    /// Whether it is in use.
    pub status: BlockStatus,
}

/// A contiguous mapped range of device memory in a snapshot: a segment, or a mapped part of an
/// expandable one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentSnapshot {
    /// Where it starts.
    pub address: DeviceAddress,
    /// How long it is.
    pub size: Bytes,
    /// The stream that its blocks belong to.
    pub stream: Stream,
    /// The pool that it belongs to.
    pub pool: MempoolId,
    /// Whether it serves large requests.
    pub is_large: bool,
    /// Whether it is a part of an expandable segment.
    pub is_expandable: bool,
    /// Its blocks: they tile it, in the order of their addresses.
    pub blocks: Vec<BlockSnapshot>,
}

impl SegmentSnapshot {
    /// Returns the allocated bytes.
    pub fn allocated_bytes(&self) -> Bytes {
        self.sum(
            |block| block.status == BlockStatus::Allocated,
            |block| block.size,
        )
    }

    /// Returns the active bytes: of blocks that are allocated or pending.
    pub fn active_bytes(&self) -> Bytes {
        self.sum(
            |block| block.status != BlockStatus::Inactive,
            |block| block.size,
        )
    }

    /// Returns the requested bytes of the blocks that are allocated or pending.
    pub fn requested_bytes(&self) -> Bytes {
        self.sum(
            |block| block.status != BlockStatus::Inactive,
            |block| block.requested,
        )
    }

    fn sum(
        &self,
        counts: impl Fn(&BlockSnapshot) -> bool,
        bytes: impl Fn(&BlockSnapshot) -> Bytes,
    ) -> Bytes {
        self.blocks
            .iter()
            .filter(|block| counts(block))
            .map(bytes)
            .sum()
    }
}

/// Returns the snapshot of a heap. Free space that a strategy does not keep as blocks in the table is shown as
/// inactive blocks.
pub(crate) fn of_heap(heap: &Heap) -> Vec<SegmentSnapshot> {
    let blocks = heap.blocks.by_segment();
    let mut snapshots = Vec::new();
    for (id, segment) in heap.segments.iter() {
        let first = blocks.partition_point(|&(segment, _)| segment < id);
        let count = blocks[first..].partition_point(|&(segment, _)| segment == id);
        let blocks = &blocks[first..first + count];
        let ranges = if heap.pages.contains(id) {
            shown_ranges(heap, id, blocks)
        } else {
            split_at_unmapped(segment, blocks)
        };
        snapshots.extend(ranges.into_iter().map(|(range, blocks)| {
            let domain = heap.domains.domain(segment.domain);
            SegmentSnapshot {
                address: range.start,
                size: range.end.offset_from(range.start),
                stream: domain.stream,
                pool: heap.domains.pool(domain.pool).id,
                is_large: segment.kind == SizeKind::Large,
                is_expandable: segment.is_expandable(),
                blocks: tile(range, blocks),
            }
        }));
    }
    snapshots.sort_unstable_by_key(|segment| segment.address);
    snapshots
}

/// A block and its segment.
type PlacedBlock = (SegmentId, Block);

/// Returns the mapped ranges of a segment, each with its blocks: all of it for a plain segment.
fn split_at_unmapped<'a>(
    segment: &Segment,
    blocks: &'a [PlacedBlock],
) -> Vec<(Range<DeviceAddress>, &'a [PlacedBlock])> {
    if !segment.is_expandable() {
        return vec![(segment.address..segment.address + segment.size, blocks)];
    }
    let mapped = blocks.split(|(_, block)| block.state == BlockState::Unmapped);
    let ranges = mapped.filter_map(|blocks| {
        let ((_, first), (_, last)) = (blocks.first()?, blocks.last()?);
        Some((first.address..last.end(), blocks))
    });
    ranges.collect()
}

/// Returns the ranges of a segment whose pages show a frame, each with the blocks that have bytes in it.
fn shown_ranges<'a>(
    heap: &Heap,
    id: SegmentId,
    blocks: &'a [PlacedBlock],
) -> Vec<(Range<DeviceAddress>, &'a [PlacedBlock])> {
    let page_size = heap.pages.page_size();
    let pages: Vec<DeviceAddress> = heap.pages.shown_in(id).map(|(start, _)| start).collect();
    let runs = pages.chunk_by(|&before, &after| before + page_size == after);
    let ranges = runs.map(|run| {
        let range = run[0]..run[run.len() - 1] + page_size;
        let first = blocks.partition_point(|(_, block)| block.end() <= range.start);
        let end = blocks.partition_point(|(_, block)| block.address < range.end);
        (range, &blocks[first..end])
    });
    ranges.collect()
}

/// Returns blocks that cover a range: those given, cut to it, and inactive ones between them.
fn tile(range: Range<DeviceAddress>, blocks: &[PlacedBlock]) -> Vec<BlockSnapshot> {
    let mut tiles = Vec::with_capacity(blocks.len());
    let mut end = range.start;
    let gap = |from: DeviceAddress, to: DeviceAddress| {
        (from < to).then(|| BlockSnapshot {
            address: from,
            size: to.offset_from(from),
            requested: Bytes::ZERO,
            status: BlockStatus::Inactive,
        })
    };
    for (_, block) in blocks {
        let start = block.address.max(range.start);
        tiles.extend(gap(end, start));
        tiles.push(BlockSnapshot {
            address: start,
            size: block.end().min(range.end).offset_from(start),
            requested: block.requested,
            status: match block.state {
                BlockState::Allocated => BlockStatus::Allocated,
                BlockState::Pending => BlockStatus::PendingFree,
                BlockState::Free | BlockState::Recent | BlockState::Unmapped => {
                    BlockStatus::Inactive
                }
            },
        });
        end = block.end().min(range.end);
    }
    debug_assert!(end <= range.end, "blocks lie in their segment");
    tiles.extend(gap(end, range.end));
    tiles
}
