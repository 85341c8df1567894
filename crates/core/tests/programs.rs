//! Programs of random operations, shrunk when they fail, on every configuration of every strategy.
//!
//! `lowtide_sim::program` says what is checked after each operation, and what is not covered.

use lowtide_sim::program::{CAPACITY, ENCODED_SIZE, Op, Runner, configs};
use proptest::prelude::*;

/// Programs whose bytes shrink towards plain requests.
fn programs() -> impl Strategy<Value = Vec<Op>> {
    let op = any::<[u8; ENCODED_SIZE]>().prop_map(Op::decode);
    prop::collection::vec(op, 1..if cfg!(miri) { 8 } else { 120 })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 200 },
        // A failing program is added as a test of its own instead.
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_strategy_keeps_its_promises(program in programs()) {
        for config in configs() {
            prop_assert_eq!(Runner::run(&config, CAPACITY, &program), Ok(()));
        }
    }
}
