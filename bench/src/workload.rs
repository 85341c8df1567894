//! The workload of a pair benchmark: the blocks to free and the sizes to allocate, computed before timing.

use lowtide_core::Bytes;

use crate::definitions::PairCase;

/// The seed of every workload, so that all machines measure the same one.
const SEED: u64 = 0x1077_1de0;

/// The smallest number of pairs in a round: more than a branch predictor remembers.
const ROUND_PAIRS_MIN: usize = 1 << 15;

/// The requests of a pair benchmark.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Workload {
    /// The sizes of the blocks that are allocated before the first pair.
    pub(crate) initial: Vec<Bytes>,
    /// The pairs of a round, which is repeated. Each block is replaced at least four times on average.
    pub(crate) round: Vec<Pair>,
}

/// A free and an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pair {
    /// The index of the live block that is freed and replaced.
    pub(crate) slot: u32,
    /// The size of the new block, in bytes.
    pub(crate) size: u32,
}

impl Workload {
    /// Returns a benchmark's workload, the same each time.
    pub(crate) fn new(case: &PairCase) -> Workload {
        let mut random = SplitMix64(SEED);
        let sizes: Vec<u32> = (0..case.kinds)
            .map(|_| log_uniform(&mut random, case.size_min_bytes, case.size_max_bytes))
            .collect();
        let size = |random: &mut SplitMix64| sizes[random.below(case.kinds) as usize];
        let initial = (0..case.live).map(|_| Bytes(size(&mut random).into()));
        let initial = initial.collect();
        let pairs = ROUND_PAIRS_MIN.max(4 * case.live as usize);
        let round = (0..pairs).map(|_| Pair {
            slot: random.below(case.live),
            size: size(&mut random),
        });
        let round = round.collect();
        Workload { initial, round }
    }
}

/// Returns a random size from `min` to `max`. Every doubling is equally likely.
fn log_uniform(random: &mut SplitMix64, min: u32, max: u32) -> u32 {
    let doublings = (f64::from(max) / f64::from(min)).log2();
    let size = f64::from(min) * (doublings * random.fraction()).exp2();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between `min` and `max`"
    )]
    let size = size as u32;
    size.clamp(min, max)
}

/// A fast random number generator: SplitMix64 by Steele, Lea and Flood (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns the upper half of the next number.
    fn half(&mut self) -> u32 {
        (self.next() >> 32) as u32
    }

    /// Returns a number below `end`.
    fn below(&mut self, end: u32) -> u32 {
        ((u64::from(self.half()) * u64::from(end)) >> 32) as u32
    }

    /// Returns a number from 0 to less than 1.
    fn fraction(&mut self) -> f64 {
        f64::from(self.half()) / 2_f64.powi(32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn case(live: u32, size_min_bytes: u32, size_max_bytes: u32, kinds: u32) -> PairCase {
        PairCase {
            name: String::new(),
            live,
            size_min_bytes,
            size_max_bytes,
            kinds,
            leave_out: Vec::new(),
            limit_ns: [].into(),
        }
    }

    #[test]
    fn random_numbers_are_those_of_the_literature() {
        let mut random = SplitMix64(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn a_workload_is_the_same_each_time() {
        let case = case(100, 512, 1 << 20, 64);
        assert_eq!(Workload::new(&case), Workload::new(&case));
    }

    #[test]
    fn slots_and_sizes_are_in_their_ranges_and_all_occur() {
        let workload = Workload::new(&case(20_000, 512, 1 << 16, 64));
        assert_eq!(workload.initial.len(), 20_000);
        assert_eq!(workload.round.len(), 80_000);
        let sizes: BTreeSet<u32> = workload.round.iter().map(|pair| pair.size).collect();
        assert!((32..=64).contains(&sizes.len()));
        assert!(sizes.iter().all(|size| (512..=1 << 16).contains(size)));
        let slots: BTreeSet<u32> = workload.round.iter().map(|pair| pair.slot).collect();
        assert!(slots.len() > 19_000 && slots.last() < Some(&20_000));
    }

    #[test]
    fn doublings_are_equally_likely() {
        let mut random = SplitMix64(SEED);
        let mut counts = [0; 10];
        for _ in 0..10_000 {
            counts[(log_uniform(&mut random, 512, 512 << 10) / 512).ilog2() as usize] += 1;
        }
        assert!(
            counts.iter().all(|count| (850..1150).contains(count)),
            "{counts:?}"
        );
        assert_eq!(log_uniform(&mut random, 4096, 4096), 4096);
    }
}
