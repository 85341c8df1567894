//! The peaks of a device whose streams are served by several allocators.
//!
//! The peak of a sum is not the sum of peaks, and an allocator sees only its own statistics. So each allocator's
//! peak is a *ceiling*, and all ceilings add up to no more than the device's peak. While every allocator stays
//! below its ceiling, the device is below its peak, and nothing needs to be checked. When an allocator passes its
//! ceiling, [`Peaks::sync`] reads the statistics of all of them. It raises the device's peak to the current sum and
//! distributes the headroom below it anew.
//!
//! Peaks are exact if each change is synced before the next, as while one thread allocates. If several threads
//! allocate and free at the same moment, a peak may miss a part. It may also count memory that one thread had freed
//! when another allocated as much.

use crate::figures::{ACTIVE_LEVELS, Figures, LEVELS};

/// The peaks of every statistic of a device, and how the headroom below them is distributed.
#[derive(Debug)]
pub(crate) struct Peaks {
    /// In the order of [`Figures::for_each_level`].
    device: [i64; LEVELS],
    /// One for each allocator.
    parts: Vec<Part>,
    /// Whether any block of any allocator was pending at the last sync.
    any_waits: bool,
}

/// The contribution of one allocator.
#[derive(Clone, Debug)]
struct Part {
    current: [i64; LEVELS],
    ceiling: [i64; LEVELS],
    /// The highest `current` of all syncs: the allocator is likely to need it again.
    high: [i64; LEVELS],
    /// Whether it passed a ceiling, which is then its own peak.
    has_new_peak: bool,
    tracks_active: bool,
}

impl Default for Peaks {
    fn default() -> Peaks {
        Peaks {
            device: [0; LEVELS],
            parts: Vec::new(),
            any_waits: false,
        }
    }
}

impl Peaks {
    /// Updates the peaks from the allocators' statistics and distributes the headroom below them, for
    /// [`Peaks::write_ceilings`] to write. Before the first call, at most one allocator may have been used, so that
    /// its own peaks are the device's.
    pub(crate) fn sync<'f>(&mut self, figures: impl Iterator<Item = &'f mut Figures>) {
        self.read(figures);
        for index in 0..LEVELS {
            self.raise(index);
            self.distribute(index);
        }
    }

    /// Writes into each allocator's statistics how far they may rise without a sync.
    pub(crate) fn write_ceilings<'f>(&self, figures: impl Iterator<Item = &'f mut Figures>) {
        for (part, figures) in self.parts.iter().zip(figures) {
            figures.track_active(self.any_waits);
            write(figures, &part.ceiling);
        }
    }

    /// Sets every peak to its current value, after the peaks of the allocators' statistics were set to theirs.
    pub(crate) fn reset<'f>(&mut self, figures: impl Iterator<Item = &'f mut Figures>) {
        self.read(figures);
        for part in &mut self.parts {
            part.high = part.current;
        }
        for index in 0..LEVELS {
            self.device[index] = self.sum(index);
        }
    }

    /// Returns the number of allocators that the peaks cover.
    pub(crate) fn count(&self) -> usize {
        self.parts.len()
    }

    /// Writes the peaks into the sum of the allocators' statistics.
    pub(crate) fn write_to(&self, sum: &mut Figures) {
        write(sum, &self.device);
    }

    fn read<'f>(&mut self, figures: impl Iterator<Item = &'f mut Figures>) {
        let is_first = self.parts.is_empty();
        self.any_waits = false;
        let nothing = Part {
            current: [0; LEVELS],
            ceiling: [0; LEVELS],
            high: [0; LEVELS],
            has_new_peak: false,
            tracks_active: false,
        };
        for (number, figures) in figures.enumerate() {
            if number == self.parts.len() {
                self.parts.push(nothing.clone());
            }
            let part = &mut self.parts[number];
            self.any_waits |= figures.waiting_blocks() > 0;
            part.has_new_peak = figures.take_has_new_peak() || is_first;
            part.tracks_active = figures.tracks_active() || is_first;
            let mut index = 0;
            figures.for_each_level(|level| {
                part.current[index] = level.current;
                part.ceiling[index] = level.peak();
                part.high[index] = part.high[index].max(level.current);
                index += 1;
            });
            debug_assert_eq!(index, LEVELS);
        }
    }

    /// Raises one of the device's peaks to the highest value since the last sync.
    fn raise(&mut self, index: usize) {
        let sum = self.sum(index);
        let mut peak = self.device[index].max(sum);
        let is_active = (ACTIVE_LEVELS..2 * ACTIVE_LEVELS).contains(&index);
        if is_active {
            // Allocated memory is active. While no block is pending the two are equal, and only the allocated peak
            // is kept.
            peak = peak.max(self.device[index - ACTIVE_LEVELS]);
        }
        for part in self.parts.iter().filter(|part| part.has_new_peak) {
            // The allocator's value may have fallen again within the same call. The other allocators did not
            // change in that time.
            if part.tracks_active || !is_active {
                peak = peak.max(sum - part.current[index] + part.ceiling[index]);
            }
        }
        debug_assert!(peak >= self.device[index], "a peak does not fall");
        debug_assert!(peak >= sum, "the device is not above its peak");
        self.device[index] = peak;
    }

    /// Distributes the headroom below one of the device's peaks. Each allocator gets what it has needed before if
    /// there is enough for all, so that a job that repeats itself causes no sync. Otherwise they get equal shares.
    fn distribute(&mut self, index: usize) {
        let left = self.device[index] - self.sum(index);
        let wanted = |part: &Part| part.high[index] - part.current[index];
        let all_wanted: i64 = self.parts.iter().map(wanted).sum();
        let count = i64::try_from(self.parts.len()).expect("there are few");
        for part in &mut self.parts {
            let share = if all_wanted <= left {
                wanted(part) + (left - all_wanted) / count
            } else {
                left / count
            };
            debug_assert!(share >= 0, "a ceiling is not below what is there");
            part.ceiling[index] = part.current[index] + share;
        }
        let ceilings: i64 = self.parts.iter().map(|part| part.ceiling[index]).sum();
        debug_assert!(
            ceilings <= self.device[index],
            "the ceilings add up to no more than the peak"
        );
    }

    fn sum(&self, index: usize) -> i64 {
        self.parts.iter().map(|part| part.current[index]).sum()
    }
}

fn write(figures: &mut Figures, peaks: &[i64; LEVELS]) {
    let mut peaks = peaks.iter();
    figures.for_each_level(|level| level.set_peak(*peaks.next().expect("one for each level")));
    debug_assert_eq!(peaks.next(), None);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::SizeKind;
    use crate::units::Bytes;

    const PARTS: usize = 3;

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(usize, u64),
        /// Whether work still uses the block.
        Free(usize, bool),
        Finish(usize),
        Reset,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..PARTS, 1..1_000_u64).prop_map(|(part, size)| Step::Allocate(part, size)),
            6 => any::<(usize, bool)>().prop_map(|(index, waits)| Step::Free(index, waits)),
            3 => any::<usize>().prop_map(Step::Finish),
            1 => Just(Step::Reset),
        ]
    }

    /// The statistics of a device's allocators, and one set of statistics for the whole device.
    struct World {
        parts: [Figures; PARTS],
        whole: Figures,
        peaks: Peaks,
    }

    impl World {
        fn new() -> World {
            let mut world = World {
                parts: std::array::from_fn(|_| Figures::new()),
                whole: Figures::new(),
                peaks: Peaks::default(),
            };
            world.sync();
            world
        }

        fn sync(&mut self) {
            self.peaks.sync(self.parts.iter_mut());
            self.peaks.write_ceilings(self.parts.iter_mut());
        }

        /// Counts a change in one part, and syncs if the part passed a ceiling.
        fn count(&mut self, part: usize, count: impl Fn(&mut Figures)) {
            count(&mut self.parts[part]);
            count(&mut self.whole);
            // When the first block becomes pending, all parts must start to track active memory separately.
            if self.parts[part].has_new_peak() || self.whole.waiting_blocks() == 1 {
                self.sync();
            }
        }

        fn sum(&self) -> Figures {
            let mut sum = Figures::new();
            for part in &self.parts {
                sum = sum.sum(part.clone());
            }
            self.peaks.write_to(&mut sum);
            sum
        }
    }

    fn levels(figures: &mut Figures) -> Vec<(i64, i64)> {
        let mut levels = Vec::new();
        figures.for_each_level(|level| levels.push((level.current, level.peak())));
        levels
    }

    proptest! {
        /// While one thread allocates, the device's peaks equal those of one allocator that serves all streams. No
        /// ceiling lets an allocator exceed them unnoticed.
        #[test]
        fn peaks_are_those_of_all_together(steps in prop::collection::vec(step(), 1..200)) {
            let mut world = World::new();
            let (mut held, mut waiting) = (Vec::new(), Vec::new());
            for step in steps {
                match step {
                    Step::Allocate(part, size) => {
                        let kind = if size > 500 { SizeKind::Large } else { SizeKind::Small };
                        let size = Bytes(size);
                        world.count(part, |figures| figures.count_allocated(kind, size, size));
                        held.push((part, kind, size));
                    }
                    Step::Free(index, waits) if !held.is_empty() => {
                        let block = held.swap_remove(index % held.len());
                        let (part, kind, size) = block;
                        if waits {
                            world.count(part, |figures| figures.count_suspended(kind, size));
                            waiting.push(block);
                        } else {
                            world.count(part, |figures| figures.count_freed(kind, size, size));
                        }
                    }
                    Step::Finish(index) if !waiting.is_empty() => {
                        let (part, kind, size) = waiting.swap_remove(index % waiting.len());
                        world.count(part, |figures| figures.count_resumed(kind, size, size));
                    }
                    Step::Reset => {
                        world.parts.iter_mut().for_each(Figures::reset_peaks);
                        world.peaks.reset(world.parts.iter_mut());
                        world.sync();
                        world.whole.reset_peaks();
                    }
                    Step::Free(..) | Step::Finish(_) => {}
                }
                prop_assert_eq!(world.sum().stats(), world.whole.stats());
                let mut ceilings = vec![0; LEVELS];
                for part in &mut world.parts {
                    for (ceiling, (_, peak)) in ceilings.iter_mut().zip(levels(part)) {
                        *ceiling += peak;
                    }
                }
                let peaks = levels(&mut world.sum());
                for (ceiling, (_, peak)) in ceilings.into_iter().zip(peaks) {
                    prop_assert!(ceiling <= peak, "{ceiling} of {peak}");
                }
            }
        }
    }

    /// A job that repeats itself exceeds no ceiling.
    #[test]
    fn head_room_goes_to_who_needed_it() {
        let mut world = World::new();
        let size = Bytes(600);
        let kind = SizeKind::Large;
        let allocate = |figures: &mut Figures| figures.count_allocated(kind, size, size);
        let free = |figures: &mut Figures| figures.count_freed(kind, size, size);
        for _ in 0..2 {
            for (part, count) in [(0, 3), (1, 1)] {
                for _ in 0..count {
                    world.count(part, allocate);
                }
            }
            for (part, count) in [(0, 3), (1, 1)] {
                for _ in 0..count {
                    world.count(part, free);
                }
            }
            world.sync();
        }
        for part in [0, 0, 0, 1] {
            allocate(&mut world.parts[part]);
            assert!(!world.parts[part].has_new_peak(), "part {part}");
        }
        allocate(&mut world.parts[1]);
        assert!(world.parts[1].has_new_peak());
    }
}
