//! The figures of `torch.cuda.memory_stats`, kept the way PyTorch keeps them.

use crate::units::Bytes;

/// Which of PyTorch's two size pools a segment and its blocks count for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SizeKind {
    /// Requests of up to 1 MiB.
    Small,
    /// Everything else.
    Large,
}

impl SizeKind {
    /// Returns the pool that a size belongs to.
    pub(crate) fn of(size: Bytes) -> SizeKind {
        if size <= Bytes::mib(1) {
            SizeKind::Small
        } else {
            SizeKind::Large
        }
    }
}

/// A figure that goes up and down.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stat {
    /// What it is.
    pub current: i64,
    /// The most it has been since the peaks were reset.
    pub peak: i64,
    /// The sum of everything that was added since the sums were reset.
    pub allocated: i64,
    /// The sum of everything that was taken away since then.
    pub freed: i64,
}

impl Stat {
    /// Returns whether that is a new peak.
    pub(crate) fn increase(&mut self, amount: i64) -> bool {
        self.current += amount;
        self.allocated += amount;
        let is_new = self.peak < self.current;
        self.peak = self.peak.max(self.current);
        is_new
    }

    pub(crate) fn decrease(&mut self, amount: i64) {
        self.current -= amount;
        self.freed += amount;
        debug_assert!(self.current >= 0, "a figure fell below zero");
    }

    /// Returns whether that is a new peak.
    pub(crate) fn set(&mut self, current: i64) -> bool {
        if self.current < current {
            self.increase(current - self.current)
        } else {
            self.decrease(self.current - current);
            false
        }
    }

    /// Adds another part of the figure, whose peak is not that of the sum.
    pub(crate) fn add(&mut self, other: Stat) {
        self.current += other.current;
        self.allocated += other.allocated;
        self.freed += other.freed;
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// A [`Stat`] over everything and over each of the two size pools.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolStats {
    /// Over everything.
    pub all: Stat,
    /// Over the blocks and segments for large requests.
    pub large_pool: Stat,
    /// Over the blocks and segments for small requests.
    pub small_pool: Stat,
}

impl PoolStats {
    /// Adds the twelve figures under their keys, which begin with `name`.
    pub(crate) fn push_entries(&self, entries: &mut Vec<(String, i64)>, name: &str) {
        push_stat(entries, &format!("{name}.all"), self.all);
        push_stat(entries, &format!("{name}.large_pool"), self.large_pool);
        push_stat(entries, &format!("{name}.small_pool"), self.small_pool);
    }
}

/// Everything that `torch.cuda.memory_stats` reports about one device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// Blocks that the program holds.
    pub allocation: PoolStats,
    /// Segments from the driver; expandable ones are not counted.
    pub segment: PoolStats,
    /// Blocks that the program holds or that wait for an event.
    pub active: PoolStats,
    /// Free blocks that share their segment with others, so that it cannot go back as a whole;
    /// those of expandable segments are not counted. Only `caching` counts them; the other
    /// strategies report 0.
    pub inactive_split: PoolStats,
    /// Bytes of the blocks in `allocation`.
    pub allocated_bytes: PoolStats,
    /// Bytes held from the driver.
    pub reserved_bytes: PoolStats,
    /// Bytes of the blocks in `active`.
    pub active_bytes: PoolStats,
    /// Bytes of the blocks in `inactive_split`.
    pub inactive_split_bytes: PoolStats,
    /// Bytes that the program asked for, over the blocks in `active`.
    pub requested_bytes: PoolStats,
    /// Blocks of at least `max_split_size` that the program holds.
    pub oversize_allocations: Stat,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Stat,
    /// Driver allocations tried again after cached memory went back.
    pub num_alloc_retries: i64,
    /// Requests that could not be served.
    pub num_ooms: i64,
    /// Waits for every stream that blocks were waiting for.
    pub num_sync_all_streams: i64,
    /// Memory obtained from the driver, in calls: allocations and maps.
    pub num_device_alloc: i64,
    /// Memory given back to the driver, in calls: frees and unmaps.
    pub num_device_free: i64,
    /// Requests refused before the driver was asked.
    pub num_oom_rejections: i64,
    /// The size from which blocks are not split, in bytes; -1 where there is none.
    pub max_split_size: i64,
}

impl Stats {
    /// Returns every figure under the key that `torch.cuda.memory_stats` gives it, in the order of
    /// the keys.
    pub fn entries(&self) -> Vec<(String, i64)> {
        let mut entries = Vec::new();
        for (name, stats) in self.pool_stats() {
            stats.push_entries(&mut entries, name);
        }
        push_stat(
            &mut entries,
            "oversize_allocations",
            self.oversize_allocations,
        );
        push_stat(&mut entries, "oversize_segments", self.oversize_segments);
        let numbers = [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_oom_rejections", self.num_oom_rejections),
            ("max_split_size", self.max_split_size),
        ];
        entries.extend(numbers.map(|(name, number)| (name.to_owned(), number)));
        entries.sort_unstable();
        entries
    }

    /// Returns the bytes held from the driver.
    pub fn reserved(&self) -> Bytes {
        Bytes(self.reserved_bytes.all.current.unsigned_abs())
    }

    /// Returns the bytes of the blocks that the program holds.
    pub fn allocated(&self) -> Bytes {
        Bytes(self.allocated_bytes.all.current.unsigned_abs())
    }

    pub(crate) fn pool_stats(&self) -> [(&'static str, &PoolStats); 9] {
        [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ]
    }
}

fn push_stat(entries: &mut Vec<(String, i64)>, name: &str, stat: Stat) {
    entries.push((format!("{name}.current"), stat.current));
    entries.push((format!("{name}.peak"), stat.peak));
    entries.push((format!("{name}.allocated"), stat.allocated));
    entries.push((format!("{name}.freed"), stat.freed));
}
