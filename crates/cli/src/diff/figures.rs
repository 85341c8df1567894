//! The figures of two jobs side by side, and what changed their reserved memory.

use std::cmp::Reverse;
use std::fmt::Write as _;

use console::style;
use lowtide_core::{Action, Bytes, Cause};
use lowtide_history::{History, Moment};
use lowtide_trace::{StackId, Trace, TraceEvent};

use crate::job::Job;
use crate::{format, moment};

/// The share by which live memory may differ between jobs that are the same but for their settings.
const ABOUT: f64 = 0.01;

/// The figures of two jobs, the first one's first.
pub(super) struct Figures<'a> {
    pub(super) jobs: &'a [Job; 2],
    /// The instants of the peak reserved bytes.
    pub(super) peaks: [&'a Moment; 2],
    /// The number of times that memory was released to the driver.
    pub(super) released: [usize; 2],
    /// The number of requests for which memory had to be released first; `None` if no stacks show that.
    pub(super) retries: [Option<usize>; 2],
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
        let releases = |action| matches!(action, Action::SegmentFree | Action::SegmentUnmap);
        Figures {
            jobs,
            peaks: histories.each_ref().map(|history| &history.peak_reserved),
            released: traces.map(|trace| {
                let events = trace.events.iter();
                events.filter(|event| releases(event.event.action)).count()
            }),
            retries: traces.map(retries),
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
        let settings = self.settings();
        let settings = settings.map(|[before, after]| format!("settings: {before} → {after}\n"));
        let mut text = format!(
            "\n{}\n{}peak live {live_before} → {live_after}; {ratio_before} → {ratio_after} times that was reserved\n{}\n",
            style(first).bold(),
            settings.unwrap_or_default(),
            self.causes_text(),
        );
        let retries = self.retries.map(Option::unwrap_or_default);
        let counts = [
            ("memory released to the driver", self.released, "times"),
            ("released and retried at", retries, "requests"),
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

    /// Returns the settings of both, if they differ.
    fn settings(&self) -> Option<[String; 2]> {
        let settings = self.jobs.each_ref().map(Job::settings_text);
        (settings[0] != settings[1]).then_some(settings)
    }

    /// Returns what most of the difference in reserved bytes is due to: other settings if about as much is live, else the
    /// part of the reserved bytes that changed most in their direction.
    pub(super) fn reason(&self) -> String {
        let [before, after] = self.peaks.map(|peak| &peak.fragmentation);
        if before.reserved == after.reserved {
            return "no change".to_owned();
        }
        let live = self.jobs.each_ref().map(|job| job.peak_live_bytes);
        let is_as_live = live[0].get().abs_diff(live[1].get()) <= live[0].scale(ABOUT).get();
        if let Some([before, after]) = self.settings().filter(|_| is_as_live) {
            return format!("{after} instead of {before}");
        }
        let direction = if after.reserved > before.reserved {
            1
        } else {
            -1
        };
        let towards = |[before, after]: [Bytes; 2]| {
            direction * (i128::from(after.get()) - i128::from(before.get()))
        };
        let of = |cause: Cause| [before.of_cause(cause), after.of_cause(cause)];
        let largest = Cause::ALL
            .into_iter()
            .max_by_key(|&cause| towards(of(cause)));
        match largest {
            Some(cause) if towards(of(cause)) > towards([before.live, after.live]) => {
                self.cause_text(cause)
            }
            _ => format!(
                "{} is live at that moment",
                format::difference(after.live, before.live)
            ),
        }
    }
}

/// Returns the number of requests for which cached memory was released, and then memory taken from the driver: the release
/// has the request's stack, and `empty_cache` its own. `None` if releases have no stacks.
fn retries(trace: &Trace) -> Option<usize> {
    let mut retries = 0;
    let mut released_in = None;
    let mut takes_anew = false;
    for TraceEvent { event, stack, .. } in &trace.events {
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap if *stack == StackId::NONE => return None,
            Action::SegmentFree | Action::SegmentUnmap => {
                (released_in, takes_anew) = (Some(*stack), false);
            }
            Action::SegmentAlloc | Action::SegmentMap => takes_anew = true,
            Action::OutOfMemory => retries += usize::from(released_in.take() == Some(*stack)),
            Action::Alloc if takes_anew => {
                retries += usize::from(released_in.take() == Some(*stack));
            }
            _ => released_in = None,
        }
    }
    Some(retries)
}

#[cfg(test)]
mod tests {
    use lowtide_core::{DeviceAddress, Event, MempoolId, Stream};
    use lowtide_trace::NoteId;

    use super::*;

    #[test]
    fn a_retry_is_a_request_that_released_memory_and_took_other_memory() {
        use Action::{Alloc, FreeCompleted, OutOfMemory, SegmentAlloc, SegmentFree, SegmentMap};
        let [request, other] = retry_stacks();
        let count = |events: &[(Action, StackId)]| {
            let event = |&(action, stack)| TraceEvent {
                event: Event {
                    action,
                    pool: MempoolId::DEFAULT,
                    address: DeviceAddress(0),
                    size: Bytes(512),
                    stream: Stream::DEFAULT,
                },
                time_us: 0,
                stack,
                pool_known: true,
                note: NoteId::NONE,
            };
            retries(&Trace {
                events: events.iter().map(event).collect(),
                ..Trace::default()
            })
        };
        let of = |stack| {
            [
                (SegmentFree, stack),
                (SegmentFree, stack),
                (SegmentAlloc, request),
                (Alloc, request),
            ]
        };
        assert_eq!(count(&of(request)), Some(1));
        assert_eq!(count(&of(other)), Some(0), "`empty_cache` before a miss");
        assert_eq!(count(&[of(request), of(request)].concat()), Some(2));
        let failed = [(SegmentFree, request), (OutOfMemory, request)];
        assert_eq!(count(&failed), Some(1));
        let hit = [(SegmentFree, request), (Alloc, request)];
        assert_eq!(count(&hit), Some(0), "it took nothing from the driver");
        let between = [
            (SegmentFree, request),
            (FreeCompleted, request),
            (SegmentMap, request),
            (Alloc, request),
        ];
        assert_eq!(count(&between), Some(0));
        assert_eq!(count(&of(StackId::NONE)), None);
    }

    fn retry_stacks() -> [StackId; 2] {
        let mut stacks = lowtide_trace::StackTable::new();
        ["request", "empty_cache"].map(|name| {
            let frame = lowtide_trace::Frame {
                name: name.into(),
                filename: "train.py".into(),
                line: 1,
            };
            stacks.intern([frame])
        })
    }
}
