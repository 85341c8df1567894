//! Pair benchmarks: a free and an allocation, repeatedly, with many live blocks.

use anyhow::{Context, Result};
use lowtide_core::{AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, Stream};
use lowtide_sim::SimDriver;

use crate::answers::PairAnswer;
use crate::definitions::PairCase;
use crate::workload::{Pair, Workload};

/// A pair benchmark in progress: its allocator is in the state that a long-running job leaves behind.
#[derive(Debug)]
pub struct PairBench {
    allocator: DeviceAllocator<SimDriver>,
    /// The addresses of the live blocks.
    live: Vec<DeviceAddress>,
    round: Vec<Pair>,
    /// The index of the next pair in the round.
    next: usize,
}

impl PairBench {
    /// Starts a benchmark and runs one whole round. The allocator then has the memory that it needs, and its free
    /// blocks are as scattered as they will be.
    ///
    /// # Errors
    ///
    /// If the allocator fails. The device has no limit, so that is a bug of the allocator.
    pub fn start(case: &PairCase, config: &Config) -> Result<PairBench> {
        let Workload { initial, round } = Workload::new(case);
        let mut allocator = DeviceAllocator::new(SimDriver::default(), 0, config);
        let place = |&size: &Bytes| allocator.allocate(size, Stream::DEFAULT);
        let context = || format!("{}, {config}", case.name);
        let live: Result<Vec<_>, _> = initial.iter().map(place).collect();
        let mut bench = PairBench {
            allocator,
            live: live.with_context(context)?,
            round,
            next: 0,
        };
        bench.run_round().with_context(context)?;
        Ok(bench)
    }

    /// Runs `count` pairs, each a free and an allocation. This is the timed part.
    ///
    /// # Errors
    ///
    /// If the allocator fails. The device has no limit, so that is a bug of the allocator.
    pub fn run(&mut self, mut count: usize) -> Result<(), AllocError> {
        while count > 0 {
            let end = self.round.len().min(self.next + count);
            for pair in &self.round[self.next..end] {
                let place = &mut self.live[pair.slot as usize];
                self.allocator.free(*place)?;
                *place = self
                    .allocator
                    .allocate(Bytes(pair.size.into()), Stream::DEFAULT)?;
            }
            count -= end - self.next;
            self.next = end % self.round.len();
        }
        Ok(())
    }

    /// Runs a whole round, which uses nearly all of the benchmark's memory.
    ///
    /// # Errors
    ///
    /// As for [`PairBench::run`].
    pub fn run_round(&mut self) -> Result<(), AllocError> {
        self.run(self.round.len())
    }

    /// Returns the result so far: the reserved memory, and the addresses of the live blocks.
    pub fn answer(&self) -> PairAnswer {
        PairAnswer::new(self.allocator.stats().reserved(), &self.live)
    }

    /// Checks all invariants of the allocator.
    ///
    /// # Errors
    ///
    /// A sentence that names the broken invariant.
    pub fn check(&self) -> Result<()> {
        let checked = self
            .allocator
            .lane()
            .check_invariants(CheckLevel::Everything);
        checked.map_err(anyhow::Error::msg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Answers, Definitions, check_answer};

    /// Every pair benchmark gives its expected answer, so that `cargo bench` does not refuse to measure it.
    #[test]
    fn answers_are_the_expected_ones() {
        let definitions = Definitions::load().unwrap();
        let answers = Answers::load().unwrap();
        for case in &definitions.pairs {
            for config in definitions.strategies_of(case) {
                let bench = PairBench::start(case, config).unwrap();
                bench.check().unwrap();
                check_answer(&answers.pairs, &case.name, config, &bench.answer()).unwrap();
            }
        }
    }

    #[test]
    fn a_round_may_be_run_in_parts() {
        let definitions = Definitions::load().unwrap();
        let (case, config) = (&definitions.pairs[1], &definitions.strategies[0]);
        let mut whole = PairBench::start(case, config).unwrap();
        let mut parts = PairBench::start(case, config).unwrap();
        let round = whole.round.len();
        whole.run(round + 10).unwrap();
        for count in [1, round - 3, 0, 12] {
            parts.run(count).unwrap();
        }
        assert_eq!(whole.answer(), parts.answer());
        assert_eq!((whole.next, parts.next), (10, 10));
    }
}
