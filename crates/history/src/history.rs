//! Every block's and every segment's life, and the gap at every instant.

use std::ops::Range;

use lowtide_core::{Bytes, Cause, Gap, MempoolId, Stream};
use lowtide_trace::StackId;

use crate::levels::Levels;

/// What a recording comes to, instant by instant.
///
/// Instant `k` is the state after `k` events: 0 is before the first, the number of events is the end.
/// What the event number `n`, counted from 0, brings is there from instant `n + 1` on.
#[derive(Clone, Debug)]
pub struct History {
    /// How many events there are.
    pub events: u32,
    /// Every block, in the order in which they came; first those that were there before the first
    /// event, by address.
    pub blocks: Vec<Block>,
    /// Every segment, and every mapped range of expandable ones, in the order in which they came.
    pub segments: Vec<SegmentLife>,
    /// The streams that blocks and segments name by their numbers.
    pub streams: Vec<Stream>,
    /// The pools that they name; the first is the default pool.
    pub pools: Vec<MempoolId>,
    /// What the program said of the blocks, or the tags of their regions; the first is empty.
    pub tags: Vec<String>,
    /// The tags of the regions that were paused.
    pub regions: Vec<String>,
    /// When the memory of segments was away, in the order in which it left.
    pub pauses: Vec<Pause>,
    /// The stream whose gap is told: the one in which the most was asked for.
    pub main_stream: Stream,
    /// The most that was live.
    pub peak_live: Moment,
    /// The most that was reserved.
    pub peak_reserved: Moment,
    /// The most that was asked for at once, unrounded.
    pub peak_requested: Bytes,
    /// Each request that was refused, with the gap as it saw it.
    pub refusals: Vec<Refusal>,
    /// The end.
    pub end: Moment,
    /// What is reserved, what is live, the gap's causes, and what is paused, over time: [`CURVE_NAMES`].
    pub levels: Levels<CURVES>,
    /// Whether the blocks' sizes are those that the job had; if not, some are estimated.
    pub sizes_are_verified: bool,
    /// How many events could not be: memory that went back with blocks in it, blocks that overlap.
    /// Sums are exact all the same; what such events say is left out. 0 for what lowtide read.
    pub contradictions: u64,
}

/// How many curves there are: reserved, live, the causes, and paused.
pub const CURVES: usize = 3 + Cause::ALL.len();

/// What the curves are called.
pub const CURVE_NAMES: [&str; CURVES] = {
    let mut names = ["reserved", "live", "", "", "", "", "", "", "", "paused"];
    let mut cause = 0;
    while cause < Cause::ALL.len() {
        names[2 + cause] = Cause::ALL[cause].name();
        cause += 1;
    }
    names
};

/// A block's life. It is there at the instants from `start` to before `end`: allocated before `freed`,
/// then waiting for other streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// The first instant at which it is there; 0 for what was there before the first event.
    pub start: u32,
    /// The first instant at which the program does not hold it; one after the last if there is none.
    pub freed: u32,
    /// The first instant at which it can be used again; one after the last if there is none.
    pub end: u32,
    /// Its stream's number.
    pub stream: u32,
    /// Its pool's number.
    pub pool: u32,
    /// The number of what the program said of it, else of its region's tag.
    pub tag: u32,
    /// What asked for it.
    pub stack: StackId,
    /// Where it was.
    pub address: u64,
    /// How long it was, rounding included.
    pub size: Bytes,
    /// What was asked for, as far as it lies in the block.
    pub requested: Bytes,
}

impl Block {
    /// Returns how much of it counts as live while the program holds it.
    pub fn live_bytes(&self) -> Bytes {
        Gap::live_bytes_of(self.requested, self.size)
    }

    /// Returns whether the program holds it at `instant`.
    pub fn is_allocated_at(&self, instant: u32) -> bool {
        (self.start..self.freed).contains(&instant)
    }
}

/// The life of a segment, or of a mapped range of an expandable one: it is there at the instants from
/// `start` to before `end`. A range that is cut ends, and what is left of it starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentLife {
    /// The first instant at which it is there; 0 for what was there before the first event.
    pub start: u32,
    /// The first instant at which its memory was there: before `start` for what is left of a longer one.
    pub made: u32,
    /// The first instant at which it is gone; one after the last if there is none.
    pub end: u32,
    /// Its stream's number.
    pub stream: u32,
    /// Its pool's number.
    pub pool: u32,
    /// Where it was.
    pub address: u64,
    /// How long it was.
    pub size: Bytes,
    /// Whether it serves large requests.
    pub is_large: bool,
    /// Whether it is a part of an expandable segment.
    pub is_expandable: bool,
    /// Where its memory was taken from the driver.
    pub stack: StackId,
}

/// The figures of an instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moment {
    /// Which instant.
    pub instant: u32,
    /// What the blocks were asked for that the program holds, unrounded.
    pub requested: Bytes,
    /// What is reserved, what is live, and why the rest is not.
    pub gap: Gap,
    /// Whose gap it is.
    pub stream: Stream,
    /// The segments whose memory is away. Of these, nothing is reserved or live, nor requested.
    pub paused: Bytes,
}

/// The memory of a segment is away: at the instants from `start` to before `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pause {
    /// The first instant at which it is away; that of its event.
    pub start: u32,
    /// The first instant at which it is back, or the segment gone; one after the last if there is none.
    pub end: u32,
    /// The number of its region's tag.
    pub region: u32,
    /// Where the segment is.
    pub address: u64,
    /// How long it is.
    pub size: Bytes,
}

/// A request that could not be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// What was asked for, rounded.
    pub requested: Bytes,
    /// What the device had left.
    pub device_free: Bytes,
    /// The largest free block of its stream and pool, 0 where there is none; known of the first three refusals only.
    pub largest_free: Option<Bytes>,
    /// The figures then.
    pub moment: Moment,
}

impl History {
    /// Returns the ranges of addresses that are paused at `instant`, in order.
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
