//! `tide`: reserves little more than the job's allocated memory, in whole pages.
//!
//! 1. Addresses first: best fit with coalescing, in address ranges of each stream. Frames (handles of one page, see
//!    [`Pages`](crate::pages::Pages)) follow the blocks. Their cost decides only between the ends of the tightest free
//!    blocks. For a large request that would need the driver, it decides between all pages of free blocks.
//! 2. Steal before create: an idle frame, wherever it is mapped, is used before a new one is created, unless too many
//!    requests moved frames. A stream steals only frames that it used last, or that no work uses: no stream waits for
//!    another.
//! 3. Views stay: a stolen frame stays mapped where it was. A job that repeats finds its views again and needs no
//!    driver calls.
//!
//! A freed block of up to 1 MiB serves the next request of its size before it is merged ([`RecentBlocks`]). Until then
//! its pages count as in use. Blocks are merged by a request that finds nothing else, by a larger request of their
//! domain, and by a free that leaves the domain with the least active memory ([`Lows`]). So a job that repeats soon gets
//! the same addresses in each step, unless frames move in each.
//!
//! A stale view is unmapped when its page needs another frame and no work uses its address. Nothing waits for that:
//! until then, requests use other addresses.

mod fences;
mod lows;
mod moves;
mod supply;
mod windows;

use std::collections::BTreeSet;

use fences::{FenceId, Fences};
use lows::Lows;
use moves::Moves;

use super::free_blocks::{FreeBlock, FreeBlocks};
use super::recent_blocks::RecentBlocks;
use super::{CheckpointBlock, Configured, Placement, Release, Request, Strategy};
use crate::block::{Block, BlockId, BlockState, SegmentId};
use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::Reader;
use crate::domain::DomainId;
use crate::driver::{Driver, DriverError, unless_out_of_memory};
use crate::pages::{PageId, PageState};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress};

/// Requests up to this have address ranges of their own, so that a small block does not keep a page of large ones. Over
/// five recorded jobs, 64 KiB takes 0.2 % more memory than this, and 1 MiB 0.15 %.
const SMALL_MAX: Bytes = Bytes::kib(256);

/// The size of a frame. Larger ones strand more memory: 8 MiB costs 2 % of a job's memory.
const PAGE: Bytes = Bytes::mib(2);

/// Requests are rounded up to a multiple of this, as in PyTorch.
const UNIT: Bytes = Bytes(512);

/// Freed blocks up to this size are not merged at once. Each step of a job that uses much memory makes a larger
/// request. Merging at once, eleven recorded jobs reserve the same, and random requests up to 6 % less, or more.
const RECENT_MAX: Bytes = Bytes::mib(1);

/// The addresses of a segment, in multiples of the device's memory.
const ADDRESSES: u64 = 4;

/// The options of `tide`: none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TideConfig;

impl Options for TideConfig {
    fn read(reader: &mut Reader<'_>) -> Result<TideConfig, ConfigError> {
        reader.pairs("tide", &[], |_, _| Ok(false))?;
        Ok(TideConfig)
    }

    fn pairs(&self) -> Vec<String> {
        Vec::new()
    }

    /// No: a stream gets the idle frames of others, once no work uses them.
    fn keeps_streams_apart(&self) -> bool {
        false
    }

    fn large_page(&self) -> Bytes {
        PAGE
    }
}

/// The strategy.
#[derive(Debug, Default)]
pub(crate) struct Tide {
    /// By domain, the addresses for small and for large requests.
    rooms: Vec<[Room; 2]>,
    /// By size, in [`UNIT`]s.
    recent: RecentBlocks,
    fences: Fences,
    /// The stream of each segment with pages.
    fence_of: Vec<Option<FenceId>>,
    moves: Moves,
    /// By domain.
    lows: Vec<Lows>,
}

/// The addresses for one kind of a domain's requests.
#[derive(Debug, Default)]
struct Room {
    /// Every free block, with or without memory.
    free: FreeBlocks,
    /// The addresses of the newest segment that were never used, behind its last block.
    unused: Option<BlockId>,
}

impl Room {
    #[inline(always)]
    fn insert(&mut self, heap: &Heap, id: BlockId) {
        self.free.insert(FreeBlock::of(id, &heap.blocks.get(id)));
    }

    #[inline(always)]
    fn remove(&mut self, heap: &Heap, id: BlockId) {
        self.free.remove(FreeBlock::of(id, &heap.blocks.get(id)));
    }

    /// Uses the first `size` bytes of a free block that is not listed. Lists the rest.
    #[inline(always)]
    fn use_start(&mut self, heap: &mut Heap, free: FreeBlock, size: Bytes) {
        debug_assert_eq!(
            free,
            FreeBlock::of(free.id, &heap.blocks.get(free.id)),
            "a block was listed as it is"
        );
        if size < free.size {
            let rest = heap.blocks.split(free.id, size);
            self.insert(heap, rest);
        }
        let segment = heap.blocks.segment(free.id);
        heap.occupy(segment, DeviceAddress(free.rank), size);
    }
}

/// A part of a free block that may serve a request.
#[derive(Clone, Copy, Debug)]
struct Window {
    block: BlockId,
    address: DeviceAddress,
    size: Bytes,
    segment: SegmentId,
}

/// The cost of a window.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct Cost {
    pages: u64,
    /// Whether the driver must be called.
    calls_driver: bool,
}

fn kind_of(size: Bytes) -> SizeKind {
    if size <= SMALL_MAX {
        SizeKind::Small
    } else {
        SizeKind::Large
    }
}

/// Returns whether a request can be served by frames from other addresses. Otherwise its memory is in whole segments: on
/// a device that cannot map memory, and in a pool with a source of its own or whose segments are not split.
fn can_steal<M: Memory>(heap: &Heap, memory: &M, request: &Request) -> bool {
    let maps = memory.physical().driver().supports_virtual_memory();
    let (domains, id) = (&heap.domains, request.domain);
    maps && !domains.has_source(id) && !domains.is_no_split(id)
}

/// Returns whether the rest of a free block becomes a block of its own. Pages are always split: a pool without splitting
/// has some from the time before it was set so.
#[inline(always)]
fn may_split(heap: &Heap, id: BlockId) -> bool {
    heap.pages.contains(heap.blocks.segment(id))
        || !heap.domains.is_no_split(heap.blocks.get(id).domain)
}

/// Returns the class of a recently freed block.
#[expect(
    clippy::cast_possible_truncation,
    reason = "addresses have 64 bits, as on each machine with a card"
)]
#[inline]
fn class_of(size: Bytes) -> usize {
    (size.get() / UNIT.get()) as usize
}

/// Returns the addresses for one kind of a domain's requests.
#[inline]
fn room_of(rooms: &mut Vec<[Room; 2]>, domain: DomainId, kind: SizeKind) -> &mut Room {
    if domain.index() >= rooms.len() {
        rooms.resize_with(domain.index() + 1, Default::default);
    }
    &mut rooms[domain.index()][room_index(kind)]
}

#[inline]
fn room_index(kind: SizeKind) -> usize {
    usize::from(kind == SizeKind::Large)
}

/// Placement of blocks.
impl Tide {
    fn room(&mut self, domain: DomainId, kind: SizeKind) -> &mut Room {
        room_of(&mut self.rooms, domain, kind)
    }

    #[inline(always)]
    fn lows(&mut self, domain: DomainId) -> &mut Lows {
        if domain.index() >= self.lows.len() {
            self.lows.resize_with(domain.index() + 1, Lows::default);
        }
        &mut self.lows[domain.index()]
    }

    /// Counts a block that was taken.
    #[inline(always)]
    fn count(&mut self, heap: &Heap, id: BlockId) {
        let block = heap.blocks.get(id);
        self.lows(block.domain).add(block.size);
    }

    /// Returns the stream of a segment with pages.
    fn fence(&self, segment: SegmentId) -> FenceId {
        self.fence_of[segment.index()].expect("its stream is known since it was reserved")
    }

    /// Uses a window. The bytes before and behind it stay free.
    fn carve(&mut self, heap: &mut Heap, window: &Window) -> BlockId {
        let splits = may_split(heap, window.block);
        self.carve_whole_or_part(heap, window, splits)
    }

    /// Uses a window if its end `splits` the block, or else all of the block from the window's start on.
    fn carve_whole_or_part(&mut self, heap: &mut Heap, window: &Window, splits: bool) -> BlockId {
        let mut id = window.block;
        let block = heap.blocks.get(id);
        debug_assert!(
            block.address <= window.address && window.address + window.size <= block.end(),
            "a window lies within its free block"
        );
        let room = room_of(&mut self.rooms, block.domain, block.kind);
        room.remove(heap, id);
        let before = window.address.offset_from(block.address);
        if !before.is_zero() {
            id = heap.blocks.split(id, before);
            room.insert(heap, window.block);
        }
        let free = FreeBlock::of(id, &heap.blocks.get(id));
        room.use_start(heap, free, if splits { window.size } else { free.size });
        let block = heap.blocks.get(id);
        debug_assert!(
            block.address == window.address && (block.size == window.size || !splits),
            "a window becomes a block of its own"
        );
        id
    }

    /// Takes a recently freed block of the request's size, or a free block that needs no driver call.
    #[inline(always)]
    fn take_mapped(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        if request.size > RECENT_MAX {
            self.merge_recent(heap, request.domain);
            return self.take_free(heap, request);
        }
        if let Some(id) = self.recent.take((request.domain, class_of(request.size))) {
            debug_assert_eq!(
                (heap.blocks.state(id), heap.blocks.get(id).size),
                (BlockState::Recent, request.size),
                "a recently freed block stays as it was"
            );
            heap.blocks.set_state(id, BlockState::Free);
            return Some(id);
        }
        let found = self.take_free(heap, request);
        if found.is_none() && self.merge_recent(heap, request.domain) {
            return self.take_free(heap, request);
        }
        found
    }

    /// Takes a free block that needs no driver call.
    fn take_free(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        if let Some(id) = self.take_tightest(heap, request) {
            return Some(id);
        }
        let (window, cost) = self.best_window(heap, request, false)?;
        (!cost.calls_driver).then(|| self.carve(heap, &window))
    }

    /// Merges the recently freed blocks of every domain. Then each frame that no block in use touches is idle.
    fn merge_all_recent(&mut self, heap: &mut Heap) {
        let domains: Vec<DomainId> = heap.domains.iter().collect();
        for domain in domains {
            self.merge_recent(heap, domain);
        }
    }

    /// Lists a block that is not in use any more, merged with its free neighbours.
    #[inline(always)]
    fn merge(&mut self, heap: &mut Heap, id: BlockId) {
        // Not earlier: a neighbour that merged would have removed the block from a list that it was not in.
        heap.blocks.set_state(id, BlockState::Free);
        let (block, segment) = (heap.blocks.get(id), heap.blocks.segment(id));
        if heap.vacate(segment, block.address, block.size) {
            let fence = self.fence(segment);
            self.fences.freed(fence, heap.pages.now());
        }
        self.merge_and_list(heap, id);
    }

    /// Lists a free block, merged with its free neighbours. Returns the whole.
    fn merge_and_list(&mut self, heap: &mut Heap, mut id: BlockId) -> BlockId {
        let block = heap.blocks.get(id);
        let room = room_of(&mut self.rooms, block.domain, block.kind);
        let is_free = |id: &BlockId| heap.blocks.state(*id) == BlockState::Free;
        let (next, previous) = (block.next.filter(is_free), block.previous.filter(is_free));
        if let Some(next) = next {
            room.remove(heap, next);
            heap.blocks.merge_with_next(id);
        }
        if let Some(previous) = previous {
            room.remove(heap, previous);
            heap.blocks.merge_with_next(previous);
            id = previous;
        }
        debug_assert!(
            !has_free_neighbour(heap, id),
            "no free block has a free neighbour"
        );
        room.insert(heap, id);
        id
    }

    /// Returns a window at the end of the used part of the newest segment, or of a new segment if there is no room.
    fn extend<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<(Window, Cost), DriverError> {
        let kind = kind_of(request.size);
        let newest = self.room(request.domain, kind).unused;
        let known = newest.and_then(|unused| self.window_before(heap, unused, request));
        let (unused, (mut window, cost)) = match known {
            Some(known) => known,
            None => {
                let unused = self.reserve(heap, memory, request)?;
                let found = self.window_before(heap, unused, request);
                found.expect("a new segment has room, and no view")
            }
        };
        let block = heap.blocks.get(unused);
        debug_assert_eq!(
            block.state,
            BlockState::Unmapped,
            "unused addresses are listed nowhere else"
        );
        let used = (window.address + window.size).offset_from(block.address);
        let rest = (used < block.size).then(|| heap.blocks.split(unused, used));
        self.room(request.domain, kind).unused = rest;
        heap.blocks.set_state(unused, BlockState::Free);
        window.block = self.merge_and_list(heap, unused);
        Ok((window, cost))
    }

    /// Returns a window that reaches into an unused block. It begins with the free block in front or, if one of those
    /// pages cannot serve yet, with the next page.
    fn window_before(
        &self,
        heap: &mut Heap,
        unused: BlockId,
        request: &Request,
    ) -> Option<(BlockId, (Window, Cost))> {
        let block = heap.blocks.get(unused);
        let segment = heap.segments.get(heap.blocks.segment(unused));
        let is_free = |&id: &BlockId| heap.blocks.state(id) == BlockState::Free;
        let before = block.previous.filter(is_free).map(|id| heap.blocks.get(id));
        let before = before.filter(|before| before.size < request.size);
        let offset = block.address.offset_from(segment.address);
        let next_page = segment.address + offset.round_up(heap.pages.page_size());
        let first = before.map_or(block.address, |before| before.address);
        [first, next_page].into_iter().find_map(|address| {
            let window = window_at(heap, unused, address, request.size);
            let has_room = address + request.size <= block.end();
            let cost = has_room.then(|| self.cost(heap, &window, (u64::MAX, true)));
            Some((unused, (window, cost.flatten()?)))
        })
    }

    /// Reserves a segment for a domain's requests of a kind and returns its unused block.
    fn reserve<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<BlockId, DriverError> {
        let (total, granularity) = {
            let mut physical = memory.physical_mut();
            let driver = physical.driver_mut();
            (driver.memory_info()?.total, driver.granularity())
        };
        if request.size > total {
            return Err(DriverError::OutOfMemory);
        }
        let page_size = PAGE.round_up(granularity);
        let least = request.size.round_up(page_size);
        let (domain, kind) = (request.domain, kind_of(request.size));
        // A job that fills the device needs more addresses than memory, because free blocks are scattered and some
        // views cannot be unmapped yet. With as many addresses as memory, llama_generate fails on a device of 1.009
        // times its peak. Many streams and pools can use up the addresses of a process. Segments are then smaller.
        let mut size = Bytes(total.get().saturating_mul(ADDRESSES)).round_up(page_size);
        let segment = loop {
            match heap.reserve_pages(memory, domain, size, page_size, kind) {
                Err(DriverError::OutOfMemory) if size > least => {
                    size = Bytes(size.get() / 2).round_up(page_size).max(least);
                }
                answer => break answer?,
            }
        };
        let stream = heap.domains.domain(domain).stream;
        if segment.index() >= self.fence_of.len() {
            self.fence_of.resize(segment.index() + 1, None);
        }
        self.fence_of[segment.index()] = Some(self.fences.of_stream(stream));
        let block = heap.insert_whole_block(segment);
        heap.blocks.set_state(block, BlockState::Unmapped);
        Ok(block)
    }

    /// Maps memory for a request and takes its block. `None` if there is too little.
    fn map_and_take<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        self.merge_all_recent(heap);
        if heap.captures == 0 {
            let stream = heap.domains.domain(request.domain).stream;
            let own = self.fences.of_stream(stream);
            self.fences
                .update(memory.physical_mut().driver_mut(), Some(own));
        }
        if !can_steal(heap, memory, request) {
            return self.grow_plain(heap, memory, request);
        }
        let found = match self.best_window(heap, request, true) {
            None => unless_out_of_memory(self.extend(heap, memory, request))?,
            found => found,
        };
        let Some(found) = found else {
            return Ok(None);
        };
        let window = self.best_inside(heap, request, found);
        debug_assert!(self.cost(heap, &window, (u64::MAX, true)).is_some());
        let filled = unless_out_of_memory(self.fill(heap, memory, &window))?;
        Ok(filled.map(|()| self.carve(heap, &window)))
    }

    /// Returns a block of a new segment without pages.
    fn grow_plain<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let size = request.size.round_up(PAGE);
        let segment = heap.allocate_segment(memory, request.domain, size, kind_of(request.size));
        let Some(segment) = unless_out_of_memory(segment)? else {
            return Ok(None);
        };
        let block = heap.insert_whole_block(segment);
        self.merge_and_list(heap, block);
        let window = window_at(heap, block, heap.blocks.get(block).address, request.size);
        Ok(Some(self.carve(heap, &window)))
    }
}

impl Configured for Tide {
    type Options = TideConfig;

    fn new(_options: &TideConfig, heap: &mut Heap) -> Tide {
        // Free blocks are never looked up by address.
        heap.blocks.list_when_handed_out();
        Tide::default()
    }

    fn size_in(
        _options: &Self::Options,
        requested: Bytes,
        _free: Bytes,
        _segment: Bytes,
    ) -> Option<Bytes> {
        Some(requested.round_up(UNIT))
    }
}

impl Strategy for Tide {
    #[inline]
    fn block_size(&self, requested: Bytes) -> Bytes {
        requested.round_up(UNIT)
    }

    fn segment_size(&self, request: &Request) -> Bytes {
        request.size.round_up(PAGE)
    }

    #[inline]
    fn take(&mut self, heap: &mut Heap, request: &Request) -> Option<BlockId> {
        let id = self.take_mapped(heap, request)?;
        self.count(heap, id);
        Some(id)
    }

    fn grow<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        request: &Request,
    ) -> Result<Option<BlockId>, DriverError> {
        let found = self.map_and_take(heap, memory, request)?;
        if let Some(id) = found {
            self.count(heap, id);
        }
        Ok(found)
    }

    #[inline(always)]
    fn put(&mut self, heap: &mut Heap, id: BlockId, block: Block) -> Option<SegmentId> {
        // It was counted when it was taken, so its domain is known.
        let is_low = self.lows[block.domain.index()].remove(block.size);
        // One block alone may stay, so that a program that has no other is not slowed down.
        if is_low && !self.recent.is_empty(block.domain) {
            self.merge(heap, id);
            self.merge_recent(heap, block.domain);
            return None;
        }
        // A block whose kind does not fit its size was split at an address that the program requested.
        if block.size > RECENT_MAX || kind_of(block.size) != block.kind {
            self.merge(heap, id);
            return None;
        }
        heap.blocks.set_state(id, BlockState::Recent);
        let place = (block.domain, class_of(block.size));
        if let Some(id) = self.recent.put(place, (id, block.size)) {
            self.merge(heap, id);
        }
        None
    }

    fn release<M: Memory>(
        &mut self,
        heap: &mut Heap,
        memory: &mut M,
        wanted: Release<'_>,
    ) -> Result<bool, DriverError> {
        match wanted {
            Release::Garbage => Ok(false),
            Release::For(request) | Release::ForAfterWait(request)
                if can_steal(heap, memory, request) =>
            {
                Ok(false)
            }
            Release::For(request) => self.make_room(heap, memory, self.segment_size(request)),
            Release::Unused { since, most } => {
                self.release_unused(heap, memory, (since, most))?;
                Ok(true)
            }
            Release::ForAfterWait(request) => {
                let own = heap.domains.domain(request.domain).stream;
                let size = self.segment_size(request);
                self.make_room_after_wait(heap, memory, size, Some(own))
            }
            Release::Idle(size) => self.make_room_after_wait(heap, memory, size, None),
            Release::Domain(domain) => {
                if let Some(rooms) = self.rooms.get_mut(domain.index()) {
                    *rooms = Default::default();
                }
                *self.lows(domain) = Lows::default();
                Ok(true)
            }
            Release::Pool(pool, failing) => {
                self.release_pool(heap, memory, pool, failing)?;
                Ok(true)
            }
        }
    }

    fn largest_free(&self, heap: &Heap, domain: DomainId) -> Bytes {
        let rooms = self.rooms.get(domain.index()).into_iter().flatten();
        let free = rooms.flat_map(|room| room.free.iter());
        let usable = free.map(|free| usable_bytes(heap, free.id));
        // Idle frames can be mapped together at any addresses.
        let idle = heap.pages.bytes(heap.pages.idle().count());
        usable.max().unwrap_or_default().max(idle)
    }

    /// Returns the idle and the new memory together, within the limit: frames of both serve a request.
    fn largest_request(&self, heap: &Heap, domain: DomainId, new: Bytes) -> Bytes {
        let idle = heap.pages.bytes(heap.pages.idle().count());
        let new = new.saturating_sub(heap.over_limit(new));
        let whole = new.round_down(heap.pages.page_size());
        self.largest_free(heap, domain).max(idle + whole)
    }

    fn check(&self, heap: &Heap) -> Result<Bytes, String> {
        self.recent.check(heap, BlockState::Recent, class_of)?;
        self.check_rooms(heap)?;
        let segments = heap.segments.iter();
        let mapped = segments.map(|(id, segment)| {
            let has_pages = heap.pages.contains(id);
            if has_pages {
                heap.pages.shown_bytes(id)
            } else {
                segment.size
            }
        });
        let active = heap.blocks.iter().filter(|(_, block)| block.is_active());
        Ok(mapped.sum::<Bytes>() - active.map(|(_, block)| block.size).sum())
    }
}

fn window_at(heap: &Heap, block: BlockId, address: DeviceAddress, size: Bytes) -> Window {
    Window {
        block,
        address,
        size,
        segment: heap.blocks.segment(block),
    }
}

fn has_free_neighbour(heap: &Heap, id: BlockId) -> bool {
    let Block { previous, next, .. } = heap.blocks.get(id);
    let mut neighbours = [previous, next].into_iter().flatten();
    neighbours.any(|id| heap.blocks.state(id) == BlockState::Free)
}

/// Returns the bytes of a free block whose frames are idle, or in use there. A frame counts once.
fn usable_bytes(heap: &Heap, id: BlockId) -> Bytes {
    let (block, segment) = (heap.blocks.get(id), heap.blocks.segment(id));
    if !heap.pages.contains(segment) {
        return block.size;
    }
    let mut frames = BTreeSet::new();
    let mut is_usable = |&at: &PageId| match heap.pages.state(at) {
        PageState::InUse | PageState::Alone(_) => true,
        PageState::Ready(id) => frames.insert(id),
        PageState::Unmapped | PageState::Blocked => false,
    };
    let touched = heap.pages.touched(segment, block.address, block.size);
    let overlap = |at: PageId| {
        let start = heap.pages.address(at);
        let end = (start + heap.pages.page_size()).min(block.end());
        end.offset_from(start.max(block.address))
    };
    let usable = touched.pages().filter(|at| is_usable(at));
    usable.map(overlap).sum()
}

impl Tide {
    /// Checks that each free block is listed once, with its size, in its domain's room for its kind or as recent.
    fn check_rooms(&self, heap: &Heap) -> Result<(), String> {
        let rooms = self.rooms.iter().enumerate();
        let rooms = rooms.flat_map(|(domain, rooms)| {
            let rooms = (0..).zip(rooms);
            rooms.map(move |(index, room)| ((domain, index), room))
        });
        let free = rooms.flat_map(|(place, room)| {
            let blocks = room.free.iter();
            blocks.map(move |free| (free.id, BlockState::Free, free.size, place))
        });
        let recent = self.recent.iter().map(|id| {
            let Block { size, domain, .. } = heap.blocks.get(id);
            let place = (domain.index(), room_index(kind_of(size)));
            (id, BlockState::Recent, size, place)
        });
        let (mut listed, mut count) = (BTreeSet::new(), 0);
        for (id, state, size, place) in free.chain(recent) {
            let block = heap.blocks.get(id);
            let found = (block.domain.index(), room_index(block.kind));
            if (block.state, block.size, found) != (state, size, place) {
                return Err(format!(
                    "the block at {} is listed elsewhere",
                    block.address
                ));
            }
            listed.insert(id);
            count += 1;
        }
        let is_free = |block: &Block| matches!(block.state, BlockState::Free | BlockState::Recent);
        let free = heap.blocks.iter().filter(|(_, block)| is_free(block));
        let free: BTreeSet<BlockId> = free.map(|(id, _)| id).collect();
        if listed == free && count == free.len() {
            return Ok(());
        }
        Err(format!(
            "{count} blocks are listed as free, {} are",
            free.len()
        ))
    }
}

impl Placement for Tide {
    fn take_around(
        &mut self,
        heap: &mut Heap,
        request: &Request,
        address: DeviceAddress,
    ) -> Option<BlockId> {
        self.merge_recent(heap, request.domain);
        let room = self.room(request.domain, kind_of(request.size));
        let contains = |&id: &BlockId| {
            let block = heap.blocks.get(id);
            (block.address..block.end()).contains(&address)
                && request.size <= block.end().offset_from(address)
        };
        let id = room.free.iter().map(|free| free.id).find(contains)?;
        let start = heap.blocks.get(id).address;
        let before = address.offset_from(start);
        // The bytes before the address are taken too, until the caller frees them.
        let whole = window_at(heap, id, start, before + request.size);
        let has_memory = self
            .cost(heap, &whole, (u64::MAX, true))
            .is_some_and(|cost| !cost.calls_driver);
        let begins = before.is_zero() || ((before % UNIT).is_zero() && may_split(heap, id));
        if !has_memory || !begins {
            return None;
        }
        let size = if before.is_zero() {
            request.size
        } else {
            before
        };
        let id = self.carve(heap, &Window { size, ..whole });
        self.count(heap, id);
        Some(id)
    }

    fn merge_recent(&mut self, heap: &mut Heap, domain: DomainId) -> bool {
        let mut any = false;
        while let Some(id) = self.recent.pop(domain) {
            self.merge(heap, id);
            any = true;
        }
        any
    }

    fn take_again(
        &mut self,
        heap: &mut Heap,
        wanted: &CheckpointBlock,
        around: Option<BlockId>,
    ) -> BlockId {
        let around = around.expect("a block that is not in use lies in a free one");
        let window = window_at(heap, around, wanted.address, wanted.size);
        // The segment may have been split before its pool was set so that none is.
        let id = self.carve_whole_or_part(heap, &window, true);
        self.count(heap, id);
        id
    }
}
