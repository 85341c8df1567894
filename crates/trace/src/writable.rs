//! Checks before writing that a snapshot can be read back.

use lowtide_core::{Action, SegmentSnapshot};

use crate::block_stacks::final_block_stacks;
use crate::error::{Result, TraceError};
use crate::model::{DIVISIONS_MAX, Snapshot, Trace};
use crate::parts::DEVICES_MAX;
use crate::recover;

/// Returns an error if a snapshot could not be read back, because no recording has such contents.
///
/// # Errors
///
/// The same as for reading it.
pub(crate) fn check_writable(snapshot: &Snapshot) -> Result<()> {
    snapshot.check_is_one()?;
    let devices: Vec<u32> = snapshot.traces.iter().map(|trace| trace.device).collect();
    let are_ascending = devices.is_sorted_by(|before, after| before < after);
    if !are_ascending || devices.last().is_some_and(|&last| last >= DEVICES_MAX) {
        let what = format!("the devices {devices:?} are not ascending numbers below {DEVICES_MAX}");
        return Err(TraceError::contradiction(what));
    }
    let mut traces = snapshot.traces.iter().chain(&snapshot.host);
    traces.try_for_each(check_trace)
}

fn check_trace(trace: &Trace) -> Result<()> {
    let divisions = trace.settings.roundup_power2_divisions.len();
    if divisions > DIVISIONS_MAX {
        let what = format!("{divisions} `roundup_power2_divisions`, more than {DIVISIONS_MAX}");
        return Err(TraceError::contradiction(what));
    }
    recover::check_events(trace.device, &trace.events)?;
    recover::check_paused(&trace.initial.paused)?;
    if { trace.initial.paused.iter() }.any(|event| event.event.action != Action::SegmentPaused) {
        let what = "what was paused before the first event is not only that";
        return Err(TraceError::contradiction(what));
    }
    if let Some(segment) = { trace.segments.iter() }.find(|segment| !is_tiled(segment)) {
        let address = segment.address;
        let what = format!("the blocks of the segment at {address} do not tile it");
        return Err(TraceError::contradiction(what));
    }
    let stacks = final_block_stacks(trace);
    recover::check(trace.device, &trace.events, &trace.segments, &stacks)
}

fn is_tiled(segment: &SegmentSnapshot) -> bool {
    let mut at = segment.address.get();
    let mut is_next = true;
    for block in &segment.blocks {
        is_next &= block.address.get() == at && !block.size.is_zero();
        at = at.saturating_add(block.size.get());
    }
    is_next && at == segment.address.get().saturating_add(segment.size.get())
}
