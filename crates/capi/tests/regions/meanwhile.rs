//! Other threads use a region while it is paused and resumed.
//!
//! `LOWTIDE_STRESS_CYCLES` sets the number of cycles.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{RwLock, TryLockError};
use std::thread::ScopedJoinHandle;
use std::{env, ptr, thread};

use lowtide::*;

use crate::common::{Fake, allocate, allocate_on, check, fill, isolated, last_error};
use crate::{MIB, allocate_in, enter, leave, pause, region, resume};

const THREADS: usize = 4;
const CYCLES: u64 = 12;
const HELD_MAX: usize = 12;

/// The state that the threads share with the one that pauses.
struct Shared {
    /// Locked for writing while the memory is paused. A thread that holds it for reading may access its blocks.
    is_back: RwLock<()>,
    /// Requests that found the region paused.
    refused: AtomicU64,
    is_over: AtomicBool,
}

/// A block, and the seed of its contents once it was filled.
struct Block {
    memory: *mut c_void,
    size: usize,
    seed: Option<usize>,
}

/// A thread that allocates and frees in the region at any time, and accesses its blocks while they are mapped.
struct Worker<'a> {
    shared: &'a Shared,
    fake: &'a Fake,
    random: u64,
    device: c_int,
    /// The second is the device's default stream.
    streams: [*mut c_void; 2],
    held: Vec<Block>,
}

impl Worker<'_> {
    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 16).unwrap() % bound
    }

    fn work(&mut self) {
        enter("kv", Backup::Host);
        while !self.shared.is_over.load(Ordering::Relaxed) {
            if self.held.len() < HELD_MAX {
                self.request();
            }
            self.use_some();
            if !self.held.is_empty() && self.below(3) > 0 {
                let index = self.below(self.held.len());
                let block = self.held.swap_remove(index);
                assert_eq!(lowtide_deallocate(block.memory), Status::Ok);
            }
        }
        leave();
        for block in self.held.drain(..) {
            if let Some(seed) = block.seed {
                check(block.memory, block.size, seed);
            }
            assert_eq!(lowtide_deallocate(block.memory), Status::Ok);
        }
    }

    fn request(&mut self) {
        let size = match self.below(8) {
            0 => 2 * MIB + self.below(10 * MIB),
            1..3 => MIB + self.below(2 * MIB),
            _ => 8 + self.below(MIB / 2),
        };
        let stream = self.streams[self.below(2)];
        match allocate_on(size, self.device, stream) {
            Ok(memory) => self.held.push(Block {
                memory,
                size,
                seed: None,
            }),
            Err(status) => {
                assert_eq!(status, Status::Paused, "{}", last_error());
                self.shared.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Accesses a block if the region is mapped.
    fn use_some(&mut self) {
        let _is_back = match self.shared.is_back.try_read() {
            Ok(is_back) => is_back,
            Err(TryLockError::WouldBlock) => return,
            Err(TryLockError::Poisoned(_)) => panic!("another thread failed"),
        };
        if !self.held.is_empty() {
            let (seed, index) = (self.below(1 << 20), self.below(self.held.len()));
            let block = &mut self.held[index];
            match block.seed {
                Some(seed) => check(block.memory, block.size, seed),
                None => {
                    // The memory may have been another block's, and earlier work in the stream may still use it.
                    assert!(self.fake.synchronize(self.streams[0]));
                    fill(block.memory, block.size, seed);
                }
            }
            block.seed.get_or_insert(seed);
        }
        // Queues work that may still run when the block is free, and when the region is paused.
        if self.below(4) == 0 && self.held.len() < HELD_MAX {
            let stream = self.streams[0];
            if let Ok(memory) = allocate_on(MIB, self.device, stream) {
                self.fake.set_bytes(memory, MIB, stream);
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
            }
        }
    }
}

/// Threads allocate and free in a region on two devices while it is paused and resumed. A request succeeds or
/// returns that the region is paused. Contents are restored, and nothing is left at the end.
#[test]
fn threads_allocate_and_free_in_a_region_that_is_paused() {
    let test = "meanwhile::threads_allocate_and_free_in_a_region_that_is_paused";
    for (strategy, conf) in [
        ("caching", ""),
        ("caching", "expandable_segments:True"),
        ("bfc", ""),
        ("slab", "arena_size_mb:16"),
        ("buddy", "arena_size_mb:16"),
        ("pool", "slab_size_mb:64"),
        ("direct", ""),
        ("tide", ""),
    ] {
        let variables = [
            ("FAKECUDA_DEVICES", "2"),
            ("LOWTIDE_STRATEGY", strategy),
            ("LOWTIDE_CONF", conf),
        ];
        isolated(test, &variables, run);
    }
}

fn run(fake: &Fake) {
    let before = [0, 1].map(|device| {
        let memory = allocate(1000, device).unwrap();
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        fake.used_bytes(device)
    });
    let shared = Shared {
        is_back: RwLock::new(()),
        refused: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
    };
    enter("kv", Backup::Host);
    leave();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let shared = &shared;
            scope.spawn(move || {
                let device = c_int::from(number % 2 == 1);
                let stream = fake.stream_of(device);
                let mut worker = Worker {
                    shared,
                    fake,
                    random: 0x9e37_79b9_7f4a_7c15 ^ (number as u64 + 1),
                    device,
                    streams: [stream, ptr::null_mut()],
                    held: Vec::new(),
                };
                worker.work();
            });
        }
        pause_and_resume(&shared);
    });
    assert_eq!(region("kv", Backup::Host, 0).live_bytes, 0);
    assert_eq!(lowtide_reset(), Status::Ok);
    for device in 0..2 {
        assert_eq!(fake.used_bytes(device), before[device as usize]);
    }
    let live = fake.live();
    assert_eq!((live.reservations, live.handles, live.mappings), (0, 0, 0));
}

/// In each cycle, some request is refused before the resume.
fn pause_and_resume(shared: &Shared) {
    let cycles = env::var("LOWTIDE_STRESS_CYCLES");
    let cycles = cycles.map_or(CYCLES, |text| text.parse().unwrap());
    for _ in 0..cycles {
        let is_away = shared.is_back.write().unwrap();
        let refused = shared.refused.load(Ordering::Relaxed);
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        while shared.refused.load(Ordering::Relaxed) == refused {
            thread::yield_now();
        }
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        drop(is_away);
    }
    shared.is_over.store(true, Ordering::Relaxed);
}

/// Returns whether a thread keeps querying events instead of finishing. `asked` is the number of queries before.
fn goes_on_asking(fake: &Fake, asked: u64, asking: &ScopedJoinHandle<'_, Status>) -> bool {
    while fake.calls("cuEventQuery") < asked + 10 && !asking.is_finished() {
        thread::yield_now();
    }
    !asking.is_finished()
}

/// A freed block that another device's stream uses stays mapped until that work is done. The pause waits for it,
/// and other requests are served meanwhile.
#[test]
fn a_pause_waits_for_streams_of_other_devices() {
    let test = "meanwhile::a_pause_waits_for_streams_of_other_devices";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        assert!(allocate(1, 1).is_ok());
        let memory = allocate_in("kv", Backup::Host, 4 * MIB, 0, 1);
        let kept = allocate_in("kv", Backup::Host, MIB, 0, 2);
        assert_eq!(lowtide_enable_peer_access(0, 1), Status::Ok);
        let stream = fake.stream_of(1);
        fake.use_device(1);
        fake.hold(stream, true);
        fake.set_bytes(memory, 4 * MIB, stream);
        assert_eq!(lowtide_record_stream(memory, stream), Status::Ok);
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
        thread::scope(|scope| {
            let asked = fake.calls("cuEventQuery");
            let pausing = scope.spawn(|| pause("kv"));
            assert!(goes_on_asking(fake, asked, &pausing), "the stream uses it");
            let other = allocate(MIB, 0).unwrap();
            assert_eq!(lowtide_deallocate(other), Status::Ok);
            fake.hold(stream, false);
            assert_eq!(pausing.join().unwrap(), Status::Ok, "{}", last_error());
        });
        assert!(fake.synchronize(stream), "its work found the memory there");
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        check(kept, MIB, 2);
    });
}

/// A resume maps memory and unmaps none, so blocks freed meanwhile may stay pending.
#[test]
fn a_resume_waits_for_no_stream() {
    let test = "meanwhile::a_resume_waits_for_no_stream";
    isolated(test, &[], |fake| {
        let freed = allocate_in("kv", Backup::Host, MIB, 0, 1);
        let kept = allocate_in("kv", Backup::Host, MIB, 0, 2);
        let other = allocate(MIB, 0).unwrap();
        let stream = fake.stream();
        assert_eq!(lowtide_record_stream(freed, stream), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        fake.hold(stream, true);
        fake.set_bytes(other, MIB, stream);
        assert_eq!(lowtide_deallocate(freed), Status::Ok);
        thread::scope(|scope| {
            let asked = fake.calls("cuEventQuery");
            let resuming = scope.spawn(|| resume("kv"));
            let has_waited = goes_on_asking(fake, asked, &resuming);
            fake.hold(stream, false);
            assert_eq!(resuming.join().unwrap(), Status::Ok, "{}", last_error());
            assert!(!has_waited);
        });
        check(kept, MIB, 2);
    });
}

/// Statistics are read without a request since the stream's work was done.
#[test]
fn what_streams_are_done_with_is_not_said_to_come_back() {
    let test = "meanwhile::what_streams_are_done_with_is_not_said_to_come_back";
    isolated(test, &[], |fake| {
        let freed = allocate_in("kv", Backup::Host, 64 * MIB, 0, 1);
        let stream = fake.stream();
        assert_eq!(lowtide_record_stream(freed, stream), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        let other = allocate(MIB, 0).unwrap();
        fake.hold(stream, true);
        fake.set_bytes(other, MIB, stream);
        assert_eq!(lowtide_deallocate(freed), Status::Ok);
        let paused = || region("kv", Backup::Host, 0).paused_bytes;
        assert!(paused() >= 64 << 20, "the stream uses it");
        fake.hold(stream, false);
        assert!(fake.synchronize(stream));
        assert_eq!(paused(), 0);
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        assert_eq!(region("kv", Backup::Host, 0).mapped_bytes, 0);
    });
}

/// A pause cannot wait for the end of a capture, because the same thread may be capturing.
#[test]
fn a_pause_is_refused_where_what_was_freed_waits_for_a_capture() {
    let test = "meanwhile::a_pause_is_refused_where_what_was_freed_waits_for_a_capture";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        assert!(allocate(1, 1).is_ok());
        let memory = allocate_in("kv", Backup::Host, MIB, 0, 1);
        let kept = allocate_in("kv", Backup::Host, MIB, 0, 2);
        let stream = fake.stream_of(1);
        assert_eq!(lowtide_record_stream(memory, stream), Status::Ok);
        assert_eq!(lowtide_capture_begin(0), Status::Ok);
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
        assert_ne!(pause("kv"), Status::Ok);
        assert!(
            last_error().contains("a graph is captured"),
            "{}",
            last_error()
        );
        assert_eq!(region("kv", Backup::Host, 0).state, RegionState::Mapped);
        assert_eq!(lowtide_capture_end(0), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        check(kept, MIB, 2);
    });
}
