//! What must be true of memory at any moment, recorded independently of the allocator.
//!
//! It uses the standard library's lock, so that no schedule can interleave a thread's changes to it.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, DeviceAddress, Event};

/// Which bytes are allocated, and which are still used by work on other streams.
#[derive(Default)]
pub(super) struct Shadow {
    held: Ranges,
    /// Freed blocks by address, with the time until which work uses them.
    used: BTreeMap<DeviceAddress, (Bytes, u64)>,
}

impl Shadow {
    /// Records a block that was allocated at or before `now_ns`.
    pub(super) fn hold(&mut self, address: DeviceAddress, size: Bytes, now_ns: u64) {
        self.held.insert(address, size);
        let end = address + size;
        let before = |(&start, &(size, _)): (&DeviceAddress, &(Bytes, u64))| {
            (start + size > address).then_some(start)
        };
        let reused: Vec<_> = self.used.range(..end).rev().map_while(before).collect();
        for start in reused {
            let used = self.used.remove(&start);
            let until = used.map_or(0, |(_, until)| until);
            assert!(until <= now_ns, "{start} is used until {until} ns");
        }
    }

    /// Records that a block is about to be freed. Work uses it until the given time.
    pub(super) fn free(&mut self, address: DeviceAddress, size: Bytes, used_until_ns: u64) {
        assert_eq!(self.held.remove(address), Some(size));
        if used_until_ns > 0 {
            self.used.insert(address, (size, used_until_ns));
        }
    }
}

/// The state that follows from the events alone. Every observer must be notified of them in a consistent order.
#[derive(Default)]
pub(super) struct Witness {
    segments: Ranges,
    pages: Pages,
    blocks: BTreeMap<DeviceAddress, State>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Allocated(Bytes),
    Freed(Bytes),
}

impl Witness {
    pub(super) fn hear(&mut self, event: &Event) {
        let (address, size) = (event.address, event.size);
        match event.action {
            Action::Alloc => {
                let is_mapped = self.pages.contain(address, size);
                assert!(
                    is_mapped || self.segments.contain(address, size),
                    "{event:?}"
                );
                let before = self.blocks.insert(address, State::Allocated(size));
                assert_eq!(before, None, "{event:?}");
            }
            Action::FreeRequested => {
                let before = self.blocks.insert(address, State::Freed(size));
                assert_eq!(before, Some(State::Allocated(size)), "{event:?}");
            }
            Action::FreeCompleted => {
                let before = self.blocks.remove(&address);
                assert_eq!(before, Some(State::Freed(size)), "{event:?}");
            }
            Action::SegmentAlloc => self.segments.insert(address, size),
            Action::SegmentFree => {
                assert_eq!(self.segments.remove(address), Some(size), "{event:?}");
                self.check_unused(event);
            }
            Action::SegmentMap => self.pages.insert(event),
            Action::SegmentUnmap => {
                self.pages.remove(event);
                self.check_unused(event);
            }
            Action::Snapshot | Action::OutOfMemory => {}
            Action::SegmentPaused | Action::SegmentResumed | Action::Annotate => {
                panic!("no allocator makes this event: {event:?}")
            }
        }
    }

    /// Checks that no block lies in memory that was released.
    fn check_unused(&self, event: &Event) {
        let end = event.address + event.size;
        let last = self.blocks.range(..end).next_back();
        let last =
            last.map(|(&start, &(State::Allocated(size) | State::Freed(size)))| start + size);
        assert!(last.is_none_or(|last| last <= event.address), "{event:?}");
    }

    /// Returns how many blocks are allocated or still used by work.
    pub(super) fn active(&self) -> usize {
        self.blocks.len()
    }
}

/// Ranges of addresses that do not overlap.
#[derive(Default)]
struct Ranges(BTreeMap<DeviceAddress, Bytes>);

impl Ranges {
    fn insert(&mut self, address: DeviceAddress, size: Bytes) {
        let before = self.0.range(..address + size).next_back();
        assert!(
            before.is_none_or(|(&start, &size)| start + size <= address),
            "{address}, {size}, overlaps {before:?}"
        );
        self.0.insert(address, size);
    }

    fn remove(&mut self, address: DeviceAddress) -> Option<Bytes> {
        self.0.remove(&address)
    }

    fn contain(&self, address: DeviceAddress, size: Bytes) -> bool {
        let before = self.0.range(..=address).next_back();
        before.is_some_and(|(&start, &whole)| address + size <= start + whole)
    }
}

/// Mapped ranges by their start, with their end. Neighbours are one range.
#[derive(Default)]
struct Pages(BTreeMap<DeviceAddress, DeviceAddress>);

impl Pages {
    fn insert(&mut self, event: &Event) {
        let (mut start, mut end) = (event.address, event.address + event.size);
        let before = self.0.range(..end).next_back();
        let before = before.map(|(&start, &end)| (start, end));
        assert!(before.is_none_or(|(_, end)| end <= start), "{event:?}");
        if let Some(after) = self.0.remove(&end) {
            end = after;
        }
        if let Some((first, _)) = before.filter(|&(_, end)| end == start) {
            start = first;
        }
        self.0.insert(start, end);
    }

    fn remove(&mut self, event: &Event) {
        let (start, end) = (event.address, event.address + event.size);
        assert!(self.contain(start, event.size), "{event:?}");
        let around = self.0.range(..=start).next_back();
        let (&first, &last) = around.expect("it contains the range");
        self.0.remove(&first);
        if first < start {
            self.0.insert(first, start);
        }
        if end < last {
            self.0.insert(end, last);
        }
    }

    fn contain(&self, address: DeviceAddress, size: Bytes) -> bool {
        let before = self.0.range(..=address).next_back();
        before.is_some_and(|(_, &end)| address + size <= end)
    }
}
