//! Replays of one recording with several configurations.

use std::fmt;

use lowtide_core::Config;
use lowtide_replay::{Job, Options, Outcome, ReplayError};
use rayon::prelude::*;

use crate::progress::Progress;

/// A configuration with which a recording cannot be replayed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) config: Config,
    pub(crate) error: ReplayError,
}

/// The configuration, and why.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.config, self.error)
    }
}

/// Returns the outcome of each configuration, in their order, or why there is none; several are replayed at once.
pub(crate) fn replay_all(
    steps: &Job<'_>,
    configs: &[Config],
    options: &Options,
    progress: &Progress,
) -> Vec<Result<Outcome, Box<Failure>>> {
    let replay = |config: &Config| {
        let outcome = steps.replay(config, options, progress);
        outcome.map_err(|error| {
            let config = config.clone();
            Box::new(Failure { config, error })
        })
    };
    configs.par_iter().map(replay).collect()
}
