//! The pages of segments whose physical memory can be mapped at several addresses.
//!
//! A *frame* is a handle of one page. It has a *view* at each page that it is mapped at. The page where it was used or
//! mapped last *shows* it: there its bytes count. A frame is idle while no block in use touches any of its views. A
//! recently freed block counts as in use until it is merged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;

use crate::block::SegmentId;
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

impl PageId {
    /// Returns whether another page of the segment lies straight behind this one.
    pub(crate) fn is_followed_by(&self, after: &PageId) -> bool {
        self.segment == after.segment && self.index + 1 == after.index
    }
}

/// Consecutive pages of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageRange {
    segment: SegmentId,
    first: u32,
    count: u32,
}

impl PageRange {
    /// Returns each page.
    #[inline]
    pub(crate) fn pages(self) -> impl Iterator<Item = PageId> {
        let indexes = self.first..self.first + self.count;
        indexes.map(move |index| PageId {
            segment: self.segment,
            index,
        })
    }
}

/// The record of a page. 16 bytes, because a request may touch hundreds.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Page {
    frame: Option<FrameId>,
    /// The number of blocks in use that touch the page, times [`USER`]; and [`OTHER_VIEWS`].
    use_and_views: u32,
    /// When the last of these blocks was freed, or when a frame was mapped or shown here.
    freed: u64,
}

/// Whether the frame of a page has views at other pages. If it has none, a request need not look at the frame.
const OTHER_VIEWS: u32 = 1;

/// The amount that one block in use adds to [`Page::use_and_views`]. No page has 2^31 blocks.
const USER: u32 = 2;

impl Page {
    /// Returns when the last block that touched the page was freed, or when its frame was mapped or shown there. Work
    /// queued before then may use its address.
    #[inline]
    pub(crate) fn freed(self) -> u64 {
        self.freed
    }

    #[inline]
    fn users(self) -> u32 {
        self.use_and_views / USER
    }

    #[inline]
    fn has_other_views(self) -> bool {
        self.use_and_views & OTHER_VIEWS != 0
    }
}

/// How a page can serve a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageState {
    /// A block in use touches it.
    InUse,
    /// Its frame is idle and mapped nowhere else.
    Alone(FrameId),
    /// Its frame is idle and mapped elsewhere, too.
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
    /// The page that shows it. The frame is in use if this page is.
    shown_at: PageId,
    /// The latest window that claimed the frame ([`Pages::claim`]).
    window: u64,
}

/// Pages that became idle at the same time.
#[derive(Clone, Copy, Debug)]
struct IdleRange {
    range: PageRange,
    time: u64,
}

impl IdleRange {
    /// Returns the rest of the range, from page `first` on.
    fn from(self, first: u32) -> IdleRange {
        let before = first - self.range.first;
        let range = PageRange {
            first,
            count: self.range.count - before,
            ..self.range
        };
        IdleRange { range, ..self }
    }
}

/// The smallest value of `ranges_max`.
const RANGES_MIN: usize = 1024;

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
    /// A page has two to the power of this many bytes.
    page_shift: u32,
    /// The pages with idle frames that may be stolen, the longest idle first. A page counts if it has been idle since
    /// the range's time.
    idle: VecDeque<IdleRange>,
    /// The number of ranges at which those without an idle page are dropped.
    ranges_max: usize,
    /// The number of times that frames became idle, were mapped or were shown elsewhere: a clock.
    now: u64,
    /// The number of windows examined. A sliding window counts once for each page.
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
        debug_assert!(page_size.get().is_power_of_two());
        debug_assert!(self.page_shift == 0 || self.page_size() == page_size);
        self.page_shift = page_size.get().trailing_zeros();
        let index = id.index();
        if index >= self.segments.len() {
            self.segments.resize_with(index + 1, || None);
        }
        debug_assert!(self.segments[index].is_none(), "a segment is added once");
        self.segments[index] = Some(SegmentPages {
            start,
            // Pages are added as they are used: addresses are reserved for more than the device's memory.
            pages: Vec::new(),
            shares,
            shown: 0,
        });
    }

    /// Removes a segment. Nothing may be mapped in it.
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

    /// Returns the size of a page. Before the first segment, that is one byte.
    #[inline]
    pub(crate) fn page_size(&self) -> Bytes {
        Bytes(1 << self.page_shift)
    }

    /// Returns the bytes of that many pages.
    pub(crate) fn bytes(&self, pages: usize) -> Bytes {
        Bytes((pages as u64) << self.page_shift)
    }

    /// Returns the number of frames. Frame 0 is never used.
    pub(crate) fn frame_count(&self) -> usize {
        self.frames.len().saturating_sub(1 + self.vacant.len())
    }

    /// Returns the time: the number of times that frames became idle, were mapped or were shown elsewhere.
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
    ) -> PageRange {
        let start = self.segment(segment).start;
        let shift = self.page_shift;
        let first = address.offset_from(start).get() >> shift;
        let last = (address.offset_from(start).get() + size.get() - 1) >> shift;
        let number = |pages| u32::try_from(pages).expect("a segment has fewer than 2^32 pages");
        PageRange {
            segment,
            first: number(first),
            count: number(last - first + 1),
        }
    }

    /// Returns how many pages of a range no block in use touches. `None` if one of those has no frame, or a frame with
    /// other views.
    #[inline]
    pub(crate) fn idle_with_one_view(&self, range: PageRange) -> Option<u64> {
        let first = range.first as usize;
        let pages = &self.segment(range.segment).pages;
        let pages = pages.get(first..first + range.count as usize)?;
        pages.iter().try_fold(0, |idle, page| match page.users() {
            0 if page.has_other_views() || page.frame.is_none() => None,
            0 => Some(idle + 1),
            _ => Some(idle),
        })
    }

    /// Returns the address of a page.
    pub(crate) fn address(&self, page: PageId) -> DeviceAddress {
        self.segment(page.segment).start + self.bytes(page.index as usize)
    }

    /// Returns how a page can serve a block.
    #[inline]
    pub(crate) fn state(&self, at: PageId) -> PageState {
        self.state_of(self.page(at))
    }

    /// Returns the same as [`Pages::state`], for a page that was looked up.
    #[inline]
    pub(crate) fn state_of(&self, page: Page) -> PageState {
        match page.frame {
            _ if page.users() > 0 => PageState::InUse,
            None => PageState::Unmapped,
            Some(id) if !page.has_other_views() => PageState::Alone(id),
            Some(id) if self.is_idle(id) => PageState::Ready(id),
            Some(_) => PageState::Blocked,
        }
    }

    /// Returns when an idle frame was last freed, mapped or shown elsewhere. Work queued before then, in the stream of
    /// the page that shows it, may use it.
    pub(crate) fn idle_since(&self, id: FrameId) -> u64 {
        self.page(self.shown_at(id)).freed
    }

    /// Begins another window, for which no frame is claimed yet. Returns its number.
    pub(crate) fn begin_window(&mut self) -> u64 {
        self.windows += 1;
        self.windows
    }

    /// Claims an idle frame for the window. Returns `false` if it was claimed since the window `first`: two pages share
    /// it.
    pub(crate) fn claim(&mut self, id: FrameId, first: u64) -> bool {
        debug_assert!(self.is_idle(id));
        let window = self.windows;
        std::mem::replace(&mut self.frame_mut(id).window, window) < first
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

    /// Returns whether a frame is mapped at a page, and counts there.
    #[inline]
    pub(crate) fn shows(&self, at: PageId) -> bool {
        let frame = self.frame_at(at);
        frame.is_some_and(|id| self.shown_at(id) == at)
    }

    /// Drops the pages before the first idle one from the queue. Constant amortized time for each page.
    pub(crate) fn drop_stale_front(&mut self) {
        while let Some(&idle) = self.idle.front() {
            let first = self.still_idle(idle).next().map(|(_, at)| at.index);
            self.idle.pop_front();
            if let Some(first) = first {
                self.idle.push_front(idle.from(first));
                break;
            }
        }
    }

    /// Returns the idle frames that may be stolen, the longest idle first.
    pub(crate) fn idle(&self) -> impl Iterator<Item = FrameId> {
        let ranges = self.idle.iter();
        ranges.flat_map(|&idle| self.still_idle(idle).map(|(id, _)| id))
    }

    /// Returns the idle frames that a segment shows, sorted by address. Linear in its pages.
    pub(crate) fn idle_in(&self, segment: SegmentId) -> Vec<FrameId> {
        let frames = self.shown_in(segment).map(|(_, id)| id);
        frames.filter(|&id| self.is_idle(id)).collect()
    }

    /// Returns the frames that a segment shows, with their addresses, sorted by address. Linear in its pages.
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

    /// Counts a block in use on each page of a range. Their frames must be idle, or in use there. Returns whether a
    /// frame with other views came into use: [`Pages::show_in_use`] must then follow for each page.
    #[inline]
    pub(crate) fn occupy(&mut self, range: PageRange) -> bool {
        let (mut came_into_use, mut has_memory) = (false, true);
        for page in self.range_mut(range) {
            has_memory &= page.frame.is_some();
            page.use_and_views += USER;
            came_into_use |= page.use_and_views == USER + OTHER_VIEWS;
        }
        assert!(has_memory, "a block in use has memory");
        came_into_use
    }

    /// Shows the frame of a page that one block touches. Returns the page that showed it before, if it was another.
    pub(crate) fn show_in_use(&mut self, at: PageId) -> Option<PageId> {
        let page = self.page(at);
        let id = page.frame.filter(|_| page.users() == 1)?;
        let before = self.shown_at(id);
        if before == at {
            return None;
        }
        debug_assert!(self.is_idle(id), "the frame is in use at another page");
        self.show(id, at);
        Some(before)
    }

    /// Removes a block in use from the count of each page of a range. Returns whether a frame became idle.
    #[inline]
    pub(crate) fn vacate(&mut self, range: PageRange) -> bool {
        let now = self.now + 1;
        let mut became_idle = false;
        for page in self.range_mut(range) {
            debug_assert!(page.users() > 0 && page.frame.is_some());
            page.use_and_views -= USER;
            if page.users() == 0 {
                page.freed = now;
                became_idle = true;
            }
        }
        if became_idle {
            self.list(range);
            debug_assert_eq!(
                self.now, now,
                "pages are listed as idle since they were freed"
            );
        }
        became_idle
    }

    /// Adds a new frame, which is idle, at a page where no frame is mapped.
    pub(crate) fn add_frame(&mut self, handle: Handle, at: PageId) -> FrameId {
        let id = self.insert(Frame {
            handle,
            views: Vec::new(),
            shown_at: at,
            window: 0,
        });
        self.place(id, at);
        self.segment_mut(at.segment).shown += 1;
        self.come(at);
        id
    }

    /// Adds a view of an idle frame at a page where no frame is mapped, and shows it there.
    pub(crate) fn add_view(&mut self, id: FrameId, at: PageId) {
        debug_assert!(self.is_idle(id));
        debug_assert!(
            [at, self.shown_at(id)].map(|at| self.segment(at.segment).shares) == [true; 2],
            "private pools share no frames"
        );
        self.place(id, at);
        self.show(id, at);
        self.come(at);
    }

    /// Removes the view at a page that does not show its frame.
    pub(crate) fn remove_view(&mut self, at: PageId) {
        let id = self.page(at).frame.expect("a frame is mapped there");
        debug_assert_ne!(self.shown_at(id), at, "the view is not the one that counts");
        debug_assert_eq!(self.page(at).users(), 0);
        let page = self.page_mut(at);
        (page.frame, page.use_and_views) = (None, 0);
        self.frame_mut(id).views.retain(|&view| view != at);
        self.note_views(id);
    }

    /// Shows an idle frame at another page that it is mapped at. Returns the page that showed it before, if it was
    /// another.
    pub(crate) fn show_idle(&mut self, id: FrameId, at: PageId) -> Option<PageId> {
        let before = self.frame(id).shown_at;
        if before == at {
            return None;
        }
        self.show(id, at);
        self.come(at);
        Some(before)
    }

    /// Removes an idle frame with one view. Returns its handle.
    pub(crate) fn remove_frame(&mut self, id: FrameId) -> Handle {
        debug_assert!(self.is_idle(id));
        let frame = self.frames[id.index()].take().expect("the frame exists");
        debug_assert_eq!(frame.views, [frame.shown_at]);
        let page = self.page_mut(frame.shown_at);
        debug_assert!(!page.has_other_views(), "the page's frame has one view");
        page.frame = None;
        self.segment_mut(frame.shown_at.segment).shown -= 1;
        self.vacant.push(id);
        frame.handle
    }

    /// Returns whether no block in use touches any view of a frame.
    #[inline]
    fn is_idle(&self, id: FrameId) -> bool {
        self.page(self.shown_at(id)).users() == 0
    }

    /// Records that an idle frame was mapped or shown at a page. Work there runs after the work that used the frame.
    fn come(&mut self, at: PageId) {
        self.page_mut(at).freed = self.now + 1;
        self.list(PageRange {
            segment: at.segment,
            first: at.index,
            count: 1,
        });
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
        debug_assert!(page.frame.is_none() && page.users() == 0);
        page.frame = Some(id);
        self.frame_mut(id).views.push(at);
        self.note_views(id);
    }

    /// Records at each view of a frame whether it has other views.
    fn note_views(&mut self, id: FrameId) {
        let views = std::mem::take(&mut self.frame_mut(id).views);
        for &at in &views {
            let others = u32::from(views.len() > 1) * OTHER_VIEWS;
            let page = self.page_mut(at);
            page.use_and_views = page.use_and_views & !OTHER_VIEWS | others;
        }
        self.frame_mut(id).views = views;
    }

    fn show(&mut self, id: FrameId, at: PageId) {
        let before = std::mem::replace(&mut self.frame_mut(id).shown_at, at);
        debug_assert_eq!(self.page(at).frame, Some(id));
        self.segment_mut(before.segment).shown -= 1;
        self.segment_mut(at.segment).shown += 1;
    }

    /// Advances the time. Lists the pages that became idle, if their segment shares frames.
    #[inline]
    fn list(&mut self, range: PageRange) {
        self.now += 1;
        if !self.segment(range.segment).shares {
            return;
        }
        let time = self.now;
        // A block that is freed again and again leaves one entry.
        match self.idle.back_mut() {
            Some(last) if last.range == range => last.time = time,
            _ => self.push_idle(IdleRange { range, time }),
        }
    }

    fn push_idle(&mut self, idle: IdleRange) {
        if self.idle.len() >= self.ranges_max {
            self.drop_stale_ranges();
        }
        self.idle.push_back(idle);
    }

    /// Drops the ranges without an idle page. Linear in the pages of all ranges, but rare: at least three times as many
    /// ranges as it keeps are added before the next call.
    #[cold]
    fn drop_stale_ranges(&mut self) {
        let mut ranges = std::mem::take(&mut self.idle);
        ranges.retain(|&idle| self.still_idle(idle).next().is_some());
        self.ranges_max = RANGES_MIN.max(ranges.len() * 4);
        self.idle = ranges;
    }

    /// Returns the frames of a range that have been idle since its time, with their pages; none if its segment is gone.
    fn still_idle(&self, idle: IdleRange) -> impl Iterator<Item = (FrameId, PageId)> {
        let IdleRange { range, time } = idle;
        let exists = self.segments[range.segment.index()].is_some();
        let pages = range.pages().filter(move |_| exists);
        pages.filter_map(move |at| {
            let page = self.page(at);
            let id = page
                .frame
                .filter(|_| page.users() == 0 && page.freed == time)?;
            (self.shown_at(id) == at).then_some((id, at))
        })
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
    pub(crate) fn page(&self, at: PageId) -> Page {
        let pages = &self.segment(at.segment).pages;
        pages.get(at.index as usize).copied().unwrap_or_default()
    }

    /// Returns pages that all have frames.
    #[inline]
    fn range_mut(&mut self, range: PageRange) -> &mut [Page] {
        let first = range.first as usize;
        &mut self.segment_mut(range.segment).pages[first..first + range.count as usize]
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

/// Checks of what is stored in more than one place.
impl Pages {
    /// Checks that pages, frames and idle ranges agree with each other, with the blocks and with what is mapped.
    ///
    /// `users` has the number of blocks in use for each page with any. `mapped` returns the handle that is mapped at an
    /// address. O(n log n) for n pages.
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
            if page.users() != users.get(&at).copied().unwrap_or(0) {
                return Err(format!(
                    "the page at {address} counts {} blocks",
                    page.users()
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
        let has_others = |&at: &PageId| self.page(at).has_other_views() == (views.len() > 1);
        let mut hidden = views.iter().filter(|&&at| at != frame.shown_at);
        if known != *views
            || frame.views.len() != views.len()
            || !views.contains(&frame.shown_at)
            || !views.iter().all(has_others)
        {
            return Err(format!("{frame:?} is mapped at {views:?}"));
        }
        match hidden.find(|&&at| self.page(at).users() > 0) {
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

    /// Checks that the ranges list each idle frame of a segment that shares, once.
    fn check_idle(&self, frames: impl Iterator<Item = FrameId>) -> Result<(), String> {
        let shares = |&id: &FrameId| self.segment(self.shown_at(id).segment).shares;
        let idle = frames.filter(|&id| self.is_idle(id)).filter(shares);
        let expected: Vec<FrameId> = idle.collect();
        let mut listed: Vec<FrameId> = self.idle().collect();
        listed.sort_unstable();
        if listed == expected {
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

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: SegmentId = SegmentId(0);
    const START: DeviceAddress = DeviceAddress(1 << 40);

    /// Returns pages with a frame at each of the first four of a segment.
    fn four_pages() -> Pages {
        let mut pages = Pages::default();
        pages.add_segment(SEGMENT, START, Bytes::mib(2), true);
        for index in 0..4 {
            let at = PageId {
                segment: SEGMENT,
                index,
            };
            pages.add_frame(Handle(u64::from(index) + 1), at);
        }
        pages
    }

    fn use_and_free(pages: &mut Pages, first: u64, count: u64) {
        let range = pages.touched(
            SEGMENT,
            START + Bytes::mib(2 * first),
            Bytes::mib(2 * count),
        );
        pages.occupy(range);
        pages.vacate(range);
    }

    fn idle(pages: &Pages) -> Vec<u32> {
        pages.idle().map(|id| pages.shown_at(id).index).collect()
    }

    #[test]
    fn the_queue_of_idle_ranges_stays_short() {
        let mut pages = four_pages();
        for step in 0..10 * RANGES_MIN as u64 {
            use_and_free(&mut pages, 1 + step % 3, 1);
            assert!(pages.idle.len() <= RANGES_MIN);
        }
        assert_eq!(idle(&pages).len(), 4);
        assert_eq!(idle(&pages)[0], 0, "the first page was idle longest");
    }

    #[test]
    fn the_front_of_the_queue_begins_with_an_idle_page() {
        let mut pages = four_pages();
        use_and_free(&mut pages, 0, 4);
        for first in [0, 1, 3] {
            use_and_free(&mut pages, first, 1);
        }
        pages.drop_stale_front();
        let front = pages
            .idle
            .front()
            .map(|idle| (idle.range.first, idle.range.count));
        assert_eq!(front, Some((2, 2)));
        assert_eq!(idle(&pages), [2, 0, 1, 3]);
    }
}
