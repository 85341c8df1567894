//! Replays a recording through an allocator: what would this job have taken?
//!
//! A [`Job`] is a [`Trace`] turned into steps; [`Job::replay`] takes them with any strategy on the
//! simulator and returns an [`Outcome`]. With [`Options::verify`] the simulated driver does what the
//! recorded one did, and every event is compared with the recorded one: the proof that `caching` is
//! PyTorch's allocator.
//!
//! ```no_run
//! use lowtide_core::Config;
//! use lowtide_replay::{Job, Options};
//!
//! let snapshot = lowtide_trace::read("snapshot.pickle.zst".as_ref())?;
//! let job = Job::new(&snapshot.traces[0]);
//! let config: Config = "caching:expandable_segments:True".parse()?;
//! let outcome = job.replay(&config, &Options::default(), &())?;
//! println!("{} held at most, {:.3} times what was live", outcome.peak_reserved_bytes, outcome.reserved_ratio);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Not modelled: a job that would have allocated otherwise under another allocator, and the time of its
//! kernels.
//!
//! The path of one replay, downward: [`Job::new`] → `compile.rs` (the recording as the steps of
//! `program.rs`; `pools.rs` and `survey.rs` tell what it does not say) → [`Job::replay`] → `run.rs`
//! (takes them) → [`lowtide_core::DeviceAllocator`] → [`lowtide_sim::SimDriver`], with addresses from
//! `script.rs` and the comparison in `verify.rs`. What the recording does not say and only a replay shows is
//! searched for before: the limit (`limit.rs`), and which segments or blocks are older (`ages.rs`).
#![forbid(unsafe_code)]

mod ages;
mod apart;
mod card;
mod compile;
mod extents;
mod initial;
mod initial_sizes;
mod limit;
mod occupancy;
mod outcome;
mod pages;
mod pools;
mod program;
mod run;
mod script;
mod survey;
mod verify;

use std::fmt;

use lowtide_core::{AllocError, Bytes, Config};
use lowtide_trace::Trace;

pub use outcome::{Difference, Outcome, Point, Verified};
use program::Program;
use run::Run;

/// How to replay.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Options {
    /// The memory of the device, and the allocator's limit; `None` for no end.
    pub capacity: Option<Bytes>,
    /// Whether the driver does what was recorded and events are compared with the recorded ones.
    pub verify: bool,
    /// The most points of [`Outcome::timeline`]; 0 for none.
    pub timeline_points: usize,
}

/// Hears how far a replay is. `()` does not listen.
pub trait Progress: Sync {
    /// Says that `events` more recorded events have been replayed.
    fn advance(&self, events: u64);

    /// Says that `events` will be replayed besides those of the recording: what it does not say is found by replaying it,
    /// a limit up to some fifteen times, the ages of what was there before up to two hundred.
    fn expect(&self, events: u64) {
        let _ = events;
    }
}

impl Progress for () {
    fn advance(&self, _events: u64) {}
}

/// Why a replay could not go on. A job that does not fit is no error.
#[derive(Clone, PartialEq, Debug)]
pub struct ReplayError {
    event: usize,
    error: AllocError,
    /// What it did otherwise than was recorded before that.
    difference: Option<Box<Difference>>,
}

impl ReplayError {
    fn at(event: usize, error: AllocError) -> ReplayError {
        ReplayError {
            event,
            error,
            difference: None,
        }
    }

    /// Returns the error of a replay that did otherwise than was recorded before: what follows is of its own making.
    fn after(self, difference: Option<Difference>) -> ReplayError {
        ReplayError {
            difference: difference.map(Box::new),
            ..self
        }
    }
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the replay broke off at event {}: {}",
            self.event, self.error
        )?;
        match &self.difference {
            Some(difference) => write!(f, "; first difference: {difference}"),
            None => Ok(()),
        }
    }
}

/// Without a source: the sentence says what the allocator said.
impl std::error::Error for ReplayError {}

/// A recording made ready to be replayed, any number of times and in several threads at once.
#[derive(Debug)]
pub struct Job<'a> {
    trace: &'a Trace,
    program: Program,
    peak_live_bytes: Bytes,
}

impl<'a> Job<'a> {
    /// Returns the recording as steps. Time and memory are linear in the events.
    pub fn new(trace: &'a Trace) -> Job<'a> {
        Job {
            trace,
            program: Program::new(trace),
            peak_live_bytes: trace.peak_live_bytes(),
        }
    }

    /// Replays the recording with the strategy that `config` names and returns what became of the
    /// job. Time and memory are linear in the events.
    ///
    /// # Errors
    ///
    /// When the simulated device fails otherwise than by running out of memory: the recording
    /// contradicts itself in a way that reading it did not show, or the allocator is at fault.
    pub fn replay(
        &self,
        config: &Config,
        options: &Options,
        progress: &dyn Progress,
    ) -> Result<Outcome, ReplayError> {
        let mut options = *options;
        let limit = match options {
            Options {
                verify: true,
                capacity: None,
                ..
            } => limit::search(self, config, progress),
            _ => None,
        };
        options.capacity = options.capacity.or(limit);
        let ages = ages::search(self, config, &options, progress);
        let mut outcome = Run::new(self, config, &options, &ages).finish(config, progress)?;
        if let Some(verified) = &mut outcome.verified {
            verified.limit_bytes = limit;
            verified.told_pools = self.program.told_pools;
        }
        Ok(outcome)
    }

    /// Returns how long each block was, rounding included: first those that were there before the first
    /// event, by address, then one for each [`Action::Alloc`](lowtide_core::Action::Alloc). `None` where
    /// `config`, the job's own, does not lead to the recorded addresses. Time and memory as for
    /// [`replay`](Job::replay).
    ///
    /// # Errors
    ///
    /// As for [`replay`](Job::replay).
    pub fn block_sizes(
        &self,
        config: &Config,
        progress: &dyn Progress,
    ) -> Result<Option<Vec<Bytes>>, ReplayError> {
        let options = Options {
            capacity: limit::search(self, config, progress),
            verify: true,
            timeline_points: 0,
        };
        let ages = ages::search(self, config, &options, progress);
        Run::new(self, config, &options, &ages).block_sizes(progress)
    }
}
