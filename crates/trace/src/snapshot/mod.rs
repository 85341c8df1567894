//! PyTorch's memory snapshots.

mod pauses;
mod read;
mod records;
mod write;

pub use pauses::{PausedSegment, add_pauses};
pub(crate) use read::read;
pub use write::write_pickle;
