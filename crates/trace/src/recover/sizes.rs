//! How long the blocks were that were there before the first event and freed before the end.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, DeviceAddress};

use crate::model::{InitialBlock, InitialState, TraceEvent};

/// Free ends of large blocks up to this size are not split off.
const UNSPLIT_END_MAX: Bytes = Bytes::mib(1);

/// Notes how long blocks are, where the first request that takes of the free memory behind one tells: it takes the
/// beginning of it, and an allocator leaves no hole. O(n log m) for n events and m blocks.
pub(super) fn settle(initial: &mut InitialState, events: &[TraceEvent]) {
    let mut open = Open::new(initial);
    for TraceEvent { event, .. } in events {
        if open.ends.is_empty() {
            return;
        }
        match event.action {
            Action::Alloc => open.settle_before(event.address, &mut initial.blocks),
            Action::FreeCompleted => drop(open.ends.remove(&event.address)),
            _ => {}
        }
    }
}

/// The blocks that may be longer than they say: by address the place of each, and where what is behind it ends.
struct Open {
    ends: BTreeMap<DeviceAddress, (usize, DeviceAddress)>,
}

impl Open {
    fn new(initial: &InitialState) -> Open {
        let mut segments = initial.segments.iter().peekable();
        let mut ends = BTreeMap::new();
        for (place, block) in initial.blocks.iter().enumerate() {
            let holds = |end: DeviceAddress| block.address < end;
            while segments
                .next_if(|segment| !holds(segment.address + segment.size))
                .is_some()
            {}
            let Some(segment) = segments.peek() else {
                break;
            };
            if !segment.is_large || segment.is_expandable {
                continue;
            }
            let segment_end = segment.address + segment.size;
            let next = initial.blocks.get(place + 1).map(|next| next.address);
            let end = next.map_or(segment_end, |next| next.min(segment_end));
            if block.address + block.size < end {
                ends.insert(block.address, (place, end));
            }
        }
        Open { ends }
    }

    /// Notes that a block of which nothing was freed before ends where a request was served.
    fn settle_before(&mut self, served: DeviceAddress, blocks: &mut [InitialBlock]) {
        let before = self.ends.range(..served).next_back();
        if let Some((&address, &(place, end))) = before
            && served < end
        {
            self.ends.remove(&address);
            let (block, size) = (&mut blocks[place], served.offset_from(address));
            if (block.size..=block.size + UNSPLIT_END_MAX).contains(&size) {
                block.size = size;
            }
        }
    }
}
