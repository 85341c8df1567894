//! Segments whose pages share frames. Each step also updates statistics, events and the physical memory.

use std::collections::BTreeMap;

use super::{Heap, Segment};
use crate::block::{Block, BlockState, SegmentId};
use crate::domain::{Domain, DomainId, PoolIndex};
use crate::driver::{DriverError, Handle};
use crate::event::Action;
use crate::pages::{FrameId, PageId, PageRange};
use crate::physical::{Memory, Owner};
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress, signed};

impl Heap {
    /// Reserves addresses for a segment whose pages may share frames, without memory. One driver call.
    ///
    /// Private pools do not share: a graph may use their memory at any time.
    ///
    /// # Errors
    ///
    /// As [`Heap::reserve_segment`].
    pub(crate) fn reserve_pages<M: Memory>(
        &mut self,
        memory: &mut M,
        domain: DomainId,
        size: Bytes,
        page_size: Bytes,
        kind: SizeKind,
    ) -> Result<SegmentId, DriverError> {
        let id = self.reserve_segment(memory, domain, size, page_size, kind)?;
        let start = self.segments.get(id).address;
        let shares = self.domains.domain(domain).pool == PoolIndex::DEFAULT;
        self.pages.add_segment(id, start, page_size, shares);
        Ok(id)
    }

    /// Releases the addresses of a segment in which no frame is mapped.
    pub(crate) fn unreserve_pages<M: Memory>(
        &mut self,
        memory: &mut M,
        id: SegmentId,
    ) -> Result<(), DriverError> {
        self.unreserve_segment(memory, id)?;
        self.pages.remove_segment(id);
        Ok(())
    }

    /// Counts a block in use on the pages that it touches, if its segment has pages. Each page must have a frame that
    /// is idle or in use there.
    #[inline]
    pub(crate) fn occupy(&mut self, segment: SegmentId, address: DeviceAddress, size: Bytes) {
        if !self.pages.contains(segment) {
            return;
        }
        let range = self.pages.touched(segment, address, size);
        if self.pages.occupy(range) {
            self.show_in_use(range);
        }
        debug_assert!(
            range.pages().all(|at| self.pages.shows(at)),
            "a page in use shows its frame"
        );
    }

    /// Shows the frames that came into use.
    #[cold]
    fn show_in_use(&mut self, range: PageRange) {
        for at in range.pages() {
            if let Some(before) = self.pages.show_in_use(at) {
                self.count_shown(before, at);
            }
        }
    }

    /// Removes a block in use from the counts of its pages, if its segment has pages. Returns whether a frame became
    /// idle.
    #[inline]
    pub(crate) fn vacate(
        &mut self,
        segment: SegmentId,
        address: DeviceAddress,
        size: Bytes,
    ) -> bool {
        if !self.pages.contains(segment) {
            return false;
        }
        let range = self.pages.touched(segment, address, size);
        self.pages.vacate(range)
    }

    /// Shows an idle frame at a page that it is mapped at.
    pub(crate) fn show(&mut self, id: FrameId, at: PageId) {
        if let Some(before) = self.pages.show_idle(id, at) {
            self.count_shown(before, at);
        }
    }

    /// Counts a frame's bytes at another page.
    fn count_shown(&mut self, before: PageId, at: PageId) {
        self.leave(before);
        self.arrive(at, 1);
    }

    fn leave(&mut self, at: PageId) {
        let (owner, size) = (self.page_owner(at), self.pages.page_size());
        self.count_reserved(owner, -signed(size));
        self.record(
            Action::SegmentUnmap,
            owner.domain,
            self.pages.address(at),
            size,
        );
    }

    fn arrive(&mut self, first: PageId, pages: usize) {
        let owner = self.page_owner(first);
        let size = self.pages.bytes(pages);
        self.count_reserved(owner, signed(size));
        self.record(
            Action::SegmentMap,
            owner.domain,
            self.pages.address(first),
            size,
        );
    }

    fn page_owner(&self, at: PageId) -> Owner {
        let segment = self.segments.get(at.segment);
        self.owner(segment.domain, segment.kind)
    }

    fn start_of(&self, at: PageId) -> DeviceAddress {
        self.segments.get(at.segment).address
    }

    /// Returns `count` new handles of one page each, or none. They count as reserved only when they are mapped.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub(crate) fn create_handles<M: Memory>(
        &mut self,
        memory: &mut M,
        count: usize,
        for_page: PageId,
    ) -> Result<Vec<Handle>, DriverError> {
        let (owner, page_size) = (self.page_owner(for_page), self.pages.page_size());
        memory
            .physical_mut()
            .create_pages(count, page_size, owner, &mut |owner, change| {
                self.count_reserved(owner, change);
            })
    }

    /// Releases handles that are mapped nowhere. Those that the driver refuses become spare.
    pub(crate) fn release_handles<M: Memory>(
        &mut self,
        memory: &mut M,
        handles: Vec<Handle>,
        for_page: PageId,
    ) {
        let owner = self.page_owner(for_page);
        memory
            .physical_mut()
            .release_pages(handles, owner, &mut |owner, change| {
                self.count_reserved(owner, change);
            });
    }

    /// Maps idle frames, then new handles, at consecutive pages without frames, and shows them there. One driver call
    /// for each, and one for all.
    ///
    /// # Errors
    ///
    /// The driver's error; nothing has then changed.
    pub(crate) fn map_frames<M: Memory>(
        &mut self,
        memory: &mut M,
        first: PageId,
        frames: &[FrameId],
        new: &[Handle],
    ) -> Result<(), DriverError> {
        let (start, address) = (self.start_of(first), self.pages.address(first));
        let reserved = self.stats.reserved();
        let mut handles: Vec<Handle> = frames.iter().map(|&id| self.pages.handle(id)).collect();
        handles.extend(new);
        memory
            .physical_mut()
            .map_views(start, address, self.lane, &handles)?;
        let mut pages = pages_from(first);
        for &id in frames {
            self.leave(self.pages.shown_at(id));
            self.pages.add_view(id, pages.next().expect("pages go on"));
        }
        for &handle in new {
            self.pages
                .add_frame(handle, pages.next().expect("pages go on"));
        }
        self.arrive(first, handles.len());
        debug_assert_eq!(
            self.stats.reserved(),
            reserved + self.pages.bytes(new.len()),
            "new handles count, and frames that move count once"
        );
        debug_assert!(
            { pages_from(first).take(handles.len()) }.all(|at| self.is_as_mapped(at, memory)),
            "each page knows the handle that was mapped there"
        );
        self.stats.num_device_alloc += 1;
        Ok(())
    }

    /// Unmaps views at consecutive pages, which do not show their frames. The work that uses their addresses must be
    /// done. One driver call: for many pages, it takes 16 us a page; a call for each takes 22 us a page (H200).
    ///
    /// # Errors
    ///
    /// The driver's error; the views are then still mapped.
    pub(crate) fn unmap_views<M: Memory>(
        &mut self,
        memory: &mut M,
        views: &[PageId],
    ) -> Result<(), DriverError> {
        let (start, address) = (self.start_of(views[0]), self.pages.address(views[0]));
        let size = self.pages.bytes(views.len());
        debug_assert!(
            views.is_sorted_by(PageId::is_followed_by),
            "views that go at once lie one behind the other"
        );
        // Observers must be notified that the pages show nothing before their memory is unmapped.
        self.log.notify();
        memory.physical_mut().unmap_in_range(start, address, size)?;
        for &at in views {
            self.pages.remove_view(at);
        }
        debug_assert!(
            views.iter().all(|&at| self.is_as_mapped(at, memory)),
            "no page has a handle that went"
        );
        self.stats.num_device_free += 1;
        Ok(())
    }

    /// Unmaps an idle frame everywhere and returns its handle. The work that uses its addresses must be done. One
    /// driver call for each view.
    ///
    /// # Errors
    ///
    /// The driver's error; some views may then be unmapped.
    pub(crate) fn unmap_frame<M: Memory>(
        &mut self,
        memory: &mut M,
        id: FrameId,
    ) -> Result<Handle, DriverError> {
        let shown_at = self.pages.shown_at(id);
        let hidden = self.pages.views(id).iter().copied();
        let hidden: Vec<PageId> = hidden.filter(|&at| at != shown_at).collect();
        for at in hidden {
            self.unmap_views(memory, &[at])?;
        }
        let (owner, start) = (self.page_owner(shown_at), self.start_of(shown_at));
        let (address, size) = (self.pages.address(shown_at), self.pages.page_size());
        let mark = self.record_leaving(Action::SegmentUnmap, owner.domain, address, size);
        let unmapped = memory.physical_mut().unmap_in_range(start, address, size);
        let unmapped = unmapped.inspect_err(|_| self.log.undo(mark))?;
        self.count_reserved(owner, -signed(size));
        self.stats.num_device_free += 1;
        let handle = self.pages.remove_frame(id);
        debug_assert_eq!(unmapped, [handle], "the frame's handle was mapped there");
        Ok(handle)
    }

    /// Returns the pool and stream of a segment.
    pub(crate) fn domain_of(&self, id: SegmentId) -> Domain {
        self.domains.domain(self.segments.get(id).domain)
    }

    /// Returns whether the handle of a page's frame is mapped there, or nothing is.
    fn is_as_mapped<M: Memory>(&self, at: PageId, memory: &M) -> bool {
        let frame = self.pages.frame_at(at);
        let known = frame.map(|id| self.pages.handle(id));
        let (physical, address) = (memory.physical(), self.pages.address(at));
        physical.view(address).map(|view| view.handle) == known
    }

    /// Checks the pages against the blocks and against what is mapped. O(n log n) for n blocks and pages.
    ///
    /// # Errors
    ///
    /// As [`Pages::check`](crate::pages::Pages::check).
    pub(crate) fn check_pages<M: Memory>(&self, memory: &M) -> Result<(), String> {
        let mut users = BTreeMap::new();
        let uses_pages = |block: &Block| block.is_active() || block.state == BlockState::Recent;
        for (id, block) in self.blocks.iter().filter(|(_, block)| uses_pages(block)) {
            let segment = self.blocks.segment(id);
            if self.pages.contains(segment) {
                let touched = self.pages.touched(segment, block.address, block.size);
                for at in touched.pages() {
                    *users.entry(at).or_insert(0) += 1;
                }
            }
        }
        let physical = memory.physical();
        let mapped = |address| physical.view(address).map(|view| view.handle);
        self.pages.check(&users, mapped)
    }

    /// Returns the bytes of physical memory that count for a segment.
    pub(crate) fn mapped_bytes<M: Memory>(
        &self,
        id: SegmentId,
        segment: &Segment,
        memory: &M,
    ) -> Bytes {
        if self.pages.contains(id) {
            return self.pages.shown_bytes(id);
        }
        segment.mapped_bytes(memory)
    }

    /// Returns whether `size` bytes at an offset into a segment have memory behind them that no other address uses.
    pub(crate) fn has_memory<M: Memory>(
        &self,
        id: SegmentId,
        offset: Bytes,
        size: Bytes,
        memory: &M,
    ) -> bool {
        let segment = self.segments.get(id);
        if !self.pages.contains(id) {
            return segment.has_memory(offset, size, memory);
        }
        let touched = self.pages.touched(id, segment.address + offset, size);
        touched.pages().all(|at| self.pages.shows(at))
    }
}

/// Returns a page of a segment and those behind it.
fn pages_from(first: PageId) -> impl Iterator<Item = PageId> {
    (first.index..).map(move |index| PageId { index, ..first })
}
