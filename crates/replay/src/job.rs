//! A job to replay, and how to replay it.

use lowtide_core::Bytes;
use lowtide_trace::Trace;

use crate::compile;
use crate::program::Program;

/// How to replay.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Options {
    /// The memory of the device, and the allocator's limit; `None` for no end.
    pub capacity: Option<Bytes>,
    /// Whether the driver does what was recorded and events are compared with the recorded ones.
    pub verify: bool,
    /// The most points of [`Outcome::timeline`](crate::Outcome::timeline); 0 for none.
    pub timeline_points: usize,
}

/// A recording made ready to be replayed, any number of times and in several threads at once.
#[derive(Debug)]
pub struct Job<'a> {
    pub(crate) trace: &'a Trace,
    pub(crate) program: Program,
    pub(crate) peak_live_bytes: Bytes,
}

impl<'a> Job<'a> {
    /// Returns the recording as steps. Time and memory are linear in the events.
    pub fn new(trace: &'a Trace) -> Job<'a> {
        Job {
            trace,
            program: compile::compile(trace),
            peak_live_bytes: trace.peak_live_bytes(),
        }
    }
}
