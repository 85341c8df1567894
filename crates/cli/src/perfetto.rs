//! Writes a recording in the trace format that Perfetto and PyTorch's profiler share, by itself or in a copy of a
//! profile.

mod blocks;
mod call_sites;
mod calls;
mod curves;
mod event;
mod lanes;
mod marks;
mod profile;
mod times;
mod tokens;

use std::io::Write;
use std::path::Path;

use anyhow::{Result, bail};
use lowtide_history::{BlockSizes, Categories, History};
use lowtide_trace::{StackId, Trace};

use crate::progress::Progress;
use crate::recording::RecordedFile;
use crate::{format, output};
use call_sites::CallSites;
use curves::Curves;
use event::Events;
use profile::Profile;
use times::Times;

/// A recording to write.
pub(crate) struct Export<'a> {
    /// The recording's name, for messages.
    name: &'a str,
    memories: Vec<Memory<'a>>,
    /// Whether the recording has times.
    are_timed: bool,
    profile: Option<Profile>,
}

/// The memory of a device, or of the host.
struct Memory<'a> {
    /// Its name in the file.
    name: String,
    trace: &'a Trace,
    is_host: bool,
    times: Times,
}

/// The slices that a file has no room for.
#[derive(Default)]
struct LeftOut {
    driver_calls: usize,
    errors: usize,
    annotations: usize,
}

impl<'a> Export<'a> {
    /// Returns the export of a recording: into a copy of the profile at `profile`, if there is one. Prints a note if
    /// the two are of different times, or if no times are recorded.
    ///
    /// # Errors
    ///
    /// If nothing is recorded, or the profile cannot be read, or nothing says when the recording was.
    pub(crate) fn new(file: &'a RecordedFile, profile: Option<&Path>) -> Result<Export<'a>> {
        let traces = file.snapshot.traces.iter().map(|trace| (trace, false));
        let traces = traces.chain(file.snapshot.host.iter().map(|trace| (trace, true)));
        let traces: Vec<(&Trace, bool)> = traces
            .filter(|(trace, _)| !trace.events.is_empty())
            .collect();
        if traces.is_empty() {
            bail!(file.nothing_recorded());
        }
        let name = &file.name;
        let are_timed = traces.iter().all(|(trace, _)| times::are_recorded(trace));
        if !are_timed && profile.is_some() {
            bail!(
                "{name}: no times are recorded, as before PyTorch 2.2, so nothing says where it lies in a profile"
            );
        }
        if !are_timed {
            output::note(&format!(
                "{name}: no times are recorded, as before PyTorch 2.2; each event takes a microsecond instead"
            ));
        }
        let memory = |(trace, is_host)| Memory::new(trace, is_host, are_timed);
        let export = Export {
            name,
            memories: traces.into_iter().map(memory).collect(),
            are_timed,
            profile: profile.map(Profile::open).transpose()?,
        };
        output::notes(export.apart_text().as_slice());
        Ok(export)
    }

    /// Writes the file. Prints a note if it leaves out slices.
    pub(crate) fn write(&self, out: &mut dyn Write) -> Result<()> {
        if let Some(profile) = &self.profile {
            return profile.write_with(out, |out| self.write_events(out, profile.base_ns));
        }
        let (begin_ns, _) = self.span_ns();
        let base_ns = if self.are_timed { begin_ns } else { 0 };
        out.write_all(b"{")?;
        if self.are_timed {
            write!(out, "\"baseTimeNanoseconds\":{base_ns},")?;
        }
        out.write_all(b"\"traceEvents\":[")?;
        self.write_events(out, base_ns)?;
        Ok(out.write_all(b"\n]}\n")?)
    }

    /// Writes the events, separated by commas, with times from `base_ns` on.
    fn write_events(&self, out: &mut dyn Write, base_ns: i64) -> Result<()> {
        let mut events = Events::new(out, base_ns);
        let mut left_out = LeftOut::default();
        for memory in &self.memories {
            memory.write(&mut events, self.are_timed, &mut left_out)?;
        }
        if let Some(text) = left_out.text() {
            output::note(&format!("{}: {text}", self.name));
        }
        Ok(())
    }

    /// Returns the beginning and the end of the recording.
    fn span_ns(&self) -> (i64, i64) {
        let ends = || self.memories.iter().map(|memory| memory.times.ends());
        let begin = ends().map(|(begin, _)| begin).min().unwrap_or(0);
        (begin, ends().map(|(_, end)| end).max().unwrap_or(0))
    }

    /// Returns a sentence if the recording and the profile have no time in common.
    fn apart_text(&self) -> Option<String> {
        let profile = self.profile.as_ref()?;
        let (begin, end) = self.span_ns();
        let (first, last) = profile.span_ns?;
        let (from, to, how) = if first > end {
            (end, first, "begins after the recording's end")
        } else if last < begin {
            (last, begin, "ends before the recording's beginning")
        } else {
            return None;
        };
        #[expect(clippy::cast_precision_loss, reason = "shown with a few digits")]
        let apart = format::duration(to.saturating_sub(from) as f64 / 1000.0);
        Some(format!(
            "{} and {} do not overlap in time: the profile {how}, by {apart}; record both in the same run",
            self.name, profile.name
        ))
    }
}

impl<'a> Memory<'a> {
    fn new(trace: &'a Trace, is_host: bool, are_timed: bool) -> Memory<'a> {
        let mut name = if is_host {
            "pinned host memory".to_owned()
        } else {
            format!("memory of GPU {}", trace.device)
        };
        if let Some(member) = &trace.member {
            name = format!("{name}, {member}");
        }
        let times = if are_timed {
            Times::recorded(trace)
        } else {
            Times::numbered(trace)
        };
        Memory {
            name,
            trace,
            is_host,
            times,
        }
    }

    /// Writes the counters and the slices: those of the blocks in a process of their own, so that many rows do not come
    /// before the counters.
    fn write(
        &self,
        events: &mut Events<'_>,
        are_timed: bool,
        left_out: &mut LeftOut,
    ) -> Result<()> {
        let (trace, times) = (self.trace, &self.times);
        let sizes = if self.is_host {
            BlockSizes::of_host(trace)
        } else {
            let progress = Progress::new("replaying", trace.events.len() as u64);
            BlockSizes::of(trace, &progress)
        };
        let history = History::new(trace, &sizes);
        let has_stacks = { history.blocks.iter() }.any(|block| block.stack != StackId::NONE);
        let categories = has_stacks.then(|| Categories::of(trace, &history));
        let mut sites = CallSites::new(trace, &history);

        events.begin_process(&self.name)?;
        if are_timed {
            left_out.annotations += marks::write(events, trace, times)?;
        }
        left_out.driver_calls += calls::write_driver_calls(events, trace, times, &mut sites)?;
        left_out.errors += calls::write_errors(events, trace, &history, times, &mut sites)?;
        Curves::new(trace, &history, categories.as_ref()).write(events, times)?;

        events.begin_process(&format!("{}: blocks", self.name))?;
        blocks::write(events, &history, categories.as_ref(), times, &mut sites)
    }
}

impl LeftOut {
    /// Returns a sentence about what is left out, if anything is.
    fn text(&self) -> Option<String> {
        let counts = [
            (self.driver_calls, "driver call"),
            (self.errors, "out-of-memory error"),
            (self.annotations, "annotation"),
        ];
        let counts = counts.iter().filter(|(count, _)| *count > 0);
        let counts: Vec<String> = counts
            .map(|&(count, what)| format::counted(count as u64, what))
            .collect();
        let counts = counts.join(", ");
        (!counts.is_empty()).then(|| format!("the file leaves out {counts}: there are too many"))
    }
}
