//! How long blocks were by where they lay: from a recording of one of lowtide's own strategies, which says so.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, Config, Event};
use lowtide_trace::Trace;

/// The segments at some moment, and what in them is in use.
#[derive(Default)]
struct Present {
    /// Where segments end, by where they start.
    segments: BTreeMap<u64, u64>,
    /// Where blocks end, by where they start.
    blocks: BTreeMap<u64, u64>,
}

/// Returns how long each block of a recording was that `config` made: those that were there before the first event, by
/// address, then one for each [`Action::Alloc`]. `None` where that does not follow. O(n log m) for n events and m
/// blocks at once.
pub(crate) fn block_sizes(trace: &Trace, config: &Config) -> Option<Vec<Bytes>> {
    let mut present = Present::default();
    for segment in &trace.initial.segments {
        present.add_segment(segment.address.get(), segment.size);
    }
    let mut sizes = Vec::with_capacity(trace.initial.blocks.len() + trace.allocs());
    for block in &trace.initial.blocks {
        let address = block.address.get();
        let size = match (trace.initial.has_sizes, config) {
            (true, _) => block.size,
            // How much was free there once is not known any more.
            (false, Config::Bfc(_)) => return None,
            (false, _) => present.block_size(config, address, block.requested)?,
        };
        present.blocks.insert(address, address + size.get());
        sizes.push(size);
    }
    for recorded in &trace.events {
        let Event {
            action,
            address,
            size,
            ..
        } = recorded.event;
        let address = address.get();
        match action {
            Action::Alloc => {
                let size = present.block_size(config, address, size)?;
                present.blocks.insert(address, address + size.get());
                sizes.push(size);
            }
            Action::FreeCompleted => {
                present.blocks.remove(&address)?;
            }
            Action::SegmentAlloc => present.add_segment(address, size),
            Action::SegmentFree => {
                present.segments.remove(&address)?;
            }
            // No strategy but `caching` has expandable segments.
            Action::SegmentMap | Action::SegmentUnmap => return None,
            _ => {}
        }
    }
    Some(sizes)
}

impl Present {
    fn add_segment(&mut self, address: u64, size: Bytes) {
        self.segments.insert(address, address + size.get());
    }

    /// Returns how long the block is that is handed out at `address` now.
    fn block_size(&self, config: &Config, address: u64, requested: Bytes) -> Option<Bytes> {
        let (&start, &end) = self.segments.range(..=address).next_back()?;
        let before = self.blocks.range(start..address).next_back();
        let free_from = before.map_or(start, |(_, &end)| end);
        let free_to =
            { self.blocks.range(address..).next() }.map_or(end, |(&next, _)| next.min(end));
        // BFC cuts the start of what is free; what it has not merged yet it is not known from where it is.
        if address >= end || matches!(config, Config::Bfc(_)) && free_from != address {
            return None;
        }
        let free = Bytes(free_to - address);
        config.block_size(requested, free, Bytes(end - start))
    }
}
