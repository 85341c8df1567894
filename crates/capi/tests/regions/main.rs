//! Regions through the exported functions, with real contents on the stand-in driver.
#![expect(unsafe_code, reason = "calls C functions")]
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

#[path = "../common/mod.rs"]
mod common;

mod dump;
mod failures;
mod meanwhile;
mod told;
mod work;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::Barrier;
use std::thread;

use common::{allocate, allocate_on, check, fill, find, isolated, last_error, stat};
use lowtide::*;

const MIB: usize = 1 << 20;

fn c_text(text: &str) -> CString {
    CString::new(text).unwrap()
}

fn enter(tag: &str, backup: Backup) {
    // SAFETY: the text ends with a zero byte.
    let status = unsafe { lowtide_region_enter(c_text(tag).as_ptr(), backup as c_int) };
    assert_eq!(status, Status::Ok, "{}", last_error());
}

fn leave() {
    assert_eq!(lowtide_region_leave(), Status::Ok);
}

fn pause(tag: &str) -> Status {
    // SAFETY: the text ends with a zero byte.
    unsafe { lowtide_pause(c_text(tag).as_ptr()) }
}

fn resume(tag: &str) -> Status {
    // SAFETY: the text ends with a zero byte.
    unsafe { lowtide_resume(c_text(tag).as_ptr()) }
}

fn trim(tag: &str, backup: Backup, device: c_int) -> Status {
    // SAFETY: the text ends with a zero byte.
    unsafe { lowtide_region_trim(device, c_text(tag).as_ptr(), backup as c_int) }
}

fn pause_all() -> Status {
    // SAFETY: null stands for every region.
    unsafe { lowtide_pause(ptr::null()) }
}

fn resume_all() -> Status {
    // SAFETY: null stands for every region.
    unsafe { lowtide_resume(ptr::null()) }
}

/// Returns `size` bytes of a region on a device, with a pattern in them.
fn allocate_in(tag: &str, backup: Backup, size: usize, device: c_int, seed: usize) -> *mut c_void {
    enter(tag, backup);
    let memory = allocate(size, device).unwrap();
    leave();
    fill(memory, size, seed);
    memory
}

/// Returns the figures of every region, by tag, backup and device.
fn regions() -> BTreeMap<(String, i32, c_int), Region> {
    unsafe extern "C" fn visit(context: *mut c_void, region: *const Region) {
        // SAFETY: it is what is passed below.
        let seen = unsafe { &mut *context.cast::<BTreeMap<(String, i32, c_int), Region>>() };
        // SAFETY: it is shown for the time of the call.
        let region = unsafe { *region };
        // SAFETY: the tag ends with a zero byte.
        let tag = unsafe { CStr::from_ptr(region.tag) }.to_str().unwrap();
        let key = (tag.to_owned(), region.backup as i32, region.device);
        assert!(seen.insert(key, region).is_none(), "each is shown once");
    }
    let mut seen = BTreeMap::new();
    // SAFETY: `visit` takes such a context.
    let status = unsafe { lowtide_visit_regions(Some(visit), (&raw mut seen).cast()) };
    assert_eq!(status, Status::Ok);
    seen
}

fn region(tag: &str, backup: Backup, device: c_int) -> Region {
    regions()[&(tag.to_owned(), backup as i32, device)]
}

fn host_copy(memory: *mut c_void) -> Result<(*mut c_void, usize), Status> {
    let (mut copy, mut size) = (ptr::null(), 0);
    // SAFETY: both may be written to.
    match unsafe { lowtide_backup_find(memory, &raw mut copy, &raw mut size) } {
        Status::Ok => Ok((copy.cast_mut(), size)),
        status => Err(status),
    }
}

#[test]
fn contents_come_back_to_their_addresses() {
    let test = "contents_come_back_to_their_addresses";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        let before: Vec<u64> = (0..2)
            .map(|device| {
                let outside = allocate(MIB, device).unwrap();
                fill(outside, MIB, 99);
                fake.used_bytes(device)
            })
            .collect();
        let mut held = Vec::new();
        for device in 0..2 {
            for (seed, backup) in [(1, Backup::Host), (2, Backup::Disk), (3, Backup::None)] {
                for size in [1000, 3 * MIB, 40 * MIB] {
                    let memory = allocate_in("weights", backup, size, device, seed);
                    held.push((memory, size, seed));
                }
            }
        }
        for round in 0..3 {
            assert_eq!(pause("weights"), Status::Ok, "{}", last_error());
            assert_eq!(pause("weights"), Status::Ok, "it is paused");
            for device in 0..2 {
                assert_eq!(fake.used_bytes(device), before[device as usize], "{round}");
            }
            let shown = region("weights", Backup::Host, 1);
            assert_eq!(shown.state, RegionState::Paused);
            assert_eq!(shown.mapped_bytes, 0);
            assert!(shown.paused_bytes >= 43 << 20 && shown.host_bytes >= 43 << 20);
            assert_eq!((shown.pauses, shown.resumes), (round + 1, round));
            assert!(region("weights", Backup::Disk, 1).disk_bytes >= 43 << 20);
            assert_eq!(resume("weights"), Status::Ok, "{}", last_error());
            assert_eq!(resume("weights"), Status::Ok, "it is mapped");
            for &(memory, size, seed) in held.iter().filter(|&&(_, _, seed)| seed != 3) {
                check(memory, size, seed);
            }
        }
        let shown = region("weights", Backup::Host, 0);
        assert_eq!((shown.pauses, shown.resumes), (3, 3));
        assert_eq!(shown.saved_bytes, 3 * shown.last_saved_bytes);
        assert_eq!(shown.restored_bytes, shown.saved_bytes);
        assert_eq!((shown.paused_bytes, shown.host_bytes), (0, 0));
        for (memory, ..) in held {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(lowtide_reset(), Status::Ok);
        for device in 0..2 {
            assert_eq!(fake.used_bytes(device), before[device as usize]);
        }
    });
}

#[test]
fn only_this_threads_requests_are_in_the_innermost_region() {
    let test = "only_this_threads_requests_are_in_the_innermost_region";
    isolated(test, &[], |fake| {
        // Before the device is used, too.
        enter("a", Backup::None);
        let pool_of = |memory| find(memory).unwrap().pool;
        let a = pool_of(allocate(1000, 0).unwrap());
        let elsewhere = thread::spawn(|| find(allocate(1000, 0).unwrap()).unwrap().pool);
        let default = elsewhere.join().unwrap();
        assert_eq!((default.capture, default.user), (0, 0));
        enter("b", Backup::Host);
        let b = pool_of(allocate(1000, 0).unwrap());
        enter("b", Backup::Disk);
        let c = pool_of(allocate(1000, 0).unwrap());
        assert!(a != b && b != c && a != c && a != default);
        enter("a", Backup::None);
        assert_eq!(pool_of(allocate(1000, 0).unwrap()), a);
        // SAFETY: null stands for no region.
        assert_eq!(unsafe { lowtide_region_enter(ptr::null(), 0) }, Status::Ok);
        assert_eq!(pool_of(allocate(1000, 0).unwrap()), default);
        leave();
        let stream = fake.stream();
        assert_eq!(pool_of(allocate_on(1000, 0, stream).unwrap()), a);
        // A memory pool decides before a region does.
        let pool = Mempool {
            capture: 0,
            user: 9,
        };
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        assert_eq!(pool_of(allocate(1000, 0).unwrap()), pool);
        thread::spawn(|| {
            enter("d", Backup::None);
            leave();
        });
        assert_eq!(pool_of(allocate(1000, 0).unwrap()), pool);
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        for expected in [a, c, b, a] {
            assert_eq!(pool_of(allocate(1000, 0).unwrap()), expected);
            leave();
        }
        assert_eq!(pool_of(allocate(1000, 0).unwrap()), default);
        assert_eq!(lowtide_region_leave(), Status::InvalidArgument);
        assert_eq!(last_error(), "this thread is in no region");
        // A thread that ends has left.
        thread::spawn(|| enter("a", Backup::None)).join().unwrap();
        let (tag, unknown) = (c_text("a"), 3);
        // SAFETY: the text ends with a zero byte.
        let refused = unsafe { lowtide_region_enter(tag.as_ptr(), unknown) };
        assert_eq!(refused, Status::InvalidArgument);
    });
}

#[test]
fn a_paused_region_hands_nothing_out_and_takes_blocks_back() {
    let test = "a_paused_region_hands_nothing_out_and_takes_blocks_back";
    for strategy in ["caching", "bfc", "slab", "buddy", "pool", "direct"] {
        isolated(test, &[("LOWTIDE_STRATEGY", strategy)], |fake| {
            let strategy = std::env::var("LOWTIDE_STRATEGY").unwrap();
            let kept = allocate_in("kv", Backup::Host, 5 * MIB, 0, 1);
            let freed = allocate_in("kv", Backup::Host, 96 * MIB, 0, 2);
            let other = allocate_in("other", Backup::Host, 5 * MIB, 0, 3);
            let mapped = region("kv", Backup::Host, 0).mapped_bytes;
            assert_eq!(pause("kv"), Status::Ok);
            enter("kv", Backup::Host);
            assert_eq!(allocate(1000, 0), Err(Status::Paused));
            assert_eq!(
                last_error(),
                "region \"kv\" is paused: resume it before allocating in it"
            );
            leave();
            assert!(allocate(1000, 0).is_ok(), "elsewhere all goes on");
            check(other, 5 * MIB, 3);
            assert_eq!(lowtide_deallocate(freed), Status::Ok);
            assert_eq!(lowtide_deallocate(freed), Status::NotAllocated);
            assert_eq!(host_copy(freed), Err(Status::NotAllocated));
            let (copy, size) = host_copy(kept).unwrap();
            assert_eq!(size, 5 * MIB);
            check(copy, size, 1);
            let used = fake.used_bytes(0);
            assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
            check(kept, 5 * MIB, 1);
            assert_eq!(host_copy(kept), Err(Status::InvalidArgument));
            let shown = region("kv", Backup::Host, 0);
            assert_eq!(fake.used_bytes(0) - used, shown.mapped_bytes);
            // The others take segments that both blocks lie in.
            if ["caching", "direct"].contains(&&*strategy) {
                assert!(shown.mapped_bytes <= mapped - (96 << 20), "{shown:?}");
            }
            let again = allocate_in("kv", Backup::Host, 40 * MIB, 0, 4);
            check(kept, 5 * MIB, 1);
            check(again, 40 * MIB, 4);
        });
    }
}

#[test]
fn a_retained_copy_stays_until_the_next_pause() {
    isolated("a_retained_copy_stays_until_the_next_pause", &[], |_| {
        let kept = allocate_in("kv", Backup::Host, 5 * MIB, 0, 1);
        let other = allocate_in("other", Backup::Host, 5 * MIB, 0, 2);
        let in_file = allocate_in("kv", Backup::Disk, MIB, 0, 3);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause_all(), Status::Ok);
        let (copy, size) = host_copy(kept).unwrap();
        assert_eq!(resume_all(), Status::Ok);
        // What the program writes later is not in it.
        fill(kept, 5 * MIB, 4);
        assert_eq!(host_copy(kept), Ok((copy, size)));
        check(copy, size, 1);
        assert_eq!(host_copy(in_file), Err(Status::InvalidArgument));
        assert!(region("kv", Backup::Host, 0).host_bytes >= 5 << 20);
        let late = allocate_in("kv", Backup::Host, 5 * MIB, 0, 5);
        assert_eq!(host_copy(late), Err(Status::InvalidArgument));
        assert_eq!(lowtide_deallocate(late), Status::Ok);

        // It is asked at a resume whether a copy is retained; the next pause has its memory.
        assert_eq!(lowtide_retain_backups(false), Status::Ok);
        assert_eq!(host_copy(kept), Ok((copy, size)));
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(host_copy(kept), Ok((copy, size)));
        check(copy, size, 4);
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(host_copy(kept), Err(Status::InvalidArgument));
        assert!(host_copy(other).is_ok(), "it was not paused since");

        // A copy goes with the region's last segment, or when it is released.
        assert_eq!(lowtide_deallocate(other), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(region("other", Backup::Host, 0).host_bytes, 0);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(lowtide_release_backups(), Status::Ok);
        assert!(host_copy(kept).is_ok(), "it is paused");
        assert_eq!(resume("kv"), Status::Ok);
        assert!(host_copy(kept).is_ok());
        assert_eq!(lowtide_release_backups(), Status::Ok);
        assert_eq!(host_copy(kept), Err(Status::InvalidArgument));
        assert_eq!(region("kv", Backup::Host, 0).host_bytes, 0);
        check(kept, 5 * MIB, 4);
    });
}

/// What a block holds that was handed out since the pause was never kept, though one like it lay there.
#[test]
fn a_copy_is_of_its_block_alone() {
    isolated("a_copy_is_of_its_block_alone", &[], |_| {
        let first = allocate_in("kv", Backup::Host, 5 * MIB, 0, 1);
        let other = allocate_in("kv", Backup::Host, 5 * MIB, 0, 2);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        let kept = host_copy(other);
        assert!(kept.is_ok() && host_copy(first).is_ok());
        assert_eq!(lowtide_deallocate(first), Status::Ok);
        let second = allocate_in("kv", Backup::Host, 5 * MIB, 0, 3);
        assert_eq!(second, first, "the address is used again");
        assert_eq!(host_copy(second), Err(Status::InvalidArgument));
        assert_eq!(tms_get_cpu_backup_pointer(second.cast(), 1), ptr::null());
        assert_eq!(host_copy(other), kept);
        // From the next pause on there is one.
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        let (copy, size) = host_copy(second).unwrap();
        check(copy, size, 3);
    });
}

/// What was kept is older than what the program dropped.
#[test]
fn a_region_that_is_dropped_has_no_copy_left() {
    isolated("a_region_that_is_dropped_has_no_copy_left", &[], |_| {
        let kept = allocate_in("kv", Backup::Host, MIB, 0, 1);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        assert!(host_copy(kept).is_ok());
        // SAFETY: null stands for every region.
        assert_eq!(unsafe { lowtide_pause_and_drop(ptr::null()) }, Status::Ok);
        assert_eq!(host_copy(kept), Err(Status::InvalidArgument));
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(region("kv", Backup::Host, 0).last_restored_bytes, 0);
    });
}

/// With its last block go its copy, retained or not, its memory and its addresses.
#[test]
fn a_region_that_nothing_uses_ends() {
    isolated("a_region_that_nothing_uses_ends", &[], |fake| {
        let outside = allocate(MIB, 0).unwrap();
        let used = fake.used_bytes(0);
        assert_eq!(trim("kv", Backup::Host, 0), Status::Ok, "there is none");
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        for is_paused in [false, true] {
            let [kept, freed] = [1, 2].map(|seed| allocate_in("kv", Backup::Host, MIB, 0, seed));
            let dropped = allocate_in("kv", Backup::None, MIB, 0, 3);
            assert_eq!(pause("kv"), Status::Ok);
            assert_eq!(lowtide_page_lock_backups(), Status::Ok);
            let (copy, size) = host_copy(kept).unwrap();
            if !is_paused {
                assert_eq!(resume("kv"), Status::Ok);
            }
            // What is used stays as it is.
            assert_eq!(lowtide_deallocate(freed), Status::Ok);
            assert_eq!(trim("kv", Backup::Host, 0), Status::Ok);
            assert_eq!(host_copy(kept), Ok((copy, size)));
            check(copy, size, 1);
            let away = [RegionState::Mapped, RegionState::Paused][usize::from(is_paused)];
            assert_eq!(region("kv", Backup::Host, 0).state, away);

            assert_eq!(lowtide_deallocate(kept), Status::Ok);
            assert_eq!(trim("kv", Backup::Host, 1), Status::Ok, "there is none");
            assert_eq!(trim("kv", Backup::Host, 0), Status::Ok, "{}", last_error());
            let shown = region("kv", Backup::Host, 0);
            assert_eq!(shown.state, RegionState::Mapped);
            assert_eq!((shown.mapped_bytes, shown.host_bytes), (0, 0));
            assert_eq!(region("kv", Backup::None, 0).state, away);

            assert_eq!(resume("kv"), Status::Ok);
            assert_eq!(lowtide_deallocate(dropped), Status::Ok);
            assert_eq!(trim("kv", Backup::None, 0), Status::Ok);
            assert_eq!(fake.used_bytes(0), used);
            assert_eq!(lowtide_release_idle_backups(), Status::Ok);
            let live = fake.live();
            assert_eq!((live.handles, live.host_allocations), (0, 0), "{live:?}");
        }
        // It is as one that was never paused.
        let again = allocate_in("kv", Backup::Host, MIB, 0, 4);
        check(again, MIB, 4);
        // SAFETY: null is no tag, and is refused.
        let refused = unsafe { lowtide_region_trim(0, ptr::null(), 0) };
        assert_eq!(refused, Status::InvalidArgument);
        assert_eq!(lowtide_deallocate(outside), Status::Ok);
    });
}

/// A graph may use what is free in its pool.
#[test]
fn a_region_with_a_graphs_pool_does_not_end() {
    isolated("a_region_with_a_graphs_pool_does_not_end", &[], |_| {
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
fn a_tag_that_was_never_entered_is_refused() {
    isolated("a_tag_that_was_never_entered_is_refused", &[], |_| {
        assert_eq!(pause_all(), Status::Ok);
        assert_eq!(pause("kv"), Status::InvalidArgument);
        assert_eq!(last_error(), "there is no region \"kv\": there are none");
        enter("weights", Backup::None);
        enter("weights", Backup::Host);
        enter("cache", Backup::Host);
        assert_eq!(resume("kv"), Status::InvalidArgument);
        assert_eq!(
            last_error(),
            "there is no region \"kv\": there are \"cache\", \"weights\""
        );
        assert_eq!(pause("cache"), Status::Ok, "it has no memory");
        assert!(regions().is_empty(), "no device is in use");
    });
}

#[test]
fn a_graphs_pool_is_paused_with_its_region() {
    isolated("a_graphs_pool_is_paused_with_its_region", &[], |fake| {
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
            assert_eq!(resume("graph"), Status::Ok);
            check(static_input, 4 * MIB, 1);
            // A replay writes there, though the program holds nothing.
            fill(between, 64 * MIB, round);
            check(between, 64 * MIB, round);
        }
        // One that comes while the region is paused is paused, too.
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
        // A graph that ends while its memory is away takes nothing with it.
        assert_eq!(lowtide_deallocate(static_input), Status::Ok);
        for _ in 0..2 {
            assert_eq!(lowtide_release_pool(0, pool), Status::Ok);
        }
        assert_eq!(resume("graph"), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(fake.used_bytes(0), start);
    });
}

#[test]
fn two_threads_pause_and_resume_at_once() {
    let test = "two_threads_pause_and_resume_at_once";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |_| {
        let held: Vec<_> = (0..8)
            .map(|seed| {
                let backup = [Backup::Host, Backup::Disk][seed % 2];
                allocate_in("kv", backup, 3 * MIB, c_int::from(seed >= 4), seed)
            })
            .collect();
        for _ in 0..20 {
            for change in [pause as fn(&str) -> Status, resume] {
                let start = Barrier::new(4);
                thread::scope(|scope| {
                    for number in 0..4 {
                        let start = &start;
                        scope.spawn(move || {
                            start.wait();
                            if number == 0 {
                                // Others' requests go on.
                                let memory = allocate(5 * MIB, 0).unwrap();
                                assert_eq!(lowtide_deallocate(memory), Status::Ok);
                            } else {
                                assert_eq!(change("kv"), Status::Ok, "{}", last_error());
                            }
                        });
                    }
                });
            }
            for (seed, &memory) in held.iter().enumerate() {
                check(memory, 3 * MIB, seed);
            }
        }
        assert_eq!(region("kv", Backup::Host, 1).pauses, 20);
        // Each pauses while the other resumes: one of the two states comes out, and nothing is lost.
        thread::scope(|scope| {
            for change in [pause as fn(&str) -> Status, resume] {
                scope.spawn(move || {
                    for _ in 0..50 {
                        assert_eq!(change("kv"), Status::Ok, "{}", last_error());
                    }
                });
            }
        });
        assert_eq!(resume("kv"), Status::Ok);
        for (seed, &memory) in held.iter().enumerate() {
            check(memory, 3 * MIB, seed);
        }
    });
}

#[test]
fn a_forked_child_touches_nothing() {
    isolated("a_forked_child_touches_nothing", &[], |fake| {
        let memory = allocate_in("kv", Backup::Host, 3 * MIB, 0, 1);
        enter("kv", Backup::Host);
        // SAFETY: the child calls nothing but what is under test, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let answers = [pause_all(), resume_all(), lowtide_region_leave()];
            let all_refused = answers.iter().all(|&status| status == Status::Forked);
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!all_refused)) };
        }
        let mut status = 0;
        // SAFETY: `status` may be written to.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        let used = fake.used_bytes(0);
        leave();
        assert_eq!(pause("kv"), Status::Ok);
        assert!(fake.used_bytes(0) < used);
        assert_eq!(resume("kv"), Status::Ok);
        check(memory, 3 * MIB, 1);
    });
}

/// A device that is full when a region is to come back: an error, and it works when there is room.
#[test]
fn a_region_that_finds_no_memory_stays_paused() {
    let test = "a_region_that_finds_no_memory_stays_paused";
    let capacity = ("FAKECUDA_CAPACITY", "209715200");
    isolated(test, &[capacity], |fake| {
        let held = [
            allocate_in("kv", Backup::Host, 60 * MIB, 0, 1),
            allocate_in("kv", Backup::Disk, 60 * MIB, 0, 2),
        ];
        assert_eq!(pause("kv"), Status::Ok);
        let full = allocate(120 * MIB, 0).unwrap();
        fill(full, 120 * MIB, 3);
        let used = fake.used_bytes(0);
        assert_eq!(resume("kv"), Status::OutOfMemory);
        assert_eq!(
            last_error(),
            "region \"kv\" on device 0: it takes 60.00 MiB of memory, and the device has 20.00 MiB free; \
             paused there: 60.00 MiB of region \"kv\""
        );
        // One of the two found room.
        let is_back = |backup| region("kv", backup, 0).state == RegionState::Mapped;
        assert!(is_back(Backup::Host) != is_back(Backup::Disk));
        check(full, 120 * MIB, 3);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(fake.used_bytes(0), used);
        // What is free goes back by itself.
        assert_eq!(lowtide_deallocate(full), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        for (seed, memory) in [1, 2].into_iter().zip(held) {
            check(memory, 60 * MIB, seed);
        }
        assert_eq!(pause("kv"), Status::Ok);
        // What is away does not count against the limit.
        assert_eq!(lowtide_set_memory_fraction(0.7, 0), Status::Ok);
        let full = allocate(120 * MIB, 0).unwrap();
        assert_eq!(allocate(60 * MIB, 0), Err(Status::OutOfMemory));
        let named = "Paused, and not on the device: 120.00 MiB of region \"kv\".";
        assert!(last_error().contains(named), "{}", last_error());
        assert_eq!(lowtide_deallocate(full), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(allocate(60 * MIB, 0), Err(Status::OutOfMemory));
        assert!(stat(0, "reserved_bytes.all.current") >= 120 << 20);
    });
}

/// What a region holds free goes back as other free memory does.
#[test]
fn free_memory_of_a_region_goes_back() {
    isolated("free_memory_of_a_region_goes_back", &[], |fake| {
        let outside = allocate(MIB, 0).unwrap();
        let used = fake.used_bytes(0);
        for _ in 0..3 {
            let held: Vec<_> = (0..20)
                .map(|seed| allocate_in("kv", Backup::None, 30 * MIB, 0, seed))
                .collect();
            for &memory in &held {
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
            }
            assert!(fake.used_bytes(0) > used, "it is cached");
            assert_eq!(lowtide_reset(), Status::Ok);
            assert_eq!(fake.used_bytes(0), used);
        }
        let live = fake.live();
        assert_eq!((live.reservations, live.handles, live.mappings), (0, 0, 0));
        assert_eq!(lowtide_deallocate(outside), Status::Ok);
    });
}

/// A thousand cycles at random: two tags, three kinds, two devices, three threads.
#[test]
fn contents_survive_a_thousand_random_cycles() {
    let test = "contents_survive_a_thousand_random_cycles";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        for device in 0..2 {
            let memory = allocate(1000, device).unwrap();
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(lowtide_reset(), Status::Ok);
        let before = [fake.used_bytes(0), fake.used_bytes(1)];
        let start = Barrier::new(3);
        thread::scope(|scope| {
            for number in 0..3 {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    cycles(number, 340);
                });
            }
        });
        assert_eq!(pause_all(), Status::Ok);
        assert_eq!([fake.used_bytes(0), fake.used_bytes(1)], before);
        assert_eq!(resume_all(), Status::Ok);
        let shown = regions();
        let pauses: u64 = shown.values().map(|region| region.pauses).sum();
        assert!(pauses >= 1000, "{pauses}");
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!([fake.used_bytes(0), fake.used_bytes(1)], before);
    });
}

/// One thread's cycles, over regions of its own.
fn cycles(number: usize, count: usize) {
    let mut state = number as u64 + 1;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) as usize % below
    };
    const KINDS: [Backup; 3] = [Backup::Host, Backup::Disk, Backup::None];
    let tags = [format!("weights {number}"), format!("cache {number}")];
    for tag in &tags {
        enter(tag, Backup::None);
        leave();
    }
    let mut held: Vec<(*mut c_void, usize, usize, usize, bool)> = Vec::new();
    for round in 0..count {
        let tag = random(2);
        for _ in 0..random(3) {
            let (kind, size) = (KINDS[random(3)], 1 + random(3 * MIB));
            let tag = random(2);
            let device = c_int::from(random(2) == 1);
            let memory = allocate_in(&tags[tag], kind, size, device, round);
            held.push((memory, size, round, tag, kind != Backup::None));
        }
        assert_eq!(pause(&tags[tag]), Status::Ok, "{}", last_error());
        while held.len() > 20 || (!held.is_empty() && random(3) == 0) {
            let (memory, ..) = held.swap_remove(random(held.len()));
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!(resume(&tags[tag]), Status::Ok, "{}", last_error());
        for (memory, size, seed, in_tag, is_kept) in &mut held {
            if !*is_kept && *in_tag == tag {
                fill(*memory, *size, *seed);
            }
            check(*memory, *size, *seed);
        }
    }
    for (memory, ..) in held {
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
    }
}

#[test]
fn a_hundred_cycles_hold_no_more_than_one() {
    isolated("a_hundred_cycles_hold_no_more_than_one", &[], |fake| {
        let held: Vec<_> = (0..4)
            .map(|seed| allocate_in("kv", Backup::Host, 3 * MIB, 0, seed))
            .collect();
        let mut seen = Vec::new();
        for _ in 0..100 {
            assert_eq!(pause("kv"), Status::Ok);
            let away = (fake.used_bytes(0), fake.live().reservations);
            assert_eq!(resume("kv"), Status::Ok);
            let live = fake.live();
            seen.push((
                away,
                fake.used_bytes(0),
                live.handles,
                live.mappings,
                live.reservations,
                live.streams,
                live.events,
            ));
        }
        seen.dedup();
        assert!(seen.len() <= 2, "after the first all are alike: {seen:?}");
        for (seed, &memory) in held.iter().enumerate() {
            check(memory, 3 * MIB, seed);
        }
    });
}

/// A stream may end when the memory is free that was used on it, be that alone in a piece or not.
#[test]
fn memory_goes_back_whose_stream_has_ended() {
    isolated("memory_goes_back_whose_stream_has_ended", &[], |fake| {
        let kept = allocate_in("kv", Backup::None, 256 * MIB, 0, 1);
        let used = fake.used_bytes(0);
        for resets_before in [false, true] {
            let stream = fake.stream();
            enter("kv", Backup::None);
            let memory = allocate_on(12 * MIB, 0, stream);
            assert!(memory.is_ok(), "{}", last_error());
            let beside = allocate(12 * MIB, 0).unwrap();
            leave();
            assert_eq!(lowtide_deallocate(memory.unwrap()), Status::Ok);
            if resets_before {
                assert_eq!(lowtide_reset(), Status::Ok);
            }
            fake.destroy_stream(stream);
            assert_eq!(lowtide_deallocate(beside), Status::Ok);
            assert_eq!(lowtide_reset(), Status::Ok);
            assert_eq!(fake.used_bytes(0), used, "{resets_before}");
        }
        check(kept, 256 * MIB, 1);
    });
}

/// The numbers of threads' own default streams are no handles: a driver that is given one may crash.
#[test]
fn the_driver_is_asked_for_no_stream_of_a_thread() {
    let test = "the_driver_is_asked_for_no_stream_of_a_thread";
    isolated(test, &[], |fake| {
        let _outside = allocate(MIB, 0).unwrap();
        let used = fake.used_bytes(0);
        let names = ["cuStreamSynchronize", "cuCtxSynchronize"];
        let of_thread = ptr::without_provenance_mut(3);
        for (stream, expected) in [(fake.stream(), [1, 0]), (of_thread, [0, 1])] {
            enter("kv", Backup::None);
            let memory = allocate_on(12 * MIB, 0, stream);
            leave();
            assert!(memory.is_ok(), "{}", last_error());
            assert_eq!(lowtide_deallocate(memory.unwrap()), Status::Ok);
            let before = names.map(|name| fake.calls(name));
            assert_eq!(lowtide_reset(), Status::Ok);
            let after = names.map(|name| fake.calls(name));
            let calls = [after[0] - before[0], after[1] - before[1]];
            assert_eq!((calls, fake.used_bytes(0)), (expected, used));
        }
    });
}

/// The number of a pool that has ended may be another's, which no region pauses.
#[test]
fn a_pool_that_has_ended_is_in_no_region() {
    isolated("a_pool_that_has_ended_is_in_no_region", &[], |_| {
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

/// A thread that ends has left its regions, which what ends later in it is told.
#[test]
fn a_thread_that_is_ending_is_in_no_region() {
    struct Leaves(std::sync::mpsc::Sender<[Status; 2]>);
    impl Drop for Leaves {
        fn drop(&mut self) {
            // SAFETY: null stands for no region.
            let entered = unsafe { lowtide_region_enter(ptr::null(), 0) };
            let _ = self.0.send([lowtide_region_leave(), entered]);
        }
    }
    thread_local! {
        static LEAVES: std::cell::RefCell<Option<Leaves>> = const { std::cell::RefCell::new(None) };
    }
    isolated("a_thread_that_is_ending_is_in_no_region", &[], |_| {
        let (tell, told) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            // Before the thread's list of regions, so that it ends after it.
            LEAVES.set(Some(Leaves(tell)));
            enter("kv", Backup::None);
        });
        thread.join().unwrap();
        let refused = Status::InvalidArgument;
        assert_eq!(told.recv(), Ok([refused, refused]));
    });
}
