//! The recorded pages of expandable segments that no block uses.

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{Action, Bytes, CachingConfig, DeviceAddress, Event, StrategyName};
use lowtide_trace::Trace;

use crate::extents::Extents;
use crate::pools::EventPools;

/// The page size of expandable segments for small requests, and of `tide`. Large requests have their own segments and
/// page size.
const SMALL_PAGE: Bytes = Bytes::mib(2);

/// The pages mapped for the default pool, and the blocks in them.
#[derive(Debug)]
pub(crate) struct Pages {
    config: CachingConfig,
    /// The pages mapped for small requests, and for large ones. `tide` has one kind, small ones.
    mapped: [Extents; 2],
    has_large: bool,
    /// The blocks that are not free, from start to end.
    held: BTreeMap<DeviceAddress, DeviceAddress>,
    /// The number of free ranges that contain a page that could be released.
    vacant: usize,
}

impl Pages {
    /// Returns the pages before the first event, with each segment in its pool.
    pub(crate) fn new(trace: &Trace, pools: &EventPools<'_>) -> Pages {
        let mut pages = Pages {
            config: pools.config.clone(),
            mapped: Default::default(),
            has_large: trace.settings.strategy_name() != Some(StrategyName::Tide),
            held: BTreeMap::new(),
            vacant: 0,
        };
        for (index, segment) in trace.initial.segments.iter().enumerate() {
            if pools.of_initial(index).is_default() && segment.is_expandable {
                let end = segment.address + segment.size;
                pages.map(segment.address, end, segment.is_large);
            }
        }
        for block in &trace.initial.blocks {
            pages.hold(block.address, block.address + block.size);
        }
        pages
    }

    /// Returns the number of free ranges that contain a page that could be released.
    pub(crate) fn vacant(&self) -> usize {
        self.vacant
    }

    /// Applies an event. `is_default` says whether it is of the default pool. O(log n) for n blocks.
    pub(crate) fn apply(&mut self, event: Event, is_default: bool) {
        let start = event.address;
        match event.action {
            Action::SegmentMap if is_default => {
                self.map(start, start + event.size, event.size > SMALL_PAGE);
            }
            Action::SegmentUnmap => self.change(start, start + event.size, |pages, end| {
                let mapped = pages.mapped.iter_mut();
                mapped.for_each(|mapped| mapped.unmap(start, end));
            }),
            Action::Alloc => self.hold(start, start + self.config.block_size(event.size)),
            Action::FreeCompleted => {
                if let Some(&end) = self.held.get(&start) {
                    self.change(start, end, |pages, _| {
                        pages.held.remove(&start);
                    });
                }
            }
            _ => {}
        }
    }

    fn map(&mut self, start: DeviceAddress, end: DeviceAddress, is_large: bool) {
        self.change(start, end, |pages, end| {
            let kind = usize::from(is_large && pages.has_large);
            pages.mapped[kind].map(start, end);
        });
    }

    fn hold(&mut self, start: DeviceAddress, end: DeviceAddress) {
        let mut mapped = self.mapped.iter();
        if mapped.any(|mapped| mapped.around(start).is_some()) {
            self.change(start, end, |pages, end| {
                pages.held.insert(start, end);
            });
        }
    }

    /// Applies `change` between two addresses, and counts the free ranges there again.
    fn change(
        &mut self,
        start: DeviceAddress,
        end: DeviceAddress,
        change: impl FnOnce(&mut Pages, DeviceAddress),
    ) {
        let before = self.vacant_around(start, end);
        self.vacant = self.vacant.saturating_sub(before);
        change(self, end);
        self.vacant += self.vacant_around(start, end);
    }

    /// Returns the number of free ranges with a releasable page that begin or end between two addresses.
    fn vacant_around(&self, start: DeviceAddress, end: DeviceAddress) -> usize {
        let before = DeviceAddress(start.get().saturating_sub(1));
        let stretches = [before, start, end].map(|address| self.stretch(address));
        stretches
            .into_iter()
            .flatten()
            .collect::<BTreeSet<_>>()
            .len()
    }

    /// Returns the start of the free range that contains `address`, if a page of the range could be released.
    fn stretch(&self, address: DeviceAddress) -> Option<DeviceAddress> {
        let pages = [SMALL_PAGE, self.config.large_segment_size];
        let around = { self.mapped.iter().zip(pages) }
            .find_map(|(mapped, page)| Some((mapped.around(address)?, page)));
        let ((first, last), page) = around?;
        let before = self.held.range(..=address).next_back();
        let held_until = before.map_or(first, |(_, &end)| end);
        let start = first.max(held_until);
        if address < start {
            return None;
        }
        let next = self.held.range(address..).next();
        let end = next.map_or(last, |(&next, _)| last.min(next));
        let first_page = start.offset_from(first).round_up(page);
        let last_page = end.offset_from(first).round_down(page);
        (first_page < last_page).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use lowtide_core::{MempoolId, Stream};

    use super::*;

    /// Returns the number of ranges with a vacant page after each event, at these MiB and of these sizes in MiB.
    fn vacant_after(events: &[(Action, u64, u64)]) -> Vec<usize> {
        vacant_of(&Trace::default(), events)
    }

    /// Returns the same for a trace's settings.
    fn vacant_of(trace: &Trace, events: &[(Action, u64, u64)]) -> Vec<usize> {
        let pools = EventPools::new(trace);
        let mut pages = Pages::new(trace, &pools);
        let events = events.iter().map(|&(action, mib, size_mib)| Event {
            action,
            pool: MempoolId::DEFAULT,
            address: DeviceAddress(mib << 20),
            size: Bytes::mib(size_mib),
            stream: Stream::DEFAULT,
        });
        events
            .map(|event| {
                pages.apply(event, true);
                pages.vacant()
            })
            .collect()
    }

    #[test]
    fn a_page_is_vacant_while_no_block_is_in_it() {
        let vacant = vacant_after(&[
            (Action::SegmentMap, 100, 60),
            (Action::Alloc, 100, 45),
            (Action::FreeCompleted, 100, 45),
            (Action::Alloc, 100, 25),
            (Action::Alloc, 125, 10),
            (Action::Alloc, 135, 5),
            // The middle page still has a block at its end.
            (Action::FreeCompleted, 125, 10),
            (Action::FreeCompleted, 100, 25),
            (Action::SegmentUnmap, 100, 20),
            (Action::SegmentUnmap, 140, 20),
            (Action::FreeCompleted, 135, 5),
        ]);
        assert_eq!(vacant, [1, 0, 1, 1, 1, 1, 1, 2, 1, 0, 1]);
    }

    #[test]
    fn small_pages_are_smaller_and_others_are_not_counted() {
        let vacant = vacant_after(&[
            (Action::SegmentMap, 100, 2),
            (Action::Alloc, 101, 1),
            (Action::SegmentMap, 102, 2),
            (Action::FreeCompleted, 101, 1),
            (Action::SegmentUnmap, 100, 4),
            (Action::SegmentAlloc, 200, 20),
            (Action::Alloc, 200, 20),
            (Action::FreeCompleted, 200, 20),
        ]);
        assert_eq!(vacant, [1, 0, 1, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn a_block_of_tide_may_lie_in_pages_that_were_mapped_apart() {
        let mut trace = Trace::default();
        trace.settings.strategy = "tide".into();
        let events = [
            (Action::SegmentMap, 100, 2),
            (Action::SegmentMap, 102, 4),
            (Action::SegmentMap, 106, 2),
            (Action::Alloc, 100, 7),
            (Action::FreeCompleted, 100, 7),
            (Action::Alloc, 103, 2),
        ];
        assert_eq!(vacant_of(&trace, &events), [1, 1, 1, 0, 1, 2]);
    }
}
