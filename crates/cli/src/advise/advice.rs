//! The result of a search for the best setting.

use lowtide_core::Bytes;
use lowtide_replay::{ImpliedLimit, Outcome};

use super::settings::Candidate;
use crate::format;
use crate::job::Job;
use crate::replays::Replayed;

/// The share of a simpler setting's memory that a setting has to save. Less is not worth a line in a launch script.
const WORTHWHILE: f64 = 0.01;

/// A candidate and its outcome.
#[derive(Clone, Debug)]
pub(super) struct Tried {
    pub(super) candidate: Candidate,
    pub(super) outcome: Outcome,
}

/// A candidate, and its outcome or why the recording cannot be replayed with it.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    pub(super) candidate: Candidate,
    pub(super) result: Replayed,
}

impl Attempt {
    /// Returns the candidate with its outcome, if the recording can be replayed with it.
    pub(super) fn tried(self) -> Option<Tried> {
        let (candidate, outcome) = (self.candidate, self.result.ok()?);
        Some(Tried { candidate, outcome })
    }
}

/// The result of a search.
#[derive(Debug)]
pub(super) struct Advice<'a> {
    pub(super) job: &'a Job,
    pub(super) capacity: Option<Bytes>,
    /// The job's own limit, if that is the capacity.
    pub(super) limit: Option<ImpliedLimit>,
    /// The result with the recording's own settings.
    pub(super) now: Attempt,
    /// The setting to choose, which may be `now`; `None` if no candidate completes the job.
    pub(super) best: Option<Tried>,
    /// Every other candidate, the best first.
    pub(super) others: Vec<Tried>,
    /// The result with lowtide's own strategy `tide`.
    pub(super) tide: Replayed,
}

impl Advice<'_> {
    /// Returns whether these are the recording's own settings.
    pub(super) fn is_now(&self, tried: &Tried) -> bool {
        self.now.candidate == tried.candidate
    }

    /// Returns the outcome with the recording's own settings, if the job completes with them.
    pub(super) fn completed_now(&self) -> Option<&Outcome> {
        let now = self.now.result.as_ref().ok();
        now.filter(|outcome| outcome.completed)
    }
}

/// Returns whether `size` is enough below the reserved bytes of `outcome` to be worth a setting.
pub(super) fn saves(size: Bytes, outcome: &Outcome) -> bool {
    format::ratio(outcome.peak_reserved_bytes, size.max(Bytes(1))) > 1.0 + WORTHWHILE
}
