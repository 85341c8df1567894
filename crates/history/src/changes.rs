//! Changes of the fragmentation from event to event, each distinct change stored once.

use lowtide_core::Cause;

/// The parts of a [`Fragmentation`](lowtide_core::Fragmentation): live, and the causes.
pub(crate) const FRAGMENTATION_PARTS: usize = 1 + Cause::ALL.len();

/// Changes of a fragmentation's parts by instant. A job repeats the same few changes.
#[derive(Debug, Default)]
pub(crate) struct FragmentationChanges {
    /// The instants with a change, in order.
    pub(crate) instants: Vec<u32>,
    /// The number of the change at each instant.
    pub(crate) numbers: Vec<u32>,
    /// The distinct changes: how much each part grows.
    pub(crate) distinct: Vec<[i64; FRAGMENTATION_PARTS]>,
}
