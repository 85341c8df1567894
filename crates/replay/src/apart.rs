//! Which recorded segments cannot be in one pool, and pools for them, chosen first-fit.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use lowtide_core::MempoolId;

/// The most evidence that is kept. A recording of some kilobytes could have a pair of segments for every two
/// events.
const EVIDENCE_MAX: usize = 1 << 20;

/// The evidence that segments are in different pools. Segments are numbered.
#[derive(Debug, Default)]
pub(crate) struct Apart {
    /// Pairs of segments in different pools, the lower number first.
    pairs: BTreeSet<(usize, usize)>,
    /// Lists of segments, in order, with the segments that are in a different pool from each of the list. Pairs
    /// would be far more: many segments stay while others are released, in call after call.
    lists: BTreeMap<Vec<usize>, BTreeSet<usize>>,
    /// The number of segments in `lists`, both sides together.
    lists_len: usize,
}

impl Apart {
    /// Records that two segments are in different pools. O(log n) for n pairs.
    pub(crate) fn separate(&mut self, one: usize, other: usize) {
        self.pairs.insert((one.min(other), one.max(other)));
    }

    /// Records that each of `some` is in a different pool from each of `others`. O(n log m) for n others and m
    /// lists.
    pub(crate) fn separate_all(
        &mut self,
        some: impl IntoIterator<Item = usize>,
        mut others: Vec<usize>,
    ) {
        others.sort_unstable();
        others.dedup();
        if let [other] = others[..] {
            some.into_iter().for_each(|one| self.separate(one, other));
        } else if !others.is_empty() {
            let others_len = others.len();
            let known = self.lists.entry(others).or_default();
            let known_len = known.len();
            known.extend(some);
            self.lists_len += known.len() - known_len;
            if known_len == 0 {
                self.lists_len += others_len;
            }
        }
    }

    /// Returns whether there is more evidence than is kept.
    pub(crate) fn is_too_much(&self) -> bool {
        self.pairs.len() + self.lists_len > EVIDENCE_MAX
    }

    /// Assigns a pool to each segment that has none: the first pool without a segment that the evidence excludes. A
    /// segment in `private` is not in the default pool. A segment that is a part of another, which `whole` returns,
    /// gets that one's pool. Linear in the pairs; for each list a segment is in, linear in the pools on the list's
    /// other side.
    pub(crate) fn assign(
        &self,
        pools: &mut [Option<MempoolId>],
        private: &BTreeSet<usize>,
        whole: impl Fn(usize) -> usize,
    ) {
        let mut met = Met::new(self, pools.len(), &whole);
        let private: HashSet<usize> = private.iter().map(|&segment| whole(segment)).collect();
        let known: BTreeSet<MempoolId> = pools.iter().flatten().copied().collect();
        for (segment, pool) in pools.iter().enumerate() {
            if let Some(pool) = *pool {
                met.put(segment, pool);
            }
        }
        let inferred = (0..).map(|number| MempoolId(u64::MAX, number));
        let candidates = [MempoolId::DEFAULT]
            .into_iter()
            .chain(known.iter().copied())
            .chain(inferred);
        for segment in 0..pools.len() {
            if pools[segment].is_none() && whole(segment) == segment {
                let default = private.contains(&segment).then_some(MempoolId::DEFAULT);
                let mut taken = met.pools_apart(segment, pools);
                taken.extend(default);
                let pool = candidates.clone().find(|pool| !taken.contains(pool));
                pools[segment] = pool;
                met.put(segment, pool.unwrap_or_default());
            }
        }
        for segment in 0..pools.len() {
            pools[segment] = pools[whole(segment)];
        }
    }
}

/// The evidence by segment, while pools are assigned.
struct Met {
    /// For each segment, the segments that it shares no pool with.
    others: Vec<Vec<usize>>,
    /// For each segment, the lists that it is in, and on which side: 0 or 1.
    lists: Vec<Vec<(usize, usize)>>,
    /// For each list, the pools of the segments on either side.
    pools: Vec<[HashSet<MempoolId>; 2]>,
}

impl Met {
    fn new(apart: &Apart, segments: usize, whole: impl Fn(usize) -> usize) -> Met {
        let mut met = Met {
            others: vec![Vec::new(); segments],
            lists: vec![Vec::new(); segments],
            pools: vec![Default::default(); apart.lists.len()],
        };
        for &(one, other) in &apart.pairs {
            let (one, other) = (whole(one), whole(other));
            met.others[one].push(other);
            met.others[other].push(one);
        }
        for (list, (others, some)) in apart.lists.iter().enumerate() {
            let sides = others
                .iter()
                .map(|&it| (it, 0))
                .chain(some.iter().map(|&it| (it, 1)));
            for (segment, side) in sides {
                met.lists[whole(segment)].push((list, side));
            }
        }
        met
    }

    /// Records that a segment is in a pool.
    fn put(&mut self, segment: usize, pool: MempoolId) {
        for &(list, side) in &self.lists[segment] {
            self.pools[list][side].insert(pool);
        }
    }

    /// Returns the pools that exclude `segment`: those assigned so far to segments in different pools.
    fn pools_apart(&self, segment: usize, pools: &[Option<MempoolId>]) -> HashSet<MempoolId> {
        let others = self.others[segment].iter();
        let mut apart: HashSet<MempoolId> = others.filter_map(|&other| pools[other]).collect();
        for &(list, side) in &self.lists[segment] {
            apart.extend(&self.pools[list][1 - side]);
        }
        apart
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the pools that are assigned to this many segments.
    fn pools_of(apart: &Apart, segments: usize) -> Vec<Option<MempoolId>> {
        let mut pools = vec![None; segments];
        apart.assign(&mut pools, &BTreeSet::new(), |segment| segment);
        pools
    }

    #[test]
    fn some_are_apart_from_others() {
        let mut apart = Apart::default();
        apart.separate_all([0, 1], vec![3, 2]);
        apart.separate_all([2], vec![3]);
        let pools = pools_of(&apart, 5);
        assert_eq!(pools[0], Some(MempoolId::DEFAULT));
        assert_eq!([pools[1], pools[4]], [pools[0]; 2]);
        let distinct = BTreeSet::from([pools[0], pools[2], pools[3]]);
        assert_eq!(distinct.len(), 3);
    }

    #[test]
    fn pools_that_are_known_are_kept_out_of() {
        let mut apart = Apart::default();
        apart.separate_all([0], vec![1]);
        apart.separate(0, 2);
        let mut pools = vec![None, Some(MempoolId::DEFAULT), Some(MempoolId(0, 1))];
        apart.assign(&mut pools, &BTreeSet::new(), |segment| segment);
        assert_eq!(pools[0], Some(MempoolId(u64::MAX, 0)));
        pools[0] = None;
        apart.assign(&mut pools, &BTreeSet::from([1]), |segment| segment.max(1));
        assert_eq!(pools[0], Some(MempoolId::DEFAULT));
    }

    /// Thousands of pools stay while thousands of segments are released, in call after call.
    #[test]
    fn what_went_back_beside_many_is_not_too_much() {
        let mut apart = Apart::default();
        let stayed: Vec<usize> = (0..4_000).collect();
        for gone in 4_000..8_000 {
            apart.separate_all([gone], stayed.clone());
        }
        assert!(!apart.is_too_much());
        let pools = pools_of(&apart, 8_000);
        assert_eq!(pools[..4_000], [Some(MempoolId::DEFAULT); 4_000]);
        assert_eq!(pools[4_000..], [Some(MempoolId(u64::MAX, 0)); 4_000]);
    }
}
