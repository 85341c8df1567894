//! Bounds for the numbers in a recording. Within them no sum of addresses and sizes overflows, also not as a signed
//! number, and also not if every size is rounded up to twice itself.

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, Event, SegmentSnapshot};

use crate::error::{Result, TraceError};
use crate::model::TraceEvent;

/// The end of a device's addresses. CUDA's are below 2^57.
const ADDRESSES_END: DeviceAddress = DeviceAddress(1 << 62);

/// The largest block or segment: many times the memory of any device. A replay takes memory for each of its pages.
const BYTES_MAX: Bytes = Bytes(8 << 40);

/// The most bytes of all events of a device together, each counted by its size. A job with a million events of 1
/// TiB each has half of this.
const ALL_BYTES_MAX: Bytes = Bytes(1 << 61);

/// Returns an error if an event has memory that no device has, or if all events together have more than any job
/// handles. Linear time.
///
/// # Errors
///
/// If there is such an event. The error names the first.
pub(crate) fn check_events(device: u32, events: &[TraceEvent]) -> Result<()> {
    let mut all = Bytes::ZERO;
    for (index, recorded) in events.iter().enumerate() {
        let Event { action, size, .. } = recorded.event;
        let address = recorded.event.address;
        // A refused request allocated nothing.
        if action != Action::OutOfMemory {
            all = all.saturating_add(size);
        }
        let is_refused = action == Action::OutOfMemory && size <= Bytes::REQUEST_MAX;
        let is_sound = is_refused && address < ADDRESSES_END || is_memory(address, size);
        if is_sound && all <= ALL_BYTES_MAX {
            continue;
        }
        let what = if is_sound {
            format!("the events up to here are about {all}, which no job handles")
        } else {
            format!("{} of {size} at {address} is no memory", action.name())
        };
        return Err(TraceError::contradiction(what).at_event(device, index));
    }
    Ok(())
}

/// Returns an error if a pause has memory that no device has.
pub(crate) fn check_paused(paused: &[TraceEvent]) -> Result<()> {
    let mut events = paused.iter().map(|recorded| recorded.event);
    match events.find(|event| !is_memory(event.address, event.size)) {
        None => Ok(()),
        Some(Event { address, size, .. }) => Err(TraceError::contradiction(format!(
            "{size} at {address}, which are no memory, were paused before the first event"
        ))),
    }
}

/// Returns an error if a segment has memory that no device has, or if a block in use is shorter than its request.
pub(crate) fn check_segments(segments: &[SegmentSnapshot]) -> Result<()> {
    for segment in segments {
        if !is_memory(segment.address, segment.size) {
            return Err(TraceError::contradiction(format!(
                "a segment of {} at {} is no memory",
                segment.size, segment.address
            )));
        }
        let mut in_use =
            { segment.blocks.iter() }.filter(|block| block.status != BlockStatus::Inactive);
        if let Some(block) = in_use.find(|block| block.requested > block.size) {
            return Err(TraceError::contradiction(format!(
                "the block of {} at {} is for a request of {}",
                block.size, block.address, block.requested
            )));
        }
    }
    Ok(())
}

/// Returns whether a device can have this memory.
fn is_memory(address: DeviceAddress, size: Bytes) -> bool {
    address < ADDRESSES_END && size <= BYTES_MAX
}
