//! Folds blocks that are too many to list one by one.

use lowtide_core::{Bytes, Cause};
use serde::{Serialize, Serializer};

use super::columns::Columns;
use super::trace::PageTrace;
use crate::changes::{FRAGMENTATION_PARTS, FragmentationChanges};
use crate::history::{Block, History};

/// The blocks that are not listed one by one. They are reported to the user.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct FoldedBlocks {
    /// The number of blocks.
    pub blocks: usize,
    /// The size of the largest of them.
    #[serde(serialize_with = "serialize_bytes")]
    pub size_max: Bytes,
    /// The longest lifetime of one of them, in events.
    pub events_max: u32,
}

fn serialize_bytes<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(bytes.get())
}

/// The blocks with the least weight, as what they add to the fragmentation from event to event.
#[derive(Debug)]
pub(super) struct Folded {
    /// Whether each block of the history is listed, and not folded.
    is_listed: Vec<bool>,
    pub(super) blocks: FoldedBlocks,
    /// Their part of the fragmentation.
    changes: FragmentationChanges,
}

impl Folded {
    /// Folds all but the `kept` blocks with the largest product of size and lifetime. Returns `None` if there are
    /// no more blocks than that.
    pub(super) fn new(page: &PageTrace<'_>, kept: usize) -> Option<Folded> {
        let history = page.history;
        let excess = history.blocks.len().checked_sub(kept + 1)?;
        let weight = |block: &Block| {
            let instants = u64::from(block.end - block.start);
            u128::from(block.size.get()) * u128::from(instants)
        };
        let mut order: Vec<u32> = (0..).take(history.blocks.len()).collect();
        let key = |&index: &u32| (weight(&history.blocks[index as usize]), index);
        let (least, last, _) = order.select_nth_unstable_by_key(excess, key);
        let mut is_listed = vec![true; history.blocks.len()];
        for &mut index in least.iter_mut().chain([last]) {
            is_listed[index as usize] = false;
        }
        let blocks = history.blocks.iter().zip(&is_listed);
        let folded = blocks.filter_map(|(block, listed)| (!listed).then_some(block));
        Some(Folded {
            blocks: FoldedBlocks {
                blocks: excess + 1,
                size_max: { folded.clone() }.fold(Bytes::ZERO, |max, block| max.max(block.size)),
                events_max: folded.fold(0, |max, block| max.max(block.end - block.start)),
            },
            changes: History::changes_by_unlisted(page.trace, page.sizes, &is_listed),
            is_listed,
        })
    }

    /// Returns whether a block is folded.
    pub(super) fn contains(&self, block: usize) -> bool {
        !self.is_listed[block]
    }

    /// Adds the folded blocks' part of the fragmentation: the instants with a change, the number of each change, and the
    /// parts of the distinct changes. A part is stored as twice its absolute value, minus one if it is negative.
    /// The last part is left out: the sum of all parts is 0, because the reserved bytes are known.
    pub(super) fn add_to(&self, columns: &mut Columns) {
        let changes = &self.changes;
        columns.add_u32("folded/instant", changes.instants.iter().copied());
        columns.add_u32("folded/change", changes.numbers.iter().copied());
        for part in 0..FRAGMENTATION_PARTS - 1 {
            let what = part
                .checked_sub(1)
                .map_or("live", |cause| Cause::ALL[cause].name());
            let distinct = changes.distinct.iter().map(|change| zigzag(change[part]));
            columns.add_u64(&format!("folded/changes/{what}"), distinct);
        }
    }
}

/// Returns 0, 1, 2, 3, 4 for 0, -1, 1, -2, 2.
fn zigzag(number: i64) -> u64 {
    (number << 1 ^ number >> 63).cast_unsigned()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::growth::Leaks;
    use crate::sizes::BlockSizes;
    use lowtide_core::{Action, DeviceAddress, Event, MempoolId, Stream};
    use lowtide_trace::{NoteId, StackId, Trace, TraceEvent};

    /// Returns the input of a page.
    pub(in crate::page) fn page<'a>(
        trace: &'a Trace,
        sizes: &'a BlockSizes,
        history: &'a History,
        leaks: &'a Leaks,
    ) -> PageTrace<'a> {
        PageTrace {
            name: "made up",
            trace,
            is_host: false,
            sizes,
            history,
            replayed: &[],
            replay_notes: &[],
            leaks,
            is_cut_off: false,
            lengths: &[],
        }
    }

    /// Returns a number of 17 bits that looks random, different for each number below 2^17.
    fn mixed(number: u64) -> u64 {
        let number = number * 40_503 % (1 << 17);
        (number ^ number >> 9) * 77_213 % (1 << 17)
    }

    /// Returns a recording of blocks of many sizes. Each is freed after a while or never.
    pub(in crate::page) fn trace(blocks: u64) -> Trace {
        let mut trace = Trace::default();
        let mut push = |action, address: u64, size: u64| {
            let event = Event {
                action,
                pool: MempoolId::DEFAULT,
                address: DeviceAddress(mixed(address) << 30),
                size: Bytes(size),
                stream: Stream::DEFAULT,
            };
            trace.events.push(TraceEvent {
                event,
                time_us: 0,
                stack: StackId::NONE,
                pool_known: true,
                note: NoteId::NONE,
            });
        };
        let size = |block: u64| 1 + mixed(block) % 251 * 401;
        for block in 0..blocks {
            push(Action::Alloc, block, size(block));
            if block % 3 != 0 {
                push(Action::FreeRequested, block - 1, size(block - 1));
            }
            if block % 6 == 4 {
                push(Action::FreeCompleted, block - 1, size(block - 1));
            }
        }
        trace
    }

    /// Returns the fragmentation at an instant with only some blocks, computed from scratch. For recordings without
    /// expandable segments, private pools and other streams.
    fn fragmentation_by_hand(
        history: &History,
        instant: u32,
        is_there: &dyn Fn(usize) -> bool,
    ) -> [u64; FRAGMENTATION_PARTS] {
        let mut fragmentation = [0; FRAGMENTATION_PARTS];
        let lives = |start: u32, end: u32| (start..end).contains(&instant);
        let blocks = history.blocks.iter().enumerate();
        let blocks: Vec<&Block> = blocks
            .filter(|&(index, block)| is_there(index) && lives(block.start, block.end))
            .map(|(_, block)| block)
            .collect();
        for block in &blocks {
            if block.is_allocated_at(instant) {
                fragmentation[0] += block.live_bytes().get();
                fragmentation[1] += (block.size - block.live_bytes()).get();
            } else {
                fragmentation[2] += block.size.get()
            }
        }
        for segment in history
            .segments
            .iter()
            .filter(|segment| lives(segment.start, segment.end))
        {
            let range = segment.address..segment.address + segment.size.get();
            let inside = blocks.iter().filter(|block| range.contains(&block.address));
            let used: u64 = inside.map(|block| block.size.get()).sum();
            fragmentation[if used == 0 { 5 } else { 7 }] += segment.size.get() - used;
        }
        fragmentation
    }

    /// Adds segments of four neighbouring blocks each before the events of [`trace`], so that some contain only
    /// folded blocks.
    fn trace_in_segments() -> Trace {
        let mut trace = trace(200);
        for recorded in &mut trace.events {
            // 50 ranges of memory, and never two blocks at one address in a range.
            let number = recorded.event.address.get() >> 30;
            recorded.event.address = DeviceAddress((number % 64) << 32 | (number / 64) << 20);
        }
        let mut starts: Vec<u64> = trace
            .events
            .iter()
            .map(|recorded| recorded.event.address.get() >> 32 << 32)
            .collect();
        starts.sort_unstable();
        starts.dedup();
        let segment = |start: u64| TraceEvent {
            event: Event {
                action: Action::SegmentAlloc,
                pool: MempoolId::DEFAULT,
                address: DeviceAddress(start),
                size: Bytes(1 << 32),
                stream: Stream::DEFAULT,
            },
            ..trace.events[0]
        };
        let segments: Vec<TraceEvent> = starts.into_iter().map(segment).collect();
        trace.events.splice(0..0, segments);
        trace
    }

    #[test]
    fn what_is_listed_and_what_is_folded_add_up_to_the_gap_at_every_instant() {
        let trace = trace_in_segments();
        let sizes = BlockSizes::estimated(&trace);
        let history = History::new(&trace, &sizes);
        let leaks = Leaks::find(&trace, &history);
        let page = page(&trace, &sizes, &history, &leaks);
        for kept in [0, 1, 50, 199] {
            let folded = Folded::new(&page, kept).expect("there are more blocks");
            assert_eq!(folded.blocks.blocks, 200 - kept);
            let changes = &folded.changes;
            let mut by_folded = [0; FRAGMENTATION_PARTS];
            let mut next = 0;
            for instant in 0..=history.events {
                while changes.instants.get(next).is_some_and(|&at| at <= instant) {
                    let change = changes.distinct[changes.numbers[next] as usize];
                    by_folded = std::array::from_fn(|part| by_folded[part] + change[part]);
                    next += 1;
                }
                let all = fragmentation_by_hand(&history, instant, &|_| true);
                let listed =
                    fragmentation_by_hand(&history, instant, &|block| !folded.contains(block));
                let sums = std::array::from_fn(|part| listed[part].cast_signed() + by_folded[part]);
                assert_eq!(sums, all.map(u64::cast_signed), "{kept} kept, at {instant}");
                let exact = |part: usize| history.levels.most(1 + part)[instant as usize];
                assert_eq!(all, std::array::from_fn(exact), "at {instant}");
            }
            assert_eq!(next, changes.instants.len());
        }
        assert!(Folded::new(&page, 200).is_none());
    }

    #[test]
    fn less_than_nothing_is_stored_as_an_odd_number() {
        assert_eq!([0, -1, 1, -2, 2].map(zigzag), [0, 1, 2, 3, 4]);
        assert_eq!(zigzag(-(1 << 50)), (1 << 51) - 1);
    }

    #[test]
    fn what_is_listed_takes_more_for_longer() {
        let trace = trace(200);
        let sizes = BlockSizes::estimated(&trace);
        let history = History::new(&trace, &sizes);
        let weight = |block: &Block| block.size.get() * u64::from(block.end - block.start);
        let weights = |folded: &Folded, is_folded: bool| {
            let blocks = history.blocks.iter().enumerate();
            let chosen = blocks.filter(|&(index, _)| folded.contains(index) == is_folded);
            chosen.map(|(_, block)| weight(block)).collect::<Vec<u64>>()
        };
        let leaks = Leaks::find(&trace, &history);
        let folded = Folded::new(&page(&trace, &sizes, &history, &leaks), 20);
        let folded = folded.expect("there are more blocks");
        let sizes = history.blocks.iter().enumerate();
        let largest = sizes
            .filter(|&(index, _)| folded.contains(index))
            .map(|(_, block)| block.size)
            .max();
        assert_eq!(Some(folded.blocks.size_max), largest);
        assert!(weights(&folded, true).iter().max() <= weights(&folded, false).iter().min());
    }
}
