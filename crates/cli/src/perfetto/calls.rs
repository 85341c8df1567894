//! The slices of driver calls, and the out-of-memory errors.

use std::cmp::Reverse;

use anyhow::Result;
use lowtide_core::Action;
use lowtide_history::{History, Refusal, Site, stream_text};
use lowtide_trace::{StackId, Trace, TraceEvent};
use serde::Serialize;

use super::call_sites::CallSites;
use super::event::Events;
use super::times::Times;

/// The most slices of driver calls, and the most errors.
const SLICES_MAX: usize = 10_000;

/// Calls of one kind without another event in between: a slice.
struct Run<'a> {
    /// The first instant after the first call.
    first: u32,
    /// The first instant after the last call.
    last: u32,
    event: &'a TraceEvent,
    calls: u32,
    bytes: u64,
}

/// What is known about driver calls.
#[derive(Serialize)]
struct Calls<'a> {
    bytes: u64,
    calls: u32,
    /// Where the first begins.
    address: String,
    stream: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    region: Option<String>,
    #[serde(flatten)]
    code: Option<Code<'a>>,
}

/// What is known about an out-of-memory error.
#[derive(Serialize)]
struct Error<'a> {
    requested_bytes: u64,
    device_free_bytes: u64,
    allocated_bytes: u64,
    reserved_bytes: u64,
    #[serde(flatten)]
    code: Option<Code<'a>>,
}

/// The code that made a call.
#[derive(Serialize)]
struct Code<'a> {
    call_site: &'a str,
    stack: &'a [String],
}

/// Writes the driver calls. Returns the number of calls that are left out, because there are more than [`SLICES_MAX`]
/// slices: the smallest.
pub(super) fn write_driver_calls(
    events: &mut Events<'_>,
    trace: &Trace,
    times: &Times,
    sites: &mut CallSites<'_>,
) -> Result<usize> {
    let mut runs = runs(trace);
    if runs.is_empty() {
        return Ok(0);
    }
    runs.sort_by_key(|run| Reverse(run.bytes));
    let left_out = runs.split_off(SLICES_MAX.min(runs.len()));
    runs.sort_by_key(|run| run.first);
    let row = events.add_row("driver calls")?;
    for run in runs {
        let TraceEvent {
            event, note, stack, ..
        } = *run.event;
        let tag = trace.stacks.note(note).user_metadata;
        let region = tag.filter(|_| event.action.is_pause());
        let calls = Calls {
            bytes: run.bytes,
            calls: run.calls,
            address: format!("{:#x}", event.address.get()),
            stream: stream_text(event.stream),
            region: region.map(|tag| tag.to_string()),
            code: code(stack, sites),
        };
        let time_ns = (times.at(run.first), times.at(run.last));
        events.slice(row, event.action.name(), time_ns, Some(calls))?;
    }
    Ok(left_out.iter().map(|run| run.calls as usize).sum())
}

/// Writes the out-of-memory errors, the first [`SLICES_MAX`]. Returns the number of those that are left out.
pub(super) fn write_errors(
    events: &mut Events<'_>,
    trace: &Trace,
    history: &History,
    times: &Times,
    sites: &mut CallSites<'_>,
) -> Result<usize> {
    if history.refusals.is_empty() {
        return Ok(0);
    }
    let row = events.add_row("out-of-memory errors")?;
    for refusal in history.refusals.iter().take(SLICES_MAX) {
        let Refusal {
            requested,
            device_free,
            moment,
            ..
        } = refusal;
        let stack = trace.events[moment.instant as usize - 1].stack;
        let error = Error {
            requested_bytes: requested.get(),
            device_free_bytes: device_free.get(),
            allocated_bytes: moment.fragmentation.live.get(),
            reserved_bytes: moment.fragmentation.reserved.get(),
            code: code(stack, sites),
        };
        let name = format!("out of memory: {requested}");
        events.instant(row, &name, times.at(moment.instant), error)?;
    }
    Ok(history.refusals.len().saturating_sub(SLICES_MAX))
}

/// Returns the driver calls, in order.
fn runs(trace: &Trace) -> Vec<Run<'_>> {
    let mut runs: Vec<Run<'_>> = Vec::new();
    for (instant, event) in (1..).zip(&trace.events) {
        let action = event.event.action;
        let bytes = event.event.size.get();
        if !action.is_segment() && !action.is_pause() {
            continue;
        }
        let before = runs.last_mut();
        match before.filter(|run| run.last + 1 == instant && is_alike(run.event, event)) {
            Some(run) => {
                run.last = instant;
                run.calls += 1;
                run.bytes = run.bytes.saturating_add(bytes);
            }
            None => runs.push(Run {
                first: instant,
                last: instant,
                event,
                calls: 1,
                bytes,
            }),
        }
    }
    runs
}

/// Returns whether two driver calls are of the same kind.
fn is_alike(one: &TraceEvent, other: &TraceEvent) -> bool {
    let kind = |recorded: &TraceEvent| -> (Action, _, _) {
        let event = recorded.event;
        (event.action, event.stream, recorded.note)
    };
    kind(one) == kind(other)
}

/// Returns the code that a stack names, if there is one.
fn code<'s>(stack: StackId, sites: &'s mut CallSites<'_>) -> Option<Code<'s>> {
    (stack != StackId::NONE).then(|| {
        let site = sites.get(Site::Stack(stack));
        Code {
            call_site: &site.line,
            stack: &site.stack,
        }
    })
}
