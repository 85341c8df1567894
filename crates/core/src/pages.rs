//! The pages of segments whose physical memory can be mapped at several addresses.
//!
//! A *frame* is a handle of one page. It has a *view* at each page that it is mapped at. The page where it was used or
//! mapped last *shows* it: there its bytes count. A frame is idle while no block in use touches a page that it is
//! behind.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use crate::block::{Block, SegmentId};
use crate::driver::Handle;
use crate::units::{Bytes, DeviceAddress};

/// The number of a frame in [`Pages`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FrameId(NonZeroU32);

impl FrameId {
    fn index(self) -> usize {
        self.0.get() as usize
    }
}

/// A page of a segment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct PageId {
    pub(crate) segment: SegmentId,
    pub(crate) index: u32,
}

/// What is known of a page. 16 bytes, because a request may touch hundreds.
#[derive(Clone, Copy, Default, Debug)]
struct Page {
    frame: Option<FrameId>,
    /// The number of blocks in use that touch the page.
    users: u32,
    /// When the last of them was freed.
    freed: u64,
}

/// How a page can serve a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageState {
    /// A block in use touches it.
    InUse,
    /// Its frame is idle.
    Ready(FrameId),
    /// No frame is mapped there.
    Unmapped,
    /// Its frame is in use at another page.
    Blocked,
}

#[derive(Clone, Debug)]
struct Frame {
    handle: Handle,
    /// The pages that it is mapped at, in the order of mapping.
    views: Vec<PageId>,
    shown_at: PageId,
    /// When it was last freed, or given to the stream of the page that shows it.
    freed: u64,
    /// Whether the page that shows it is in no use. To derive it costs a request of many pages 12 % more instructions.
    is_idle: bool,
    /// The latest window that is to use the frame: [`Pages::claim`].
    window: u64,
    /// The neighbours among the idle frames that may be stolen.
    older: Option<FrameId>,
    younger: Option<FrameId>,
}

/// The pages of a segment.
#[derive(Debug)]
struct SegmentPages {
    start: DeviceAddress,
    pages: Vec<Page>,
    /// Whether other segments may use its idle frames.
    shares: bool,
    /// The number of pages that show a frame.
    shown: usize,
}

/// Every page and every frame of a lane.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    segments: Vec<Option<SegmentPages>>,
    /// Frame 0 is never used, so that `Option<FrameId>` takes four bytes.
    frames: Vec<Option<Frame>>,
    vacant: Vec<FrameId>,
    page_size: Bytes,
    /// The ends of the list of idle frames that may be stolen.
    oldest: Option<FrameId>,
    youngest: Option<FrameId>,
    /// How often a frame became idle or was given to another page.
    now: u64,
    /// How many windows were examined.
    windows: u64,
}

impl Pages {
    /// Adds a segment without frames. `shares` says whether other segments may use its idle frames.
    pub(crate) fn add_segment(
        &mut self,
        id: SegmentId,
        start: DeviceAddress,
        page_size: Bytes,
        shares: bool,
    ) {
        debug_assert!(self.page_size.is_zero() || self.page_size == page_size);
        self.page_size = page_size;
        let index = id.index();
        if index >= self.segments.len() {
            self.segments.resize_with(index + 1, || None);
        }
        debug_assert!(self.segments[index].is_none(), "a segment is added once");
        self.segments[index] = Some(SegmentPages {
            start,
            // Pages are added as they are used: addresses are reserved for all memory of the device.
            pages: Vec::new(),
            shares,
            shown: 0,
        });
    }

    /// Removes a segment, in which nothing is mapped.
    pub(crate) fn remove_segment(&mut self, id: SegmentId) {
        let removed = self.segments[id.index()].take();
        debug_assert!(
            removed.is_some_and(|segment| segment.pages.iter().all(|page| page.frame.is_none()))
        );
    }

    /// Returns whether a segment has pages here.
    #[inline]
    pub(crate) fn contains(&self, id: SegmentId) -> bool {
        self.segments.get(id.index()).is_some_and(Option::is_some)
    }

    /// Returns the size of a page.
    pub(crate) fn page_size(&self) -> Bytes {
        self.page_size
    }

    /// Returns the size of some pages.
    pub(crate) fn bytes(&self, pages: usize) -> Bytes {
        Bytes(self.page_size.get() * pages as u64)
    }

    /// Returns the time: how often a frame became idle or was given to another page.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    /// Returns the pages that a range of a segment touches.
    #[inline]
    pub(crate) fn touched(
        &self,
        segment: SegmentId,
        address: DeviceAddress,
        size: Bytes,
    ) -> impl Iterator<Item = PageId> + use<> {
        let start = self.segment(segment).start;
        let shift = self.page_size.get().trailing_zeros();
        let first = address.offset_from(start).get() >> shift;
        let last = (address.offset_from(start).get() + size.get() - 1) >> shift;
        let index = |index| u32::try_from(index).expect("a segment has fewer than 2^32 pages");
        (index(first)..=index(last)).map(move |index| PageId { segment, index })
    }

    /// Returns how many of the pages that a range touches no other block touches. The range lies in the block `free`.
    pub(crate) fn unshared(
        &self,
        segment: SegmentId,
        (address, size): (DeviceAddress, Bytes),
        free: &Block,
    ) -> u64 {
        let start = self.segment(segment).start;
        let (from, to) = (
            address.offset_from(start),
            (address + size).offset_from(start),
        );
        let inner = free.address.offset_from(start).round_up(self.page_size);
        let outer = free.end().offset_from(start).round_down(self.page_size);
        let first = from.round_down(self.page_size).max(inner);
        let last = to.round_up(self.page_size).min(outer);
        last.saturating_sub(first).get() / self.page_size.get()
    }

    /// Returns the address of a page.
    pub(crate) fn address(&self, page: PageId) -> DeviceAddress {
        self.segment(page.segment).start + self.bytes(page.index as usize)
    }

    /// Returns how a page can serve a block.
    #[inline]
    pub(crate) fn state(&self, at: PageId) -> PageState {
        let page = self.page(at);
        match page.frame {
            _ if page.users > 0 => PageState::InUse,
            None => PageState::Unmapped,
            Some(id) if self.frame(id).is_idle => PageState::Ready(id),
            Some(_) => PageState::Blocked,
        }
    }

    /// Returns when an idle frame was last freed, or given to the stream of the page that shows it. Work queued in that
    /// stream until then may use it.
    pub(crate) fn idle_since(&self, id: FrameId) -> u64 {
        self.frame(id).freed
    }

    /// Returns when the last block that touched a page was freed. Work queued until then may use its address.
    pub(crate) fn freed(&self, at: PageId) -> u64 {
        self.page(at).freed
    }

    /// Starts to examine another window. No frame is claimed for it.
    pub(crate) fn begin_window(&mut self) {
        self.windows += 1;
    }

    /// Claims an idle frame for the window. Returns `false` if it is already claimed: two pages of the window have it.
    pub(crate) fn claim(&mut self, id: FrameId) -> bool {
        debug_assert!(self.frame(id).is_idle);
        let window = self.windows;
        std::mem::replace(&mut self.frame_mut(id).window, window) != window
    }

    /// Returns whether a frame is claimed for the window.
    pub(crate) fn is_claimed(&self, id: FrameId) -> bool {
        self.frame(id).window == self.windows
    }

    /// Returns the page that shows a frame.
    pub(crate) fn shown_at(&self, id: FrameId) -> PageId {
        self.frame(id).shown_at
    }

    /// Returns the pages that a frame is mapped at, in the order of mapping.
    pub(crate) fn views(&self, id: FrameId) -> &[PageId] {
        &self.frame(id).views
    }

    /// Returns the handle of a frame.
    pub(crate) fn handle(&self, id: FrameId) -> Handle {
        self.frame(id).handle
    }

    /// Returns the frame that is mapped at a page.
    pub(crate) fn frame_at(&self, at: PageId) -> Option<FrameId> {
        self.page(at).frame
    }

    /// Returns the idle frames that may be stolen, oldest first.
    pub(crate) fn idle(&self) -> impl Iterator<Item = FrameId> {
        std::iter::successors(self.oldest, |&id| self.frame(id).younger)
    }

    /// Returns the idle frames that a segment shows, by rising addresses. Linear in its pages.
    pub(crate) fn idle_in(&self, segment: SegmentId) -> Vec<FrameId> {
        let frames = self.shown_in(segment).map(|(_, id)| id);
        frames.filter(|&id| self.frame(id).is_idle).collect()
    }

    /// Returns the frames that a segment shows, with their addresses, by rising addresses. Linear in its pages.
    pub(crate) fn shown_in(
        &self,
        segment: SegmentId,
    ) -> impl Iterator<Item = (DeviceAddress, FrameId)> {
        let pages = (0..).zip(&self.segment(segment).pages);
        pages.filter_map(move |(index, page)| {
            let at = PageId { segment, index };
            let frame = page.frame.filter(|&id| self.frame(id).shown_at == at)?;
            Some((self.address(at), frame))
        })
    }

    /// Returns whether a frame is mapped at a page of a segment. Linear in its pages.
    pub(crate) fn has_views(&self, segment: SegmentId) -> bool {
        let pages = &self.segment(segment).pages;
        pages.iter().any(|page| page.frame.is_some())
    }

    /// Returns the bytes of the frames that a segment shows.
    pub(crate) fn shown_bytes(&self, segment: SegmentId) -> Bytes {
        self.bytes(self.segment(segment).shown)
    }

    /// Counts a block in use that touches a page, whose frame is idle or in use there. Returns the page that showed the
    /// frame before, if it was another.
    #[inline]
    pub(crate) fn occupy(&mut self, at: PageId) -> Option<PageId> {
        let page = self.page_mut(at);
        page.users += 1;
        if page.users > 1 {
            return None;
        }
        let id = page.frame.expect("a block in use has memory");
        self.unlist(id);
        let frame = self.frame_mut(id);
        debug_assert!(frame.is_idle, "the frame is in use at another page");
        frame.is_idle = false;
        let before = frame.shown_at;
        (before != at).then(|| self.show(id, at)).map(|()| before)
    }

    /// Counts a block less that touches a page. Returns whether its frame became idle.
    #[inline]
    pub(crate) fn vacate(&mut self, at: PageId) -> bool {
        let page = self.page_mut(at);
        debug_assert!(page.users > 0);
        page.users -= 1;
        if page.users > 0 {
            return false;
        }
        let id = page.frame.expect("a block in use has memory");
        self.now += 1;
        let now = self.now;
        self.page_mut(at).freed = now;
        let frame = self.frame_mut(id);
        (frame.is_idle, frame.freed) = (true, now);
        debug_assert_eq!(frame.shown_at, at);
        self.list(id);
        true
    }

    /// Adds a new frame, which is idle, at a page where no frame is mapped.
    pub(crate) fn add_frame(&mut self, handle: Handle, at: PageId) -> FrameId {
        let frame = Frame {
            handle,
            views: vec![at],
            shown_at: at,
            freed: 0,
            is_idle: true,
            window: 0,
            older: None,
            younger: None,
        };
        let id = self.insert(frame);
        self.place(id, at);
        self.segment_mut(at.segment).shown += 1;
        self.list(id);
        id
    }

    /// Adds a view of an idle frame at a page where no frame is mapped, and shows it there.
    pub(crate) fn add_view(&mut self, id: FrameId, at: PageId) {
        debug_assert!(self.frame(id).is_idle);
        self.frame_mut(id).views.push(at);
        self.place(id, at);
        self.give(id, at);
    }

    /// Removes the view at a page that does not show its frame.
    pub(crate) fn remove_view(&mut self, at: PageId) {
        let id = self
            .page_mut(at)
            .frame
            .take()
            .expect("a frame is mapped there");
        let frame = self.frame_mut(id);
        debug_assert_ne!(frame.shown_at, at, "the view is not the one that counts");
        frame.views.retain(|&view| view != at);
    }

    /// Shows an idle frame at another page that it is mapped at. Returns the page that showed it before, if it was
    /// another.
    pub(crate) fn show_idle(&mut self, id: FrameId, at: PageId) -> Option<PageId> {
        let before = self.frame(id).shown_at;
        if before == at {
            return None;
        }
        self.give(id, at);
        Some(before)
    }

    /// Removes an idle frame, which has one view. Returns the handle.
    pub(crate) fn remove_frame(&mut self, id: FrameId) -> Handle {
        self.unlist(id);
        let frame = self.frames[id.index()].take().expect("the frame exists");
        debug_assert!(frame.is_idle && frame.views == [frame.shown_at]);
        self.page_mut(frame.shown_at).frame = None;
        self.segment_mut(frame.shown_at.segment).shown -= 1;
        self.vacant.push(id);
        frame.handle
    }

    /// Shows an idle frame at another page, whose stream comes after the work that uses it.
    fn give(&mut self, id: FrameId, at: PageId) {
        self.unlist(id);
        self.show(id, at);
        self.list(id);
        self.now += 1;
        self.frame_mut(id).freed = self.now;
    }

    fn insert(&mut self, frame: Frame) -> FrameId {
        if let Some(id) = self.vacant.pop() {
            self.frames[id.index()] = Some(frame);
            return id;
        }
        if self.frames.is_empty() {
            self.frames.push(None);
        }
        let number = u32::try_from(self.frames.len())
            .ok()
            .and_then(NonZeroU32::new);
        self.frames.push(Some(frame));
        FrameId(number.expect("fewer than 2^32 frames: they have 8 PiB"))
    }

    fn place(&mut self, id: FrameId, at: PageId) {
        let page = self.page_mut(at);
        debug_assert!(page.frame.is_none() && page.users == 0);
        page.frame = Some(id);
    }

    fn show(&mut self, id: FrameId, at: PageId) {
        let before = std::mem::replace(&mut self.frame_mut(id).shown_at, at);
        debug_assert_eq!(self.page(at).frame, Some(id));
        self.segment_mut(before.segment).shown -= 1;
        self.segment_mut(at.segment).shown += 1;
    }

    /// Lists an idle frame as the youngest that may be stolen, if its segment shares.
    #[inline]
    fn list(&mut self, id: FrameId) {
        let at = self.frame(id).shown_at;
        if !self.segment(at.segment).shares {
            return;
        }
        let older = self.youngest.replace(id);
        match older {
            Some(older) => self.frame_mut(older).younger = Some(id),
            None => self.oldest = Some(id),
        }
        let frame = self.frame_mut(id);
        (frame.older, frame.younger) = (older, None);
    }

    #[inline]
    fn unlist(&mut self, id: FrameId) {
        let at = self.frame(id).shown_at;
        if !self.segment(at.segment).shares {
            return;
        }
        let frame = self.frame_mut(id);
        let (older, younger) = (frame.older.take(), frame.younger.take());
        match older {
            Some(older) => self.frame_mut(older).younger = younger,
            None => self.oldest = younger,
        }
        match younger {
            Some(younger) => self.frame_mut(younger).older = older,
            None => self.youngest = older,
        }
    }

    #[inline]
    fn segment(&self, id: SegmentId) -> &SegmentPages {
        self.segments[id.index()]
            .as_ref()
            .expect("the segment has pages")
    }

    #[inline]
    fn segment_mut(&mut self, id: SegmentId) -> &mut SegmentPages {
        self.segments[id.index()]
            .as_mut()
            .expect("the segment has pages")
    }

    #[inline]
    fn page(&self, at: PageId) -> Page {
        let pages = &self.segment(at.segment).pages;
        pages.get(at.index as usize).copied().unwrap_or_default()
    }

    #[inline]
    fn page_mut(&mut self, at: PageId) -> &mut Page {
        let pages = &mut self.segment_mut(at.segment).pages;
        let index = at.index as usize;
        if index >= pages.len() {
            pages.resize(index + 1, Page::default());
        }
        &mut pages[index]
    }

    #[inline]
    fn frame(&self, id: FrameId) -> &Frame {
        self.frames[id.index()].as_ref().expect("the frame exists")
    }

    #[inline]
    fn frame_mut(&mut self, id: FrameId) -> &mut Frame {
        self.frames[id.index()].as_mut().expect("the frame exists")
    }
}

/// What is stored in more than one place.
impl Pages {
    /// Checks that pages, frames and the list of idle frames agree with each other, with the blocks and with what is
    /// mapped. `users` has the number of blocks in use for each page that any touches; `mapped` returns the handle that
    /// is mapped at an address. O(n log n) for n pages.
    ///
    /// # Errors
    ///
    /// A sentence that says what disagrees, and where.
    pub(crate) fn check(
        &self,
        users: &BTreeMap<PageId, u32>,
        mapped: impl Fn(DeviceAddress) -> Option<Handle>,
    ) -> Result<(), String> {
        let mut views: BTreeMap<FrameId, BTreeSet<PageId>> = BTreeMap::new();
        for (at, page) in self.all_pages() {
            let address = self.address(at);
            let handle = page.frame.map(|id| self.frame(id).handle);
            if page.users != users.get(&at).copied().unwrap_or(0) {
                return Err(format!(
                    "the page at {address} counts {} blocks",
                    page.users
                ));
            }
            if handle != mapped(address) {
                return Err(format!(
                    "the page at {address} has {handle:?}, which is not mapped"
                ));
            }
            if let Some(id) = page.frame {
                views.entry(id).or_default().insert(at);
            }
        }
        for (id, views) in &views {
            self.check_frame(*id, views)?;
        }
        self.check_shown()?;
        self.check_idle(views.keys().copied())
    }

    /// Checks that a frame knows its views, and that only the page that shows it is in use.
    fn check_frame(&self, id: FrameId, views: &BTreeSet<PageId>) -> Result<(), String> {
        let frame = self.frame(id);
        let known: BTreeSet<PageId> = frame.views.iter().copied().collect();
        let is_idle = self.page(frame.shown_at).users == 0;
        let mut hidden = views.iter().filter(|&&at| at != frame.shown_at);
        if frame.is_idle != is_idle
            || known != *views
            || frame.views.len() != views.len()
            || !views.contains(&frame.shown_at)
        {
            return Err(format!(
                "{frame:?} has the views {views:?}, and idle is {is_idle}"
            ));
        }
        match hidden.find(|&&at| self.page(at).users > 0) {
            Some(at) => Err(format!("{frame:?} is in use at {at:?}")),
            None => Ok(()),
        }
    }

    /// Checks each segment's count of pages that show a frame.
    fn check_shown(&self) -> Result<(), String> {
        let mut segments = (0..)
            .zip(&self.segments)
            .filter_map(|(number, segment)| Some((SegmentId(number), segment.as_ref()?.shown)));
        match segments.find(|&(id, shown)| self.shown_in(id).count() != shown) {
            Some((id, shown)) => Err(format!("{id:?} does not show {shown} frames")),
            None => Ok(()),
        }
    }

    /// Checks that the list has each idle frame of a segment that shares, once.
    fn check_idle(&self, frames: impl Iterator<Item = FrameId>) -> Result<(), String> {
        let shares = |&id: &FrameId| self.segment(self.shown_at(id).segment).shares;
        let expected: Vec<FrameId> = frames
            .filter(|&id| self.frame(id).is_idle)
            .filter(shares)
            .collect();
        let mut listed: Vec<FrameId> = self.idle().take(expected.len() + 1).collect();
        let backwards = std::iter::successors(self.youngest, |&id| self.frame(id).older);
        let is_linked = backwards
            .take(listed.len() + 1)
            .eq(listed.iter().rev().copied());
        listed.sort_unstable();
        if is_linked && listed == expected {
            return Ok(());
        }
        Err(format!("{listed:?} are listed as idle, {expected:?} are"))
    }

    /// Returns every page that was ever used.
    fn all_pages(&self) -> impl Iterator<Item = (PageId, Page)> {
        let segments = (0..).zip(&self.segments);
        segments.flat_map(|(number, segment)| {
            let segment_id = SegmentId(number);
            let pages = segment.iter().flat_map(|segment| &segment.pages);
            (0..).zip(pages).map(move |(index, page)| {
                let at = PageId {
                    segment: segment_id,
                    index,
                };
                (at, *page)
            })
        })
    }
}
