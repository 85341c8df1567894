//! Recordings: they are read back, and replayed to the addresses that the program got.
#![expect(unsafe_code, reason = "calls C functions")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

#[path = "../common/mod.rs"]
mod common;

mod failures;

use std::env;
use std::ffi::{CString, OsStr, c_void};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::ptr;
use std::slice;
use std::thread;
use std::time::Duration;

use common::{CACHING, Fake, allocate, allocate_on, command, isolated, last_error};
use lowtide::*;
use lowtide_core::{Action, Bytes, Config, StrategyName};
use lowtide_history::{BlockSizes, CURVES, History};
use lowtide_replay::{Job, Options};
use lowtide_trace::{JobStart, RecordedText, Snapshot, Trace};

/// The variable with the role of a process that a test starts for itself.
const ROLE: &str = "LOWTIDE_TEST_RECORD_ROLE";

/// Returns a directory of this process.
fn directory() -> PathBuf {
    let name = format!("lowtide-record-{}", std::process::id());
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&directory).unwrap();
    directory
}

fn start(path: &Path) -> Status {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: it ends with a zero byte.
    unsafe { lowtide_record_start(path.as_ptr(), false) }
}

fn read(path: &Path) -> Snapshot {
    let snapshot = lowtide_trace::read(path).unwrap();
    fs::remove_file(path).unwrap();
    snapshot
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

/// A program that allocates and frees on some streams, uses memory in others, and empties its cache.
struct Program {
    random: Random,
    device: i32,
    streams: Vec<*mut c_void>,
    held: Vec<*mut c_void>,
}

impl Program {
    fn new(fake: &Fake, seed: u64, device: i32, streams: usize) -> Program {
        assert_eq!(lowtide_init(0), Status::Ok);
        Program {
            random: Random(seed),
            device,
            streams: (0..streams).map(|_| fake.stream_of(device)).collect(),
            held: Vec::new(),
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            // About half of the blocks are freed, up to 500 stay allocated.
            let choice = match self.held.len() {
                500.. => 99,
                _ => self.random.below(100),
            };
            let stream = self.streams[self.random.below(self.streams.len())];
            match choice {
                0 => assert_eq!(lowtide_empty_cache(self.device), Status::Ok),
                1..55 => {
                    let magnitude = 4 + self.random.below(22);
                    let size = 1 + self.random.below(1 << magnitude);
                    self.held
                        .push(allocate_on(size, self.device, stream).unwrap());
                }
                55..60 if !self.held.is_empty() => {
                    let used = self.held[self.random.below(self.held.len())];
                    assert_eq!(lowtide_record_stream(used, stream), Status::Ok);
                }
                _ if !self.held.is_empty() => {
                    let freed = self.held.swap_remove(self.random.below(self.held.len()));
                    assert_eq!(lowtide_deallocate(freed), Status::Ok);
                }
                _ => {}
            }
        }
    }
}

impl Program {
    /// Allocates `allocations` blocks, and frees all but about 40 meanwhile.
    fn churn(&mut self, allocations: usize) {
        for _ in 0..allocations {
            let size = 1 << self.random.below(22);
            self.held
                .push(allocate_on(size, self.device, self.streams[0]).unwrap());
            if self.held.len() > 40 {
                let freed = self.held.swap_remove(self.random.below(40));
                assert_eq!(lowtide_deallocate(freed), Status::Ok);
            }
        }
    }
}

// SAFETY: the pointers are only used as numbers.
unsafe impl Send for Program {}

/// Checks that `caching` with the recorded settings repeats the recording. Returns the number of compared events.
fn verify(trace: &Trace) -> u64 {
    let config = Config::Caching(trace.config_in_force().unwrap());
    let options = Options {
        verify: true,
        ..Options::default()
    };
    let outcome = Job::new(trace).replay(&config, &options, &()).unwrap();
    let verified = outcome.verified.unwrap();
    assert_eq!(verified.first_difference, None);
    assert_eq!(verified.same_address, verified.compared);
    verified.compared
}

/// Allocates `size` bytes in the region `kv`.
fn allocate_in_region(size: usize) -> *mut c_void {
    let tag = CString::new("kv").unwrap();
    // SAFETY: it ends with a zero byte.
    let entered = unsafe { lowtide_region_enter(tag.as_ptr(), Backup::None as i32) };
    assert_eq!(entered, Status::Ok);
    let memory = allocate(size, 0).unwrap();
    assert_eq!(lowtide_region_leave(), Status::Ok);
    memory
}

fn pause() {
    // SAFETY: null means every region.
    assert_eq!(unsafe { lowtide_pause(ptr::null()) }, Status::Ok);
}

fn resume() {
    // SAFETY: null means every region.
    assert_eq!(unsafe { lowtide_resume(ptr::null()) }, Status::Ok);
}

/// Returns the pauses and resumes of a trace: action, size of the segment in MiB, and tag.
fn pauses(trace: &Trace) -> Vec<(Action, u64, String)> {
    let events = trace.events.iter();
    let pauses = events.filter(|event| event.event.action.is_pause());
    let pauses = pauses.inspect(|event| assert!(event.time_us > 0));
    let shown = trace.initial.paused.iter().chain(pauses).map(|event| {
        let tag = trace.stacks.note(event.note).user_metadata.unwrap();
        let size = event.event.size.get() >> 20;
        (event.event.action, size, tag.raw().to_owned())
    });
    shown.collect()
}

/// Returns the tags of a trace's regions.
fn regions(trace: &Trace) -> Vec<&str> {
    trace.regions.values().map(RecordedText::raw).collect()
}

#[test]
fn pauses_are_recorded_where_they_were() {
    isolated("pauses_are_recorded_where_they_were", &[], |_| {
        let path = directory().join("pauses.lowtide");
        assert_eq!(start(&path), Status::Ok);
        let outside = allocate(30 << 20, 0).unwrap();
        let freed = allocate_in_region(40 << 20);
        let kept = allocate_in_region(50 << 20);
        pause();
        assert_eq!(lowtide_deallocate(freed), Status::Ok);
        let meanwhile = allocate(60 << 20, 0).unwrap();
        resume();
        assert_eq!(lowtide_record_stop(), Status::Ok);
        let snapshot = read(&path);
        let trace = &snapshot.traces[0];
        let kv = |action, mib| (action, mib, "kv".to_owned());
        assert_eq!(regions(trace), ["kv"]);
        assert_eq!(
            pauses(trace),
            [
                kv(Action::SegmentPaused, 40),
                kv(Action::SegmentPaused, 50),
                kv(Action::SegmentResumed, 50),
            ]
        );
        // The peak counts only memory that was on the device at the same time.
        let history = History::new(trace, &BlockSizes::of(trace, &()));
        assert_eq!(history.contradictions, 0);
        assert_eq!(
            history.peak_reserved.fragmentation.reserved,
            Bytes::mib(140)
        );
        let most = history.levels.most(CURVES - 1).iter().max();
        assert_eq!(most, Some(&(90 << 20)));
        assert_eq!(history.end.paused, Bytes::ZERO);
        let away = &history.pauses[0];
        assert_eq!(history.regions[away.region as usize], "kv");
        let last = history.pauses.last().unwrap();
        assert!(away.end < last.end, "one went back while it was away");

        // For another strategy a pause changes nothing: paused blocks keep their addresses.
        let config = "buddy".parse().unwrap();
        let outcome = |trace: &Trace| {
            let replayed = Job::new(trace).replay(&config, &Options::default(), &());
            let outcome = replayed.unwrap();
            (outcome.peak_reserved_bytes, outcome.device_allocs)
        };
        let mut without = trace.clone();
        without
            .events
            .retain(|event| !event.event.action.is_pause());
        assert_eq!(outcome(trace), outcome(&without));
        for memory in [outside, kept, meanwhile] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
    });
}

fn set_metadata(text: &str) {
    let text = CString::new(text).unwrap();
    // SAFETY: it ends with a zero byte.
    assert_eq!(unsafe { lowtide_set_metadata(text.as_ptr()) }, Status::Ok);
}

fn annotate(memory: *mut c_void, text: &str) -> Status {
    let text = CString::new(text).unwrap();
    // SAFETY: it ends with a zero byte.
    unsafe { lowtide_annotate(memory, text.as_ptr()) }
}

fn recording() -> u64 {
    let mut number = u64::MAX;
    // SAFETY: it may be written to.
    assert_eq!(unsafe { lowtide_recording(&raw mut number) }, Status::Ok);
    number
}

#[test]
fn what_the_program_says_of_its_memory_is_recorded() {
    let test = "what_the_program_says_of_its_memory_is_recorded";
    isolated(test, &[], |_| {
        let path = directory().join("said.lowtide");
        assert_eq!(recording(), 0);
        let before = allocate(30 << 20, 0).unwrap();
        assert_eq!(annotate(before, "nobody hears"), Status::Ok);
        assert_eq!(start(&path), Status::Ok);
        let first = recording();
        assert!(first > 0);
        assert_eq!(annotate(before, "early"), Status::Ok);
        let plain = allocate(512, 0).unwrap();
        set_metadata("outer");
        let outer = allocate(1 << 20, 0).unwrap();
        set_metadata("inner");
        let inner = allocate(2 << 20, 0).unwrap();
        // Another thread has said nothing.
        thread::scope(|scope| {
            let other = scope.spawn(|| allocate(3 << 20, 0).unwrap().expose_provenance());
            other.join().unwrap()
        });
        set_metadata("outer");
        assert_eq!(lowtide_deallocate(inner), Status::Ok);
        assert_eq!(annotate(inner, "gone"), Status::NotAllocated);
        assert_eq!(annotate(outer, "kept"), Status::Ok);
        set_metadata("");
        assert_eq!(lowtide_deallocate(plain), Status::Ok);
        assert_eq!(lowtide_record_stop(), Status::Ok);
        assert_eq!(recording(), 0);

        let snapshot = read(&path);
        let trace = &snapshot.traces[0];
        let said = trace.events.iter().filter_map(|event| {
            let text = trace.stacks.note(event.note).user_metadata;
            let action = event.event.action;
            let is_of_block = !action.is_segment() && action != Action::FreeCompleted;
            is_of_block.then(|| {
                (
                    action,
                    event.event.size.get() >> 20,
                    text.map(|it| it.raw()),
                )
            })
        });
        assert_eq!(
            said.collect::<Vec<_>>(),
            [
                (Action::Annotate, 30, Some("early")),
                (Action::Alloc, 0, None),
                (Action::Alloc, 1, Some("outer")),
                (Action::Alloc, 2, Some("inner")),
                (Action::Alloc, 3, None),
                (Action::FreeRequested, 2, Some("outer")),
                (Action::Annotate, 1, Some("kept")),
                (Action::FreeRequested, 0, None),
            ]
        );
        let history = History::new(trace, &BlockSizes::of(trace, &()));
        let annotated = history.blocks.iter().map(|block| {
            let text = &history.annotations[block.annotation as usize];
            (block.requested.get() >> 20, &**text)
        });
        let annotated: Vec<_> = annotated.filter(|(_, text)| !text.is_empty()).collect();
        assert_eq!(annotated, [(30, "early"), (1, "kept")]);

        assert_eq!(start(&path), Status::Ok);
        assert!(recording() > first, "the next one has another number");
        assert_eq!(lowtide_record_stop(), Status::Ok);
    });
}

#[test]
fn a_recording_that_begins_late_knows_what_is_paused() {
    let test = "a_recording_that_begins_late_knows_what_is_paused";
    isolated(test, &[], |_| {
        let path = directory().join("paused.lowtide");
        let kept = allocate_in_region(50 << 20);
        for is_away in [true, false] {
            if is_away {
                pause();
            }
            assert_eq!(start(&path), Status::Ok);
            if is_away {
                resume();
            }
            assert_eq!(lowtide_record_stop(), Status::Ok);
            let snapshot = read(&path);
            let found = pauses(&snapshot.traces[0]);
            let actions: Vec<_> = found.iter().map(|(action, ..)| *action).collect();
            let expected = [Action::SegmentPaused, Action::SegmentResumed];
            assert_eq!(actions, &expected[..if is_away { 2 } else { 0 }]);
            let trace = &snapshot.traces[0];
            assert_eq!(regions(trace), ["kv"]);
            assert_eq!(trace.initial.paused.len(), usize::from(is_away));
            // At the beginning of the recording, none of the paused memory was on the device.
            let history = History::new(trace, &BlockSizes::of(trace, &()));
            let reserved = history.levels.least(0)[0];
            assert_eq!(reserved, if is_away { 0 } else { 50 << 20 });
        }
        assert_eq!(lowtide_deallocate(kept), Status::Ok);
    });
}

#[test]
fn a_recording_replays_to_the_same_addresses() {
    let test = "a_recording_replays_to_the_same_addresses";
    for conf in [
        "",
        "expandable_segments:True",
        "max_split_size_mb:32,roundup_power2_divisions:4",
    ] {
        isolated(test, &[("PYTORCH_CUDA_ALLOC_CONF", conf)], |fake| {
            let path = directory().join("whole.lowtide");
            assert_eq!(start(&path), Status::Ok);
            let mut program = Program::new(fake, 17, 0, 3);
            program.run(20_000);
            assert_eq!(lowtide_record_stop(), Status::Ok);
            program.run(100);
            let snapshot = read(&path);
            assert!(!snapshot.is_cut_off);
            let [trace] = &snapshot.traces[..] else {
                panic!("one device was used");
            };
            let conf = env::var("PYTORCH_CUDA_ALLOC_CONF").unwrap();
            let expected = Config::parse("caching", &conf).unwrap();
            assert_eq!(trace.settings.strategy.raw(), expected.to_string());
            assert_eq!(Config::Caching(trace.config_in_force().unwrap()), expected);
            assert!(trace.initial.blocks.is_empty());
            assert_eq!(trace.streams(), 3);
            assert!(trace.events.is_sorted_by_key(|event| event.time_us));
            assert!(verify(trace) > 5_000);

            assert_eq!(start(&path), Status::Ok);
            program.run(10_000);
            assert_eq!(lowtide_record_stop(), Status::Ok);
            let trace = &read(&path).traces[0];
            assert!(trace.initial.blocks.len() > 100);
            // As in PyTorch's snapshots, the borders of expandable segments from before the recording are not
            // known. A replay may take two of them for one.
            if !conf.contains("expandable") {
                assert!(verify(trace) > 2_000);
            }
        });
    }
}

/// A recording begins with the blocks that are allocated at its start, while threads continue. Another recording
/// can begin after it.
#[test]
fn a_recording_may_begin_and_end_in_the_middle() {
    let test = "a_recording_may_begin_and_end_in_the_middle";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |fake| {
        let path = directory().join("middle.lowtide");
        let mut programs: Vec<Program> = (0..4)
            .map(|number| Program::new(fake, 100 + number, i32::from(number % 2 == 1), 1))
            .collect();
        programs.iter_mut().for_each(|program| program.run(3_000));
        for round in 0..3 {
            thread::scope(|scope| {
                for program in &mut programs {
                    scope.spawn(|| program.run(4_000));
                }
                assert_eq!(start(&path), Status::Ok);
                assert_eq!(start(&path), Status::Started, "one at a time");
                thread::sleep(Duration::from_millis(5 * round));
                assert_eq!(lowtide_record_stop(), Status::Ok);
            });
            let snapshot = read(&path);
            assert_eq!(snapshot.traces.len(), 2);
            for trace in &snapshot.traces {
                assert!(!trace.initial.blocks.is_empty());
                assert!(
                    trace
                        .initial
                        .segments
                        .iter()
                        .all(|segment| segment.pool.is_some())
                );
            }
        }
        assert_eq!(lowtide_record_stop(), Status::Ok, "there is none to stop");
    });
}

/// If devices are first used while a recording begins, each is recorded once, from its first event on.
#[test]
fn a_recording_may_begin_while_devices_are_first_used() {
    let test = "a_recording_may_begin_while_devices_are_first_used";
    isolated(test, &[("FAKECUDA_DEVICES", "8")], |fake| {
        let path = directory().join("first.lowtide");
        let programs = (0..8).map(|device| Program::new(fake, 7, device, 1));
        let mut programs: Vec<Program> = programs.collect();
        thread::scope(|scope| {
            for program in &mut programs {
                scope.spawn(|| program.churn(500));
            }
            assert_eq!(start(&path), Status::Ok);
        });
        programs.iter_mut().for_each(|program| program.churn(100));
        assert_eq!(lowtide_record_stop(), Status::Ok);
        let snapshot = read(&path);
        assert!(!snapshot.is_cut_off);
        assert_eq!(snapshot.traces.len(), 8);
        for trace in &snapshot.traces {
            assert!(trace.allocs() >= 100);
        }
    });
}

/// Threads on streams of their own. The order of their events in the file is a possible one.
#[test]
fn threads_are_recorded_in_an_order_that_replays() {
    isolated(
        "threads_are_recorded_in_an_order_that_replays",
        &[CACHING],
        |fake| {
            let path = directory().join("threads.lowtide");
            assert_eq!(start(&path), Status::Ok);
            let mut programs: Vec<Program> = (0..4)
                .map(|number| Program::new(fake, 31 + number, 0, 1))
                .collect();
            thread::scope(|scope| {
                for program in &mut programs {
                    scope.spawn(|| program.churn(5_000));
                }
            });
            assert_eq!(lowtide_record_stop(), Status::Ok);
            let snapshot = read(&path);
            assert_eq!(verify(&snapshot.traces[0]), 20_000);
        },
    );
}

/// Returns address and size of each block in use on the first device.
fn blocks_in_use() -> Vec<(u64, u64)> {
    unsafe extern "C" fn visit(
        context: *mut c_void,
        _segment: *const Segment,
        blocks: *const Block,
        count: usize,
    ) {
        // SAFETY: `context` is the value passed below.
        let seen = unsafe { &mut *context.cast::<Vec<(u64, u64)>>() };
        // SAFETY: `blocks` points to `count` blocks, valid for the call.
        let blocks = unsafe { slice::from_raw_parts(blocks, count) };
        let in_use = { blocks.iter() }.filter(|block| block.state != BlockState::Inactive);
        seen.extend(in_use.map(|block| (block.address, block.size)));
    }
    let mut seen: Vec<(u64, u64)> = Vec::new();
    // SAFETY: `visit` takes such a context.
    let status = unsafe { lowtide_visit_segments(0, Some(visit), (&raw mut seen).cast()) };
    assert_eq!(status, Status::Ok);
    seen.sort_unstable();
    seen
}

#[test]
fn every_strategy_is_recorded_with_its_name_and_how_long_its_blocks_are() {
    let test = "every_strategy_is_recorded_with_its_name_and_how_long_its_blocks_are";
    let others = StrategyName::ALL
        .into_iter()
        .filter(|&name| name != StrategyName::Caching);
    for strategy in others.map(StrategyName::as_str) {
        isolated(test, &[("LOWTIDE_STRATEGY", strategy)], |fake| {
            let path = directory().join("strategy.lowtide");
            let mut program = Program::new(fake, 5, 0, 2);
            program.run(500);
            assert_eq!(start(&path), Status::Ok);
            program.run(2_000);
            let in_region = allocate_in_region(3 << 20);
            assert_eq!(lowtide_record_stop(), Status::Ok);
            let trace = &read(&path).traces[0];
            let history = History::new(trace, &BlockSizes::of(trace, &()));
            assert!(history.sizes_are_verified);
            let blocks = history.blocks.iter();
            let at_end = blocks.filter(|block| block.end > history.events);
            let mut at_end: Vec<_> = at_end
                .map(|block| (block.address, block.size.get()))
                .collect();
            at_end.sort_unstable();
            assert_eq!(at_end, blocks_in_use());
            assert_eq!(lowtide_deallocate(in_region), Status::Ok);
            assert_eq!(
                trace.settings.strategy.raw(),
                env::var("LOWTIDE_STRATEGY").unwrap()
            );
            assert!(!trace.initial.blocks.is_empty() && trace.allocs() > 800);
            let outcome = Job::new(trace).replay(
                &Config::parse("caching", "").unwrap(),
                &Options::default(),
                &(),
            );
            assert!(outcome.unwrap().completed);
        });
    }
}

/// A path that is not UTF-8 is used unchanged, in calls and from the environment.
#[test]
fn a_path_may_be_any_bytes() {
    const TEST: &str = "a_path_may_be_any_bytes";
    let directory = directory().join("any");
    fs::create_dir_all(&directory).unwrap();
    let name = |name: &'static [u8]| directory.join(OsStr::from_bytes(name));
    if role().is_some() {
        let fake = Fake::load();
        let mut program = Program::new(&fake, 14, 0, 2);
        program.run(1_000);
        assert_eq!(lowtide_record_stop(), Status::Ok);
        check_records(&mut program, &name(b"called\xff.lowtide"));
        std::process::exit(0);
    }
    let path = name(b"any\xffbytes.lowtide");
    let output = play(TEST, "any", &path, &[]);
    assert!(output.status.success(), "{output:?}");
    assert!(!read(&path).is_cut_off);
    let left: Vec<_> = fs::read_dir(&directory).unwrap().collect();
    assert_eq!(left.len(), 0, "{left:?}");
}

/// Checks that recording to `path` works like the first one, and that only one recording runs at a time.
fn check_records(program: &mut Program, path: &Path) {
    assert_eq!(start(path), Status::Ok);
    program.run(500);
    let second = path.with_extension("second");
    assert_eq!(start(&second), Status::Started);
    let text = last_error();
    assert_eq!(text, "a recording is being made already: stop it first");
    assert!(!second.exists());
    assert_eq!(start(path), Status::Started, "the file is not begun again");
    program.run(500);
    assert_eq!(lowtide_record_stop(), Status::Ok);
    let snapshot = read(path);
    assert!(!snapshot.is_cut_off);
    verify(&snapshot.traces[0]);
    assert!(snapshot.traces[0].events.len() > 1_000);
}

/// Runs a role of this file in a process of its own, which records because `LOWTIDE_RECORD` is set.
fn play(test: &str, role: &str, path: &Path, variables: &[(&str, &str)]) -> Output {
    command(test)
        .env(ROLE, role)
        .env("LOWTIDE_RECORD", path)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn role() -> Option<String> {
    env::var(ROLE).ok()
}

fn reported(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines = text.lines().filter(|line| line.starts_with("lowtide: "));
    lines.map(str::to_owned).collect()
}

#[test]
fn a_process_that_ends_leaves_a_complete_file() {
    const TEST: &str = "a_process_that_ends_leaves_a_complete_file";
    if role().is_some() {
        let fake = Fake::load();
        Program::new(&fake, 9, 0, 1).run(5_000);
        std::process::exit(3);
    }
    let path = directory().join("ends.lowtide");
    let output = play(TEST, "exit", &path, &[]);
    assert_eq!(output.status.code(), Some(3));
    let size = fs::metadata(&path).unwrap().len();
    let snapshot = read(&path);
    assert!(!snapshot.is_cut_off);
    let events = snapshot.traces[0].events.len();
    assert!(events > 5_000);
    verify(&snapshot.traces[0]);
    let [line] = &reported(&output)[..] else {
        panic!("one line is said");
    };
    let count = lowtide_core::Count(events as u64);
    let expected = format!("lowtide: recorded {count} events to {}, ", path.display());
    assert!(line.starts_with(&expected), "{line}");
    assert!(
        size / (events as u64) < 16,
        "{size} bytes for {events} events"
    );
}

#[test]
fn a_process_that_is_killed_leaves_what_came_before() {
    const TEST: &str = "a_process_that_is_killed_leaves_what_came_before";
    if role().is_some() {
        let fake = Fake::load();
        Program::new(&fake, 11, 0, 2).run(5_000);
        thread::sleep(Duration::from_millis(500));
        let process = std::process::id().cast_signed();
        // SAFETY: takes numbers only.
        unsafe { libc::kill(process, libc::SIGKILL) };
    }
    let path = directory().join("killed.lowtide");
    let output = play(TEST, "killed", &path, &[]);
    assert_eq!(output.status.signal(), Some(libc::SIGKILL));
    let snapshot = read(&path);
    assert!(snapshot.is_cut_off);
    assert!(snapshot.traces[0].events.len() > 5_000);
    verify(&snapshot.traces[0]);
}

#[test]
fn each_rank_and_each_process_has_its_file() {
    const TEST: &str = "each_rank_and_each_process_has_its_file";
    if role().is_some() {
        let fake = Fake::load();
        Program::new(&fake, 13, 0, 1).run(500);
        std::process::exit(0);
    }
    let directory = directory();
    let path = directory.join("job.lowtide");
    for rank in ["0", "1"] {
        let ranks = [("RANK", rank), ("WORLD_SIZE", "2")];
        assert!(play(TEST, "rank", &path, &ranks).status.success());
    }
    for _ in 0..2 {
        assert!(play(TEST, "alone", &path, &[]).status.success());
    }
    let entries = fs::read_dir(&directory).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|name| name.starts_with("job."))
        .collect();
    names.sort();
    assert_eq!(names.len(), 4, "{names:?}");
    assert_eq!(names[0], "job.lowtide");
    assert!(names[1].starts_with("job.pid"), "{names:?}");
    assert_eq!(names[2..], ["job.rank0.lowtide", "job.rank1.lowtide"]);
    for name in names {
        assert!(!read(&directory.join(name)).is_cut_off);
    }
}

/// A recording from before the job is replaced only when a process records under its name.
#[test]
fn what_an_earlier_job_left_stays_until_another_is_recorded() {
    const TEST: &str = "what_an_earlier_job_left_stays_until_another_is_recorded";
    if let Some(role) = role() {
        if role == "records" {
            let fake = Fake::load();
            Program::new(&fake, 13, 0, 1).run(500);
        }
        std::process::exit(0);
    }
    let directory = directory().join("earlier");
    fs::create_dir_all(&directory).unwrap();
    let path = directory.join("job.lowtide");
    let ranks = [("RANK", "1"), ("WORLD_SIZE", "2")];
    assert!(play(TEST, "records", &path, &ranks).status.success());
    assert!(play(TEST, "records", &path, &[]).status.success());
    let names = || {
        let entries = fs::read_dir(&directory).unwrap().flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let there = names();
    assert_eq!(there, ["job.lowtide", "job.rank1.lowtide"]);
    let earlier = File::open(&path).unwrap();
    let written = earlier.metadata().unwrap().modified().unwrap();
    earlier
        .set_modified(written - Duration::from_secs(1))
        .unwrap();
    let start = File::create(directory.join("start")).unwrap();
    let start = JobStart::of(&start).unwrap().to_text();
    fs::remove_file(directory.join("start")).unwrap();
    let variables = [(JobStart::VARIABLE, &*start)];
    let number = || fs::metadata(&path).unwrap().ino();
    let before = number();
    let output = play(TEST, "does nothing", &path, &variables);
    assert!(output.status.success());
    assert_eq!((names(), number()), (there.clone(), before));
    assert!(play(TEST, "records", &path, &variables).status.success());
    assert_eq!(names(), there);
    assert_ne!(number(), before);
    assert!(play(TEST, "records", &path, &variables).status.success());
    assert_eq!(names().len(), 3, "{:?}", names());
    assert!(!read(&path).is_cut_off);
}

/// A file that is not a recording is not replaced: one line says so, as from `lowtide record`, and the program
/// continues.
#[test]
fn what_is_no_recording_has_none_beside_it() {
    const TEST: &str = "what_is_no_recording_has_none_beside_it";
    if role().is_some() {
        let fake = Fake::load();
        Program::new(&fake, 13, 0, 1).run(500);
        std::process::exit(0);
    }
    let place = directory().join("others");
    fs::create_dir_all(place.join("runs")).unwrap();
    fs::write(place.join("notes.pickle"), "mine").unwrap();
    for (name, why) in [
        ("runs", "is a directory"),
        (
            "notes.pickle",
            "exists and is no recording of lowtide's: choose another name",
        ),
    ] {
        let path = place.join(name);
        for variables in [&[][..], &[("RANK", "1"), ("WORLD_SIZE", "2")]] {
            if name == "notes.pickle" && !variables.is_empty() {
                // A rank's file has another name.
                continue;
            }
            let output = play(TEST, "goes on", &path, variables);
            assert!(output.status.success(), "{output:?}");
            let expected = format!("lowtide: nothing is recorded: {}: {why}", path.display());
            assert_eq!(reported(&output), [expected]);
        }
    }
    assert_eq!(fs::read_dir(&place).unwrap().count(), 2);
    assert_eq!(fs::read(place.join("notes.pickle")).unwrap(), b"mine");
}

/// A child that is forked before a device is used has a recording of its own. A child that is forked later does
/// not change its parent's.
#[test]
fn forks_leave_the_file_alone() {
    const TEST: &str = "forks_leave_the_file_alone";
    if role().is_some() {
        let fork = || {
            // SAFETY: the test checks the calls that the child makes.
            unsafe { libc::fork() }
        };
        let wait = |child| {
            let mut status = 0;
            // SAFETY: `status` may be written to.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        };
        match fork() {
            0 => {
                let fake = Fake::load();
                Program::new(&fake, 3, 0, 1).run(600);
                std::process::exit(0);
            }
            child => wait(child),
        }
        let fake = Fake::load();
        let mut program = Program::new(&fake, 4, 0, 1);
        program.run(1_000);
        match fork() {
            0 => {
                assert_eq!(allocate(1, 0), Err(Status::Forked));
                assert_eq!(lowtide_record_stop(), Status::Forked);
                std::process::exit(0);
            }
            child => wait(child),
        }
        program.run(1_000);
        std::process::exit(0);
    }
    let directory = directory();
    let path = directory.join("forks.lowtide");
    let output = play(TEST, "forks", &path, &[]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(reported(&output).len(), 2, "{output:?}");
    let entries = fs::read_dir(&directory).unwrap().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut events: Vec<usize> = paths
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("forks.")
        })
        .map(|path| {
            let snapshot = read(&path);
            assert!(!snapshot.is_cut_off);
            verify(&snapshot.traces[0]);
            snapshot.traces[0].events.len()
        })
        .collect();
    events.sort_unstable();
    assert!(
        matches!(events[..], [400..1500, 1501..=usize::MAX]),
        "{events:?}"
    );
}

/// An observer gets the same events while they are recorded.
#[test]
fn an_observer_is_notified_beside_a_recording() {
    static NOTIFIED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    unsafe extern "C" fn count(_context: *mut c_void, _event: *const Event) {
        NOTIFIED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    isolated("an_observer_is_notified_beside_a_recording", &[], |fake| {
        let path = directory().join("observed.lowtide");
        // SAFETY: the context is not used.
        let observed = unsafe { lowtide_observe_events(Some(count), ptr::null_mut()) };
        assert_eq!(observed, Status::Ok);
        assert_eq!(start(&path), Status::Ok);
        let mut program = Program::new(fake, 3, 0, 2);
        program.run(500);
        assert_eq!(lowtide_record_stop(), Status::Ok);
        let notified = NOTIFIED.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(read(&path).traces[0].events.len(), notified);
        program.run(500);
        assert!(NOTIFIED.load(std::sync::atomic::Ordering::Relaxed) > notified);
    });
}
