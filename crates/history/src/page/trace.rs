//! What a report takes of one trace.

use lowtide_replay::Outcome;
use lowtide_trace::Trace;

use crate::growth::Leaks;
use crate::history::History;
use crate::sizes::BlockSizes;

/// A trace as a report shows it.
#[derive(Clone, Copy, Debug)]
pub struct PageTrace<'a> {
    /// Its name, mostly that of the file.
    pub name: &'a str,
    /// What was recorded.
    pub trace: &'a Trace,
    /// Whether it is the host's pinned memory and no device's.
    pub is_host: bool,
    /// The sizes of its blocks, with which its history was made.
    pub sizes: &'a BlockSizes,
    /// Its history.
    pub history: &'a History,
    /// Its replays with other allocators: each allocator's name, and the outcome with a timeline.
    pub replayed: &'a [(String, Outcome)],
    /// Notes on these replays, each a sentence without its capital and its full stop.
    pub replay_notes: &'a [String],
    /// What grew in it.
    pub leaks: &'a Leaks,
    /// Whether the end of the recording is missing.
    pub is_cut_off: bool,
    /// The stored sizes, in bytes, of this trace and of each that follows. They share what is left of the page by
    /// these, as none needs more there.
    pub lengths: &'a [u64],
}
