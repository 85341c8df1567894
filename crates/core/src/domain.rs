//! Pools, and the streams in them: they decide which requests may reuse which free memory.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::figures::gauge::Gauge;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// The number of a pool in [`Domains`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct PoolIndex(u32);

impl PoolIndex {
    /// The default pool: it serves all requests that are not routed to a private pool.
    pub(crate) const DEFAULT: PoolIndex = PoolIndex(0);
}

/// The number of a pair of pool and stream. Free memory is reused only within its domain: work in another stream
/// could still use it, and a private pool's addresses belong to its graphs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct DomainId(u16);

impl DomainId {
    /// The default stream of the default pool.
    pub(crate) const DEFAULT: DomainId = DomainId(0);

    /// The most domains at a time: a block's record has two bytes for the number. Tests have fewer.
    pub(crate) const COUNT_MAX: usize = if cfg!(test) { 1 << 10 } else { 1 << u16::BITS };

    fn at(index: usize) -> DomainId {
        DomainId(u16::try_from(index).expect("domains are counted"))
    }

    /// Returns the number as an index; strategies keep a vector with an entry for each domain.
    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    /// Returns the number.
    pub(crate) fn number(self) -> u16 {
        self.0
    }

    /// Returns the domain with the given number.
    pub(crate) fn of_number(number: u16) -> DomainId {
        DomainId(number)
    }
}

/// A pair of pool and stream. The domains of a pool are adjacent, ordered by stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Domain {
    pub(crate) pool: PoolIndex,
    pub(crate) stream: Stream,
}

/// The source of a private pool's segments in place of the driver: `torch.cuda.MemPool` with an allocator of its
/// own. It is dropped with the pool, after its last segment was released.
pub trait SegmentSource: Send {
    /// Returns new memory of at least `size` bytes for work in `stream`, or `None` if the source has too little.
    ///
    /// On a device with a limit (`is_limited`), the source should take no more than `size` from the device. The limit
    /// counts the returned memory, not other memory that the source holds.
    fn allocate(&mut self, size: Bytes, stream: Stream, is_limited: bool) -> Option<DeviceAddress>;

    /// Releases memory that [`SegmentSource::allocate`] returned for `size` bytes.
    fn release(&mut self, address: DeviceAddress, size: Bytes);

    /// Returns the name of the region that the memory belongs to, if any; error messages name it.
    fn region(&self) -> Option<&Arc<str>> {
        None
    }
}

/// A set of segments that serve only the requests routed to it.
pub(crate) struct Pool {
    pub(crate) id: MempoolId,
    /// Number of graphs, captures and `MemPool` objects that hold the pool. At zero its free segments may be
    /// released, and the pool ends with its last segment.
    pub(crate) use_count: u32,
    /// Reserved bytes.
    pub(crate) reserved_bytes: Gauge,
    /// Number of segments, including those that only reserve addresses.
    pub(crate) segment_count: usize,
    /// Whether requests of the default pool may use its free blocks before they fail.
    pub(crate) use_on_oom: bool,
    /// Whether its free segments are released like the default pool's, even while it is held.
    pub(crate) releases_free: bool,
    /// The name of the pool's region while that region is paused. Requests for the pool then fail, and the pool does
    /// not count against the limit.
    pub(crate) paused: Option<Arc<str>>,
    /// Whether its blocks are never split.
    no_split: bool,
    /// The source of its segments, if not the driver. It does not change while the pool has memory.
    source: Option<Box<dyn SegmentSource>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pool = f.debug_struct("Pool");
        pool.field("id", &self.id);
        pool.field("use_count", &self.use_count);
        pool.field("has_source", &self.source.is_some());
        pool.finish_non_exhaustive()
    }
}

impl Pool {
    fn new(id: MempoolId) -> Pool {
        Pool {
            id,
            use_count: 1,
            reserved_bytes: Gauge::default(),
            segment_count: 0,
            use_on_oom: false,
            releases_free: false,
            paused: None,
            no_split: false,
            source: None,
        }
    }
}

/// Every pool and every domain. Numbers of pools and domains that ended are reused, so they stay small.
#[derive(Debug)]
pub(crate) struct Domains {
    pools: Slots<Pool>,
    by_id: BTreeMap<MempoolId, PoolIndex>,
    domains: Slots<Domain>,
    by_pair: BTreeMap<Domain, DomainId>,
    /// The domain of the latest request: most requests come from the same one.
    recent: (Domain, DomainId),
    /// Whether blocks of any pool are not split. Without such a pool, a request skips the check.
    any_no_split: bool,
}

impl Domains {
    pub(crate) fn new() -> Domains {
        let default = Domain {
            pool: PoolIndex::DEFAULT,
            stream: Stream::DEFAULT,
        };
        Domains {
            pools: Slots::with_first(Pool::new(MempoolId::DEFAULT)),
            by_id: BTreeMap::from([(MempoolId::DEFAULT, PoolIndex::DEFAULT)]),
            domains: Slots::with_first(default),
            by_pair: BTreeMap::from([(default, DomainId::DEFAULT)]),
            recent: (default, DomainId::DEFAULT),
            any_no_split: false,
        }
    }

    /// Returns the domain of a pool and a stream, creating it if needed; `None` if there are
    /// [`DomainId::COUNT_MAX`] others. Constant time for the pair of the latest request, O(log n) for any other of
    /// n.
    #[inline]
    pub(crate) fn find_or_insert(&mut self, pool: PoolIndex, stream: Stream) -> Option<DomainId> {
        let pair = Domain { pool, stream };
        if self.recent.0 != pair {
            self.recent = (pair, self.find_or_insert_other(pair)?);
        }
        debug_assert_eq!(self.by_pair.get(&pair), Some(&self.recent.1));
        Some(self.recent.1)
    }

    fn find_or_insert_other(&mut self, pair: Domain) -> Option<DomainId> {
        match self.by_pair.get(&pair) {
            Some(&id) => Some(id),
            None => self.insert(pair),
        }
    }

    fn insert(&mut self, pair: Domain) -> Option<DomainId> {
        if self.by_pair.len() == DomainId::COUNT_MAX {
            return None;
        }
        let id = DomainId::at(self.domains.insert(pair));
        let other = self.by_pair.insert(pair, id);
        debug_assert_eq!(other, None, "a pair is one domain");
        debug_assert_eq!(self.domains.len(), self.by_pair.len());
        Some(id)
    }

    /// Returns every domain.
    pub(crate) fn iter(&self) -> impl Iterator<Item = DomainId> {
        self.domains.iter().map(|(index, _)| DomainId::at(index))
    }

    /// Returns the pool and stream of a domain.
    pub(crate) fn domain(&self, id: DomainId) -> Domain {
        *{ self.domains.get(id.index()) }.expect("a domain outlives the blocks in it")
    }

    /// Returns the domains of a pool ordered by stream, as PyTorch walks them. O(log n) for n domains of all pools,
    /// and linear in those returned.
    pub(crate) fn of_pool(&self, pool: PoolIndex) -> Vec<DomainId> {
        let [first, last] = [u64::MIN, u64::MAX].map(|stream| Domain {
            pool,
            stream: Stream(stream),
        });
        let in_pool = self.by_pair.range(first..=last);
        in_pool.map(|(_, &id)| id).collect()
    }

    /// Returns a pool by its number.
    pub(crate) fn pool(&self, index: PoolIndex) -> &Pool {
        { self.pools.get(index.0 as usize) }.expect("a pool outlives the segments in it")
    }

    /// Returns a pool by its number, mutable.
    pub(crate) fn pool_mut(&mut self, index: PoolIndex) -> &mut Pool {
        { self.pools.get_mut(index.0 as usize) }.expect("a pool outlives the segments in it")
    }

    /// Stops splitting the blocks of a pool from now on.
    pub(crate) fn set_no_split(&mut self, index: PoolIndex) {
        self.any_no_split = true;
        self.pool_mut(index).no_split = true;
    }

    /// Returns whether the blocks of a domain are never split.
    #[inline]
    pub(crate) fn is_no_split(&self, id: DomainId) -> bool {
        self.any_no_split && self.pool(self.domain(id).pool).no_split
    }

    /// Sets the source of a pool's segments, if the pool has no memory and no other source. Returns whether it was set.
    pub(crate) fn set_source(&mut self, index: PoolIndex, source: Box<dyn SegmentSource>) -> bool {
        let pool = self.pool_mut(index);
        let is_new = pool.source.is_none() && pool.reserved_bytes.current() == 0;
        if is_new {
            pool.source = Some(source);
        }
        is_new
    }

    /// Returns the source of a domain's segments, if it is not the driver.
    pub(crate) fn source_of(&mut self, id: DomainId) -> Option<&mut (dyn SegmentSource + 'static)> {
        let pool = self.domain(id).pool;
        self.pool_mut(pool).source.as_deref_mut()
    }

    /// Returns whether the segments of a domain come from another source than the driver.
    pub(crate) fn has_source(&self, id: DomainId) -> bool {
        self.pool(self.domain(id).pool).source.is_some()
    }

    /// Returns the name of the region that a pool's memory belongs to, if any.
    pub(crate) fn region(&self, pool: PoolIndex) -> Option<&Arc<str>> {
        self.pool(pool).source.as_ref()?.region()
    }

    /// Returns the bytes of paused pools. Linear in the number of pools.
    pub(crate) fn paused_bytes(&self) -> Bytes {
        self.paused_regions().values().copied().sum()
    }

    /// Returns the bytes of paused pools, by the name of the region. Linear in the number of pools.
    pub(crate) fn paused_regions(&self) -> BTreeMap<Arc<str>, Bytes> {
        let mut regions = BTreeMap::new();
        for (_, pool) in self.pools() {
            if let Some(region) = &pool.paused {
                let bytes = Bytes(pool.reserved_bytes.current().unsigned_abs());
                *regions.entry(Arc::clone(region)).or_default() += bytes;
            }
        }
        regions
    }

    /// Returns the number of the pool called `id`. O(log n) for n pools.
    pub(crate) fn find_pool(&self, id: MempoolId) -> Option<PoolIndex> {
        self.by_id.get(&id).copied()
    }

    /// Adds a pool with a use count of one. No other pool may have its name. O(log n) for n pools.
    pub(crate) fn insert_pool(&mut self, id: MempoolId) -> PoolIndex {
        let index = PoolIndex(number(self.pools.insert(Pool::new(id))));
        let other = self.by_id.insert(id, index);
        debug_assert_eq!(other, None);
        debug_assert_eq!(self.pools.len(), self.by_id.len());
        index
    }

    /// Removes a pool that has no segments left.
    pub(crate) fn remove_pool(&mut self, index: PoolIndex) {
        debug_assert_eq!(self.pool(index).reserved_bytes.current(), 0);
        debug_assert_ne!(index, PoolIndex::DEFAULT);
        debug_assert_eq!(self.pool(index).segment_count, 0);
        if let Some(pool) = self.pools.remove(index.0 as usize) {
            let removed = self.by_id.remove(&pool.id);
            debug_assert_eq!(removed, Some(index));
        }
        let domains = self.of_pool(index);
        self.remove(&domains);
    }

    /// Removes domains that have no memory.
    pub(crate) fn remove(&mut self, domains: &[DomainId]) {
        debug_assert!(!domains.contains(&DomainId::DEFAULT));
        self.recent = (self.domain(DomainId::DEFAULT), DomainId::DEFAULT);
        for id in domains {
            if let Some(domain) = self.domains.remove(id.index()) {
                let removed = self.by_pair.remove(&domain);
                debug_assert_eq!(removed, Some(*id));
            }
        }
        debug_assert_eq!(self.domains.len(), self.by_pair.len());
    }

    /// Returns every pool, mutable.
    pub(crate) fn pools_mut(&mut self) -> impl Iterator<Item = &mut Pool> {
        self.pools.iter_mut()
    }

    /// Returns every pool, the default one first.
    pub(crate) fn pools(&self) -> impl Iterator<Item = (PoolIndex, &Pool)> {
        let numbered = self.pools.iter();
        numbered.map(|(index, pool)| (PoolIndex(number(index)), pool))
    }
}

/// Values by number. Numbers are reused: there are no more of them than there were values at one time.
#[derive(Debug)]
struct Slots<T> {
    /// `None` if the value was removed.
    values: Vec<Option<T>>,
    /// The indices of the `None` values, each once; the latest is used first.
    vacant: Vec<usize>,
}

impl<T> Slots<T> {
    /// Returns slots with one value, whose number is 0.
    fn with_first(value: T) -> Slots<T> {
        Slots {
            values: vec![Some(value)],
            vacant: Vec::new(),
        }
    }

    /// Adds a value and returns its number. Constant time.
    fn insert(&mut self, value: T) -> usize {
        let index = self.vacant.pop().unwrap_or(self.values.len());
        debug_assert!(index <= self.values.len());
        match self.values.get_mut(index) {
            Some(vacant) => {
                debug_assert!(vacant.is_none(), "a slot has one value");
                *vacant = Some(value);
            }
            None => self.values.push(Some(value)),
        }
        index
    }

    /// Returns the number of values. Constant time.
    fn len(&self) -> usize {
        self.values.len() - self.vacant.len()
    }

    /// Removes a value, if it is there. Another value may then get its number. Constant time.
    fn remove(&mut self, index: usize) -> Option<T> {
        let value = self.values[index].take();
        if value.is_some() {
            self.vacant.push(index);
        }
        value
    }

    #[inline]
    fn get(&self, index: usize) -> Option<&T> {
        self.values[index].as_ref()
    }

    #[inline]
    fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.values[index].as_mut()
    }

    /// Returns every value, in order of the numbers.
    fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        let numbered = self.values.iter().enumerate();
        numbered.filter_map(|(index, value)| Some((index, value.as_ref()?)))
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().flatten()
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2^32 pools")
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use crate::check::CheckLevel;
    use crate::config::{Config, StrategyName};
    use crate::device::DeviceAllocator;
    use crate::error::AllocError;
    use crate::event::Action;
    use crate::recent_events::EventClock;
    use crate::snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
    use crate::strategy::test_driver::TestDriver;
    use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

    use super::{DomainId, Domains};

    const FULL: u64 = DomainId::COUNT_MAX as u64;

    /// An allocator on a device whose domains run out before its memory.
    fn allocator(strategy: &str) -> DeviceAllocator<TestDriver> {
        let config: Config = strategy.parse().unwrap();
        DeviceAllocator::new(TestDriver::new(Bytes(1 << 50)), 0, &config)
    }

    fn use_count(
        allocator: &DeviceAllocator<TestDriver>,
        pool: MempoolId,
    ) -> Result<u32, AllocError> {
        Ok(allocator.lane().pool(pool)?.use_count)
    }

    /// Creates streams for some work and destroys them, as programs do.
    fn use_once(allocator: &mut DeviceAllocator<TestDriver>, pool: MempoolId, streams: Range<u64>) {
        for stream in streams.map(Stream) {
            let block = allocator.allocate_in(pool, Bytes(1_000), stream).unwrap();
            assert_eq!(allocator.lane().allocation(block).unwrap().stream, stream);
            allocator.free(block).unwrap();
        }
    }

    #[test]
    fn a_pool_shows_who_holds_it() {
        let mut domains = Domains::new();
        let id = MempoolId(0, 7);
        let index = domains.insert_pool(id);
        let shown = format!("{:?}", domains.pool(index));
        assert!(
            shown.starts_with("Pool { id: MempoolId(0, 7), use_count: "),
            "{shown}"
        );
    }

    /// Strategies and figures keep an entry for every number.
    #[test]
    fn pools_and_domains_that_ended_leave_their_numbers_to_others() {
        let mut domains = Domains::new();
        let ids = [5, 3, 9].map(|number| MempoolId(0, number));
        let pools = ids.map(|id| domains.insert_pool(id));
        let of_first = [7, 1].map(|stream| domains.find_or_insert(pools[0], Stream(stream)));
        let of_last = domains.find_or_insert(pools[2], Stream(1)).unwrap();
        domains.remove_pool(pools[0]);
        domains.remove_pool(pools[1]);
        let found = ids.map(|id| domains.find_pool(id));
        assert_eq!(found, [None, None, Some(pools[2])]);
        let again = [MempoolId(0, 1), ids[0]].map(|id| domains.insert_pool(id));
        assert!(again.iter().all(|pool| pools[..2].contains(pool)));
        assert_eq!(domains.find_pool(ids[0]), Some(again[1]));
        let new = [2, 1].map(|stream| domains.find_or_insert(again[0], Stream(stream)));
        assert!(new.iter().all(|domain| of_first.contains(domain)));
        assert_eq!(domains.of_pool(pools[2]), [of_last]);
        assert_eq!(domains.iter().count(), 4);
    }

    #[test]
    fn the_domains_of_a_pool_are_in_the_order_of_their_streams() {
        let mut domains = Domains::new();
        let pools = [1, 2, 3].map(|number| domains.insert_pool(MempoolId(0, number)));
        let streams = [8, u64::MAX, 0, 3].map(Stream);
        for stream in streams {
            for pool in pools {
                domains.find_or_insert(pool, stream).unwrap();
            }
        }
        let of_pool = domains.of_pool(pools[1]).into_iter();
        let found: Vec<_> = of_pool.map(|id| domains.domain(id)).collect();
        assert!(found.iter().all(|domain| domain.pool == pools[1]));
        let found: Vec<u64> = found.iter().map(|domain| domain.stream.0).collect();
        assert_eq!(found, [0, 3, 8, u64::MAX]);
    }

    /// Making room for a domain removes pools that nothing holds, but not the domain's own pool.
    #[test]
    fn a_pool_that_nothing_holds_has_room_made_for_its_own_segment() {
        let mut allocator = allocator("caching");
        let mut blocks = (1..FULL).map(|stream| allocator.allocate(Bytes(1), Stream(stream)));
        let last = blocks.next_back().unwrap().unwrap();
        blocks.for_each(|block| assert!(block.is_ok()));
        allocator.free(last).unwrap();
        allocator.empty_cache(None).unwrap();
        let pool = MempoolId(0, 1);
        allocator.lane_mut().create_or_retain_pool(pool);
        allocator.lane_mut().release_pool(pool).unwrap();
        let segment = SegmentSnapshot {
            address: DeviceAddress::NULL,
            size: Bytes::mib(2),
            stream: Stream(FULL),
            pool,
            is_large: false,
            is_expandable: false,
            blocks: vec![BlockSnapshot {
                address: DeviceAddress::NULL,
                size: Bytes::mib(2),
                requested: Bytes(1),
                status: BlockStatus::Allocated,
            }],
        };
        assert_eq!(allocator.lane_mut().adopt(&segment), Ok(true));
        assert_eq!(use_count(&allocator, pool), Ok(1));
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
        let [is_new, is_known] = [MempoolId(0, 2), pool].map(|pool| {
            let segment = SegmentSnapshot {
                stream: Stream(FULL + 1),
                pool,
                ..segment.clone()
            };
            allocator.lane_mut().adopt(&segment)
        });
        assert_eq!(is_new, Err(AllocError::TooManyStreams));
        assert_eq!(is_known, Err(AllocError::TooManyStreams));
        assert!(allocator.lane().pool(MempoolId(0, 2)).is_err());
        assert_eq!(use_count(&allocator, pool), Ok(1));
    }

    /// Programs capture graphs and drop them without emptying the cache.
    #[test]
    fn pools_that_nothing_holds_make_room_for_others() {
        for strategy in ["direct", "caching", "slab", "tide"] {
            let mut allocator = allocator(strategy);
            for number in 1..=2 * FULL {
                let pool = MempoolId(0, number);
                allocator.lane_mut().create_or_retain_pool(pool);
                use_once(&mut allocator, pool, 0..1);
                allocator.lane_mut().release_pool(pool).unwrap();
            }
            allocator.allocate(Bytes(1), Stream(7)).unwrap();
            allocator
                .lane()
                .check_invariants(CheckLevel::Everything)
                .unwrap();
        }
    }

    #[test]
    fn streams_that_hold_nothing_make_room_for_others() {
        for strategy in StrategyName::ALL.map(StrategyName::as_str) {
            let mut allocator = allocator(strategy);
            let held = allocator.allocate(Bytes(1_000), Stream(3)).unwrap();
            let before = allocator.lane().allocation(held);
            use_once(&mut allocator, MempoolId::DEFAULT, 4..FULL + 9);
            assert_eq!(allocator.lane().allocation(held), before, "{strategy}");
            allocator
                .lane()
                .check_invariants(CheckLevel::Everything)
                .unwrap();
            allocator.free(held).unwrap();
            use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL + 9);
            allocator.empty_cache(None).unwrap();
            assert_eq!(allocator.stats().reserved(), Bytes::ZERO, "{strategy}");
        }
    }

    /// If some streams have no cached memory, the others keep theirs.
    #[test]
    fn nothing_goes_back_for_a_stream_while_another_has_nothing() {
        let mut allocator = allocator("caching");
        use_once(&mut allocator, MempoolId::DEFAULT, 0..7);
        allocator.empty_cache(None).unwrap();
        use_once(&mut allocator, MempoolId::DEFAULT, 7..FULL + 6);
        assert_eq!(allocator.stats().reserved(), Bytes::mib(2 * (FULL - 1)));
        use_once(&mut allocator, MempoolId::DEFAULT, FULL + 6..FULL + 7);
        assert_eq!(allocator.stats().reserved(), Bytes::mib(2));
    }

    #[test]
    fn nothing_goes_back_for_a_stream_during_a_capture() {
        let mut allocator = allocator("caching");
        use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL);
        allocator.lane_mut().capture_begin();
        let refused = allocator.allocate(Bytes(1), Stream(FULL));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator.lane_mut().capture_end().unwrap();
        use_once(&mut allocator, MempoolId::DEFAULT, FULL..FULL + 1);
    }

    /// The free memory of a pool in use serves no other stream and no other pool.
    #[test]
    fn streams_of_a_held_pool_make_room_when_it_is_let_go() {
        let mut allocator = allocator("caching");
        let pool = MempoolId(0, 1);
        use_once(&mut allocator, pool, 1..FULL);
        let refused = allocator.allocate(Bytes(1), Stream(1));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator.lane_mut().trim_pool(pool).unwrap();
        use_once(&mut allocator, pool, FULL..2 * FULL - 1);
        allocator.lane_mut().release_pool(pool).unwrap();
        use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL);
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
    }

    #[test]
    fn a_stream_whose_block_is_waited_for_makes_room_after_that() {
        let mut allocator = allocator("caching");
        let blocks: Vec<_> = (0..FULL)
            .map(|stream| allocator.allocate(Bytes(1), Stream(stream)).unwrap())
            .collect();
        allocator.driver().busy = true;
        allocator
            .lane_mut()
            .record_stream(blocks[7], Stream(8))
            .unwrap();
        allocator.free(blocks[7]).unwrap();
        let refused = allocator.allocate(Bytes(1), Stream(FULL));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator.driver().busy = false;
        allocator.allocate(Bytes(1), Stream(FULL)).unwrap();
        let refused = allocator.allocate(Bytes(1), Stream(7));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
    }

    /// Events name their streams by domain numbers that other streams have since.
    #[test]
    fn what_happened_in_streams_that_made_room_is_forgotten() {
        let mut allocator = allocator("caching");
        let clock = Arc::new(EventClock::default());
        clock.start();
        allocator.lane_mut().event_log().keep_recent(clock);
        use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL + 5);
        let past = allocator.lane().recent_past();
        let known = past
            .events
            .iter()
            .filter(|(_, event)| event.action == Action::Alloc);
        let streams: Vec<u64> = known.map(|(_, event)| event.stream.0).collect();
        assert_eq!(streams, (FULL..FULL + 5).collect::<Vec<_>>());
        assert_ne!(past.since, 0);
    }

    /// After a request that no device could serve, the next region of a `bfc` stream is large.
    #[test]
    fn a_stream_that_takes_the_place_of_another_starts_as_any_does() {
        let mut allocator = allocator("bfc");
        let refused = allocator.allocate(Bytes(2 * Bytes::SEGMENT_MAX.get()), Stream(1));
        assert!(refused.unwrap_err().is_out_of_memory());
        use_once(&mut allocator, MempoolId::DEFAULT, 2..FULL);
        let before = allocator.stats().reserved();
        use_once(&mut allocator, MempoolId::DEFAULT, FULL..FULL + 1);
        assert_eq!(allocator.stats().reserved() - before, Bytes::mib(2));
    }

    #[test]
    fn one_stream_too_many_is_refused_and_the_others_go_on() {
        let mut allocator = allocator("caching");
        let blocks: Vec<_> = (0..FULL)
            .map(|stream| allocator.allocate(Bytes(1), Stream(stream)).unwrap())
            .collect();
        let error = allocator.allocate(Bytes(1), Stream(FULL)).unwrap_err();
        assert_eq!(error, AllocError::TooManyStreams);
        let pool = MempoolId(0, 1);
        let error = allocator.allocate_in(pool, Bytes(1), Stream(0));
        assert_eq!(error, Err(AllocError::TooManyStreams));
        let absent = Err(AllocError::NoSuchPool { pool });
        assert_eq!(use_count(&allocator, pool), absent);
        let block = allocator.allocate(Bytes(1), Stream(FULL - 1)).unwrap();
        allocator.free(block).unwrap();
        allocator.free(blocks[7]).unwrap();
        allocator.allocate(Bytes(1), Stream(FULL)).unwrap();
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
    }
}
