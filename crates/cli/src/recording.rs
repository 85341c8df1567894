//! Opens the recording that the command line names, and chooses one of its devices.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use lowtide_core::{Action, Bytes, CachingConfig};
use lowtide_replay::ImpliedLimit;
use lowtide_trace::{Snapshot, Trace, file_names};
use serde::Serialize;

use crate::format;
use crate::output;
use crate::progress::{Progress, ReadWithProgress};

/// The whole recording in one file: of every device and of the host.
#[derive(Debug)]
pub(crate) struct RecordedFile {
    path: PathBuf,
    /// The file's name for messages, on one line.
    pub(crate) name: String,
    /// The contents of the file.
    pub(crate) snapshot: Snapshot,
}

/// The recording of one device.
#[derive(Clone, Default, Debug)]
pub(crate) struct Recording {
    /// The path of the file, as the command line names it.
    pub(crate) path: PathBuf,
    /// The file's name for messages, on one line.
    pub(crate) name: String,
    /// The device's events, and its memory before the first of them.
    pub(crate) trace: Trace,
    /// Whether the file's end is missing.
    pub(crate) is_cut_off: bool,
    /// The notes to print about the recording, one line each.
    pub(crate) notes: Vec<String>,
}

impl RecordedFile {
    /// Reads the file at `path`, or standard input if that is `-`.
    pub(crate) fn read(path: &Path) -> Result<RecordedFile> {
        let name = format::path(path);
        let (reader, length): (Box<dyn Read>, u64) = if is_stdin(path) {
            (Box::new(io::stdin().lock()), 0)
        } else {
            let file = File::open(path).with_context(|| name.clone())?;
            let length = file.metadata().with_context(|| name.clone())?.len();
            (Box::new(file), length)
        };
        let progress = Progress::new("reading", length);
        // The error's text already contains its cause, which must not be printed twice.
        let snapshot = lowtide_trace::read_from(ReadWithProgress { reader, progress })
            .map_err(|error| anyhow!("{name}: {error}"))?;
        Ok(RecordedFile {
            path: path.to_owned(),
            name,
            snapshot,
        })
    }

    /// Returns a note for each missing part of the recording. Most are missing at the end.
    pub(crate) fn missing_notes(&self) -> Vec<String> {
        let RecordedFile { name, snapshot, .. } = self;
        let mut notes = Vec::new();
        if snapshot.is_cut_off {
            notes.push(format!(
                "{name}: the end is missing; this is about what comes before it"
            ));
        }
        let left_out = snapshot.left_out.iter();
        notes.extend(left_out.map(|left_out| format!("{name}: {left_out}")));
        if snapshot.traces.iter().any(Trace::may_lack_frees) {
            notes.push(format!(
                "{name}: no frees are recorded, as with skip_actions, and not what was left at the end: all that was \
                 allocated counts as held to the end"
            ));
        }
        notes.extend(self.missed_events_note());
        notes
    }

    /// Returns a note about missing events. PyTorch copies its events before its segments, and other threads may go
    /// on between the two.
    fn missed_events_note(&self) -> Option<String> {
        let traces = self.snapshot.traces.iter();
        let missed = traces.map(|trace| trace.missed_events).sum();
        let verb = if missed == 1 { "is" } else { "are" };
        (missed > 0).then(|| {
            format!(
                "{}: its segments are newer than its last event, as other threads went on while the snapshot was \
                 taken: at least {} {verb} missing, and this is about what comes before that",
                self.name,
                format::counted(missed, "event"),
            )
        })
    }

    /// Returns a note about pinned host memory, if any is recorded. `what_becomes` says how it is treated.
    pub(crate) fn host_note(&self, what_becomes: &str) -> Option<String> {
        let host = &self.snapshot.host;
        let requests: usize = host.iter().map(Trace::allocs).sum();
        let peak = host.iter().map(Trace::peak_reserved_bytes).max()?;
        Some(format!(
            "{}: pinned host memory is recorded, too ({}, at most {peak} reserved); {what_becomes}",
            self.name,
            format::counted(requests as u64, "allocation"),
        ))
    }

    /// Returns a note about the chosen device, if there are several.
    fn choice_note(&self, chosen: &Trace) -> Option<String> {
        let (name, devices) = (&self.name, self.devices());
        let traces = &self.snapshot.traces;
        if traces.len() <= 1 {
            None
        } else if traces.iter().any(|trace| trace.member.is_some()) {
            Some(format!(
                "{name} has several snapshots: {devices}; this is {}, which has the most events (to see another, \
                 write it to a file of its own)",
                device_text(chosen)
            ))
        } else {
            Some(format!(
                "{name} has devices {devices}; this is device {}, which has the most events (--device chooses another)",
                chosen.device
            ))
        }
    }

    /// Returns the error for a file without any allocation.
    pub(crate) fn nothing_recorded(&self) -> String {
        let (path, snapshot, traces) = (&self.path, &self.snapshot, &self.snapshot.traces);
        let mut events = traces.iter().flat_map(|trace| &trace.events);
        let is_free = |action| matches!(action, Action::FreeRequested | Action::FreeCompleted);
        let has_frees = events.any(|event| is_free(event.event.action));
        // A recording of a job that never used a device contains only its format.
        let names_strategy = |trace: &Trace| !trace.settings.strategy.is_empty();
        let is_of_lowtide = traces.iter().any(names_strategy)
            || path.is_file() && file_names::check_replaceable(path).is_ok();
        let what = match (has_frees, is_of_lowtide) {
            _ if snapshot.host.iter().any(Trace::is_used) => {
                "only pinned host memory is recorded, which `lowtide report` shows (record_cuda=False leaves out the devices')"
            }
            _ if snapshot.is_cut_off => {
                "the end is missing, and no allocation is recorded before it"
            }
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
        format!("{}: {what}", self.name)
    }

    /// Removes all devices except `device`.
    ///
    /// # Errors
    ///
    /// If `device` is not recorded.
    pub(crate) fn keep_device(&mut self, device: u32) -> Result<()> {
        let devices = self.devices();
        let traces = &mut self.snapshot.traces;
        traces.retain(|trace| trace.device == device);
        if traces.is_empty() {
            let others = match devices.as_str() {
                "" => "nor any other".to_owned(),
                _ => format!("only {devices}"),
            };
            bail!("{}: has no device {device}, {others}", self.name);
        }
        Ok(())
    }

    /// Returns the trace of `device`, or of the device with the most events, and adds notes about that choice.
    fn take_device(mut self, device: Option<u32>, notes: &mut Vec<String>) -> Result<Trace> {
        if let Some(device) = device {
            self.keep_device(device)?;
        }
        let traces = &self.snapshot.traces;
        let events = |&index: &usize| traces[index].events.len();
        // `max_by_key` returns the last of equal values, which here is the lowest number.
        let busiest = (0..traces.len()).rev().max_by_key(events);
        let Some(index) = busiest.filter(|&index| traces[index].allocs() > 0) else {
            bail!(self.nothing_recorded());
        };
        notes.extend(self.choice_note(&traces[index]));
        let this = "this is about the device, and `lowtide report` shows both";
        notes.extend(self.host_note(this));
        Ok(self.snapshot.traces.swap_remove(index))
    }

    /// Returns the numbers of the devices, separated by commas.
    fn devices(&self) -> String {
        let devices: Vec<String> = self.snapshot.traces.iter().map(device_text).collect();
        devices.join(", ")
    }
}

impl Recording {
    /// Opens the file at `path`, and returns the recording of `device` or of the device with the most events.
    pub(crate) fn open(path: &Path, device: Option<u32>) -> Result<Recording> {
        let file = RecordedFile::read(path)?;
        let (name, is_cut_off) = (file.name.clone(), file.snapshot.is_cut_off);
        let has_requests = file.snapshot.traces.iter().any(|trace| trace.allocs() > 0);
        let mut notes = if has_requests {
            file.missing_notes()
        } else {
            Vec::new()
        };
        let trace = file.take_device(device, &mut notes);
        Ok(Recording {
            path: path.to_owned(),
            name,
            // The device may be in the missing part.
            trace: trace.inspect_err(|_| output::notes(&notes))?,
            is_cut_off,
            notes,
        })
    }

    /// Opens the file at `path`, and returns the recording of each device that made requests, or of `device` only.
    ///
    /// # Errors
    ///
    /// If the file is bad, or has no such device, or no device made a request.
    pub(crate) fn open_all(path: &Path, device: Option<u32>) -> Result<Vec<Recording>> {
        let mut file = RecordedFile::read(path)?;
        if let Some(device) = device {
            file.keep_device(device)?;
        }
        if file.snapshot.traces.iter().all(|trace| trace.allocs() == 0) {
            bail!(file.nothing_recorded());
        }
        output::notes(&file.missing_notes());
        let traces = std::mem::take(&mut file.snapshot.traces);
        let traces = traces.into_iter().filter(|trace| trace.allocs() > 0);
        let recording = |trace| Recording {
            path: path.to_owned(),
            name: file.name.clone(),
            trace,
            is_cut_off: file.snapshot.is_cut_off,
            notes: Vec::new(),
        };
        Ok(traces.map(recording).collect())
    }

    /// Adds a note if the job's beginning is missing.
    pub(crate) fn note_lost_beginning(&mut self) {
        let count = self.trace.initial.blocks.len() as u64;
        if count > 0 && !self.trace.events.is_empty() {
            self.note(Some(format!(
                "the recording's beginning is missing: {} were there before its first event, for longer than is \
                 known, and what was there before that is in no peak",
                format::counted(count, "block")
            )));
        }
    }

    /// Returns the configuration of the recorded allocator. Adds a note about options that are not understood, and
    /// a note if no single configuration can have been in force throughout.
    pub(crate) fn config(&mut self) -> CachingConfig {
        let (config, left_out) = self.trace.config_as_understood();
        let left_out = (!left_out.is_empty()).then(|| format::list(&left_out));
        self.note(left_out.map(|left_out| {
            format!("of the recording's own PYTORCH_CUDA_ALLOC_CONF, {left_out} is not understood and left out")
        }));
        let are_mixed = self.trace.segment_kinds().are_mixed();
        self.note(are_mixed.then(|| {
            let value = if config.expandable_segments {
                "True"
            } else {
                "False"
            };
            let what = "the job had expandable segments and others; all of it is replayed with";
            format!("{what} expandable_segments:{value}")
        }));
        config
    }

    /// Checks that the recorded strategy is `caching`, the only one that can be verified.
    ///
    /// # Errors
    ///
    /// If the recording names another strategy.
    pub(crate) fn refuse_other_strategy(&self) -> Result<()> {
        if !self.trace.settings.is_of_caching() {
            let recorded = &self.trace.settings.strategy;
            bail!(
                "{}: lowtide's strategy `{recorded}` was recorded, and only `caching` can be verified",
                self.name
            );
        }
        Ok(())
    }

    /// Adds a note, if there is a text for one.
    pub(crate) fn note(&mut self, text: Option<String>) {
        let name = &self.name;
        self.notes
            .extend(text.map(|text| format!("{name}: {text}")));
    }
}

/// Returns notes about a trace's replays, each a sentence without capital and full stop.
pub(crate) fn replay_notes(trace: &Trace) -> Vec<String> {
    let lost_beginning = LostBeginning::of(trace).map(|lost| lost.note());
    let notes = [lost_beginning, refusals_text(trace), pauses_text(trace)];
    notes.into_iter().flatten().collect()
}

/// Returns a sentence about how a replay treats paused regions, if there were any.
pub(crate) fn pauses_text(trace: &Trace) -> Option<String> {
    let text = "regions were paused; replays are without pauses, so memory that was away counts all the time";
    trace.has_pauses().then(|| text.to_owned())
}

/// Returns a sentence about the limit that a job died under.
pub(crate) fn limit_text(limit: &ImpliedLimit) -> String {
    format!(
        "the job had a limit between {} and {}, as a request of {} failed while the device had {} left; the replays have \
         the lower one",
        limit.least, limit.most, limit.refused, limit.left
    )
}

/// Returns a sentence about how a replay treats refused requests, if there were any.
pub(crate) fn refusals_text(trace: &Trace) -> Option<String> {
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

/// Checks that at most one of `paths` is standard input.
///
/// # Errors
///
/// If several are.
pub(crate) fn refuse_stdin_twice<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<()> {
    if { paths.into_iter() }.filter(|path| is_stdin(path)).count() > 1 {
        bail!("- is standard input, which can be read once");
    }
    Ok(())
}

fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

/// Returns a trace's device number, with the name of its snapshot if the file has several.
fn device_text(trace: &Trace) -> String {
    match &trace.member {
        Some(member) => format!("{member} (device {})", trace.device),
        None => trace.device.to_string(),
    }
}

/// The reserved bytes of a job whose recording lost its beginning. Replays do not start with these bytes: they
/// start on an empty device.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LostBeginning {
    /// Reserved bytes before the first event.
    #[serde(serialize_with = "crate::format::bytes")]
    reserved_bytes: Bytes,
    /// Peak reserved bytes from the first event to the end.
    #[serde(serialize_with = "crate::format::bytes")]
    peak_reserved_bytes: Bytes,
}

impl LostBeginning {
    /// Returns the figures of `trace`; `None` if no block was allocated before its first event. Linear time.
    pub(crate) fn of(trace: &Trace) -> Option<LostBeginning> {
        (!trace.initial.blocks.is_empty()).then(|| LostBeginning {
            reserved_bytes: trace.initial_reserved_bytes(),
            peak_reserved_bytes: trace.peak_reserved_bytes(),
        })
    }

    /// Returns a line for people about what this means for replays.
    pub(crate) fn note(&self) -> String {
        format!(
            "the recording's beginning is missing: the job had {} reserved at its first event and at most {} from \
             there on; a replay starts with the blocks of then, packed afresh, and may take less than the job did, or \
             more",
            self.reserved_bytes, self.peak_reserved_bytes
        )
    }
}
