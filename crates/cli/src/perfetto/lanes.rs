//! Puts slices that overlap in time into rows.

use std::collections::BTreeMap;
use std::ops::Range;

/// Rows of slices that do not overlap.
pub(super) struct Lanes<T> {
    /// The slices of each row, by their start: the end, and what is shown.
    lanes: Vec<BTreeMap<i64, (i64, T)>>,
    lanes_max: usize,
}

impl<T> Lanes<T> {
    /// Returns no slices, for at most `lanes_max` rows.
    pub(super) fn new(lanes_max: usize) -> Lanes<T> {
        Lanes {
            lanes: Vec::new(),
            lanes_max,
        }
    }

    /// Puts a slice, which is not empty, into the first row with room for it. Returns whether there is one. O(m log n)
    /// for m rows of n slices.
    pub(super) fn put(&mut self, time: Range<i64>, shown: T) -> bool {
        let has_room = |lane: &BTreeMap<i64, (i64, T)>| {
            let before = lane.range(..time.end).next_back();
            before.is_none_or(|(_, &(end, _))| end <= time.start)
        };
        let lane = self.lanes.iter().position(has_room);
        let lane = lane.unwrap_or(self.lanes.len());
        if lane == self.lanes_max {
            return false;
        }
        if lane == self.lanes.len() {
            self.lanes.push(BTreeMap::new());
        }
        self.lanes[lane].insert(time.start, (time.end, shown));
        true
    }

    /// Returns the slices of each row, in order.
    pub(super) fn into_rows(self) -> impl Iterator<Item = impl Iterator<Item = (Range<i64>, T)>> {
        let slices = |(start, (end, shown))| (start..end, shown);
        self.lanes
            .into_iter()
            .map(move |lane| lane.into_iter().map(slices))
    }
}

#[cfg(test)]
mod tests {
    use super::Lanes;

    #[test]
    fn slices_of_a_row_do_not_overlap() {
        let mut lanes = Lanes::new(2);
        for (start, end, fits) in [
            (10, 20, true),
            (20, 30, true),
            (0, 10, true),
            (15, 25, true),
            (5, 11, true),
            (19, 21, false),
            (0, 40, false),
            (30, 31, true),
        ] {
            assert_eq!(lanes.put(start..end, ()), fits, "{start}..{end}");
        }
        let rows: Vec<Vec<i64>> = lanes
            .into_rows()
            .map(|row| row.map(|(time, ())| time.start).collect())
            .collect();
        assert_eq!(rows, [vec![0, 10, 20, 30], vec![5, 15]]);
    }
}
