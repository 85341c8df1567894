//! Replays one recording with several configurations.

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

/// The outcome of a configuration, or why the recording cannot be replayed with it.
pub(crate) type Replayed = Result<Outcome, Box<Failure>>;

/// Writes the configuration and the error.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.config, self.error)
    }
}

/// Returns the outcome or the failure of each configuration, in their order. Several are replayed at once.
pub(crate) fn replay_all(
    steps: &Job<'_>,
    configs: &[Config],
    options: &Options,
    progress: &Progress,
) -> Vec<Replayed> {
    let replay = |config: &Config| {
        let outcome = steps.replay(config, options, progress);
        outcome.map_err(|error| {
            let config = config.clone();
            Box::new(Failure { config, error })
        })
    };
    configs.par_iter().map(replay).collect()
}
