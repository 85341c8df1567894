//! Who may reuse whose memory: pools, and the streams in them.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use crate::figures::gauge::Gauge;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

/// The number of a pool in [`Domains`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct PoolIndex(u32);

impl PoolIndex {
    /// The pool of everything that no private pool asked for.
    pub(crate) const DEFAULT: PoolIndex = PoolIndex(0);
}

/// The number of a pair of pool and stream. Free memory is reused only within its domain: another
/// stream could still be working on it, and a private pool's addresses belong to its graphs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct DomainId(u16);

impl DomainId {
    /// The default pool's default stream.
    pub(crate) const DEFAULT: DomainId = DomainId(0);

    /// There are at most so many at a time: the record of a block has two bytes for the number. Tests have
    /// fewer.
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

    /// Returns the domain that has a number.
    pub(crate) fn of_number(number: u16) -> DomainId {
        DomainId(number)
    }
}

/// A pair of pool and stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Domain {
    pub(crate) pool: PoolIndex,
    pub(crate) stream: Stream,
}

/// Where the segments of a private pool come from in place of the driver: `torch.cuda.MemPool` with an
/// allocator of its own. It ends with the pool, which is after the last segment went back.
pub trait SegmentSource: Send {
    /// Returns new memory of at least `size` bytes for work in `stream`, or `None` where there is none.
    ///
    /// A device with a limit (`is_limited`) is to lose no more than that: the limit counts what is handed
    /// out, not what the source has besides.
    fn allocate(&mut self, size: Bytes, stream: Stream, is_limited: bool) -> Option<DeviceAddress>;

    /// Takes memory back that [`SegmentSource::allocate`] returned for `size` bytes.
    fn release(&mut self, address: DeviceAddress, size: Bytes);
}

/// A set of segments that serve only the requests routed to it.
pub(crate) struct Pool {
    pub(crate) id: MempoolId,
    /// Graphs, captures and `MemPool` objects that hold the pool; at zero its free segments may go
    /// back, and the pool ends with its last segment.
    pub(crate) use_count: u32,
    /// Bytes held from the driver.
    pub(crate) reserved_bytes: Gauge,
    /// Whether other pools' requests may be served from here before they fail.
    pub(crate) use_on_oom: bool,
    /// Whether its free segments go back as the default pool's do, though it is held.
    pub(crate) gives_back: bool,
    /// The name of the region whose memory this is, while that memory is away. Nothing is handed out or
    /// given back then, and the limit does not count what the pool has.
    pub(crate) paused: Option<Arc<str>>,
    /// Whether blocks are handed out whole.
    no_split: bool,
    /// Where its segments come from, if not from the driver; does not change once it has any.
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
            use_on_oom: false,
            gives_back: false,
            paused: None,
            no_split: false,
            source: None,
        }
    }
}

/// Every pool and every domain, with numbers that stay small: those of pools and domains that ended are
/// used again.
#[derive(Debug)]
pub(crate) struct Domains {
    pools: Vec<Option<Pool>>,
    /// `None` where the domain ended.
    domains: Vec<Option<Domain>>,
    by_pair: HashMap<Domain, DomainId>,
    /// The domain of the latest request: most requests come from the same one.
    recent: (Domain, DomainId),
    /// Whether any pool's blocks were ever handed out whole, so that jobs without need not ask.
    any_no_split: bool,
}

impl Domains {
    pub(crate) fn new() -> Domains {
        let default = Domain {
            pool: PoolIndex::DEFAULT,
            stream: Stream::DEFAULT,
        };
        Domains {
            pools: vec![Some(Pool::new(MempoolId::DEFAULT))],
            domains: vec![Some(default)],
            by_pair: HashMap::from([(default, DomainId::DEFAULT)]),
            recent: (default, DomainId::DEFAULT),
            any_no_split: false,
        }
    }

    /// Returns the domain of a pool and a stream, a new one if need be, or `None` where there are
    /// [`DomainId::COUNT_MAX`] others. Constant time.
    #[inline]
    pub(crate) fn find_or_insert(&mut self, pool: PoolIndex, stream: Stream) -> Option<DomainId> {
        let pair = Domain { pool, stream };
        if self.recent.0 != pair {
            self.recent = (pair, self.find_or_insert_other(pair)?);
        }
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
        let index = first_vacant(&mut self.domains);
        self.domains[index] = Some(pair);
        let id = DomainId::at(index);
        self.by_pair.insert(pair, id);
        Some(id)
    }

    /// Returns every domain that there is.
    pub(crate) fn iter(&self) -> impl Iterator<Item = DomainId> {
        let numbered = self.domains.iter().enumerate();
        numbered.filter_map(|(index, domain)| domain.map(|_| DomainId::at(index)))
    }

    /// Returns the pool and stream of a domain.
    pub(crate) fn domain(&self, id: DomainId) -> Domain {
        self.domains[id.index()].expect("a domain outlives the blocks in it")
    }

    /// Returns the domains of a pool in the order of their streams, as PyTorch walks them.
    pub(crate) fn of_pool(&self, pool: PoolIndex) -> Vec<DomainId> {
        let in_pool = |&(_, domain): &(usize, &Option<Domain>)| {
            domain.is_some_and(|domain| domain.pool == pool)
        };
        let mut ids: Vec<DomainId> = (self.domains.iter().enumerate().filter(in_pool))
            .map(|(index, _)| DomainId::at(index))
            .collect();
        ids.sort_unstable_by_key(|&id| self.domain(id).stream);
        ids
    }

    /// Returns a pool by its number.
    pub(crate) fn pool(&self, index: PoolIndex) -> &Pool {
        self.pools[index.0 as usize]
            .as_ref()
            .expect("a pool outlives the segments in it")
    }

    /// Returns a pool by its number, to be changed.
    pub(crate) fn pool_mut(&mut self, index: PoolIndex) -> &mut Pool {
        self.pools[index.0 as usize]
            .as_mut()
            .expect("a pool outlives the segments in it")
    }

    /// Hands the blocks of a pool out whole from now on.
    pub(crate) fn set_no_split(&mut self, index: PoolIndex) {
        self.any_no_split = true;
        self.pool_mut(index).no_split = true;
    }

    /// Returns whether the blocks of a domain are handed out whole.
    #[inline]
    pub(crate) fn is_no_split(&self, id: DomainId) -> bool {
        self.any_no_split && self.pool(self.domain(id).pool).no_split
    }

    /// Lets the segments of a pool come from `source`, if it has none yet and no other source; returns
    /// whether it does.
    pub(crate) fn set_source(&mut self, index: PoolIndex, source: Box<dyn SegmentSource>) -> bool {
        let pool = self.pool_mut(index);
        let is_new = pool.source.is_none() && pool.reserved_bytes.current() == 0;
        if is_new {
            pool.source = Some(source);
        }
        is_new
    }

    /// Returns where the segments of a domain come from, if not from the driver.
    pub(crate) fn source_of(&mut self, id: DomainId) -> Option<&mut (dyn SegmentSource + 'static)> {
        let pool = self.domain(id).pool;
        self.pool_mut(pool).source.as_deref_mut()
    }

    /// Returns whether the segments of a domain come from elsewhere than the driver.
    pub(crate) fn has_source(&self, id: DomainId) -> bool {
        self.pool(self.domain(id).pool).source.is_some()
    }

    /// Returns the bytes of pools whose memory is away. Linear in the number of pools.
    pub(crate) fn paused_bytes(&self) -> Bytes {
        self.paused_regions().values().copied().sum()
    }

    /// Returns the bytes of pools whose memory is away, by the name of the region. Linear in the number of
    /// pools.
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

    /// Returns the number of the pool called `id`. Linear in the number of pools.
    pub(crate) fn find_pool(&self, id: MempoolId) -> Option<PoolIndex> {
        self.pools()
            .find(|(_, pool)| pool.id == id)
            .map(|(index, _)| index)
    }

    /// Adds a pool that is held once.
    pub(crate) fn insert_pool(&mut self, id: MempoolId) -> PoolIndex {
        let index = first_vacant(&mut self.pools);
        self.pools[index] = Some(Pool::new(id));
        PoolIndex(number(index))
    }

    /// Ends a pool that has no segments left.
    pub(crate) fn remove_pool(&mut self, index: PoolIndex) {
        debug_assert_eq!(self.pool(index).reserved_bytes.current(), 0);
        debug_assert_ne!(index, PoolIndex::DEFAULT);
        self.pools[index.0 as usize] = None;
        let domains = self.of_pool(index);
        self.remove(&domains);
    }

    /// Ends domains that have no memory.
    pub(crate) fn remove(&mut self, domains: &[DomainId]) {
        debug_assert!(!domains.contains(&DomainId::DEFAULT));
        self.recent = (self.domain(DomainId::DEFAULT), DomainId::DEFAULT);
        for id in domains {
            if let Some(domain) = self.domains[id.index()].take() {
                self.by_pair.remove(&domain);
            }
        }
    }

    /// Returns every pool, to be changed.
    pub(crate) fn pools_mut(&mut self) -> impl Iterator<Item = &mut Pool> {
        self.pools.iter_mut().flatten()
    }

    /// Returns every pool, the default one first.
    pub(crate) fn pools(&self) -> impl Iterator<Item = (PoolIndex, &Pool)> {
        let numbered = self.pools.iter().enumerate();
        numbered.filter_map(|(index, pool)| Some((PoolIndex(number(index)), pool.as_ref()?)))
    }
}

fn first_vacant<T>(slots: &mut Vec<Option<T>>) -> usize {
    slots.iter().position(Option::is_none).unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    })
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2^32 pools")
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use crate::allocator::DeviceAllocator;
    use crate::check::CheckLevel;
    use crate::config::Config;
    use crate::error::AllocError;
    use crate::event::Action;
    use crate::recent_events::EventClock;
    use crate::strategy::test_driver::TestDriver;
    use crate::units::{Bytes, MempoolId, Stream};

    use super::DomainId;

    const FULL: u64 = DomainId::COUNT_MAX as u64;

    /// An allocator on a device that runs out of domains first.
    fn allocator(strategy: &str) -> DeviceAllocator<TestDriver> {
        let config: Config = strategy.parse().unwrap();
        DeviceAllocator::new(TestDriver::new(Bytes(1 << 50)), 0, &config)
    }

    /// As programs make streams for some work and destroy them.
    fn use_once(allocator: &mut DeviceAllocator<TestDriver>, pool: MempoolId, streams: Range<u64>) {
        for stream in streams.map(Stream) {
            let block = allocator.allocate_in(pool, Bytes(1_000), stream).unwrap();
            assert_eq!(allocator.allocation(block).unwrap().stream, stream);
            allocator.free(block).unwrap();
        }
    }

    /// As programs capture graphs and let go of them without emptying the cache.
    #[test]
    fn pools_that_nothing_holds_make_room_for_others() {
        for strategy in ["direct", "caching", "slab"] {
            let mut allocator = allocator(strategy);
            for number in 1..=2 * FULL {
                let pool = MempoolId(0, number);
                allocator.create_or_retain_pool(pool);
                use_once(&mut allocator, pool, 0..1);
                allocator.release_pool(pool).unwrap();
            }
            allocator.allocate(Bytes(1), Stream(7)).unwrap();
            allocator.check_invariants(CheckLevel::Everything).unwrap();
        }
    }

    #[test]
    fn streams_that_hold_nothing_make_room_for_others() {
        for strategy in ["direct", "pool", "buddy", "slab", "bfc", "caching"] {
            let mut allocator = allocator(strategy);
            let held = allocator.allocate(Bytes(1_000), Stream(3)).unwrap();
            let before = allocator.allocation(held);
            use_once(&mut allocator, MempoolId::DEFAULT, 4..FULL + 9);
            assert_eq!(allocator.allocation(held), before, "{strategy}");
            allocator.check_invariants(CheckLevel::Everything).unwrap();
            allocator.free(held).unwrap();
            use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL + 9);
            allocator.empty_cache().unwrap();
            assert_eq!(allocator.stats().reserved(), Bytes::ZERO, "{strategy}");
        }
    }

    /// Where some streams have nothing cached, the others keep what they have.
    #[test]
    fn nothing_goes_back_for_a_stream_while_another_has_nothing() {
        let mut allocator = allocator("caching");
        use_once(&mut allocator, MempoolId::DEFAULT, 0..7);
        allocator.empty_cache().unwrap();
        use_once(&mut allocator, MempoolId::DEFAULT, 7..FULL + 6);
        assert_eq!(allocator.stats().reserved(), Bytes::mib(2 * (FULL - 1)));
        use_once(&mut allocator, MempoolId::DEFAULT, FULL + 6..FULL + 7);
        assert_eq!(allocator.stats().reserved(), Bytes::mib(2));
    }

    #[test]
    fn nothing_goes_back_for_a_stream_during_a_capture() {
        let mut allocator = allocator("caching");
        use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL);
        allocator.capture_begin();
        let refused = allocator.allocate(Bytes(1), Stream(FULL));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator.capture_end();
        use_once(&mut allocator, MempoolId::DEFAULT, FULL..FULL + 1);
    }

    /// What a held pool has free is its own, for other streams as for other pools.
    #[test]
    fn streams_of_a_held_pool_make_room_when_it_is_let_go() {
        let mut allocator = allocator("caching");
        let pool = MempoolId(0, 1);
        use_once(&mut allocator, pool, 1..FULL);
        let refused = allocator.allocate(Bytes(1), Stream(1));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator.trim_pool(pool).unwrap();
        use_once(&mut allocator, pool, FULL..2 * FULL - 1);
        allocator.release_pool(pool).unwrap();
        use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL);
        allocator.check_invariants(CheckLevel::Everything).unwrap();
    }

    #[test]
    fn a_stream_whose_block_is_waited_for_makes_room_after_that() {
        let mut allocator = allocator("caching");
        let blocks: Vec<_> = (0..FULL)
            .map(|stream| allocator.allocate(Bytes(1), Stream(stream)).unwrap())
            .collect();
        allocator.driver_mut().busy = true;
        allocator.record_stream(blocks[7], Stream(8)).unwrap();
        allocator.free(blocks[7]).unwrap();
        let refused = allocator.allocate(Bytes(1), Stream(FULL));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator.driver_mut().busy = false;
        allocator.allocate(Bytes(1), Stream(FULL)).unwrap();
        let refused = allocator.allocate(Bytes(1), Stream(7));
        assert_eq!(refused, Err(AllocError::TooManyStreams));
        allocator.check_invariants(CheckLevel::Everything).unwrap();
    }

    /// Events name their streams by numbers that others have since.
    #[test]
    fn what_happened_in_streams_that_made_room_is_forgotten() {
        let mut allocator = allocator("caching");
        let clock = Arc::new(EventClock::default());
        clock.start();
        allocator.keep_recent_events(clock);
        use_once(&mut allocator, MempoolId::DEFAULT, 0..FULL + 5);
        let past = allocator.recent_past();
        let known = past
            .events
            .iter()
            .filter(|(_, event)| event.action == Action::Alloc);
        let streams: Vec<u64> = known.map(|(_, event)| event.stream.0).collect();
        assert_eq!(streams, (FULL..FULL + 5).collect::<Vec<_>>());
        assert_ne!(past.since, 0);
    }

    /// A request that no device could serve leaves a stream of `bfc` with a large region to ask for next.
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
        assert_eq!(allocator.pool_use_count(pool), absent);
        let block = allocator.allocate(Bytes(1), Stream(FULL - 1)).unwrap();
        allocator.free(block).unwrap();
        allocator.free(blocks[7]).unwrap();
        allocator.allocate(Bytes(1), Stream(FULL)).unwrap();
        allocator.check_invariants(CheckLevel::Everything).unwrap();
    }
}
