//! A job to replay, and the options of a replay.

use lowtide_core::Bytes;
use lowtide_trace::Trace;

use crate::compile;
use crate::program::Program;

/// The options of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Options {
    /// The memory of the device, which is also the allocator's limit; `None` for no limit.
    pub capacity: Option<Bytes>,
    /// Whether the driver does what was recorded, and events are compared with the recorded ones.
    pub verify: bool,
    /// The most points of [`Outcome::timeline`](crate::Outcome::timeline); 0 for no timeline.
    pub timeline_points: usize,
}

/// A compiled recording. It can be replayed any number of times, in several threads at once.
#[derive(Debug)]
pub struct Job<'a> {
    pub(crate) trace: &'a Trace,
    pub(crate) program: Program,
    pub(crate) peak_live_bytes: Bytes,
}

impl<'a> Job<'a> {
    /// Compiles a recording into steps. Time and memory are linear in the number of events.
    pub fn new(trace: &'a Trace) -> Job<'a> {
        Job {
            trace,
            program: compile::compile(trace),
            peak_live_bytes: trace.peak_live_bytes(),
        }
    }
}
