//! PyTorch's memory snapshots.

mod json;
mod pauses;
mod read;
mod records;
mod write;

pub use pauses::{PausedSegment, RegionPool, add_regions};
pub(crate) use read::{read, read_json};
pub use write::write_pickle;
