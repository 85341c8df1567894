//! Private pools through the exported functions: lifetime, sources, checkpoints. Also settings at run time.
#![expect(unsafe_code, reason = "calls C functions")]
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

mod common;

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Fake, TIDE, allocate, check, fill, find, isolated, last_error, stat};
use lowtide::*;

const POOL: Mempool = Mempool {
    capture: 0,
    user: 3,
};
const EXPANDABLE: (&str, &str) = ("LOWTIDE_CONF", "expandable_segments:True");

fn use_count(pool: Mempool) -> c_int {
    let mut count = -1;
    // SAFETY: `count` may be written to.
    let status = unsafe { lowtide_pool_use_count(0, pool, &raw mut count) };
    assert_eq!(status, Status::Ok);
    count
}

fn route(pool: Mempool) {
    // SAFETY: there is no filter.
    let status = unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
    assert_eq!(status, Status::Ok);
}

fn allocate_in(pool: Mempool, sizes: &[usize]) -> Vec<*mut c_void> {
    route(pool);
    let blocks = sizes
        .iter()
        .map(|&size| allocate(size, 0).unwrap())
        .collect();
    assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
    assert_eq!(lowtide_release_pool(0, pool), Status::Ok);
    blocks
}

#[test]
fn a_pool_lives_as_long_as_it_is_held() {
    isolated("a_pool_lives_as_long_as_it_is_held", &[], |fake| {
        assert_eq!(use_count(POOL), 0);
        for (nth, count) in [1, 2].into_iter().enumerate() {
            assert_eq!(lowtide_retain_pool(0, POOL), Status::Ok, "{nth}");
            assert_eq!(use_count(POOL), count);
        }
        let blocks = allocate_in(POOL, &[3 << 20]);
        assert_eq!(use_count(POOL), 2);
        assert_eq!(find(blocks[0]).unwrap().pool, POOL);
        assert_eq!(lowtide_set_no_split(0, POOL), Status::Ok);
        assert_eq!(lowtide_set_use_on_oom(0, POOL, true), Status::Ok);
        let used = fake.used_bytes(0);
        assert!(used >= 3 << 20);
        assert_eq!(lowtide_deallocate(blocks[0]), Status::Ok);
        assert_eq!(lowtide_release_pool(0, POOL), Status::Ok);
        assert_eq!(lowtide_empty_pool(0, POOL), Status::Ok);
        assert_eq!(fake.used_bytes(0), used, "it is held once more");
        assert_eq!(lowtide_release_pool(0, POOL), Status::Ok);
        assert_eq!(lowtide_empty_pool(0, POOL), Status::Ok);
        assert_eq!((fake.used_bytes(0), use_count(POOL)), (0, 0));
        assert_eq!(lowtide_empty_pool(0, POOL), Status::Pool);
        assert_eq!(lowtide_set_no_split(0, POOL), Status::Pool);
        assert_eq!(lowtide_set_use_on_oom(0, POOL, true), Status::Pool);
    });
}

/// The error for an existing pool does not say that the pool does not exist.
#[test]
fn what_is_wrong_with_a_pool_is_said_of_it() {
    isolated("what_is_wrong_with_a_pool_is_said_of_it", &[], |_| {
        assert_eq!(lowtide_end_allocate_to_pool(0, POOL), Status::Pool);
        assert_eq!(last_error(), "there is no memory pool (0, 3)");
        let block = allocate_in(POOL, &[3 << 20])[0];
        assert_eq!(lowtide_end_allocate_to_pool(0, POOL), Status::Pool);
        let unrouted = "no requests are being routed to memory pool (0, 3)";
        assert_eq!(last_error(), unrouted);
        assert_eq!(use_count(POOL), 0);
        assert_eq!(lowtide_release_pool(0, POOL), Status::Pool);
        assert_eq!(last_error(), "nothing holds memory pool (0, 3)");
        assert_eq!(find(block).unwrap().pool, POOL);
    });
}

/// A context takes hundreds of MiB, so a device is not initialized needlessly.
#[test]
fn a_device_is_not_started_for_a_pool_that_it_cannot_have() {
    let test = "a_device_is_not_started_for_a_pool_that_it_cannot_have";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        let _elsewhere = allocate(1000, 1).unwrap();
        let started = fake.calls("cuDevicePrimaryCtxRetain");
        assert_eq!(use_count(POOL), 0);
        let seen: &'static Seen = Box::leak(Box::default());
        let (mut is_equal, mut checkpoint) = (true, ptr::null_mut());
        let answers = [
            lowtide_end_allocate_to_pool(0, POOL),
            lowtide_release_pool(0, POOL),
            lowtide_set_use_on_oom(0, POOL, true),
            lowtide_set_no_split(0, POOL),
            lowtide_empty_pool(0, POOL),
            set_source(POOL, seen),
            // SAFETY: no block is expected, and `is_equal` may be written to.
            unsafe { lowtide_check_live(0, POOL, ptr::null(), 0, &raw mut is_equal) },
            // SAFETY: `checkpoint` may be written to.
            unsafe { lowtide_checkpoint_pool(0, POOL, &raw mut checkpoint) },
        ];
        assert_eq!(answers, [Status::Pool; 8]);
        assert_eq!(last_error(), "there is no memory pool (0, 3)");
        assert_eq!(seen.ended.load(Ordering::Relaxed), 1);
        assert_eq!(lowtide_capture_end(0), Status::Ok);
        assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), started);
        assert_eq!(lowtide_release_pool(2, POOL), Status::InvalidArgument);
        assert_eq!(lowtide_capture_end(2), Status::InvalidArgument);
    });
}

#[test]
fn a_pool_serves_others_where_it_may() {
    let capacity = ("FAKECUDA_CAPACITY", "41943040");
    isolated("a_pool_serves_others_where_it_may", &[capacity], |_| {
        let private = allocate_in(POOL, &[30 << 20])[0];
        assert_eq!(lowtide_retain_pool(0, POOL), Status::Ok);
        assert_eq!(lowtide_deallocate(private), Status::Ok);
        assert_eq!(allocate(25 << 20, 0), Err(Status::OutOfMemory));
        assert_eq!(lowtide_set_use_on_oom(0, POOL, true), Status::Ok);
        assert_eq!(allocate(25 << 20, 0), Ok(private));
    });
}

/// The calls of a source of segments.
#[derive(Default)]
struct Seen {
    held: Mutex<Vec<(usize, usize)>>,
    ended: AtomicUsize,
}

unsafe extern "C" fn give(
    context: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: `context` is the test's own value.
    let seen = unsafe { &*context.cast::<Seen>() };
    assert!(device == 0 && stream.is_null());
    if size > 64 << 20 {
        return ptr::null_mut();
    }
    // SAFETY: any size may be requested.
    let memory = unsafe { libc::malloc(size) };
    seen.held.lock().unwrap().push((memory.addr(), size));
    memory
}

unsafe extern "C" fn take(context: *mut c_void, memory: *mut c_void, size: usize, device: c_int) {
    // SAFETY: `context` is the test's own value.
    let seen = unsafe { &*context.cast::<Seen>() };
    assert_eq!(device, 0);
    let mut held = seen.held.lock().unwrap();
    let known = held
        .iter()
        .position(|&known| known == (memory.addr(), size));
    held.remove(known.expect("it was given so"));
    // SAFETY: it came from `malloc` above, and is freed once.
    unsafe { libc::free(memory) };
}

unsafe extern "C" fn end(context: *mut c_void) {
    // SAFETY: `context` is the test's own value.
    let seen = unsafe { &*context.cast::<Seen>() };
    assert!(seen.held.lock().unwrap().is_empty(), "it ends last");
    seen.ended.fetch_add(1, Ordering::Relaxed);
}

fn set_source(pool: Mempool, seen: &'static Seen) -> Status {
    let context = ptr::from_ref(seen).cast_mut().cast();
    // SAFETY: the three functions expect this context, which is never freed.
    unsafe { lowtide_set_pool_source(0, pool, Some(give), Some(take), context, Some(end)) }
}

fn uses_a_source(fake: &Fake) {
    let seen: &'static Seen = Box::leak(Box::default());
    assert_eq!(
        set_source(POOL, seen),
        Status::Pool,
        "there is no such pool"
    );
    assert_eq!(
        seen.ended.load(Ordering::Relaxed),
        1,
        "a failure ends it too"
    );
    assert_eq!(lowtide_retain_pool(0, POOL), Status::Ok);
    assert_eq!(set_source(POOL, seen), Status::Ok);
    let other: &'static Seen = Box::leak(Box::default());
    assert_eq!(set_source(POOL, other), Status::Pool);
    assert_eq!(
        last_error(),
        "memory pool (0, 3) has segments already, or others have said where they come from"
    );
    assert_eq!(other.ended.load(Ordering::Relaxed), 1);
    // SAFETY: null is refused.
    let refused = unsafe { lowtide_set_pool_source(0, POOL, None, None, ptr::null_mut(), None) };
    assert_eq!(refused, Status::InvalidArgument);

    let used = fake.used_bytes(0);
    let blocks = allocate_in(POOL, &[1000, 30 << 20, 1000]);
    let held = seen.held.lock().unwrap().clone();
    let sizes: Vec<usize> = held.iter().map(|&(_, size)| size).collect();
    assert_eq!(sizes, [2 << 20, 30 << 20], "the small blocks share one");
    assert_eq!(fake.used_bytes(0), used, "the driver is not asked");
    assert!(!find(blocks[0]).unwrap().is_expandable);
    fill(blocks[1], 30 << 20, 5);
    check(blocks[1], 30 << 20, 5);
    route(POOL);
    assert_eq!(allocate(65 << 20, 0), Err(Status::OutOfMemory));
    assert_eq!(lowtide_end_allocate_to_pool(0, POOL), Status::Ok);
    let plain = allocate(1000, 0).unwrap();
    assert!(find(plain).unwrap().is_expandable);
    for memory in blocks {
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
    }
    for _ in 0..2 {
        assert_eq!(lowtide_release_pool(0, POOL), Status::Ok);
    }
    assert_eq!(lowtide_empty_pool(0, POOL), Status::Ok);
    assert_eq!(seen.ended.load(Ordering::Relaxed), 2);
    assert!(seen.held.lock().unwrap().is_empty());
}

#[test]
fn segments_come_from_the_programs_source() {
    let test = "segments_come_from_the_programs_source";
    for variables in [EXPANDABLE, TIDE] {
        isolated(test, &[variables], uses_a_source);
    }
}

/// A source of another package, which allocates from the driver.
unsafe extern "C" fn give_of_driver(
    context: *mut c_void,
    size: usize,
    _device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: `context` is the test's own value.
    let fake = unsafe { &*context.cast::<Fake>() };
    fake.allocate(size).unwrap_or(ptr::null_mut())
}

unsafe extern "C" fn keep(
    _context: *mut c_void,
    _memory: *mut c_void,
    _size: usize,
    _device: c_int,
) {
}

#[test]
fn a_source_may_call_the_driver() {
    isolated("a_source_may_call_the_driver", &[], |fake| {
        assert_eq!(lowtide_retain_pool(0, POOL), Status::Ok);
        assert_eq!(fake.current_device(), None);
        let context = ptr::from_ref(fake).cast_mut().cast();
        // SAFETY: the functions expect this context, which lives as long as the process requests memory.
        let set = unsafe {
            lowtide_set_pool_source(0, POOL, Some(give_of_driver), Some(keep), context, None)
        };
        assert_eq!(set, Status::Ok);
        allocate_in(POOL, &[30 << 20]);
        assert_eq!(fake.current_device(), Some(0));
    });
}

/// The calls of a restore: whether a block was freed or allocated, its address and its size.
type Visited = Vec<(&'static str, usize, usize)>;

unsafe extern "C" fn freed(
    context: *mut c_void,
    memory: *mut c_void,
    size: usize,
    stream: *mut c_void,
) {
    assert!(stream.is_null());
    // This works because no lock is held.
    let _ = stat(0, "allocation.all.current");
    // SAFETY: `context` is the test's own value.
    unsafe { &mut *context.cast::<Visited>() }.push(("freed", memory.addr(), size));
}

unsafe extern "C" fn allocated(
    context: *mut c_void,
    memory: *mut c_void,
    size: usize,
    _stream: *mut c_void,
) {
    // SAFETY: `context` is the test's own value.
    unsafe { &mut *context.cast::<Visited>() }.push(("allocated", memory.addr(), size));
}

fn checkpoint(pool: Mempool) -> Result<*mut Checkpoint, Status> {
    let mut checkpoint = ptr::null_mut();
    // SAFETY: `checkpoint` may be written to.
    match unsafe { lowtide_checkpoint_pool(0, pool, &raw mut checkpoint) } {
        Status::Ok => Ok(checkpoint),
        status => Err(status),
    }
}

fn restore(device: c_int, checkpoint: *const Checkpoint) -> Result<Visited, Status> {
    let mut visited = Visited::new();
    let context = (&raw mut visited).cast();
    // SAFETY: 1. the checkpoint is null or was not released. 2. Both functions take such a context.
    let status =
        unsafe { lowtide_restore_pool(device, checkpoint, Some(freed), Some(allocated), context) };
    match status {
        Status::Ok => Ok(visited),
        status => {
            assert_eq!(visited, [], "a failure visits nothing");
            Err(status)
        }
    }
}

fn is_live(expected: &[*mut c_void]) -> bool {
    let mut is_equal = false;
    let (pointer, count) = (expected.as_ptr(), expected.len());
    // SAFETY: 1. `expected` has `count` pointers. 2. `is_equal` may be written to.
    let status = unsafe { lowtide_check_live(0, POOL, pointer, count, &raw mut is_equal) };
    assert_eq!(status, Status::Ok);
    is_equal
}

fn restores_a_pool() {
    assert_eq!(checkpoint(POOL), Err(Status::Pool));
    assert_eq!(lowtide_retain_pool(0, POOL), Status::Ok);
    let sizes = [1 << 10, 3 << 20, 30 << 20];
    let blocks = allocate_in(POOL, &sizes);
    fill(blocks[2], sizes[2], 9);
    let taken = checkpoint(POOL).unwrap();
    assert_eq!(lowtide_deallocate(blocks[0]), Status::Ok);
    assert_eq!(lowtide_deallocate(blocks[1]), Status::Ok);
    let later = allocate_in(POOL, &[512, 5 << 20]);
    assert!(is_live(&[later[0], later[1], blocks[2]]));
    assert!(!is_live(&[later[0], blocks[2]]));
    assert!(!is_live(&[]));

    let mut visited = restore(0, taken).unwrap();
    visited.sort_unstable();
    let allocated = blocks.iter().zip(sizes);
    let allocated = allocated.map(|(memory, size)| ("allocated", memory.addr(), size));
    let freed = [later[0], later[1], blocks[2]]
        .into_iter()
        .zip([512, 5 << 20, 30 << 20]);
    let freed = freed.map(|(memory, size)| ("freed", memory.addr(), size));
    let mut expected: Visited = allocated.chain(freed).collect();
    expected.sort_unstable();
    assert_eq!(visited, expected);
    assert!(is_live(&blocks));
    check(blocks[2], sizes[2], 9);

    assert_eq!(restore(1, taken), Err(Status::InvalidArgument));
    assert_eq!(restore(0, ptr::null()), Err(Status::InvalidArgument));
    for &memory in &blocks {
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
    }
    assert!(is_live(&[]));
    assert_eq!(lowtide_release_pool(0, POOL), Status::Ok);
    assert_eq!(lowtide_empty_pool(0, POOL), Status::Ok);
    assert_eq!(restore(0, taken), Err(Status::Pool));
    for checkpoint in [taken, ptr::null_mut()] {
        // SAFETY: it is null, or from `lowtide_checkpoint_pool` and no longer used.
        unsafe { lowtide_release_checkpoint(checkpoint) };
    }
}

#[test]
fn a_pool_comes_back_to_what_it_held() {
    let test = "a_pool_comes_back_to_what_it_held";
    let plain = ("LOWTIDE_CONF", "expandable_segments:False");
    for variables in [plain, EXPANDABLE, TIDE] {
        isolated(test, &[variables], |_| restores_a_pool());
    }
}

fn reconfigure(settings: &CStr) -> Status {
    // SAFETY: it ends with a zero byte.
    unsafe { lowtide_reconfigure(settings.as_ptr()) }
}

fn config() -> &'static str {
    let text = lowtide_config();
    assert!(!text.is_null(), "{}", last_error());
    // SAFETY: the text is never freed.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap()
}

#[test]
fn settings_change_while_devices_are_in_use() {
    let test = "settings_change_while_devices_are_in_use";
    let start = [
        ("FAKECUDA_DEVICES", "2"),
        ("LOWTIDE_CONF", "max_split_size_mb:64"),
    ];
    isolated(test, &start, |_| {
        let plain = allocate(3 << 20, 0).unwrap();
        let before = config();
        assert_eq!(before, "caching:max_split_size_mb:64");
        assert_eq!(reconfigure(c"expandable_segments:True"), Status::Ok);
        assert_eq!(config(), "caching:expandable_segments:True");
        assert_eq!(before, "caching:max_split_size_mb:64", "a text stays");
        assert_eq!(stat(0, "max_split_size"), -1);
        for device in [0, 1] {
            let memory = allocate(30 << 20, device).unwrap();
            assert!(find(memory).unwrap().is_expandable, "device {device}");
        }
        assert!(!find(plain).unwrap().is_expandable);
        assert_eq!(reconfigure(c"max_split_size_mb:1"), Status::Config);
        assert!(
            last_error().contains("max_split_size_mb too small"),
            "{}",
            last_error()
        );
        assert_eq!(config(), "caching:expandable_segments:True");
        // SAFETY: null is refused.
        let refused = unsafe { lowtide_reconfigure(ptr::null()) };
        assert_eq!(refused, Status::InvalidArgument);
    });
}

#[test]
fn settings_of_other_strategies_do_not_change() {
    let test = "settings_of_other_strategies_do_not_change";
    isolated(test, &[("LOWTIDE_STRATEGY", "bfc")], |_| {
        assert_eq!(config(), "bfc");
        assert_eq!(reconfigure(c"retry_ms:5"), Status::Config);
    });
}
