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

/// Every pool and every domain, with numbers that stay small: those of pools that ended are used
/// again.
#[derive(Debug)]
pub(crate) struct Domains {
    pools: Vec<Option<Pool>>,
    /// `None` where the domain's pool ended.
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
        self.recent = (self.domain(DomainId::DEFAULT), DomainId::DEFAULT);
        for slot in &mut self.domains {
            if let Some(domain) = slot.take_if(|domain| domain.pool == index) {
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
    use crate::allocator::DeviceAllocator;
    use crate::check::CheckLevel;
    use crate::config::Config;
    use crate::error::AllocError;
    use crate::strategy::test_driver::TestDriver;
    use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

    use super::DomainId;

    fn allocator(strategy: &str) -> DeviceAllocator<TestDriver> {
        let config: Config = strategy.parse().unwrap();
        DeviceAllocator::new(TestDriver::new(Bytes::gib(180)), 0, &config)
    }

    /// As programs capture graphs and let go of them without emptying the cache.
    #[test]
    fn pools_that_nothing_holds_make_room_for_others() {
        for strategy in ["direct", "caching", "slab"] {
            let mut allocator = allocator(strategy);
            for number in 1..=2 * DomainId::COUNT_MAX as u64 {
                let pool = MempoolId(0, number);
                allocator.create_or_retain_pool(pool);
                let block = allocator.allocate_in(pool, Bytes(1_000), Stream::DEFAULT);
                allocator.free(block.unwrap()).unwrap();
                allocator.release_pool(pool).unwrap();
            }
            allocator.allocate(Bytes(1), Stream(7)).unwrap();
            allocator.check_invariants(CheckLevel::Everything).unwrap();
        }
    }

    #[test]
    fn one_stream_too_many_is_refused_and_the_others_go_on() {
        let mut allocator = allocator("caching");
        let last = DomainId::COUNT_MAX as u64 - 1;
        for stream in 0..=last {
            assert_ne!(
                allocator.allocate(Bytes(1), Stream(stream)),
                Ok(DeviceAddress::NULL)
            );
        }
        let error = allocator.allocate(Bytes(1), Stream(last + 1)).unwrap_err();
        assert_eq!(error, AllocError::TooManyStreams);
        let pool = MempoolId(0, 1);
        let error = allocator.allocate_in(pool, Bytes(1), Stream(0));
        assert_eq!(error, Err(AllocError::TooManyStreams));
        let absent = Err(AllocError::NoSuchPool { pool });
        assert_eq!(allocator.pool_use_count(pool), absent);
        let block = allocator.allocate(Bytes(1), Stream(last)).unwrap();
        allocator.free(block).unwrap();
        allocator.check_invariants(CheckLevel::Everything).unwrap();
    }
}
