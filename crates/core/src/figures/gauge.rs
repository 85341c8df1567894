//! One statistic as it is stored: its current value, its peak, and the sums that PyTorch also reports.
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

use crate::stats::{PoolStats, SizeKind, Stat};

/// A current value and its peak.
#[derive(Clone, Copy, Default, Debug)]
struct Height {
    /// Peak minus current value. Negative only in a sum of several parts, until the sum's peak is set.
    head_room: i64,
    peak: i64,
}

impl Height {
    #[inline(always)]
    fn current(&self) -> i64 {
        self.peak - self.head_room
    }

    /// Adds a positive or negative amount. Sets `has_new_peak` if the value is a new peak. A job is seldom at its
    /// peak, so the branch is rarely taken.
    #[inline(always)]
    fn change(&mut self, amount: i64, has_new_peak: &mut bool) {
        self.head_room -= amount;
        if self.head_room < 0 {
            self.peak -= self.head_room;
            self.head_room = 0;
            *has_new_peak = true;
        }
        debug_assert!(self.current() >= 0, "a figure fell below zero");
    }

    #[inline(always)]
    fn decrease(&mut self, amount: i64) {
        self.head_room += amount;
        debug_assert!(self.current() >= 0, "a figure fell below zero");
    }

    /// Adds another part of the statistic. The peak stays: the peak of a sum is not the sum of peaks.
    fn add(&mut self, other: &Height) {
        self.head_room -= other.current();
    }

    #[inline]
    fn level(&mut self) -> Level<'_> {
        Level {
            current: self.current(),
            peak: &mut self.peak,
            head_room: Some(&mut self.head_room),
        }
    }
}

/// A statistic of one size pool.
#[derive(Clone, Copy, Default, Debug)]
struct Half {
    height: Height,
    /// The sum of all increases since the sums were reset.
    added: i64,
    /// The current value when the sums were reset.
    base: i64,
}

impl Half {
    /// Returns the statistic. `more` is added to the current value, `base_more` to the value when the sums were
    /// reset.
    fn stat(&self, more: i64, base_more: i64) -> Stat {
        let current = self.height.current() + more;
        Stat {
            current,
            peak: self.height.peak,
            allocated: self.added,
            freed: self.base + base_more + self.added - current,
        }
    }
}

/// A statistic in total and for each of the two size pools.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Gauge {
    /// By [`SizeKind`].
    halves: [Half; 2],
    all: Height,
}

impl Gauge {
    /// As [`Gauge::change`], with `amount` added. It is not negative.
    #[inline(always)]
    pub(super) fn increase(&mut self, kind: SizeKind, amount: i64, has_new_peak: &mut bool) {
        debug_assert!(amount >= 0);
        let half = &mut self.halves[kind as usize];
        half.height.change(amount, has_new_peak);
        half.added += amount;
        self.all.change(amount, has_new_peak);
    }

    /// As [`Gauge::change`], with `amount` subtracted. It is not negative.
    #[inline(always)]
    pub(super) fn decrease(&mut self, kind: SizeKind, amount: i64) {
        debug_assert!(amount >= 0);
        self.halves[kind as usize].height.decrease(amount);
        self.all.decrease(amount);
    }

    /// Adds a positive or negative amount. Sets `has_new_peak` if a value is a new peak.
    #[inline]
    pub(crate) fn change(&mut self, kind: SizeKind, amount: i64, has_new_peak: &mut bool) {
        let half = &mut self.halves[kind as usize];
        half.height.change(amount, has_new_peak);
        half.added += amount.max(0);
        self.all.change(amount, has_new_peak);
    }

    /// Returns the total.
    #[inline]
    pub(crate) fn current(&self) -> i64 {
        self.all.current()
    }

    /// Returns the statistic as PyTorch reports it.
    pub(crate) fn stats(&self) -> PoolStats {
        self.stats_with(&Waiting::default())
    }

    /// Returns the statistic as PyTorch reports it, with the pending blocks included.
    pub(super) fn stats_with(&self, waiting: &Waiting) -> PoolStats {
        let half = |kind: usize| {
            let mut stat = self.halves[kind].stat(waiting.current[kind], waiting.base[kind]);
            stat.peak = stat.peak.max(waiting.peaks[kind]);
            stat
        };
        let [small_pool, large_pool] = [half(0), half(1)];
        let all = Stat {
            current: self.all.current() + waiting.current.iter().sum::<i64>(),
            peak: self.all.peak.max(waiting.peak),
            allocated: small_pool.allocated + large_pool.allocated,
            freed: small_pool.freed + large_pool.freed,
        };
        PoolStats {
            all,
            large_pool,
            small_pool,
        }
    }

    /// Adds another part of the statistic. The peaks stay: the peak of a sum is not the sum of peaks.
    pub(super) fn add(&mut self, other: &Gauge) {
        for (half, other) in self.halves.iter_mut().zip(&other.halves) {
            half.height.add(&other.height);
            half.added += other.added;
            half.base += other.base;
        }
        self.all.add(&other.all);
    }

    #[inline]
    pub(super) fn levels(&mut self) -> [Level<'_>; 3] {
        let [small, large] = &mut self.halves;
        [&mut small.height, &mut large.height, &mut self.all].map(Height::level)
    }

    pub(crate) fn reset_peak(&mut self) {
        self.levels().into_iter().for_each(Level::reset);
    }

    pub(crate) fn reset_accumulated(&mut self) {
        for half in &mut self.halves {
            (half.added, half.base) = (0, half.height.current());
        }
    }
}

/// The current value of a statistic and a way to set its peak.
#[derive(Debug)]
pub(crate) struct Level<'a> {
    pub(crate) current: i64,
    peak: &'a mut i64,
    /// The statistic's headroom, if it is stored that way.
    head_room: Option<&'a mut i64>,
}

impl<'a> Level<'a> {
    /// Returns the level of a statistic that is stored without headroom.
    pub(super) fn plain(current: i64, peak: &'a mut i64) -> Level<'a> {
        Level {
            current,
            peak,
            head_room: None,
        }
    }

    pub(crate) fn peak(&self) -> i64 {
        *self.peak
    }

    pub(crate) fn set_peak(self, peak: i64) {
        *self.peak = peak;
        if let Some(head_room) = self.head_room {
            debug_assert!(peak >= self.current, "a figure is above its peak");
            *head_room = peak - self.current;
        }
    }

    pub(super) fn reset(self) {
        let current = self.current;
        self.set_peak(current);
    }
}

/// The part of a statistic that pending blocks add: freed blocks that wait for other streams.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Waiting {
    /// By [`SizeKind`].
    pub(super) current: [i64; 2],
    /// The value of `current` when the sums were reset.
    base: [i64; 2],
    /// The highest values of the statistic while any block was pending, by [`SizeKind`]; `peak` is that of the
    /// total.
    peaks: [i64; 2],
    peak: i64,
}

impl Waiting {
    /// Raises the peaks of the statistic. `held` is its part without the pending blocks.
    pub(super) fn raise_peaks(&mut self, held: &Gauge, has_new_peak: &mut bool) {
        for level in self.levels(held) {
            *has_new_peak |= *level.peak < level.current;
            *level.peak = level.current.max(*level.peak);
        }
    }

    #[inline]
    pub(super) fn levels(&mut self, held: &Gauge) -> [Level<'_>; 3] {
        let current = |kind: usize| held.halves[kind].height.current() + self.current[kind];
        let (currents, [small, large]) = ([current(0), current(1)], &mut self.peaks);
        [
            Level::plain(currents[0], small),
            Level::plain(currents[1], large),
            Level::plain(currents[0] + currents[1], &mut self.peak),
        ]
    }

    /// Adds another part of the statistic. The peaks stay: the peak of a sum is not the sum of peaks.
    pub(super) fn add(&mut self, other: &Waiting) {
        for kind in [0, 1] {
            self.current[kind] += other.current[kind];
            self.base[kind] += other.base[kind];
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.base = self.current;
    }
}
