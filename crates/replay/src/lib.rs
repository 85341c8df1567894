//! Replays a recording through an allocator: what would this job have taken?
//!
//! A [`Job`] is a [`Trace`](lowtide_trace::Trace) turned into steps; [`Job::replay`] takes them with any strategy on the
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
//! Not modelled: a job that would have allocated otherwise under another allocator, the time of its kernels, and
//! pauses of regions. Paused memory stays allocated and reserved in a replay, so all strategies are compared on the job
//! without pauses, and a peak may exceed the device.
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
mod job;
mod limit;
mod occupancy;
mod outcome;
mod pages;
mod pools;
mod program;
mod progress;
mod run;
mod script;
mod settings;
mod survey;
mod verify;

use lowtide_core::{Bytes, Config};

pub use job::{Job, Options};
pub use outcome::{Difference, Outcome, Point, ReplayError, Verified};
pub use progress::Progress;
use run::Run;

impl Job<'_> {
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
            verified.inferred_pools = self.program.inferred_pools;
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
