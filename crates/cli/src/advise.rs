//! `lowtide advise`: the setting of PyTorch's own allocator that minimizes a job's memory.

mod advice;
mod report;
mod settings;

use anyhow::{Context, Result, anyhow};
use lowtide_core::{CachingConfig, Config, TideConfig};
use lowtide_replay::{ImpliedLimit, Options, Outcome};
use lowtide_trace::Trace;

use crate::args::AdviseArgs;
use crate::job::Job;
use crate::progress::Progress;
use crate::ranking::Ranking;
use crate::recording::{self, Recording};
use crate::replays::{Replayed, replay_all};
use crate::{format, json, output};
use advice::{Advice, Attempt, Tried, saves};
use settings::{Axes, Candidate, Kept, Setting};

/// The number of values of each helpful setting that are combined with other settings.
const COMBINED_VALUES: usize = 2;

/// Runs `lowtide advise`.
///
/// # Errors
///
/// If an argument or the recording is bad.
pub(crate) fn run(args: &AdviseArgs) -> Result<()> {
    let source = &args.source;
    let mut recording = Recording::open(&source.recording.trace, source.recording.device)?;
    recording.note(recording::pauses_text(&recording.trace));
    recording.note(recording::refusals_text(&recording.trace));
    let recorded = recording.config();
    let job = Job::new(&recording);
    let capacity = source.resolve_capacity(job.peak_live_bytes);
    let limit = ImpliedLimit::of(&recording.trace).filter(|_| capacity.is_none());
    let trace = &recording.trace;
    let options = Options {
        capacity: capacity.or(limit.map(|limit| limit.least)),
        verify: false,
        timeline_points: 0,
    };

    let kept = Kept::new(trace);
    if !kept.strange.is_empty() {
        recording.notes.push(format!(
            "{}: {} is not proposed again: it has characters that a shell may act on",
            recording.name,
            format::list(&kept.strange)
        ));
    }
    if !trace.settings.is_of_caching() {
        recording.notes.push(format!(
            "{}: lowtide's strategy `{}` served the job; the settings of PyTorch's allocator are compared with its defaults",
            recording.name, trace.settings.strategy
        ));
    }
    output::notes(&recording.notes);
    let search = Search {
        trace,
        steps: lowtide_replay::Job::new(trace),
        job: &job,
        limit,
        options: &options,
        progress: Progress::new("replaying", 0),
        recorded,
        kept,
    };
    let advice = search.advise().context(recording.name.clone())?;
    drop(search);
    output::print(&if args.json {
        json::text(&report::Json::new(&advice))?
    } else {
        report::text(&advice)
    })
}

/// A search in progress.
struct Search<'a> {
    trace: &'a Trace,
    steps: lowtide_replay::Job<'a>,
    job: &'a Job,
    limit: Option<ImpliedLimit>,
    options: &'a Options,
    progress: Progress,
    /// The configuration in force while the job was recorded.
    recorded: CachingConfig,
    /// The recorded pairs that the search does not change.
    kept: Kept<'a>,
}

impl<'a> Search<'a> {
    /// Returns the advice. Each setting is tried alone, with and without expandable segments. Then the settings
    /// that helped are tried together.
    ///
    /// # Errors
    ///
    /// If the recording cannot be replayed with any candidate.
    fn advise(&self) -> Result<Advice<'a>> {
        let (now, tide) = rayon::join(
            || self.try_each(vec![self.now()]).remove(0),
            || self.replay_each(&[Config::Tide(TideConfig)]).remove(0),
        );
        let ranking = Ranking::new(self.job, now.result.as_ref().ok());
        let axes = Axes::new(self.trace, self.options.capacity.is_some());
        let mut tried = Vec::new();
        for base in [vec![], vec![Setting::ExpandableSegments]] {
            let axes = axes.combinable_with(&base);
            let singles = axes.iter().flatten().map(|&setting| vec![setting]);
            let singles = self.candidates(&base, singles.chain([vec![]]));
            let singles = self.replay(singles);
            let together =
                self.candidates(&base, self.combinations(ranking, &base, axes, &singles));
            tried.extend(singles);
            tried.extend(self.replay(together));
        }
        match &now.result {
            Err(failure) if tried.is_empty() => Err(anyhow!("{failure}")),
            _ => Ok(self.conclude(ranking, now, tried, tide)),
        }
    }

    /// Returns the recording's own settings as a candidate.
    fn now(&self) -> Candidate {
        let text = &self.trace.settings.conf;
        let config = Config::Caching(self.recorded.clone());
        Candidate {
            settings: Vec::new(),
            // The recorded text lacks options that were set while the job ran.
            conf: match Config::parse("caching", text.raw()) {
                Ok(began_with) if began_with == config => text.clone(),
                _ => self.kept.conf_with(&config).into(),
            },
            config,
        }
    }

    /// Returns a candidate for each list of settings added to `base`. Combinations that PyTorch refuses are left
    /// out.
    fn candidates(
        &self,
        base: &[Setting],
        lists: impl IntoIterator<Item = Vec<Setting>>,
    ) -> Vec<Candidate> {
        lists
            .into_iter()
            .filter_map(|list| Candidate::new([base, &list].concat(), &self.kept))
            .collect()
    }

    /// Returns every combination of two or more settings of different axes that each helped alone.
    fn combinations(
        &self,
        ranking: Ranking,
        base: &[Setting],
        axes: &[Vec<Setting>],
        singles: &[Tried],
    ) -> Vec<Vec<Setting>> {
        let outcome_of = |settings: &[Setting]| {
            let mut singles = singles.iter();
            let tried = singles.find(|tried| tried.candidate.settings == settings)?;
            Some(&tried.outcome)
        };
        let Some(alone) = outcome_of(base) else {
            return Vec::new();
        };
        let mut combinations = vec![vec![]];
        for axis in axes {
            let helpful = axis.iter().filter_map(|&setting| {
                let outcome = outcome_of(&[base, &[setting]].concat())?;
                helps(outcome, alone).then_some((outcome, setting))
            });
            let mut helpful: Vec<(&Outcome, Setting)> = helpful.collect();
            helpful.sort_by(|(left, _), (right, _)| ranking.compare(left, right));
            helpful.truncate(COMBINED_VALUES);
            for combination in combinations.clone() {
                let longer = helpful
                    .iter()
                    .map(|(_, setting)| [&combination[..], &[*setting]].concat());
                combinations.extend(longer);
            }
        }
        combinations.retain(|combination| combination.len() > 1);
        combinations
    }

    /// Returns the outcomes of the candidates, and prints a note for each candidate that cannot be replayed.
    fn replay(&self, candidates: Vec<Candidate>) -> Vec<Tried> {
        let attempts = self.try_each(candidates);
        for failure in attempts.iter().filter_map(|it| it.result.as_ref().err()) {
            output::note(&failure.to_string());
        }
        attempts.into_iter().filter_map(Attempt::tried).collect()
    }

    fn try_each(&self, candidates: Vec<Candidate>) -> Vec<Attempt> {
        let configs = candidates.iter().map(|candidate| candidate.config.clone());
        let configs: Vec<Config> = configs.collect();
        let attempts = candidates.into_iter().zip(self.replay_each(&configs));
        attempts
            .map(|(candidate, result)| Attempt { candidate, result })
            .collect()
    }

    fn replay_each(&self, configs: &[Config]) -> Vec<Replayed> {
        self.progress
            .extend(self.trace.events.len() as u64 * configs.len() as u64);
        replay_all(&self.steps, configs, self.options, &self.progress)
    }

    fn conclude(
        &self,
        ranking: Ranking,
        now: Attempt,
        mut tried: Vec<Tried>,
        tide: Replayed,
    ) -> Advice<'a> {
        tried.retain(|tried| tried.candidate.config != now.candidate.config);
        tried.sort_by(|left, right| ranking.compare(&left.outcome, &right.outcome));
        let best = choose(ranking, now.clone().tried().as_ref(), &tried).cloned();
        if let Some(best) = &best {
            tried.retain(|tried| tried.candidate != best.candidate);
        }
        Advice {
            job: self.job,
            capacity: self.options.capacity,
            limit: self.limit,
            now,
            best,
            others: tried,
            tide,
        }
    }
}

/// Returns whether a job did better with `outcome` than with `before`, even by one byte.
fn helps(outcome: &Outcome, before: &Outcome) -> bool {
    let figure = |outcome: &Outcome| (!outcome.completed, outcome.peak_reserved_bytes);
    figure(outcome) < figure(before)
}

/// Returns the setting to choose. Among those that reserve about the least, this is the one in use or else the
/// simplest. A slow setting is chosen only if no other completes. A setting that reserves more than the one in use
/// is never chosen, if that completes.
fn choose<'t>(ranking: Ranking, now: Option<&'t Tried>, tried: &'t [Tried]) -> Option<&'t Tried> {
    let completed = now.into_iter().chain(tried);
    let completed: Vec<&Tried> = completed.filter(|tried| tried.outcome.completed).collect();
    let is_quick = |tried: &&&Tried| !ranking.is_slow(&tried.outcome);
    let quick: Vec<&Tried> = completed.iter().filter(is_quick).copied().collect();
    let usable = if quick.is_empty() { completed } else { quick };

    let peaks = usable.iter().map(|tried| tried.outcome.peak_reserved_bytes);
    let least = peaks.min()?;
    // To keep the settings costs the user nothing.
    let is_now = |tried: &Tried| now.is_some_and(|now| now.candidate == tried.candidate);
    let price = |tried: &Tried| {
        if is_now(tried) {
            0
        } else {
            1 + tried.candidate.settings.len()
        }
    };
    let about_least = usable
        .into_iter()
        .filter(|tried| !saves(least, &tried.outcome));
    about_least.min_by(|left, right| {
        let by_price = price(left).cmp(&price(right));
        by_price.then_with(|| ranking.compare(&left.outcome, &right.outcome))
    })
}

#[cfg(test)]
mod tests;
