//! Blocks too many to show one by one.

use lowtide_core::Bytes;

use crate::history::{Block, History};
use crate::levels::Levels;

/// The blocks that matter least, as two curves: what of them is live, and what they take.
#[derive(Debug)]
pub(super) struct Folded {
    /// For each block of the history, whether it is one of them.
    is_folded: Vec<bool>,
    /// How many they are.
    pub(super) blocks: usize,
    /// The longest of them.
    pub(super) size_max: Bytes,
    /// The most events that one of them was there for.
    pub(super) events_max: u32,
    /// Live bytes, and bytes with rounding.
    pub(super) levels: Levels<2>,
    /// Both at the instants that were asked for.
    pub(super) at: Vec<[u64; 2]>,
}

impl Folded {
    /// Returns all but the `kept` blocks that take the most bytes for the longest; `None` where there are
    /// not more. `instants` are where the exact figures are wanted.
    pub(super) fn new(history: &History, kept: usize, instants: &[u32]) -> Option<Folded> {
        let excess = history.blocks.len().checked_sub(kept + 1)?;
        let weight = |block: &Block| {
            let instants = u64::from(block.end - block.start);
            u128::from(block.size.get()) * u128::from(instants)
        };
        let mut order: Vec<u32> = (0..).take(history.blocks.len()).collect();
        let key = |&index: &u32| (weight(&history.blocks[index as usize]), index);
        let (least, last, _) = order.select_nth_unstable_by_key(excess, key);
        let mut is_folded = vec![false; history.blocks.len()];
        for &mut index in least.iter_mut().chain([last]) {
            is_folded[index as usize] = true;
        }
        let blocks = history.blocks.iter().zip(&is_folded);
        let folded = || {
            blocks
                .clone()
                .filter(|(_, folded)| **folded)
                .map(|(block, _)| block)
        };
        let (levels, at) = curves(history.events, folded(), instants);
        Some(Folded {
            blocks: excess + 1,
            size_max: folded().map(|block| block.size).max().unwrap_or_default(),
            events_max: folded()
                .map(|block| block.end - block.start)
                .max()
                .unwrap_or(0),
            levels,
            at,
            is_folded,
        })
    }

    /// Returns whether the block of that number is folded.
    pub(super) fn contains(&self, block: usize) -> bool {
        self.is_folded[block]
    }
}

/// Returns what `blocks` come to over time, and at `instants`.
fn curves<'h>(
    events: u32,
    blocks: impl Iterator<Item = &'h Block>,
    instants: &[u32],
) -> (Levels<2>, Vec<[u64; 2]>) {
    // What changes at each instant; sums that wrap come back.
    let mut changes = vec![[0_u64; 2]; events as usize + 2];
    for block in blocks {
        let (live, size) = (block.live_bytes().get(), block.size.get());
        let change = |at: &mut u64, by: u64| *at = at.wrapping_add(by);
        change(&mut changes[block.start as usize][0], live);
        change(&mut changes[block.freed as usize][0], live.wrapping_neg());
        change(&mut changes[block.start as usize][1], size);
        change(&mut changes[block.end as usize][1], size.wrapping_neg());
    }
    let mut levels = Levels::new(u64::from(events) + 1);
    let mut values = [0_u64; 2];
    for instant in 0..=events {
        let change = &mut changes[instant as usize];
        for curve in 0..2 {
            values[curve] = values[curve].wrapping_add(change[curve]);
        }
        *change = values;
        levels.add(u64::from(instant), &values);
    }
    levels.finish();
    let at = instants.iter().map(|&instant| changes[instant as usize]);
    (levels, at.collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::sizes::BlockSizes;
    use lowtide_core::{Action, DeviceAddress, Event, MempoolId, Stream};
    use lowtide_trace::{NoteId, StackId, Trace, TraceEvent};

    /// Returns the history of 200 such blocks.
    fn history() -> History {
        let trace = trace(200);
        History::new(&trace, &BlockSizes::estimated(&trace))
    }

    /// Returns a recording of so many blocks of many sizes, each freed after a while or never.
    pub(in crate::page) fn trace(blocks: u64) -> Trace {
        let mut trace = Trace::default();
        let mut push = |action, address: u64, size: u64| {
            let event = Event {
                action,
                pool: MempoolId::DEFAULT,
                // As good as random, and no two the same.
                address: DeviceAddress((address * 40_503 % (1 << 17)) << 30),
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
        let size = |block: u64| 1 + block * block * 7919 % 100_003;
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

    #[test]
    fn what_is_folded_and_what_is_listed_make_up_all() {
        let history = history();
        let instants: Vec<u32> = (0..=history.events).collect();
        for kept in [0, 1, 50, 199] {
            let folded = Folded::new(&history, kept, &instants).expect("there are more blocks");
            assert_eq!(folded.blocks, 200 - kept);
            for &instant in &instants {
                let listed = history.blocks.iter().enumerate();
                let listed = listed.filter(|&(index, _)| !folded.contains(index));
                let mut sums = folded.at[instant as usize];
                for (_, block) in listed {
                    if block.is_allocated_at(instant) {
                        sums[0] += block.live_bytes().get();
                    }
                    if (block.start..block.end).contains(&instant) {
                        sums[1] += block.size.get();
                    }
                }
                let all = |curve: usize| history.levels.most(curve)[instant as usize];
                // What is reserved and not free is in blocks.
                let free = all(6) + all(7) + all(8);
                assert_eq!(sums, [all(1), all(0) - free], "{kept} kept, at {instant}");
            }
        }
        assert!(Folded::new(&history, 200, &instants).is_none());
    }

    #[test]
    fn what_is_listed_takes_more_for_longer() {
        let history = history();
        let weight = |block: &Block| block.size.get() * u64::from(block.end - block.start);
        let weights = |folded: &Folded, is_folded: bool| {
            let blocks = history.blocks.iter().enumerate();
            let chosen = blocks.filter(|&(index, _)| folded.contains(index) == is_folded);
            chosen.map(|(_, block)| weight(block)).collect::<Vec<u64>>()
        };
        let folded = Folded::new(&history, 20, &[]).expect("there are more blocks");
        let sizes = history.blocks.iter().enumerate();
        let largest = sizes
            .filter(|&(index, _)| folded.contains(index))
            .map(|(_, block)| block.size)
            .max();
        assert_eq!(Some(folded.size_max), largest);
        assert!(weights(&folded, true).iter().max() <= weights(&folded, false).iter().min());
    }
}
