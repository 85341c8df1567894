//! Opens the recording that the command line names, and chooses a device of it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use lowtide_core::{Action, Bytes, CachingConfig, StrategyName};
use lowtide_history::History;
use lowtide_trace::{OneLine, Snapshot, Trace, file_names};
use serde::Serialize;

use crate::format;
use crate::output;
use crate::progress::{Progress, ReadWithProgress};

/// Returns what is recorded in the file at `path`, or on standard input where that is `-`, and says what is missing at its
/// end.
pub(crate) fn read(path: &Path) -> Result<Snapshot> {
    let snapshot = read_silently(path)?;
    note_missing_end(path, &snapshot);
    Ok(snapshot)
}

/// As [`read`], for who has to see first whether there is anything to say more of.
pub(crate) fn read_silently(path: &Path) -> Result<Snapshot> {
    let name = name(path);
    let (reader, length): (Box<dyn Read>, u64) = if is_stdin(path) {
        (Box::new(io::stdin().lock()), 0)
    } else {
        let file = File::open(path).with_context(|| name.clone())?;
        let length = file.metadata().with_context(|| name.clone())?.len();
        (Box::new(file), length)
    };
    let progress = Progress::new("reading", length);
    // The error's text has its cause in it: it is not to be said twice.
    lowtide_trace::read_from(ReadWithProgress { reader, progress })
        .map_err(|error| anyhow!("{name}: {error}"))
}

/// Says what is missing at the end of the recording at `path`.
pub(crate) fn note_missing_end(path: &Path, snapshot: &Snapshot) {
    let name = name(path);
    if snapshot.is_cut_off {
        output::note(&format!(
            "{name}: the end is missing; this is about what comes before it"
        ));
    }
    for left_out in &snapshot.left_out {
        output::note(&format!("{name}: {left_out}"));
    }
    if snapshot.traces.iter().any(Trace::may_lack_frees) {
        output::note(&format!(
            "{name}: no frees are recorded, as with skip_actions, and not what was left at the end: all that was \
             allocated counts as held to the end"
        ));
    }
    note_missed_events(&name, &snapshot.traces);
}

/// Says that a recording has the host's pinned memory, too, and what becomes of it.
pub(crate) fn note_host(path: &Path, host: &[Trace], what_becomes: &str) {
    if !host.is_empty() {
        let requests: usize = host.iter().map(Trace::allocs).sum();
        let peak = host.iter().map(Trace::peak_reserved_bytes).max();
        output::note(&format!(
            "{}: pinned host memory is recorded, too ({}, at most {} reserved); {what_becomes}",
            name(path),
            format::counted(requests as u64, "allocation"),
            peak.unwrap_or_default(),
        ));
    }
}

/// Says how much is missing at the end of the recording that is called `name`, if other threads went on while PyTorch took
/// first its events and then its segments.
fn note_missed_events(name: &str, traces: &[Trace]) {
    let missed = traces.iter().map(|trace| trace.missed_events).sum();
    let verb = if missed == 1 { "is" } else { "are" };
    if missed > 0 {
        output::note(&format!(
            "{name}: its segments are newer than its last event, as other threads went on while the snapshot was taken: \
             at least {} {} missing, and this is about what comes before that",
            format::counted(missed, "event"),
            verb,
        ));
    }
}

/// Says that a recording does not have its job's beginning, where it does not.
pub(crate) fn note_lost_beginning(path: &Path, trace: &Trace) {
    let count = trace.initial.blocks.len() as u64;
    if count > 0 && !trace.events.is_empty() {
        output::note(&format!(
            "{}: the recording's beginning is missing: {} were there before its first event, for longer than is \
             known, and what was there before that is in no peak",
            name(path),
            format::counted(count, "block")
        ));
    }
}

/// Says what a replay makes of regions that were paused, if any were.
pub(crate) fn note_pauses(path: &Path, trace: &Trace) {
    if let Some(text) = pauses_text(trace) {
        output::note(&format!("{}: {text}", name(path)));
    }
}

/// Says what a replay makes of requests that were refused, if any were.
pub(crate) fn note_refusals(path: &Path, trace: &Trace) {
    if let Some(text) = refusals_text(trace) {
        output::note(&format!("{}: {text}", name(path)));
    }
}

/// Returns what there is to know of a trace's replays, each a sentence without its capital and its end.
pub(crate) fn replay_notes(trace: &Trace) -> Vec<String> {
    let lost_beginning = LostBeginning::of(trace).map(|lost| lost.note());
    let notes = [lost_beginning, refusals_text(trace), pauses_text(trace)];
    notes.into_iter().flatten().collect()
}

fn pauses_text(trace: &Trace) -> Option<String> {
    let text = "regions were paused; replays are without pauses, so memory that was away counts all the time";
    trace.has_pauses().then(|| text.to_owned())
}

fn refusals_text(trace: &Trace) -> Option<String> {
    let actions = trace.events.iter().map(|recorded| recorded.event.action);
    let refusals = actions.filter(|action| *action == Action::OutOfMemory);
    let count = refusals.count() as u64;
    (count > 0).then(|| {
        format!(
            "the job ran out of memory at {}; a replay that has the memory serves those and frees them at once",
            format::counted(count, "request")
        )
    })
}

/// Returns what messages call the file at `path`, on one line.
pub(crate) fn name(path: &Path) -> String {
    if is_stdin(path) {
        "standard input".into()
    } else {
        OneLine(&path.to_string_lossy()).to_string()
    }
}

/// Refuses recordings of which several are standard input.
///
/// # Errors
///
/// If so.
pub(crate) fn refuse_stdin_twice<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<()> {
    if { paths.into_iter() }.filter(|path| is_stdin(path)).count() > 1 {
        bail!("- is standard input, which can be read once");
    }
    Ok(())
}

fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

/// What is recorded of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorded {
    /// Its events and what it held.
    pub(crate) trace: Trace,
    /// Whether the file's end is missing.
    pub(crate) is_cut_off: bool,
}

/// Returns what is recorded of `device` in the recording at `path`; without `device`, of the one with the
/// most events, and says so where there are several.
pub(crate) fn read_device(path: &Path, device: Option<u32>) -> Result<Recorded> {
    let mut snapshot = read_silently(path)?;
    if snapshot.traces.iter().any(|trace| trace.allocs() > 0) {
        note_missing_end(path, &snapshot);
    }
    if let Some(device) = device {
        keep_device(path, &mut snapshot, device)?;
    }
    let devices = devices(&snapshot);
    let nothing = nothing_recorded(path, &snapshot);
    let is_cut_off = snapshot.is_cut_off;
    let several = snapshot.traces.len() > 1;
    let has_members = snapshot.traces.iter().any(|trace| trace.member.is_some());
    let host = snapshot.host;
    let traces = snapshot.traces.into_iter();
    // Of equals, `max_by_key` returns the last: the lowest number.
    let busiest = traces.rev().max_by_key(|trace| trace.events.len());
    let Some(trace) = busiest.filter(|trace| trace.allocs() > 0) else {
        bail!(nothing);
    };
    if several && has_members {
        output::note(&format!(
            "{} has several snapshots: {devices}; this is {}, which has the most events (to see another, write it to a \
             file of its own)",
            name(path),
            device_text(&trace)
        ));
    } else if several {
        output::note(&format!(
            "{} has devices {devices}; this is device {}, which has the most events (--device chooses \
             another)",
            name(path),
            trace.device
        ));
    }
    let this = "this is about the device, and `lowtide report` shows both";
    note_host(path, &host, this);
    Ok(Recorded { trace, is_cut_off })
}

/// Returns what there is to say of the file at `path`, whose contents are `snapshot`, if no allocation is recorded in it.
pub(crate) fn nothing_recorded(path: &Path, snapshot: &Snapshot) -> String {
    let traces = &snapshot.traces;
    let mut events = traces.iter().flat_map(|trace| &trace.events);
    let is_free = |action| matches!(action, Action::FreeRequested | Action::FreeCompleted);
    let has_frees = events.any(|event| is_free(event.event.action));
    // One of a job that never used a device says nothing but its format.
    let is_of_lowtide = traces
        .iter()
        .any(|trace| !trace.settings.strategy.is_empty())
        || path.is_file() && file_names::check_replaceable(path).is_ok();
    let what = match (has_frees, is_of_lowtide) {
        _ if snapshot.host.iter().any(Trace::is_used) => {
            "only pinned host memory is recorded, which `lowtide report` shows (record_cuda=False leaves out the devices')"
        }
        _ if snapshot.is_cut_off => "the end is missing, and no allocation is recorded before it",
        (true, _) => {
            "only frees are recorded, the allocations before them are lost (record with a larger max_entries)"
        }
        (false, true) => {
            "no allocation is recorded: the job asked for no GPU memory while it was recorded"
        }
        (false, false) => {
            "no allocation is recorded (was torch.cuda.memory._record_memory_history() called first?)"
        }
    };
    format!("{}: {what}", name(path))
}

/// Removes all devices but `device` from `snapshot`, which is from the file at `path`.
///
/// # Errors
///
/// If `device` is not in it.
pub(crate) fn keep_device(path: &Path, snapshot: &mut Snapshot, device: u32) -> Result<()> {
    let devices = devices(snapshot);
    snapshot.traces.retain(|trace| trace.device == device);
    if snapshot.traces.is_empty() {
        let others = match devices.as_str() {
            "" => "nor any other".to_owned(),
            _ => format!("only {devices}"),
        };
        bail!("{}: has no device {device}, {others}", name(path));
    }
    Ok(())
}

/// Returns the numbers of the devices in `snapshot`, as a list to read.
fn devices(snapshot: &Snapshot) -> String {
    let devices: Vec<String> = snapshot.traces.iter().map(device_text).collect();
    devices.join(", ")
}

/// Returns the number of a trace's device, with the snapshot that it is in where the file has several.
fn device_text(trace: &Trace) -> String {
    match &trace.member {
        Some(member) => format!("{member} (device {})", trace.device),
        None => trace.device.to_string(),
    }
}

/// Returns the configuration of the allocator that was recorded in `trace`, from the file at `path`; says
/// so where a part of it is not understood, or a single one cannot have been in force throughout.
pub(crate) fn recorded_config(path: &Path, trace: &Trace) -> CachingConfig {
    let (config, left_out) = trace.config_as_understood();
    if !left_out.is_empty() {
        output::note(&format!(
            "{}: of the recording's own PYTORCH_CUDA_ALLOC_CONF, {} is not understood and left out",
            name(path),
            format::list(&left_out)
        ));
    }
    if trace.segment_kinds().are_mixed() {
        let value = if config.expandable_segments {
            "True"
        } else {
            "False"
        };
        output::note(&format!(
            "{}: the job had expandable segments and others; all of it is replayed with \
             expandable_segments:{value}",
            name(path)
        ));
    }
    config
}

/// Refuses to verify what another strategy than `caching` did.
///
/// # Errors
///
/// If the recording, from the file at `path`, says that it was another.
pub(crate) fn refuse_other_strategy(path: &Path, trace: &Trace) -> Result<()> {
    let recorded = &trace.settings.strategy;
    let name = recorded.raw().split(':').next().unwrap_or_default();
    if !name.is_empty() && name != StrategyName::Caching.as_str() {
        bail!(
            "{}: lowtide's strategy `{recorded}` was recorded, and only `caching` can be verified",
            self::name(path)
        );
    }
    Ok(())
}

/// What there is to say about a recording before any strategy is tried.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Job {
    /// The file, as it was named.
    pub(crate) path: String,
    /// The device's number.
    pub(crate) device: u32,
    /// How many events there are.
    pub(crate) events: usize,
    /// How many requests there are.
    pub(crate) allocs: usize,
    /// On how many streams.
    pub(crate) streams: usize,
    /// The most that was live at once, each request rounded up to 512 bytes.
    #[serde(serialize_with = "crate::json::bytes")]
    pub(crate) peak_live_bytes: Bytes,
    /// The most that was asked for at once.
    #[serde(serialize_with = "crate::json::bytes")]
    pub(crate) peak_requested_bytes: Bytes,
    /// What the job had reserved, where the recording does not have its beginning.
    pub(crate) lost_beginning: Option<LostBeginning>,
    /// Whether the recording's end is missing, as where the job was killed.
    pub(crate) is_cut_off: bool,
    /// How many events are missing at least at its end, as other threads went on while it was made.
    pub(crate) missed_events: u64,
    /// How long the recording is, where it says.
    #[serde(skip)]
    pub(crate) duration_us: Option<f64>,
}

impl Job {
    /// Returns what there is to say about what is recorded in the file at `path`. Linear time.
    pub(crate) fn new(path: &Path, recorded: &Recorded) -> Job {
        let trace = &recorded.trace;
        Job {
            path: path.display().to_string(),
            device: trace.device,
            events: trace.events.len(),
            allocs: trace.allocs(),
            streams: trace.streams(),
            peak_live_bytes: trace.peak_live_bytes(),
            peak_requested_bytes: trace.peak_requested_bytes(),
            lost_beginning: LostBeginning::of(trace),
            is_cut_off: recorded.is_cut_off,
            missed_events: trace.missed_events,
            duration_us: duration_us(trace),
        }
    }

    /// Returns what there is to say about what is recorded, whose `history` leaves out what is paused.
    pub(crate) fn of_history(path: &Path, recorded: &Recorded, history: &History) -> Job {
        Job {
            peak_live_bytes: history.peak_live.gap.live,
            peak_requested_bytes: history.peak_requested,
            ..Job::new(path, recorded)
        }
    }

    /// Returns one line for people.
    pub(crate) fn headline(&self) -> String {
        format!(
            "{}, device {}: {}, {} on {}, peak live {}",
            name(Path::new(&self.path)),
            self.device,
            format::counted(self.events as u64, "event"),
            format::counted(self.allocs as u64, "allocation"),
            format::counted(self.streams as u64, "stream"),
            self.peak_live_bytes
        )
    }
}

/// What is known of a job's reserved bytes although the recording does not have its beginning. Replays do not start
/// with these, but on an empty device.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LostBeginning {
    /// Before the first event.
    #[serde(serialize_with = "crate::json::bytes")]
    reserved_bytes: Bytes,
    /// The most at once from there to the end.
    #[serde(serialize_with = "crate::json::bytes")]
    peak_reserved_bytes: Bytes,
}

impl LostBeginning {
    /// Returns what is known of `trace`; `None` if no block was there before its first event. Linear time.
    fn of(trace: &Trace) -> Option<LostBeginning> {
        (!trace.initial.blocks.is_empty()).then(|| LostBeginning {
            reserved_bytes: trace.initial_reserved_bytes(),
            peak_reserved_bytes: trace.peak_reserved_bytes(),
        })
    }

    /// Returns a line for people on what that means for replays.
    pub(crate) fn note(&self) -> String {
        format!(
            "the recording's beginning is missing: the job had {} reserved at its first event and at most {} from \
             there on; a replay starts with the blocks of then, packed afresh, and may take less than the job did, or \
             more",
            self.reserved_bytes, self.peak_reserved_bytes
        )
    }
}

/// Returns the time from the first event to the last, or `None` where the recording does not say.
fn duration_us(trace: &Trace) -> Option<f64> {
    let first = trace.events.first()?.time_us;
    let last = trace.events.last()?.time_us;
    #[expect(
        clippy::cast_precision_loss,
        reason = "years are exact to the microsecond"
    )]
    let duration_us = last.checked_sub(first)? as f64;
    (first > 0 && duration_us > 0.0).then_some(duration_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_without_times_has_no_duration() {
        let mut trace = Trace::default();
        assert_eq!(duration_us(&trace), None);
        let event = lowtide_core::Event {
            action: lowtide_core::Action::Alloc,
            pool: lowtide_core::MempoolId::DEFAULT,
            address: lowtide_core::DeviceAddress(0),
            size: Bytes(1),
            stream: lowtide_core::Stream::DEFAULT,
        };
        let at = |time_us| lowtide_trace::TraceEvent {
            event,
            time_us,
            stack: lowtide_trace::StackId::default(),
            pool_known: false,
            note: lowtide_trace::NoteId::NONE,
        };
        trace.events = vec![at(0), at(0)];
        assert_eq!(duration_us(&trace), None);
        trace.events = vec![at(1_000), at(3_500)];
        assert_eq!(duration_us(&trace), Some(2_500.0));
    }
}
