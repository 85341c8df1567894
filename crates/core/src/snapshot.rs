//! A picture of everything that an allocator holds.

use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// Whether a block is in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockStatus {
    /// The program holds it.
    Allocated,
    /// The program let go of it, and a stream that used it has not passed its event yet.
    PendingFree,
    /// It can be handed out, or its segment returned.
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
    /// What was asked for; for an inactive block, what its last holder asked for, or zero.
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
    /// Returns the bytes of the blocks that the program holds.
    pub fn allocated_bytes(&self) -> Bytes {
        self.sum(
            |block| block.status == BlockStatus::Allocated,
            |block| block.size,
        )
    }

    /// Returns the bytes of the blocks that are held or wait for an event.
    pub fn active_bytes(&self) -> Bytes {
        self.sum(
            |block| block.status != BlockStatus::Inactive,
            |block| block.size,
        )
    }

    /// Returns the bytes that were asked for, over the blocks that are held or wait for an event.
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
