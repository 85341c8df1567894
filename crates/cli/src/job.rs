//! The figures of a recorded job, for everything that is printed about it.

use std::path::Path;

use lowtide_core::Bytes;
use lowtide_history::History;
use lowtide_trace::{OneLine, Trace};
use serde::Serialize;

use crate::format::{self, SizeUnit};
use crate::recording::{LostBeginning, Recording};

/// The size of a page: the least memory that the driver maps at once.
const PAGE: Bytes = Bytes::mib(2);

/// The figures of a recorded job, before any strategy is tried.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Job {
    /// The path of the file, as it was named.
    pub(crate) path: String,
    /// The device's number.
    pub(crate) device: u32,
    /// The number of events.
    pub(crate) events: usize,
    /// The number of requests.
    pub(crate) allocs: usize,
    /// The number of streams with requests.
    pub(crate) streams: usize,
    /// Peak live bytes, each request rounded up to 512 bytes.
    #[serde(serialize_with = "crate::format::bytes")]
    pub(crate) peak_live_bytes: Bytes,
    /// Peak live bytes in whole pages of 2 MiB.
    #[serde(serialize_with = "crate::format::bytes")]
    pub(crate) peak_live_pages_bytes: Bytes,
    /// Peak requested bytes.
    #[serde(serialize_with = "crate::format::bytes")]
    pub(crate) peak_requested_bytes: Bytes,
    /// The job's own peak reserved bytes.
    #[serde(serialize_with = "crate::format::bytes")]
    pub(crate) peak_reserved_bytes: Bytes,
    /// The strategy that served the job, with the settings in force.
    pub(crate) strategy: String,
    /// The job's reserved bytes, if the recording lost its beginning.
    pub(crate) lost_beginning: Option<LostBeginning>,
    /// Whether the recording's end is missing, for example because the job was killed.
    pub(crate) is_cut_off: bool,
    /// The least number of events missing at its end, because other threads went on while the snapshot was taken.
    pub(crate) missed_events: u64,
    /// The duration of the recording in microseconds, if it has times.
    pub(crate) duration_us: Option<f64>,
    /// Whether lowtide served the job, by what the recording says.
    #[serde(skip)]
    pub(crate) is_on_lowtide: bool,
    /// Whether memory was paused, so that what was live was not all on the card.
    #[serde(skip)]
    pub(crate) has_pauses: bool,
}

impl Job {
    /// Returns the figures of a recording. Linear time.
    pub(crate) fn new(recording: &Recording) -> Job {
        Job::of_trace(&recording.path, &recording.trace, recording.is_cut_off)
    }

    /// Returns the figures of a recording at `path`, whose end may be missing. Linear time.
    pub(crate) fn of_trace(path: &Path, trace: &Trace, is_cut_off: bool) -> Job {
        let peak_live_bytes = trace.peak_live_bytes();
        Job {
            path: path.display().to_string(),
            device: trace.device,
            events: trace.events.len(),
            allocs: trace.allocs(),
            streams: trace.streams(),
            peak_live_bytes,
            peak_live_pages_bytes: whole_pages(peak_live_bytes),
            peak_requested_bytes: trace.peak_requested_bytes(),
            peak_reserved_bytes: trace.peak_reserved_bytes(),
            strategy: trace.strategy_in_force(),
            is_on_lowtide: !trace.settings.strategy.is_empty(),
            lost_beginning: LostBeginning::of(trace),
            is_cut_off,
            missed_events: trace.missed_events,
            duration_us: duration_us(trace),
            has_pauses: trace.has_pauses(),
        }
    }

    /// Returns these figures by the recording's history, which does not count paused memory.
    pub(crate) fn with_history(self, history: &History) -> Job {
        let peak_live_bytes = history.peak_live.fragmentation.live;
        Job {
            peak_live_bytes,
            peak_live_pages_bytes: whole_pages(peak_live_bytes),
            peak_requested_bytes: history.peak_requested,
            peak_reserved_bytes: history.peak_reserved.fragmentation.reserved,
            has_pauses: false,
            ..self
        }
    }

    /// Returns two lines for people, without the last line feed.
    pub(crate) fn headline(&self) -> String {
        format!(
            "{}, device {}: {}, {} on {}\npeak live {}, peak reserved {}{}, with {}",
            format::path(Path::new(&self.path)),
            self.device,
            format::counted(self.events as u64, "event"),
            format::counted(self.allocs as u64, "allocation"),
            format::counted(self.streams as u64, "stream"),
            self.peak_live_bytes,
            self.peak_reserved_bytes,
            self.ratio_text(),
            self.settings_text(),
        )
    }

    /// Returns how many times the peak of live bytes was reserved, in parentheses; empty if that is not known.
    fn ratio_text(&self) -> String {
        if self.has_pauses || self.peak_live_bytes.is_zero() {
            return String::new();
        }
        let ratio = format::ratio(self.peak_reserved_bytes, self.peak_live_bytes);
        format!(" ({ratio:.2} times that)")
    }

    /// Returns what served the job.
    pub(crate) fn settings_text(&self) -> String {
        let of_pytorch = self.strategy.strip_prefix("caching");
        match of_pytorch.filter(|_| !self.is_on_lowtide) {
            Some("") => "PyTorch's default settings".to_owned(),
            Some(conf) => OneLine(conf.trim_start_matches(':')).to_string(),
            None => format!("lowtide's `{}`", OneLine(&self.strategy)),
        }
    }
}

/// Returns the least bytes in whole pages that hold `live` bytes. A file may claim any sum up to 2^64 - 1.
fn whole_pages(live: Bytes) -> Bytes {
    live.saturating_add(PAGE - Bytes(1)).round_down(PAGE)
}

/// Returns a line about the least memory that any allocator reserves for a job without pauses, with this peak of live
/// bytes.
pub(crate) fn at_least(peak_live: Bytes) -> String {
    let unit = SizeUnit::for_sizes_up_to(peak_live);
    let [live, pages] = [peak_live, whole_pages(peak_live)].map(|size| unit.number(size));
    let unit = unit.name();
    format!(
        "any allocator reserves at least {live} {unit}, the peak of live bytes; {pages} {unit} in whole pages of 2 MiB"
    )
}

/// Returns the time from the first event to the last, in microseconds; `None` if the recording has no times.
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
    fn whole_pages_hold_the_live_bytes() {
        for (live, pages) in [(0, 0), (1, 2), (2 << 20, 2), ((2 << 20) + 512, 4)] {
            assert_eq!(whole_pages(Bytes(live)), Bytes::mib(pages), "{live}");
        }
        assert_eq!(whole_pages(Bytes(u64::MAX)) % PAGE, Bytes::ZERO);
    }

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
