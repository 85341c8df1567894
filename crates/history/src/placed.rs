//! Computes block sizes from the blocks' addresses, for a recording of one of lowtide's own strategies.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, Config, Event};
use lowtide_trace::Trace;

/// The segments, and the blocks in use, at some event.
#[derive(Default)]
struct Present {
    /// The end of each segment, by its start.
    segments: BTreeMap<u64, u64>,
    /// The end of each block, by its start.
    blocks: BTreeMap<u64, u64>,
}

/// Returns the size of each block of a recording of `config`: first the blocks from before the first event, by
/// address, then one for each [`Action::Alloc`]. Returns `None` if the sizes do not follow from the addresses.
/// O(n log m) for n events and m blocks at once.
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
            // The free bytes at the time of these allocations are unknown.
            (false, Config::Bfc(_)) => return None,
            (false, _) => present.block_size(config, address, block.requested)?,
        };
        present.blocks.insert(address, address + size.get());
        sizes.push(size);
    }
    for recorded in &trace.events {
        let Event { action, size, .. } = recorded.event;
        let address = recorded.event.address.get();
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
            // Where memory is mapped says how much of it is free, on which `tide` does not depend.
            Action::SegmentMap | Action::SegmentUnmap if !matches!(config, Config::Tide(_)) => {
                return None;
            }
            _ => {}
        }
    }
    Some(sizes)
}

impl Present {
    fn add_segment(&mut self, address: u64, size: Bytes) {
        self.segments.insert(address, address + size.get());
    }

    /// Returns the size of a block that is allocated at `address` now.
    fn block_size(&self, config: &Config, address: u64, requested: Bytes) -> Option<Bytes> {
        if matches!(config, Config::Tide(_)) {
            let any = Bytes(u64::MAX);
            return config.block_size(requested, any, any);
        }
        let (&start, &end) = self.segments.range(..=address).next_back()?;
        let before = self.blocks.range(start..address).next_back();
        let free_from = before.map_or(start, |(_, &end)| end);
        let free_to =
            { self.blocks.range(address..).next() }.map_or(end, |(&next, _)| next.min(end));
        // BFC allocates from the start of a free block. Neighbours that it has not merged yet hide where that is.
        if address >= end || matches!(config, Config::Bfc(_)) && free_from != address {
            return None;
        }
        let free = Bytes(free_to - address);
        config.block_size(requested, free, Bytes(end - start))
    }
}
