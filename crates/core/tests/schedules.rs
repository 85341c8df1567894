//! Many short seeded schedules of `tide`: streams, events, frames that move, stale views, faults and captures.
//!
//! After each operation the result, the memory behind the new block, the events and the statistics are checked; at the
//! end everything is. `LOWTIDE_SCHEDULES` sets how many schedules run. They are counted by what happened in them. A
//! change which no longer reaches a case fails.
#![expect(
    clippy::print_stdout,
    reason = "a long run says how often each case happened"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, thread};

use lowtide_core::{Config, DeviceAddress, Handle};
use lowtide_sim::program::{CAPACITY, Effect, Op, Runner, random_program};
use lowtide_sim::{Call, Step, StepKind};

const SCHEDULES: u64 = if cfg!(miri) { 1 } else { 3_000 };
const OPERATIONS: usize = 300;

/// A frame with so many views loses one when it moves, as `tide/supply.rs` says.
const VIEWS_MAX: usize = 4;

/// What can happen in a schedule.
const CASES: [&str; 11] = [
    "a frame moved",
    "pages were unmapped for a request",
    "a frame with many views lost one and moved",
    "a frame moved in a capture",
    "a request ran out of memory",
    "a fault met a request that maps several pages",
    "a fault met a request that had moved a frame",
    "idle memory was released",
    "idle memory was released for new memory",
    "a checkpoint was restored",
    "record_stream named a stream",
];

/// The driver's calls so far that say what an operation did.
fn calls(runner: &mut Runner) -> [u64; 4] {
    [Call::Create, Call::Map, Call::Unmap, Call::Release].map(|call| runner.calls(call))
}

/// The frame that is mapped at each page.
#[derive(Clone, Default)]
struct Views {
    frames: BTreeMap<DeviceAddress, Handle>,
}

impl Views {
    fn follow(&mut self, step: &Step) {
        match step.kind {
            StepKind::Map {
                address, handle, ..
            } => {
                self.frames.insert(address, handle);
            }
            StepKind::Unmap { address, size } => {
                let gone = address..address + size;
                self.frames.retain(|at, _| !gone.contains(at));
            }
            StepKind::Record { .. } | StepKind::Wait { .. } => {}
        }
    }

    fn count(&self, frame: Handle) -> usize {
        self.frames.values().filter(|&&at| at == frame).count()
    }

    /// Returns the frames with a view that `others` lack.
    fn more_than(&self, others: &Views) -> BTreeSet<Handle> {
        let views = self.frames.iter();
        let more = views.filter(|(at, frame)| others.frames.get(at) != Some(frame));
        more.map(|(_, &frame)| frame).collect()
    }

    /// Follows an operation. Returns whether a frame moved that was mapped before, and whether one of many views did
    /// that lost one of them.
    fn follow_all(&mut self, steps: &[Step]) -> [bool; 2] {
        let before = self.clone();
        steps.iter().for_each(|step| self.follow(step));
        let mut moved = self.more_than(&before);
        moved.retain(|&frame| before.count(frame) > 0);
        let lost = before.more_than(self);
        let has_many = |frame| before.count(frame) >= VIEWS_MAX && self.count(frame) >= VIEWS_MAX;
        let mut lost_one = moved.intersection(&lost);
        [!moved.is_empty(), lost_one.any(|&frame| has_many(frame))]
    }
}

/// Executes a schedule. Returns which cases happened.
fn run(config: &Config, seed: u64) -> [bool; CASES.len()] {
    let mut runner = Runner::new(config, CAPACITY);
    let (mut seen, mut captures) = ([false; CASES.len()], 0_u32);
    let mut views = Views::default();
    for (index, op) in random_program(seed).take(OPERATIONS).enumerate() {
        let before = calls(&mut runner);
        let ooms = runner.allocator().stats().num_ooms;
        let effect = runner.apply(&op);
        let effect = effect.unwrap_or_else(|error| {
            panic!("{config}, seed {seed}, operation {index}, {op:?}: {error}")
        });
        let after = calls(&mut runner);
        let [created, mapped, unmapped, released] = [0, 1, 2, 3].map(|at| after[at] - before[at]);
        match op {
            Op::CaptureBegin { .. } => captures += 1,
            Op::CaptureEnd => captures = captures.saturating_sub(1),
            _ => {}
        }
        let is_alloc = matches!(op, Op::Alloc { .. });
        let (is_done, is_refused) = (effect == Effect::Done, effect == Effect::Refused);
        let moved = is_alloc && is_done && mapped > created;
        let [moved_for_any, lost_view] = views.follow_all(runner.steps());
        let happened = [
            moved,
            is_alloc && is_done && unmapped > 0,
            moved && lost_view,
            moved && captures > 0,
            runner.allocator().stats().num_ooms > ooms,
            is_alloc && is_refused && mapped > 1,
            is_alloc && is_refused && moved_for_any,
            matches!(op, Op::ReleaseUnused { .. }) && released > 0,
            matches!(op, Op::ReleaseIdle { .. }) && released > 0,
            matches!(op, Op::Restore { .. }) && is_done,
            matches!(op, Op::RecordStream { .. }) && is_done,
        ];
        for (seen, happened) in seen.iter_mut().zip(happened) {
            *seen |= happened;
        }
    }
    if let Err(error) = runner.finish() {
        panic!("{config}, seed {seed}, at the end: {error}");
    }
    seen
}

#[test]
fn no_schedule_breaks_a_promise_and_each_case_happens() {
    let count = env::var("LOWTIDE_SCHEDULES");
    let count = count.map_or(SCHEDULES, |text| text.parse().expect("a number"));
    let config: Config = "tide".parse().expect("a strategy");
    let seen = [const { AtomicU64::new(0) }; CASES.len()];
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let work = |first: u64| {
        for seed in (first..count).step_by(threads) {
            for (seen, happened) in seen.iter().zip(run(&config, seed)) {
                seen.fetch_add(u64::from(happened), Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for first in 0..threads as u64 {
            scope.spawn(move || work(first));
        }
    });
    for (case, seen) in CASES.iter().zip(&seen) {
        let seen = seen.load(Ordering::Relaxed);
        println!("{seen} of {count} schedules: {case}");
        assert!(
            seen > 0 || count < SCHEDULES || cfg!(miri),
            "in no schedule {case}"
        );
    }
}
