//! Matches the call sites of two recordings.
//!
//! If code was edited between two runs, its functions are at other lines. Stacks of the same functions in the same
//! files are matched in the order of their lines, which an edit keeps. As many as possible are matched: with the
//! same size if possible, and then at the nearest lines, which are the same lines if nothing moved. If there are
//! thousands, not all pairs are tried, but only those between stacks at equal lines.

use std::cmp::Ordering;

/// A call site among those with the same functions in the same files.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Place {
    /// The lines, innermost first.
    pub(super) lines: Vec<u32>,
    /// Its largest request, in bytes.
    pub(super) request_bytes_max: u64,
    /// Its number among the sites of its recording.
    pub(super) number: usize,
}

/// The cost of leaving a call site without a partner, and of a partner with another size. A site that kept its size
/// keeps its partner, even if two others lose theirs.
const ALONE: u64 = 1_000_000_000;
const OTHER_SIZE: u64 = 1_500_000_000;

/// The cost of a match is the number of lines it is off, at most this: less than any other cost.
const LINES_OFF_MAX: u64 = 10_000;

/// With more pairs than this, sites at equal lines are paired first, or all sites in order.
const PAIRS_MAX: usize = 1 << 22;

/// The numbers of the sites that match, in the order of their lines.
type Pairs = Vec<[Option<usize>; 2]>;

/// Returns the numbers of the sites that match, and of those without a partner. O(n·m) for n and m sites if there
/// are few, otherwise O(n log n).
pub(super) fn matched(mut sides: [Vec<Place>; 2]) -> Pairs {
    for side in &mut sides {
        side.sort_unstable();
    }
    let [before, after] = &sides;
    if has_table(before, after) {
        return by_cost(before, after).1;
    }
    // The first costs less if no line moved, the second if all lines moved.
    let candidates = [around_equal_lines(before, after), in_order(before, after)];
    let best = candidates.into_iter().min_by_key(|&(cost, _)| cost);
    best.unwrap_or_default().1
}

/// Returns whether sites are few enough to try every pair.
fn has_table(before: &[Place], after: &[Place]) -> bool {
    (before.len() + 1) * (after.len() + 1) <= PAIRS_MAX
}

/// Returns pairs of the sites at equal lines, and their total cost. The sites between them are paired by cost, or
/// in order if they are too many.
fn around_equal_lines(before: &[Place], after: &[Place]) -> (u64, Pairs) {
    let (mut left, mut right) = (0, 0);
    let (mut left_done, mut right_done) = (0, 0);
    let mut all = (0, Pairs::new());
    let mut add = |(cost, pairs): (u64, Pairs)| {
        all.0 += cost;
        all.1.extend(pairs);
    };
    let between = |before: &[Place], after: &[Place]| {
        if has_table(before, after) {
            by_cost(before, after)
        } else {
            in_order(before, after)
        }
    };
    while let (Some(first), Some(second)) = (before.get(left), after.get(right)) {
        match first.lines.cmp(&second.lines) {
            Ordering::Less => left += 1,
            Ordering::Greater => right += 1,
            Ordering::Equal => {
                add(between(&before[left_done..left], &after[right_done..right]));
                let pair = [Some(first.number), Some(second.number)];
                add((cost(first, second), vec![pair]));
                (left, right) = (left + 1, right + 1);
                (left_done, right_done) = (left, right);
            }
        }
    }
    add(between(&before[left_done..], &after[right_done..]));
    all
}

/// Returns the first site paired with the first, the second with the second, and so on, and the total cost.
fn in_order(before: &[Place], after: &[Place]) -> (u64, Pairs) {
    let most = before.len().max(after.len());
    let both = (0..most).map(|index| [before.get(index), after.get(index)]);
    let costs = both.clone().map(|pair| match pair {
        [Some(first), Some(second)] => cost(first, second),
        _ => ALONE,
    });
    let number = |place: Option<&Place>| place.map(|place| place.number);
    let pairs = both.map(|pair| pair.map(number));
    (costs.sum(), pairs.collect())
}

/// Returns the pairs with the least total cost, and that cost. O(n·m).
fn by_cost(before: &[Place], after: &[Place]) -> (u64, Pairs) {
    let number = |place: Option<&Place>| place.map(|place| place.number);
    let costs = costs(before, after);
    let width = after.len() + 1;
    let (mut left, mut right) = (0, 0);
    let mut pairs = Vec::new();
    while left < before.len() || right < after.len() {
        let here = costs[left * width + right];
        let cost_at = |left: usize, right: usize| costs.get(left * width + right).copied();
        let both = (before.get(left), after.get(right));
        let step = match both {
            (Some(first), Some(second))
                if cost_at(left + 1, right + 1)
                    .is_some_and(|rest| here == rest + cost(first, second)) =>
            {
                [1, 1]
            }
            (Some(_), _) if cost_at(left + 1, right) == here.checked_sub(ALONE) => [1, 0],
            _ => [0, 1],
        };
        pairs.push([
            number(both.0.filter(|_| step[0] == 1)),
            number(both.1.filter(|_| step[1] == 1)),
        ]);
        left += step[0];
        right += step[1];
    }
    (costs[0], pairs)
}

/// Returns the least cost of matching all sites from each pair of positions on, row by row.
fn costs(before: &[Place], after: &[Place]) -> Vec<u64> {
    let width = after.len() + 1;
    let mut costs = vec![0; (before.len() + 1) * width];
    for left in (0..=before.len()).rev() {
        for right in (0..=after.len()).rev() {
            let at = left * width + right;
            let leave_left = (left < before.len()).then(|| costs[at + width] + ALONE);
            let leave_right = (right < after.len()).then(|| costs[at + 1] + ALONE);
            let both = leave_left.and(leave_right);
            let both = both.map(|_| costs[at + width + 1] + cost(&before[left], &after[right]));
            let all = [both, leave_left, leave_right];
            costs[at] = all.into_iter().flatten().min().unwrap_or(0);
        }
    }
    costs
}

/// Returns the cost of matching two sites.
fn cost(before: &Place, after: &Place) -> u64 {
    let lines = before.lines.iter().zip(&after.lines);
    let off = lines.map(|(&left, &right)| u64::from(left.abs_diff(right)));
    let off: u64 = off.sum();
    let is_same_size = before.request_bytes_max == after.request_bytes_max;
    off.min(LINES_OFF_MAX) + if is_same_size { 0 } else { OTHER_SIZE }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the matched lines of sites that are given by line and size.
    fn lines(before: &[(u32, u64)], after: &[(u32, u64)]) -> Vec<[Option<u32>; 2]> {
        let sides = [before, after];
        let places = sides.map(|side| {
            let places = (0..)
                .zip(side)
                .map(|(number, &(line, request_bytes_max))| Place {
                    lines: vec![line, 1],
                    request_bytes_max,
                    number,
                });
            places.collect()
        });
        let pairs = matched(places).into_iter();
        let lines = pairs.map(|[left, right]| {
            [
                left.map(|number| before[number].0),
                right.map(|number| after[number].0),
            ]
        });
        lines.collect()
    }

    fn both(left: u32, right: u32) -> [Option<u32>; 2] {
        [Some(left), Some(right)]
    }

    #[test]
    fn what_did_not_move_is_matched_with_itself() {
        let places = [(10, 1), (11, 2), (12, 2), (40, 3)];
        let same = places.map(|(line, _)| both(line, line));
        assert_eq!(lines(&places, &places), same);
        // All sizes are different: a larger batch.
        let larger = places.map(|(line, size)| (line, 8 * size));
        assert_eq!(lines(&places, &larger), same);
    }

    #[test]
    fn what_moved_keeps_its_order() {
        let places = [(10, 1), (11, 2), (12, 2), (40, 3)];
        for shift in [1, 2, 1000] {
            let moved = places.map(|(line, size)| (line + shift, size));
            let expected = places.map(|(line, _)| both(line, line + shift));
            assert_eq!(lines(&places, &moved), expected);
        }
        let larger = places.map(|(line, size)| (line + 500, 8 * size));
        let expected = places.map(|(line, _)| both(line, line + 500));
        assert_eq!(lines(&places, &larger), expected);
    }

    #[test]
    fn what_is_new_or_gone_has_no_partner() {
        let before = [(10, 5), (20, 5), (30, 5)];
        let after = [(11, 5), (15, 5), (21, 5), (31, 5)];
        let expected = [both(10, 11), [None, Some(15)], both(20, 21), both(30, 31)];
        assert_eq!(lines(&before, &after), expected);
        let gone = [both(11, 10), [Some(15), None], both(21, 20), both(31, 30)];
        assert_eq!(lines(&after, &before), gone);
        // A site that stayed unchanged counts for more than two pairs that differ in everything.
        let expected = [[Some(10), None], both(20, 20), [None, Some(30)]];
        assert_eq!(lines(&[(10, 1), (20, 2)], &[(20, 2), (30, 5)]), expected);
        assert_eq!(lines(&[], &[(1, 1)]), [[None, Some(1)]]);
    }

    #[test]
    fn lines_that_follow_each_other_are_not_taken_for_each_other() {
        let before: Vec<(u32, u64)> = (0..100).map(|line| (line, 7)).collect();
        for size in [7, 9] {
            let after: Vec<(u32, u64)> = (1..101).map(|line| (line, size)).collect();
            let expected: Vec<_> = (0..100).map(|line| both(line, line + 1)).collect();
            assert_eq!(lines(&before, &after), expected);
        }
    }

    #[test]
    fn more_places_than_are_all_tried_keep_their_partners() {
        let places: Vec<(u32, u64)> = (10..2110).map(|line| (line, u64::from(line % 7))).collect();
        let same: Vec<_> = places.iter().map(|&(line, _)| both(line, line)).collect();
        // One more site, at an earlier line.
        let more = [&[(9, 1)], &*places].concat();
        let expected = [&[[None, Some(9)]], &*same].concat();
        assert!(lines(&places, &more) == expected);
        // Some sites that moved, between others that did not.
        let moved: Vec<(u32, u64)> = places
            .iter()
            .map(|&(line, size)| (if line == 2109 { 2200 } else { line }, size))
            .collect();
        let mut expected = same;
        expected[2099] = both(2109, 2200);
        assert!(lines(&places, &moved) == expected);
        // All sites moved by one line. Most lines still equal that of another site.
        let next: Vec<(u32, u64)> = places
            .iter()
            .map(|&(line, size)| (line + 1, size))
            .collect();
        let expected: Vec<_> = (10..2110).map(|line| both(line, line + 1)).collect();
        assert!(lines(&places, &next) == expected);
    }
}
