//! The state that follows from the events alone: an interpreter that knows the meaning of each event and nothing of
//! the allocator that wrote it. A reader of a recording has no more information.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};

/// The pool and stream that may use a range.
type Owner = (MempoolId, Stream);

/// The blocks and the mapped memory after the events so far.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    active: BTreeMap<DeviceAddress, Active>,
    /// Sorted by start. Ranges do not overlap; adjacent ranges are not joined.
    memory: BTreeMap<DeviceAddress, Memory>,
    active_requested: Bytes,
    /// Bytes of plain segments.
    pub(super) whole_bytes: Bytes,
    /// Bytes mapped into expandable segments.
    pub(super) mapped_bytes: Bytes,
    pub(super) ooms: u64,
    /// The number of events that were read.
    pub(super) events: u64,
}

/// A block between its `alloc` and its `free_completed`.
#[derive(Debug)]
struct Active {
    requested: Bytes,
    owner: Owner,
    is_held: bool,
}

#[derive(Debug)]
struct Memory {
    end: DeviceAddress,
    owner: Owner,
    is_whole: bool,
}

impl Ledger {
    /// Applies an event.
    ///
    /// # Errors
    ///
    /// A sentence that says why the event contradicts the events before it.
    pub(super) fn apply(&mut self, event: &Event) -> Result<(), String> {
        self.events += 1;
        let &Event {
            action,
            address,
            size,
            ..
        } = event;
        let owner = (event.pool, event.stream);
        let range = (address, address + size);
        match action {
            Action::Alloc => self.hand_out(range, owner),
            Action::FreeRequested => match self.active.get_mut(&address) {
                Some(active)
                    if active.is_held && (active.requested, active.owner) == (size, owner) =>
                {
                    active.is_held = false;
                    Ok(())
                }
                other => Err(format!("a block is freed that is not held so: {other:?}")),
            },
            Action::FreeCompleted => match self.active.remove(&address) {
                Some(active)
                    if !active.is_held && (active.requested, active.owner) == (size, owner) =>
                {
                    self.active_requested -= size;
                    Ok(())
                }
                other => Err(format!(
                    "a block is free that was not let go of so: {other:?}"
                )),
            },
            Action::SegmentAlloc => self.gain(range, owner, true),
            Action::SegmentMap => self.gain(range, owner, false),
            Action::SegmentFree => self.lose(range, owner, true),
            Action::SegmentUnmap => self.lose(range, owner, false),
            Action::OutOfMemory => {
                self.ooms += 1;
                Ok(())
            }
            Action::Snapshot => Ok(()),
            Action::SegmentPaused | Action::SegmentResumed | Action::Annotate => {
                Err("no allocator makes this event".to_owned())
            }
        }
        .map_err(|error| format!("after {event:?}: {error}"))
    }

    /// Returns the addresses and requested sizes of the allocated blocks.
    pub(super) fn held(&self) -> impl Iterator<Item = (DeviceAddress, Bytes)> {
        let held = self.active.iter().filter(|(_, active)| active.is_held);
        held.map(|(&address, active)| (address, active.requested))
    }

    /// Returns the requested bytes of all blocks that are allocated or pending.
    pub(super) fn active_requested(&self) -> Bytes {
        self.active_requested
    }

    fn hand_out(
        &mut self,
        range: (DeviceAddress, DeviceAddress),
        owner: Owner,
    ) -> Result<(), String> {
        self.check_unused(range)?;
        let mut at = range.0;
        while at < range.1 {
            let memory = self.memory.range(..=at).next_back();
            match memory
                .map(|(_, memory)| memory)
                .filter(|memory| memory.end > at)
            {
                Some(memory) if memory.owner == owner => at = memory.end,
                other => return Err(format!("no memory of the block's owner at {at}: {other:?}")),
            }
        }
        let requested = range.1.offset_from(range.0);
        self.active_requested += requested;
        self.active.insert(
            range.0,
            Active {
                requested,
                owner,
                is_held: true,
            },
        );
        Ok(())
    }

    fn gain(
        &mut self,
        (start, end): (DeviceAddress, DeviceAddress),
        owner: Owner,
        is_whole: bool,
    ) -> Result<(), String> {
        let below = self.memory.range(..end).next_back();
        if let Some((at, memory)) = below.filter(|(_, memory)| memory.end > start) {
            return Err(format!("it overlaps {at} to {}", memory.end));
        }
        self.memory.insert(
            start,
            Memory {
                end,
                owner,
                is_whole,
            },
        );
        *self.bytes_of(is_whole) += end.offset_from(start);
        Ok(())
    }

    /// Removes a range. A plain segment must be removed as it was added; pages may be removed in any grouping.
    fn lose(
        &mut self,
        (start, end): (DeviceAddress, DeviceAddress),
        owner: Owner,
        is_whole: bool,
    ) -> Result<(), String> {
        self.check_unused((start, end))?;
        let mut at = start;
        while at < end {
            let below = self.memory.range(..=at).next_back();
            let found = below.filter(|(_, memory)| {
                memory.end > at && (memory.owner, memory.is_whole) == (owner, is_whole)
            });
            let Some((&first, &Memory { end: last, .. })) = found else {
                return Err(format!("nothing of that kind and owner is mapped at {at}"));
            };
            if is_whole && (first, last) != (start, end) {
                return Err(format!("the segment is {first} to {last}"));
            }
            self.memory.remove(&first);
            if first < at {
                self.memory.insert(
                    first,
                    Memory {
                        end: at,
                        owner,
                        is_whole,
                    },
                );
            }
            if end < last {
                self.memory.insert(
                    end,
                    Memory {
                        end: last,
                        owner,
                        is_whole,
                    },
                );
            }
            at = last;
        }
        *self.bytes_of(is_whole) -= end.offset_from(start);
        Ok(())
    }

    fn check_unused(&self, (start, end): (DeviceAddress, DeviceAddress)) -> Result<(), String> {
        let below = self.active.range(..end).next_back();
        match below.filter(|&(&at, active)| at + active.requested > start) {
            Some((at, active)) => Err(format!("{:?} at {at} are in use", active.requested)),
            None => Ok(()),
        }
    }

    fn bytes_of(&mut self, is_whole: bool) -> &mut Bytes {
        if is_whole {
            &mut self.whole_bytes
        } else {
            &mut self.mapped_bytes
        }
    }
}
