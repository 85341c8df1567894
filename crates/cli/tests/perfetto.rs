//! `lowtide convert` to files that Perfetto opens. Each is read back.
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::Path;

use common::{GPT2, Scratch, fail, lowtide, read_sample, run, run_json, small, stderr};
use flate2::read::GzDecoder;
use lowtide_core::Action;
use lowtide_trace::{Snapshot, TraceEvent};
use serde_json::Value;

/// A training of three steps on torch 2.15, and the profile of its last part.
const TRAINING: &str = "../crates/cli/tests/data/profiled.pickle.gz";
const PROFILE: &str = "../crates/cli/tests/data/profiled.json.gz";

/// A profile of torch 2.3, whose times count from 1970.
const OLD_PROFILE: &str = "../crates/cli/tests/data/profile.torch2.3.1.json";

/// A job with 33 streams, and with many private pools.
const BRANCHES: &str = "../crates/replay/tests/data/branches.exp.pickle.gz";

/// The ids from which on processes are lowtide's.
const OWN: u64 = 5_000_000;

/// A file of events.
struct File {
    file: Value,
}

/// An event of a file.
type Event = Value;

/// The values of some counters, by their names and keys.
type State<'f> = BTreeMap<(&'f str, &'f str), u64>;

impl File {
    fn read(path: &Path) -> File {
        let mut contents = fs::read(path).unwrap();
        if path.extension().unwrap() == "gz" {
            let mut decoded = Vec::new();
            GzDecoder::new(&*contents)
                .read_to_end(&mut decoded)
                .unwrap();
            contents = decoded;
        }
        File {
            file: serde_json::from_slice(&contents).unwrap(),
        }
    }

    /// Converts a recording, and reads the file.
    fn of(scratch: &Scratch, recording: &str) -> File {
        let path = scratch.path("converted.perfetto.json");
        run(&["convert", recording, path.to_str().unwrap()]);
        File::read(&path)
    }

    fn of_snapshot(scratch: &Scratch, snapshot: &Snapshot) -> File {
        let recording = scratch.write_snapshot("recording.lowtide", snapshot);
        File::of(scratch, recording.to_str().unwrap())
    }

    fn events(&self) -> impl Iterator<Item = &Event> {
        self.file["traceEvents"].as_array().unwrap().iter()
    }

    fn own_events(&self) -> impl Iterator<Item = &Event> {
        self.events().filter(|event| is_own(event))
    }

    /// Returns the time from which times in the file count, in microseconds since 1970.
    fn base_us(&self) -> f64 {
        self.file["baseTimeNanoseconds"].as_f64().unwrap() / 1000.0
    }

    /// Returns the name of each row, by its id.
    fn rows(&self) -> BTreeMap<u64, &str> {
        let names = self.own_events().filter(|it| it["name"] == "thread_name");
        let row = |event: &'_ Event| event["tid"].as_u64().unwrap();
        names
            .map(|it| (row(it), it["args"]["name"].as_str().unwrap()))
            .collect()
    }

    /// Returns the events of the rows whose names begin like this.
    fn in_rows(&self, begin: &str) -> Vec<&Event> {
        let rows = self.rows();
        let is_in = |event: &&Event| {
            let row = event["tid"].as_u64().and_then(|row| rows.get(&row));
            event["ph"] != "M" && row.is_some_and(|name| name.starts_with(begin))
        };
        self.own_events().filter(is_in).collect()
    }

    /// Returns the states of all counters of the process with this name: after each time that has counters.
    fn states(&self, process: &str) -> Vec<State<'_>> {
        let is_name = |it: &&Event| it["name"] == "process_name" && it["args"]["name"] == process;
        let pid = &self.own_events().find(is_name).unwrap()["pid"];
        let mut states: Vec<State<'_>> = Vec::new();
        let mut last = -1.0;
        let counters = self.own_events().filter(|it| it["ph"] == "C");
        for event in counters.filter(|it| it["pid"] == *pid) {
            let time = event["ts"].as_f64().unwrap();
            assert!(time >= last, "{time} after {last}");
            if time > last {
                states.push(states.last().cloned().unwrap_or_default());
                last = time;
            }
            let state = states.last_mut().unwrap();
            let name = event["name"].as_str().unwrap();
            for (key, value) in event["args"].as_object().unwrap() {
                state.insert((name, key), value.as_u64().unwrap());
            }
        }
        states
    }
}

fn is_own(event: &Event) -> bool {
    event["pid"].as_u64().is_some_and(|pid| pid >= OWN)
}

fn sum(state: &State<'_>, name: &str) -> Option<u64> {
    let values = state.iter().filter(|((of, _), _)| *of == name);
    let values: Vec<u64> = values.map(|(_, &value)| value).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

fn peak(states: &[State<'_>], name: &str) -> u64 {
    let values = states.iter().filter_map(|state| sum(state, name));
    values.max().unwrap()
}

/// Checks the counters of a recording of one device against `lowtide summary`, and the sums of those that divide the
/// allocated bytes. Returns the number of points.
fn check_counters(recording: &str, file: &File) -> usize {
    let summary = &run_json(&["summary", "--json", recording])[0];
    let states = file.states("memory of GPU 0");
    for (name, field) in [
        ("allocated", "peak_live_bytes"),
        ("reserved", "peak_reserved_bytes"),
    ] {
        let expected = &summary["trace"][field];
        assert_eq!(peak(&states, name), *expected, "{recording}: {name}");
    }
    for state in &states {
        let allocated = sum(state, "allocated").unwrap_or(0);
        assert!(allocated <= sum(state, "reserved").unwrap());
        for name in ["category", "stream", "pool"] {
            let divided = sum(state, name).unwrap_or(allocated);
            assert_eq!(divided, allocated, "{recording}: {name} of {state:?}");
        }
    }
    states.len()
}

/// Checks that the slices of each row end in order, and none lies in another.
fn check_slices(file: &File) {
    let mut rows: BTreeMap<u64, (f64, Option<f64>)> = BTreeMap::new();
    for event in file.own_events() {
        let phase = event["ph"].as_str().unwrap();
        if !["B", "E", "i"].contains(&phase) {
            continue;
        }
        let time = event["ts"].as_f64().unwrap();
        let row = event["tid"].as_u64().unwrap();
        let (last, open) = rows.entry(row).or_insert((0.0, None));
        assert!(time >= *last, "{event}: {last}");
        *last = time;
        match phase {
            "E" => {
                let start = open.take().expect("a slice ends that began");
                // Perfetto rounds times.
                assert!(time - start >= 1.0, "{event}: {start}");
            }
            _ => assert_eq!(*open, None, "{event}"),
        }
        if phase == "B" {
            *open = Some(time);
        }
    }
    assert!(!rows.is_empty());
    assert!(rows.values().all(|(_, open)| open.is_none()), "{rows:?}");
}

#[test]
fn counters_have_the_peaks_and_divide_the_allocated_bytes() {
    let scratch = Scratch::new("perfetto-counters");
    let leak = "../crates/cli/tests/data/leak.debian.pickle.gz";
    for recording in [TRAINING, leak, BRANCHES, GPT2] {
        let file = File::of(&scratch, recording);
        check_slices(&file);
        let points = check_counters(recording, &file);
        assert!(points < 20_100, "{recording}: {points} points");
        if recording == GPT2 {
            // Of more than three times as many changes.
            assert!(points > 10_000, "{points} points");
        }
    }
}

#[test]
fn a_short_recording_has_every_change() {
    let scratch = Scratch::new("perfetto-changes");
    let file = File::of(&scratch, TRAINING);
    let path = common::sample("").join(TRAINING);
    let trace = lowtide_trace::read(&path).unwrap().traces.remove(0);
    let mut live = 0;
    let mut expected = Vec::new();
    for TraceEvent { event, .. } in &trace.events {
        let size = event.size.get().next_multiple_of(512);
        match event.action {
            Action::Alloc => live += size,
            Action::FreeRequested => live -= size,
            _ => continue,
        }
        expected.push(live);
    }
    let counted = file.own_events().filter(|it| it["name"] == "allocated");
    let counted: Vec<u64> = counted
        .map(|it| it["args"]["bytes"].as_u64().unwrap())
        .collect();
    // The first is 0: the driver's memory comes before the first block.
    assert_eq!(counted[1..], expected);

    let reserved: Vec<u64> = { trace.reserved_bytes() }.map(|it| it.get()).collect();
    let states = file.states("memory of GPU 0");
    let last = states.last().unwrap();
    assert_eq!(sum(last, "reserved"), reserved.last().copied());
    let keys: BTreeSet<&str> = last.keys().map(|(name, _)| *name).collect();
    let expected = ["allocated", "category", "reserved", "stream"];
    assert_eq!(keys, BTreeSet::from(expected));
}

#[test]
fn a_training_stands_under_its_profile() {
    let scratch = Scratch::new("perfetto-profile");
    let path = scratch.path("merged.perfetto.json.gz");
    let path_text = path.to_str().unwrap();
    let printed = run(&["convert", "--profile", PROFILE, TRAINING, path_text]);
    assert_eq!(printed, format!("{path_text}: 329 events of 1 device\n"));
    let merged = File::read(&path);
    let profile = File::read(&common::sample("").join(PROFILE));

    // The profile is still there, whole.
    assert!(!profile.events().any(is_own));
    let others = merged.events().filter(|event| !is_own(event));
    assert!(others.eq(profile.events()));
    let without_events = |file: &File| {
        let mut file = file.file.clone();
        file.as_object_mut().unwrap().remove("traceEvents");
        file
    };
    assert_eq!(without_events(&merged), without_events(&profile));

    // Both recorded when the program's steps began and ended.
    let steps = |phase: &str| -> Vec<f64> {
        let steps = merged.events();
        let steps = steps.filter(|it| it["name"] == "step" && it["ph"] == phase);
        steps.map(|it| it["ts"].as_f64().unwrap()).collect()
    };
    let (of_profiler, of_recording) = (steps("X"), steps("B"));
    assert_eq!((of_profiler.len(), of_recording.len()), (3, 3));
    for (of_profiler, of_recording) in of_profiler.iter().zip(&of_recording) {
        let apart_us = (of_profiler - of_recording).abs();
        assert!(apart_us < 200.0, "{of_profiler}, {of_recording}");
    }
    // The inputs of each step are allocated in it.
    let inputs = merged.in_rows("largest").into_iter();
    let inputs = inputs.filter(|it| it["args"]["category"] == "inputs");
    let inputs: Vec<f64> = inputs.map(|it| it["ts"].as_f64().unwrap()).collect();
    assert_eq!(inputs.len(), 3);
    for (start, input) in of_profiler.iter().zip(inputs) {
        assert!((0.0..5000.0).contains(&(input - start)), "{start}, {input}");
    }

    let alone = File::of(&scratch, TRAINING);
    check_slices(&merged);
    check_counters(TRAINING, &merged);
    // By itself, the recording has the same events at the same times.
    let shift = merged.base_us() - alone.base_us();
    assert_eq!(alone.events().count(), merged.own_events().count());
    for (alone, merged) in alone.events().zip(merged.own_events()) {
        assert_eq!(alone["name"], merged["name"]);
        if let (Some(alone), Some(merged)) = (alone["ts"].as_f64(), merged["ts"].as_f64()) {
            assert!((merged + shift - alone).abs() < 2.0, "{alone}, {merged}");
        }
    }
}

#[test]
fn many_streams_and_pools_are_summed_up() {
    let scratch = Scratch::new("perfetto-streams");
    let file = File::of(&scratch, BRANCHES);
    let states = file.states("memory of GPU 0");
    for name in ["stream", "pool"] {
        let keys = states.last().unwrap().keys();
        let keys: Vec<&str> = keys
            .filter(|(of, _)| *of == name)
            .map(|(_, key)| *key)
            .collect();
        assert_eq!(keys.len(), 8, "{keys:?}");
        assert!(keys.contains(&"others"), "{keys:?}");
    }
}

#[test]
fn blocks_calls_and_errors_are_slices() {
    let scratch = Scratch::new("perfetto-slices");
    let file = File::of(&scratch, TRAINING);
    let blocks = file.in_rows("largest");
    let bytes = |event: &Event| event["args"]["bytes"].as_u64().unwrap_or(0);
    let largest = blocks.iter().max_by_key(|it| bytes(it)).unwrap();
    assert_eq!(bytes(largest), 32 << 20);
    let activations = blocks.iter();
    let mut activations = activations.filter(|it| it["args"]["category"] == "activations");
    let line = "step (app/profiled.py:17) › forward (modules/linear.py:134)";
    let activation = activations.find(|it| it["name"] == line).unwrap();
    assert_eq!(activation["args"]["stream"], "0");
    let stack = activation["args"]["stack"].as_array().unwrap();
    assert!(
        stack.contains(&"main  /app/profiled.py:30".into()),
        "{stack:?}"
    );
    let long_lived = file.in_rows("long-lived");
    let long_lived: u64 = long_lived.iter().map(|it| bytes(it)).sum();
    // The parameters.
    assert_eq!(long_lived, 2 * 1024 * 256 * 4 + (1024 + 256) * 4);

    let calls = file.in_rows("driver calls");
    let of = |name: &str| -> u64 {
        let calls = calls.iter().filter(|it| it["name"] == name);
        calls.map(|it| bytes(it)).sum()
    };
    let states = file.states("memory of GPU 0");
    let reserved = sum(states.last().unwrap(), "reserved").unwrap();
    assert_eq!(of("segment_alloc") - of("segment_free"), reserved);
    let calls_in_run = calls.iter().filter_map(|it| it["args"]["calls"].as_u64());
    assert!(calls_in_run.max().unwrap() > 3, "some are made in a row");

    let errors = file.in_rows("out-of-memory errors");
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0]["name"], "out of memory: 1.00 TiB");
    assert_eq!(errors[0]["args"]["requested_bytes"], 1_u64 << 40);
    assert_eq!(errors[0]["args"]["call_site"], "main (app/profiled.py:32)");
}

#[test]
fn what_is_paused_is_counted_apart() {
    let scratch = Scratch::new("perfetto-pauses");
    let mut snapshot = lowtide_trace::read(&common::sample("").join(TRAINING)).unwrap();
    let trace = &mut snapshot.traces[0];
    let came = |event: &TraceEvent| event.event.action == Action::SegmentAlloc;
    let first = trace.events.iter().position(came).unwrap();
    let segment = trace.events[first];
    for (place, action) in [(100, Action::SegmentPaused), (101, Action::SegmentResumed)] {
        let event = TraceEvent {
            time_us: trace.events[place].time_us,
            ..segment
        };
        trace.events.insert(place, event);
        trace.events[place].event.action = action;
    }
    let file = File::of_snapshot(&scratch, &snapshot);
    let states = file.states("memory of GPU 0");
    let paused = segment.event.size.get();
    let at = states
        .iter()
        .position(|state| sum(state, "paused") == Some(paused));
    let at = at.unwrap();
    let [before, while_paused, after] = [at - 1, at, at + 1].map(|at| &states[at]);
    assert_eq!(before, after);
    let of = |state: &State<'_>, name: &str| sum(state, name).unwrap();
    assert_eq!(
        of(while_paused, "reserved"),
        of(before, "reserved") - paused
    );
    assert!(of(while_paused, "allocated") < of(before, "allocated"));
    let calls = file.in_rows("driver calls");
    assert!(calls.iter().any(|it| it["name"] == "segment_paused"));
}

#[test]
fn each_device_and_the_host_have_processes_of_their_own() {
    let scratch = Scratch::new("perfetto-devices");
    let mut snapshot = read_sample("gpt2_train.stacks.pickle.zst");
    let mut other = snapshot.traces[0].clone();
    other.device = 3;
    snapshot.host.push(other.clone());
    snapshot.traces.push(other);
    let file = File::of_snapshot(&scratch, &snapshot);
    let names = file.own_events().filter(|it| it["name"] == "process_name");
    let names: Vec<&str> = names
        .map(|it| it["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "memory of GPU 0",
            "memory of GPU 0: blocks",
            "memory of GPU 3",
            "memory of GPU 3: blocks",
            "pinned host memory",
            "pinned host memory: blocks",
        ]
    );
    check_slices(&file);
    assert_eq!(
        file.states("memory of GPU 0"),
        file.states("memory of GPU 3")
    );
}

/// Returns the lines on standard error of a conversion with a profile, and the file.
fn convert_with(scratch: &Scratch, profile: &str, recording: &str) -> (String, File) {
    let path = scratch.path("with.perfetto.json");
    let mut lowtide = lowtide();
    lowtide.args(["convert", "--profile", profile, recording]);
    let output = lowtide.arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    (stderr(&output), File::read(&path))
}

#[test]
fn times_of_older_profiles_count_from_1970() {
    let scratch = Scratch::new("perfetto-old");
    let (said, _) = convert_with(&scratch, OLD_PROFILE, TRAINING);
    assert!(
        said.contains("do not overlap in time: the profile"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");

    // The recording, moved into the profile's time.
    let path = common::sample("").join(TRAINING);
    let mut snapshot = lowtide_trace::read(&path).unwrap();
    let trace = &mut snapshot.traces[0];
    let profile = File::read(&common::sample("").join(OLD_PROFILE));
    let first_us = profile
        .events()
        .map(|it| it["ts"].as_i64().unwrap())
        .min()
        .unwrap();
    let shift_us = first_us - trace.events[0].time_us;
    trace
        .events
        .iter_mut()
        .for_each(|it| it.time_us += shift_us);
    trace.annotations.clear();
    let recording = scratch.write_snapshot("moved.lowtide", &snapshot);
    let (said, file) = convert_with(&scratch, OLD_PROFILE, recording.to_str().unwrap());
    assert_eq!(said, "");
    assert_eq!(
        file.events().filter(|it| !is_own(it)).count(),
        profile.events().count()
    );
    let times = file.own_events().filter_map(|it| it["ts"].as_f64());
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
    let first = first_us as f64;
    assert!(times.fold(f64::MAX, f64::min) - first < 1.0);
    check_slices(&file);
}

#[test]
fn a_recording_without_times_has_one_event_in_each_microsecond() {
    let scratch = Scratch::new("perfetto-untimed");
    let recording = small("torch21.pickle");
    let path = scratch.path("untimed.perfetto.json");
    let output = lowtide()
        .args(["convert", &recording])
        .arg(&path)
        .output()
        .unwrap();
    assert!(stderr(&output).contains("each event takes a microsecond"));
    let file = File::read(&path);
    assert_eq!(file.file.get("baseTimeNanoseconds"), None);
    check_slices(&file);
    check_counters(&recording, &file);
    let arguments = [
        "convert",
        "--profile",
        PROFILE,
        &recording,
        path.to_str().unwrap(),
    ];
    let message = fail(&arguments);
    assert!(message.contains("no times are recorded"), "{message}");
}

#[test]
fn files_that_are_no_profiles_are_refused_in_one_line() {
    let scratch = Scratch::new("perfetto-refused");
    let output = scratch.path("out.perfetto.json");
    let output = output.to_str().unwrap();
    let whole = fs::read(common::sample("").join(PROFILE)).unwrap();
    let mut json = Vec::new();
    GzDecoder::new(&*whole).read_to_end(&mut json).unwrap();
    let nested = "[".repeat(1 << 20);
    let mut corrupt = whole.clone();
    *corrupt.last_mut().unwrap() ^= 1;
    for (name, contents, expected) in [
        ("cut.json", &json[..json.len() / 2], "cut off"),
        (
            "in_string.json",
            b"{\"traceEvents\": [{\"name\": \"a",
            "cut off",
        ),
        ("cut.json.gz", &whole[..whole.len() / 2], "cut off"),
        ("bad.json.gz", &corrupt, "corrupt"),
        ("empty.json", b"", "is no profile"),
        ("object.json", b"{}", "is no profile"),
        ("list.json", b"[{\"traceEvents\": []}]", "is no profile"),
        ("text.json", b"\"traceEvents\": [", "cut off"),
        ("nested.json", nested.as_bytes(), "cut off"),
        ("binary.json", &[0xff; 100], "is no profile"),
    ] {
        let profile = scratch.write(name, contents);
        let message = fail(&[
            "convert",
            "--profile",
            profile.to_str().unwrap(),
            TRAINING,
            output,
        ]);
        assert!(
            message.contains(name) && message.contains(expected),
            "{message}"
        );
    }
    let message = fail(&["convert", "--profile", "no-such-file", TRAINING, output]);
    assert!(
        message.starts_with("no-such-file: No such file"),
        "{message}"
    );
    let message = fail(&["convert", "--profile", PROFILE, TRAINING, "out.pickle"]);
    assert!(
        message.contains("--profile is for a file that Perfetto opens"),
        "{message}"
    );
    let own = scratch.write("own.perfetto.json", &json);
    let own = own.to_str().unwrap();
    let message = fail(&["convert", "--profile", own, TRAINING, own]);
    assert!(
        message.contains("is the recording itself") || message.contains("itself"),
        "{message}"
    );
    let message = fail(&["convert", &small("segments_only.pickle"), output]);
    assert!(message.contains("no allocation is recorded"), "{message}");
    assert!(!Path::new(output).exists());
}

#[test]
fn a_profile_without_events_takes_those_of_the_recording() {
    let scratch = Scratch::new("perfetto-empty");
    let profile = scratch.write(
        "profile.json",
        r#"{"traceEvents": [ ], "baseTimeNanoseconds": 1795981000000000000, "odd": NaN}"#,
    );
    let path = scratch.path("out.perfetto.json");
    let profile = profile.to_str().unwrap();
    run(&[
        "convert",
        "--profile",
        profile,
        TRAINING,
        path.to_str().unwrap(),
    ]);
    let text = fs::read_to_string(&path).unwrap();
    let file: Value = serde_json::from_str(&text.replace("NaN", "0")).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    assert!(events.iter().all(is_own) && events.len() > 500);
}
