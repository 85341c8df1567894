//! Formats advice for people and for programs.

use std::fmt::Write as _;

use console::style;
use lowtide_core::Bytes;
use lowtide_replay::Outcome;
use lowtide_trace::{RecordedText, ShellWord};
use serde::Serialize;

use super::advice::{self, Advice, Attempt, Tried};
use crate::format::{self, SizeUnit};
use crate::job::Job;
use crate::json::ResultRow;
use crate::{ranking, recording, table};

/// The number of rows. More would bury the first ones.
const ROWS: usize = 10;

/// Returns the text that `lowtide advise` prints.
pub(super) fn text(advice: &Advice<'_>) -> String {
    let mut text = format!("{}\n", advice.job.headline());
    let limit = advice.limit.as_ref().map(recording::limit_text);
    let device = || Some(format!("on a device of {}", advice.capacity?));
    if let Some(line) = limit.or_else(device) {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(text, "\n{}\n", now(advice));
    if let Some(lost) = advice.job.lost_beginning {
        let _ = writeln!(text, "{}\n", lost.note());
    }
    match &advice.best {
        None => text.push_str(&none(advice)),
        Some(best) if advice.is_now(best) => {
            let _ = writeln!(text, "{}", style(keep(advice, best)).bold());
        }
        Some(best) => text.push_str(&recommendation(advice, best)),
    }
    let _ = writeln!(text, "\n{}", tide(advice));
    let _ = writeln!(text, "\n{}", others(advice));
    text
}

/// Returns a sentence about the job's memory with its own settings.
fn now(advice: &Advice<'_>) -> String {
    let Attempt { candidate, result } = &advice.now;
    let with = if candidate.conf.is_empty() {
        "With PyTorch's default settings".to_owned()
    } else {
        format!("With the settings it had, {},", candidate.conf)
    };
    let outcome = match result {
        Ok(outcome) => outcome,
        Err(failure) => {
            return format!("{with} this job cannot be replayed: {}.", failure.error);
        }
    };
    match outcome.oom_at_event {
        Some(event) => format!(
            "{with} this job runs out of memory at event {}.",
            format::count(event as u64)
        ),
        None => format!(
            "{with} this job takes {}, {:.2} times its peak of live bytes.",
            outcome.peak_reserved_bytes, outcome.reserved_ratio
        ),
    }
}

/// Returns the line for the case that no setting completes the job.
fn none(advice: &Advice<'_>) -> String {
    let without = match advice.limit {
        Some(_) => " With `--capacity 64TiB`, the answer is without the limit.",
        None => "",
    };
    match advice.capacity {
        Some(capacity) => {
            format!("No setting of PyTorch's allocator fits the job in {capacity}.{without}\n")
        }
        None => "No setting of PyTorch's allocator lets the job complete.\n".to_owned(),
    }
}

/// Returns a sentence about why to keep the settings in use.
fn keep(advice: &Advice<'_>, now: &Tried) -> &'static str {
    let now = &now.outcome;
    let saves = |other: &Tried| {
        other.outcome.completed && advice::saves(other.outcome.peak_reserved_bytes, now)
    };
    if advice.others.iter().any(saves) {
        "What takes less would slow the job down: keep it."
    } else {
        "That is about the best that PyTorch's allocator can do: keep it."
    }
}

/// Returns the setting, what it saves and what it costs.
fn recommendation(advice: &Advice<'_>, best: &Tried) -> String {
    let peak = best.outcome.peak_reserved_bytes;
    let command = if best.candidate.conf.is_empty() {
        "unset PYTORCH_CUDA_ALLOC_CONF".to_owned()
    } else {
        let conf = ShellWord(best.candidate.conf.raw());
        format!("PYTORCH_CUDA_ALLOC_CONF={conf}")
    };
    let mut text = format!("    {}\n\n", style(command).bold());
    let _ = match advice.completed_now() {
        Some(now) => writeln!(
            text,
            "makes it {peak}: {} ({}).",
            format::difference(peak, now.peak_reserved_bytes),
            format::percent_change(peak, now.peak_reserved_bytes)
        ),
        None => writeln!(text, "lets it complete, in {peak}."),
    };

    let _ = writeln!(text, "\nWhat it costs:");
    let slows = ranking::driver_note(advice.job, &best.outcome);
    let lines = costs(advice, best).into_iter().chain(slows);
    for line in lines.chain(cautions(best)) {
        let _ = writeln!(text, "  {line}");
    }
    text
}

/// Returns a line for each cost, with its present value if the job completes now.
fn costs(advice: &Advice<'_>, best: &Tried) -> [String; 3] {
    let line = |name: &str, price: &dyn Fn(&Outcome) -> String| {
        let before = match advice.completed_now() {
            Some(now) => format!(" (now {})", price(now)),
            None => String::new(),
        };
        format!("{name}: {}{before}", price(&best.outcome))
    };
    let asked = advice.job.peak_requested_bytes;
    [
        line("driver calls", &|outcome| {
            format::count(table::driver_calls(outcome))
        }),
        line("driver time", &|outcome| {
            format::duration(outcome.driver_time_us)
        }),
        line("rounding up, at the peak", &|outcome| {
            let rounded = outcome.peak_allocated_bytes;
            rounded.saturating_sub(asked).to_string()
        }),
    ]
}

/// Returns what lowtide's own strategy `tide` would take, and how to use it.
fn tide(advice: &Advice<'_>) -> String {
    let outcome = match &advice.tide {
        Ok(outcome) => outcome,
        Err(failure) => {
            return format!(
                "With lowtide's `tide` this job cannot be replayed: {}.",
                failure.error
            );
        }
    };
    if let Some(event) = outcome.oom_at_event {
        let event = format::count(event as u64);
        return format!("With lowtide's `tide` this job runs out of memory at event {event}.");
    }
    let share = ranking::driver_share(advice.job, outcome).map(format::percent);
    let share = share.map(|share| format!("; driver calls take {share} of the job's time"));
    format!(
        "With lowtide's `tide` this job takes {}, {:.3} times its peak of live bytes{}:\n\n    {}",
        outcome.peak_reserved_bytes,
        outcome.reserved_ratio,
        share.unwrap_or_default(),
        style("lowtide run SCRIPT").bold()
    )
}

fn cautions(best: &Tried) -> impl Iterator<Item = String> {
    let settings = best.candidate.settings.iter();
    let cautions = settings.flat_map(|setting| setting.cautions());
    cautions.map(|&caution| caution.to_owned())
}

/// Returns a table of the candidates that were not chosen.
fn others(advice: &Advice<'_>) -> String {
    let unit = SizeUnit::for_sizes_up_to(advice.job.peak_live_bytes);
    let mut header = vec![
        "other settings".to_owned(),
        format!("reserved {}", unit.name()),
        "ratio".into(),
        "driver calls".into(),
        "driver time".into(),
    ];
    let has_times = advice.job.duration_us.is_some();
    header.extend(has_times.then(|| table::SHARE.into()));
    let row = |Tried { candidate, outcome }: &Tried| {
        let conf = if candidate.conf.is_empty() {
            "(PyTorch's defaults)".to_owned()
        } else {
            candidate.conf.to_string()
        };
        let [reserved, ratio] = table::reserved_and_ratio(outcome, unit);
        let mut row = vec![
            conf,
            reserved,
            ratio,
            format::count(table::driver_calls(outcome)),
            format::duration(outcome.driver_time_us),
        ];
        let share = ranking::driver_share(advice.job, outcome).map(format::percent);
        row.extend(has_times.then(|| share.unwrap_or_else(|| table::NONE.into())));
        row
    };
    let rows = advice.others.iter().take(ROWS).map(row).collect();
    let table = table::new_table(header, rows);
    let more = match advice.others.len().saturating_sub(ROWS) {
        0 => String::new(),
        more => format!("\n… and {more} more (--json has all)"),
    };
    format!("{}{more}", table.trim_fmt())
}

/// The JSON that `lowtide advise --json` prints. The names of the keys are an interface.
#[derive(Debug, Serialize)]
pub(super) struct Json<'a> {
    trace: &'a Job,
    capacity_bytes: Option<u64>,
    /// The result with the recording's own settings, or the error if they cannot be replayed.
    now: Now<'a>,
    /// The setting to choose, which may be the one in use; null if none completes the job.
    best: Option<Entry<'a>>,
    /// The bytes that it saves; null if the job does not complete with it or with the settings in use.
    saved_bytes: Option<u64>,
    /// What a user has to know before choosing it.
    cautions: Vec<String>,
    /// All others, the best first.
    others: Vec<Entry<'a>>,
    /// The result with lowtide's own strategy `tide`.
    tide: ResultRow<'a>,
}

#[derive(Debug, Serialize)]
struct Now<'a> {
    /// The value of `PYTORCH_CUDA_ALLOC_CONF`.
    conf: &'a RecordedText,
    #[serde(flatten)]
    result: ResultRow<'a>,
}

#[derive(Debug, Serialize)]
struct Entry<'a> {
    /// The value of `PYTORCH_CUDA_ALLOC_CONF`.
    conf: &'a RecordedText,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

impl<'a> Json<'a> {
    /// Returns `advice` as JSON.
    pub(super) fn new(advice: &'a Advice<'_>) -> Json<'a> {
        let best = advice.best.as_ref();
        let saved = |best: &Tried| {
            let now = advice.completed_now()?.peak_reserved_bytes;
            let saved = now.saturating_sub(best.outcome.peak_reserved_bytes);
            Some(saved.get())
        };
        Json {
            trace: advice.job,
            capacity_bytes: advice.capacity.map(Bytes::get),
            now: Now {
                conf: &advice.now.candidate.conf,
                result: ResultRow::new(&advice.now.result),
            },
            best: best.map(Entry::new),
            saved_bytes: best.and_then(saved),
            cautions: best.into_iter().flat_map(cautions).collect(),
            others: advice.others.iter().map(Entry::new).collect(),
            tide: ResultRow::new(&advice.tide),
        }
    }
}

impl<'a> Entry<'a> {
    fn new(tried: &'a Tried) -> Entry<'a> {
        Entry {
            conf: &tried.candidate.conf,
            outcome: &tried.outcome,
        }
    }
}
