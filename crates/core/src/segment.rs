//! Segments, and everything that passes between them and the driver: the only file that calls the
//! driver for memory. Figures, events and the limit are kept here, so that no strategy can forget
//! them.

use std::collections::BTreeSet;

use crate::block::{Block, BlockId, BlockState, BlockTable, SegmentId};
use crate::domain::{DomainId, Domains, PoolIndex};
use crate::driver::{Driver, DriverError, Handle};
use crate::event::{Action, Event};
use crate::event_log::{EventLog, LogMark};
use crate::figures::Figures;
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress, signed};

/// Small enough that blocks of a segment differ in it, large enough for any number of segments.
const RANK_UNIT: Bytes = Bytes(512);

/// A range of device addresses from the driver.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) address: DeviceAddress,
    pub(crate) size: Bytes,
    pub(crate) domain: DomainId,
    pub(crate) kind: SizeKind,
    pub(crate) backing: Backing,
    /// Tells the segment from every other that there ever was; the table gives it.
    pub(crate) serial: u64,
    /// The rank of its start: where it would begin if all that there ever were, as long as they came, lay one behind
    /// the other, in units of [`RANK_UNIT`]; the table gives it.
    rank: u64,
}

/// Where a segment's physical memory is.
#[derive(Debug)]
pub(crate) enum Backing {
    /// The driver allocated it with the segment.
    Whole,
    /// Several driver allocations, one behind the other, of these sizes.
    Joined { parts: Vec<Bytes> },
    /// Mapped page by page: an expandable segment.
    Pages {
        page_size: Bytes,
        /// What backs each page; `None` where the page is not mapped. Ends with a mapped page.
        handles: Vec<Option<Handle>>,
    },
}

impl Segment {
    /// Returns whether memory is mapped into the segment page by page.
    pub(crate) fn is_expandable(&self) -> bool {
        matches!(self.backing, Backing::Pages { .. })
    }

    /// Returns a number that is lower for addresses in older segments and, in the same, for lower addresses in
    /// steps of 512 bytes.
    pub(crate) fn rank_of(&self, address: DeviceAddress) -> u64 {
        self.rank + address.offset_from(self.address).get() / RANK_UNIT.get()
    }

    /// Returns the bytes of physical memory in the segment.
    pub(crate) fn mapped_bytes(&self) -> Bytes {
        match &self.backing {
            Backing::Whole | Backing::Joined { .. } => self.size,
            Backing::Pages { page_size, handles } => {
                Bytes(handles.iter().flatten().count() as u64 * page_size.get())
            }
        }
    }

    /// Returns whether `size` bytes at an offset are in the segment, with memory behind them.
    pub(crate) fn has_memory(&self, offset: Bytes, size: Bytes) -> bool {
        let Backing::Pages { page_size, handles } = &self.backing else {
            return offset + size <= self.size;
        };
        let first = pages_in(offset, *page_size);
        let end = pages_in((offset + size).round_up(*page_size), *page_size);
        let pages = handles.get(first..end);
        pages.is_some_and(|pages| pages.iter().all(Option::is_some))
    }

    /// Returns the handles of the segment's pages and their size.
    fn pages(&mut self) -> (&mut Vec<Option<Handle>>, Bytes) {
        match &mut self.backing {
            Backing::Pages { page_size, handles } => (handles, *page_size),
            Backing::Whole | Backing::Joined { .. } => {
                unreachable!("only expandable segments are mapped and unmapped")
            }
        }
    }
}

/// Every segment, by number. Numbers are used again.
#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    segments: Vec<Option<Segment>>,
    vacant: Vec<SegmentId>,
    /// How many segments there ever were.
    count: u64,
    /// The rank that the next segment gets.
    next_rank: u64,
}

impl SegmentTable {
    fn insert(&mut self, mut segment: Segment) -> SegmentId {
        self.count += 1;
        segment.serial = self.count;
        segment.rank = self.next_rank;
        self.next_rank += segment.size.get().div_ceil(RANK_UNIT.get());
        if let Some(id) = self.vacant.pop() {
            self.segments[id.index()] = Some(segment);
            return id;
        }
        let number = u32::try_from(self.segments.len()).expect("fewer than 2^32 segments");
        self.segments.push(Some(segment));
        SegmentId(number)
    }

    fn remove(&mut self, id: SegmentId) {
        self.segments[id.index()] = None;
        self.vacant.push(id);
    }

    /// Returns every segment. Linear time.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        let numbered = (0u32..).zip(&self.segments);
        numbered.filter_map(|(number, segment)| Some((SegmentId(number), segment.as_ref()?)))
    }

    /// Returns a segment.
    ///
    /// # Panics
    ///
    /// If it went back to the driver.
    pub(crate) fn get(&self, id: SegmentId) -> &Segment {
        self.segments[id.index()]
            .as_ref()
            .expect("the segment is still held")
    }

    /// Returns a segment if it is still the one with that serial.
    pub(crate) fn find(&self, id: SegmentId, serial: u64) -> Option<&Segment> {
        let segment = self.segments.get(id.index())?.as_ref();
        segment.filter(|segment| segment.serial == serial)
    }

    fn get_mut(&mut self, id: SegmentId) -> &mut Segment {
        self.segments[id.index()]
            .as_mut()
            .expect("the segment is still held")
    }
}

/// What every strategy works on.
#[derive(Debug)]
pub(crate) struct Heap<D> {
    pub(crate) driver: D,
    pub(crate) blocks: BlockTable,
    pub(crate) segments: SegmentTable,
    pub(crate) domains: Domains,
    pub(crate) stats: Figures,
    pub(crate) log: EventLog,
    /// Bytes that may be held from the driver, where the program set a fraction.
    pub(crate) limit: Option<Bytes>,
    /// Physical memory that is mapped nowhere because the driver refused to take it back. It counts
    /// as reserved, is mapped again before new memory is created, and is offered to the driver at
    /// each [`Heap::release_detached`].
    detached: Vec<(Handle, Bytes, SizeKind, DomainId)>,
    /// What the driver mapped, but would neither make usable nor unmap; it is asked again before anything is
    /// mapped in the segment, or the segment given back.
    half_mapped: Vec<(SegmentId, DeviceAddress, Bytes)>,
}

impl<D> Heap<D> {
    /// Sets the size from which blocks are not split, and counts anew what is that large.
    pub(crate) fn set_max_split_size(&mut self, size: Option<Bytes>) {
        self.stats.max_split_size = size.map_or(-1, signed);
        let (mut blocks, mut segments) = (0, 0);
        for (_, block) in self.blocks.iter() {
            let is_held = block.state == BlockState::Allocated;
            blocks += i64::from(is_held && self.is_oversize(block.size));
        }
        for (_, segment) in self.segments.iter() {
            let is_whole = !segment.is_expandable();
            segments += i64::from(is_whole && self.is_oversize(segment.size));
        }
        self.stats.set_oversize(blocks, segments);
    }

    /// Returns whether `size` is one from which blocks are not split.
    #[inline]
    pub(crate) fn is_oversize(&self, size: Bytes) -> bool {
        // -1, no such size, is the largest unsigned number.
        size.get() >= self.stats.max_split_size.cast_unsigned()
    }
}

impl<D: Driver> Heap<D> {
    pub(crate) fn new(driver: D) -> Heap<D> {
        Heap {
            driver,
            blocks: BlockTable::new(),
            segments: SegmentTable::default(),
            domains: Domains::new(),
            stats: Figures::new(),
            log: EventLog::default(),
            limit: None,
            detached: Vec::new(),
            half_mapped: Vec::new(),
        }
    }

    /// Returns whether `size` more bytes would pass the limit.
    pub(crate) fn exceeds_limit(&self, size: Bytes) -> bool {
        let passes = |limit| self.limited().saturating_add(size) > limit;
        self.limit.is_some_and(passes)
    }

    /// Returns the bytes that the limit counts: all that are held, without what paused pools have.
    pub(crate) fn limited(&self) -> Bytes {
        self.stats.reserved() - self.domains.paused_bytes()
    }

    /// Takes a segment from the driver. One driver call.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] also where the limit forbids it, and above [`Bytes::SEGMENT_MAX`]; the
    /// driver is then not asked.
    pub(crate) fn allocate_segment(
        &mut self,
        domain: DomainId,
        size: Bytes,
        kind: SizeKind,
    ) -> Result<SegmentId, DriverError> {
        let address = self.allocate(domain, size, kind)?;
        Ok(self.insert_whole_segment(domain, address, size, kind))
    }

    /// Takes memory from the driver as [`Heap::allocate_segment`] does, and returns the segment that
    /// it is in and where in it the memory starts. Where the driver returns the addresses behind a
    /// segment of the same domain and kind, and lets blocks lie in both, that segment grows; otherwise the
    /// memory is a new segment, and starts at zero. One driver call; linear in the segments.
    ///
    /// # Errors
    ///
    /// As [`Heap::allocate_segment`].
    pub(crate) fn allocate_or_extend_segment(
        &mut self,
        domain: DomainId,
        size: Bytes,
        kind: SizeKind,
    ) -> Result<(SegmentId, Bytes), DriverError> {
        let address = self.allocate(domain, size, kind)?;
        let ends_there = |segment: &Segment| {
            segment.address + segment.size == address
                && segment.size + size <= Bytes::SEGMENT_MAX
                && (segment.domain, segment.kind) == (domain, kind)
                && !segment.is_expandable()
        };
        let found = || {
            self.segments
                .iter()
                .find(|(_, segment)| ends_there(segment))
        };
        let joins = self.driver.joins_allocations() && !self.domains.has_source(domain);
        let extended = joins.then(found).flatten().map(|(id, _)| id);
        let Some(id) = extended else {
            let id = self.insert_whole_segment(domain, address, size, kind);
            return Ok((id, Bytes::ZERO));
        };
        let segment = self.segments.get_mut(id);
        let offset = segment.size;
        match &mut segment.backing {
            Backing::Joined { parts } => parts.push(size),
            backing => {
                let parts = vec![offset, size];
                *backing = Backing::Joined { parts };
            }
        }
        segment.size += size;
        Ok((id, offset))
    }

    /// Takes memory from the driver that is in no segment yet.
    fn allocate(
        &mut self,
        domain: DomainId,
        size: Bytes,
        kind: SizeKind,
    ) -> Result<DeviceAddress, DriverError> {
        if size > Bytes::SEGMENT_MAX || self.exceeds_limit(size) {
            return Err(DriverError::OutOfMemory);
        }
        let stream = self.domains.domain(domain).stream;
        let is_limited = self.limit.is_some();
        let address = match self.domains.source_of(domain) {
            Some(source) => {
                let address = source.allocate(size, stream, is_limited);
                let address = address.ok_or(DriverError::OutOfMemory)?;
                self.driver.lend(address, size);
                address
            }
            None => self.driver.allocate(size)?,
        };
        self.count_reserved(domain, kind, signed(size));
        self.stats.num_device_alloc += 1;
        self.record(Action::SegmentAlloc, domain, address, size);
        Ok(address)
    }

    fn insert_whole_segment(
        &mut self,
        domain: DomainId,
        address: DeviceAddress,
        size: Bytes,
        kind: SizeKind,
    ) -> SegmentId {
        self.stats.count_segment(kind, self.is_oversize(size));
        self.insert_segment(Segment {
            address,
            size,
            domain,
            kind,
            backing: Backing::Whole,
            serial: 0,
            rank: 0,
        })
    }

    fn insert_segment(&mut self, segment: Segment) -> SegmentId {
        let pool = self.domains.domain(segment.domain).pool;
        self.domains.pool_mut(pool).segment_count += 1;
        self.segments.insert(segment)
    }

    fn remove_segment(&mut self, id: SegmentId) {
        let pool = self.domains.domain(self.segments.get(id).domain).pool;
        self.domains.pool_mut(pool).segment_count -= 1;
        self.segments.remove(id);
    }

    /// Gives a segment that was never extended back to the driver. One driver call; on an error
    /// nothing has changed.
    pub(crate) fn free_segment(&mut self, id: SegmentId) -> Result<(), DriverError> {
        let left = self.free_last_part(id)?;
        debug_assert!(left.is_zero(), "extended segments go back part by part");
        Ok(())
    }

    /// Gives the last driver allocation of a segment back and returns what is left of the segment;
    /// with the last one it is gone. One driver call; on an error nothing has changed.
    pub(crate) fn free_last_part(&mut self, id: SegmentId) -> Result<Bytes, DriverError> {
        let segment = self.segments.get(id);
        let part = match &segment.backing {
            Backing::Joined { parts } => *parts.last().expect("a segment has a part"),
            Backing::Whole | Backing::Pages { .. } => segment.size,
        };
        let (domain, kind) = (segment.domain, segment.kind);
        let left = segment.size - part;
        let address = segment.address + left;
        let mark = self.record_leaving(Action::SegmentFree, domain, address, part);
        match self.domains.source_of(domain) {
            Some(source) => {
                self.driver.return_lent(address, part);
                source.release(address, part);
            }
            None => {
                let freed = self.driver.free(address, part);
                freed.inspect_err(|_| self.log.take_back(mark))?;
            }
        }
        if left.is_zero() {
            self.remove_segment(id);
            self.stats.count_segment_freed(kind, self.is_oversize(part));
        } else {
            let segment = self.segments.get_mut(id);
            segment.size = left;
            if let Backing::Joined { parts } = &mut segment.backing {
                parts.pop();
            }
        }
        self.count_reserved(domain, kind, -signed(part));
        self.stats.num_device_free += 1;
        Ok(left)
    }

    /// Takes addresses for an expandable segment, with no memory behind them. One driver call.
    ///
    /// # Errors
    ///
    /// What the driver said; [`DriverError::OutOfMemory`] above [`Bytes::SEGMENT_MAX`].
    pub(crate) fn reserve_segment(
        &mut self,
        domain: DomainId,
        size: Bytes,
        page_size: Bytes,
        kind: SizeKind,
    ) -> Result<SegmentId, DriverError> {
        if size > Bytes::SEGMENT_MAX {
            return Err(DriverError::OutOfMemory);
        }
        let address = self.driver.reserve(size)?;
        let backing = Backing::Pages {
            page_size,
            handles: Vec::new(),
        };
        Ok(self.insert_segment(Segment {
            address,
            size,
            domain,
            kind,
            backing,
            serial: 0,
            rank: 0,
        }))
    }

    /// Gives the addresses of an expandable segment back, in which nothing is mapped.
    pub(crate) fn unreserve_segment(&mut self, id: SegmentId) -> Result<(), DriverError> {
        self.unmap_half_mapped(id)?;
        let segment = self.segments.get(id);
        debug_assert!(segment.mapped_bytes().is_zero());
        self.driver.unreserve(segment.address, segment.size)?;
        self.remove_segment(id);
        Ok(())
    }

    /// Maps memory behind `size` bytes at `address`, a page's start, and returns how many bytes were
    /// mapped: `size` rounded up to whole pages. Linear in the pages.
    ///
    /// # Errors
    ///
    /// What the driver said; nothing is then mapped that was not before.
    pub(crate) fn map(
        &mut self,
        id: SegmentId,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<Bytes, DriverError> {
        self.unmap_half_mapped(id)?;
        let &Segment {
            address: start,
            domain,
            kind,
            ..
        } = self.segments.get(id);
        let page_size = self.segments.get_mut(id).pages().1;
        let mapped = size.round_up(page_size);
        let first = pages_in(address.offset_from(start), page_size);
        let handles = self.create_pages(pages_in(mapped, page_size), page_size, kind, domain)?;
        if let Err(error) = self.map_pages(id, address, page_size, &handles) {
            self.discard(handles, page_size, kind, domain);
            return Err(error);
        }
        self.count_reserved(domain, kind, signed(mapped));
        let slots = self.segments.get_mut(id).pages().0;
        slots.resize(slots.len().max(first + handles.len()), None);
        for (slot, handle) in slots[first..].iter_mut().zip(handles) {
            debug_assert!(slot.is_none(), "a page is mapped once");
            *slot = Some(handle);
        }
        self.stats.num_device_alloc += 1;
        self.record(Action::SegmentMap, domain, address, mapped);
        Ok(mapped)
    }

    /// Creates memory for `count` pages: all or none.
    fn create_pages(
        &mut self,
        count: usize,
        page_size: Bytes,
        kind: SizeKind,
        domain: DomainId,
    ) -> Result<Vec<Handle>, DriverError> {
        let mut handles = Vec::with_capacity(count);
        while handles.len() < count {
            match self.create_page(page_size) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    self.discard(handles, page_size, kind, domain);
                    return Err(error);
                }
            }
        }
        Ok(handles)
    }

    fn create_page(&mut self, page_size: Bytes) -> Result<Handle, DriverError> {
        let usable = self
            .detached
            .iter()
            .position(|&(_, size, ..)| size == page_size);
        match usable {
            Some(index) => {
                let (handle, size, kind, domain) = self.detached.swap_remove(index);
                self.count_reserved(domain, kind, -signed(size));
                Ok(handle)
            }
            None => self.driver.create(page_size),
        }
    }

    /// Maps the handles one behind the other and makes them accessible: all or none.
    fn map_pages(
        &mut self,
        id: SegmentId,
        address: DeviceAddress,
        page_size: Bytes,
        handles: &[Handle],
    ) -> Result<(), DriverError> {
        let mut end = address;
        let mut result = Ok(());
        for &handle in handles {
            result = self.driver.map(end, page_size, handle);
            if result.is_err() {
                break;
            }
            end = end + page_size;
        }
        let mapped = end.offset_from(address);
        let result = result.and_then(|()| self.driver.set_access(address, mapped));
        if result.is_err() && !mapped.is_zero() && self.driver.unmap(address, mapped).is_err() {
            // The first error says more.
            self.half_mapped.push((id, address, mapped));
        }
        result
    }

    /// Has the driver unmap what it refused to in a segment, in which nothing can be mapped before that.
    pub(crate) fn unmap_half_mapped(&mut self, id: SegmentId) -> Result<(), DriverError> {
        let is_in = |&(segment, ..): &(SegmentId, DeviceAddress, Bytes)| segment == id;
        while let Some(index) = self.half_mapped.iter().position(is_in) {
            let (_, address, size) = self.half_mapped[index];
            self.driver.unmap(address, size)?;
            self.half_mapped.swap_remove(index);
        }
        Ok(())
    }

    /// Gives physical memory that is mapped nowhere back to the driver, or keeps it as detached.
    fn discard(
        &mut self,
        handles: Vec<Handle>,
        page_size: Bytes,
        kind: SizeKind,
        domain: DomainId,
    ) {
        for handle in handles {
            if self.driver.release(handle).is_err() {
                self.detached.push((handle, page_size, kind, domain));
                self.count_reserved(domain, kind, signed(page_size));
            }
        }
    }

    /// Unmaps `size` bytes at `address`, whole pages that are all mapped, and gives their memory
    /// back, after the work queued on the segment's stream. Linear in the pages.
    ///
    /// # Errors
    ///
    /// What the driver said; everything is then still mapped. Memory that the driver refuses to take
    /// back once it is unmapped is kept as detached, which is no error here.
    pub(crate) fn unmap(
        &mut self,
        id: SegmentId,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<(), DriverError> {
        let &Segment {
            address: start,
            domain,
            kind,
            ..
        } = self.segments.get(id);
        // Unlike cudaFree, unmapping does not wait for kernels that still use the pages.
        let stream = self.domains.domain(domain).stream;
        self.driver.synchronize_stream(stream)?;
        let mark = self.record_leaving(Action::SegmentUnmap, domain, address, size);
        let unmapped = self.driver.unmap(address, size);
        unmapped.inspect_err(|_| self.log.take_back(mark))?;
        let (slots, page_size) = self.segments.get_mut(id).pages();
        let first = pages_in(address.offset_from(start), page_size);
        let range = first..first + pages_in(size, page_size);
        let handles: Vec<Handle> = slots[range].iter_mut().filter_map(Option::take).collect();
        let mapped = slots
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |last| last + 1);
        slots.truncate(mapped);
        debug_assert_eq!(
            handles.len(),
            pages_in(size, page_size),
            "only mapped pages are unmapped"
        );
        self.count_reserved(domain, kind, -signed(size));
        self.discard(handles, page_size, kind, domain);
        self.stats.num_device_free += 1;
        Ok(())
    }

    /// Offers the driver once more what it refused to take back.
    pub(crate) fn release_detached(&mut self) -> Result<(), DriverError> {
        while let Some(&(handle, size, kind, domain)) = self.detached.last() {
            self.driver.release(handle)?;
            self.detached.pop();
            self.count_reserved(domain, kind, -signed(size));
        }
        Ok(())
    }

    /// Returns the bytes of physical memory that the driver refused to take back.
    pub(crate) fn detached_bytes(&self) -> Bytes {
        self.detached.iter().map(|&(_, size, ..)| size).sum()
    }

    /// Returns whether a pool has any segment, if only addresses, or memory that the driver refused to take
    /// back.
    pub(crate) fn has_segments(&self, pool: PoolIndex) -> bool {
        let pool = self.domains.pool(pool);
        pool.reserved_bytes.current() != 0 || pool.segment_count != 0
    }

    /// Returns the domains but the default one that have no segment, and so no block, and no memory that
    /// the driver refused to take back. O(n log n) for n domains and segments.
    pub(crate) fn domains_without_memory(&self) -> Vec<DomainId> {
        let segments = self.segments.iter().map(|(_, segment)| segment.domain);
        let detached = self.detached.iter().map(|&(.., domain)| domain);
        let default = std::iter::once(DomainId::DEFAULT);
        let kept: BTreeSet<DomainId> = segments.chain(detached).chain(default).collect();
        let ids = self.domains.iter();
        ids.filter(|id| !kept.contains(id)).collect()
    }

    /// Adds a block that covers a segment, free and belonging to the segment's domain.
    pub(crate) fn insert_whole_block(&mut self, id: SegmentId) -> BlockId {
        let &Segment { size, .. } = self.segments.get(id);
        self.insert_block(id, Bytes::ZERO, size)
    }

    /// Adds a block at an offset into a segment, free, unlinked, belonging to the segment's domain.
    pub(crate) fn insert_block(&mut self, id: SegmentId, offset: Bytes, size: Bytes) -> BlockId {
        let segment = self.segments.get(id);
        let (domain, kind) = (segment.domain, segment.kind);
        let block = Block::new(segment.address + offset, size, domain, kind);
        self.blocks.insert(&block, id)
    }

    /// Writes an event down, if anyone asked for events.
    #[inline]
    pub(crate) fn record(
        &mut self,
        action: Action,
        domain: DomainId,
        address: DeviceAddress,
        size: Bytes,
    ) {
        // What is complete at once is kept as that alone.
        if action != Action::FreeRequested {
            self.log.recent.push(action, domain, address, size);
        }
        if self.log.enabled {
            self.push_event(action, domain, address, size);
        }
    }

    /// Writes down that memory leaves and tells the observer, who may have to let go of it first: the memory
    /// is still there. Returns what takes the event back if the driver refuses.
    fn record_leaving(
        &mut self,
        action: Action,
        domain: DomainId,
        address: DeviceAddress,
        size: Bytes,
    ) -> LogMark {
        let mark = self.log.mark();
        self.record(action, domain, address, size);
        self.log.tell();
        mark
    }

    #[inline(never)]
    fn push_event(
        &mut self,
        action: Action,
        domain: DomainId,
        address: DeviceAddress,
        size: Bytes,
    ) {
        let domain = self.domains.domain(domain);
        let pool = self.domains.pool(domain.pool).id;
        self.log.push(Event {
            action,
            pool,
            address,
            size,
            stream: domain.stream,
        });
    }

    fn count_reserved(&mut self, domain: DomainId, kind: SizeKind, change: i64) {
        self.stats.change_reserved(kind, change);
        let pool = self.domains.domain(domain).pool;
        self.domains
            .pool_mut(pool)
            .reserved_bytes
            .change(kind, change, &mut false);
    }
}

fn pages_in(size: Bytes, page_size: Bytes) -> usize {
    usize::try_from(size.get() / page_size.get()).expect("the number of pages fits a usize")
}

#[cfg(test)]
mod tests;
