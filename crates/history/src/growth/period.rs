//! Finds the period of a job's allocations.
//!
//! An *anchor* is a request that is made once a step. With good boundaries each kind of request is made as often in
//! one step as in the next. Kinds are distinguished in two ways:
//! - by name: the stack, or the exact size if there is no stack,
//! - by *shape*, which does not depend on sizes. So it stays the same if sequences differ in length and caches
//!   grow.
//!
//! If a job repeats by both, both must agree. A step may have no request that is made once. Then the number of live
//! blocks rises once or a few times per step, and such a rise is an anchor, too. Blocks that are kept for good are
//! neither anchors nor kinds, so a job with a leak repeats as it would without the leak.
//!
//! Several steps together repeat as well as one, and work that a job does once in a hundred steps repeats best of
//! all. So among the periods that are about as good as the best, the shortest is taken. Parts of a step that
//! alternate have little in common, such as forward and backward, or the two networks of an adversarial job. If
//! they have much in common, they still repeat less than several parts taken as one. A loop within a step may
//! repeat as well as steps do. But its blocks are still in use when it begins again, or it ends long before the
//! recording.

use hashbrown::HashMap;
use lowtide_core::Bytes;
use lowtide_trace::StackId;

use crate::callers::Callers;
use crate::growth::line::as_float;
use crate::growth::turnover::is_given_back;
use crate::history::{Block, History};

/// The least number of steps that shows anything.
pub(super) const STEPS_MIN: usize = 4;

/// The most requests that are tried as anchors, and the most kinds that each is tried on.
const ANCHORS_MAX: usize = 48;
const WITNESSES_MAX: usize = 128;

/// The most pairs of neighbouring steps that are compared.
const PAIRS_MAX: usize = 512;

/// Odd, and without a pattern in its bits: a multiplication scatters a number over all 64 bits.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The least number of requests in a step. A loop within a step has fewer.
const STEP_REQUESTS_MIN: usize = 4;

/// The least share of the kinds that must repeat. A fifth of random requests repeats.
const QUALITY_MIN: f64 = 0.5;

/// The share of the best quality from which a period is about as good. Kinds that occur once in a hundred steps,
/// for an evaluation or the first of many tokens, may be nearly half of all kinds.
const SCORE_MIN: f64 = 0.5;

/// Numbers of steps that differ by at most this, or by less than this share, are those of one period.
const COUNT_NEAR: f64 = 2.0;
const COUNT_NEAR_SHARE: f64 = 0.1;

/// The least share of a step's requests that are freed within the step. A loop within a step frees fewer.
const GIVEN_BACK_MIN: f64 = 0.5;

/// The least share of the recording, from the first step on, that is in steps of the typical length, or up to this
/// many times as long. Layers are followed by other work.
const STEPS_SHARE_MIN: f64 = 0.5;
const LENGTH_MAX: u32 = 2;

/// The most requests that are checked for being freed within their step.
const REQUESTS_MAX: usize = 4096;

/// The most parts of a step. Taken as one, they must repeat better by this factor.
const PARTS_MAX: usize = 8;
const PARTS_GAIN: f64 = 1.15;

/// The unit in which boundaries are moved: this fraction of a step.
const MOVE_UNITS: i64 = 1024;

/// A shape has this many consecutive requests. Each counts how many later requests it outlives, up to this many.
const SHAPE_REQUESTS: usize = 3;
const LIFE_MAX: usize = 16;

/// The instants of the requests of each kind, ascending.
type Kinds = Vec<Vec<u32>>;

/// Returns the boundaries of the steps, and the share of the kinds that repeats from step to step. Returns `None`
/// if too little repeats. O(n log n) for n blocks.
pub(super) fn find(history: &History, callers: &Callers) -> Option<(f64, Vec<u32>)> {
    let requests = passing(history);
    let boundaries_max = requests.len() / STEP_REQUESTS_MIN;
    let families = [by_name(&requests, history), by_shape(&requests, history)];
    let rises = rises(&requests, boundaries_max, history);
    let anchors: Vec<&Vec<u32>> = families
        .iter()
        .flat_map(|kinds| anchors(kinds, boundaries_max))
        .chain(&rises)
        .collect();
    let judges = families.iter().map(|kinds| Judge::new(kinds, &anchors));
    let judges: Vec<Judge<'_>> = judges.filter(|judge| judge.best >= QUALITY_MIN).collect();
    if judges.is_empty() {
        return None;
    }
    let is_good = |anchor: &&&Vec<u32>| score(anchor, &judges) >= SCORE_MIN;
    let good = anchors.iter().filter(is_good);
    let live = live_bytes(history);
    let periods: Vec<(f64, Vec<u32>)> = good
        .map(|anchor| whole_steps(anchor, &judges))
        .filter(|(_, boundaries)| {
            let moved = moved_to_least_live(boundaries, &live);
            given_back_share(&moved, &requests) >= GIVEN_BACK_MIN
                && is_given_back(history, &moved)
                && goes_on(&moved, history)
                && callers.go_on_between(&moved)
        })
        .collect();
    let boundaries = shortest(periods)?;
    let shares = judges.iter().map(|judge| judge.quality(&boundaries));
    let repeated_share = shares.fold(0.0, f64::max);
    Some((repeated_share, moved_to_least_live(&boundaries, &live)))
}

/// Returns the requests that were made during the recording and whose blocks were freed soon enough. Blocks that
/// are kept show when a leak or a cache grew, and not when a step began.
fn passing(history: &History) -> Vec<&Block> {
    let kept_from = history.events / u32::try_from(STEPS_MIN).unwrap_or(1);
    let blocks = history.blocks.iter().filter(|block| block.start > 0);
    let passing = blocks
        .filter(|block| block.freed <= history.events && block.freed - block.start <= kept_from);
    passing.collect()
}

/// Returns the instants at which the number of live `requests` reaches a half, a quarter or an eighth of its
/// maximum, after it had been less than half of that. Also returns several rises taken as one, because parts of a
/// step may differ.
fn rises(requests: &[&Block], rises_max: usize, history: &History) -> Vec<Vec<u32>> {
    let mut changes = vec![0_i64; history.events as usize + 2];
    for block in requests {
        changes[block.start as usize] += 1;
        changes[block.freed as usize] -= 1;
    }
    let live = || {
        changes.iter().scan(0, |live, change| {
            *live += change;
            Some(*live)
        })
    };
    let most = live().max().unwrap_or(0);
    let rises_to = |level: i64| {
        let mut is_low = true;
        let rises = (0..).zip(live()).filter(move |&(_, live)| {
            let rises = is_low && live >= level;
            is_low = !rises && (is_low || 2 * live < level);
            rises
        });
        rises.map(|(instant, _)| instant).collect()
    };
    let mut rises = Vec::from([2, 4, 8].map(|part| rises_to((most / part).max(1))));
    rises.retain(|rises: &Vec<u32>| rises.len() <= rises_max);
    let taken_as_one = rises.iter().flat_map(|rises| {
        (1..=PARTS_MAX).map(|parts| rises.iter().copied().step_by(parts).collect())
    });
    taken_as_one
        .filter(|rises: &Vec<u32>| rises.len() > STEPS_MIN && covers(rises, history))
        .collect()
}

/// Returns the share of the requests that are freed within the step that made them.
fn given_back_share(boundaries: &[u32], requests: &[&Block]) -> f64 {
    let looked_at = requests.len().min(REQUESTS_MAX);
    let step_of = |instant: u32| boundaries.partition_point(|&boundary| boundary <= instant);
    let inside = |step: usize| (1..boundaries.len()).contains(&step);
    let steps = (0..looked_at)
        .map(|number| requests[number * requests.len() / looked_at])
        .map(|block| (step_of(block.start), step_of(block.freed - 1)))
        .filter(|&(step, _)| inside(step));
    let (all, given_back) = steps.fold((0, 0), |(all, given_back), (start, end)| {
        (all + 1, given_back + u64::from(start == end))
    });
    as_float(given_back) / as_float(all.max(1))
}

/// Returns whether steps cover most of the recording once they have begun.
fn goes_on(boundaries: &[u32], history: &History) -> bool {
    let length_max = typical_length(boundaries).saturating_mul(LENGTH_MAX);
    let lengths = boundaries.windows(2).map(|step| step[1] - step[0]);
    let covered: u32 = lengths.filter(|&length| length <= length_max).sum();
    f64::from(covered) >= STEPS_SHARE_MIN * f64::from(history.events - boundaries[0])
}

/// Kinds of requests that show how good boundaries are.
struct Judge<'k> {
    witnesses: Vec<&'k Vec<u32>>,
    /// The quality of the best boundaries.
    best: f64,
}

impl<'k> Judge<'k> {
    fn new(kinds: &'k Kinds, anchors: &[&Vec<u32>]) -> Judge<'k> {
        let step = kinds.len().div_ceil(WITNESSES_MAX).max(1);
        let mut judge = Judge {
            witnesses: kinds.iter().step_by(step).collect(),
            best: 0.0,
        };
        let qualities = anchors.iter().map(|anchor| judge.quality(anchor));
        judge.best = qualities.fold(0.0, f64::max);
        judge
    }

    /// Returns the share of the kinds that occur as often in a step as in the step before, but not zero times, on
    /// average over the steps.
    fn quality(&self, boundaries: &[u32]) -> f64 {
        let witnesses = self.witnesses.iter();
        let shares = witnesses.map(|witness| repeated_share(boundaries, witness));
        // No kind counts for more than another, however often it occurs: an anchor always repeats itself.
        shares.sum::<f64>() / as_float(self.witnesses.len().max(1) as u64)
    }
}

/// Returns the score of boundaries. Steps of about the same length count twice: a layer's last occurrence in a step
/// is followed by all other work.
fn score(boundaries: &[u32], judges: &[Judge<'_>]) -> f64 {
    likeness(boundaries, judges) * evenness(boundaries).powi(2)
}

/// Returns how alike neighbouring steps are, relative to the best boundaries, by the judge with the lowest result.
fn likeness(boundaries: &[u32], judges: &[Judge<'_>]) -> f64 {
    let likeness = |judge: &Judge<'_>| judge.quality(boundaries) / judge.best;
    let likeness = judges.iter().map(likeness);
    likeness.fold(f64::INFINITY, f64::min)
}

/// Returns the share of the pairs of neighbouring steps in which one is less than 1.5 times as long as the other.
fn evenness(boundaries: &[u32]) -> f64 {
    let pairs = boundaries.windows(3);
    let even = pairs.clone().filter(|pair| {
        let (first, second) = (u64::from(pair[1] - pair[0]), u64::from(pair[2] - pair[1]));
        2 * first.max(second) < 3 * first.min(second)
    });
    as_float(even.count() as u64) / as_float(pairs.len().max(1) as u64)
}

/// Returns the boundaries of whole steps, and their score. `anchor` may mark steps or parts of steps.
fn whole_steps(anchor: &[u32], judges: &[Judge<'_>]) -> (f64, Vec<u32>) {
    let likeness_min = PARTS_GAIN * likeness(anchor, judges);
    let taken_as_one = (2..=PARTS_MAX)
        .map(|parts| anchor.iter().copied().step_by(parts).collect())
        .filter(|boundaries: &Vec<u32>| boundaries.len() > STEPS_MIN)
        .map(|boundaries| (likeness(&boundaries, judges), boundaries))
        .filter(|&(likeness, _)| likeness > likeness_min);
    // Among equals, the first: the fewest parts.
    let best = taken_as_one.reduce(|best, other| if other.0 > best.0 { other } else { best });
    let boundaries = best.map_or_else(|| anchor.to_vec(), |(_, boundaries)| boundaries);
    (score(&boundaries, judges), boundaries)
}

/// Returns the boundaries of the shortest period. Among several for that period, those that fit best.
fn shortest(periods: Vec<(f64, Vec<u32>)>) -> Option<Vec<u32>> {
    // Repetitions within a first step give a few short steps. The length of most steps is the period.
    let steps = |boundaries: &[u32]| {
        let covered = boundaries[boundaries.len() - 1] - boundaries[0];
        f64::from(covered) / f64::from(typical_length(boundaries))
    };
    let all_steps = periods.iter().map(|(_, boundaries)| steps(boundaries));
    let steps_max = all_steps.fold(0.0, f64::max);
    let steps_min = (steps_max - COUNT_NEAR).min((1.0 - COUNT_NEAR_SHARE) * steps_max);
    // One step more is worth little if it makes the others less alike.
    let fit = |score: f64, boundaries: &[u32]| score.powi(3) * steps(boundaries);
    let same_period = periods
        .into_iter()
        .filter(|(_, boundaries)| steps(boundaries) >= steps_min);
    let best = same_period.max_by(|(left_score, left), (right_score, right)| {
        let by_fit = fit(*left_score, left).total_cmp(&fit(*right_score, right));
        // Among equals, the first to begin.
        by_fit.then(right[0].cmp(&left[0]))
    });
    best.map(|(_, boundaries)| boundaries)
}

/// Returns the median length of the steps.
fn typical_length(boundaries: &[u32]) -> u32 {
    let lengths = boundaries.windows(2).map(|step| step[1] - step[0]);
    let mut lengths: Vec<u32> = lengths.collect();
    let middle = lengths.len() / 2;
    *lengths.select_nth_unstable(middle).1
}

/// Moves all boundaries by about the same share of a step, to where the least memory is live. Between steps a job
/// holds the memory that it keeps, and the least temporary memory.
fn moved_to_least_live(boundaries: &[u32], live: &[u64]) -> Vec<u32> {
    let last = i64::try_from(live.len()).unwrap_or(i64::MAX) - 2;
    // Among equals, the last.
    let least = |from: i64, to: i64| {
        let instants = from.clamp(0, last)..=to.clamp(0, last);
        let instants = instants.filter_map(|instant| u32::try_from(instant).ok());
        let least =
            instants.min_by_key(|&instant| (live[instant as usize], std::cmp::Reverse(instant)));
        least.unwrap_or(0)
    };
    let place = |(index, &boundary)| (i64::from(boundary), shorter_step(boundaries, index));
    let places: Vec<(i64, i64)> = boundaries.iter().enumerate().map(place).collect();
    let moves = places.iter().map(|&(at, step)| {
        let moved = i64::from(least(at - step / 2, at + step / 2)) - at;
        moved * MOVE_UNITS / step
    });
    let mut moves: Vec<i64> = moves.collect();
    moves.sort_unstable();
    // The median, because in its first steps a job does not hold all memory that it keeps, so they show little.
    let typical = moves[moves.len() / 2];
    let moved = (0..).zip(&places).map(|(index, &(at, step))| {
        let middle = at + typical * step / MOVE_UNITS;
        // Before the first step is the job's setup, with less live memory than ever again.
        let reach = if index == 0 { 0 } else { step / 8 };
        least(middle - reach, middle + reach)
    });
    moved.collect()
}

/// Returns the length of the step before a boundary or of the step after it, whichever is shorter.
fn shorter_step(boundaries: &[u32], index: usize) -> i64 {
    let next = index.saturating_sub(1)..boundaries.len() - 1;
    let lengths = next.take(if index == 0 { 1 } else { 2 });
    let lengths = lengths.map(|step| i64::from(boundaries[step + 1] - boundaries[step]));
    lengths.min().unwrap_or(1).max(1)
}

/// Returns the live bytes at each instant.
fn live_bytes(history: &History) -> Vec<u64> {
    let mut live = vec![0_u64; history.events as usize + 2];
    for block in &history.blocks {
        let bytes = block.live_bytes().get();
        // Summed up below, where the freed bytes never exceed the allocated bytes.
        live[block.start as usize] = live[block.start as usize].wrapping_add(bytes);
        live[block.freed as usize] = live[block.freed as usize].wrapping_sub(bytes);
    }
    let mut sum = 0_u64;
    for bytes in &mut live {
        sum = sum.wrapping_add(*bytes);
        *bytes = sum;
    }
    live
}

/// Returns the share of the pairs of neighbouring steps in which the requests occur equally often, but not zero
/// times.
fn repeated_share(boundaries: &[u32], requests: &[u32]) -> f64 {
    let before = |boundary: u32| requests.partition_point(|&request| request < boundary);
    let pairs = boundaries.len() - 2;
    let looked_at = pairs.min(PAIRS_MAX);
    let same = (0..looked_at)
        .map(|number| {
            if pairs > PAIRS_MAX {
                scattered(number, pairs)
            } else {
                number
            }
        })
        .filter(|&pair| {
            let [first, second, third] = [0, 1, 2].map(|step| before(boundaries[pair + step]));
            second > first && second - first == third - second
        });
    as_float(same.count() as u64) / as_float(looked_at.max(1) as u64)
}

/// Returns the pair to compare as the `number`-th of [`PAIRS_MAX`] among `pairs`: a pair at a scattered position
/// within the `number`-th of as many equal parts.
fn scattered(number: usize, pairs: usize) -> usize {
    let start = |part: usize| part * pairs / PAIRS_MAX;
    let length = start(number + 1) - start(number);
    // After one multiplication, neighbouring numbers would differ by a constant, and could be in step with a
    // period.
    let once = (number as u64 + 1).wrapping_mul(SCATTER);
    let hash = (once ^ (once >> 32)).wrapping_mul(SCATTER);
    let inside = (u128::from(hash) * length as u128) >> 64;
    start(number) + usize::try_from(inside).unwrap_or(0)
}

/// Returns the kinds to try as anchors: for each number of requests that kinds have, the kind that begins first.
fn anchors(kinds: &Kinds, requests_max: usize) -> Vec<&Vec<u32>> {
    let rare = kinds.iter().filter(|kind| kind.len() <= requests_max);
    let mut by_count: Vec<&Vec<u32>> = rare.collect();
    by_count.sort_by_key(|kind| (kind.len(), kind[0]));
    let shared = by_count.chunk_by(|left, right| left.len() == right.len());
    let mut shared: Vec<&[&Vec<u32>]> = shared.collect();
    // Numbers that few kinds have are tried last; among equals, the smallest number first.
    shared.sort_by_key(|same| std::cmp::Reverse(same.len()));
    let first = shared.iter().take(ANCHORS_MAX).map(|same| same[0]);
    first.collect()
}

/// Returns the requests by stack, or by exact size and stream if they have no stack.
fn by_name(requests: &[&Block], history: &History) -> Kinds {
    let named = requests.iter().map(|block| {
        let name = match block.stack {
            StackId::NONE => (StackId::NONE, block.requested, block.stream),
            stack => (stack, Bytes::ZERO, 0),
        };
        (name, block.start)
    });
    kinds(named, history)
}

/// Returns the requests by shape: how many requests each of the last few in their stream outlived.
fn by_shape(requests: &[&Block], history: &History) -> Kinds {
    let mut streams: Vec<Vec<u32>> = vec![Vec::new(); history.streams.len()];
    for block in requests {
        streams[block.stream as usize].push(block.start);
    }
    let mut done = vec![0; streams.len()];
    let mut shapes = vec![[0; SHAPE_REQUESTS]; streams.len()];
    let shaped = requests.iter().map(|block| {
        let stream = block.stream as usize;
        let until = streams[stream].partition_point(|&start| start < block.freed);
        let life = until.saturating_sub(done[stream]).min(LIFE_MAX);
        done[stream] += 1;
        shapes[stream].rotate_left(1);
        shapes[stream][SHAPE_REQUESTS - 1] = life;
        ((stream, shapes[stream]), block.start)
    });
    kinds(shaped, history)
}

/// Returns the kinds that occur all through the recording.
fn kinds<K: Eq + std::hash::Hash>(
    requests: impl Iterator<Item = (K, u32)>,
    history: &History,
) -> Kinds {
    let mut numbers: HashMap<K, usize> = HashMap::new();
    let mut kinds = Kinds::new();
    for (kind, instant) in requests {
        let number = *numbers.entry(kind).or_insert(kinds.len());
        if number == kinds.len() {
            kinds.push(Vec::new());
        }
        kinds[number].push(instant);
    }
    // A step that is longer than the others has requests that occur many times and never again.
    kinds.retain(|kind| kind.len() > STEPS_MIN && covers(kind, history));
    kinds
}

/// Returns whether the time from the first to the last of `instants` is most of the recording.
fn covers(instants: &[u32], history: &History) -> bool {
    let covered = instants[instants.len() - 1] - instants[0];
    u64::from(covered) * 2 > u64::from(history.events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pairs_that_are_looked_at_lie_all_over_and_in_step_with_nothing() {
        for pairs in [
            513, 1_000, 333_334, 500_001, 1_000_002, 1_000_003, 2_000_006,
        ] {
            let looked_at: Vec<usize> = (0..PAIRS_MAX)
                .map(|number| scattered(number, pairs))
                .collect();
            assert!(
                looked_at.is_sorted_by(|left, right| left < right),
                "{pairs}"
            );
            assert!(looked_at[PAIRS_MAX - 1] < pairs);
            assert!(looked_at[PAIRS_MAX - 1] >= pairs - pairs.div_ceil(PAIRS_MAX));
            for period in [2, 3, 4, 5, 8, 10] {
                let hits = looked_at.iter().filter(|&pair| pair % period == 0).count();
                let expected = PAIRS_MAX / period;
                assert!(
                    hits.abs_diff(expected) <= expected / 3 + 1,
                    "{pairs} by {period}: {hits}"
                );
            }
        }
    }

    #[test]
    fn what_repeats_in_half_of_very_many_steps_repeats_in_half_of_them() {
        // Two of every four steps have one request and two have two, so every other pair is equal.
        let pairs = 1_000_003_u32;
        let boundaries: Vec<u32> = (0..pairs + 2).map(|step| step * 4).collect();
        let requests = (0..pairs + 1).flat_map(|step| {
            let count = 1 + (step / 2) % 2;
            (0..count).map(move |request| step * 4 + request)
        });
        let share = repeated_share(&boundaries, &requests.collect::<Vec<_>>());
        assert!((0.4..0.6).contains(&share), "{share}");
    }
}
