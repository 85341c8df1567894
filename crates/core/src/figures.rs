//! The figures as they are kept: what the path of a request pays for [`Stats`].
//!
//! Ten figures change with every request and every free, each of them for a size pool and for all.
//! What follows from others is left out until somebody asks: the figures over all are sums, but for
//! their peaks, and what was freed is what was allocated less what is there. A free then costs one
//! subtraction a figure.

use crate::stats::{PoolStats, Stat, Stats};
use crate::units::Bytes;

/// Which of PyTorch's two size pools a segment and its blocks count for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SizeKind {
    /// Requests of up to 1 MiB.
    Small,
    /// Everything else.
    Large,
}

/// A figure of one size pool.
#[derive(Clone, Copy, Default, Debug)]
struct Half {
    current: i64,
    peak: i64,
    /// The sum of everything that was added since the sums were reset.
    added: i64,
    /// What there was when the sums were reset.
    base: i64,
}

impl Half {
    fn stat(&self) -> Stat {
        let &Half {
            current,
            peak,
            added,
            base,
        } = self;
        Stat {
            current,
            peak,
            allocated: added,
            freed: base + added - current,
        }
    }
}

/// A figure over everything and over each of the two size pools.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Gauge {
    /// By [`SizeKind`].
    halves: [Half; 2],
    peak: i64,
}

impl Gauge {
    #[inline]
    pub(crate) fn increase(&mut self, kind: SizeKind, amount: i64) {
        let half = &mut self.halves[kind as usize];
        half.current += amount;
        half.added += amount;
        half.peak = half.peak.max(half.current);
        self.peak = self.peak.max(self.current());
    }

    #[inline]
    pub(crate) fn decrease(&mut self, kind: SizeKind, amount: i64) {
        let half = &mut self.halves[kind as usize];
        half.current -= amount;
        debug_assert!(half.current >= 0, "a figure fell below zero");
    }

    /// Adds a change that may go either way.
    #[inline]
    pub(crate) fn change(&mut self, kind: SizeKind, amount: i64) {
        if amount >= 0 {
            self.increase(kind, amount);
        } else {
            self.decrease(kind, -amount);
        }
    }

    /// Returns what it is over everything.
    #[inline]
    pub(crate) fn current(&self) -> i64 {
        self.halves[0].current + self.halves[1].current
    }

    /// Returns the figure in full.
    pub(crate) fn stats(&self) -> PoolStats {
        let [small_pool, large_pool] = self.halves.map(|half| half.stat());
        let all = Stat {
            current: self.current(),
            peak: self.peak,
            allocated: small_pool.allocated + large_pool.allocated,
            freed: small_pool.freed + large_pool.freed,
        };
        PoolStats {
            all,
            large_pool,
            small_pool,
        }
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current();
        for half in &mut self.halves {
            half.peak = half.current;
        }
    }

    pub(crate) fn reset_accumulated(&mut self) {
        for half in &mut self.halves {
            (half.added, half.base) = (0, half.current);
        }
    }
}

/// Everything that is counted; [`Stats`] says what each figure means.
#[derive(Clone, Default, Debug)]
pub(crate) struct Figures {
    pub(crate) allocation: Gauge,
    pub(crate) segment: Gauge,
    pub(crate) active: Gauge,
    pub(crate) inactive_split: Gauge,
    pub(crate) allocated_bytes: Gauge,
    pub(crate) reserved_bytes: Gauge,
    pub(crate) active_bytes: Gauge,
    pub(crate) inactive_split_bytes: Gauge,
    pub(crate) requested_bytes: Gauge,
    pub(crate) oversize_allocations: Stat,
    pub(crate) oversize_segments: Stat,
    pub(crate) num_alloc_retries: i64,
    pub(crate) num_ooms: i64,
    pub(crate) num_sync_all_streams: i64,
    pub(crate) num_device_alloc: i64,
    pub(crate) num_device_free: i64,
    pub(crate) num_oom_rejections: i64,
    /// The size from which blocks are not split, in bytes; -1 where there is none.
    pub(crate) max_split_size: i64,
}

impl Figures {
    /// Returns the figures as PyTorch reports them.
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            allocation: self.allocation.stats(),
            segment: self.segment.stats(),
            active: self.active.stats(),
            inactive_split: self.inactive_split.stats(),
            allocated_bytes: self.allocated_bytes.stats(),
            reserved_bytes: self.reserved_bytes.stats(),
            active_bytes: self.active_bytes.stats(),
            inactive_split_bytes: self.inactive_split_bytes.stats(),
            requested_bytes: self.requested_bytes.stats(),
            oversize_allocations: self.oversize_allocations,
            oversize_segments: self.oversize_segments,
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams,
            num_device_alloc: self.num_device_alloc,
            num_device_free: self.num_device_free,
            num_oom_rejections: self.num_oom_rejections,
            max_split_size: self.max_split_size,
        }
    }

    /// Sets every peak to its current value.
    pub(crate) fn reset_peaks(&mut self) {
        self.gauges().into_iter().for_each(Gauge::reset_peak);
        self.oversize_allocations.reset_peak();
        self.oversize_segments.reset_peak();
    }

    /// Sets every sum and count to zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.gauges().into_iter().for_each(Gauge::reset_accumulated);
        self.oversize_allocations.reset_accumulated();
        self.oversize_segments.reset_accumulated();
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
        self.num_oom_rejections = 0;
    }

    /// Returns the bytes held from the driver.
    pub(crate) fn reserved(&self) -> Bytes {
        Bytes(self.reserved_bytes.current().unsigned_abs())
    }

    /// Returns the bytes of the blocks that the program holds.
    pub(crate) fn allocated(&self) -> Bytes {
        Bytes(self.allocated_bytes.current().unsigned_abs())
    }

    fn gauges(&mut self) -> [&mut Gauge; 9] {
        [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ]
    }
}
