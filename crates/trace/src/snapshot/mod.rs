//! PyTorch's memory snapshots.

mod append;
mod json;
mod pauses;
mod read;
mod records;
mod write;

pub use append::{PausedSegment, add_regions};
pub(crate) use json::PROFILE;
pub use pauses::RegionPool;
pub(crate) use read::{read, read_json};
pub use write::write_pickle;
