//! The figures of `torch.cuda.memory_stats`, kept the way PyTorch keeps them.

use crate::units::Bytes;

/// A figure that goes up and down.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stat {
    /// What it is.
    pub current: i64,
    /// The most it has been since the last [`Stats::reset_peaks`].
    pub peak: i64,
    /// The sum of everything that was added since the last [`Stats::reset_accumulated`].
    pub allocated: i64,
    /// The sum of everything that was taken away since then.
    pub freed: i64,
}

impl Stat {
    pub(crate) fn increase(&mut self, amount: i64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
        self.allocated += amount;
    }

    pub(crate) fn decrease(&mut self, amount: i64) {
        self.current -= amount;
        self.freed += amount;
        debug_assert!(self.current >= 0, "a figure fell below zero");
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }

    /// Adds a change that may go either way.
    pub(crate) fn change(&mut self, amount: i64) {
        if amount >= 0 {
            self.increase(amount);
        } else {
            self.decrease(-amount);
        }
    }
}

/// Which of PyTorch's two size pools a segment and its blocks count for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SizeKind {
    /// Requests of up to 1 MiB.
    Small,
    /// Everything else.
    Large,
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
    #[inline]
    pub(crate) fn increase(&mut self, kind: SizeKind, amount: i64) {
        self.all.increase(amount);
        self.of(kind).increase(amount);
    }

    #[inline]
    pub(crate) fn decrease(&mut self, kind: SizeKind, amount: i64) {
        self.all.decrease(amount);
        self.of(kind).decrease(amount);
    }

    /// Adds a change that may go either way.
    pub(crate) fn change(&mut self, kind: SizeKind, amount: i64) {
        self.all.change(amount);
        self.of(kind).change(amount);
    }

    /// Adds the twelve figures under their keys, which begin with `name`.
    pub(crate) fn push_entries(&self, entries: &mut Vec<(String, i64)>, name: &str) {
        push_stat(entries, &format!("{name}.all"), self.all);
        push_stat(entries, &format!("{name}.large_pool"), self.large_pool);
        push_stat(entries, &format!("{name}.small_pool"), self.small_pool);
    }

    /// Does something to each of the three.
    pub(crate) fn for_each_stat(&mut self, mut act: impl FnMut(&mut Stat)) {
        act(&mut self.all);
        act(&mut self.large_pool);
        act(&mut self.small_pool);
    }

    fn of(&mut self, kind: SizeKind) -> &mut Stat {
        match kind {
            SizeKind::Small => &mut self.small_pool,
            SizeKind::Large => &mut self.large_pool,
        }
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
    /// those of expandable segments are not counted.
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
    /// Sets every peak to its current value.
    pub fn reset_peaks(&mut self) {
        self.for_each_stat(Stat::reset_peak);
    }

    /// Sets every sum and count to zero.
    pub fn reset_accumulated(&mut self) {
        self.for_each_stat(Stat::reset_accumulated);
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
        self.num_oom_rejections = 0;
    }

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

    fn for_each_stat(&mut self, mut act: impl FnMut(&mut Stat)) {
        let pools = [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ];
        for pool in pools {
            pool.for_each_stat(&mut act);
        }
        act(&mut self.oversize_allocations);
        act(&mut self.oversize_segments);
    }
}

fn push_stat(entries: &mut Vec<(String, i64)>, name: &str, stat: Stat) {
    entries.push((format!("{name}.current"), stat.current));
    entries.push((format!("{name}.peak"), stat.peak));
    entries.push((format!("{name}.allocated"), stat.allocated));
    entries.push((format!("{name}.freed"), stat.freed));
}
