//! lowtide's own trace format: about a tenth of a pickle's size, and written while the job runs.
//!
//! A file is a header and then sections. Each section is complete in itself: the file of a job that was killed
//! lacks only its last section. All fixed-width numbers are little-endian.
//!
//! ```text
//! header   8 bytes  "lowtide\n"
//!          2 bytes  the version of the format, 5; a reader refuses higher ones
//! section  1 byte   what it holds, below; a reader skips those it does not know
//!          4 bytes  the length of the payload, 64 MiB at most
//!          …        the payload
//!          4 bytes  the CRC-32 (as in gzip) of the payload
//! ```
//!
//! In payloads, *n* is an unsigned number as LEB128: seven bits to a byte, lowest first, the high bit set in all
//! but the last. *z* is a signed number, as the *n* of `(z << 1) ^ (z >> 63)`. A text is an *n*, its length in
//! bytes, and UTF-8. A payload ends with its last item: items that repeat do so to the end.
//!
//! | section | payload |
//! |---|---|
//! | `S` strings | text, repeated; numbered from 0 through the file |
//! | `F` frames | *n* function (number of a string), *n* file (likewise), *n* line, repeated; numbered from 0 |
//! | `K` stacks | *n* count of frames, then the *n* of each, innermost first; repeated; numbered from 1, 0 is the empty stack |
//! | `N` notes | *n* compile_context (number of a string + 1, 0 if not recorded), *n* user_metadata (likewise), repeated; numbered from 1, 0 is the empty note |
//! | `D` device | *n* its number. The sections below are about the device named last; a device may be named again to continue it |
//! | `G` strategy | text: lowtide's strategy and its options, as `NAME:CONF` or `NAME`; missing if PyTorch's own allocator was recorded |
//! | `C` settings | text `PYTORCH_CUDA_ALLOC_CONF`; 1 byte which of the next three are recorded (1, 2, 4), and in its bits from 8 on, two bits of free_block_order (0 not recorded, 1 address, 2 block_age, 3 segment_age); *n* max_split_size + 1, 0 if unlimited; 8 bytes garbage_collection_threshold, an IEEE 754 double; 1 byte expandable_segments, 0 or 1; *n* MiB, *n* roundup_power2_divisions from there, repeated |
//! | `E` events | events, below, repeated |
//! | `A` annotations | *n* name (number of a string), 1 byte stage (0 start, 1 end), *z* time_us, repeated |
//! | `I` held before | the segments before the first event, laid out as `M`. Each event-by-event recording of lowtide's own has this section; an empty payload means that there were none |
//! | `P` paused before | which of those segments were paused: events, as in `E` |
//! | `R` regions | the tags of lowtide's regions: *n* and *n* pool, *n* tag (number of a string), repeated; a pool that comes twice has the later one |
//! | `M` segments | the segments at the end, repeated: *n* address, *n* size, *n* stream, *n* and *n* pool, 1 byte flags (1 large, 2 expandable), *n* count of blocks, then for each block: *n* size, *n* requested, 1 byte state (0 allocated, 1 pending free, 2 inactive), *n* stack |
//! | `e` host's events | the events of pinned host memory, laid out as `E`; a reader may skip them, as they are of no device |
//! | `m` host's segments | the segments of pinned host memory at the end, laid out as `M` |
//! | `Z` end | *n* for each device in the order of their `D`: the number of entries in its recording that are no events. Missing if the recorder was killed |
//!
//! An event starts with a byte: the number of its action in the lower four bits (the order of [`Action::ALL`]), and
//! these bits:
//! - 16 if its address and size are those of the event before,
//! - 32 if its stream and pool are those of the event before,
//! - 64 if its stack is that of the event before,
//! - 128 if its note is *not* that of the event before.
//!
//! The fields that differ follow: *z* address minus that before; *n* size; *n* stream; 1 byte whether the pool is
//! known, and if so *n* and *n* pool; *n* stack; *n* note. *z* time minus that before always follows. Before the
//! first event of a section, everything is 0 and the pool is not known.
//!
//! Version 1 had no notes, and no byte in `C` for which settings are recorded. Version 2 had no `G` and no `I`, and
//! named each device once. Version 3 had no events of regions that are paused and resumed. Version 4 had no
//! annotations of blocks.
//!
//! [`Action::SegmentPaused`] and [`Action::SegmentResumed`] are events of whole segments. Their note has the
//! region's tag as its `user_metadata`. The pauses of segments that were paused before the first event are in `P`,
//! which is missing if there are none. A segment that is released while it is paused has no resume before.
//!
//! [`Action::Annotate`] is an event of a block. Its note has the program's text as its `user_metadata`.
//!
//! A file has either `I` or `M` for each device. `M` is written after the last event. The segments and blocks
//! before the first event then follow from the events and `M`, as for PyTorch's snapshots. `I` is written before
//! the first event. The segments at the end then follow from `I` and the events, wherever the file ends, so a
//! truncated file is complete up to there. The sizes of blocks are then those of their requests, rounded up.

mod payload;
mod read;
mod stream;
mod write;

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};

use crate::model::TraceEvent;
use crate::notes::NoteId;
use crate::stacks::StackId;

pub(crate) use read::{is_compact, read};
pub use stream::StreamWriter;
pub use write::write_compact;

const MAGIC: &[u8; 8] = b"lowtide\n";
const VERSION: u16 = 5;

/// The longest section: far longer than any that is written.
const SECTION_BYTES_MAX: u64 = 64 << 20;

/// The kinds of sections, by their first byte.
mod section {
    pub(super) const STRINGS: u8 = b'S';
    pub(super) const FRAMES: u8 = b'F';
    pub(super) const STACKS: u8 = b'K';
    pub(super) const NOTES: u8 = b'N';
    pub(super) const DEVICE: u8 = b'D';
    pub(super) const SETTINGS: u8 = b'C';
    pub(super) const STRATEGY: u8 = b'G';
    pub(super) const EVENTS: u8 = b'E';
    pub(super) const ANNOTATIONS: u8 = b'A';
    pub(super) const HELD_BEFORE: u8 = b'I';
    pub(super) const PAUSED_BEFORE: u8 = b'P';
    pub(super) const REGIONS: u8 = b'R';
    pub(super) const SEGMENTS: u8 = b'M';
    pub(super) const HOST_EVENTS: u8 = b'e';
    pub(super) const HOST_SEGMENTS: u8 = b'm';
    pub(super) const END: u8 = b'Z';
}

/// The first byte of an event.
mod event_flags {
    pub(super) const ACTION: u8 = 15;
    pub(super) const SAME_PLACE: u8 = 16;
    pub(super) const SAME_STREAM: u8 = 32;
    pub(super) const SAME_STACK: u8 = 64;
    pub(super) const OTHER_NOTE: u8 = 128;
}

/// Which settings are recorded.
mod settings_flags {
    pub(super) const MAX_SPLIT_SIZE: u8 = 1;
    pub(super) const GARBAGE_COLLECTION_THRESHOLD: u8 = 2;
    pub(super) const EXPANDABLE_SEGMENTS: u8 = 4;
    /// Two bits: zero if the order is not recorded, otherwise one more than its index in
    /// [`FreeBlockOrder::ALL`](lowtide_core::FreeBlockOrder::ALL).
    pub(super) const FREE_BLOCK_ORDER_SHIFT: u32 = 3;
    pub(super) const FREE_BLOCK_ORDER_MASK: u8 = 3;
}

/// The first byte of a segment.
mod segment_flags {
    pub(super) const LARGE: u8 = 1;
    pub(super) const EXPANDABLE: u8 = 2;
}

/// The event that the first event of a section is relative to.
const BEFORE_FIRST: TraceEvent = TraceEvent {
    event: Event {
        action: Action::Alloc,
        pool: MempoolId::DEFAULT,
        address: DeviceAddress::NULL,
        size: Bytes::ZERO,
        stream: Stream::DEFAULT,
    },
    time_us: 0,
    stack: StackId::NONE,
    pool_known: false,
    note: NoteId::NONE,
};
