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
