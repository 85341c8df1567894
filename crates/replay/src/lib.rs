//! Replays a recording through an allocator: how much memory would this job have needed?
//!
//! A [`Job`] is a [`Trace`](lowtide_trace::Trace) compiled into steps. [`Job::replay`] runs the steps with any
//! strategy on the simulator and returns an [`Outcome`]. With [`Options::verify`] the simulated driver does what
//! the recorded driver did, and every event is compared with the recorded one: the proof that `caching` behaves as
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
//! Not modelled: a job that would have allocated differently under another allocator, the time of its kernels, and
//! pauses of regions. Paused memory stays allocated and reserved in a replay, so all strategies are compared on the
//! job without pauses, and a peak may exceed the device's memory.
//!
//! The path of one replay, downward: [`Job::new`] → `compile.rs` (the recording as the steps of `program.rs`;
//! `pools.rs` and `survey.rs` infer what the recording does not say) → [`Job::replay`] → `run.rs` (runs the steps)
//! → [`lowtide_core::DeviceAllocator`] → [`lowtide_sim::SimDriver`], with addresses from `script.rs` and the
//! comparison in `verify.rs`. Two things can only be found by trial replays, before the replay itself: the job's
//! limit (`limit.rs`), and which segments or blocks are older (`ages.rs`).
#![forbid(unsafe_code)]

mod ages;
mod apart;
mod card;
mod compile;
mod extents;
mod implied_limit;
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

pub use implied_limit::ImpliedLimit;
pub use job::{Job, Options};
pub use outcome::{Difference, Outcome, Point, ReplayError, Verified};
pub use progress::Progress;
use run::Run;

impl Job<'_> {
    /// Replays the recording with the strategy that `config` names and returns the outcome. Time and memory are
    /// linear in the number of events.
    ///
    /// # Errors
    ///
    /// Returns an error if the simulated device fails for another reason than lack of memory. Then the recording
    /// contradicts itself in a way that reading it did not show, or the allocator has a bug.
    pub fn replay(
        &self,
        config: &Config,
        options: &Options,
        progress: &dyn Progress,
    ) -> Result<Outcome, ReplayError> {
        let mut options = *options;
        let mut limit = None;
        if options.verify && options.capacity.is_none() {
            limit = limit::search(self, config, progress);
            options.capacity = limit;
        }
        let ages = ages::search(self, config, &options, progress);
        let mut outcome = Run::new(self, config, &options, &ages).finish(config, progress)?;
        if let Some(verified) = &mut outcome.verified {
            verified.limit_bytes = limit;
            verified.inferred_pools = self.program.inferred_pools;
        }
        Ok(outcome)
    }

    /// Returns the size of each block, rounding included: first the blocks that were allocated before the first
    /// event, by address, then one for each [`Action::Alloc`](lowtide_core::Action::Alloc). Returns `None` if
    /// `config`, the job's own, does not lead to the recorded addresses. Time and memory are those of
    /// [`replay`](Job::replay).
    ///
    /// # Errors
    ///
    /// Those of [`replay`](Job::replay).
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
