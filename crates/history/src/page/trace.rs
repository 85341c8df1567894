//! The input of a report for one trace.

use lowtide_replay::Outcome;
use lowtide_trace::Trace;

use crate::growth::Leaks;
use crate::history::History;
use crate::sizes::BlockSizes;

/// A trace as a report shows it.
#[derive(Clone, Copy, Debug)]
pub struct PageTrace<'a> {
    /// Its name, usually that of the file.
    pub name: &'a str,
    /// The recording.
    pub trace: &'a Trace,
    /// Whether it is pinned host memory, and of no device.
    pub is_host: bool,
    /// The sizes of its blocks, from which its history was made.
    pub sizes: &'a BlockSizes,
    /// Its history.
    pub history: &'a History,
    /// Its replays with other allocators: each allocator's name, and the outcome with a timeline.
    pub replayed: &'a [(String, &'a Outcome)],
    /// Notes on these replays. Each is a sentence without its first capital and its full stop.
    pub replay_notes: &'a [String],
    /// Its memory growth.
    pub leaks: &'a Leaks,
    /// Whether the end of the recording is missing.
    pub is_cut_off: bool,
    /// This trace's part of its file's size, in bytes, and that of each trace that follows. They share the rest of
    /// the page by these sizes, because no trace needs more there.
    pub lengths: &'a [u64],
}
