//! Private pools of graphs that belong to a region.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use std::{ptr, thread};

use lowtide::*;

use crate::common::{allocate, check, fill, find, isolated, last_error};
use crate::{MIB, c_text, enter, host_copy, leave, pause, region, resume, trim};

/// A graph may use the free memory of its pool.
#[test]
fn a_region_with_a_graphs_pool_does_not_end() {
    let test = "pools::a_region_with_a_graphs_pool_does_not_end";
    isolated(test, &[], |_| {
        let pool = Mempool {
            capture: 4,
            user: 0,
        };
        let tag = c_text("graph");
        let host = Backup::Host as c_int;
        // SAFETY: the text ends with a zero byte.
        let added = unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), host) };
        assert_eq!(added, Status::Ok);
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        let between = allocate(4 * MIB, 0).unwrap();
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        assert_eq!(lowtide_deallocate(between), Status::Ok);
        for away in [RegionState::Mapped, RegionState::Paused] {
            assert_eq!(trim("graph", Backup::Host, 0), Status::Ok);
            assert_eq!(region("graph", Backup::Host, 0).state, away);
            assert_eq!(pause("graph"), Status::Ok);
        }
        assert_eq!(resume("graph"), Status::Ok);
        fill(between, 4 * MIB, 1);
        check(between, 4 * MIB, 1);
    });
}

#[test]
fn a_graphs_pool_is_paused_with_its_region() {
    let test = "pools::a_graphs_pool_is_paused_with_its_region";
    isolated(test, &[], |fake| {
        let pool = Mempool {
            capture: 4,
            user: 0,
        };
        let tag = c_text("graph");
        let host = Backup::Host as c_int;
        // SAFETY: the text ends with a zero byte.
        let add = |pool| unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), host) };
        assert_eq!(add(pool), Status::Ok);
        assert_eq!(add(pool), Status::Ok, "it has that memory already");
        // SAFETY: the text ends with a zero byte.
        let other = unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), Backup::Disk as c_int) };
        assert_eq!(other, Status::Pool, "it has another source");
        let start = fake.used_bytes(0);
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        let static_input = allocate(4 * MIB, 0).unwrap();
        let between = allocate(64 * MIB, 0).unwrap();
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        fill(static_input, 4 * MIB, 1);
        assert_eq!(lowtide_deallocate(between), Status::Ok);
        for round in 0..3 {
            assert_eq!(pause("graph"), Status::Ok);
            assert_eq!(fake.used_bytes(0), start);
            let needed = region("graph", Backup::Host, 0).paused_bytes;
            assert!(needed >= 68 << 20, "what is free comes back, too");
            assert_eq!(resume("graph"), Status::Ok);
            assert_eq!(region("graph", Backup::Host, 0).mapped_bytes, needed);
            check(static_input, 4 * MIB, 1);
            // A graph's replay writes there, although the block is free.
            fill(between, 64 * MIB, round);
            check(between, 64 * MIB, round);
        }
        // A pool that is added while the region is paused is paused, too.
        assert_eq!(pause("graph"), Status::Ok);
        let late = Mempool {
            capture: 5,
            user: 0,
        };
        assert_eq!(add(late), Status::Ok);
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, late, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        assert_eq!(allocate(1000, 0), Err(Status::Paused));
        assert_eq!(lowtide_end_allocate_to_pool(0, late), Status::Ok);
        // A graph may be deleted while its memory is paused.
        assert_eq!(lowtide_deallocate(static_input), Status::Ok);
        for _ in 0..2 {
            assert_eq!(lowtide_release_pool(0, pool), Status::Ok);
        }
        assert_eq!(resume("graph"), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(fake.used_bytes(0), start);
    });
}

/// Nothing can use that memory, and the card may have too little for it at the resume.
#[test]
fn the_memory_of_a_graph_that_has_ended_does_not_come_back() {
    let test = "pools::the_memory_of_a_graph_that_has_ended_does_not_come_back";
    isolated(test, &[("FAKECUDA_CAPACITY", "268435456")], |fake| {
        let tag = c_text("graph");
        let start = fake.used_bytes(0);
        for (capture, is_away, keeps_one) in [
            (4, false, false),
            (5, true, false),
            (6, false, true),
            (7, true, true),
        ] {
            let pool = Mempool { capture, user: 0 };
            // SAFETY: the text ends with a zero byte.
            let added =
                unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), Backup::Host as c_int) };
            assert_eq!(added, Status::Ok, "{}", last_error());
            let kept = allocate_in_pool(pool, 4 * MIB, 1);
            let between = allocate_in_pool(pool, 64 * MIB, 2);
            let end = || {
                assert_eq!(lowtide_deallocate(between), Status::Ok);
                if !keeps_one {
                    assert_eq!(lowtide_deallocate(kept), Status::Ok);
                }
                while lowtide_release_pool(0, pool) == Status::Ok {}
            };
            if !is_away {
                end();
            }
            assert_eq!(pause("graph"), Status::Ok, "{}", last_error());
            if is_away {
                end();
            }
            // Other memory leaves only enough for the kept block.
            let used = usize::try_from(fake.used_bytes(0)).unwrap();
            let others = allocate((256 - 32) * MIB - used, 0).unwrap();
            let needed = region("graph", Backup::Host, 0).paused_bytes;
            assert_eq!(resume("graph"), Status::Ok, "{}", last_error());
            assert_eq!(region("graph", Backup::Host, 0).mapped_bytes, needed);
            if keeps_one {
                check(kept, 4 * MIB, 1);
                assert_eq!(lowtide_deallocate(kept), Status::Ok);
            }
            assert_eq!(lowtide_deallocate(others), Status::Ok);
            assert_eq!(lowtide_empty_cache(0), Status::Ok);
            assert_eq!(fake.used_bytes(0), start, "{capture}");
        }
    });
}

/// The id of a removed pool may belong to another pool, which is in no region.
#[test]
fn a_pool_that_has_ended_is_in_no_region() {
    let test = "pools::a_pool_that_has_ended_is_in_no_region";
    isolated(test, &[], |_| {
        let pool = Mempool {
            capture: 0,
            user: 7,
        };
        let allocate_in_pool = |seed| {
            // SAFETY: there is no filter.
            let routed =
                unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
            assert_eq!(routed, Status::Ok);
            let memory = allocate(3 * MIB, 0);
            assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
            let memory = memory.unwrap();
            fill(memory, 3 * MIB, seed);
            memory
        };
        let end = |memory| {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
            while lowtide_release_pool(0, pool) == Status::Ok {}
            assert_eq!(lowtide_reset(), Status::Ok);
        };
        let tag = c_text("kv");
        let host = Backup::Host as c_int;
        // SAFETY: the text ends with a zero byte.
        let add = || unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), host) };
        assert_eq!(add(), Status::Ok);
        end(allocate_in_pool(1));

        let other = allocate_in_pool(2);
        assert_eq!(add(), Status::Pool, "it has other segments");
        assert_eq!(pause("kv"), Status::Ok);
        check(other, 3 * MIB, 2);
        fill(other, 3 * MIB, 3);
        assert_eq!(resume("kv"), Status::Ok);
        check(other, 3 * MIB, 3);
        end(other);

        assert_eq!(add(), Status::Ok, "it is new");
        let memory = allocate_in_pool(4);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(host_copy(memory).unwrap().1, 3 * MIB);
        assert_eq!(resume("kv"), Status::Ok);
        check(memory, 3 * MIB, 4);
    });
}

/// Allocates `size` bytes in a pool, and fills them with a pattern.
fn allocate_in_pool(pool: Mempool, size: usize, seed: usize) -> *mut c_void {
    // SAFETY: there is no filter.
    let routed = unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
    assert_eq!(routed, Status::Ok, "{}", last_error());
    let memory = allocate(size, 0);
    assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
    let memory = memory.unwrap();
    assert_eq!(find(memory).unwrap().pool, pool);
    fill(memory, size, seed);
    memory
}

fn is_away(memory: *mut c_void) -> bool {
    let mut is_away = false;
    // SAFETY: it may be written to.
    let status = unsafe { lowtide_is_away(memory, &raw mut is_away) };
    assert_eq!(status, Status::Ok, "{}", last_error());
    is_away
}

/// Calls `act` in a thread of its own during a pause. Returns its status and the region's state then. If `act`
/// waited for the pause, it would not return.
fn beside_a_pause(act: impl FnOnce() -> Status + Send + 'static) -> (Status, RegionState) {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let _ = sender.send(act());
    });
    let status = receiver.recv_timeout(Duration::from_secs(60));
    let state = region("default", Backup::Host, 0).state;
    (status.expect("it waits for the pause"), state)
}

/// A pause may wait for the thread that begins a pool, and that thread may hold Python's lock. A pool that joins
/// the region meanwhile is paused with the others.
#[test]
fn pools_of_a_process_in_a_region_are_begun_beside_a_pause() {
    let test = "pools::pools_of_a_process_in_a_region_are_begun_beside_a_pause";
    isolated(test, &IN_A_REGION_AS_A_WHOLE, |fake| {
        let [known, new, of_region] = [4, 5, 6].map(|capture| Mempool { capture, user: 0 });
        let memory = allocate_in_pool(known, MIB, 1);
        let stream = fake.stream();
        for (round, pool) in [(0, known), (1, new)] {
            fake.hold(stream, true);
            fake.set_bytes(memory, MIB, stream);
            let pause = thread::spawn(|| pause("default"));
            while region("default", Backup::Host, 0).state != RegionState::Pausing {
                assert!(
                    !pause.is_finished(),
                    "{round}: it is to wait for the stream"
                );
                thread::yield_now();
            }
            // SAFETY: there is no filter.
            let begun = beside_a_pause(move || unsafe {
                lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None)
            });
            // SAFETY: the text ends with a zero byte.
            let added = beside_a_pause(move || unsafe {
                let tag = c_text("default");
                lowtide_region_pool(0, of_region, tag.as_ptr(), Backup::Host as c_int)
            });
            let refused = allocate(1000, 0);
            fake.hold(stream, false);
            assert_eq!(begun, (Status::Ok, RegionState::Pausing));
            assert_eq!(added, (Status::Ok, RegionState::Pausing));
            assert_eq!(refused, Err(Status::Paused));
            assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
            assert_eq!(pause.join().unwrap(), Status::Ok);
            assert!(is_away(memory));
            assert_eq!(resume("default"), Status::Ok, "{}", last_error());
        }
        for pool in [new, of_region] {
            let memory = allocate_in_pool(pool, MIB, 2);
            assert_eq!(pause("default"), Status::Ok, "{}", last_error());
            assert!(is_away(memory));
            assert_eq!(resume("default"), Status::Ok, "{}", last_error());
            check(memory, MIB, 2);
        }
    });
}

/// Threads create pools, allocate in them and release them, while another thread pauses and resumes their region.
#[test]
fn pools_come_and_end_beside_pauses() {
    let test = "pools::pools_come_and_end_beside_pauses";
    isolated(test, &IN_A_REGION_AS_A_WHOLE, |fake| {
        let kept = allocate_in_pool(
            Mempool {
                capture: 1,
                user: 0,
            },
            MIB,
            1,
        );
        let before = fake.used_bytes(0);
        let met = Met::default();
        thread::scope(|scope| {
            let _ends = Ends(&met.is_over);
            let threads = [2, 3].map(|capture| {
                scope.spawn({
                    let met = &met;
                    move || come_and_end(capture, met)
                })
            });
            for _ in 0..50 {
                assert_eq!(pause("default"), Status::Ok, "{}", last_error());
                assert!(is_away(kept));
                wait_for(&met.refused, &threads);
                assert_eq!(resume("default"), Status::Ok, "{}", last_error());
                assert!(!is_away(kept));
                wait_for(&met.served, &threads);
            }
        });
        assert_eq!(region("default", Backup::Host, 0).live_bytes, MIB as u64);
        // The last pool may have been released while it was paused.
        assert_eq!(lowtide_empty_cache(0), Status::Ok);
        // Memory that was resumed together may be one piece, which stays mapped with the kept block until the
        // next cycle.
        assert_eq!(pause("default"), Status::Ok, "{}", last_error());
        assert_eq!(resume("default"), Status::Ok, "{}", last_error());
        check(kept, MIB, 1);
        assert_eq!(fake.used_bytes(0), before);
    });
}

thread_local! {
    /// The pool of this thread's requests.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// The results of the threads' requests.
#[derive(Default)]
struct Met {
    served: AtomicU64,
    refused: AtomicU64,
    is_over: AtomicBool,
}

/// Waits until the count rises.
fn wait_for<T>(count: &AtomicU64, threads: &[thread::ScopedJoinHandle<'_, T>]) {
    let before = count.load(Ordering::Relaxed);
    while count.load(Ordering::Relaxed) == before {
        assert!(!threads.iter().any(thread::ScopedJoinHandle::is_finished));
        thread::yield_now();
    }
}

/// Ends the threads on drop, also if an assertion fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Repeatedly creates a pool for this thread's requests. They get memory in it, or are refused because it is
/// paused.
fn come_and_end(capture: u64, met: &Met) {
    OWN.set(capture);
    let pool = Mempool { capture, user: 0 };
    let own = ptr::without_provenance_mut(usize::try_from(capture).unwrap());
    while !met.is_over.load(Ordering::Relaxed) {
        // SAFETY: the filter compares numbers.
        let routed = unsafe { lowtide_begin_allocate_to_pool(0, pool, Some(is_own), own, None) };
        assert_eq!(routed, Status::Ok, "{}", last_error());
        let memory = allocate(3 * MIB, 0);
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        match memory {
            Ok(memory) => {
                assert_eq!(find(memory).unwrap().pool, pool);
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
                met.served.fetch_add(1, Ordering::Relaxed);
            }
            Err(status) => {
                assert_eq!(status, Status::Paused, "{}", last_error());
                met.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
        assert_eq!(lowtide_release_pool(0, pool), Status::Ok);
        assert_eq!(lowtide_empty_cache(0), Status::Ok);
    }
}

unsafe extern "C" fn is_own(own: *mut c_void, _stream: *mut c_void) -> bool {
    OWN.get() == own.addr() as u64
}

/// A pool that began outside of the region stays outside.
#[test]
fn a_begin_that_fails_gives_a_pool_to_no_region() {
    let test = "pools::a_begin_that_fails_gives_a_pool_to_no_region";
    isolated(test, &IN_A_REGION_AS_A_WHOLE, |_| {
        let pool = Mempool {
            capture: 4,
            user: 0,
        };
        let begin = || {
            // SAFETY: there is no filter.
            unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) }
        };
        enter_none();
        assert_eq!(begin(), Status::Ok);
        leave();
        assert_eq!(begin(), Status::Pool, "it is begun");
        let memory = allocate(MIB, 0).unwrap();
        assert_eq!(find(memory).unwrap().pool, pool);
        fill(memory, MIB, 1);
        assert_eq!(pause("default"), Status::Ok, "{}", last_error());
        assert!(!is_away(memory));
        check(memory, MIB, 1);
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        assert_eq!(lowtide_release_pool(0, pool), Status::Ok);
        assert_eq!(
            lowtide_release_pool(0, pool),
            Status::Pool,
            "it is held once"
        );
    });
}

fn enter_none() {
    // SAFETY: null stands for no region.
    let entered = unsafe { lowtide_region_enter(ptr::null(), Backup::None as c_int) };
    assert_eq!(entered, Status::Ok);
}

/// The environment of a program for torch_memory_saver whose region is the whole process.
const IN_A_REGION_AS_A_WHOLE: [(&str, &str); 3] = [
    ("LOWTIDE_COMPAT", "torch_memory_saver"),
    ("TMS_INIT_ENABLE", "1"),
    ("TMS_INIT_ENABLE_CPU_BACKUP", "1"),
];

/// torch_memory_saver intercepts every `cudaMalloc` of such a process, also those of captures and private pools.
#[test]
fn pools_of_a_process_in_a_region_are_in_it() {
    let test = "pools::pools_of_a_process_in_a_region_are_in_it";
    isolated(test, &IN_A_REGION_AS_A_WHOLE, |fake| {
        let [graph, of_user, other, apart, inside, of_other] =
            [(4, 0), (0, 7), (5, 0), (0, 8), (6, 0), (7, 0)]
                .map(|(capture, user)| Mempool { capture, user });
        // The device's first request is one in the pool.
        let kept = [
            (allocate_in_pool(graph, 4 * MIB, 1), 4 * MIB, 1),
            (allocate_in_pool(graph, 30 * MIB, 2), 30 * MIB, 2),
            (allocate_in_pool(of_user, 6 * MIB, 3), 6 * MIB, 3),
            (allocate(MIB, 0).unwrap(), MIB, 4),
            (entered(|| allocate_in_pool(inside, 2 * MIB, 9)), 2 * MIB, 9),
        ];
        fill(kept[3].0, MIB, 4);
        enter("other", Backup::Host);
        let in_other = allocate_in_pool(other, 8 * MIB, 5);
        leave();
        // Like the pool of a graph that belongs to another region.
        let tag = c_text("other");
        // SAFETY: the text ends with a zero byte.
        let added =
            unsafe { lowtide_region_pool(0, of_other, tag.as_ptr(), Backup::Host as c_int) };
        assert_eq!(added, Status::Ok);
        let given_to_other = allocate_in_pool(of_other, 12 * MIB, 10);
        enter_none();
        let in_none = allocate_in_pool(apart, 10 * MIB, 6);
        leave();
        let begun_elsewhere = allocate_in_pool(apart, 50 * MIB, 7);
        let before = fake.used_bytes(0);
        for _ in 0..2 {
            assert_eq!(pause("default"), Status::Ok, "{}", last_error());
            assert!(before - fake.used_bytes(0) >= 43 << 20);
            assert_eq!(region("default", Backup::Host, 0).live_bytes, 43 << 20);
            assert!(kept.iter().all(|&(memory, ..)| is_away(memory)));
            let others = [in_other, given_to_other, in_none, begun_elsewhere];
            assert!(!others.into_iter().any(is_away));
            check(in_other, 8 * MIB, 5);
            check(given_to_other, 12 * MIB, 10);
            check(in_none, 10 * MIB, 6);
            check(begun_elsewhere, 50 * MIB, 7);
            assert_eq!(resume("default"), Status::Ok, "{}", last_error());
            for (memory, size, seed) in kept {
                check(memory, size, seed);
                assert!(!is_away(memory));
            }
        }
        // A graph holds its pool once for each begin.
        for _ in 0..2 {
            assert_eq!(lowtide_release_pool(0, graph), Status::Ok);
        }
        assert_eq!(lowtide_release_pool(0, graph), Status::Pool);
        assert_eq!(lowtide_deallocate(kept[0].0), Status::Ok);
        assert_eq!(lowtide_deallocate(kept[1].0), Status::Ok);
        assert_eq!(lowtide_empty_cache(0), Status::Ok);
        assert_eq!(region("default", Backup::Host, 0).live_bytes, 9 << 20);
        // Another pool with the id of a removed one may join the region. If the region is paused, so is the pool.
        assert_eq!(pause("default"), Status::Ok);
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, graph, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        assert_eq!(allocate(1000, 0), Err(Status::Paused));
        assert_eq!(lowtide_end_allocate_to_pool(0, graph), Status::Ok);
        assert_eq!(resume("default"), Status::Ok);
        allocate_in_pool(graph, 2 * MIB, 8);
        assert_eq!(region("default", Backup::Host, 0).live_bytes, 11 << 20);
    });
}

/// Enters the process's region by name, and returns the result of `act` in it.
fn entered<T>(act: impl FnOnce() -> T) -> T {
    enter("default", Backup::Host);
    let done = act();
    leave();
    done
}
