//! Regions through the exported functions, with real contents on the stand-in driver.
#![expect(unsafe_code, reason = "calls C functions")]
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

#[path = "../common/mod.rs"]
mod common;

mod copies;
mod cycles;
mod dump;
mod failures;
mod meanwhile;
mod notifications;
mod pools;
mod returns;
mod scrubbing;
mod work;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fs;
use std::ptr;
use std::thread;

use common::{allocate, allocate_on, check, fill, find, is_tide, isolated, last_error, stat};
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
    // SAFETY: null means every region.
    unsafe { lowtide_pause(ptr::null()) }
}

fn resume_all() -> Status {
    // SAFETY: null means every region.
    unsafe { lowtide_resume(ptr::null()) }
}

/// Allocates `size` bytes in a region on a device, and fills them with a pattern.
fn allocate_in(tag: &str, backup: Backup, size: usize, device: c_int, seed: usize) -> *mut c_void {
    enter(tag, backup);
    let memory = allocate(size, device).unwrap();
    leave();
    fill(memory, size, seed);
    memory
}

/// Returns the statistics of every region, by tag, backup and device.
fn regions() -> BTreeMap<(String, i32, c_int), Region> {
    unsafe extern "C" fn visit(context: *mut c_void, region: *const Region) {
        // SAFETY: `context` is the value passed below.
        let seen = unsafe { &mut *context.cast::<BTreeMap<(String, i32, c_int), Region>>() };
        // SAFETY: it is valid for the call.
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
        // This also works before the device is used.
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
        // SAFETY: null means no region.
        assert_eq!(unsafe { lowtide_region_enter(ptr::null(), 0) }, Status::Ok);
        assert_eq!(pool_of(allocate(1000, 0).unwrap()), default);
        leave();
        let stream = fake.stream();
        assert_eq!(pool_of(allocate_on(1000, 0, stream).unwrap()), a);
        // The route of a private pool is tried before the region's.
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
        // A thread that has ended has left its regions.
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
    for strategy in ["caching", "bfc", "slab", "buddy", "pool", "direct", "tide"] {
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
            // Other strategies use a segment that contains both blocks.
            if ["caching", "direct"].contains(&&*strategy) {
                assert!(shown.mapped_bytes <= mapped - (96 << 20), "{shown:?}");
            }
            let again = allocate_in("kv", Backup::Host, 40 * MIB, 0, 4);
            check(kept, 5 * MIB, 1);
            check(again, 40 * MIB, 4);
        });
    }
}

/// The driver itself would return an invalid-argument error.
#[test]
fn a_block_that_is_away_is_not_shared() {
    isolated("a_block_that_is_away_is_not_shared", &[], |_| {
        let share = |memory| {
            let (mut bytes, mut length, mut offset) = (ptr::null_mut(), 0, 0);
            // SAFETY: the three may be written to.
            let status =
                unsafe { lowtide_share(memory, &raw mut bytes, &raw mut length, &raw mut offset) };
            assert_eq!(status == Status::Ok, !bytes.is_null());
            // SAFETY: null, or from `lowtide_share` above.
            unsafe { lowtide_release_bytes(bytes) };
            status
        };
        let memory = allocate_in("kv", Backup::Host, 3 * MIB, 0, 1);
        let other = allocate_in("other", Backup::Host, 3 * MIB, 0, 2);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(share(memory), Status::Paused);
        assert_eq!(
            last_error(),
            "region \"kv\" is paused: resume it before sharing its blocks"
        );
        assert_eq!(share(other), Status::Ok, "{}", last_error());
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(share(memory), Status::Ok, "{}", last_error());
        check(memory, 3 * MIB, 1);
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
fn a_forked_child_touches_nothing() {
    isolated("a_forked_child_touches_nothing", &[], |fake| {
        let memory = allocate_in("kv", Backup::Host, 3 * MIB, 0, 1);
        enter("kv", Backup::Host);
        // SAFETY: the child calls only the functions under test, and ends.
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

/// If the device is full, a resume returns an error. It succeeds once there is memory.
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
        // One of the two regions fitted.
        let is_back = |backup| region("kv", backup, 0).state == RegionState::Mapped;
        assert!(is_back(Backup::Host) != is_back(Backup::Disk));
        check(full, 120 * MIB, 3);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(fake.used_bytes(0), used);
        // Cached memory is released automatically.
        assert_eq!(lowtide_deallocate(full), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        for (seed, memory) in [1, 2].into_iter().zip(held) {
            check(memory, 60 * MIB, seed);
        }
        assert_eq!(pause("kv"), Status::Ok);
        // Paused memory does not count against the limit.
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

/// The paused bytes are the bytes that a resume needs, as its error says.
#[test]
fn what_is_freed_while_it_is_away_is_not_to_come_back() {
    let test = "what_is_freed_while_it_is_away_is_not_to_come_back";
    let capacity = ("FAKECUDA_CAPACITY", "209715200");
    isolated(test, &[capacity], |_| {
        let kept = allocate_in("kv", Backup::Host, 60 * MIB, 0, 1);
        let freed = ["kv", "other"].map(|tag| allocate_in(tag, Backup::Host, 60 * MIB, 0, 2));
        let needed = |tag| region(tag, Backup::Host, 0).paused_bytes;
        assert_eq!(needed("kv"), 0);
        assert_eq!(pause_all(), Status::Ok);
        assert_eq!((needed("kv"), needed("other")), (120 << 20, 60 << 20));
        for memory in freed {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        assert_eq!((needed("kv"), needed("other")), (60 << 20, 0));
        let full = allocate(180 * MIB, 0).unwrap();
        assert_eq!(resume("kv"), Status::OutOfMemory);
        assert_eq!(
            last_error(),
            "region \"kv\" on device 0: it takes 60.00 MiB of memory, and the device has 20.00 MiB free; \
             paused there: 60.00 MiB of region \"kv\""
        );
        assert_eq!(needed("kv"), 60 << 20);
        assert_eq!(lowtide_deallocate(full), Status::Ok);
        assert_eq!(resume_all(), Status::Ok, "{}", last_error());
        assert_eq!(region("kv", Backup::Host, 0).mapped_bytes, 60 << 20);
        check(kept, 60 * MIB, 1);
    });
}

/// The environment is read at the first request, after the program's own call.
#[test]
fn a_directory_stays_that_was_set_before_the_environment_was_looked_at() {
    let test = "a_directory_stays_that_was_set_before_the_environment_was_looked_at";
    let variables = [
        ("LOWTIDE_COMPAT", "torch_memory_saver"),
        ("TMS_DISK_BACKUP_DIR", "/proc/theirs"),
    ];
    isolated(test, &variables, |_| {
        let directory = c_text("/proc/ours");
        // SAFETY: the text outlives the call.
        let set = unsafe { lowtide_set_backup_directory(directory.as_ptr()) };
        assert_eq!(set, Status::Ok);
        allocate_in("kv", Backup::Disk, MIB, 0, 1);
        assert_eq!(pause("kv"), Status::Backup);
        assert!(last_error().contains("/proc/ours"), "{}", last_error());
    });
}

/// A relative path means the same directory for every pause, even if the program changes its working directory.
/// It is relative to the working directory at the first entry of a region.
#[test]
fn a_directory_of_the_environment_is_one_wherever_the_program_is() {
    let test = "a_directory_of_the_environment_is_one_wherever_the_program_is";
    isolated(test, &[("LOWTIDE_BACKUP_DIR", "backups")], |_| {
        let begun = std::env::temp_dir().join(format!("lowtide-relative-{}", std::process::id()));
        fs::create_dir_all(begun.join("backups")).unwrap();
        std::env::set_current_dir(&begun).unwrap();
        let held = allocate_in("kv", Backup::Disk, MIB, 0, 1);
        for elsewhere in ["/", "/proc"] {
            std::env::set_current_dir(elsewhere).unwrap();
            assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
            assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
            check(held, MIB, 1);
        }
        fs::remove_dir_all(&begun).unwrap();
        assert_eq!(pause("kv"), Status::Backup);
        let named = format!("{:?}", begun.join("backups"));
        assert!(last_error().contains(&named), "{}", last_error());
    });
}

/// A pause during a capture fails, does nothing, and invalidates the capture. A resume does not.
#[test]
fn a_pause_is_refused_in_a_capture_and_a_resume_is_not() {
    let test = "a_pause_is_refused_in_a_capture_and_a_resume_is_not";
    isolated(test, &[], |fake| {
        let held = allocate_in("kv", Backup::Host, MIB, 0, 1);
        let stream = fake.stream();
        fake.begin_capture(stream);
        assert_eq!(pause("kv"), Status::Driver);
        assert!(last_error().contains("capturing"), "{}", last_error());
        assert!(!fake.ends_capture(stream), "it was spoiled");
        assert_eq!(region("kv", Backup::Host, 0).state, RegionState::Mapped);
        check(held, MIB, 1);
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        fake.begin_capture(stream);
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        assert!(fake.ends_capture(stream));
        check(held, MIB, 1);
    });
}

/// Signals are handled in the program's own threads: lowtide's threads block them.
#[test]
fn no_signal_comes_to_a_thread_beside_the_job() {
    let test = "no_signal_comes_to_a_thread_beside_the_job";
    isolated(test, &[], |_| {
        allocate_in("kv", Backup::Host, MIB, 0, 1);
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        // After this call the thread has its name.
        assert_eq!(lowtide_page_lock_backups(), Status::Ok);
        // A thread whose work is done may still exist for a moment.
        let expected = ["lowtide idle", "lowtide keeper"];
        while our_threads_without_signals() != expected[usize::from(!is_tide())..] {
            thread::yield_now();
        }
    });
}

/// Returns the names of lowtide's running threads, and checks that each blocks the program's signals.
fn our_threads_without_signals() -> Vec<String> {
    let mut names = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else {
            continue; // The thread has ended meanwhile.
        };
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
        let name = field("Name:").unwrap().trim();
        if name.starts_with("lowtide ") {
            let blocked = u64::from_str_radix(field("SigBlk:").unwrap().trim(), 16).unwrap();
            let all = [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGALRM];
            let is_blocked = |signal| blocked >> (signal - 1) & 1 == 1;
            assert!(all.into_iter().all(is_blocked), "{name}: {blocked:#x}");
            names.push(name.to_owned());
        }
    }
    names.sort();
    names
}

/// A thread that ends leaves its regions. A thread-local destructor that runs later gets an error.
#[test]
fn a_thread_that_is_ending_is_in_no_region() {
    struct Leaves(std::sync::mpsc::Sender<[Status; 2]>);
    impl Drop for Leaves {
        fn drop(&mut self) {
            // SAFETY: null means no region.
            let entered = unsafe { lowtide_region_enter(ptr::null(), 0) };
            let _ = self.0.send([lowtide_region_leave(), entered]);
        }
    }
    thread_local! {
        static LEAVES: std::cell::RefCell<Option<Leaves>> = const { std::cell::RefCell::new(None) };
    }
    isolated("a_thread_that_is_ending_is_in_no_region", &[], |_| {
        let (sender, refusals) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            // Created before the thread's list of regions, so that it is dropped after it.
            LEAVES.set(Some(Leaves(sender)));
            enter("kv", Backup::None);
        });
        thread.join().unwrap();
        let refused = Status::InvalidArgument;
        assert_eq!(refusals.recv(), Ok([refused, refused]));
    });
}
