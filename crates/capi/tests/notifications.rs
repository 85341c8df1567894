//! What a program can observe: events, segments and blocks, shortages, out-of-memory errors and dumps.
#![expect(unsafe_code, reason = "calls C functions")]
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

mod common;

use std::ffi::{CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::thread;
use std::{env, fs, ptr};

use common::{CACHING, TIDE, allocate, allocate_on, find, is_tide, isolated, last_error, stat};
use lowtide::*;

static EVENTS: Mutex<Vec<(Action, c_int, u64)>> = Mutex::new(Vec::new());

unsafe extern "C" fn note(context: *mut c_void, event: *const Event) {
    assert_eq!(context.addr(), 7);
    // SAFETY: it is lowtide's, and valid for the call.
    let event = unsafe { *event };
    assert!(event.stream.is_null());
    let mut events = EVENTS.lock().unwrap();
    events.push((event.action, event.device, event.size));
}

fn observe(observer: EventObserver) {
    // SAFETY: the context is compared only.
    let status = unsafe { lowtide_observe_events(observer, ptr::without_provenance_mut(7)) };
    assert_eq!(status, Status::Ok);
}

fn events() -> Vec<(Action, c_int, u64)> {
    std::mem::take(&mut *EVENTS.lock().unwrap())
}

#[test]
fn observers_are_notified_of_devices_in_use_and_later_ones() {
    let test = "observers_are_notified_of_devices_in_use_and_later_ones";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |_| {
        let early = allocate(1 << 20, 0).unwrap();
        observe(Some(note));
        assert_eq!(lowtide_deallocate(early), Status::Ok);
        let freed = [Action::FreeRequested, Action::FreeCompleted];
        assert_eq!(events(), freed.map(|action| (action, 0, 1 << 20)));
        let late = allocate(1000, 1).unwrap();
        let grows = [Action::SegmentAlloc, Action::SegmentMap][usize::from(is_tide())];
        let expected = [(grows, 1, 2 << 20), (Action::Alloc, 1, 1000)];
        assert_eq!(events(), expected);
        assert_eq!(lowtide_reset(), Status::Ok);
        let shrinks = [Action::SegmentFree, Action::SegmentUnmap][usize::from(is_tide())];
        assert_eq!(events(), [(shrinks, 0, 2 << 20)]);
        assert_eq!(allocate(1 << 50, 1), Err(Status::OutOfMemory));
        assert_eq!(events(), [(Action::OutOfMemory, 1, 1 << 50)]);
        // SAFETY: null is refused.
        let refused = unsafe { lowtide_snapshot(ptr::null_mut(), ptr::null_mut()) };
        assert_eq!(refused, Status::InvalidArgument);
        assert_eq!(events(), []);
        let (mut bytes, mut length) = (ptr::null_mut(), 0);
        // SAFETY: both may be written to.
        let status = unsafe { lowtide_snapshot(&raw mut bytes, &raw mut length) };
        assert_eq!(status, Status::Ok);
        // SAFETY: they come from `lowtide_snapshot`.
        unsafe { lowtide_release_bytes(bytes) };
        assert_eq!(
            events(),
            [(Action::Snapshot, 0, 0), (Action::Snapshot, 1, 1024)]
        );
        observe(None);
        assert_eq!(lowtide_deallocate(late), Status::Ok);
        assert_eq!(events(), []);
    });
}

/// While threads allocate, the observer is set and removed. No event is reported twice.
#[test]
fn an_observer_may_change_under_way() {
    static NOTIFIED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn count(_context: *mut c_void, _event: *const Event) {
        NOTIFIED.fetch_add(1, Ordering::Relaxed);
    }
    isolated("an_observer_may_change_under_way", &[], |_| {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let memory = allocate(512, 0).unwrap();
                        assert_eq!(lowtide_deallocate(memory), Status::Ok);
                    }
                });
            }
            for _ in 0..200 {
                observe(Some(count));
                observe(None);
                let notified = NOTIFIED.load(Ordering::Relaxed);
                thread::yield_now();
                assert_eq!(
                    NOTIFIED.load(Ordering::Relaxed),
                    notified,
                    "it is not called any more"
                );
            }
        });
        assert!(NOTIFIED.load(Ordering::Relaxed) <= 3 * 8_000 + 1);
    });
}

/// The visited segments, each with its blocks.
type Shown = Vec<(Segment, Vec<Block>)>;

unsafe extern "C" fn show(
    context: *mut c_void,
    segment: *const Segment,
    blocks: *const Block,
    count: usize,
) {
    // SAFETY: `context` is the test's own value.
    let shown = unsafe { &mut *context.cast::<Shown>() };
    // SAFETY: it is lowtide's, and valid for the call.
    let segment = unsafe { *segment };
    // SAFETY: `blocks` points to `count` blocks.
    let blocks = unsafe { slice::from_raw_parts(blocks, count) };
    shown.push((segment, blocks.to_vec()));
}

fn segments(device: c_int) -> Shown {
    let mut shown = Shown::new();
    let context = (&raw mut shown).cast();
    // SAFETY: `show` takes such a context.
    let status = unsafe { lowtide_visit_segments(device, Some(show), context) };
    assert_eq!(status, Status::Ok);
    shown
}

#[test]
fn what_is_held_can_be_visited() {
    isolated("what_is_held_can_be_visited", &[], |fake| {
        assert_eq!(segments(0).len(), 0);
        assert_eq!(segments(99).len(), 0, "what is not there has none");
        assert_eq!(fake.calls("cuInit"), 0, "to look starts nothing");
        assert_eq!(lowtide_init(1), Status::Ok);
        let stream = fake.stream();
        let first = allocate(1000, 0).unwrap();
        let second = allocate_on(30 << 20, 0, stream).unwrap();
        let shown = segments(0);
        assert!(shown.is_sorted_by_key(|(segment, _)| segment.address));
        let small = shown.iter().find(|(segment, _)| !segment.is_large).unwrap();
        assert_eq!(
            (small.0.address, small.0.size),
            (first.addr() as u64, 2 << 20)
        );
        let states: Vec<_> = { small.1.iter() }
            .map(|block| (block.state, block.size, block.requested))
            .collect();
        let rest = (2 << 20) - 1024;
        let expected = [
            (BlockState::Allocated, 1024, 1000),
            (BlockState::Inactive, rest, 0),
        ];
        assert_eq!(states, expected);
        let large = shown.iter().find(|(segment, _)| segment.is_large).unwrap();
        assert_eq!(large.0.stream, stream);
        assert_eq!(large.0.is_expandable, is_tide());

        allocate(40 << 20, 0).unwrap();
        let numbers = |shown: Vec<(Segment, Vec<Block>)>| {
            let of_stream = shown
                .into_iter()
                .filter(|(segment, _)| segment.stream.is_null());
            let mut numbers: Vec<_> = of_stream
                .map(|(segment, _)| (segment.number, segment.size))
                .collect();
            numbers.sort_unstable();
            numbers
        };
        let sizes: Vec<_> = numbers(segments(0))
            .into_iter()
            .map(|(_, size)| size)
            .collect();
        assert_eq!(sizes, [2 << 20, 40 << 20], "numbered as they came");

        let found = find(second).unwrap();
        assert_eq!((found.size, found.requested), (30 << 20, 30 << 20));
        assert_eq!((found.stream, found.device), (stream, 0));
        assert_eq!(find(second.wrapping_byte_add(1)), Err(Status::NotAllocated));
        // SAFETY: null is refused.
        let status = unsafe { lowtide_visit_segments(0, None, ptr::null_mut()) };
        assert_eq!(status, Status::InvalidArgument);
        // SAFETY: null is refused.
        let status = unsafe { lowtide_find_allocation(second, ptr::null_mut()) };
        assert_eq!(status, Status::InvalidArgument);
    });
}

fn usage(device: c_int) -> (i64, i64) {
    let (mut allocated, mut reserved) = (1, 1);
    // SAFETY: both may be written to.
    let status = unsafe { lowtide_memory_usage(device, &raw mut allocated, &raw mut reserved) };
    assert_eq!(status, Status::Ok);
    (allocated.cast_signed(), reserved.cast_signed())
}

#[test]
fn usage_is_reported_without_the_other_figures() {
    isolated("usage_is_reported_without_the_other_figures", &[], |fake| {
        assert_eq!(usage(0), (0, 0));
        assert_eq!(usage(99), (0, 0), "what is not there has none");
        assert_eq!(fake.calls("cuInit"), 0, "to look starts nothing");
        let small = allocate(1000, 0).unwrap();
        assert_eq!(usage(0), (1024, 2 << 20));
        // The sums are over all streams.
        let stream = fake.stream();
        let large = allocate_on(30 << 20, 0, stream).unwrap();
        assert_eq!(usage(0), ((30 << 20) + 1024, 32 << 20));
        assert_eq!(lowtide_deallocate(small), Status::Ok);
        let (allocated, reserved) = usage(0);
        assert_eq!(allocated, stat(0, "allocated_bytes.all.current"));
        assert_eq!(reserved, stat(0, "reserved_bytes.all.current"));
        assert_eq!((allocated, reserved), (30 << 20, 32 << 20));
        assert_eq!(lowtide_deallocate(large), Status::Ok);
        let mut number = 7;
        // SAFETY: null is refused.
        let status = unsafe { lowtide_memory_usage(0, &raw mut number, ptr::null_mut()) };
        assert_eq!((status, number), (Status::InvalidArgument, 7));
    });
}

fn largest_free(device: c_int) -> u64 {
    let mut size = 0;
    // SAFETY: `size` may be written to.
    let status = unsafe { lowtide_largest_free(device, &raw mut size) };
    assert_eq!(status, Status::Ok);
    size
}

#[test]
fn the_largest_free_block_is_the_drivers_or_a_pools() {
    let test = "the_largest_free_block_is_the_drivers_or_a_pools";
    isolated(test, &[("FAKECUDA_CAPACITY", "104857600")], |_| {
        let held = allocate(10 << 20, 0).unwrap();
        assert_eq!(largest_free(0), 90 << 20);
        let pool = Mempool {
            capture: 1,
            user: 0,
        };
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        let private = allocate(70 << 20, 0).unwrap();
        assert_eq!(lowtide_deallocate(private), Status::Ok);
        assert_eq!(largest_free(0), 70 << 20, "the driver has 20 MiB");
        assert_eq!(lowtide_deallocate(held), Status::Ok);
    });
}

/// Its idle and new frames come together at any addresses.
#[test]
fn the_largest_free_block_of_tide_is_what_is_idle_or_free() {
    let test = "the_largest_free_block_of_tide_is_what_is_idle_or_free";
    let variables = [TIDE, ("FAKECUDA_CAPACITY", "104857600")];
    isolated(test, &variables, |_| {
        let [first, held, last] = [30, 30, 30].map(|mib| allocate(mib << 20, 0).unwrap());
        assert_eq!(largest_free(0), 10 << 20, "the driver's");
        for memory in [first, last] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        // With the driver's 10 MiB, unless the limit is in the way.
        for (fraction, largest) in [(0.96, 66), (0.5, 60), (1.0, 70)] {
            assert_eq!(lowtide_set_memory_fraction(fraction, 0), Status::Ok);
            assert_eq!(largest_free(0), largest << 20);
        }
        let whole = allocate(70 << 20, 0).unwrap();
        for memory in [held, whole] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
    });
}

#[test]
fn a_shortage_may_be_ended_by_the_program() {
    static SPARE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    unsafe extern "C" fn free_spare(context: *mut c_void, device: c_int) -> bool {
        assert_eq!((context.addr(), device), (5, 0));
        let spare = SPARE.swap(ptr::null_mut(), Ordering::Relaxed);
        !spare.is_null() && lowtide_deallocate(spare) == Status::Ok
    }
    let test = "a_shortage_may_be_ended_by_the_program";
    isolated(test, &[("FAKECUDA_CAPACITY", "104857600")], |fake| {
        let context = ptr::without_provenance_mut(5);
        // SAFETY: the context is compared only.
        let status = unsafe { lowtide_on_shortage(Some(free_spare), context) };
        assert_eq!(status, Status::Ok);
        let spare = allocate(90 << 20, 0).unwrap();
        SPARE.store(spare, Ordering::Relaxed);
        let before = fake.memory_calls();
        assert_eq!(
            allocate(80 << 20, 0),
            Ok(spare),
            "set before the device was in use"
        );
        assert_eq!(fake.memory_calls(), before, "the driver is not asked");
        assert_eq!(allocate(80 << 20, 0), Err(Status::OutOfMemory));
        // SAFETY: null ends it.
        let status = unsafe { lowtide_on_shortage(None, ptr::null_mut()) };
        assert_eq!(status, Status::Ok);
        assert_eq!(lowtide_deallocate(spare), Status::Ok);
    });
}

fn last_out_of_memory() -> Result<OutOfMemory, Status> {
    let mut figures = OutOfMemory::default();
    // SAFETY: `figures` may be written to.
    match unsafe { lowtide_last_out_of_memory(&raw mut figures) } {
        Status::Ok => Ok(figures),
        status => Err(status),
    }
}

/// Requests 30 MiB on a fragmented device, and returns the error's text. The device has 20 MiB free, and two
/// segments have 18 MiB free each. A job whose first steps were larger is in such a state.
fn run_out_of_pieces() -> String {
    for memory in [40 << 20, 40 << 20].map(|size| allocate(size, 0).unwrap()) {
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
    }
    for size in [22 << 20, 22 << 20] {
        allocate(size, 0).unwrap();
    }
    assert_eq!(allocate(30 << 20, 0), Err(Status::OutOfMemory));
    last_error()
}

#[test]
fn running_out_says_where_memory_is_and_what_would_have_fitted() {
    let test = "running_out_says_where_memory_is_and_what_would_have_fitted";
    // Events are kept where the device has little memory, and where there is a limit, though the job held more before.
    for (capacity, fraction) in [("104857600", "1"), ("10737418240", "0.009765625")] {
        let variables = [
            CACHING,
            ("FAKECUDA_CAPACITY", capacity),
            ("FRACTION", fraction),
        ];
        isolated(test, &variables, |_| {
            let fraction = env::var("FRACTION").unwrap().parse().unwrap();
            if fraction < 1.0 {
                let earlier = allocate(600 << 20, 0).unwrap();
                assert_eq!(lowtide_deallocate(earlier), Status::Ok);
                assert_eq!(lowtide_reset(), Status::Ok);
            }
            assert_eq!(lowtide_set_memory_fraction(fraction, 0), Status::Ok);
            let text = run_out_of_pieces();
            let lines: Vec<_> = text.lines().skip(1).collect();
            let [holders, gap, fitting] = lines[..] else {
                panic!("{text}")
            };
            assert_eq!(holders, "Biggest holders: 2 x 22.00 MiB.");
            assert_eq!(
                gap,
                "Reserved and not live: 36.00 MiB of 80.00 MiB: 36.00 MiB free between blocks of segments in use."
            );
            let expandable = ": LOWTIDE_CONF=expandable_segments:True (";
            assert!(
                fitting.starts_with("Would have fitted, ") && fitting.contains(expandable),
                "{text}"
            );
        });
    }
}

/// No setting helps: none uses the memory of a live private pool for other requests.
#[test]
fn what_a_live_pool_keeps_would_have_fitted_nowhere() {
    let test = "what_a_live_pool_keeps_would_have_fitted_nowhere";
    let of_graph = "in pool (7, 0), until graph.reset() of all torch.cuda.CUDAGraphs in it.";
    let of_mempool =
        "in pool (0, 7), until every torch.cuda.MemPool and CUDAGraph of it is deleted (MemPool(";
    for (capture, user, expected) in [("7", "0", of_graph), ("0", "7", of_mempool)] {
        let variables = [
            ("FAKECUDA_CAPACITY", "104857600"),
            ("OF_CAPTURE", capture),
            ("OF_USER", user),
            ("EXPECTED", expected),
        ];
        isolated(test, &variables, |_| {
            let number = |name| env::var(name).unwrap().parse().unwrap();
            let pool = Mempool {
                capture: number("OF_CAPTURE"),
                user: number("OF_USER"),
            };
            // SAFETY: there is no filter.
            let routed =
                unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
            assert_eq!(routed, Status::Ok);
            let private = allocate(50 << 20, 0).unwrap();
            assert_eq!(lowtide_deallocate(private), Status::Ok);
            assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
            while allocate(12 << 20, 0).is_ok() {}
            let expected = env::var("EXPECTED").unwrap();
            let text = last_error();
            let kept = "\nFree in live private pools, for their own requests: 50.00 MiB ";
            assert!(text.contains(&format!("{kept}{expected}")), "{text}");
            assert!(text.ends_with(" events: nothing of 7 tried."), "{text}");
        });
    }
}

#[test]
fn what_would_have_fitted_is_said_as_it_was_chosen() {
    let test = "what_would_have_fitted_is_said_as_it_was_chosen";
    let cases = [
        (
            "argument",
            "lowtide.install(config=\"max_split_size_mb:256,expandable_segments:True\")",
        ),
        (
            "LOWTIDE_CONF",
            "LOWTIDE_CONF=max_split_size_mb:256,expandable_segments:True",
        ),
        (
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_ALLOC_CONF=max_split_size_mb:256,expandable_segments:True",
        ),
    ];
    for (how, expected) in cases {
        let variables = [
            CACHING,
            ("FAKECUDA_CAPACITY", "104857600"),
            (how, "max_split_size_mb:256"),
            ("EXPECTED", expected),
        ];
        isolated(test, &variables, |_| {
            if let Ok(conf) = env::var("argument") {
                let conf = CString::new(conf).unwrap();
                // SAFETY: it ends with a zero byte.
                let status = unsafe { lowtide_configure(ptr::null(), conf.as_ptr()) };
                assert_eq!(status, Status::Ok);
            }
            let text = run_out_of_pieces();
            let expected = format!(": {} (", env::var("EXPECTED").unwrap());
            assert!(text.contains(&expected), "{text}");
        });
    }
}

/// Returns the names of the files in a directory.
fn files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn running_out_leaves_a_snapshot_and_a_report_once() {
    let test = "running_out_leaves_a_snapshot_and_a_report_once";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump/deeper");
    if env::var_os("LOWTIDE_OOM_DUMP").is_none() && directory.exists() {
        fs::remove_dir_all(&directory).unwrap();
    }
    let variables = [
        CACHING,
        ("FAKECUDA_CAPACITY", "104857600"),
        ("LOWTIDE_OOM_DUMP", directory.to_str().unwrap()),
    ];
    isolated(test, &variables, |_| {
        let directory = PathBuf::from(env::var_os("LOWTIDE_OOM_DUMP").unwrap());
        let text = run_out_of_pieces();
        let (snapshot, report) = (directory.join("oom.pickle"), directory.join("oom.html"));
        let reported = format!(
            "\nWritten: {} and {}.",
            snapshot.display(),
            report.display()
        );
        assert!(text.ends_with(&reported), "{text}");
        let pickle = fs::read(&snapshot).unwrap();
        let read = lowtide_trace::read_from(&*pickle).unwrap();
        let [trace] = &read.traces[..] else {
            panic!("{} devices", read.traces.len())
        };
        // The recent events are in the snapshot too, because little of the device was free.
        assert_eq!((trace.allocs(), trace.initial.blocks.len()), (2, 2));
        for file in [&snapshot, &report] {
            let mode = fs::metadata(file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", file.display());
        }
        assert_eq!(trace.peak_live_bytes().get(), 80 << 20);
        assert!(
            fs::read_to_string(&report)
                .unwrap()
                .contains("\"oom.pickle\"")
        );

        assert_eq!(allocate(30 << 20, 0), Err(Status::OutOfMemory));
        assert!(!last_error().contains("Written"), "{}", last_error());
        assert_eq!(files(&directory), ["oom.html", "oom.pickle"]);
    });
}

#[test]
fn running_out_under_tide_leaves_a_snapshot_and_a_report() {
    let test = "running_out_under_tide_leaves_a_snapshot_and_a_report";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump_of_tide");
    if env::var_os("LOWTIDE_OOM_DUMP").is_none() && directory.exists() {
        fs::remove_dir_all(&directory).unwrap();
    }
    let variables = [
        TIDE,
        ("FAKECUDA_CAPACITY", "104857600"),
        ("LOWTIDE_OOM_DUMP", directory.to_str().unwrap()),
    ];
    isolated(test, &variables, |_| {
        let directory = PathBuf::from(env::var_os("LOWTIDE_OOM_DUMP").unwrap());
        let held = [30 << 20, 30 << 20].map(|size| allocate(size, 0).unwrap());
        assert_eq!(lowtide_deallocate(held[0]), Status::Ok);
        assert_eq!(allocate(80 << 20, 0), Err(Status::OutOfMemory));
        let text = last_error();
        assert!(
            text.contains("\nBiggest holders: 1 x 30.00 MiB.\n"),
            "{text}"
        );
        assert!(text.contains("oom.html."), "{text}");
        assert_eq!(files(&directory), ["oom.html", "oom.pickle"]);
        let read = lowtide_trace::read(&directory.join("oom.pickle")).unwrap();
        let [trace] = &read.traces[..] else {
            panic!("{} devices", read.traces.len())
        };
        assert_eq!(trace.peak_live_bytes().get(), 30 << 20);
        let page = fs::read_to_string(directory.join("oom.html")).unwrap();
        assert!(page.contains("\"oom.pickle\""));
    });
}

#[test]
fn what_another_knows_of_the_process_is_left_instead() {
    unsafe extern "C" fn knows(
        _: *mut c_void,
        write: unsafe extern "C" fn(*mut c_void, *const c_void, usize),
        to: *mut c_void,
    ) -> bool {
        let pickle = fs::read(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../traces/mnist_mlp.pickle.zst"
        ))
        .unwrap();
        for part in pickle.chunks(1000) {
            // SAFETY: the slice has so many bytes.
            unsafe { write(to, part.as_ptr().cast(), part.len()) };
        }
        true
    }
    let test = "what_another_knows_of_the_process_is_left_instead";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump_of_another");
    if env::var_os("LOWTIDE_OOM_DUMP").is_none() && directory.exists() {
        fs::remove_dir_all(&directory).unwrap();
    }
    let variables = [
        CACHING,
        ("FAKECUDA_CAPACITY", "104857600"),
        ("LOWTIDE_OOM_DUMP", directory.to_str().unwrap()),
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
    ];
    isolated(test, &variables, |_| {
        // SAFETY: it needs no context.
        let status = unsafe { lowtide_on_dump(Some(knows), ptr::null_mut()) };
        assert_eq!(status, Status::Ok);
        let text = run_out_of_pieces();
        let directory = PathBuf::from(env::var_os("LOWTIDE_OOM_DUMP").unwrap());
        assert_eq!(files(&directory), ["oom.rank3.html", "oom.rank3.pickle"]);
        let read = lowtide_trace::read(&directory.join("oom.rank3.pickle")).unwrap();
        assert!(read.traces[0].allocs() > 50_000);
        // The snapshot has all events. The report has only the last ones, because the program waits for it.
        let left_out = "the last 100,000 of 160,745 events";
        assert!(
            text.ends_with(&format!("oom.rank3.html, which shows {left_out}.")),
            "{text}"
        );
        let page = fs::read_to_string(directory.join("oom.rank3.html")).unwrap();
        assert!(page.contains(&format!("\"oom.rank3.pickle, {left_out}\"")));
        assert!(page.contains("\"events\":100000,"));
    });
}

#[test]
fn a_snapshot_that_takes_long_to_read_is_left_without_a_report() {
    const LENGTH: usize = (128 << 20) + 1;
    unsafe extern "C" fn knows_much(
        _: *mut c_void,
        write: unsafe extern "C" fn(*mut c_void, *const c_void, usize),
        to: *mut c_void,
    ) -> bool {
        let pickle = vec![0_u8; LENGTH];
        // SAFETY: the slice has so many bytes.
        unsafe { write(to, pickle.as_ptr().cast(), pickle.len()) };
        true
    }
    let test = "a_snapshot_that_takes_long_to_read_is_left_without_a_report";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump_of_much");
    let variables = [
        CACHING,
        ("FAKECUDA_CAPACITY", "104857600"),
        ("LOWTIDE_OOM_DUMP", directory.to_str().unwrap()),
    ];
    isolated(test, &variables, |_| {
        // SAFETY: it needs no context.
        let status = unsafe { lowtide_on_dump(Some(knows_much), ptr::null_mut()) };
        assert_eq!(status, Status::Ok);
        let text = run_out_of_pieces();
        let directory = PathBuf::from(env::var_os("LOWTIDE_OOM_DUMP").unwrap());
        assert_eq!(files(&directory), ["oom.pickle"]);
        let path = directory.join("oom.pickle");
        assert_eq!(fs::metadata(&path).unwrap().len(), LENGTH as u64);
        let path = path.display();
        let reported = format!(
            "\nWritten: {path}, whose report would keep the program waiting: `lowtide report {path}` makes it."
        );
        assert!(text.ends_with(&reported), "{text}");
        fs::remove_dir_all(&directory).unwrap();
    });
}

#[test]
fn a_directory_may_have_any_name() {
    let test = "a_directory_may_have_any_name";
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump_anywhere");
    let variable = "LOWTIDE_TEST_CHILD";
    if env::var_os(variable).is_none() && parent.exists() {
        fs::remove_dir_all(&parent).unwrap();
    }
    isolated(test, &[CACHING, ("FAKECUDA_CAPACITY", "104857600")], |_| {
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump_anywhere");
        let directory = parent.join(OsStr::from_bytes(b"any\xffname"));
        // SAFETY: no other thread reads the environment yet.
        unsafe { env::set_var("LOWTIDE_OOM_DUMP", &directory) };
        assert!(run_out_of_pieces().contains("\nWritten: "));
        assert_eq!(files(&directory), ["oom.html", "oom.pickle"]);
        assert_eq!(fs::read_dir(&parent).unwrap().count(), 1);
    });
    fs::remove_dir_all(parent).unwrap();
}

#[test]
fn what_cannot_be_left_is_said() {
    let variables = [
        CACHING,
        ("FAKECUDA_CAPACITY", "104857600"),
        ("LOWTIDE_OOM_DUMP", "/dev/null/no"),
    ];
    isolated("what_cannot_be_left_is_said", &variables, |_| {
        let text = run_out_of_pieces();
        let last = text.lines().last().unwrap();
        assert!(
            last.starts_with("LOWTIDE_OOM_DUMP=/dev/null/no: Not a directory"),
            "{text}"
        );
    });
}

#[test]
fn running_out_is_not_explained_where_that_is_not_wanted() {
    let test = "running_out_is_not_explained_where_that_is_not_wanted";
    let variables = [
        CACHING,
        ("FAKECUDA_CAPACITY", "104857600"),
        ("LOWTIDE_OOM_EXPLAIN", "0"),
    ];
    isolated(test, &variables, |_| {
        let text = run_out_of_pieces();
        assert!(
            text.ends_with("\nBiggest holders: 2 x 22.00 MiB."),
            "{text}"
        );
    });
}

#[test]
fn running_out_has_figures_and_names_the_biggest_holders() {
    let test = "running_out_has_figures_and_names_the_biggest_holders";
    isolated(test, &[("FAKECUDA_CAPACITY", "104857600")], |_| {
        assert_eq!(last_out_of_memory(), Err(Status::InvalidArgument));
        let held = allocate(30 << 20, 0).unwrap();
        assert_eq!(lowtide_set_memory_fraction(0.5, 0), Status::Ok);
        assert_eq!(allocate(61 << 20, 0), Err(Status::OutOfMemory));
        let text = last_error();
        let (_, explanation) = text.split_once('\n').unwrap();
        assert_eq!(
            explanation,
            "Biggest holders: 1 x 30.00 MiB.\n\
             Reserved and not live: 0 bytes of 30.00 MiB.\n\
             Would have fitted: nothing. What is live and this request are 41.00 MiB more than the 50.00 MiB \
             there are for this process."
        );
        let figures = OutOfMemory {
            device: 0,
            requested: 61 << 20,
            segment_size: 62 << 20,
            largest_free: 0,
            allocated: 30 << 20,
            reserved: 30 << 20,
            limit: 50 << 20,
            device_free: 70 << 20,
            device_total: 100 << 20,
            is_rejected: false,
        };
        assert_eq!(last_out_of_memory(), Ok(figures));
        assert_eq!(
            lowtide_deallocate(ptr::without_provenance_mut(1)),
            Status::NotAllocated
        );
        assert_eq!(
            last_out_of_memory(),
            Ok(figures),
            "another failure leaves them"
        );
        thread::spawn(|| assert_eq!(last_out_of_memory(), Err(Status::InvalidArgument)))
            .join()
            .unwrap();
        assert_eq!(allocate(usize::MAX, 0), Err(Status::OutOfMemory));
        let reported = last_out_of_memory().unwrap();
        assert_eq!((reported.requested, reported.device_total), (u64::MAX, 0));
        assert_eq!(lowtide_deallocate(held), Status::Ok);
        assert_eq!(stat(0, "num_ooms"), 1);
    });
}
