//! Pauses in snapshots of this process: in requested ones, and in the dump after an out-of-memory error.

use std::env;
use std::ffi::c_void;
use std::fs;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use lowtide_core::{Action, Bytes};
use lowtide_history::{BlockSizes, History};
use lowtide_trace::{RecordedText, Trace, TraceEvent};

use super::*;

/// Returns the environment of a process with 100 MiB of device memory and a dump directory of its own.
fn variables(directory: &Path) -> [(&str, &str); 2] {
    let variable = "LOWTIDE_OOM_DUMP";
    if env::var_os(variable).is_none() && directory.exists() {
        fs::remove_dir_all(directory).unwrap();
    }
    let directory = directory.to_str().unwrap();
    [("FAKECUDA_CAPACITY", "104857600"), (variable, directory)]
}

/// Returns the dumped snapshot, and the text of its report.
fn left() -> (Trace, String) {
    let directory = PathBuf::from(env::var_os("LOWTIDE_OOM_DUMP").unwrap());
    let read = lowtide_trace::read(&directory.join("oom.pickle")).unwrap();
    let [trace] = <[Trace; 1]>::try_from(read.traces).unwrap();
    let expected = if is_tide() { "tide" } else { "" };
    assert_eq!(trace.settings.strategy.raw(), expected);
    let report = fs::read_to_string(directory.join("oom.html")).unwrap();
    // The next process of the test writes its own.
    fs::remove_dir_all(directory).unwrap();
    (trace, report)
}

/// Returns the pauses and resumes among events: action, size in MiB, and tag.
fn listed<'a>(
    trace: &Trace,
    events: impl IntoIterator<Item = &'a TraceEvent>,
) -> Vec<(Action, u64, String)> {
    let pauses = { events.into_iter() }.filter(|event| event.event.action.is_pause());
    let listed = pauses.map(|event| {
        let tag = trace.stacks.note(event.note).user_metadata.unwrap();
        (
            event.event.action,
            event.event.size.get() >> 20,
            tag.raw().to_owned(),
        )
    });
    listed.collect()
}

fn history(trace: &Trace) -> History {
    let history = History::new(trace, &BlockSizes::of(trace, &()));
    assert_eq!(history.contradictions, 0);
    history
}

fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_micros()).unwrap()
}

#[test]
fn a_dump_has_what_is_paused_and_since_when() {
    let test = "dump::a_dump_has_what_is_paused_and_since_when";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump_of_pauses");
    isolated(test, &variables(&directory), |_| {
        let weights = allocate_in("weights", Backup::None, 30 * MIB, 0, 1);
        assert_eq!(pause("weights"), Status::Ok, "{}", last_error());
        let kv = allocate_in("kv", Backup::None, 20 * MIB, 0, 2);
        let freed = allocate_in("kv", Backup::None, 12 * MIB, 0, 3);
        // From here on events are kept, because less than a quarter of the device is free.
        let outside = allocate(46 * MIB, 0).unwrap();
        let later = allocate(10 * MIB, 0).unwrap();
        for _ in 0..2 {
            assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
            assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        }
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        assert_eq!(lowtide_deallocate(freed), Status::Ok);
        let more = allocate(28 * MIB, 0).unwrap();
        assert_eq!(allocate(40 * MIB, 0), Err(Status::OutOfMemory));
        let text = last_error();
        assert!(
            text.contains("\nReserved and not live: 0 bytes of 84.00 MiB."),
            "{text}"
        );

        let (trace, report) = left();
        let paused = |mib, tag: &str| (Action::SegmentPaused, mib, tag.to_owned());
        let resumed = |mib, tag: &str| (Action::SegmentResumed, mib, tag.to_owned());
        let before = listed(&trace, &trace.initial.paused);
        assert_eq!(before, [paused(30, "weights")]);
        let both = [paused(20, "kv"), paused(12, "kv")];
        let back = [resumed(20, "kv"), resumed(12, "kv")];
        let expected = [&both[..], &back, &both, &back, &both].concat();
        assert_eq!(listed(&trace, &trace.events), expected);
        let place = |found: &dyn Fn(&TraceEvent) -> bool| trace.events.iter().position(found);
        let first = place(&|event| event.event.action.is_pause()).unwrap();
        let late = place(&|event| event.event.address.get() == later.addr() as u64).unwrap();
        let last = place(&|event| event.event.address.get() == more.addr() as u64).unwrap();
        assert!(late < first && first < last, "{late} {first} {last}");

        let history = history(&trace);
        assert_eq!(history.end.paused, Bytes::mib(62));
        assert_eq!(history.refusals[0].moment.paused, Bytes::mib(62));
        assert_eq!(history.end.fragmentation.reserved, Bytes::mib(84));
        assert!(history.peak_reserved.fragmentation.reserved <= Bytes::mib(100));
        assert!(report.contains(&format!("\"peak_paused\":{},", 62 << 20)));
        assert!(report.contains("\"tags\":[\"\",\"kv\",\"weights\"],"));
        assert!(report.contains("\"regions\":[\"weights\",\"kv\"],"));
        for memory in [weights, kv, outside, later, more] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
    });
}

/// The bytes of a snapshot that PyTorch wrote before any pause.
static WRITTEN: Mutex<Vec<u8>> = Mutex::new(Vec::new());

/// Takes a snapshot and returns its bytes.
fn snapshot() -> Vec<u8> {
    let (mut bytes, mut length) = (ptr::null_mut(), 0);
    // SAFETY: both may be written to.
    let status = unsafe { lowtide_snapshot(&raw mut bytes, &raw mut length) };
    assert_eq!(status, Status::Ok, "{}", last_error());
    // SAFETY: `length` bytes are valid until they are released.
    let copy = unsafe { slice::from_raw_parts(bytes.cast::<u8>(), length) }.to_vec();
    // SAFETY: they came from `lowtide_snapshot`.
    unsafe { lowtide_release_bytes(bytes) };
    copy
}

#[test]
fn pauses_are_added_to_what_another_wrote() {
    unsafe extern "C" fn knows(
        _: *mut c_void,
        write: unsafe extern "C" fn(*mut c_void, *const c_void, usize),
        to: *mut c_void,
    ) -> bool {
        let written = WRITTEN.lock().unwrap();
        // SAFETY: the vector has so many bytes.
        unsafe { write(to, written.as_ptr().cast(), written.len()) };
        true
    }
    let test = "dump::pauses_are_added_to_what_another_wrote";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dump_of_anothers_pauses");
    isolated(test, &variables(&directory), |_| {
        // SAFETY: it needs no context.
        let status = unsafe { lowtide_on_dump(Some(knows), ptr::null_mut()) };
        assert_eq!(status, Status::Ok);
        let outside = allocate(10 * MIB, 0).unwrap();
        let kv = allocate_in("kv", Backup::None, 20 * MIB, 0, 1);
        let other = allocate_in("weights", Backup::None, 30 * MIB, 0, 2);
        *WRITTEN.lock().unwrap() = snapshot();
        let before_us = now_us();
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        let after_us = now_us();
        assert_eq!(allocate(90 * MIB, 0), Err(Status::OutOfMemory));
        let (trace, report) = left();
        let [pause] = trace.initial.paused[..] else {
            panic!("{} are paused", trace.initial.paused.len())
        };
        let paused = (Action::SegmentPaused, 20, "kv".to_owned());
        assert_eq!(listed(&trace, [&pause]), [paused]);
        assert!((before_us..=after_us).contains(&pause.time_us));
        assert_eq!(history(&trace).end.paused, Bytes::mib(20));
        assert!(report.contains(&format!("\"peak_paused\":{},", 20 << 20)));
        for memory in [outside, kv, other] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
    });
}

#[test]
fn a_snapshot_has_what_is_paused() {
    isolated("dump::a_snapshot_has_what_is_paused", &[], |_| {
        let outside = allocate(10 * MIB, 0).unwrap();
        let kv = allocate_in("kv", Backup::None, 20 * MIB, 0, 1);
        for is_away in [true, false] {
            let status = if is_away { pause("kv") } else { resume("kv") };
            assert_eq!(status, Status::Ok, "{}", last_error());
            let read = lowtide_trace::read_from(&*snapshot()).unwrap();
            let trace = &read.traces[0];
            assert_eq!(
                trace
                    .regions
                    .values()
                    .map(RecordedText::raw)
                    .collect::<Vec<_>>(),
                ["kv"]
            );
            assert_eq!(listed(trace, &trace.events), []);
            let paused = (Action::SegmentPaused, 20, "kv".to_owned());
            let expected = [paused];
            let listed = listed(trace, &trace.initial.paused);
            assert_eq!(listed, expected[..usize::from(is_away)]);
            let end = history(trace).end;
            let reserved = if is_away { 10 } else { 30 };
            assert_eq!(end.fragmentation.reserved, Bytes::mib(reserved));
        }
        for memory in [outside, kv] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
    });
}
