//! The results as JSON, for programs. The names of the keys are an interface.

use lowtide_replay::Outcome;
use lowtide_trace::escape_in_json;
use serde::Serialize;

use crate::job::Job;
use crate::replays::Failure;

/// The JSON that `lowtide replay --json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    /// The job.
    pub(crate) trace: &'a Job,
    /// The results, in the order in which the strategies were named.
    pub(crate) results: Vec<ResultRow<'a>>,
}

/// An outcome, or the error instead of one.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum ResultRow<'a> {
    Outcome {
        #[serde(flatten)]
        outcome: &'a Outcome,
        error: Option<String>,
    },
    Failure {
        strategy: &'static str,
        config: String,
        completed: bool,
        error: String,
    },
}

impl<'a> ResultRow<'a> {
    /// Returns the JSON row of `result`.
    pub(crate) fn new(result: &'a Result<Outcome, Box<Failure>>) -> ResultRow<'a> {
        match result {
            Ok(outcome) => ResultRow::Outcome {
                outcome,
                error: None,
            },
            Err(failure) => ResultRow::Failure {
                strategy: failure.config.name().as_str(),
                config: failure.config.to_conf(),
                completed: false,
                error: failure.error.to_string(),
            },
        }
    }
}

/// Returns `value` as indented JSON and a line feed, without characters that a terminal interprets.
pub(crate) fn text(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(escape_in_json(&serde_json::to_string_pretty(value)?) + "\n")
}

/// Returns `value` as [`text`] does, in one line.
pub(crate) fn line(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(escape_in_json(&serde_json::to_string(value)?) + "\n")
}
