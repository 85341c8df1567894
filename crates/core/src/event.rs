//! The events of an allocator, as plain data. The same type serves this allocator and recordings of PyTorch's.

use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// The kind of an [`Event`]. The names are PyTorch's, but for those of pauses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Action {
    /// A block was allocated. `size` is the requested size, unrounded.
    Alloc,
    /// The program freed a block. `size` is the requested size.
    FreeRequested,
    /// A block may be reused: at once after [`Action::FreeRequested`], or when every stream that
    /// used the block has passed its event.
    FreeCompleted,
    /// A segment was allocated by the driver.
    SegmentAlloc,
    /// A segment was released to the driver.
    SegmentFree,
    /// Physical memory was mapped into an expandable segment.
    SegmentMap,
    /// Physical memory was unmapped from an expandable segment.
    SegmentUnmap,
    /// A snapshot was taken. `size` is the number of active bytes.
    Snapshot,
    /// A request could not be served. `size` is the rounded request. As in PyTorch's recordings, `address` holds
    /// the bytes that were free on the device.
    OutOfMemory,
    /// The memory of a segment left the device because its region was paused. The segment and its blocks remain.
    /// No allocator of this crate makes this event; the code that pauses does.
    SegmentPaused,
    /// The memory of a paused segment is on the device again.
    SegmentResumed,
    /// The program attached a text to a block. No allocator of this crate makes this event.
    Annotate,
}

impl Action {
    /// Every action, in the order of their numbers.
    pub const ALL: [Action; 12] = [
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
        Action::Annotate,
    ];

    /// Returns the action's name in PyTorch's snapshots. The names for pause and resume are lowtide's own.
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
            Action::Annotate => "annotate",
        }
    }

    /// Returns whether the event is a pause or a resume. Neither changes an allocator's state.
    pub const fn is_pause(self) -> bool {
        matches!(self, Action::SegmentPaused | Action::SegmentResumed)
    }

    /// Returns whether memory moved between the allocator and the driver.
    pub const fn is_segment(self) -> bool {
        matches!(
            self,
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap
        )
    }
}

/// One event of an allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// The pool of the block or segment; [`MempoolId::DEFAULT`] also if a recording does not name one.
    pub pool: MempoolId,
    /// The address of the block or segment. For [`Action::OutOfMemory`], the bytes free on the device.
    pub address: DeviceAddress,
    /// The size, in bytes, as [`Action`] describes.
    pub size: Bytes,
    /// The stream that the block or segment belongs to.
    pub stream: Stream,
}
