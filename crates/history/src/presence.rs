//! What comes to the device and what leaves it, change by change.

use std::collections::BTreeMap;

use crate::history::History;

/// A part of a job's memory, by its index in the [`History`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// A block that the program holds and that is not paused.
    Block(usize),
    /// A segment, or a mapped range of an expandable segment. Paused ones are included.
    Segment(usize),
    /// The paused memory of a segment.
    Pause(usize),
}

/// A part comes to the device, or leaves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Change {
    /// The first instant after the change.
    pub instant: u32,
    /// What comes or leaves.
    pub part: Part,
    /// Whether it is there after the change.
    pub is_there: bool,
}

impl Change {
    /// Returns the place of the change among those of its instant. A part leaves before another takes its place. Memory
    /// is paused with the blocks that are in it.
    fn order(&self) -> (u8, Part) {
        let order = match (self.part, self.is_there) {
            (Part::Block(_), false) => 0,
            (Part::Pause(_), false) => 1,
            (Part::Segment(_), false) => 2,
            (Part::Segment(_), true) => 3,
            (Part::Block(_), true) => 4,
            (Part::Pause(_), true) => 5,
        };
        (order, self.part)
    }
}

impl History {
    /// Returns all changes of what is on the device, in the order in which they happened. At each instant, the live
    /// bytes are those of the blocks that are there, and the reserved bytes those of the segments without those of the
    /// pauses. O(n log n) for n blocks and segments.
    pub fn changes(&self) -> Vec<Change> {
        let mut changes = self.lifetimes();
        changes.sort_unstable_by_key(|change| (change.instant, change.order()));
        if self.pauses.is_empty() {
            return changes;
        }
        let mut blocks = Blocks::default();
        let mut with_pauses = Vec::with_capacity(changes.len());
        for change in changes {
            match change.part {
                Part::Segment(_) => with_pauses.push(change),
                Part::Block(index) => {
                    let is_seen = blocks.change(self.blocks[index].address, index, change.is_there);
                    with_pauses.extend(is_seen.then_some(change));
                }
                Part::Pause(index) => {
                    with_pauses.push(change);
                    let pause = &self.pauses[index];
                    let end = pause.address + pause.size.get();
                    let moved = blocks.pause(pause.address..end, change.is_there);
                    with_pauses.extend(moved.into_iter().map(|index| Change {
                        part: Part::Block(index),
                        is_there: !change.is_there,
                        ..change
                    }));
                }
            }
        }
        with_pauses
    }

    /// Returns the start and the end of each block, segment and pause, without regard to the pauses of blocks.
    fn lifetimes(&self) -> Vec<Change> {
        let blocks = { self.blocks.iter().enumerate() }
            .map(|(index, block)| (Part::Block(index), block.start, block.freed));
        let segments = { self.segments.iter().enumerate() }
            .map(|(index, segment)| (Part::Segment(index), segment.start, segment.end));
        let pauses = { self.pauses.iter().enumerate() }
            .map(|(index, pause)| (Part::Pause(index), pause.start, pause.end));
        let parts = blocks.chain(segments).chain(pauses);
        let ends = parts.filter(|(_, start, end)| start < end);
        let changes = ends.flat_map(|(part, start, end)| {
            [(start, true), (end, false)].map(|(instant, is_there)| Change {
                instant,
                part,
                is_there,
            })
        });
        changes
            .filter(|change| change.instant <= self.events)
            .collect()
    }
}

/// The indices of the blocks that the program holds, by address.
#[derive(Default)]
struct Blocks {
    on_device: BTreeMap<u64, usize>,
    paused: BTreeMap<u64, usize>,
}

impl Blocks {
    /// Adds or removes a block. Returns whether that changes what is on the device.
    fn change(&mut self, address: u64, index: usize, is_there: bool) -> bool {
        if is_there {
            self.on_device.insert(address, index);
            return true;
        }
        self.paused.remove(&address);
        self.on_device.remove(&address).is_some()
    }

    /// Moves the blocks in `range` off the device or back to it. Returns them.
    fn pause(&mut self, range: std::ops::Range<u64>, is_paused: bool) -> Vec<usize> {
        let (from, to) = if is_paused {
            (&mut self.on_device, &mut self.paused)
        } else {
            (&mut self.paused, &mut self.on_device)
        };
        let moved: Vec<(u64, usize)> = from.range(range).map(|(&at, &index)| (at, index)).collect();
        for &(address, index) in &moved {
            from.remove(&address);
            to.insert(address, index);
        }
        moved.into_iter().map(|(_, index)| index).collect()
    }
}
