//! The slices of the program's own marks.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use lowtide_trace::{AnnotationStage, RecordedText, Trace};

use super::event::Events;
use super::lanes::Lanes;
use super::times::{Times, nanoseconds};

/// The most rows of marks: a mark for each that it lies in, and for each thread.
const ROWS_MAX: usize = 16;

/// The most slices: the longest.
const SLICES_MAX: usize = 10_000;

/// Writes a slice for each start of a mark and its end. Returns the number of slices that are left out, because there
/// are more than [`SLICES_MAX`], or more than [`ROWS_MAX`] at once: the shortest.
pub(super) fn write(events: &mut Events<'_>, trace: &Trace, times: &Times) -> Result<usize> {
    let mut spans = spans(trace, times.ends().1);
    spans.sort_by_key(|(time, _)| time.start.saturating_sub(time.end));
    let mut left_out = spans.len().saturating_sub(SLICES_MAX);
    let mut lanes = Lanes::new(ROWS_MAX);
    for (time, name) in spans.into_iter().take(SLICES_MAX) {
        left_out += usize::from(!lanes.put(time, name));
    }
    for (number, lane) in (1..).zip(lanes.into_rows()) {
        let row = events.add_row(&format!("annotations {number:02}"))?;
        for (time, name) in lane {
            events.slice(row, &name.to_string(), (time.start, time.end), None::<()>)?;
        }
    }
    Ok(left_out)
}

/// Returns the marks: the time in nanoseconds, which is not empty, and the name. A mark without an end lasts to the end
/// of the recording. An end belongs to the last start of its name.
fn spans(trace: &Trace, end_ns: i64) -> Vec<(Range<i64>, &RecordedText)> {
    let mut open: BTreeMap<&RecordedText, Vec<i64>> = BTreeMap::new();
    let mut spans = Vec::new();
    let span = |start: i64, end: i64| start..end.max(start.saturating_add(1));
    for mark in &trace.annotations {
        let time_ns = nanoseconds(mark.time_us);
        let starts = open.entry(&mark.name).or_default();
        match mark.stage {
            AnnotationStage::Start => starts.push(time_ns),
            AnnotationStage::End => {
                let start = starts.pop();
                spans.extend(start.map(|start| (span(start, time_ns), &mark.name)));
            }
        }
    }
    for (name, starts) in open {
        spans.extend({ starts.into_iter() }.map(|start| (span(start, end_ns), name)));
    }
    spans
}
