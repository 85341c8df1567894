//! PyTorch's memory snapshots.

mod read;
mod records;

pub(crate) use read::read;
