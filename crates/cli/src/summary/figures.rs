//! The figures of a summary.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use lowtide_core::{CachingConfig, Config, TideConfig};
use lowtide_history::{Categories, Category, Held, History, Kept, Leaks, Moment, Refusal, Site};
use lowtide_replay::{ImpliedLimit, Options};
use lowtide_trace::{StackId, Trace};

use crate::job::Job;
use crate::page::Findings;
use crate::progress::Progress;
use crate::recording::Recording;
use crate::replays::{self, Replayed};
use crate::sites::{self, Sizes};

/// Follows a call site without a stack in a recording with stacks.
const NO_STACK: &str = ", in no function of Python, as in the backward pass";

/// What is said about the memory of one device.
pub(crate) struct Summary {
    pub(super) job: Job,
    pub(super) limit: Option<ImpliedLimit>,
    pub(super) peak_live: Moment,
    pub(super) peak_reserved: Moment,
    pub(super) refusals: Vec<Refusal>,
    pub(super) leaks: Leaks,
    /// The call site of the largest leak, in one line.
    pub(super) largest_leak: Option<String>,
    /// What is held at the peak of live bytes, by category; `None` if neither stacks nor the program's labels show it.
    pub(super) held: Option<Held>,
    /// What is held at the peak of live bytes by each module that the program named, the most first. Those that differ only
    /// in numbers are one.
    pub(super) modules: Vec<HeldModule>,
    /// Whether stacks are recorded.
    pub(super) has_stacks: bool,
    /// What is held at the peak of live bytes by each call site, the most first.
    pub(super) sites: Vec<HeldSite>,
    /// The outcomes of other strategies than the job's.
    pub(super) others: Vec<Replayed>,
}

/// What modules hold at the peak of live bytes.
pub(super) struct HeldModule {
    /// Their path, with `*` for numbers; empty for what is held outside of modules.
    pub(super) path: String,
    pub(super) kept: Kept,
}

/// What a call site holds at the peak of live bytes.
pub(super) struct HeldSite {
    /// The call site in one line.
    pub(super) line: String,
    pub(super) kept: Kept,
    /// Its category; `None` if nothing shows categories.
    pub(super) category: Option<Category>,
}

impl Summary {
    /// Returns the summary of a recording. Linear time, and that of three replays.
    pub(super) fn of(recording: &Recording) -> Summary {
        let trace = &recording.trace;
        let limit = ImpliedLimit::of(trace);
        let progress = Progress::new("replaying", trace.events.len() as u64);
        let (findings, others) = rayon::join(
            || Findings::of(trace, false, &progress),
            || replay_others(trace, limit.as_ref(), &progress),
        );
        Summary::new(Job::new(recording), trace, findings, limit, others)
    }

    /// Returns the summary of a job by what was found in its `trace`. `others` are the outcomes of [`other_configs`], under
    /// the limit.
    pub(crate) fn new(
        job: Job,
        trace: &Trace,
        findings: Findings,
        limit: Option<ImpliedLimit>,
        others: Vec<Replayed>,
    ) -> Summary {
        let Findings { history, leaks, .. } = findings;
        let categories = &leaks.categories;
        let has_stacks = history
            .blocks
            .iter()
            .any(|block| block.stack != StackId::NONE);
        let modules = held_modules(&history, categories);
        let categories = Some(categories).filter(|categories| categories.are_shown());
        let peak = history.peak_live.instant;
        let held = categories.map(|categories| categories.held_at(&history, peak));
        let sizes = Sizes::new(std::slice::from_ref(&history), false);
        let largest = leaks.leaks().next();
        Summary {
            job: job.with_history(&history),
            limit,
            largest_leak: largest.map(|leak| sites::site_line(leak.site, &trace.stacks, &sizes)),
            sites: held_sites(trace, &history, categories, &sizes, has_stacks),
            held,
            modules,
            has_stacks,
            peak_live: history.peak_live,
            peak_reserved: history.peak_reserved,
            refusals: history.refusals,
            leaks,
            others,
        }
    }
}

/// Returns PyTorch's defaults, expandable segments, and `tide`, without what served the job.
pub(crate) fn other_configs(trace: &Trace) -> Vec<Config> {
    let expandable = CachingConfig {
        expandable_segments: true,
        ..CachingConfig::default()
    };
    let configs = [
        Config::Caching(CachingConfig::default()),
        Config::Caching(expandable),
        Config::Tide(TideConfig),
    ];
    let own = trace.strategy_in_force();
    let configs = configs.into_iter();
    configs.filter(|config| config.to_string() != own).collect()
}

/// Returns the outcomes of [`other_configs`] under the limit that the job had.
fn replay_others(
    trace: &Trace,
    limit: Option<&ImpliedLimit>,
    progress: &Progress,
) -> Vec<Replayed> {
    let configs = other_configs(trace);
    progress.extend((trace.events.len() * configs.len()) as u64);
    let options = Options {
        capacity: limit.map(|limit| limit.least),
        ..Options::default()
    };
    replays::replay_all(
        &lowtide_replay::Job::new(trace),
        &configs,
        &options,
        progress,
    )
}

/// Returns what modules hold at the peak of live bytes, the most first; nothing if the program named none.
fn held_modules(history: &History, categories: &Categories) -> Vec<HeldModule> {
    let (paths, numbers) = categories.modules_without_numbers();
    if paths.len() < 2 {
        return Vec::new();
    }
    let mut held = vec![Kept::default(); paths.len()];
    for (index, block) in history.held_at(history.peak_live.instant) {
        let module = categories.module_of_block(index);
        held[numbers[module as usize] as usize].add(block);
    }
    let modules = paths.into_iter().zip(held);
    let modules = modules.map(|(path, kept)| HeldModule { path, kept });
    let mut modules: Vec<HeldModule> = modules.filter(|module| module.kept.blocks > 0).collect();
    modules.sort_by_key(|module| Reverse(module.kept.bytes));
    modules
}

/// Returns what each call site holds at the peak of live bytes, the most first.
fn held_sites(
    trace: &Trace,
    history: &History,
    categories: Option<&Categories>,
    sizes: &Sizes,
    has_stacks: bool,
) -> Vec<HeldSite> {
    let mut lines: BTreeMap<Site, String> = BTreeMap::new();
    let mut sites: BTreeMap<(String, Option<Category>), Kept> = BTreeMap::new();
    for (index, block) in history.held_at(history.peak_live.instant) {
        let site = Site::of(block, history);
        let line = lines.entry(site);
        let line = line.or_insert_with(|| {
            let line = sites::site_line(site, &trace.stacks, sizes);
            let has_no_stack = has_stacks && matches!(site, Site::Size { .. });
            let why = if has_no_stack { NO_STACK } else { "" };
            line + why
        });
        let category = categories.map(|categories| categories.of_block(index));
        let kept = sites.entry((line.clone(), category)).or_default();
        kept.add(block);
    }
    let site = |((line, category), kept)| HeldSite {
        line,
        kept,
        category,
    };
    let mut sites: Vec<HeldSite> = sites.into_iter().map(site).collect();
    sites.sort_by_key(|site| Reverse(site.kept.bytes));
    sites
}
