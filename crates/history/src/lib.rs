//! Where the memory of a recorded job went.
//!
//! [`History`] is one walk over a [`Trace`](lowtide_trace::Trace): every block's life, every segment's,
//! and at every instant what is reserved, what is live, and by [`Cause`](lowtide_core::Cause) why the
//! rest is not. What regions had paused was off the device: it is neither reserved nor live meanwhile, and told
//! beside both. Recordings say what was asked for and not how long the blocks were; [`BlockSizes`] finds
//! that out.
//!
//! ```no_run
//! use lowtide_history::{BlockSizes, History};
//!
//! let snapshot = lowtide_trace::read("snapshot.pickle.zst".as_ref())?;
//! let trace = &snapshot.traces[0];
//! let history = History::new(trace, &BlockSizes::of(trace, &()));
//! println!("{} reserved at most", history.peak_reserved.gap.reserved);
//! # Ok::<(), lowtide_trace::TraceError>(())
//! ```
#![forbid(unsafe_code)]

mod changes;
mod growth;
mod history;
mod levels;
mod numbering;
mod owner;
mod page;
mod placed;
mod sizes;
mod space;
mod walk;

pub use growth::{
    Difference, Doubt, Growth, Kept, Leaks, Site, SiteDifference, StepSource, Steps, TrainingState,
    Trend,
};
pub use history::{Block, CURVE_NAMES, CURVES, History, Moment, Pause, Refusal, SegmentLife};
pub use levels::Levels;
pub use owner::Owner;
pub use page::{FoldedBlocks, PageData, PageSize, PageTrace, stream_text, trace_name};
pub use sizes::BlockSizes;
