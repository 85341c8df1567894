//! Memory behind a window: idle frames that the stream may use, then new ones. And memory back to the driver.

use std::collections::BTreeMap;

use super::moves::Moves;
use super::{Tide, Window};
use crate::block::{BlockId, BlockState, SegmentId};
use crate::domain::PoolIndex;
use crate::driver::{Driver, DriverError, Handle, MemoryInfo, unless_out_of_memory};
use crate::pages::{FrameId, PageId, PageState};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::{Bytes, Stream};

/// A stolen frame that has this many views loses the oldest one that no work uses: more find no more steps that repeat.
const VIEWS_MAX: usize = 4;

/// Where the pages of a window get their memory.
#[derive(Debug, Default)]
struct Supply {
    /// Idle frames that are mapped at pages of the window.
    ready: Vec<(FrameId, PageId)>,
    /// The pages that need another frame.
    missing: Vec<PageId>,
    /// Idle frames for those, which keep their other views.
    frames: Vec<FrameId>,
    /// Idle frames for those, which lose all their views. They become handles.
    moving: Vec<FrameId>,
    /// Handles for the rest, mapped nowhere.
    handles: Vec<Handle>,
}

impl Tide {
    /// Maps memory behind every page of a window that has none.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] if there is too little, also within the limit; any other error of the driver.
    /// Frames that were mapped before it stay where they are, idle.
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

    /// Adds idle frames and new handles to a supply, for all missing pages. Idle frames come first, unless too many requests
    /// moved some and there is memory for new ones.
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

    /// Returns whether a request that needs `wanted` frames may move some: always, where new ones would be too many.
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
        let MemoryInfo { free, total } = driver.memory_info()?;
        Ok(!Moves::may_fill(free.saturating_sub(new), total))
    }

    /// Adds idle frames from elsewhere to a supply, the longest idle first: those whose work the window's stream comes after.
    /// No stream waits for another. A private pool's frames have one view each: it gets those that no work uses.
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

    /// Unmaps the oldest view of each stolen frame that has many, if no work uses its address.
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

    /// Returns whether no work uses the address of a page that no block in use touches.
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

/// Adds new handles to a supply, for the pages for which it has no frames, within the limit.
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
    // Without this, a request that is too large would first take what other programs may need.
    let free = memory.physical_mut().driver_mut().memory_info()?.free;
    if heap.pages.bytes(count) > free {
        return Err(DriverError::OutOfMemory);
    }
    supply
        .handles
        .extend(heap.create_handles(memory, count, page)?);
    Ok(())
}

/// Shows the ready frames in the window, and maps the others behind its missing pages, run by run. What is mapped leaves
/// the supply.
fn map<M: Memory>(heap: &mut Heap, memory: &mut M, supply: &mut Supply) -> Result<(), DriverError> {
    for &(id, at) in &supply.ready {
        heap.show(id, at);
    }
    for run in supply.missing.chunk_by(is_followed_by) {
        let has_view = |at: &&PageId| heap.pages.frame_at(**at).is_some();
        let stale: Vec<PageId> = run.iter().filter(has_view).copied().collect();
        for views in stale.chunk_by(is_followed_by) {
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
    Ok(())
}

/// Returns whether a page of a segment lies straight behind another.
fn is_followed_by(before: &PageId, after: &PageId) -> bool {
    before.index + 1 == after.index
}

/// Memory back to the driver.
impl Tide {
    /// Releases the idle memory of a pool. For a request that fails otherwise, it only waits until all idle frames can
    /// be mapped anywhere: they serve it as they are, unless it needs memory of another source.
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
        // Frames stay in a capture, in which nothing may be waited for.
        let own = failing.map(|request| heap.domains.domain(request.domain).stream);
        if !self.is_capturing(heap, memory, own) {
            if segments.iter().any(|&id| heap.pages.contains(id)) {
                self.fences
                    .synchronize(memory.physical_mut().driver_mut())?;
            }
            let can_steal = |request: &Request| !heap.domains.has_source(request.domain);
            if pool == PoolIndex::DEFAULT && failing.is_some_and(can_steal) {
                return Ok(());
            }
            let paged = segments.iter().filter(|&&id| heap.pages.contains(id));
            let idle = paged.flat_map(|&id| heap.pages.idle_in(id));
            let idle: Vec<FrameId> = idle.collect();
            self.release_frames(heap, memory, &idle)?;
        }
        // Where a frame is mapped, the addresses stay.
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

    /// Releases frames that have been idle since a time and that no work uses, up to `most` bytes, the longest idle first.
    /// Waits for nothing.
    pub(super) fn release_unused<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        (since, most): (u64, Bytes),
    ) -> Result<(), DriverError> {
        let page_size = heap.pages.page_size();
        if most < page_size || heap.captures > 0 {
            return Ok(());
        }
        self.merge_all_recent(heap);
        self.fences.update(memory.physical_mut().driver_mut(), None);
        let old = { heap.pages.idle() }.take_while(|&id| heap.pages.idle_since(id) <= since);
        let old = old.filter(|&id| self.is_unused_frame(heap, id));
        let count = most.get() / page_size.get();
        let old: Vec<FrameId> = old
            .take(usize::try_from(count).unwrap_or(usize::MAX))
            .collect();
        self.release_frames(heap, memory, &old)
    }

    /// Returns whether a stream is captured, also into a graph that lowtide was not told of.
    fn is_capturing<M: Memory>(
        &mut self,
        heap: &Heap,
        memory: &mut M,
        own: Option<Stream>,
    ) -> bool {
        let own = own.map(|stream| self.fences.of_stream(stream));
        heap.captures > 0 || (self.fences).is_captured(memory.physical_mut().driver_mut(), own)
    }

    /// Releases idle frames, whose addresses no work uses.
    fn release_frames<M: Memory>(
        &self,
        heap: &mut Heap,
        memory: &mut M,
        frames: &[FrameId],
    ) -> Result<(), DriverError> {
        for &id in frames {
            let at = heap.pages.shown_at(id);
            let handle = heap.unmap_frame(memory, id)?;
            heap.release_handles(memory, vec![handle], at);
        }
        Ok(())
    }

    /// Releases a segment with its blocks, in which no frame is mapped, if none of its bytes is in use.
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
