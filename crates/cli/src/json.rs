//! The results as JSON, for programs. The names of the keys are an interface.

use lowtide_core::Bytes;
use lowtide_replay::{Outcome, Verified};
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
pub(crate) struct ResultRow<'a> {
    #[serde(flatten)]
    row: Row<'a>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Row<'a> {
    Outcome(OutcomeRow<'a>),
    Failure {
        strategy: &'static str,
        config: String,
        completed: bool,
    },
}

impl<'a> ResultRow<'a> {
    /// Returns the JSON row of `result`.
    pub(crate) fn new(result: &'a Result<Outcome, Box<Failure>>) -> ResultRow<'a> {
        match result {
            Ok(outcome) => ResultRow::of_outcome(outcome),
            Err(failure) => ResultRow::of_failure(failure),
        }
    }

    /// Returns the JSON row of `outcome`.
    pub(crate) fn of_outcome(outcome: &'a Outcome) -> ResultRow<'a> {
        ResultRow {
            row: Row::Outcome(OutcomeRow::new(outcome)),
            error: None,
        }
    }

    /// Returns the JSON row of `failure`.
    pub(crate) fn of_failure(failure: &Failure) -> ResultRow<'a> {
        ResultRow {
            row: Row::Failure {
                strategy: failure.config.name().as_str(),
                config: failure.config.to_conf(),
                completed: false,
            },
            error: Some(failure.error.to_string()),
        }
    }
}

/// One outcome.
#[derive(Debug, Serialize)]
pub(crate) struct OutcomeRow<'a> {
    strategy: &'static str,
    config: &'a str,
    completed: bool,
    oom_at_event: Option<usize>,
    #[serde(serialize_with = "crate::format::bytes")]
    peak_reserved_bytes: Bytes,
    #[serde(serialize_with = "crate::format::bytes")]
    peak_allocated_bytes: Bytes,
    reserved_ratio: f64,
    device_allocs: u64,
    device_frees: u64,
    maps: u64,
    unmaps: u64,
    #[serde(serialize_with = "crate::format::bytes")]
    remapped_bytes: Bytes,
    retries: u64,
    driver_time_us: f64,
    ns_per_op: f64,
    verified: Option<&'a Verified>,
}

impl<'a> OutcomeRow<'a> {
    /// Returns the JSON row of `outcome`.
    pub(crate) fn new(outcome: &'a Outcome) -> OutcomeRow<'a> {
        OutcomeRow {
            strategy: outcome.strategy.as_str(),
            config: &outcome.config,
            completed: outcome.completed,
            oom_at_event: outcome.oom_at_event,
            peak_reserved_bytes: outcome.peak_reserved_bytes,
            peak_allocated_bytes: outcome.peak_allocated_bytes,
            reserved_ratio: outcome.reserved_ratio,
            device_allocs: outcome.device_allocs,
            device_frees: outcome.device_frees,
            maps: outcome.maps,
            unmaps: outcome.unmaps,
            remapped_bytes: outcome.remapped_bytes,
            retries: outcome.retries,
            driver_time_us: outcome.driver_time_us,
            ns_per_op: outcome.ns_per_op,
            verified: outcome.verified.as_ref(),
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
