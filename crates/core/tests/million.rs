//! A million events of seeded random programs for every strategy: no overlap, no lost byte, and statistics that
//! add up.
//!
//! After each operation the result, the new block's address, the events and the statistics are checked. All
//! slower checks run every few thousand operations and at the end.

use lowtide_core::{Config, StrategyName};
use lowtide_sim::program::{CAPACITY, Runner, configs, random_program};

const EVENTS: u64 = if cfg!(miri) { 20 } else { 1_000_000 };
/// The length of a program. Many programs find errors that one long program hides.
const OPERATIONS: usize = 50_000;
const OPERATIONS_BETWEEN_CHECKS: usize = 2_500;

fn run_events(config: &Config, count: u64) {
    let mut events = 0;
    for seed in 0.. {
        let mut runner = Runner::new(config, CAPACITY);
        for (index, op) in random_program(seed).take(OPERATIONS).enumerate() {
            let mut outcome = runner.apply(&op).map(drop);
            if index % OPERATIONS_BETWEEN_CHECKS == 0 {
                outcome = outcome.and_then(|()| runner.check());
            }
            if let Err(error) = outcome {
                panic!("{config}, seed {seed}, operation {index}, {op:?}: {error}");
            }
            if events + runner.events() >= count {
                break;
            }
        }
        events += runner.events();
        if let Err(error) = runner.finish() {
            panic!("{config}, seed {seed}, at the end: {error}");
        }
        if events >= count {
            return;
        }
    }
}

fn run_strategy(name: StrategyName) {
    let (default, variants): (Vec<_>, Vec<_>) = (configs().into_iter())
        .filter(|config| config.name() == name)
        .partition(|config| config.to_conf().is_empty());
    for config in default {
        run_events(&config, EVENTS);
    }
    for config in variants {
        run_events(&config, EVENTS / 10);
    }
}

#[test]
fn a_million_events_of_every_strategy() {
    std::thread::scope(|scope| {
        for name in StrategyName::ALL {
            scope.spawn(move || run_strategy(name));
        }
    });
}
