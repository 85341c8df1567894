//! Tests that planted leaks are named, and that no leak is reported for jobs without one.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its data fails")]

mod common;

use std::path::Path;

use common::{Held, Job, MIB};
use lowtide_core::{Action, Bytes, DeviceAddress, Event};
use lowtide_history::{BlockSizes, Difference, Growth, History, Leaks, Site, StepSource};
use lowtide_trace::Trace;

/// The behaviour of a job beside its work.
#[derive(Clone, Copy, Default)]
struct Habits {
    has_stacks: bool,
    /// Each step has another length.
    varies: bool,
    /// Each step keeps a block for good.
    leaks: bool,
    /// Caches fill for this many steps.
    fills_until: u32,
    /// Every tenth step keeps 50 MB for a while.
    has_checkpoints: bool,
}

/// Returns the recording of 30 steps with 5,000 requests each: 40 layers forward and backward, and an optimizer.
fn train(habits: Habits) -> Trace {
    let mut job = Job::new(habits.has_stacks);
    let weights: Vec<Held> = (0..100)
        .map(|line| job.alloc(4 * MIB, "init", line))
        .collect();
    let mut states = Vec::new();
    let mut checkpoint = None;
    for step in 0..30 {
        let length = if habits.varies {
            100 + job.random(900)
        } else {
            512
        };
        let mut activations = Vec::new();
        let requests =
            2300 + u32::try_from(if habits.varies { job.random(200) } else { 100 }).unwrap();
        for request in 0..requests {
            let size = length * (1000 + u64::from(request % 60) * 512);
            activations.push(job.alloc(size, "forward", request % 60));
        }
        if habits.leaks {
            job.alloc(MIB, "keep_history", 77);
        }
        if step < habits.fills_until {
            job.alloc(3 * MIB, "cached_mask", 5);
        }
        if habits.has_checkpoints && step % 10 == 9 {
            checkpoint = Some(job.alloc(50 * MIB, "save", 3));
        } else if let Some(block) = checkpoint.take() {
            job.free(block);
        }
        while let Some(block) = activations.pop() {
            let line = u32::try_from(activations.len() % 60).unwrap();
            let gradient = job.alloc(block.size, "backward", line);
            job.free(block);
            job.free(gradient);
        }
        for (line, weight) in (0..).zip(&weights) {
            if step == 0 {
                states.push(job.alloc(weight.size, "step", line));
            }
            let update = job.alloc(weight.size, "update", line);
            job.free(update);
        }
    }
    job.into_trace()
}

fn find(trace: &Trace) -> (History, Leaks) {
    let history = History::new(trace, &BlockSizes::estimated(trace));
    let leaks = Leaks::find(trace, &history);
    (history, leaks)
}

/// Checks that exactly the planted leak is named for a job with `habits`.
fn check_leak(habits: Habits) {
    let trace = train(Habits {
        leaks: true,
        ..habits
    });
    let (_, leaks) = find(&trace);
    let named: Vec<&Growth> = leaks.leaks().collect();
    assert_eq!(named.len(), 1, "{:?}", leaks.growths);
    let leak = named[0];
    match leak.site {
        Site::Stack(stack) => {
            let innermost = trace.stacks.frames(stack).next().unwrap();
            assert_eq!((innermost.name.raw(), innermost.line), ("keep_history", 77));
        }
        Site::Size { size_max, .. } => assert_eq!(size_max, Bytes(MIB)),
    }
    let trend = leak.trend;
    assert!(trend.confidence > 0.9, "{leak:?}");
    if !matches!(leaks.steps.source, StepSource::Parts) {
        assert!(
            (28..=30).contains(&leaks.steps.len()),
            "{:?}",
            leaks.steps.boundaries
        );
        #[expect(clippy::cast_precision_loss, reason = "a million")]
        let expected = MIB as f64;
        assert!((trend.bytes_per_step - expected).abs() < 1.0, "{leak:?}");
        assert_eq!(trend.grown_steps, trend.steps);
    }
}

#[test]
fn a_megabyte_a_step_is_named_with_its_stack() {
    let habits = Habits {
        has_stacks: true,
        ..Habits::default()
    };
    check_leak(habits);
    check_leak(Habits {
        varies: true,
        ..habits
    });
    check_leak(Habits {
        varies: true,
        fills_until: 8,
        has_checkpoints: true,
        ..habits
    });
}

#[test]
fn without_stacks_the_size_is_named() {
    check_leak(Habits::default());
    check_leak(Habits {
        varies: true,
        ..Habits::default()
    });
    check_leak(Habits {
        fills_until: 12,
        has_checkpoints: true,
        ..Habits::default()
    });
}

#[test]
fn caches_and_checkpoints_are_no_leaks() {
    for has_stacks in [true, false] {
        for varies in [true, false] {
            let trace = train(Habits {
                has_stacks,
                varies,
                leaks: false,
                fills_until: 20,
                has_checkpoints: true,
            });
            let (_, leaks) = find(&trace);
            let named: Vec<&Growth> = leaks.leaks().collect();
            assert_eq!(named, Vec::<&Growth>::new());
            let is_steady = leaks.spread.is_some_and(|spread| spread.is_steady());
            assert!(!is_steady, "{:?}", leaks.spread);
        }
    }
}

/// Returns the recording of 60 steps. Each calls `keep` after its work.
fn simple_steps(mut keep: impl FnMut(&mut Job, u32)) -> Trace {
    let mut job = Job::new(true);
    for step in 0..60 {
        let work: Vec<Held> = (0..100)
            .map(|line| job.alloc(MIB, "forward", line))
            .collect();
        keep(&mut job, step);
        work.into_iter().for_each(|block| job.free(block));
    }
    job.into_trace()
}

/// The kept block is from another call site each time. Every step keeps one, or some steps do.
#[test]
fn growth_in_many_places_is_growth_of_all() {
    for every in [1, 3] {
        let trace = simple_steps(|job, step| {
            if job.random(every) == 0 {
                job.alloc(MIB, "keep", step);
            }
        });
        let (_, leaks) = find(&trace);
        assert_eq!(leaks.leaks().count(), 0, "{:?}", leaks.growths);
        let spread = leaks.spread.unwrap();
        // By chance it grew in few of the last steps.
        assert!(spread.confidence > 0.5, "{every}: {spread:?}");
        assert_eq!(spread.is_steady(), every == 1, "{spread:?}");
        assert_eq!(spread.grown_steps == spread.steps, every == 1);
        assert_eq!(spread.end_bytes == 60 * MIB, every == 1);
    }
}

/// A list of losses is a leak that can be named, but only a small part of the growth.
#[test]
fn growth_in_many_places_is_reported_beside_a_leak() {
    let trace = simple_steps(|job, step| {
        job.alloc(512, "losses", 1);
        job.alloc(MIB, "keep", step);
    });
    let (_, leaks) = find(&trace);
    assert_eq!(leaks.leaks().count(), 1, "{:?}", leaks.growths);
    assert!(leaks.growths[0].trend.bytes < MIB);
    let spread = leaks.spread.unwrap();
    assert_eq!(spread.bytes, spread.steps as u64 * MIB);
    assert!(spread.is_steady(), "{spread:?}");
    // The growth of a leak alone is not reported twice.
    let trace = simple_steps(|job, _| {
        job.alloc(MIB, "losses", 1);
    });
    assert_eq!(find(&trace).1.spread, None);
}

/// Memory grew in the first half of the recording only. This is reported, but not called a leak.
#[test]
fn growth_that_stopped_is_reported_and_called_no_leak() {
    let trace = simple_steps(|job, step| {
        if step < 30 {
            job.alloc(MIB, "cache", 1);
        }
    });
    let (_, leaks) = find(&trace);
    assert_eq!(leaks.leaks().next(), None);
    let spread = leaks.spread.unwrap();
    assert!(!spread.is_steady(), "{spread:?}");
    assert_eq!(spread.end_bytes, 30 * MIB);
}

/// A list that grew until the program ended is a leak, even if its frees at the end are recorded.
#[test]
fn what_only_the_end_frees_is_a_leak() {
    for gives_back in [false, true] {
        let mut job = Job::new(true);
        let mut cache = Vec::new();
        for _ in 0..60 {
            let work: Vec<Held> = (0..100)
                .map(|line| job.alloc(MIB, "forward", line))
                .collect();
            cache.push(job.alloc(MIB, "append", 7));
            work.into_iter().for_each(|block| job.free(block));
        }
        if gives_back {
            cache.into_iter().for_each(|block| job.free(block));
        }
        let (_, leaks) = find(&job.into_trace());
        assert_eq!(leaks.leaks().count(), 1, "{:?}", leaks.growths);
        let end_bytes = if gives_back { 0 } else { 60 * MIB };
        assert_eq!(leaks.growths[0].trend.end_bytes, end_bytes);
    }
}

/// Returns the recording of `steps` steps without a request that is made once: a network's layers, and an
/// optimizer. Each step calls `keep` after its forward pass.
fn train_layers(steps: u32, layers: u32, mut keep: impl FnMut(&mut Job, u32)) -> Trace {
    let mut job = Job::new(true);
    for step in 0..steps {
        let mut activations: Vec<Held> = Vec::new();
        for _ in 0..layers {
            for line in 0..20 {
                let block = job.alloc(65_536 * (1 + u64::from(line) % 7), "forward", line);
                match line % 3 {
                    0 => activations.push(block),
                    _ => job.free(block),
                }
            }
        }
        keep(&mut job, step);
        while let Some(block) = activations.pop() {
            let gradient = job.alloc(65_536, "backward", 1);
            let temporary = job.alloc(131_072, "backward", 1);
            [temporary, block, gradient]
                .into_iter()
                .for_each(|block| job.free(block));
        }
        for parameter in 0..6 * layers {
            let states = [0, 1, 2, 3, 4]
                .map(|line| job.alloc(4096 * (1 + u64::from(parameter) % 6), "adam", line));
            states.into_iter().for_each(|block| job.free(block));
        }
    }
    job.into_trace()
}

#[test]
fn a_rare_leak_is_no_step() {
    let trace = train_layers(70, 6, |job, step| {
        if step % 7 == 2 {
            job.alloc(MIB, "keep_history", 77);
        }
    });
    let (_, leaks) = find(&trace);
    let found = leaks.steps.len();
    assert!(
        (68..=70).contains(&found),
        "{found} steps: {:?}",
        leaks.growths
    );
    assert_eq!(leaks.leaks().count(), 1, "{:?}", leaks.growths);
    let bytes_per_step = leaks.growths[0].trend.bytes_per_step;
    assert!(
        (120_000.0..180_000.0).contains(&bytes_per_step),
        "{bytes_per_step}"
    );
}

#[test]
fn a_cache_that_had_its_fill_before_the_end_is_no_leak() {
    for filled_at in [20, 30, 34, 35] {
        let trace = train_layers(40, 6, |job, step| {
            if step < filled_at {
                job.alloc(3 * MIB, "cache", 1);
            }
        });
        let (_, leaks) = find(&trace);
        let found = leaks.steps.len();
        assert!((38..=40).contains(&found), "{found} steps, {filled_at}");
        assert_eq!(leaks.leaks().next(), None, "{filled_at}");
    }
    let mut cache = std::collections::VecDeque::new();
    let trace = train_layers(40, 6, |job, _| {
        cache.push_back(job.alloc(3 * MIB, "cache", 1));
        if cache.len() > 34 {
            job.free(cache.pop_front().unwrap());
        }
    });
    assert_eq!(find(&trace).1.leaks().next(), None);
}

/// Two steps without growth after 68 with growth may be its end, or not.
#[test]
fn a_cache_that_had_its_fill_just_before_the_end_may_be_a_leak() {
    let trace = train_layers(70, 6, |job, step| {
        if step < 68 {
            job.alloc(3 * MIB, "cache", 1);
        }
    });
    let (_, leaks) = find(&trace);
    let growth = leaks.growths[0];
    assert!((0.4..0.6).contains(&growth.trend.confidence), "{growth:?}");
    assert_eq!(leaks.spread.unwrap().bytes, growth.trend.bytes);
}

/// Reference cycles are kept until Python's garbage collector runs, once or repeatedly.
#[test]
fn what_was_given_back_before_may_be_given_back_again() {
    for collects_at in [
        &[24][..],
        &[8],
        &[9, 19, 29, 39, 49, 59],
        &[19, 39, 59],
        &[32, 64],
    ] {
        let mut cycles = Vec::new();
        let trace = train_layers(70, 6, |job, step| {
            cycles.push(job.alloc(4 * MIB, "cycle", 1));
            if collects_at.contains(&step) {
                cycles.drain(..).for_each(|block| job.free(block));
            }
        });
        let (_, leaks) = find(&trace);
        let trend = leaks.growths.first().map(|growth| growth.trend);
        match collects_at {
            // 61 steps of growth after nine are enough, 45 after 25 are not.
            [8] => assert!(leaks.growths[0].is_leak(), "{trend:?}"),
            _ => assert_eq!(leaks.leaks().next(), None, "{collects_at:?}"),
        }
        let times = trend.map_or(collects_at.len(), |trend| trend.times_given_back);
        assert_eq!(times, collects_at.len(), "{collects_at:?}: {trend:?}");
    }
}

/// Every second block of a call site is kept. The garbage collector frees the others.
#[test]
fn a_leak_is_named_though_most_of_its_place_is_given_back() {
    let mut cycles = Vec::new();
    let trace = train_layers(100, 6, |job, step| {
        cycles.push(job.alloc(2 * MIB, "keep", 1));
        job.alloc(2 * MIB, "keep", 1);
        if step % 10 == 9 {
            cycles.drain(..).for_each(|block| job.free(block));
        }
    });
    let (_, leaks) = find(&trace);
    assert_eq!(leaks.leaks().count(), 1, "{:?}", leaks.growths);
    let trend = leaks.growths[0].trend;
    assert_eq!(trend.grown_steps, trend.steps, "{trend:?}");
}

#[test]
fn a_leak_every_tenth_step_is_named() {
    for offset in 0..10 {
        let trace = train_layers(100, 6, |job, step| {
            if step % 10 == offset {
                job.alloc(5 * MIB, "evaluate", 1);
            }
        });
        let (_, leaks) = find(&trace);
        assert_eq!(leaks.leaks().count(), 1, "{offset}: {:?}", leaks.growths);
    }
}

/// A hundred blocks are in use at any time. Each lives long, and none lies within one step.
#[test]
fn a_leak_among_blocks_that_live_long_is_named_by_what_is_kept() {
    for leaks in [true, false] {
        let mut job = Job::new(false);
        let mut held: Vec<Held> = Vec::new();
        for _ in 0..40 {
            for _ in 0..800 + job.random(400) {
                let sizes = [512, 32_768, 307_200, MIB, 2_048_000];
                let size = sizes[usize::try_from(job.random(5)).unwrap()];
                held.push(job.alloc(size, "work", 1));
                if held.len() > 100 {
                    let index = usize::try_from(job.random(held.len() as u64)).unwrap();
                    job.free(held.swap_remove(index));
                }
            }
            if leaks {
                job.alloc(MIB, "keep", 1);
            }
        }
        let (_, found) = find(&job.into_trace());
        let named: Vec<Site> = found.leaks().map(|growth| growth.site).collect();
        let expected = Site::Size {
            size_max: Bytes(MIB),
            stream: lowtide_core::Stream::DEFAULT,
        };
        let expected = if leaks { vec![expected] } else { Vec::new() };
        assert_eq!(named, expected, "{:?}", found.growths);
    }
}

/// Makes requests of a few sizes, the leak's among them, and frees them at random.
fn work_at_random(job: &mut Job, requests: u64) {
    let mut held: Vec<Held> = Vec::new();
    for _ in 0..requests {
        let size = [512, 32_768, 307_200, MIB, 2_048_000][usize::try_from(job.random(5)).unwrap()];
        held.push(job.alloc(size, "work", 1));
        if held.len() > 100 {
            let index = usize::try_from(job.random(held.len() as u64)).unwrap();
            job.free(held.swap_remove(index));
        }
    }
    held.into_iter().for_each(|block| job.free(block));
}

#[test]
fn a_leak_among_requests_of_its_size_is_named_though_no_step_is_found() {
    for leaks in [true, false] {
        let mut job = Job::new(false);
        for _ in 0..30 {
            let requests = 1_000 + job.random(1_000);
            work_at_random(&mut job, requests);
            if leaks {
                job.alloc(MIB, "keep", 1);
            }
        }
        let (_, found) = find(&job.into_trace());
        assert_eq!(found.steps.source, StepSource::Parts);
        let named: Vec<Site> = found.leaks().map(|growth| growth.site).collect();
        assert_eq!(named.len(), usize::from(leaks), "{:?}", found.growths);
        let is_its_size = |site: &Site| {
            matches!(
                site,
                Site::Size {
                    size_max: Bytes(MIB),
                    ..
                }
            )
        };
        assert!(named.iter().all(is_its_size), "{named:?}");
    }
}

/// Returns a sample, and the boundaries of its optimizer's steps.
fn sample(name: &str) -> (Trace, Vec<u32>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.join(format!("traces/{name}.pickle.zst"));
    let trace = lowtide_trace::read(&path).unwrap().traces.remove(0);
    let (_, leaks) = find(&trace);
    assert!(
        matches!(leaks.steps.source, StepSource::Annotation(_)),
        "{name}"
    );
    (trace, leaks.steps.boundaries)
}

#[test]
fn recorded_jobs_are_not_accused() {
    for name in ["gpt2_train", "llama_varlen", "mnist_mlp"] {
        let (mut trace, _) = sample(name);
        for has_marks in [true, false] {
            if !has_marks {
                trace.annotations.clear();
            }
            let (_, leaks) = find(&trace);
            let named: Vec<&Growth> = leaks.leaks().collect();
            assert_eq!(named, Vec::<&Growth>::new(), "{name}");
            assert_eq!(leaks.spread, None, "{name}");
        }
    }
}

/// The smaller recordings. Some hold random blocks, and more at the end than before.
#[test]
fn what_goes_up_and_down_is_no_leak() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../replay/tests/data");
    for entry in std::fs::read_dir(data).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gz") {
            continue;
        }
        for trace in lowtide_trace::read(&path).unwrap().traces {
            let (_, leaks) = find(&trace);
            assert_eq!(leaks.leaks().next(), None, "{}", path.display());
        }
    }
}

/// The same jobs, each step of which keeps a block of 1 MiB, with and without marks of the steps.
#[test]
fn a_leak_in_a_recorded_job_is_named_alone() {
    for name in ["gpt2_train", "llama_varlen", "mnist_mlp"] {
        let (mut trace, boundaries) = sample(name);
        for (step, &boundary) in boundaries.iter().enumerate().rev() {
            let mut leak = trace.events[boundary as usize];
            leak.event = Event {
                action: Action::Alloc,
                address: DeviceAddress((1 << 45) + (step as u64) * MIB),
                size: Bytes(MIB),
                ..leak.event
            };
            trace.events.insert(boundary as usize, leak);
        }
        for has_marks in [true, false] {
            if !has_marks {
                trace.annotations.clear();
            }
            let (_, leaks) = find(&trace);
            let named: Vec<&Growth> = leaks.leaks().collect();
            assert_eq!(
                named.len(),
                1,
                "{name}: {named:?}, {:?}",
                leaks.steps.source
            );
            let is_the_leak = |site| {
                matches!(
                    site,
                    Site::Size {
                        size_max: Bytes(MIB),
                        ..
                    }
                )
            };
            assert!(is_the_leak(named[0].site), "{name}: {named:?}");
        }
    }
}

#[test]
fn a_difference_names_what_the_second_has_more_of() {
    let habits = Habits {
        has_stacks: true,
        ..Habits::default()
    };
    let before = train(habits);
    let after = train(Habits {
        leaks: true,
        ..habits
    });
    let (before_history, _) = find(&before);
    let (after_history, _) = find(&after);
    let difference = Difference::new([(&before, &before_history), (&after, &after_history)]);
    let [first, rest @ ..] = &*difference.sites else {
        panic!("no site at all");
    };
    let [None, Some(Site::Stack(stack))] = first.site else {
        panic!("{first:?}");
    };
    assert_eq!(
        after.stacks.frames(stack).next().unwrap().name.raw(),
        "keep_history"
    );
    assert!(
        first.growth_bytes() >= 29 * i64::try_from(MIB).unwrap(),
        "{first:?}"
    );
    assert!(first.confidence > 0.9, "{first:?}");
    assert!(rest.iter().all(|site| site.growth_bytes() == 0));
    let same = Difference::new([(&before, &before_history), (&before, &before_history)]);
    let grown = |site: &&lowtide_history::SiteDifference| {
        site.growth_bytes() != 0 || site.confidence != 0.0
    };
    assert_eq!(same.sites.iter().find(grown), None);
}
