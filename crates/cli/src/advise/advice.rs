//! What a search for the best setting found.

use lowtide_core::Bytes;
use lowtide_replay::Outcome;

use super::settings::Candidate;
use crate::format;
use crate::job::Job;
use crate::replays::Failure;

/// A setting has to save more than this share of what a simpler one takes: less is not worth a line in
/// anyone's launch script.
const WORTHWHILE: f64 = 0.01;

/// A candidate, and what became of the job with it.
#[derive(Clone, Debug)]
pub(super) struct Tried {
    pub(super) candidate: Candidate,
    pub(super) outcome: Outcome,
}

/// A candidate with which the recording cannot be replayed, and why.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    pub(super) candidate: Candidate,
    pub(super) failure: Failure,
}

/// What a search found.
#[derive(Debug)]
pub(super) struct Advice<'a> {
    pub(super) job: &'a Job,
    pub(super) capacity: Option<Bytes>,
    /// With the settings of the recording.
    pub(super) now: Result<Tried, Box<Failed>>,
    /// What to choose, which may be `now`; `None` where no candidate completes the job.
    pub(super) best: Option<Tried>,
    /// Every other candidate, the best first.
    pub(super) others: Vec<Tried>,
}

impl Advice<'_> {
    /// Returns whether these are the settings of the recording.
    pub(super) fn is_now(&self, tried: &Tried) -> bool {
        let now = self.now.as_ref();
        now.is_ok_and(|now| now.candidate == tried.candidate)
    }

    /// Returns what the job takes with the settings of the recording, if it completes.
    pub(super) fn completed_now(&self) -> Option<&Outcome> {
        let now = self.now.as_ref().ok()?;
        Some(&now.outcome).filter(|outcome| outcome.completed)
    }
}

/// Returns whether `size` is so much less than `outcome` takes that it is worth a setting.
pub(super) fn saves(size: Bytes, outcome: &Outcome) -> bool {
    format::ratio(outcome.peak_reserved_bytes, size.max(Bytes(1))) > 1.0 + WORTHWHILE
}
