//! What happened, as plain data: the same records whether they come from this allocator or from a
//! recording of PyTorch's.

use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// What an [`Event`] says. Up to [`Action::OutOfMemory`] the names are PyTorch's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Action {
    /// A block was handed out. `size` is the size that was asked for, unrounded.
    Alloc,
    /// The program let go of a block. `size` is the size that was asked for.
    FreeRequested,
    /// A block may be reused: at once after [`Action::FreeRequested`], or when every stream that
    /// used the block has passed its event.
    FreeCompleted,
    /// A segment came from the driver.
    SegmentAlloc,
    /// A segment went back to the driver.
    SegmentFree,
    /// Physical memory was mapped into an expandable segment.
    SegmentMap,
    /// Physical memory left an expandable segment.
    SegmentUnmap,
    /// A snapshot was taken. `size` is the sum of the active bytes.
    Snapshot,
    /// A request could not be served. `size` is the rounded request, and `address` holds the bytes
    /// that were free on the device, as PyTorch's own record has it.
    OutOfMemory,
    /// The memory of a segment left the device, as its region was paused. The segment stays, and so do its
    /// blocks. No allocator of this crate says so: who pauses does.
    SegmentPaused,
    /// The memory of a segment that was paused is back.
    SegmentResumed,
}

impl Action {
    /// Every action, in the order of their numbers.
    pub const ALL: [Action; 11] = [
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::Snapshot,
        Action::OutOfMemory,
        Action::SegmentPaused,
        Action::SegmentResumed,
    ];

    /// Returns the name that PyTorch's snapshots give the action, which know of no pauses.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::OutOfMemory => "oom",
            Action::SegmentPaused => "segment_paused",
            Action::SegmentResumed => "segment_resumed",
        }
    }

    /// Returns whether the event concerns memory that is away for a while: to an allocator nothing happened.
    pub const fn is_pause(self) -> bool {
        matches!(self, Action::SegmentPaused | Action::SegmentResumed)
    }

    /// Returns whether the event concerns memory between the allocator and the driver.
    pub const fn is_segment(self) -> bool {
        matches!(
            self,
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap
        )
    }
}

/// One thing that an allocator did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// The pool it happened in; [`MempoolId::DEFAULT`] also where a recording does not say.
    pub pool: MempoolId,
    /// Where. For [`Action::OutOfMemory`], the bytes free on the device.
    pub address: DeviceAddress,
    /// How much.
    pub size: Bytes,
    /// The stream that the block or segment belongs to.
    pub stream: Stream,
}
