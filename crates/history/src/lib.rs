//! Computes where the memory of a recorded job went.
//!
//! [`History`] walks over a [`Trace`](lowtide_trace::Trace) once. It has the lifetime of every block and segment.
//! For every instant it has the reserved bytes, the live bytes, and the fragmentation: the rest by
//! [`Cause`](lowtide_core::Cause). Paused memory of regions is off the device. It counts as neither reserved nor
//! live, and has a figure of its own. Recordings have requested bytes and not the sizes of blocks; [`BlockSizes`]
//! finds those.
//!
//! ```no_run
//! use lowtide_history::{BlockSizes, History};
//!
//! let snapshot = lowtide_trace::read("snapshot.pickle.zst".as_ref())?;
//! let trace = &snapshot.traces[0];
//! let history = History::new(trace, &BlockSizes::of(trace, &()));
//! println!("{} reserved at most", history.peak_reserved.fragmentation.reserved);
//! # Ok::<(), lowtide_trace::TraceError>(())
//! ```
#![forbid(unsafe_code)]

mod callers;
mod categories;
mod changes;
mod growth;
mod history;
mod labels;
mod levels;
mod numbering;
mod owner;
mod page;
mod placed;
mod presence;
mod sizes;
mod space;
mod walk;

pub use categories::{Categories, Category, Held};
pub use growth::{
    Difference, Doubt, Growth, Leaks, Site, SiteDifference, StepSource, Steps, TrainingState, Trend,
};
pub use history::{Block, CURVE_NAMES, CURVES, History, Kept, Moment, Pause, Refusal, SegmentLife};
pub use levels::Levels;
pub use owner::{Owner, operator_of};
pub use page::{FoldedBlocks, PageData, PageSize, PageTrace, pool_text, stream_text, trace_name};
pub use presence::{Change, Part};
pub use sizes::BlockSizes;
