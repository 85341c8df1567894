//! The sizes of the blocks that were allocated before a recording's first event.

use std::collections::{BTreeMap, HashMap};

use lowtide_core::{Action, Bytes, CachingConfig, DeviceAddress};
use lowtide_trace::{InitialBlock, InitialSegment, Trace};

/// Free ends of large blocks up to this size are not split off, so no free block is this small.
pub(crate) const UNSPLIT_END_MAX: Bytes = Bytes::mib(1);

/// What the events show about the initial blocks, by the blocks' indices in the recording.
pub(crate) struct InitialSizes {
    /// Whether each block was freed before the end. The recording has the exact size of the others.
    freed: Vec<bool>,
    /// The address of the first request served from the memory behind each block while the block was allocated.
    /// PyTorch takes the beginning of a free block, so the block before it ends there.
    ends: Vec<Option<DeviceAddress>>,
}

impl InitialSizes {
    /// Reads the events up to the free of the last initial block. O(n log m) for n events and m blocks.
    pub(crate) fn new(trace: &Trace) -> InitialSizes {
        let blocks = &trace.initial.blocks;
        let places = blocks.iter().map(|block| block.address).zip(0..);
        let mut there: HashMap<DeviceAddress, usize> = places.collect();
        let mut open = free_behind(trace);
        let mut sizes = InitialSizes {
            freed: vec![false; blocks.len()],
            ends: vec![None; blocks.len()],
        };
        for event in trace.events.iter().map(|recorded| recorded.event) {
            if there.is_empty() {
                break;
            }
            match event.action {
                Action::FreeCompleted => {
                    open.remove(&event.address);
                    if let Some(place) = there.remove(&event.address) {
                        sizes.freed[place] = true;
                    }
                }
                Action::Alloc => {
                    let before = open.range(..event.address).next_back();
                    if let Some((&address, &(place, end))) = before
                        && event.address < end
                    {
                        open.remove(&address);
                        sizes.ends[place] = Some(event.address);
                    }
                }
                _ => {}
            }
        }
        sizes
    }

    /// Returns the size of the block at `place`. `room` is the distance to the next block or the segment's end. The
    /// size is all of `room` if blocks of this size are not split, and the recorded size if the block stays until
    /// the end.
    pub(crate) fn of(
        &self,
        place: usize,
        block: &InitialBlock,
        (segment, room): (&InitialSegment, Bytes),
        config: &CachingConfig,
    ) -> Bytes {
        if !self.freed[place] {
            return block.size.min(room);
        }
        let least = block.size.max(config.block_size(block.requested));
        if !segment.is_large || segment.is_expandable {
            return least.min(room);
        }
        if config.max_split_size.is_some_and(|max| least >= max) {
            return room;
        }
        let longest = least.saturating_add(UNSPLIT_END_MAX);
        let inferred = self.ends[place].map(|end| end.offset_from(block.address));
        let inferred = inferred.filter(|size| (least..=longest).contains(size));
        inferred.unwrap_or(least).min(room)
    }

    /// Returns whether the block at `place` in `segment` may have an end that was not split off: nothing that was
    /// served behind it shows its size.
    pub(crate) fn may_be_longer(&self, place: usize, segment: &InitialSegment) -> bool {
        let keeps_ends = segment.is_large && !segment.is_expandable;
        keeps_ends && self.freed[place] && self.ends[place].is_none()
    }
}

/// Returns by address the blocks that may have free memory behind them: each one's index, and the end of that
/// memory.
fn free_behind(trace: &Trace) -> BTreeMap<DeviceAddress, (usize, DeviceAddress)> {
    let mut segments = trace.initial.segments.iter().peekable();
    let mut open = BTreeMap::new();
    for (place, block) in trace.initial.blocks.iter().enumerate() {
        let is_before = |segment: &&InitialSegment| segment.address + segment.size <= block.address;
        while segments.next_if(is_before).is_some() {}
        let Some(segment) = segments.peek() else {
            break;
        };
        let segment_end = segment.address + segment.size;
        let next = trace.initial.blocks.get(place + 1);
        let end = next.map_or(segment_end, |next| next.address.min(segment_end));
        open.insert(block.address, (place, end));
    }
    open
}

#[cfg(test)]
mod tests {
    use lowtide_core::{BlockStatus, Event, MempoolId, Stream};
    use lowtide_trace::{NoteId, StackId, TraceEvent};

    use super::*;

    const START: DeviceAddress = DeviceAddress(0x7f00_0000_0000);
    const REQUESTED: Bytes = Bytes(4_400_128);

    fn event(action: Action, address: DeviceAddress) -> TraceEvent {
        TraceEvent {
            event: Event {
                action,
                pool: MempoolId::DEFAULT,
                address,
                size: REQUESTED,
                stream: Stream::DEFAULT,
            },
            time_us: 0,
            stack: StackId::NONE,
            pool_known: false,
            note: NoteId::NONE,
        }
    }

    /// Returns the inferred size of a block in 20 MiB, after events at these offsets behind it.
    fn size(
        conf: &str,
        (is_large, is_expandable): (bool, bool),
        events: &[(Action, Bytes)],
    ) -> Bytes {
        let block = InitialBlock {
            address: START,
            size: REQUESTED.round_up(Bytes(512)),
            requested: REQUESTED,
            stream: Stream::DEFAULT,
            pool: None,
            status: BlockStatus::Allocated,
            stack: StackId::NONE,
        };
        let segment = InitialSegment {
            address: START,
            size: Bytes::mib(20),
            stream: Stream::DEFAULT,
            pool: None,
            is_large,
            is_expandable,
        };
        let events = events
            .iter()
            .map(|&(action, offset)| event(action, START + offset));
        let mut trace = Trace {
            events: events.collect(),
            ..Trace::default()
        };
        trace.initial.blocks.push(block);
        trace.initial.segments.push(segment);
        trace.settings.conf = conf.into();
        let config = trace.config_in_force().unwrap_or_default();
        InitialSizes::new(&trace).of(0, &block, (&segment, Bytes::mib(20)), &config)
    }

    const LARGE: (bool, bool) = (true, false);
    const FREED: (Action, Bytes) = (Action::FreeCompleted, Bytes::ZERO);

    #[test]
    fn sizes_are_inferred_from_the_block_behind() {
        let asked = REQUESTED.round_up(Bytes(512));
        let served = |extra| (Action::Alloc, asked + Bytes(extra));
        for extra in [0, 512, 1 << 20] {
            assert_eq!(
                size("", LARGE, &[served(extra), FREED]),
                asked + Bytes(extra)
            );
        }
        // A remainder of this size would have been split off.
        assert_eq!(size("", LARGE, &[served((1 << 20) + 512), FREED]), asked);
        assert_eq!(size("", LARGE, &[FREED, served(512)]), asked);
        assert_eq!(size("", (false, false), &[served(512), FREED]), asked);
        assert_eq!(size("", (true, true), &[served(512), FREED]), asked);
    }

    #[test]
    fn sizes_are_inferred_from_rounding() {
        let rounds = "roundup_power2_divisions:2";
        let rounded = Bytes::mib(6);
        assert_eq!(size(rounds, LARGE, &[FREED]), rounded);
        let served = (Action::Alloc, rounded + Bytes(512));
        assert_eq!(size(rounds, LARGE, &[served, FREED]), rounded + Bytes(512));
    }

    #[test]
    fn what_is_there_to_the_end_is_as_long_as_it_says() {
        let asked = REQUESTED.round_up(Bytes(512));
        let served = (Action::Alloc, asked + Bytes(512));
        assert_eq!(size("roundup_power2_divisions:2", LARGE, &[served]), asked);
    }
}
