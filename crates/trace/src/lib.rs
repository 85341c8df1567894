//! Reads and writes recordings of what an allocator did: PyTorch's memory snapshots, and lowtide's
//! own compact format.
//!
//! [`read`] takes a file of either kind, plain or compressed with zstd, gzip, xz or bzip2, and tells them apart
//! by their contents; snapshots also as JSON, by `torch.save`, in a page of PyTorch's viewer, and several of them. It accepts what `torch.cuda.memory._dump_snapshot` of torch 2.1 to 2.15 and
//! the C++ `_memory_snapshot_pickled` write, and never runs what is in a pickle. [`write_pickle`]
//! writes what PyTorch's viewer shows, [`write_compact`] a file several times smaller, and a [`StreamWriter`] that
//! while the events happen.
//!
//! ```no_run
//! let snapshot = lowtide_trace::read("snapshot.pickle.zst".as_ref())?;
//! for trace in &snapshot.traces {
//!     println!("device {}: {} live bytes at most", trace.device, trace.peak_live_bytes().get());
//! }
//! # Ok::<(), lowtide_trace::TraceError>(())
//! ```
//!
//! # The path of a file
//!
//! `source.rs` decompresses it, buffer by buffer, and `form.rs` tells what it is. The stack machine in `pickle` carries out the
//! opcodes; `snapshot/records.rs` replaces each completed event, block and frame by a fixed record,
//! so that no tree of a million dicts comes into being; `snapshot/read.rs` picks the records up from
//! the few dicts above them; and `recover` walks the events backwards from the final segments,
//! which checks the recording and finds what was there before it began. `in_force.rs` tells which settings
//! the job ran with.
//!
//! # What a file can cost
//!
//! While a pickle is read, memory is limited to 256 MiB plus 4 bytes for each of its bytes, of which
//! recordings take 1.5 to 2.7; for lowtide's own format to 256 MiB plus 32. No file may take more than
//! 24 GiB, nor a compressed one more than 256 MiB plus 256 bytes for each of its bytes, and none may
//! expand beyond 64 MiB plus a thousandfold. Nothing is allocated because a file claims a length. A string has 16 MiB
//! at most, and a section of lowtide's own format 64 MiB. Each item of a section is counted before it is kept. There is
//! no recursion, and what is referred to many times is looked at once.
#![forbid(unsafe_code)]

mod block_stacks;
mod budget;
mod compact;
mod error;
pub mod file_names;
mod form;
mod in_force;
mod job_start;
mod last_events;
mod model;
mod notes;
mod parts;
mod pickle;
mod recover;
mod snapshot;
mod source;
mod stacks;
mod text;
mod writable;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use compact::{StreamWriter, write_compact};
pub use error::TraceError;
pub use in_force::{SegmentKinds, conf_pairs};
pub use job_start::JobStart;
pub use model::{
    AllocatorSettings, Annotation, AnnotationStage, InitialBlock, InitialSegment, InitialState,
    Snapshot, Trace, TraceEvent,
};
pub use notes::{Note, NoteId};
pub use snapshot::{PausedSegment, RegionPool, add_regions, write_pickle};
pub use stacks::{Frame, StackId, StackTable};
pub use text::{OneLine, RecordedStr, RecordedText, ShellWord, escape_in_json};

use source::Input;

/// Returns what the file at `path` recorded: a PyTorch snapshot or a file of lowtide's own, plain or
/// compressed.
///
/// Linear time in the decompressed size; the memory that remains is 64 bytes per event.
///
/// # Errors
///
/// If it cannot be read, is cut off or damaged, is no recording, wants to run code, contradicts
/// itself, or would take far more memory than its size justifies. The error names the file.
pub fn read(path: &Path) -> Result<Snapshot, TraceError> {
    File::open(path)
        .map_err(TraceError::from)
        .and_then(read_from)
        .map_err(|error| error.in_file(path))
}

/// Returns what the bytes of `reader` recorded; like [`read`].
///
/// `reader` needs no buffer of its own.
///
/// # Errors
///
/// As for [`read`].
pub fn read_from(reader: impl Read) -> Result<Snapshot, TraceError> {
    form::read(&mut Input::open(reader)?)
}
