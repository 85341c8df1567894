//! Segments, and the heap that a strategy works on. The heap keeps statistics, events and the limit, so that no
//! strategy can forget them. It has no driver: a call that gets or releases memory receives the [`Physical`]
//! memory.

mod paged;

use std::collections::BTreeSet;

use crate::block::{Block, BlockId, BlockState, BlockTable, SegmentId};
use crate::domain::{DomainId, Domains, PoolIndex};
use crate::driver::{Driver, DriverError};
use crate::event::{Action, Event};
use crate::event_log::{EventLog, LogMark};
use crate::figures::Figures;
use crate::pages::Pages;
use crate::physical::{Memory, Owner};
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress, signed};

/// The unit of ranks: small enough to tell blocks of a segment apart, large enough for any number of segments.
const RANK_UNIT: Bytes = Bytes(512);

/// A range of device addresses from the driver.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) address: DeviceAddress,
    pub(crate) size: Bytes,
    pub(crate) domain: DomainId,
    pub(crate) kind: SizeKind,
    /// The unit in which memory is mapped into an expandable segment; `None` if the driver allocated it whole.
    pub(crate) page_size: Option<Bytes>,
    /// A number that no other segment ever had; the table assigns it.
    pub(crate) serial: u64,
    /// The rank of its start. Ranks number addresses as if all segments that ever existed were adjacent, in order of
    /// creation, in units of [`RANK_UNIT`]. The table assigns it.
    rank: u64,
}

impl Segment {
    /// Returns whether memory is mapped into the segment page by page.
    pub(crate) fn is_expandable(&self) -> bool {
        self.page_size.is_some()
    }

    /// Returns the rank of an address, in steps of 512 bytes: lower for older segments and, within a segment, for
    /// lower addresses.
    pub(crate) fn rank_of(&self, address: DeviceAddress) -> u64 {
        self.rank + address.offset_from(self.address).get() / RANK_UNIT.get()
    }

    /// Returns the bytes of physical memory mapped in the segment.
    pub(crate) fn mapped_bytes<M: Memory>(&self, memory: &M) -> Bytes {
        if self.is_expandable() {
            memory.physical().mapped_bytes(self.address)
        } else {
            self.size
        }
    }

    /// Returns whether `size` bytes at an offset are in the segment, with memory behind them.
    pub(crate) fn has_memory<M: Memory>(&self, offset: Bytes, size: Bytes, memory: &M) -> bool {
        if self.is_expandable() {
            memory.physical().has_memory(self.address + offset, size)
        } else {
            offset + size <= self.size
        }
    }
}

/// Every segment, by number. Numbers are reused.
#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    segments: Vec<Option<Segment>>,
    vacant: Vec<SegmentId>,
    /// How many segments ever existed.
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
        debug_assert!(!segment.size.is_zero() && segment.size <= Bytes::SEGMENT_MAX);
        if let Some(id) = self.vacant.pop() {
            debug_assert!(self.segments[id.index()].is_none());
            self.segments[id.index()] = Some(segment);
            return id;
        }
        let number = u32::try_from(self.segments.len()).expect("fewer than 2^32 segments");
        self.segments.push(Some(segment));
        SegmentId(number)
    }

    fn remove(&mut self, id: SegmentId) {
        debug_assert!(
            self.segments[id.index()].is_some(),
            "a segment is removed once"
        );
        self.segments[id.index()] = None;
        self.vacant.push(id);
        debug_assert!(self.vacant.len() <= self.segments.len());
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
    /// If it was released to the driver.
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
}

/// The state that every strategy works on.
#[derive(Debug)]
pub(crate) struct Heap {
    /// The number of the lane.
    lane: u8,
    pub(crate) blocks: BlockTable,
    pub(crate) segments: SegmentTable,
    pub(crate) domains: Domains,
    pub(crate) stats: Figures,
    pub(crate) log: EventLog,
    /// Bytes that may be reserved, if the program set a fraction.
    pub(crate) limit: Option<Bytes>,
    /// Streams being captured into graphs, in which events may not be queried.
    pub(crate) captures: u32,
    /// The pages of segments whose physical memory may be mapped at several addresses.
    pub(crate) pages: Pages,
}

impl Heap {
    /// Sets the size from which blocks are not split, and recounts the blocks and segments of at least that size.
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
        // -1 stands for no such size. It becomes the largest unsigned number.
        size.get() >= self.stats.max_split_size.cast_unsigned()
    }
}

impl Heap {
    pub(crate) fn new(lane: u8) -> Heap {
        Heap {
            lane,
            blocks: BlockTable::new(),
            segments: SegmentTable::default(),
            domains: Domains::new(),
            stats: Figures::new(),
            log: EventLog::default(),
            limit: None,
            captures: 0,
            pages: Pages::default(),
        }
    }

    /// Returns the owner of memory for a domain.
    fn owner(&self, domain: DomainId, kind: SizeKind) -> Owner {
        Owner {
            lane: self.lane,
            domain,
            kind,
        }
    }

    /// Returns whether reserving `size` more bytes would exceed the limit.
    pub(crate) fn exceeds_limit(&self, size: Bytes) -> bool {
        !self.over_limit(size).is_zero()
    }

    /// Returns how many bytes too many would be reserved with `size` more.
    pub(crate) fn over_limit(&self, size: Bytes) -> Bytes {
        // Without a limit, nothing is added up: a miss asks this.
        let over = |limit| {
            let reserved = self.limited().saturating_add(size);
            reserved.saturating_sub(limit)
        };
        self.limit.map_or(Bytes::ZERO, over)
    }

    /// Returns the bytes that count against the limit: all reserved bytes except those of paused pools.
    pub(crate) fn limited(&self) -> Bytes {
        debug_assert!(self.domains.paused_bytes() <= self.stats.reserved());
        self.stats.reserved() - self.domains.paused_bytes()
    }

    /// Allocates a segment from the driver. One driver call.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] also if the limit forbids it, or above [`Bytes::SEGMENT_MAX`]; the driver is
    /// then not called.
    pub(crate) fn allocate_segment<M: Memory>(
        &mut self,
        memory: &mut M,
        domain: DomainId,
        size: Bytes,
        kind: SizeKind,
    ) -> Result<SegmentId, DriverError> {
        if size > Bytes::SEGMENT_MAX || self.exceeds_limit(size) {
            return Err(DriverError::OutOfMemory);
        }
        let stream = self.domains.domain(domain).stream;
        let is_limited = self.limit.is_some();
        let address = match self.domains.source_of(domain) {
            Some(source) => {
                let address = source.allocate(size, stream, is_limited);
                let address = address.ok_or(DriverError::OutOfMemory)?;
                memory.physical().add_owner(self.lane, address, size);
                address
            }
            None => memory.physical_mut().allocate(self.lane, size)?,
        };
        self.count_reserved(self.owner(domain, kind), signed(size));
        self.stats.num_device_alloc += 1;
        self.record(Action::SegmentAlloc, domain, address, size);
        self.stats.count_segment(kind, self.is_oversize(size));
        Ok(self.insert_segment(Segment {
            address,
            size,
            domain,
            kind,
            page_size: None,
            serial: 0,
            rank: 0,
        }))
    }

    fn insert_segment(&mut self, segment: Segment) -> SegmentId {
        let pool = self.domains.domain(segment.domain).pool;
        self.domains.pool_mut(pool).segment_count += 1;
        self.segments.insert(segment)
    }

    fn remove_segment(&mut self, id: SegmentId) {
        let pool = self.domains.domain(self.segments.get(id).domain).pool;
        debug_assert!(self.domains.pool(pool).segment_count > 0);
        self.domains.pool_mut(pool).segment_count -= 1;
        self.segments.remove(id);
    }

    /// Releases a segment that is not expandable to the driver. One driver call; on an error nothing has changed.
    pub(crate) fn free_segment<M: Memory>(
        &mut self,
        memory: &mut M,
        id: SegmentId,
    ) -> Result<(), DriverError> {
        let segment = self.segments.get(id);
        debug_assert!(!segment.is_expandable(), "their pages are unmapped");
        let (address, size, owner) = (
            segment.address,
            segment.size,
            self.owner(segment.domain, segment.kind),
        );
        let mark = self.record_leaving(Action::SegmentFree, owner.domain, address, size);
        match self.domains.source_of(owner.domain) {
            Some(source) => {
                memory.physical().remove_owner(address, size);
                source.release(address, size);
            }
            None => {
                let freed = memory.physical_mut().free(address, size);
                freed.inspect_err(|_| self.log.undo(mark))?;
            }
        }
        self.remove_segment(id);
        self.stats
            .count_segment_freed(owner.kind, self.is_oversize(size));
        self.count_reserved(owner, -signed(size));
        self.stats.num_device_free += 1;
        Ok(())
    }

    /// Reserves addresses for an expandable segment, without memory. One driver call.
    ///
    /// # Errors
    ///
    /// The driver's error; [`DriverError::OutOfMemory`] above [`Bytes::SEGMENT_MAX`].
    pub(crate) fn reserve_segment<M: Memory>(
        &mut self,
        memory: &mut M,
        domain: DomainId,
        size: Bytes,
        page_size: Bytes,
        kind: SizeKind,
    ) -> Result<SegmentId, DriverError> {
        if size > Bytes::SEGMENT_MAX {
            return Err(DriverError::OutOfMemory);
        }
        let address = memory.physical_mut().reserve(size, page_size)?;
        Ok(self.insert_segment(Segment {
            address,
            size,
            domain,
            kind,
            page_size: Some(page_size),
            serial: 0,
            rank: 0,
        }))
    }

    /// Releases the addresses of an expandable segment in which nothing is mapped.
    pub(crate) fn unreserve_segment<M: Memory>(
        &mut self,
        memory: &mut M,
        id: SegmentId,
    ) -> Result<(), DriverError> {
        let &Segment { address, size, .. } = self.segments.get(id);
        memory.physical_mut().unreserve(address, size)?;
        self.remove_segment(id);
        Ok(())
    }

    /// Maps memory behind `size` bytes at `address`, the start of a page. Returns the mapped bytes: `size` rounded up
    /// to whole pages. Linear in the pages.
    ///
    /// # Errors
    ///
    /// The driver's error; nothing new is then mapped.
    pub(crate) fn map<M: Memory>(
        &mut self,
        memory: &mut M,
        id: SegmentId,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<Bytes, DriverError> {
        let segment = self.segments.get(id);
        let (start, owner) = (segment.address, self.owner(segment.domain, segment.kind));
        debug_assert!(segment.is_expandable(), "others have all their memory");
        debug_assert!(address.offset_from(start) + size <= segment.size);
        let mapped = memory.physical_mut().map_pages(
            start,
            address,
            size,
            owner,
            &mut |owner, change| {
                self.count_reserved(owner, change);
            },
        )?;
        self.count_reserved(owner, signed(mapped));
        self.stats.num_device_alloc += 1;
        self.record(Action::SegmentMap, owner.domain, address, mapped);
        Ok(mapped)
    }

    /// Unmaps `size` bytes at `address` and releases their memory, after the work queued on the segment's stream. The
    /// bytes must be whole pages that are all mapped. Linear in the pages.
    ///
    /// # Errors
    ///
    /// The driver's error; everything is then still mapped. If the driver refuses to release memory that is already
    /// unmapped, its handles become spare; that is not an error.
    pub(crate) fn unmap<M: Memory>(
        &mut self,
        memory: &mut M,
        id: SegmentId,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<(), DriverError> {
        let segment = self.segments.get(id);
        let (start, owner) = (segment.address, self.owner(segment.domain, segment.kind));
        debug_assert!(segment.is_expandable(), "others go back whole");
        debug_assert!(address.offset_from(start) + size <= segment.size);
        // Unlike cudaFree, unmapping does not wait for kernels that still use the pages.
        let stream = self.domains.domain(owner.domain).stream;
        memory
            .physical_mut()
            .driver_mut()
            .synchronize_stream(stream)?;
        let mark = self.record_leaving(Action::SegmentUnmap, owner.domain, address, size);
        let mut kept = Bytes::ZERO;
        let unmapped =
            memory
                .physical_mut()
                .unmap_pages(start, address, size, owner, &mut |_, change| {
                    kept += Bytes(change.unsigned_abs());
                });
        unmapped.inspect_err(|_| self.log.undo(mark))?;
        self.count_reserved(owner, -signed(size));
        self.count_reserved(owner, signed(kept));
        self.stats.num_device_free += 1;
        Ok(())
    }

    /// Tries again to release the memory that the driver refused to release.
    ///
    /// # Errors
    ///
    /// The driver's error; memory released before that stays released.
    pub(crate) fn release_spares<M: Memory>(&mut self, memory: &mut M) -> Result<(), DriverError> {
        memory
            .physical_mut()
            .release_spares(self.lane, &mut |owner, change| {
                self.count_reserved(owner, change)
            })
    }

    /// Returns the bytes of memory that the driver refused to release.
    pub(crate) fn spare_bytes<M: Memory>(&self, memory: &M) -> Bytes {
        memory.physical().spare_bytes(self.lane)
    }

    /// Returns whether a pool has a segment, even one without memory, or memory that the driver refused to release.
    pub(crate) fn has_segments(&self, pool: PoolIndex) -> bool {
        let pool = self.domains.pool(pool);
        pool.reserved_bytes.current() != 0 || pool.segment_count != 0
    }

    /// Returns the domains, except the default one, that have no segment, no block and no memory that the driver
    /// refused to release. O(n log n) for n domains, segments and blocks.
    pub(crate) fn domains_without_memory<M: Memory>(&self, memory: &M) -> Vec<DomainId> {
        let segments = self.segments.iter().map(|(_, segment)| segment.domain);
        let blocks = self.blocks.iter().map(|(_, block)| block.domain);
        let physical = memory.physical();
        let spares = physical.spare_domains(self.lane);
        let default = std::iter::once(DomainId::DEFAULT);
        let kept: BTreeSet<DomainId> = { segments.chain(blocks) }
            .chain(spares)
            .chain(default)
            .collect();
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
        debug_assert!(offset + size <= segment.size, "a block lies in its segment");
        let block = Block::new(segment.address + offset, size, domain, kind);
        self.blocks.insert(&block, id)
    }

    /// Records an event, if events are enabled.
    #[inline]
    pub(crate) fn record(
        &mut self,
        action: Action,
        domain: DomainId,
        address: DeviceAddress,
        size: Bytes,
    ) {
        // A free that completes at once is kept as that one event.
        if action != Action::FreeRequested {
            self.log.recent.push(action, domain, address, size);
        }
        if self.log.enabled {
            self.push_event(action, domain, address, size);
        }
    }

    /// Records a release and notifies the observer while the memory is still there: NCCL, for example, must
    /// deregister it first. Returns the mark that takes the event back if the driver refuses.
    fn record_leaving(
        &mut self,
        action: Action,
        domain: DomainId,
        address: DeviceAddress,
        size: Bytes,
    ) -> LogMark {
        let mark = self.log.mark();
        self.record(action, domain, address, size);
        self.log.notify();
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

    fn count_reserved(&mut self, owner: Owner, change: i64) {
        let Owner { domain, kind, .. } = owner;
        self.stats.change_reserved(kind, change);
        let pool = self.domains.domain(domain).pool;
        let reserved = &mut self.domains.pool_mut(pool).reserved_bytes;
        reserved.change(kind, change, &mut false);
        debug_assert!(reserved.current() >= 0, "a pool holds no less than nothing");
        debug_assert!(reserved.current() <= signed(self.stats.reserved()));
    }
}

#[cfg(test)]
mod tests;
