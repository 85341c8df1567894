//! The figures of two jobs side by side, and what changed their reserved memory.

use std::cmp::Reverse;
use std::fmt::Write as _;

use console::style;
use lowtide_core::{Action, Bytes, Cause};
use lowtide_history::{History, Moment};
use lowtide_trace::Trace;

use crate::job::Job;
use crate::{format, moment};

/// The figures of two jobs, the first one's first.
pub(super) struct Figures<'a> {
    pub(super) jobs: &'a [Job; 2],
    /// The instants of the peak reserved bytes.
    pub(super) peaks: [&'a Moment; 2],
    /// The number of times that memory was given back to the driver.
    pub(super) given_back: [usize; 2],
    /// The number of requests that failed.
    pub(super) out_of_memory: [usize; 2],
}

impl<'a> Figures<'a> {
    /// Returns the figures of two jobs. Linear time.
    pub(super) fn of(
        jobs: &'a [Job; 2],
        traces: [&Trace; 2],
        histories: &'a [History; 2],
    ) -> Figures<'a> {
        let gives_back = |action| matches!(action, Action::SegmentFree | Action::SegmentUnmap);
        Figures {
            jobs,
            peaks: histories.each_ref().map(|history| &history.peak_reserved),
            given_back: traces.map(|trace| {
                let events = trace.events.iter();
                events
                    .filter(|event| gives_back(event.event.action))
                    .count()
            }),
            out_of_memory: histories.each_ref().map(|history| history.refusals.len()),
        }
    }

    /// Returns the figures for people, what changed first.
    pub(super) fn text(&self) -> String {
        let [before, after] = self.jobs.each_ref().map(|job| job.peak_reserved_bytes);
        let change = match format::percent_change(after, before) {
            change if change.is_empty() => change,
            change => format!(" ({change})"),
        };
        let first = format!("reserved {before} → {after}{change}: {}", self.reason());
        let [live_before, live_after] = self.jobs.each_ref().map(|job| job.peak_live_bytes);
        let [ratio_before, ratio_after] = self.jobs.each_ref().map(|job| {
            format!(
                "{:.2}",
                format::ratio(job.peak_reserved_bytes, job.peak_live_bytes)
            )
        });
        let mut text = format!(
            "\n{}\npeak live {live_before} → {live_after}; {ratio_before} → {ratio_after} times that was reserved\n{}\n",
            style(first).bold(),
            self.causes_text(),
        );
        let counts = [
            ("memory given back to the driver", self.given_back, "times"),
            ("out of memory at", self.out_of_memory, "requests"),
        ];
        for (what, counts, of) in counts
            .into_iter()
            .filter(|(_, counts, _)| *counts != [0, 0])
        {
            let [before, after] = counts.map(|count| format::count(count as u64));
            let _ = writeln!(text, "{what} {before} → {after} {of}");
        }
        text
    }

    /// Returns how many reserved bytes were not live in both, and the causes that changed.
    fn causes_text(&self) -> String {
        let [before, after] = self.peaks.map(|peak| &peak.fragmentation);
        let [rest_before, rest_after] = [before, after].map(|it| it.reserved - it.live);
        let mut causes: Vec<Cause> = Cause::ALL.to_vec();
        causes.retain(|&cause| self.change(cause) > 0);
        causes.sort_by_key(|&cause| Reverse(self.change(cause)));
        let parts = causes.into_iter().map(|cause| self.cause_text(cause));
        let parts = parts.collect::<Vec<_>>().join(", ");
        let colon = if parts.is_empty() { "" } else { ": " };
        format!(
            "not live at the peak of reserved memory {rest_before} → {rest_after}{colon}{parts}"
        )
    }

    /// Returns by how many bytes a cause differs.
    fn change(&self, cause: Cause) -> u64 {
        let [before, after] = self
            .peaks
            .map(|peak| peak.fragmentation.of_cause(cause).get());
        after.abs_diff(before)
    }

    fn cause_text(&self, cause: Cause) -> String {
        let [before, after] = self.peaks.map(|peak| peak.fragmentation.of_cause(cause));
        format!("{} {before} → {after}", moment::cause_text(cause))
    }

    /// Returns what most of the difference in reserved bytes is due to.
    pub(super) fn reason(&self) -> String {
        let [before, after] = self.jobs;
        let [settings_before, settings_after] = [before, after].map(Job::settings_text);
        let change = |of: fn(&Job) -> Bytes| of(before).get().abs_diff(of(after).get());
        let [reserved, live] = [
            change(|job| job.peak_reserved_bytes),
            change(|job| job.peak_live_bytes),
        ];
        let largest = Cause::ALL
            .into_iter()
            .max_by_key(|&cause| self.change(cause));
        match largest {
            _ if settings_before != settings_after => {
                format!("{settings_after} instead of {settings_before}")
            }
            _ if reserved == 0 => "no change".to_owned(),
            Some(cause) if self.change(cause) > live => self.cause_text(cause),
            _ => {
                let live = format::difference(after.peak_live_bytes, before.peak_live_bytes);
                format!("{live} is live at the peak")
            }
        }
    }
}
