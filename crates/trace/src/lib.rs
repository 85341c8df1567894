//! Reads and writes recordings: PyTorch's memory snapshots, and lowtide's own compact format.
//!
//! [`read`] accepts both formats, plain or compressed with zstd, gzip, xz or bzip2. It detects format and
//! compression by the file's contents. A snapshot may be:
//! - a pickle by `torch.cuda.memory._dump_snapshot` (torch 2.1 to 2.15) or by C++'s `_memory_snapshot_pickled`,
//! - JSON, a file of `torch.save`, or a page of PyTorch's viewer,
//! - a list of several snapshots.
//!
//! Reading never executes a pickle's code. [`write_pickle`] writes a snapshot for PyTorch's viewer.
//! [`write_compact`] writes a file several times smaller. A [`StreamWriter`] writes that format while the job runs.
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
//! 1. `source.rs` decompresses the file, buffer by buffer, and `form.rs` detects its format.
//! 2. The stack machine in `pickle` executes the opcodes.
//! 3. `snapshot/records.rs` replaces each completed event, block and frame by a fixed-size record. So no tree of a
//!    million dicts is built.
//! 4. `snapshot/read.rs` collects the records from the few dicts above them.
//! 5. `recover` walks the events backwards from the final segments. This checks the recording and finds the
//!    segments and blocks that existed before its first event. `in_force.rs` infers the settings that the job ran
//!    with.
//!
//! # What a file can cost
//!
//! Reading is limited in memory:
//! - a pickle to 256 MiB plus 4 bytes for each of its bytes (recordings take 1.5 to 2.7),
//! - lowtide's own format to 256 MiB plus 32 bytes for each of its bytes,
//! - a compressed file also to 256 MiB plus 256 bytes for each compressed byte,
//! - every file to 24 GiB.
//!
//! A file may expand to at most 64 MiB plus 1024 times its size. A length in a file allocates nothing by itself. A
//! string has at most 16 MiB, a section of lowtide's own format at most 64 MiB. Each item of a section is counted
//! before it is kept. Nothing recurses, and an object with many references is processed once.
#![forbid(unsafe_code)]

mod block_stacks;
mod budget;
mod compact;
mod error;
pub mod file_names;
mod form;
mod frame_moves;
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

/// Returns the recording in the file at `path`: a PyTorch snapshot or lowtide's own format, plain or compressed.
///
/// Linear time in the decompressed size. The result takes 64 bytes of memory per event.
///
/// # Errors
///
/// If the file cannot be read, is truncated or damaged, is not a recording, wants to run code, contradicts itself,
/// or would take far more memory than its size justifies. The error names the file.
pub fn read(path: &Path) -> Result<Snapshot, TraceError> {
    File::open(path)
        .map_err(TraceError::from)
        .and_then(read_from)
        .map_err(|error| error.in_file(path))
}

/// Returns the recording in the bytes of `reader`, like [`read`].
///
/// `reader` needs no buffer of its own.
///
/// # Errors
///
/// Like [`read`].
pub fn read_from(reader: impl Read) -> Result<Snapshot, TraceError> {
    form::read(&mut Input::open(reader)?)
}
