//! The call sites of blocks: the stack if there is one, otherwise the size and stream.

use std::ops::Range;

use lowtide_core::{Bytes, Stream};
use lowtide_trace::StackId;

use crate::history::{Block, History};
use crate::numbering::Numbering;

/// The call site of blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Site {
    /// A call stack.
    Stack(StackId),
    /// Requests of about one size in one stream, if the recording has no stacks.
    Size {
        /// The most requested bytes; the least is seven eighths of it, or more.
        size_max: Bytes,
        /// Their stream.
        stream: Stream,
    },
}

/// The blocks of a history by their call sites.
#[derive(Debug)]
pub(super) struct Sites {
    /// The sites in order of first appearance.
    pub(super) sites: Vec<Site>,
    /// The indices of each site's blocks, in order of allocation.
    pub(super) blocks: Vec<Vec<u32>>,
}

/// The least and the most live bytes of a site during a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extremes {
    pub(super) least: u64,
    pub(super) most: u64,
}

impl Site {
    /// Returns the call site of a block of `history`.
    pub fn of(block: &Block, history: &History) -> Site {
        match block.stack {
            StackId::NONE => Site::of_size(block, history),
            stack => Site::Stack(stack),
        }
    }

    fn of_size(block: &Block, history: &History) -> Site {
        Site::Size {
            size_max: size_class(block.requested),
            stream: history.streams[block.stream as usize],
        }
    }
}

impl Sites {
    /// Returns the blocks of `history` by call site. Linear time.
    pub(super) fn new(history: &History) -> Sites {
        Sites::by(Site::of, history)
    }

    /// Returns the blocks of `history` by size and stream, even if they have stacks. Linear time.
    pub(super) fn by_size(history: &History) -> Sites {
        Sites::by(Site::of_size, history)
    }

    /// Returns the blocks of `history` whose sites are `chosen`, as one site. Linear time.
    pub(super) fn together(history: &History, chosen: impl Fn(Site) -> bool) -> Sites {
        let is_chosen = |(_, block): &(u32, &Block)| chosen(Site::of(block, history));
        let blocks = (0..).zip(&history.blocks).filter(is_chosen);
        Sites {
            sites: vec![Site::Stack(StackId::NONE)],
            blocks: vec![blocks.map(|(index, _)| index).collect()],
        }
    }

    fn by(site_of: impl Fn(&Block, &History) -> Site, history: &History) -> Sites {
        let mut sites = Numbering::default();
        let mut blocks: Vec<Vec<u32>> = Vec::new();
        for (index, block) in (0..).zip(&history.blocks) {
            let number = sites.number(site_of(block, history)) as usize;
            blocks.resize(sites.values().len(), Vec::new());
            blocks[number].push(index);
        }
        Sites {
            sites: sites.into_values(),
            blocks,
        }
    }

    /// Returns the live bytes of site `number` at `instant` and the number of blocks, without those in the ranges
    /// `away`, which are paused.
    pub(super) fn live_at(
        &self,
        history: &History,
        number: usize,
        instant: u32,
        away: &[Range<u64>],
    ) -> (u64, u64) {
        let blocks = self.blocks_of(history, number);
        let held = blocks.filter(|block| block.is_allocated_at(instant) && !block.is_in(away));
        held.fold((0, 0), |(bytes, blocks), block| {
            (bytes + block.live_bytes().get(), blocks + 1)
        })
    }

    /// Returns the least and the most live bytes of site `number` between each two `boundaries`.
    pub(super) fn extremes(
        &self,
        history: &History,
        number: usize,
        boundaries: &[u32],
    ) -> Vec<Extremes> {
        let changes = |instant: fn(&Block) -> u32| {
            let blocks = self.blocks_of(history, number);
            let changes = blocks.map(|block| (instant(block), block.live_bytes().get()));
            let mut changes: Vec<(u32, u64)> = changes.collect();
            changes.sort_unstable();
            changes.into_iter().peekable()
        };
        let mut comes = changes(|block| block.start);
        let mut goes = changes(|block| block.freed);
        let mut live = 0;
        // Takes the next change at or before an instant, and returns the live bytes after it.
        let mut next = |until: u32| {
            let come = comes.peek().map_or(u32::MAX, |change| change.0);
            let go = goes.peek().map_or(u32::MAX, |change| change.0);
            if come.min(go) > until {
                return None;
            }
            // A block that waited for an event before the recording starts and ends at the same instant.
            if come <= go {
                live += comes.next()?.1;
            } else {
                live -= goes.next()?.1;
            }
            Some(live)
        };
        let mut at_start = 0;
        let mut extremes = Vec::with_capacity(boundaries.len());
        for step in boundaries.windows(2) {
            while let Some(live) = next(step[0]) {
                at_start = live;
            }
            let (mut least, mut most) = (at_start, at_start);
            // The only step of a recording without events has no instant.
            while let Some(live) = next(step[1].saturating_sub(1)) {
                (least, most) = (least.min(live), most.max(live));
                at_start = live;
            }
            extremes.push(Extremes { least, most });
        }
        extremes
    }

    /// Returns, for each of the `boundaries`, the bytes of site `number` allocated before it that are live at the
    /// last one.
    pub(super) fn kept(&self, history: &History, number: usize, boundaries: &[u32]) -> Vec<u64> {
        let last = boundaries.last().copied().unwrap_or(0);
        let mut kept = vec![0; boundaries.len()];
        let blocks = self.blocks_of(history, number);
        // A block allocated at the last boundary is live there, but was allocated before none.
        for block in blocks.filter(|block| block.start < last && last < block.freed) {
            kept[boundaries.partition_point(|&boundary| boundary <= block.start)] +=
                block.live_bytes().get();
        }
        for index in 1..kept.len() {
            kept[index] += kept[index - 1];
        }
        kept
    }

    pub(super) fn blocks_of<'h>(
        &self,
        history: &'h History,
        number: usize,
    ) -> impl Iterator<Item = &'h Block> {
        let blocks = self.blocks[number].iter();
        blocks.map(|&index| &history.blocks[index as usize])
    }
}

/// Returns the largest size in the size class of a request. There are eight classes between two powers of two.
fn size_class(requested: Bytes) -> Bytes {
    let size = requested.get().max(512);
    let step = 1 << (size - 1).ilog2().saturating_sub(3);
    Bytes(size.next_multiple_of(step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_classes_lie_between_two_powers_of_two() {
        let classes: std::collections::BTreeSet<u64> = (1025..=2048)
            .map(|size| size_class(Bytes(size)).get())
            .collect();
        let expected: Vec<u64> = (1..=8).map(|eighth| 1024 + 128 * eighth).collect();
        assert_eq!(classes.into_iter().collect::<Vec<_>>(), expected);
        assert_eq!(size_class(Bytes(1)), Bytes(512));
        assert_eq!(size_class(Bytes::gib(3)), Bytes::gib(3));
    }
}
