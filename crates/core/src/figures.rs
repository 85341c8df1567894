//! The statistics as they are stored. Their cost per request is in this module; [`Stats`] is computed from them.
//!
//! Five statistics change with every request and every free, each of them for a size pool and in total. Values that
//! follow from others are computed on demand if that is cheaper. Freed is allocated in total minus current. Active
//! is allocated plus the few pending blocks.
//!
//! A statistic is stored as its peak and the *headroom* below it. A change is one subtraction, and its sign shows
//! whether there is a new peak. A free costs six additions to headrooms. A request costs as many subtractions, and
//! three additions to sums.
//!
//! If several allocators serve one device, a peak here is the level that this one may reach without a sync
//! (`peaks.rs`). [`Figures::take_has_new_peak`] reports that it rose above that.

#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

pub(crate) mod gauge;

use gauge::{Gauge, Level, Waiting};

use crate::stats::{SizeKind, Stat, Stats};
use crate::units::{Bytes, signed};

/// How many statistics have a peak.
pub(crate) const LEVELS: usize = 29;

/// How many of these statistics are of allocated memory. As many are of active memory.
pub(crate) const ACTIVE_LEVELS: usize = 6;

/// Every statistic; [`Stats`] defines each.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    allocation: Gauge,
    allocated_bytes: Gauge,
    requested_bytes: Gauge,
    /// Memory that is active and not allocated.
    waiting: Waiting,
    waiting_bytes: Waiting,
    /// Number of pending blocks; a job without any skips further work.
    waiting_blocks: usize,
    inactive_split: Gauge,
    inactive_split_bytes: Gauge,
    segment: Gauge,
    reserved_bytes: Gauge,
    oversize_allocations: Stat,
    oversize_segments: Stat,
    /// Whether any peak rose since the last query.
    has_new_peak: bool,
    /// Whether active memory has peaks of its own although no block is pending here: one is pending in another
    /// allocator of the device.
    tracks_active: bool,
    pub(crate) num_alloc_retries: i64,
    pub(crate) num_ooms: i64,
    pub(crate) num_sync_all_streams: i64,
    pub(crate) num_device_alloc: i64,
    pub(crate) num_device_free: i64,
    pub(crate) num_oom_rejections: i64,
    /// The size from which blocks are not split, in bytes; -1 if there is no such size.
    pub(crate) max_split_size: i64,
}

impl Figures {
    /// Returns the figures of an allocator that holds nothing.
    pub(crate) fn new() -> Figures {
        Figures {
            allocation: Gauge::default(),
            allocated_bytes: Gauge::default(),
            requested_bytes: Gauge::default(),
            waiting: Waiting::default(),
            waiting_bytes: Waiting::default(),
            waiting_blocks: 0,
            inactive_split: Gauge::default(),
            inactive_split_bytes: Gauge::default(),
            segment: Gauge::default(),
            reserved_bytes: Gauge::default(),
            oversize_allocations: Stat::default(),
            oversize_segments: Stat::default(),
            has_new_peak: false,
            tracks_active: false,
            num_alloc_retries: 0,
            num_ooms: 0,
            num_sync_all_streams: 0,
            num_device_alloc: 0,
            num_device_free: 0,
            num_oom_rejections: 0,
            max_split_size: -1,
        }
    }

    /// Counts a block that is allocated, and its requested bytes.
    #[inline(always)]
    pub(crate) fn count_allocated(&mut self, kind: SizeKind, size: Bytes, requested: Bytes) {
        debug_assert!(requested <= size, "a block has what was asked for");
        let is_new = &mut self.has_new_peak;
        self.allocation.increase(kind, 1, is_new);
        self.allocated_bytes.increase(kind, signed(size), is_new);
        self.requested_bytes
            .increase(kind, signed(requested), is_new);
        if self.waiting_blocks > 0 || self.tracks_active {
            self.waiting.raise_peaks(&self.allocation, is_new);
            self.waiting_bytes
                .raise_peaks(&self.allocated_bytes, is_new);
        }
    }

    /// Counts a block that is freed and no longer used.
    #[inline]
    pub(crate) fn count_freed(&mut self, kind: SizeKind, size: Bytes, requested: Bytes) {
        self.allocation.decrease(kind, 1);
        self.allocated_bytes.decrease(kind, signed(size));
        self.requested_bytes.decrease(kind, signed(requested));
    }

    /// Counts a block that is freed while other streams may still use it.
    pub(crate) fn count_suspended(&mut self, kind: SizeKind, size: Bytes) {
        self.allocation.decrease(kind, 1);
        self.allocated_bytes.decrease(kind, signed(size));
        self.waiting_blocks += 1;
        // From here on the peaks of active memory differ from those of allocated memory, on every lane.
        self.has_new_peak |= !self.tracks_active;
        self.waiting.current[kind as usize] += 1;
        self.waiting_bytes.current[kind as usize] += signed(size);
        debug_assert_eq!(
            self.waiting.current.iter().sum::<i64>().unsigned_abs(),
            self.waiting_blocks as u64
        );
    }

    /// Counts a pending block that is no longer used.
    pub(crate) fn count_resumed(&mut self, kind: SizeKind, size: Bytes, requested: Bytes) {
        debug_assert!(self.waiting_blocks > 0, "what is resumed was suspended");
        self.waiting_blocks -= 1;
        self.waiting.current[kind as usize] -= 1;
        self.waiting_bytes.current[kind as usize] -= signed(size);
        debug_assert!(self.waiting.current[kind as usize] >= 0);
        debug_assert!(self.waiting_bytes.current[kind as usize] >= 0);
        self.requested_bytes.decrease(kind, signed(requested));
    }

    /// Adds to the free blocks that share their segment with others, and to their bytes.
    #[inline]
    pub(crate) fn change_inactive_split(&mut self, kind: SizeKind, blocks: i64, bytes: i64) {
        let is_new = &mut self.has_new_peak;
        self.inactive_split.change(kind, blocks, is_new);
        self.inactive_split_bytes.change(kind, bytes, is_new);
    }

    /// Returns the free blocks that share their segment with others, and their bytes.
    pub(crate) fn inactive_split(&self) -> (i64, i64) {
        let bytes = &self.inactive_split_bytes;
        (self.inactive_split.current(), bytes.current())
    }

    /// Counts a new segment.
    pub(crate) fn count_segment(&mut self, kind: SizeKind, is_oversize: bool) {
        self.segment.increase(kind, 1, &mut self.has_new_peak);
        if is_oversize {
            self.has_new_peak |= self.oversize_segments.increase(1);
        }
    }

    /// Counts a segment that was released.
    pub(crate) fn count_segment_freed(&mut self, kind: SizeKind, is_oversize: bool) {
        self.segment.decrease(kind, 1);
        if is_oversize {
            self.oversize_segments.decrease(1);
        }
    }

    /// Adds to the reserved bytes.
    pub(crate) fn change_reserved(&mut self, kind: SizeKind, change: i64) {
        let is_new = &mut self.has_new_peak;
        self.reserved_bytes.change(kind, change, is_new);
    }

    /// Sets the number of allocated blocks and of segments that are too large to be split.
    pub(crate) fn set_oversize(&mut self, blocks: i64, segments: i64) {
        debug_assert!(blocks >= 0 && segments >= 0);
        self.has_new_peak |= self.oversize_allocations.set(blocks);
        self.has_new_peak |= self.oversize_segments.set(segments);
    }

    /// Counts the allocation of a block that is too large to be split.
    pub(crate) fn count_oversize_allocation(&mut self) {
        self.has_new_peak |= self.oversize_allocations.increase(1);
    }

    /// Counts the free of a block that is too large to be split.
    pub(crate) fn count_oversize_freed(&mut self) {
        self.oversize_allocations.decrease(1);
    }

    /// Returns whether any peak rose since the last call.
    #[inline]
    pub(crate) fn take_has_new_peak(&mut self) -> bool {
        std::mem::take(&mut self.has_new_peak)
    }

    /// Returns whether any peak rose since [`Figures::take_has_new_peak`].
    #[inline]
    pub(crate) fn has_new_peak(&self) -> bool {
        self.has_new_peak
    }

    /// Sets whether to keep peaks of active memory although no block is pending here.
    pub(crate) fn track_active(&mut self, tracks_active: bool) {
        self.tracks_active = tracks_active;
    }

    /// Returns whether peaks of active memory are kept although no block is pending here.
    pub(crate) fn tracks_active(&self) -> bool {
        self.tracks_active
    }

    /// Calls `act` with every statistic that has a peak, always in the same order. First come [`ACTIVE_LEVELS`] of
    /// allocated memory, then, in the same order, as many of active memory; there are [`LEVELS`] altogether.
    #[inline]
    pub(crate) fn for_each_level(&mut self, mut act: impl FnMut(Level<'_>)) {
        let act = &mut act;
        self.allocation.levels().into_iter().for_each(&mut *act);
        let bytes = self.allocated_bytes.levels();
        bytes.into_iter().for_each(&mut *act);
        let active = self.waiting.levels(&self.allocation);
        active.into_iter().for_each(&mut *act);
        let active_bytes = self.waiting_bytes.levels(&self.allocated_bytes);
        active_bytes.into_iter().for_each(&mut *act);
        for gauge in [
            &mut self.requested_bytes,
            &mut self.segment,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
            &mut self.reserved_bytes,
        ] {
            gauge.levels().into_iter().for_each(&mut *act);
        }
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments] {
            act(Level::plain(stat.current, &mut stat.peak));
        }
    }

    /// Returns the number of pending blocks.
    pub(crate) fn waiting_blocks(&self) -> usize {
        self.waiting_blocks
    }

    /// Returns the active bytes: of blocks that the program, or work it queued, may still access.
    pub(crate) fn active(&self) -> Bytes {
        let waiting: i64 = self.waiting_bytes.current.iter().sum();
        Bytes((self.allocated_bytes.current() + waiting).unsigned_abs())
    }

    /// Returns the statistics as PyTorch reports them.
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            allocation: self.allocation.stats(),
            segment: self.segment.stats(),
            active: self.allocation.stats_with(&self.waiting),
            inactive_split: self.inactive_split.stats(),
            allocated_bytes: self.allocated_bytes.stats(),
            reserved_bytes: self.reserved_bytes.stats(),
            active_bytes: self.allocated_bytes.stats_with(&self.waiting_bytes),
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
            reserved_bytes_by_private_pools: Vec::new(),
        }
    }

    /// Sets every peak to its current value.
    pub(crate) fn reset_peaks(&mut self) {
        self.for_each_level(|level| level.reset());
    }

    /// Adds the statistics of another part of the device. Peaks are not added: the peak of a sum is not the sum of
    /// peaks.
    #[must_use]
    pub(crate) fn sum(mut self, mut other: Figures) -> Figures {
        let gauges = self.gauges().into_iter().zip(other.gauges());
        gauges.for_each(|(gauge, other)| gauge.add(other));
        self.waiting.add(&other.waiting);
        self.waiting_bytes.add(&other.waiting_bytes);
        self.waiting_blocks += other.waiting_blocks;
        self.oversize_allocations.add(other.oversize_allocations);
        self.oversize_segments.add(other.oversize_segments);
        self.num_alloc_retries += other.num_alloc_retries;
        self.num_ooms += other.num_ooms;
        self.num_sync_all_streams += other.num_sync_all_streams;
        self.num_device_alloc += other.num_device_alloc;
        self.num_device_free += other.num_device_free;
        self.num_oom_rejections += other.num_oom_rejections;
        self
    }

    /// Sets every sum and count to zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.gauges().into_iter().for_each(Gauge::reset_accumulated);
        self.waiting.reset_accumulated();
        self.waiting_bytes.reset_accumulated();
        self.oversize_allocations.reset_accumulated();
        self.oversize_segments.reset_accumulated();
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
        self.num_oom_rejections = 0;
    }

    /// Returns the reserved bytes.
    pub(crate) fn reserved(&self) -> Bytes {
        Bytes(self.reserved_bytes.current().unsigned_abs())
    }

    fn gauges(&mut self) -> [&mut Gauge; 7] {
        [
            &mut self.allocation,
            &mut self.segment,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::PoolStats;

    /// The reference: applies each change to the size pool and to the total.
    fn change(stats: &mut PoolStats, kind: SizeKind, amount: i64) {
        let of_kind = match kind {
            SizeKind::Small => &mut stats.small_pool,
            SizeKind::Large => &mut stats.large_pool,
        };
        for stat in [of_kind, &mut stats.all] {
            if amount >= 0 {
                stat.increase(amount);
            } else {
                stat.decrease(-amount);
            }
        }
    }

    fn reset(stats: &mut PoolStats, reset: impl Fn(&mut Stat)) {
        [&mut stats.all, &mut stats.small_pool, &mut stats.large_pool]
            .into_iter()
            .for_each(reset);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(SizeKind, u64, u64),
        Free(usize),
        Suspend(usize),
        Resume(usize),
        ResetPeaks,
        ResetAccumulated,
    }

    fn step() -> impl Strategy<Value = Step> {
        let kind = prop_oneof![Just(SizeKind::Small), Just(SizeKind::Large)];
        prop_oneof![
            4 => (kind, 1..1_000_u64, 0..1_000_u64)
                .prop_map(|(kind, requested, rest)| Step::Allocate(kind, requested + rest, requested)),
            2 => any::<usize>().prop_map(Step::Free),
            2 => any::<usize>().prop_map(Step::Suspend),
            2 => any::<usize>().prop_map(Step::Resume),
            1 => Just(Step::ResetPeaks),
            1 => Just(Step::ResetAccumulated),
        ]
    }

    /// Generates a change of the split free blocks: size pool, number of blocks added or removed, bytes added or
    /// removed.
    fn change_of_free() -> impl Strategy<Value = (SizeKind, i64, i64)> {
        let kind = prop_oneof![Just(SizeKind::Small), Just(SizeKind::Large)];
        (kind, -2..3_i64, -999..1_000_i64)
    }

    fn of_kind(stats: &PoolStats, kind: SizeKind) -> i64 {
        match kind {
            SizeKind::Small => stats.small_pool.current,
            SizeKind::Large => stats.large_pool.current,
        }
    }

    proptest! {
        /// Counts rise and fall but never below zero. Both parts are then added.
        #[test]
        fn a_sum_of_parts_is_what_was_counted_in_each(
            changes in prop::collection::vec((0..2_usize, change_of_free()), 1..100),
        ) {
            let mut parts = [Figures::new(), Figures::new()];
            let mut plain = [[PoolStats::default(); 2]; 2];
            for (part, (kind, more, more_bytes)) in changes {
                let [blocks, bytes] = &mut plain[part];
                let more = more.max(-of_kind(blocks, kind));
                let more_bytes = more_bytes.max(-of_kind(bytes, kind));
                parts[part].change_inactive_split(kind, more, more_bytes);
                change(blocks, kind, more);
                change(bytes, kind, more_bytes);
                let stats = parts[part].stats();
                prop_assert_eq!([stats.inactive_split, stats.inactive_split_bytes], plain[part]);
            }
            let [first, second] = parts;
            let mut sum = first.sum(second);
            sum.for_each_level(|level| {
                let peak = level.current.max(level.peak());
                level.set_peak(peak);
            });
            let stats = sum.stats();
            for (stats, [first, second]) in [
                (stats.inactive_split, [plain[0][0], plain[1][0]]),
                (stats.inactive_split_bytes, [plain[0][1], plain[1][1]]),
            ] {
                for (stat, first, second) in [
                    (stats.all, first.all, second.all),
                    (stats.small_pool, first.small_pool, second.small_pool),
                    (stats.large_pool, first.large_pool, second.large_pool),
                ] {
                    prop_assert_eq!(stat.current, first.current + second.current);
                    prop_assert_eq!(stat.peak, first.peak.max(stat.current));
                    prop_assert_eq!(stat.allocated, first.allocated + second.allocated);
                    prop_assert_eq!(stat.freed, first.freed + second.freed);
                }
            }
        }
    }

    #[test]
    fn counts_of_parts_are_added() {
        let part = |first: i64| {
            let mut part = Figures::new();
            part.num_alloc_retries = first;
            part.num_ooms = first + 1;
            part.num_sync_all_streams = first + 2;
            part.num_device_alloc = first + 3;
            part.num_device_free = first + 4;
            part.num_oom_rejections = first + 5;
            part
        };
        let sum = part(10).sum(part(100));
        let counts = [
            sum.num_alloc_retries,
            sum.num_ooms,
            sum.num_sync_all_streams,
            sum.num_device_alloc,
            sum.num_device_free,
            sum.num_oom_rejections,
        ];
        assert_eq!(counts, [110, 112, 114, 116, 118, 120]);
    }

    /// Statistics of blocks: two of allocated memory, two of active memory, and the requested bytes.
    type Five = [PoolStats; 5];

    fn five(stats: &Stats) -> Five {
        [
            stats.allocation,
            stats.allocated_bytes,
            stats.active,
            stats.active_bytes,
            stats.requested_bytes,
        ]
    }

    proptest! {
        /// Values computed on demand equal those counted step by step.
        #[test]
        fn what_is_left_out_follows_from_what_is_kept(steps in prop::collection::vec(step(), 1..200)) {
            let mut figures = Figures::new();
            let mut plain: Five = Default::default();
            let (mut held, mut waiting) = (Vec::new(), Vec::new());
            for step in steps {
                let count = |plain: &mut Five, kind, changes: [i64; 5]| {
                    for (stats, amount) in plain.iter_mut().zip(changes) {
                        change(stats, kind, amount);
                    }
                };
                match step {
                    Step::Allocate(kind, size, requested) => {
                        let block = (kind, Bytes(size), Bytes(requested));
                        let (size, requested) = (signed(block.1), signed(block.2));
                        figures.count_allocated(kind, block.1, block.2);
                        count(&mut plain, kind, [1, size, 1, size, requested]);
                        held.push(block);
                    }
                    Step::Free(index) if !held.is_empty() => {
                        let block = held.swap_remove(index % held.len());
                        let (size, requested) = (signed(block.1), signed(block.2));
                        figures.count_freed(block.0, block.1, block.2);
                        count(&mut plain, block.0, [-1, -size, -1, -size, -requested]);
                    }
                    Step::Suspend(index) if !held.is_empty() => {
                        let block = held.swap_remove(index % held.len());
                        figures.count_suspended(block.0, block.1);
                        count(&mut plain, block.0, [-1, -signed(block.1), 0, 0, 0]);
                        waiting.push(block);
                    }
                    Step::Resume(index) if !waiting.is_empty() => {
                        let block = waiting.swap_remove(index % waiting.len());
                        let (size, requested) = (signed(block.1), signed(block.2));
                        figures.count_resumed(block.0, block.1, block.2);
                        count(&mut plain, block.0, [0, 0, -1, -size, -requested]);
                    }
                    Step::ResetPeaks => {
                        figures.reset_peaks();
                        plain.iter_mut().for_each(|stats| reset(stats, |stat| stat.peak = stat.current));
                    }
                    Step::ResetAccumulated => {
                        figures.reset_accumulated();
                        plain.iter_mut().for_each(|stats| reset(stats, Stat::reset_accumulated));
                    }
                    Step::Free(_) | Step::Suspend(_) | Step::Resume(_) => {}
                }
                prop_assert_eq!(five(&figures.stats()), plain);
                prop_assert_eq!(figures.waiting_blocks, waiting.len());
                prop_assert_eq!(signed(figures.active()), plain[3].all.current);
            }
        }
    }
}
