//! PyTorch's memory snapshots.

mod read;
mod records;
mod write;

pub(crate) use read::read;
pub use write::write_pickle;
