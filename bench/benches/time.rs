//! Times every benchmark with criterion: `cargo bench -p lowtide-bench [FILTER]`.
//!
//! Each benchmark takes only ten samples, because there are dozens of them and instruction counts are the gate.

use std::time::{Duration, Instant};

use criterion::Criterion;
use lowtide_bench::{Answers, Definitions, PairBench, Recording, ReplayBench, check_answer};

fn main() {
    let definitions = Definitions::load().expect("definitions are tested");
    let answers = Answers::load().expect("answers are tested");
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .configure_from_args();
    pairs(&mut criterion, &definitions, &answers);
    replays(&mut criterion, &definitions, &answers);
    criterion.final_summary();
}

fn pairs(criterion: &mut Criterion, definitions: &Definitions, answers: &Answers) {
    for case in &definitions.pairs {
        let mut group = criterion.benchmark_group(&case.name);
        for config in definitions.strategies_of(case) {
            // Criterion calls this closure for each sample. It never calls it for a benchmark that is filtered out.
            let mut started: Option<PairBench> = None;
            group.bench_function(config.to_string(), |bencher| {
                let bench = started.get_or_insert_with(|| {
                    let bench = PairBench::start(case, config).expect("it runs");
                    let checked = check_answer(&answers.pairs, &case.name, config, &bench.answer());
                    checked.unwrap_or_else(|wrong| panic!("{wrong}"));
                    bench
                });
                bencher.iter_custom(|count| {
                    let count = usize::try_from(count).expect("64 bits");
                    let started = Instant::now();
                    bench.run(count).expect("it ran before");
                    started.elapsed()
                });
            });
        }
    }
}

fn replays(criterion: &mut Criterion, definitions: &Definitions, answers: &Answers) {
    let recordings = Recording::find(definitions, &[]).expect("samples have names");
    for Recording { case, path } in &recordings {
        let mut group = criterion.benchmark_group(&case.name);
        let read = || ReplayBench::read(path).expect("a sample can be read");
        group.bench_function("read", |bencher| bencher.iter_with_large_drop(read));
        let mut in_memory = None;
        for config in &definitions.strategies {
            let mut is_checked = false;
            group.bench_function(config.to_string(), |bencher| {
                let bench = in_memory.get_or_insert_with(read);
                let replay = || bench.run(config).expect("it runs");
                if !is_checked {
                    let checked = check_answer(&answers.replays, &case.name, config, &replay());
                    checked.unwrap_or_else(|wrong| panic!("{wrong}"));
                    is_checked = true;
                }
                bencher.iter(replay);
            });
        }
    }
}
