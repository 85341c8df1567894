//! PyTorch's memory snapshots.

mod pauses;
mod read;
mod records;
mod write;

pub use pauses::{PausedSegment, RegionPool, add_regions};
pub(crate) use read::read;
pub use write::write_pickle;
