//! A job whose driver calls fail at random, with every strategy. The contents of its blocks are checked, and that
//! host memory does not grow.
//!
//! Threads allocate, free, use blocks on other streams, use pools, capture, pause and resume, in phases. After
//! each phase all memory is freed and released without failures, and nothing may be left. A normal run has a few
//! short phases.
//!
//! ```text
//! LOWTIDE_FAILURES_SECONDS=600     this long for each strategy, in phases of many operations
//! LOWTIDE_FAILURES_SEED=7          the seed of the failures; a failing test prints its seed
//! LOWTIDE_FAILURES_PER_MILLION=0   how many of a million driver calls fail; default: 50,000
//! ```
#![expect(
    unsafe_code,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test, which calls C functions and uses memory from them, and says how far it is"
)]

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod figures;
mod regions;

use std::env;
use std::ffi::c_void;
use std::process::exit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Fake, allocate, command, last_error, stat};
use figures::Figures;
use lowtide::*;

#[global_allocator]
static HEAP: figures::Counted = figures::Counted;

const MIB: usize = 1 << 20;
/// The device's memory: more than all threads hold, but less than single requests need.
const CAPACITY: usize = 1 << 30;
/// The number of threads, without the one that pauses and resumes.
const THREADS: usize = 3;
/// One stream for each thread, and as many others that use its blocks.
const STREAMS: usize = 2 * THREADS;

/// The variable that is set in the process of one strategy.
const CHILD: &str = "LOWTIDE_FAILURES_CHILD";
const SECONDS: &str = "LOWTIDE_FAILURES_SECONDS";
const SEED: &str = "LOWTIDE_FAILURES_SEED";
const PER_MILLION: &str = "LOWTIDE_FAILURES_PER_MILLION";

/// A sequence that looks random: xorshift.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from((self.next() >> 20) % end as u64).unwrap()
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// The state that the threads of a phase share.
struct Phase<'a> {
    fake: &'a Fake,
    /// As numbers, because threads can share those.
    streams: &'a [usize],
    seed: u64,
    operations: usize,
}

impl Phase<'_> {
    fn stream(&self, index: usize) -> *mut c_void {
        ptr::without_provenance_mut(self.streams[index])
    }

    /// Uses a block in work of another stream. The block may be freed after that.
    fn use_elsewhere(&self, memory: *mut c_void, size: usize, stream: *mut c_void) {
        insist("set bytes", || {
            if self.fake.sets_bytes(memory, size, stream) {
                Status::Ok
            } else {
                Status::Driver
            }
        });
        insist("record a stream", || lowtide_record_stream(memory, stream));
    }
}

/// How many calls failed.
static FAILURES: AtomicU64 = AtomicU64::new(0);
/// Whether the process is ending, and the driver with it.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// Repeats a call until it succeeds. Every failure is temporary.
fn insist(what: &str, mut call: impl FnMut() -> Status) {
    const TRIES: usize = 100_000;
    for _ in 0..TRIES {
        if call() == Status::Ok {
            return;
        }
        FAILURES.fetch_add(1, Ordering::Relaxed);
        while IS_ENDING.load(Ordering::Relaxed) {
            thread::park();
        }
    }
    panic!("{what} fails for ever: {}", last_error());
}

fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

/// The job of a strategy's process.
fn job() -> ! {
    let fake = Fake::load();
    // Failures at a device's first use are tested call by call in `faults.rs`.
    give_all_back(&fake, 0);
    let streams: Vec<usize> = (0..STREAMS).map(|_| fake.stream().addr()).collect();
    let seed = number(SEED).unwrap();
    let per_million = number(PER_MILLION).unwrap_or(50_000);
    let start = Instant::now();
    let limit = number(SECONDS).map(Duration::from_secs);
    let (phases, operations) = match limit {
        Some(_) => (usize::MAX, 4_000),
        None => (4, 400),
    };
    let mut at_rest = Vec::new();
    for number in 0..phases {
        if limit.is_some_and(|limit| start.elapsed() > limit) {
            break;
        }
        let phase = Phase {
            fake: &fake,
            streams: &streams,
            seed: seed.wrapping_mul(1_000_003).wrapping_add(number as u64),
            operations,
        };
        run(&phase, number, per_million);
        give_all_back(&fake, STREAMS);
        let figures = Figures::now();
        if limit.is_some() {
            let failures = FAILURES.load(Ordering::Relaxed);
            println!(
                "{:>5} s, phase {number}, {failures} failures: {figures}",
                start.elapsed().as_secs()
            );
        }
        at_rest.push(figures);
    }
    // Tables grow in the first phases and then stay. So do the recent events of each lane, 512 KiB, once memory
    // is short.
    if let [_, warm, .., last] = &at_rest[..] {
        let has_grown =
            last.heap > warm.heap + 4 * MIB || last.anonymous > warm.anonymous + 16 * MIB;
        assert!(!has_grown, "seed {seed}: from {warm} to {last}");
    }
    println!("seed {seed}: {} phases", at_rest.len());
    end_at_work(fake, streams, seed, per_million)
}

/// Ends the process while its threads work and calls fail.
fn end_at_work(fake: Fake, streams: Vec<usize>, seed: u64, per_million: u64) -> ! {
    const COPIES: &str = "cuMemcpyDtoHAsync_v2";
    let phase: &Phase<'static> = Box::leak(Box::new(Phase {
        fake: Box::leak(Box::new(fake)),
        streams: streams.leak(),
        seed,
        operations: usize::MAX,
    }));
    let before = phase.fake.calls(COPIES);
    phase.fake.fail_at_random(seed, per_million);
    for thread in 0..THREADS {
        thread::spawn(move || blocks::work(phase, thread));
    }
    let regions = thread::spawn(|| regions::work(phase));
    // If there is no memory for a region's blocks, or so many calls fail that no pause reaches its copies, the
    // process ends during other work.
    let limit = Instant::now() + Duration::from_secs(10);
    while phase.fake.calls(COPIES) < before + 10 && Instant::now() < limit {
        assert!(
            !regions.is_finished(),
            "regions are worked with until the end"
        );
        thread::yield_now();
    }
    IS_ENDING.store(true, Ordering::Relaxed);
    exit(0);
}

/// Runs all threads while calls fail.
fn run(phase: &Phase<'_>, number: usize, per_million: u64) {
    // In every other phase, streams work as late as possible.
    phase.fake.set_lazy(number % 2 == 1);
    phase.fake.fail_at_random(phase.seed, per_million);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || blocks::work(phase, thread));
        }
        scope.spawn(|| regions::work(phase));
    });
    phase.fake.fail_none();
    phase.fake.set_lazy(false);
}

/// Releases all memory, none of which is in use, and checks that nothing is left.
fn give_all_back(fake: &Fake, streams: usize) {
    // Memory that the driver refused to release is released again with the next release.
    let memory = allocate(MIB, 0).unwrap();
    assert_eq!(lowtide_deallocate(memory), Status::Ok);
    assert_eq!(lowtide_release_backups(), Status::Ok, "{}", last_error());
    assert_eq!(lowtide_empty_cache(0), Status::Ok, "{}", last_error());
    regions::trim_all();
    assert_eq!(lowtide_empty_cache(0), Status::Ok, "{}", last_error());
    assert_eq!(stat(0, "active_bytes.all.current"), 0);
    assert_eq!(stat(0, "reserved_bytes.all.current"), 0);
    assert!(fake.synchronize_device(), "the device is lost");
    let live = fake.live();
    assert_eq!(
        (
            live.allocations,
            live.reservations,
            live.handles,
            live.mappings,
            live.host_allocations,
            live.streams
        ),
        (0, 0, 0, 0, 0, streams as u64),
        "{live:?}"
    );
    assert_eq!(fake.used_bytes(0), 0);
}

/// Runs the job of a strategy in a process of its own.
fn strategy(test: &str, [strategy, conf]: [&str; 2]) {
    if env::var_os(CHILD).is_some() {
        job();
    }
    let seed = number(SEED).unwrap_or(1);
    let mut child = command(test);
    for name in [SECONDS, PER_MILLION] {
        if let Ok(value) = env::var(name) {
            child.env(name, value);
        }
    }
    child
        .env(CHILD, "1")
        .env(SEED, seed.to_string())
        .env("LOWTIDE_STRATEGY", strategy)
        .env("LOWTIDE_CONF", conf)
        .env("FAKECUDA_CAPACITY", CAPACITY.to_string());
    let status = child.status().unwrap();
    assert!(
        status.success(),
        "{strategy}:{conf} with seed {seed}: {status}"
    );
}

#[test]
fn caching() {
    strategy("caching", ["caching", ""]);
}

#[test]
fn expandable_segments() {
    strategy(
        "expandable_segments",
        ["caching", "expandable_segments:True"],
    );
}

#[test]
fn bfc() {
    strategy("bfc", ["bfc", "retry_ms:5"]);
}

#[test]
fn buddy() {
    strategy("buddy", ["buddy", "arena_size_mb:64"]);
}

#[test]
fn tide() {
    strategy("tide", ["tide", ""]);
}

#[test]
fn slab() {
    strategy("slab", ["slab", "arena_size_mb:64"]);
}

#[test]
fn pool() {
    strategy("pool", ["pool", "slab_size_mb:128"]);
}

#[test]
fn direct() {
    strategy("direct", ["direct", ""]);
}
