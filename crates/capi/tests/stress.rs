//! 16 threads free each other's blocks through the exported functions, on real memory.
//!
//! ThreadSanitizer (`cargo xtask tsan`) sees the writes to the blocks. If a block reaches a second thread and the
//! allocator did not order the two, it reports a data race. Only the ends of a block are written;
//! `crates/shared/tests/stress.rs` checks that blocks do not overlap.
//!
//! `LOWTIDE_STRESS_OPERATIONS` sets how many requests each thread makes.
#![expect(
    unsafe_code,
    clippy::unwrap_used,
    reason = "a test, which calls C functions and uses memory from them"
)]

mod common;

use std::env;
use std::ffi::c_void;
use std::process::Output;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;

use common::{Fake, allocate, allocate_on, command, isolated, stat};
use lowtide::*;

const THREADS: usize = 16;
/// Each thread first allocates this many blocks, and later holds at most [`HELD_MAX`].
const HELD_AT_FIRST: u64 = 100;
const HELD_MAX: usize = 40;
const OPERATIONS: &str = "LOWTIDE_STRESS_OPERATIONS";

/// A block that a thread holds.
struct Block {
    memory: *mut c_void,
    words: usize,
    /// The thread that allocated it, and the number of that request.
    stamp: u64,
}

// SAFETY: only the thread that holds a block uses it.
unsafe impl Send for Block {}

impl Block {
    /// Writes the stamp to both ends, without ordering threads.
    fn mark(&self) {
        for word in self.ends() {
            // SAFETY: the word lies within the block, which is the caller's.
            unsafe { word.write(self.stamp) };
        }
    }

    fn check(&self) {
        for word in self.ends() {
            // SAFETY: as in `mark`, which wrote it.
            let found = unsafe { word.read() };
            assert_eq!(found, self.stamp, "{word:p} in {:p}", self.memory);
        }
    }

    fn ends(&self) -> [*mut u64; 2] {
        let first = self.memory.cast::<u64>();
        [first, first.wrapping_add(self.words - 1)]
    }
}

/// The state that all threads of a test share.
struct Stress {
    /// As numbers. If there are as many as threads, each thread has its own.
    streams: Vec<usize>,
    /// Blocks for any thread to take.
    places: Vec<Mutex<Option<Block>>>,
    /// The context of the observer of events, if there is one.
    observed: Mutex<Option<Box<u64>>>,
    /// Threads wait here until all hold their first blocks.
    peak: Barrier,
    operations: u64,
}

/// The value that an observer must find in its context.
const OBSERVED: u64 = 0x6f62_7365_7276_6564;

unsafe extern "C" fn observe(context: *mut c_void, _event: *const Event) {
    // SAFETY: the context is replaced before it ends.
    let found = unsafe { context.cast::<u64>().read() };
    assert_eq!(found, OBSERVED);
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Returns a number below `count` from a few bits of a choice.
fn pick(bits: u64, count: usize) -> usize {
    usize::try_from(bits & 0xffff).unwrap() % count
}

impl Stress {
    /// The work of one thread: it holds some blocks, and swaps some with the shared places.
    fn work(&self, number: usize) {
        let (mut seed, mut held) = (number as u64 + 1, Vec::new());
        for operation in 0..self.operations {
            let choice = random(&mut seed);
            held.push(self.allocate(number, operation, choice));
            // All threads first hold more than ever after. Otherwise many requests would be new peaks of the
            // device. Each would sync the statistics of all lanes, and threads would mostly wait.
            if operation < HELD_AT_FIRST {
                continue;
            } else if operation == HELD_AT_FIRST {
                self.peak.wait();
            }
            if choice >> 28 & 3 == 0 {
                let block = held.swap_remove(pick(choice >> 32, held.len()));
                let place = &self.places[pick(choice >> 16, self.places.len())];
                let found = place.lock().unwrap().replace(block);
                found.into_iter().for_each(free);
            }
            while held.len() > HELD_MAX {
                free(held.swap_remove(pick(choice >> 32, held.len())));
            }
            self.manage(choice >> 48);
        }
        held.into_iter().for_each(free);
    }

    fn allocate(&self, number: usize, operation: u64, choice: u64) -> Block {
        let words = 1 + match choice % 64 {
            0 => pick(choice >> 8, 1 << 16) * 8,
            1..8 => pick(choice >> 8, 1 << 16) * 2,
            _ => pick(choice >> 8, 1 << 13),
        };
        let own = if self.streams.len() == THREADS {
            number
        } else {
            pick(choice >> 44, self.streams.len())
        };
        let memory = allocate_on(words * 8, 0, self.stream(own)).expect("there is room");
        let stamp = (number as u64 + 1) << 48 | operation;
        let block = Block {
            memory,
            words,
            stamp,
        };
        block.mark();
        if choice >> 24 & 0xfff == 0 {
            // Used on another stream, and freed later by any thread.
            let other = self.stream(pick(choice >> 36, self.streams.len()));
            assert_eq!(lowtide_record_stream(memory, other), Status::Ok);
        }
        block
    }

    fn stream(&self, index: usize) -> *mut c_void {
        ptr::without_provenance_mut(self.streams[index])
    }

    /// Sometimes makes a call that concerns all of the device.
    fn manage(&self, choice: u64) {
        match choice & 0xffff {
            0 => assert_eq!(lowtide_empty_cache(0), Status::Ok),
            1 => take_snapshot(),
            2 => self.change_observer(),
            3..6 => assert!(stat(0, "allocated_bytes.all.current") > 0),
            6 => assert_eq!(
                lowtide_deallocate(ptr::dangling_mut()),
                Status::NotAllocated
            ),
            _ => {}
        }
    }

    /// Sets or removes the observer of events. The previous observer is not called after that, so its context may
    /// be dropped.
    fn change_observer(&self) {
        let mut observed = self.observed.lock().unwrap();
        let mut next = observed.is_none().then(|| Box::new(OBSERVED));
        let observer: EventObserver = match next {
            Some(_) => Some(observe),
            None => None,
        };
        let context = next.as_deref_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the context lives until it is replaced.
        let status = unsafe { lowtide_observe_events(observer, context.cast()) };
        assert_eq!(status, Status::Ok);
        *observed = next;
    }
}

fn free(block: Block) {
    block.check();
    assert_eq!(lowtide_deallocate(block.memory), Status::Ok);
}

fn take_snapshot() {
    let (mut bytes, mut length) = (ptr::null_mut(), 0);
    // SAFETY: both may be written to.
    let status = unsafe { lowtide_snapshot(&raw mut bytes, &raw mut length) };
    assert_eq!(status, Status::Ok);
    // SAFETY: they come from `lowtide_snapshot`.
    unsafe { lowtide_release_bytes(bytes) };
}

fn run(fake: &Fake, streams: usize) {
    assert_eq!(lowtide_init(1), Status::Ok);
    let streams = (0..streams).map(|_| fake.stream().addr()).collect();
    let stress = &Stress {
        streams,
        places: (0..64).map(|_| Mutex::new(None)).collect(),
        observed: Mutex::new(None),
        peak: Barrier::new(THREADS),
        operations: operations(),
    };
    thread::scope(|scope| {
        for number in 0..THREADS {
            scope.spawn(move || stress.work(number));
        }
    });
    let left = stress.places.iter();
    left.filter_map(|place| place.lock().unwrap().take())
        .for_each(free);
    let requests = i64::try_from(THREADS as u64 * stress.operations).unwrap();
    assert_eq!(stat(0, "allocation.all.allocated"), requests);
    assert_eq!(stat(0, "allocation.all.freed"), requests);
    assert_eq!(lowtide_empty_cache(0), Status::Ok);
    assert_eq!(stat(0, "reserved_bytes.all.current"), 0);
    assert_eq!(fake.used_bytes(0), 0);
}

fn operations() -> u64 {
    env::var(OPERATIONS).map_or(2_000, |text| text.parse().expect("a number"))
}

fn stress(test: &str, [strategy, conf]: [&str; 2], body: fn(&Fake)) {
    let operations = operations().to_string();
    let variables = [
        (OPERATIONS, operations.as_str()),
        ("LOWTIDE_STRATEGY", strategy),
        ("LOWTIDE_CONF", conf),
        ("FAKECUDA_CAPACITY", "1073741824"),
    ];
    isolated(test, &variables, body);
}

#[test]
fn threads_on_streams_of_their_own() {
    let test = "threads_on_streams_of_their_own";
    stress(test, ["caching", ""], |fake| run(fake, THREADS));
}

/// More streams than lanes, each used by all threads.
#[test]
fn threads_on_any_of_forty_streams() {
    let test = "threads_on_any_of_forty_streams";
    stress(test, ["caching", ""], |fake| run(fake, 40));
}

#[test]
fn threads_on_expandable_segments() {
    let test = "threads_on_expandable_segments";
    let settings = ["caching", "expandable_segments:True"];
    stress(test, settings, |fake| run(fake, THREADS));
}

#[test]
fn threads_on_any_of_forty_streams_and_expandable_segments() {
    let test = "threads_on_any_of_forty_streams_and_expandable_segments";
    let settings = ["caching", "expandable_segments:True"];
    stress(test, settings, |fake| run(fake, 40));
}

#[test]
fn threads_on_frames_of_forty_streams() {
    stress("threads_on_frames_of_forty_streams", ["tide", ""], |fake| {
        run(fake, 40)
    });
}

#[test]
fn threads_on_size_classes() {
    let test = "threads_on_size_classes";
    let settings = ["slab", "arena_size_mb:16"];
    stress(test, settings, |fake| run(fake, THREADS));
}

/// The tests above rely on two facts. If two threads have the same block one after the other, only the allocator
/// orders them, and that is enough. If a thread writes to a block after it freed it, nothing orders the two, and
/// ThreadSanitizer reports a race.
#[test]
fn a_race_is_reported_and_nothing_else() {
    const IS_LATE: &str = "RACE_IS_LATE";
    if let Ok(is_late) = env::var(IS_LATE) {
        hand_on(is_late == "true");
        return;
    }
    let run = |is_late| -> Output {
        let mut child = command("a_race_is_reported_and_nothing_else");
        child.env(IS_LATE, is_late).output().unwrap()
    };
    let output = run("false");
    assert!(output.status.success(), "{output:?}");
    // `cargo xtask tsan` sets the variable. Without a sanitizer no race is reported.
    if env::var_os("LOWTIDE_TSAN").is_some() {
        let output = run("true");
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(report.contains("ThreadSanitizer: data race"), "{report}");
        assert_eq!(output.status.code(), Some(66), "ThreadSanitizer's own");
    }
}

/// One thread frees a block, and the next one allocates it. Both write to it. The first writes before its free
/// or, if `is_late`, when the other has the block, which no program may do.
fn hand_on(is_late: bool) {
    let _fake = Fake::load();
    let address = allocate(512, 0).unwrap().expose_provenance();
    let memory = || ptr::with_exposed_provenance_mut::<c_void>(address);
    let write = |value| {
        // SAFETY: it is mapped and large enough. A late write is a race, which this process is to show.
        unsafe { memory().cast::<u64>().write(value) };
    };
    // Neither flag orders the threads.
    let [is_free, is_taken] = [const { AtomicBool::new(false) }; 2];
    let wait_for = |flag: &AtomicBool| {
        while !flag.load(Ordering::Relaxed) {
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            if !is_late {
                write(1);
            }
            assert_eq!(lowtide_deallocate(memory()), Status::Ok);
            is_free.store(true, Ordering::Relaxed);
            if is_late {
                wait_for(&is_taken);
                write(1);
            }
        });
        scope.spawn(|| {
            wait_for(&is_free);
            assert_eq!(allocate(512, 0).unwrap().addr(), address);
            write(2);
            is_taken.store(true, Ordering::Relaxed);
        });
    });
}
