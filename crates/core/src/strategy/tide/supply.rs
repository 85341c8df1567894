//! Maps memory behind a window: idle frames first, then new ones. Releases memory to the driver.

use std::collections::BTreeMap;

use super::{Tide, Window, can_steal};
use crate::block::{BlockId, BlockState, SegmentId};
use crate::domain::PoolIndex;
use crate::driver::{Driver, DriverError, Handle, MemoryInfo, unless_out_of_memory};
use crate::pages::{FrameId, PageId, PageState};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::{Bytes, Stream};

/// The most views of a stolen frame, unless work uses them all. More views did not help jobs repeat.
const VIEWS_MAX: usize = 4;

/// The memory for the pages of a window.
#[derive(Debug, Default)]
struct Supply {
    /// Idle frames that are mapped at pages of the window.
    ready: Vec<(FrameId, PageId)>,
    /// The pages that need another frame.
    missing: Vec<PageId>,
    /// Idle frames for missing pages. They keep their other views.
    frames: Vec<FrameId>,
    /// Idle frames for missing pages that lose all their views. They become handles.
    moving: Vec<FrameId>,
    /// Handles for the other missing pages, mapped nowhere.
    handles: Vec<Handle>,
}

impl Tide {
    /// Maps memory behind every page of a window that has none.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] if the device or the limit has too little; any other error of the driver. Frames
    /// that were mapped before the error stay mapped, idle.
    pub(super) fn fill<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        window: &Window,
    ) -> Result<(), DriverError> {
        let mut supply = claim(heap, window);
        let result = self.supply(heap, memory, window, &mut supply);
        if let Some(&page) = supply.missing.first() {
            heap.release_handles(memory, supply.handles, page);
        }
        self.fences
            .freed(self.fence(window.segment), heap.pages.now());
        debug_assert!(
            result.is_err() || is_filled(heap, window),
            "each page of a window that was filled shows a frame"
        );
        result
    }

    /// Maps idle frames and new handles at all missing pages.
    fn supply<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        window: &Window,
        supply: &mut Supply,
    ) -> Result<(), DriverError> {
        self.obtain(heap, memory, window, supply)?;
        debug_assert_eq!(
            supply.frames.len() + supply.moving.len() + supply.handles.len(),
            supply.missing.len(),
            "each missing page gets one frame or handle"
        );
        debug_assert!(
            { supply.missing.iter() }
                .all(|&at| heap.pages.frame_at(at).is_none() || self.is_unused(heap, at)),
            "no view goes before the work that used its address"
        );
        let moves = !supply.frames.is_empty() || !supply.moving.is_empty();
        self.retire_views(heap, memory, supply)?;
        for id in supply.moving.drain(..) {
            supply.handles.push(heap.unmap_frame(memory, id)?);
        }
        map(heap, memory, supply)?;
        if moves {
            self.moves.add();
        }
        Ok(())
    }

    /// Adds idle frames and new handles to a supply, for all missing pages. Idle frames come first, unless too many
    /// requests moved frames and there is memory for new ones.
    fn obtain<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        window: &Window,
        supply: &mut Supply,
    ) -> Result<(), DriverError> {
        if !self.may_move(heap, memory, supply.missing.len())?
            && unless_out_of_memory(create(heap, memory, supply))?.is_some()
        {
            return Ok(());
        }
        self.steal(heap, window, supply);
        create(heap, memory, supply)
    }

    /// Returns whether a request for `wanted` frames may move some. It must if new ones would exceed a bound.
    fn may_move<M: Memory>(
        &mut self,
        heap: &Heap,
        memory: &mut M,
        wanted: usize,
    ) -> Result<bool, DriverError> {
        let mut physical = memory.physical_mut();
        let driver = physical.driver_mut();
        let new = heap.pages.bytes(wanted);
        let held = heap.stats.reserved().saturating_add(new);
        let is_allowed = self.moves.allow(driver.now(), heap.pages.frame_count());
        let may_hold = self.moves.may_hold(held, heap.stats.active());
        if is_allowed || !may_hold || wanted == 0 {
            return Ok(true);
        }
        let info = driver.memory_info()?;
        let after = MemoryInfo {
            free: info.free.saturating_sub(new),
            ..info
        };
        Ok(!after.missing_free().is_zero())
    }

    /// Adds idle frames from elsewhere to a supply, the longest idle first. The window's stream comes after the work
    /// that used them, so no stream waits. A private pool's frames have one view: it gets only frames that no work
    /// uses.
    fn steal(&self, heap: &mut Heap, window: &Window, supply: &mut Supply) {
        let wanted = supply.missing.len();
        if wanted == 0 {
            return;
        }
        heap.pages.drop_stale_front();
        if heap.domain_of(window.segment).pool != PoolIndex::DEFAULT {
            let unused = { heap.pages.idle() }.filter(|&id| self.is_unused_frame(heap, id));
            supply.moving = unused.take(wanted).collect();
            return;
        }
        let own = self.fence(window.segment);
        let unclaimed = heap.pages.idle().filter(|&id| !heap.pages.is_claimed(id));
        let ordered = unclaimed.filter(|&id| self.is_ordered(heap, own, id));
        supply.frames = ordered.take(wanted).collect();
    }

    /// Unmaps the oldest view that no work uses of each stolen frame with many views.
    fn retire_views<M: Memory>(
        &self,
        heap: &mut Heap,
        memory: &mut M,
        supply: &Supply,
    ) -> Result<(), DriverError> {
        for &id in &supply.frames {
            let views = heap.pages.views(id);
            let is_stale = |&at: &PageId| at != heap.pages.shown_at(id) && self.is_unused(heap, at);
            let stale = views.iter().copied().find(is_stale);
            if let Some(oldest) = stale.filter(|_| views.len() >= VIEWS_MAX) {
                heap.unmap_views(memory, &[oldest])?;
            }
        }
        Ok(())
    }

    /// Returns whether no work uses any address of an idle frame.
    fn is_unused_frame(&self, heap: &Heap, id: FrameId) -> bool {
        let views = heap.pages.views(id);
        views.iter().all(|&at| self.is_unused(heap, at))
    }

    /// Returns whether no work uses the address of a page. No block in use may touch the page.
    pub(super) fn is_unused(&self, heap: &Heap, at: PageId) -> bool {
        self.fences
            .has_passed(self.fence(at.segment), heap.pages.page(at).freed())
    }
}

/// Claims the idle frames that are mapped at a window's pages.
fn claim(heap: &mut Heap, window: &Window) -> Supply {
    let mut supply = Supply::default();
    let window_number = heap.pages.begin_window();
    let range = (heap.pages).touched(window.segment, window.address, window.size);
    for at in range.pages() {
        match heap.pages.state(at) {
            PageState::InUse => {}
            PageState::Alone(id) | PageState::Ready(id) if heap.pages.claim(id, window_number) => {
                supply.ready.push((id, at));
            }
            _ => supply.missing.push(at),
        }
    }
    supply
}

/// Returns whether each page of a window shows a frame.
fn is_filled(heap: &Heap, window: &Window) -> bool {
    let range = (heap.pages).touched(window.segment, window.address, window.size);
    range.pages().all(|at| heap.pages.shows(at))
}

/// Adds new handles to a supply for the missing pages without frames, within the limit.
fn create<M: Memory>(
    heap: &mut Heap,
    memory: &mut M,
    supply: &mut Supply,
) -> Result<(), DriverError> {
    let count = supply.missing.len() - supply.frames.len() - supply.moving.len();
    let Some(&page) = supply.missing.first().filter(|_| count > 0) else {
        return Ok(());
    };
    if heap.exceeds_limit(heap.pages.bytes(count)) {
        return Err(DriverError::OutOfMemory);
    }
    // Otherwise a request that is too large would first take memory that other programs may need.
    let free = memory.physical_mut().driver_mut().memory_info()?.free;
    if heap.pages.bytes(count) > free {
        return Err(DriverError::OutOfMemory);
    }
    supply
        .handles
        .extend(heap.create_handles(memory, count, page)?);
    Ok(())
}

/// Shows the ready frames in the window. Maps the others at its missing pages, run by run, and removes them from the
/// supply.
fn map<M: Memory>(heap: &mut Heap, memory: &mut M, supply: &mut Supply) -> Result<(), DriverError> {
    for &(id, at) in &supply.ready {
        heap.show(id, at);
    }
    for run in supply.missing.chunk_by(PageId::is_followed_by) {
        let has_view = |at: &&PageId| heap.pages.frame_at(**at).is_some();
        let stale: Vec<PageId> = run.iter().filter(has_view).copied().collect();
        for views in stale.chunk_by(PageId::is_followed_by) {
            heap.unmap_views(memory, views)?;
        }
        let frames = run.len().min(supply.frames.len());
        let handles = run.len() - frames;
        heap.map_frames(
            memory,
            run[0],
            &supply.frames[..frames],
            &supply.handles[..handles],
        )?;
        supply.frames.drain(..frames);
        supply.handles.drain(..handles);
    }
    debug_assert!(
        supply.frames.is_empty() && supply.handles.is_empty(),
        "each frame and handle found a page"
    );
    Ok(())
}

/// Releases memory to the driver.
impl Tide {
    /// Releases the idle memory of a pool. If `failing` would fail otherwise, the default pool only waits until all its
    /// idle frames can be mapped anywhere. The request then steals them. If it cannot, they are released.
    pub(super) fn release_pool<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        pool: PoolIndex,
        failing: Option<&Request>,
    ) -> Result<(), DriverError> {
        self.merge_all_recent(heap);
        let segments = heap.segments.iter().map(|(id, _)| id);
        let segments: Vec<SegmentId> = segments
            .filter(|&id| heap.domain_of(id).pool == pool)
            .collect();
        // During a capture frames stay, because nothing may wait for work.
        let own = failing.map(|request| heap.domains.domain(request.domain).stream);
        if !self.is_capturing(heap, memory, own) {
            if segments.iter().any(|&id| heap.pages.contains(id)) {
                self.fences
                    .synchronize(memory.physical_mut().driver_mut())?;
            }
            let steals = failing.is_some_and(|request| can_steal(heap, memory, request));
            if pool == PoolIndex::DEFAULT && steals {
                return Ok(());
            }
            let paged = segments.iter().filter(|&&id| heap.pages.contains(id));
            let idle = paged.flat_map(|&id| heap.pages.idle_in(id));
            let idle: Vec<FrameId> = idle.collect();
            self.release_frames(heap, memory, &idle)?;
        }
        // Segments with views keep their addresses.
        let may_go = |&&id: &&SegmentId| !heap.pages.contains(id) || !heap.pages.has_views(id);
        let unmapped = segments.iter().filter(may_go);
        let mut blocks: BTreeMap<SegmentId, Vec<BlockId>> =
            unmapped.map(|&id| (id, Vec::new())).collect();
        for (id, _) in heap.blocks.iter() {
            if let Some(of_segment) = blocks.get_mut(&heap.blocks.segment(id)) {
                of_segment.push(id);
            }
        }
        for (segment, blocks) in blocks {
            self.release_segment(heap, memory, segment, &blocks)?;
        }
        Ok(())
    }

    /// Like [`Tide::make_room`], after a wait for all work of the device. Does not wait if no frame is idle, or if a stream
    /// is captured: also `own`, which must exist.
    pub(super) fn make_room_after_wait<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        size: Bytes,
        own: Option<Stream>,
    ) -> Result<bool, DriverError> {
        self.merge_all_recent(heap);
        let any_idle = heap.pages.idle().next().is_some();
        if any_idle && !self.is_capturing(heap, memory, own) {
            self.fences
                .synchronize(memory.physical_mut().driver_mut())?;
        }
        self.make_room(heap, memory, size)
    }

    /// Releases frames that no work uses and that are missing for `size` new bytes. Returns whether some were missing, and
    /// there were so many. A source may need more than that. Never waits.
    pub(super) fn make_room<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        size: Bytes,
    ) -> Result<bool, DriverError> {
        let free = memory.physical_mut().driver_mut().memory_info()?.free;
        let missing = size.saturating_sub(free).max(heap.over_limit(size));
        let whole = missing.round_up(heap.pages.page_size());
        let released = self.release_unused(heap, memory, (u64::MAX, whole))?;
        Ok(!missing.is_zero() && released == whole)
    }

    /// Releases frames that no work uses and that have been idle since a time: up to `most` bytes, the longest idle
    /// first. Returns how many bytes. Never waits.
    pub(super) fn release_unused<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        (since, most): (u64, Bytes),
    ) -> Result<Bytes, DriverError> {
        let page_size = heap.pages.page_size();
        if most < page_size || heap.captures > 0 {
            return Ok(Bytes::ZERO);
        }
        self.merge_all_recent(heap);
        self.fences.update(memory.physical_mut().driver_mut(), None);
        let old = { heap.pages.idle() }.take_while(|&id| heap.pages.idle_since(id) <= since);
        let old = old.filter(|&id| self.is_unused_frame(heap, id));
        let count = most.get() / page_size.get();
        let old: Vec<FrameId> = old
            .take(usize::try_from(count).unwrap_or(usize::MAX))
            .collect();
        self.release_frames(heap, memory, &old)?;
        Ok(heap.pages.bytes(old.len()))
    }

    /// Returns whether a stream is captured, even into a graph that lowtide was not notified of.
    fn is_capturing<M: Memory>(
        &mut self,
        heap: &Heap,
        memory: &mut M,
        own: Option<Stream>,
    ) -> bool {
        let own = own.map(|stream| self.fences.of_stream(stream));
        heap.captures > 0 || (self.fences).is_captured(memory.physical_mut().driver_mut(), own)
    }

    /// Releases idle frames. No work may use their addresses.
    fn release_frames<M: Memory>(
        &self,
        heap: &mut Heap,
        memory: &mut M,
        frames: &[FrameId],
    ) -> Result<(), DriverError> {
        for &id in frames {
            debug_assert!(
                self.is_unused_frame(heap, id),
                "no frame goes before the work that used it"
            );
            let at = heap.pages.shown_at(id);
            let handle = heap.unmap_frame(memory, id)?;
            heap.release_handles(memory, vec![handle], at);
        }
        Ok(())
    }

    /// Releases a segment without views and its blocks, unless one of them is active.
    fn release_segment<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        segment: SegmentId,
        blocks: &[BlockId],
    ) -> Result<(), DriverError> {
        let is_used = blocks.iter().any(|&id| heap.blocks.get(id).is_active());
        if is_used {
            return Ok(());
        }
        let sizes = blocks.iter().map(|&id| heap.blocks.get(id).size);
        debug_assert_eq!(
            sizes.sum::<Bytes>(),
            heap.segments.get(segment).size,
            "a segment goes with all its blocks"
        );
        if heap.pages.contains(segment) {
            heap.unreserve_pages(memory, segment)?;
            self.fence_of[segment.index()] = None;
        } else {
            heap.free_segment(memory, segment)?;
        }
        for &id in blocks {
            let block = heap.blocks.get(id);
            let room = self.room(block.domain, block.kind);
            match block.state {
                BlockState::Free => room.remove(heap, id),
                _ if room.unused == Some(id) => room.unused = None,
                _ => {}
            }
            heap.blocks.remove(id);
        }
        Ok(())
    }
}
