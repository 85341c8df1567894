//! Adds regions and their pauses to a snapshot that PyTorch wrote.

use lowtide_core::Event;

use super::pauses::{Pause, Place, RegionPool};
use super::write::SnapshotWriter;
use crate::model::TraceEvent;
use crate::pickle::opcode;
use crate::stacks::StackTable;
use crate::text::RecordedText;

/// A paused segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PausedSegment {
    /// The device it is on.
    pub device: u32,
    /// The pause: an [`Action::SegmentPaused`](lowtide_core::Action::SegmentPaused).
    pub event: Event,
    /// The time of the pause, in microseconds since 1970.
    pub time_us: i64,
    /// The tag of its region.
    pub tag: RecordedText,
}

/// Adds regions' pools and paused segments to the bytes of a snapshot that another program wrote. Returns `false`,
/// and leaves the bytes unchanged, if they do not end like a snapshot of PyTorch.
pub fn add_regions(pickle: &mut Vec<u8>, regions: &[RegionPool], paused: &[PausedSegment]) -> bool {
    if !is_dict(pickle) {
        return false;
    }
    let mut stacks = StackTable::new();
    let pauses = paused.iter().map(|segment| {
        let &PausedSegment { event, time_us, .. } = segment;
        let event = TraceEvent::with_metadata(event, time_us, segment.tag.raw(), &mut stacks);
        let place = Place::ByTime;
        (segment.device, Pause { place, event })
    });
    let pauses: Vec<(u32, Pause)> = pauses.collect();
    let length = pickle.len();
    pickle.pop();
    let is_added = SnapshotWriter::add_regions(&mut *pickle, regions, &pauses, &stacks).is_ok();
    if !is_added {
        pickle.truncate(length - 1);
        pickle.push(opcode::STOP);
    }
    is_added
}

/// Returns whether a pickle is a dict that its last opcodes complete, as PyTorch writes it. C++ also memoizes it.
fn is_dict(pickle: &[u8]) -> bool {
    let is_completed = matches!(
        pickle,
        [.., opcode::SETITEMS, opcode::STOP]
            | [.., opcode::SETITEMS, opcode::BINPUT, _, opcode::STOP]
            | [
                ..,
                opcode::SETITEMS,
                opcode::LONG_BINPUT,
                _,
                _,
                _,
                _,
                opcode::STOP
            ]
    );
    is_completed && pickle.starts_with(&[opcode::PROTO, 2, opcode::EMPTY_DICT])
}
