//! The table of blocks: every part of a segment that a strategy tracks.
#![expect(
    clippy::inline_always,
    reason = "a record passed to a call goes through memory, and a call costs a request a fortieth of its time"
)]

use std::num::NonZeroU32;

use crate::domain::DomainId;
use crate::number_table::{NumberTable, SearchHint, hash_of};
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress};

/// The number of a segment in the [`SegmentTable`](crate::segment::SegmentTable).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SegmentId(pub(crate) u32);

impl SegmentId {
    /// No segment.
    pub(crate) const NONE: SegmentId = SegmentId(u32::MAX);

    /// Returns the number as an index, for strategies that keep something for each segment.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The number of a block in the [`BlockTable`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct BlockId(NonZeroU32);

impl BlockId {
    /// Returns the number as an index, for strategies that keep something for each block.
    pub(crate) fn index(self) -> usize {
        self.0.get() as usize
    }
}

/// The state of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BlockState {
    /// The strategy may allocate it.
    Free,
    /// Freed, and not merged yet: only a request of its size may have it. Its pages count as in use.
    Recent,
    /// The program holds it.
    Allocated,
    /// The program freed it, but a stream that used it has not passed its event yet.
    Pending,
    /// Addresses of an expandable segment without memory.
    Unmapped,
}

/// A range of device addresses inside one segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) address: DeviceAddress,
    pub(crate) size: Bytes,
    /// The requested size; in a block that is not active, the last holder's request.
    pub(crate) requested: Bytes,
    /// The pool and stream that may use the block.
    pub(crate) domain: DomainId,
    /// Which of PyTorch's two size pools the block counts for: the same as its segment's.
    pub(crate) kind: SizeKind,
    pub(crate) state: BlockState,
    /// Whether streams besides its own have used it since it was allocated.
    pub(crate) used_elsewhere: bool,
    /// The block that ends where this one starts, in strategies that link the blocks of a segment.
    pub(crate) previous: Option<BlockId>,
    /// The block that starts where this one ends, likewise.
    pub(crate) next: Option<BlockId>,
}

impl Block {
    /// Returns a free block that was never allocated, linked to no other.
    pub(crate) fn new(
        address: DeviceAddress,
        size: Bytes,
        domain: DomainId,
        kind: SizeKind,
    ) -> Block {
        Block {
            address,
            size,
            requested: Bytes::ZERO,
            domain,
            kind,
            state: BlockState::Free,
            used_elsewhere: false,
            previous: None,
            next: None,
        }
    }

    /// Returns the address after the block's last byte.
    pub(crate) fn end(&self) -> DeviceAddress {
        self.address + self.size
    }

    /// Returns whether the block shares its segment with others.
    pub(crate) fn is_split(&self) -> bool {
        self.previous.is_some() || self.next.is_some()
    }

    /// Returns whether the program, or work it queued, may still access the block.
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.state, BlockState::Allocated | BlockState::Pending)
    }
}

/// How the table stores a [`Block`] without its state, in half a cache line.
///
/// A job touches its blocks in no order, from a cache that holds only some of them. Fitting twice as many is worth
/// the few instructions of packing. No segment has 2^48 bytes ([`Bytes::SEGMENT_MAX`]) and no device has 2^16
/// domains, so one word holds a size and a domain.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Record {
    address: DeviceAddress,
    /// Zero in a record that holds no block. The bits above the size are the flags.
    size_and_flags: u64,
    requested_and_domain: u64,
    previous: Option<BlockId>,
    next: Option<BlockId>,
}

/// The bits of a size in a word of a record.
const SIZE_BITS: u32 = 48;
const SIZE_MASK: u64 = (1 << SIZE_BITS) - 1;
/// The flags.
const IS_LARGE: u64 = 1 << SIZE_BITS;
const USED_ELSEWHERE: u64 = 1 << (SIZE_BITS + 1);
/// Whether the block can be found by its address.
const IS_LISTED: u64 = 1 << (SIZE_BITS + 2);

impl Record {
    /// The record of a removed block.
    const VACANT: Record = Record {
        address: DeviceAddress::NULL,
        size_and_flags: 0,
        requested_and_domain: 0,
        previous: None,
        next: None,
    };

    #[inline(always)]
    fn pack(block: &Block) -> Record {
        debug_assert!(!block.size.is_zero() && block.size.get() <= SIZE_MASK);
        debug_assert!(block.requested.get() <= SIZE_MASK);
        let is_large = u64::from(block.kind == SizeKind::Large) * IS_LARGE;
        let used_elsewhere = u64::from(block.used_elsewhere) * USED_ELSEWHERE;
        Record {
            address: block.address,
            size_and_flags: block.size.get() | is_large | used_elsewhere,
            requested_and_domain: block.requested.get()
                | u64::from(block.domain.number()) << SIZE_BITS,
            previous: block.previous,
            next: block.next,
        }
    }

    #[inline(always)]
    fn unpack(&self, state: BlockState) -> Block {
        let has = |flag| self.size_and_flags & flag != 0;
        Block {
            address: self.address,
            size: self.size(),
            requested: Bytes(self.requested_and_domain & SIZE_MASK),
            domain: DomainId::of_number((self.requested_and_domain >> SIZE_BITS) as u16),
            kind: if has(IS_LARGE) {
                SizeKind::Large
            } else {
                SizeKind::Small
            },
            state,
            used_elsewhere: has(USED_ELSEWHERE),
            previous: self.previous,
            next: self.next,
        }
    }

    #[inline(always)]
    fn size(&self) -> Bytes {
        Bytes(self.size_and_flags & SIZE_MASK)
    }

    /// Replaces the bits of the first word that `mask` selects.
    #[inline(always)]
    fn set(&mut self, mask: u64, bits: u64) {
        self.size_and_flags = self.size_and_flags & !mask | bits;
    }
}

/// Every block, by number and by address.
///
/// Numbers are reused, last freed first: the newest record is likeliest to be in cache. The map from addresses
/// compares keys through the table.
#[derive(Debug)]
pub(crate) struct BlockTable {
    /// Record 0 is never used, so that `Option<BlockId>` takes four bytes.
    records: Vec<Record>,
    /// The state of each block. It is apart from its record, because a look at a block's neighbours often needs
    /// only their states. A cache that holds few of the records holds all of these.
    states: Vec<BlockState>,
    /// The segment of each block. It is apart from its record, because a hit does not need it.
    segments: Vec<SegmentId>,
    /// A number that the strategy sets for each block: an order, a size class, an age.
    marks: Vec<u64>,
    /// Records without a block.
    vacant: Vec<BlockId>,
    by_address: NumberTable,
    lists_when_handed_out: bool,
}

impl BlockTable {
    pub(crate) fn new() -> BlockTable {
        BlockTable {
            records: vec![Record::VACANT],
            states: vec![BlockState::Unmapped],
            segments: vec![SegmentId::NONE],
            marks: Vec::new(),
            vacant: Vec::new(),
            by_address: NumberTable::new(),
            lists_when_handed_out: false,
        }
    }

    /// Puts blocks into the map from addresses only when they are allocated. The rest of a split block is often
    /// merged again before it is looked up by address. A strategy that never looks up free blocks need not pay for
    /// that.
    pub(crate) fn list_when_handed_out(&mut self) {
        self.lists_when_handed_out = true;
    }

    /// Stores in `hint` where [`BlockTable::find`] begins, now and whenever that changes.
    pub(crate) fn keep_search_hint(&mut self, hint: &'static SearchHint) {
        self.by_address.keep_hint(hint);
    }

    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.records.len() - 1 - self.vacant.len()
    }

    /// Returns a block. Constant time.
    #[inline(always)]
    pub(crate) fn get(&self, id: BlockId) -> Block {
        self.records[id.index()].unpack(self.state(id))
    }

    /// Returns the state of a block. Constant time.
    #[inline(always)]
    pub(crate) fn state(&self, id: BlockId) -> BlockState {
        // If the caller ignores the state, the compiler removes an access that cannot panic.
        let state = self.states.get(id.index()).copied();
        state.unwrap_or(BlockState::Unmapped)
    }

    /// Returns the segment that a block lies in. Constant time.
    #[inline(always)]
    pub(crate) fn segment(&self, id: BlockId) -> SegmentId {
        self.segments[id.index()]
    }

    /// Returns the number that [`BlockTable::set_mark`] set, or zero if it was never set. Constant time.
    #[inline(always)]
    pub(crate) fn mark(&self, id: BlockId) -> u64 {
        self.marks.get(id.index()).copied().unwrap_or(0)
    }

    /// Sets the strategy's number for a block. Constant time.
    #[inline(always)]
    pub(crate) fn set_mark(&mut self, id: BlockId, mark: u64) {
        match self.marks.get_mut(id.index()) {
            Some(place) => *place = mark,
            None if mark == 0 => {}
            None => self.insert_mark(id, mark),
        }
    }

    #[cold]
    fn insert_mark(&mut self, id: BlockId, mark: u64) {
        debug_assert!(self.marks.len() < self.records.len());
        self.marks.resize(self.records.len(), 0);
        self.marks[id.index()] = mark;
    }

    /// Sets the state of a block.
    #[inline(always)]
    pub(crate) fn set_state(&mut self, id: BlockId, state: BlockState) {
        debug_assert!(
            !self.records[id.index()].size().is_zero(),
            "a vacant record has no state"
        );
        self.states[id.index()] = state;
    }

    /// Makes the allocated block at `address` free, and returns it as it was before. Constant time.
    #[inline(always)]
    pub(crate) fn free_held(&mut self, id: BlockId) -> Option<Block> {
        let state = &mut self.states[id.index()];
        if *state != BlockState::Allocated {
            return None;
        }
        *state = BlockState::Free;
        Some(self.records[id.index()].unpack(BlockState::Allocated))
    }

    /// Makes a block free, and returns it as it was before. Constant time.
    pub(crate) fn make_free(&mut self, id: BlockId) -> Block {
        let block = self.get(id);
        debug_assert!(block.is_active(), "only what is in use becomes free");
        self.set_state(id, BlockState::Free);
        block
    }

    /// Sets whether streams other than its own use a block.
    pub(crate) fn set_used_elsewhere(&mut self, id: BlockId, used_elsewhere: bool) {
        let bits = u64::from(used_elsewhere) * USED_ELSEWHERE;
        self.records[id.index()].set(USED_ELSEWHERE, bits);
    }

    /// Marks a block as allocated with the requested size, makes it findable by its address, and returns it.
    /// Constant time.
    #[inline(always)]
    pub(crate) fn hand_out(&mut self, id: BlockId, requested: Bytes) -> Block {
        debug_assert!(requested.get() <= SIZE_MASK);
        debug_assert!(
            matches!(self.state(id), BlockState::Free | BlockState::Allocated),
            "what waits, has no memory or is listed elsewhere is not handed out"
        );
        let record = &mut self.records[id.index()];
        let is_listed = record.size_and_flags & IS_LISTED != 0;
        record.set(IS_LISTED, IS_LISTED);
        let domain = record.requested_and_domain & !SIZE_MASK;
        record.requested_and_domain = domain | requested.get();
        let block = record.unpack(BlockState::Allocated);
        self.states[id.index()] = BlockState::Allocated;
        if !is_listed {
            self.put_in_map(id, block.address);
        }
        block
    }

    /// Inserts a block and returns its number. Constant time.
    #[inline(always)]
    pub(crate) fn insert(&mut self, block: &Block, segment: SegmentId) -> BlockId {
        self.insert_record(Record::pack(block), block.state, segment, 0)
    }

    #[inline(always)]
    fn insert_record(
        &mut self,
        mut record: Record,
        state: BlockState,
        segment: SegmentId,
        mark: u64,
    ) -> BlockId {
        let lists = !self.lists_when_handed_out;
        record.set(IS_LISTED, u64::from(lists) * IS_LISTED);
        let id = match self.vacant.pop() {
            Some(id) => {
                debug_assert!(self.records[id.index()].size().is_zero());
                self.records[id.index()] = record;
                self.states[id.index()] = state;
                self.segments[id.index()] = segment;
                id
            }
            None => self.push(record, state, segment),
        };
        self.set_mark(id, mark);
        if lists {
            self.put_in_map(id, record.address);
        }
        id
    }

    #[cold]
    fn push(&mut self, record: Record, state: BlockState, segment: SegmentId) -> BlockId {
        let number = u32::try_from(self.records.len())
            .ok()
            .and_then(NonZeroU32::new);
        debug_assert_eq!(self.records.len(), self.states.len());
        debug_assert_eq!(self.records.len(), self.segments.len());
        self.records.push(record);
        self.states.push(state);
        self.segments.push(segment);
        BlockId(number.expect("fewer than 2^32 blocks: their records alone are 128 GiB"))
    }

    #[inline(always)]
    fn put_in_map(&mut self, id: BlockId, address: DeviceAddress) {
        debug_assert!(self.find(address).is_none(), "two blocks at {address}");
        let records = &self.records;
        let hash_of_number = |number| hash_of(records[BlockId(number).index()].address.get());
        self.by_address
            .insert(hash_of(address.get()), id.0, hash_of_number);
    }

    /// Removes a block. Its number may then be reused. Constant time.
    #[inline(always)]
    pub(crate) fn remove(&mut self, id: BlockId) {
        let record = &mut self.records[id.index()];
        debug_assert!(!record.size().is_zero(), "a block is removed once");
        let is_listed = record.size_and_flags & IS_LISTED != 0;
        record.size_and_flags = 0;
        if is_listed {
            let hash = hash_of(record.address.get());
            self.by_address.remove(hash, id.0);
        }
        self.vacant.push(id);
        debug_assert!(self.vacant.len() < self.records.len());
    }

    /// Returns the block that starts at `address`, if it is listed; every allocated block is. Constant time.
    #[inline]
    pub(crate) fn find(&self, address: DeviceAddress) -> Option<BlockId> {
        let is_it = |number| self.records[BlockId(number).index()].address == address;
        self.by_address
            .find(hash_of(address.get()), is_it)
            .map(BlockId)
    }

    /// Returns every block, in the order of their numbers. Linear time.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, Block)> {
        let numbered = (1..).filter_map(NonZeroU32::new).zip(&self.records[1..]);
        let present = numbered.filter(|(_, record)| !record.size().is_zero());
        present.map(|(number, _)| (BlockId(number), self.get(BlockId(number))))
    }

    /// Returns every block with its segment, segment by segment, sorted by address. O(n log n).
    pub(crate) fn by_segment(&self) -> Vec<(SegmentId, Block)> {
        let blocks = self.iter().map(|(id, block)| (self.segment(id), block));
        let mut blocks: Vec<(SegmentId, Block)> = blocks.collect();
        blocks.sort_unstable_by_key(|&(segment, block)| (segment, block.address));
        blocks
    }

    /// Splits a block after its first `size` bytes. Returns the number of the new second part, which has the state
    /// and the mark of the first. Constant time.
    #[inline(always)]
    pub(crate) fn split(&mut self, id: BlockId, size: Bytes) -> BlockId {
        let first = self.records[id.index()];
        debug_assert!(!size.is_zero() && size < first.size());
        let rest = Record {
            address: first.address + size,
            size_and_flags: first.size_and_flags - size.get(),
            previous: Some(id),
            ..first
        };
        let rest = self.insert_record(rest, self.state(id), self.segment(id), self.mark(id));
        let record = &mut self.records[id.index()];
        record.set(SIZE_MASK, size.get());
        record.next = Some(rest);
        if let Some(next) = first.next {
            debug_assert_eq!(self.records[next.index()].previous, Some(id));
            self.records[next.index()].previous = Some(rest);
        }
        self.check_neighbours(id);
        self.check_neighbours(rest);
        rest
    }

    /// Merges a block with the next one, whose number becomes invalid. Constant time.
    ///
    /// # Panics
    ///
    /// If there is no next block.
    #[inline(always)]
    pub(crate) fn merge_with_next(&mut self, id: BlockId) {
        let next = self.records[id.index()].next;
        let next = next.expect("a block to merge with");
        let second = self.records[next.index()];
        self.remove(next);
        let record = &mut self.records[id.index()];
        debug_assert_eq!(record.address + record.size(), second.address);
        record.size_and_flags += second.size().get();
        record.next = second.next;
        if let Some(after) = second.next {
            debug_assert_eq!(self.records[after.index()].previous, Some(next));
            self.records[after.index()].previous = Some(id);
        }
        self.check_neighbours(id);
    }

    /// Checks that a block and those beside it are neighbours of each other, in one segment.
    #[inline(always)]
    fn check_neighbours(&self, id: BlockId) {
        if !cfg!(debug_assertions) {
            return;
        }
        let record = &self.records[id.index()];
        if let Some(previous) = record.previous {
            let before = &self.records[previous.index()];
            debug_assert_eq!(before.next, Some(id));
            debug_assert_eq!(before.address + before.size(), record.address);
            debug_assert_eq!(self.segment(previous), self.segment(id));
        }
        if let Some(next) = record.next {
            let after = &self.records[next.index()];
            debug_assert_eq!(after.previous, Some(id));
            debug_assert_eq!(record.address + record.size(), after.address);
            debug_assert_eq!(self.segment(next), self.segment(id));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a block number for tests that have no table.
    pub(crate) fn block_id(number: u32) -> BlockId {
        BlockId(NonZeroU32::new(number).unwrap())
    }

    #[test]
    fn a_record_is_half_a_cache_line() {
        assert_eq!(size_of::<Record>(), 32);
        assert_eq!(align_of::<Record>(), 32);
    }

    proptest! {
        /// Every field, also at its limits; setting one changes no other.
        #[test]
        fn a_record_keeps_what_a_block_says(
            address in any::<u64>(),
            size in prop_oneof![1..=SIZE_MASK, Just(1), Just(SIZE_MASK)],
            requested in prop_oneof![0..=SIZE_MASK, Just(0), Just(SIZE_MASK)],
            domain in prop_oneof![any::<u16>(), Just(u16::MAX)],
            (is_large, used_elsewhere, state) in (any::<bool>(), any::<bool>(), 0..5_usize),
            (previous, next) in (any::<u32>(), any::<u32>()),
            other_state in 0..5_usize,
        ) {
            const STATES: [BlockState; 5] =
                [BlockState::Free, BlockState::Recent, BlockState::Allocated, BlockState::Pending, BlockState::Unmapped];
            let id = |number| NonZeroU32::new(number).map(BlockId);
            let mut block = Block {
                address: DeviceAddress(address),
                size: Bytes(size),
                requested: Bytes(requested),
                domain: DomainId::of_number(domain),
                kind: if is_large { SizeKind::Large } else { SizeKind::Small },
                state: STATES[state],
                used_elsewhere,
                previous: id(previous),
                next: id(next),
            };
            let mut table = BlockTable::new();
            let same = |table: &BlockTable, id, block: &Block| {
                format!("{:?}", table.get(id)) == format!("{block:?}")
            };
            let place = table.insert(&block, SegmentId::NONE);
            prop_assert!(same(&table, place, &block));
            table.set_state(place, STATES[other_state]);
            block.state = STATES[other_state];
            prop_assert!(same(&table, place, &block));
            table.set_used_elsewhere(place, !used_elsewhere);
            block.used_elsewhere = !used_elsewhere;
            prop_assert!(same(&table, place, &block));
            table.set_state(place, BlockState::Free);
            block.requested = Bytes(size / 2);
            block.state = BlockState::Allocated;
            let returned = table.hand_out(place, block.requested);
            prop_assert_eq!(format!("{returned:?}"), format!("{block:?}"));
            prop_assert!(same(&table, place, &block));
            prop_assert_eq!(table.find(block.address), Some(place));
            let held = table.free_held(place).unwrap();
            prop_assert_eq!(format!("{held:?}"), format!("{block:?}"));
            block.state = BlockState::Free;
            prop_assert!(same(&table, place, &block));
            prop_assert!(table.free_held(place).is_none(), "nobody holds it any more");
        }
    }

    #[test]
    fn a_number_that_is_used_again_has_neither_mark_nor_state() {
        let mut table = BlockTable::new();
        let block = |address| {
            let address = DeviceAddress(address);
            Block::new(address, Bytes(4096), DomainId::DEFAULT, SizeKind::Small)
        };
        let first = table.insert(&block(1 << 20), SegmentId::NONE);
        table.set_mark(first, 7);
        table.set_state(first, BlockState::Pending);
        table.remove(first);
        let again = table.insert(&block(1 << 21), SegmentId::NONE);
        assert_eq!((again, table.mark(again)), (first, 0));
        assert_eq!(table.state(again), BlockState::Free);
        let other = table.insert(&block(1 << 22), SegmentId::NONE);
        table.set_mark(other, 9);
        table.set_state(other, BlockState::Allocated);
        table.remove(other);
        let rest = table.split(again, Bytes(512));
        assert_eq!((rest, table.mark(rest)), (other, 0));
        assert_eq!(table.state(rest), BlockState::Free);
    }

    #[test]
    fn marks_are_zero_until_one_is_set_and_go_with_a_split() {
        let mut table = BlockTable::new();
        let block = Block::new(
            DeviceAddress(512),
            Bytes(4096),
            DomainId::DEFAULT,
            SizeKind::Small,
        );
        let first = table.insert(&block, SegmentId::NONE);
        table.set_mark(first, 0);
        assert_eq!(table.mark(first), 0);
        let second = table.split(first, Bytes(1024));
        assert_eq!(table.mark(second), 0);
        table.set_mark(second, 7);
        let third = table.split(second, Bytes(1024));
        assert_eq!(
            (table.mark(first), table.mark(second), table.mark(third)),
            (0, 7, 7)
        );
    }
}
