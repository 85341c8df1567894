//! The lifetime of every block and segment, and the fragmentation at every instant.

use std::ops::Range;

use lowtide_core::{Bytes, Cause, Fragmentation, MempoolId, Stream};
use lowtide_trace::StackId;
use serde::Serialize;

use crate::levels::Levels;

/// The memory of a recorded job, instant by instant.
///
/// Instant `k` is the state after `k` events: 0 is before the first event, the number of events is the end. The
/// effect of event `n`, counted from 0, begins at instant `n + 1`.
#[derive(Clone, Debug)]
pub struct History {
    /// The number of events.
    pub events: u32,
    /// Every block, in order of allocation. Blocks from before the first event come first, by address.
    pub blocks: Vec<Block>,
    /// Every segment, and every mapped range of expandable segments, in order of allocation.
    pub segments: Vec<SegmentLife>,
    /// The streams, by the numbers that blocks and segments have.
    pub streams: Vec<Stream>,
    /// The pools, by the numbers that blocks and segments have; the first is the default pool.
    pub pools: Vec<MempoolId>,
    /// The user metadata of blocks, or the tags of their regions; the first is empty.
    pub tags: Vec<String>,
    /// What the program said of blocks after it made them; the first is empty.
    pub annotations: Vec<String>,
    /// The tags of the regions that were paused.
    pub regions: Vec<String>,
    /// The pauses of segments, in the order in which they began.
    pub pauses: Vec<Pause>,
    /// The stream whose fragmentation is reported: the one with the most requested bytes.
    pub main_stream: Stream,
    /// The moment of the peak live bytes.
    pub peak_live: Moment,
    /// The moment of the peak reserved bytes: of several, the one with the most live bytes. Before a segment's first block,
    /// all of it would seem unused.
    pub peak_reserved: Moment,
    /// The peak requested bytes, unrounded.
    pub peak_requested: Bytes,
    /// The out-of-memory errors, each with the fragmentation that its request saw.
    pub refusals: Vec<Refusal>,
    /// The state after the last event.
    pub end: Moment,
    /// The curves over time: reserved, live, the causes of fragmentation, and paused ([`CURVE_NAMES`]).
    pub levels: Levels<CURVES>,
    /// Whether all block sizes are those of the job. If not, some are estimated.
    pub sizes_are_verified: bool,
    /// The number of events that cannot have happened: memory released with blocks in it, or blocks that overlap.
    /// Such parts are left out, and all sums stay exact. 0 for a recording that lowtide read.
    pub contradictions: u64,
}

/// The number of curves: reserved, live, the causes, and paused.
pub const CURVES: usize = 3 + Cause::ALL.len();

/// The names of the curves.
pub const CURVE_NAMES: [&str; CURVES] = {
    let mut names = ["reserved", "live", "", "", "", "", "", "", "", "paused"];
    let mut cause = 0;
    while cause < Cause::ALL.len() {
        names[2 + cause] = Cause::ALL[cause].name();
        cause += 1;
    }
    names
};

/// The lifetime of a block. It exists at the instants from `start` to before `end`: allocated before `freed`, then
/// waiting for other streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// The first instant at which it exists; 0 if it existed before the first event.
    pub start: u32,
    /// The first instant at which the program does not hold it; the number of events plus one if there is none.
    pub freed: u32,
    /// The first instant at which its memory can be reused; the number of events plus one if there is none.
    pub end: u32,
    /// Its stream's number.
    pub stream: u32,
    /// Its pool's number.
    pub pool: u32,
    /// The number of its user metadata, or else of its region's tag.
    pub tag: u32,
    /// The number of the last annotation of it.
    pub annotation: u32,
    /// The call stack that allocated it.
    pub stack: StackId,
    /// Its address.
    pub address: u64,
    /// Its size, with rounding.
    pub size: Bytes,
    /// Its requested bytes, as far as they lie in the block.
    pub requested: Bytes,
}

impl Block {
    /// Returns the bytes that count as live while the program holds it.
    pub fn live_bytes(&self) -> Bytes {
        Fragmentation::live_bytes_of(self.requested, self.size)
    }

    /// Returns whether it begins in one of these ranges of addresses, which are sorted. O(log n) for n ranges.
    pub(crate) fn is_in(&self, ranges: &[Range<u64>]) -> bool {
        let behind = ranges.partition_point(|range| range.start <= self.address);
        behind > 0 && ranges[behind - 1].contains(&self.address)
    }

    /// Returns whether the program holds it at `instant`.
    pub fn is_allocated_at(&self, instant: u32) -> bool {
        (self.start..self.freed).contains(&instant)
    }
}

/// Some of a job's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Kept {
    /// Their bytes, each block rounded up.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

impl Kept {
    /// Adds a block.
    pub fn add(&mut self, block: &Block) {
        self.bytes += block.live_bytes().get();
        self.blocks += 1;
    }
}

impl<'b> FromIterator<&'b Block> for Kept {
    fn from_iter<I: IntoIterator<Item = &'b Block>>(blocks: I) -> Kept {
        let mut kept = Kept::default();
        for block in blocks {
            kept.add(block);
        }
        kept
    }
}

/// The lifetime of a segment, or of a mapped range of an expandable segment. It exists at the instants from `start`
/// to before `end`. A range that is cut ends, and the remaining parts start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentLife {
    /// The first instant at which it exists; 0 if it existed before the first event.
    pub start: u32,
    /// The first instant at which its memory existed: before `start` for a part of a range that was cut.
    pub made: u32,
    /// The first instant at which it does not exist; the number of events plus one if there is none.
    pub end: u32,
    /// Its stream's number.
    pub stream: u32,
    /// Its pool's number.
    pub pool: u32,
    /// Its address.
    pub address: u64,
    /// Its size.
    pub size: Bytes,
    /// Whether it serves large requests.
    pub is_large: bool,
    /// Whether it is a range of an expandable segment.
    pub is_expandable: bool,
    /// The call stack that took its memory from the driver.
    pub stack: StackId,
}

/// The figures of an instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moment {
    /// The instant.
    pub instant: u32,
    /// The requested bytes of the blocks that the program holds, unrounded.
    pub requested: Bytes,
    /// The reserved bytes: live, and the causes of the rest.
    pub fragmentation: Fragmentation,
    /// The stream whose fragmentation it is.
    pub stream: Stream,
    /// The bytes of paused segments. They count as neither reserved nor live nor requested.
    pub paused: Bytes,
}

/// A pause of a segment: at the instants from `start` to before `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pause {
    /// The first instant at which it is paused, that of its event.
    pub start: u32,
    /// The first instant at which it is resumed, or released; the number of events plus one if there is none.
    pub end: u32,
    /// The number of its region's tag.
    pub region: u32,
    /// The address of the segment.
    pub address: u64,
    /// The size of the segment.
    pub size: Bytes,
}

/// A request that ended in an out-of-memory error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// Its requested bytes, rounded.
    pub requested: Bytes,
    /// The free memory of the device.
    pub device_free: Bytes,
    /// The largest free block of its stream and pool; 0 if there is none. Known for the first three refusals only.
    pub largest_free: Option<Bytes>,
    /// The figures at that instant.
    pub moment: Moment,
}

impl History {
    /// Returns the blocks that the program holds at `instant`, without paused ones, with their indices. O(n log m) for n
    /// blocks and m pauses.
    pub fn held_at(&self, instant: u32) -> impl Iterator<Item = (usize, &Block)> {
        let away = self.away_at(instant);
        let blocks = self.blocks.iter().enumerate();
        blocks.filter(move |(_, block)| block.is_allocated_at(instant) && !block.is_in(&away))
    }

    /// Returns the ranges of addresses that are paused at `instant`, sorted.
    pub(crate) fn away_at(&self, instant: u32) -> Vec<Range<u64>> {
        let pauses = self.pauses.iter();
        let away = pauses.filter(|pause| (pause.start..pause.end).contains(&instant));
        let mut ranges: Vec<_> = away
            .map(|pause| pause.address..pause.address + pause.size.get())
            .collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges
    }
}
