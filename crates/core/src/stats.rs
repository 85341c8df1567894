//! The statistics of `torch.cuda.memory_stats`, defined as PyTorch defines them.

use crate::units::{Bytes, MempoolId};

/// PyTorch's two size pools: a segment and its blocks count for one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SizeKind {
    /// Requests of up to 1 MiB.
    Small,
    /// Larger requests.
    Large,
}

impl SizeKind {
    /// Returns the size pool of a block of `size` bytes.
    pub(crate) fn of(size: Bytes) -> SizeKind {
        if size <= Bytes::mib(1) {
            SizeKind::Small
        } else {
            SizeKind::Large
        }
    }
}

/// A statistic that rises and falls, as a count or in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stat {
    /// The value now.
    pub current: i64,
    /// The highest value since the peaks were reset.
    pub peak: i64,
    /// The sum of all increases since the sums were reset.
    pub allocated: i64,
    /// The sum of all decreases since the sums were reset.
    pub freed: i64,
}

impl Stat {
    /// Returns whether the new value is a new peak.
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

    /// Returns whether the new value is a new peak.
    pub(crate) fn set(&mut self, current: i64) -> bool {
        if self.current < current {
            self.increase(current - self.current)
        } else {
            self.decrease(self.current - current);
            false
        }
    }

    /// Adds another part of the statistic. The peak stays: the peak of a sum is not the sum of peaks.
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

/// A [`Stat`] in total and for each of the two size pools.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolStats {
    /// Both size pools together.
    pub all: Stat,
    /// Blocks and segments for large requests.
    pub large_pool: Stat,
    /// Blocks and segments for small requests.
    pub small_pool: Stat,
}

impl PoolStats {
    /// Adds the twelve values under their keys, each of which begins with `name`.
    fn push_entries(&self, entries: &mut Vec<(String, i64)>, name: &str) {
        push_stat(entries, &format!("{name}.all"), self.all);
        push_stat(entries, &format!("{name}.large_pool"), self.large_pool);
        push_stat(entries, &format!("{name}.small_pool"), self.small_pool);
    }
}

/// The statistics that `torch.cuda.memory_stats` reports for one device.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// Allocated blocks.
    pub allocation: PoolStats,
    /// Segments from the driver; expandable ones are not counted.
    pub segment: PoolStats,
    /// Active blocks: allocated, or freed and waiting for an event.
    pub active: PoolStats,
    /// Free blocks that share their segment with other blocks, so that the segment cannot be released as a whole.
    /// Those of expandable segments are not counted. Only `caching` counts these blocks; other strategies report
    /// 0.
    pub inactive_split: PoolStats,
    /// Bytes of the blocks in `allocation`.
    pub allocated_bytes: PoolStats,
    /// Reserved bytes: obtained from the driver and not released.
    pub reserved_bytes: PoolStats,
    /// Bytes of the blocks in `active`.
    pub active_bytes: PoolStats,
    /// Bytes of the blocks in `inactive_split`.
    pub inactive_split_bytes: PoolStats,
    /// Bytes that the program requested for the blocks in `active`.
    pub requested_bytes: PoolStats,
    /// Allocated blocks of at least `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Stat,
    /// Driver allocations retried after cached memory was released.
    pub num_alloc_retries: i64,
    /// Requests that could not be served.
    pub num_ooms: i64,
    /// Waits for every stream that has pending blocks.
    pub num_sync_all_streams: i64,
    /// Driver calls that obtained memory: allocations and maps.
    pub num_device_alloc: i64,
    /// Driver calls that released memory: frees and unmaps.
    pub num_device_free: i64,
    /// Requests rejected without a driver call.
    pub num_oom_rejections: i64,
    /// The size from which blocks are not split, in bytes; -1 if there is no such size.
    pub max_split_size: i64,
    /// The reserved bytes of each private pool.
    pub reserved_bytes_by_private_pools: Vec<(MempoolId, PoolStats)>,
}

/// Which figures [`Device::reset_stats`](crate::Device::reset_stats) sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StatsReset {
    /// Every peak, to its current value.
    Peaks,
    /// Every sum and count, to zero.
    Accumulated,
}

impl Stats {
    /// Returns every statistic under its key in `torch.cuda.memory_stats`, sorted by key.
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
        for (MempoolId(capture, user), reserved) in &self.reserved_bytes_by_private_pools {
            let name = format!("reserved_bytes_by_private_pools.{capture}_{user}");
            reserved.push_entries(&mut entries, &name);
        }
        entries.sort_unstable();
        entries
    }

    /// Returns the reserved bytes.
    pub fn reserved(&self) -> Bytes {
        Bytes(self.reserved_bytes.all.current.unsigned_abs())
    }

    /// Returns the allocated bytes.
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
