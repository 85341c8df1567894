//! What numbers a recording can have. Within these bounds no sum of addresses and sizes overflows, not even a signed
//! one, and not where every size is rounded up to twice itself.

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, Event, SegmentSnapshot};

use crate::error::TraceError;
use crate::model::TraceEvent;

/// The end of the addresses that a device can have. CUDA's are below 2^57.
const ADDRESSES_END: DeviceAddress = DeviceAddress(1 << 62);

/// The most memory in one piece: many times what any device has. A replay takes memory for each page of it.
const BYTES_MAX: Bytes = Bytes(8 << 40);

/// The most that all events of a device are about, each by its size: a job that handles 1 TiB in each of a million
/// events handles half of this.
const ALL_BYTES_MAX: Bytes = Bytes(1 << 61);

/// Fails where an event of a device is about memory that no device has, or all events are about more than any job
/// handles. Linear time.
///
/// # Errors
///
/// The first such event.
pub(crate) fn check_events(device: u32, events: &[TraceEvent]) -> Result<(), TraceError> {
    let mut all = Bytes::ZERO;
    for (index, recorded) in events.iter().enumerate() {
        let Event {
            action,
            address,
            size,
            ..
        } = recorded.event;
        // What was refused was not there.
        if action != Action::OutOfMemory {
            all = all.saturating_add(size);
        }
        let is_refused = action == Action::OutOfMemory && size <= Bytes::REQUEST_MAX;
        let what = match is_refused && address < ADDRESSES_END || is_memory(address, size) {
            true if all <= ALL_BYTES_MAX => continue,
            true => format!("the events up to here are about {all}, which no job handles"),
            false => format!("{} of {size} at {address} is no memory", action.name()),
        };
        return Err(TraceError::contradiction(what).at_event(device, index));
    }
    Ok(())
}

/// Fails where something that is no memory is said to be paused.
pub(crate) fn check_paused(paused: &[TraceEvent]) -> Result<(), TraceError> {
    let mut events = paused.iter().map(|recorded| recorded.event);
    match events.find(|event| !is_memory(event.address, event.size)) {
        None => Ok(()),
        Some(Event { address, size, .. }) => Err(TraceError::contradiction(format!(
            "{size} at {address}, which are no memory, were paused before the first event"
        ))),
    }
}

/// Fails where a segment is no memory, or a block in use is shorter than its request.
pub(crate) fn check_segments(segments: &[SegmentSnapshot]) -> Result<(), TraceError> {
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

/// Returns whether a device can have memory there.
fn is_memory(address: DeviceAddress, size: Bytes) -> bool {
    address < ADDRESSES_END && size <= BYTES_MAX
}
