//! Curves over time, stored at one level of detail.

/// The most parts of a curve.
const PARTS_MAX: u64 = 8192;

/// Several curves over the instants of a recording: the least and the most of each in every part of time.
#[derive(Clone, Debug)]
pub struct Levels<const CURVES: usize> {
    /// The number of instants in a part.
    part_instants: u64,
    least: [Vec<u64>; CURVES],
    most: [Vec<u64>; CURVES],
    /// The current part: its number, and the least and most so far.
    part: (u64, [u64; CURVES], [u64; CURVES]),
}

impl<const CURVES: usize> Levels<CURVES> {
    /// Returns curves over `instants`.
    pub(crate) fn new(instants: u64) -> Levels<CURVES> {
        Levels {
            part_instants: instants.div_ceil(PARTS_MAX).max(1),
            least: [const { Vec::new() }; CURVES],
            most: [const { Vec::new() }; CURVES],
            part: (0, [u64::MAX; CURVES], [0; CURVES]),
        }
    }

    /// Adds the values at `instant`. Call it for each instant, from 0 on.
    pub(crate) fn add(&mut self, instant: u64, values: &[u64; CURVES]) {
        while self.part.0 < instant / self.part_instants {
            self.end_part();
        }
        let (_, least, most) = &mut self.part;
        for curve in 0..CURVES {
            least[curve] = least[curve].min(values[curve]);
            most[curve] = most[curve].max(values[curve]);
        }
    }

    /// Ends the last part.
    pub(crate) fn finish(&mut self) {
        self.end_part();
    }

    fn end_part(&mut self) {
        let (number, least, most) = &mut self.part;
        for curve in 0..CURVES {
            self.least[curve].push(least[curve]);
            self.most[curve].push(most[curve]);
        }
        *number += 1;
        *least = [u64::MAX; CURVES];
        *most = [0; CURVES];
    }

    /// Returns the number of instants in a part.
    pub fn part_instants(&self) -> u64 {
        self.part_instants
    }

    /// Returns the least of a curve in each part.
    pub fn least(&self, curve: usize) -> &[u64] {
        &self.least[curve]
    }

    /// Returns the most of a curve in each part.
    pub fn most(&self, curve: usize) -> &[u64] {
        &self.most[curve]
    }
}
