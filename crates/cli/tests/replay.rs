//! `lowtide replay`, from the command line to its output.

mod common;

use std::fs;
use std::process::Stdio;

use common::{
    GPT2, Scratch, fail, failure, lowtide, mask_columns, read_sample, run, run_json,
    run_with_stdin, sample, stderr, without_beginning,
};
use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot,
    Stream,
};
use lowtide_trace::{Snapshot, Trace, TraceEvent};
use serde_json::{Value, json};

/// Strategies whose outcomes PyTorch itself confirms, except for `direct`.
const THREE: [&str; 6] = [
    "--strategy",
    "direct",
    "--strategy",
    "caching",
    "--strategy",
    "caching:expandable_segments:True",
];

fn replay<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&["replay", GPT2], arguments].concat()
}

#[test]
fn the_table_has_the_winner_first() {
    let text = run(&replay(&THREE));
    let text = mask_columns(&text, &["driver time", "host ns/op"]);
    insta::assert_snapshot!(text);
}

#[test]
fn what_does_not_fit_comes_last() {
    let text = run(&replay(&[&THREE[2..], &["--capacity", "1.05x"]].concat()));
    let text = mask_columns(&text, &["driver time", "host ns/op"]);
    insta::assert_snapshot!(text.lines().take(8).collect::<Vec<_>>().join("\n"));
}

#[test]
fn a_single_strategy_that_does_not_fit_says_what_the_program_would_see() {
    let text = run(&replay(&["--strategy", "caching", "--capacity", "10GiB"]));
    assert!(
        text.contains("caching does not fit the job in 10.00 GiB\n"),
        "{text}"
    );
    assert!(
        text.contains("\nCUDA out of memory. Tried to allocate"),
        "{text}"
    );
}

#[test]
fn what_takes_the_whole_device_asks_how_large_it_is() {
    let notes = |arguments: &[&str]| stderr(&lowtide().args(replay(arguments)).output().unwrap());
    let whole = ["--strategy", "bfc:allow_growth:False"];
    let note = "bfc:allow_growth:False takes the whole device with its first request";
    assert!(notes(&whole).contains(note), "{}", notes(&whole));
    assert_eq!(notes(&[&whole[..], &["--capacity", "16GiB"]].concat()), "");
    assert_eq!(notes(&["--strategy", "bfc"]), "");
}

/// If only the beginning of a file is left, no second line says that its end is missing.
#[test]
fn a_file_that_ends_before_the_first_allocation_is_one_line() {
    let scratch = Scratch::new("replay-no-allocation");
    let whole = scratch.write_snapshot("whole.lowtide", &read_sample("mnist_mlp.pickle.zst"));
    let contents = fs::read(&whole).unwrap();
    let path = scratch.write("begun.lowtide", &contents[..40]);
    let error = fail(&["replay", path.to_str().unwrap()]);
    let expected = "begun.lowtide: the end is missing, and no allocation is recorded before it";
    assert!(error.ends_with(expected), "{error}");
    // `convert` accepts the file, and reports the missing end in a line of its own.
    let to = scratch.path("converted.lowtide");
    let output = lowtide()
        .arg("convert")
        .args([&path, &to])
        .output()
        .unwrap();
    assert!(
        output.status.success() && stderr(&output).contains("the end is missing"),
        "{output:?}"
    );
}

#[test]
fn json_has_the_documented_keys() {
    let report = run_json(&replay(&["--strategy", "caching", "--json"]));
    let keys = |value: &Value| -> Vec<String> {
        let object = value.as_object().unwrap();
        object.keys().cloned().collect()
    };
    let sorted = |text: &str| -> Vec<String> {
        let mut keys: Vec<String> = text.split(' ').map(str::to_owned).collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&report), ["results", "trace"]);
    assert_eq!(
        keys(&report["trace"]),
        sorted(
            "path device events allocs streams peak_live_bytes peak_live_pages_bytes \
             peak_requested_bytes peak_reserved_bytes strategy lost_beginning is_cut_off missed_events duration_us"
        )
    );
    assert_eq!(
        keys(&report["results"][0]),
        sorted(
            "strategy config completed oom_at_event peak_reserved_bytes peak_allocated_bytes \
             reserved_ratio device_allocs device_frees maps unmaps remapped_bytes retries \
             driver_time_us ns_per_op verified error"
        )
    );
}

#[test]
fn json_has_what_pytorch_took() {
    let report = run_json(&replay(&[&THREE[2..], &["--json"]].concat()));
    let trace = &report["trace"];
    assert_eq!(trace["path"], GPT2);
    assert_eq!(trace["allocs"], 39_146);
    assert_eq!(trace["device"], 0);
    // The results are in the order in which the strategies were named.
    let [default, expandable] = [&report["results"][0], &report["results"][1]];
    assert_eq!(default["strategy"], "caching");
    assert_eq!(default["config"], "");
    assert_eq!(default["completed"], true);
    assert_eq!(default["oom_at_event"], Value::Null);
    assert_eq!(default["verified"], Value::Null);
    assert_eq!(default["device_allocs"], 145);
    assert_eq!(expandable["config"], "expandable_segments:True");
    assert_eq!(expandable["maps"], 147);
}

#[test]
fn a_job_that_does_not_fit_is_a_result() {
    let report = run_json(&replay(&[
        "--strategy",
        "caching",
        "--capacity",
        "1.02x",
        "--json",
    ]));
    let result = &report["results"][0];
    assert_eq!(result["completed"], false);
    assert!(result["oom_at_event"].is_u64());
}

#[test]
fn a_limit_that_was_searched_for_is_named() {
    let recording = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../replay/tests/data/gnn.gc.pickle.gz"
    );
    let text = run(&["replay", recording, "--strategy", "caching", "--verify"]);
    let line = text.lines().find(|line| line.starts_with("verified"));
    let line = line.expect("a line on the verification");
    assert!(
        line.contains("at the recorded address under a limit of 2."),
        "{line}"
    );
    assert!(line.ends_with(" GiB, found by trying"), "{line}");
    let report = run_json(&["replay", recording, "--verify", "--json"]);
    let limit = report["results"][0]["verified"]["limit_bytes"].as_u64();
    assert!(limit.is_some_and(|limit| limit > 2 << 30), "{report}");
}

/// Graphs have private pools. A recording by torch 2.11 names only the pools that exist at the end.
#[test]
fn pools_inferred_from_addresses_are_counted() {
    let check = |name: &str, pools, end: &str| {
        let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../replay/tests/data/");
        let recording = format!("{data}{name}.pickle.gz");
        let text = run(&["replay", &recording, "--verify"]);
        let line = text.lines().find(|line| line.starts_with("verified"));
        assert!(line.is_some_and(|line| line.ends_with(end)), "{text}");
        let report = run_json(&["replay", &recording, "--verify", "--json"]);
        assert_eq!(report["results"][0]["verified"]["inferred_pools"], pools);
    };
    let inferred = "at the recorded address, in 4 pools inferred from addresses";
    check("graphs", json!(4), inferred);
    // A job without pools has one.
    check("rl", json!(1), "at the recorded address");
    // If no memory was released, the recording names every pool.
    check("varlen.split64", Value::Null, "at the recorded address");
}

#[test]
fn every_address_of_the_recording_is_verified() {
    let report = run_json(&replay(&["--verify", "--json"]));
    let all = json!({"compared": 39_146, "same_address": 39_146, "first_difference": null});
    assert_eq!(report["results"][0]["verified"], all);
    let text = run(&replay(&["--verify"]));
    assert!(
        text.contains("verified caching: 39,146 of 39,146 blocks at the recorded address\n"),
        "{text}"
    );
}

#[test]
fn a_lost_beginning_is_said_with_what_was_reserved() {
    let scratch = Scratch::new("replay-lost");
    let path = scratch.write_snapshot("cut.lowtide", &without_beginning(GPT2, 20_000));
    let path = path.to_str().unwrap();
    let note = "the recording's beginning is missing: the job had ";
    assert!(run(&["replay", path, "--strategy", "caching"]).contains(note));
    // A verified replay starts with the recorded blocks.
    assert!(!run(&["replay", path, "--verify"]).contains(note));

    let report = run_json(&["replay", path, "--verify", "--json"]);
    let lost = &report["trace"]["lost_beginning"];
    let (verified, peak) = (&report["results"][0], lost["peak_reserved_bytes"].as_u64());
    assert_eq!(verified["verified"]["first_difference"], Value::Null);
    assert_eq!(peak, verified["peak_reserved_bytes"].as_u64());
    assert!(lost["reserved_bytes"].as_u64() <= peak);
    assert_ne!(lost["reserved_bytes"], 0);

    let whole = run_json(&replay(&["--strategy", "caching", "--json"]));
    assert_eq!(whole["trace"]["lost_beginning"], Value::Null);
}

#[test]
fn a_difference_is_shown_and_is_a_result() {
    let verify = ["--verify", "--strategy", "caching:max_split_size_mb:20"];
    let text = run(&replay(&verify));
    assert!(text.contains("; first difference: event "), "{text}");
    let report = run_json(&replay(&[&verify[..], &["--json"]].concat()));
    assert!(report["results"][0]["verified"]["first_difference"].is_string());
}

#[test]
fn verification_follows_the_recorded_settings() {
    let scratch = Scratch::new("recorded-settings");
    let mut snapshot = read_sample(GPT2);
    // As if max_split_size_mb had been set while the job ran.
    snapshot.traces[0].settings.max_split_size = Some(Some(lowtide_core::Bytes::mib(64)));
    let path = scratch.write_snapshot("split.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    let report = run_json(&["replay", path, "--verify", "--json"]);
    assert_eq!(report["results"][0]["config"], "max_split_size_mb:64");

    // And as if expandable segments had been turned off.
    snapshot.traces[0].settings.conf = "expandable_segments:True".into();
    let path = scratch.write_snapshot("off.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    let report = run_json(&["replay", path, "--verify", "--json"]);
    assert_eq!(report["results"][0]["config"], "max_split_size_mb:64");
    let advice = run(&["advise", path]);
    assert!(
        advice.contains("With the settings it had, max_split_size_mb:64, "),
        "{advice}"
    );
}

#[test]
fn standard_input_is_a_recording() {
    let input = fs::read(sample(GPT2)).unwrap();
    let output = run_with_stdin(&["replay", "-", "--strategy", "caching", "--json"], &input);
    assert_eq!(stderr(&output), "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["trace"]["path"], "-");
    assert_eq!(report["trace"]["allocs"], 39_146);

    let message = failure(&run_with_stdin(&["replay", "-"], b"nothing of the kind"));
    assert!(message.starts_with("standard input: "), "{message}");
}

#[test]
fn one_device_of_several_is_chosen() {
    let scratch = Scratch::new("devices");
    let mut snapshot = read_sample(GPT2);
    let mut other = read_sample("mnist_mlp.pickle.zst").traces.remove(0);
    other.device = 3;
    snapshot.traces.push(other);
    let path = scratch.write_snapshot("two.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    let replay = ["replay", path, "--strategy", "caching", "--json"];

    let output = lowtide().args(replay).output().unwrap();
    assert_eq!(
        stderr(&output),
        format!(
            "lowtide: {path} has devices 0, 3; this is device 3, which has the most events (--device \
             chooses another)\n"
        )
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["trace"]["device"], 3);
    let report = run_json(&[&replay[..], &["--device", "0"]].concat());
    assert_eq!(report["trace"]["allocs"], 39_146);

    let message = fail(&[&replay[..], &["--device", "1"]].concat());
    assert_eq!(message, format!("{path}: has no device 1, only 0, 3"));
}

#[test]
fn requests_that_the_job_was_refused_are_said_to_be_served() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../replay/tests/data/gnn.cap.pickle.gz"
    );
    let said = |arguments: &[&str]| {
        let output = lowtide().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        stderr(&output)
    };
    let refusals = read_sample(path).traces[0]
        .events
        .iter()
        .filter(|recorded| recorded.event.action == Action::OutOfMemory)
        .count();
    assert!(refusals > 1);
    let note = format!(
        "lowtide: {path}: the job ran out of memory at {refusals} requests; a replay that has the memory serves those \
         and frees them at once\n"
    );
    let caching = ["replay", path, "--strategy", "caching"];
    assert_eq!(said(&caching), note);
    assert_eq!(said(&["advise", path]), note);
    assert_eq!(said(&[&caching[..], &["--verify"]].concat()), "");
}

#[test]
fn the_page_has_the_strategies_that_were_replayed() {
    let scratch = Scratch::new("report");
    let path = scratch.path("<b>report.html");
    let arguments = ["--capacity", "1.05x", "--html", path.to_str().unwrap()];
    run(&replay(&[&THREE[..], &arguments].concat()));
    let page = fs::read_to_string(&path).unwrap();
    assert!(page.starts_with("<!doctype html>"));
    let (_, summary) = page.split_once("id=\"lowtide-summary\">").unwrap();
    let (summary, _) = summary.split_once("</script>").unwrap();
    let summary: Value = serde_json::from_str(summary).unwrap();
    let trace = &summary["traces"][0];
    let strategies = trace["strategies"].as_array().unwrap();
    let mut labels: Vec<&str> = { strategies.iter() }
        .map(|strategy| strategy["label"].as_str().unwrap())
        .collect();
    labels.sort_unstable();
    let replayed = ["caching", "caching:expandable_segments:True", "direct"];
    assert_eq!(labels, replayed);
    let notes: Vec<&str> = { trace["replay_notes"].as_array().unwrap().iter() }
        .map(|note| note.as_str().unwrap())
        .collect();
    assert!(
        notes[0].starts_with("the simulated device has "),
        "{notes:?}"
    );
    let is_refused = |note: &&&str| note.starts_with("caching: out of memory at event ");
    assert_eq!(notes.iter().filter(is_refused).count(), 1, "{notes:?}");
    assert_eq!(scratch.names(), ["<b>report.html"]);
}

#[test]
fn a_report_that_cannot_be_written_is_an_error() {
    let message = fail(&replay(&[
        "--strategy",
        "caching",
        "--html",
        "no/such/directory/report.html",
    ]));
    assert_eq!(
        message,
        "no/such/directory/report.html: No such file or directory (os error 2)"
    );
}

#[test]
fn a_reader_may_have_seen_enough() {
    let mut child = lowtide()
        .args(replay(&["--strategy", "caching"]))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(stderr(&output), "");
    assert!(output.status.success());
}

#[test]
fn by_default_every_strategy_is_compared() {
    let report = run_json(&["replay", "mnist_mlp.pickle.zst", "--json"]);
    let results = report["results"].as_array().unwrap();
    let names: Vec<&str> = results
        .iter()
        .map(|result| result["strategy"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "tide", "caching", "bfc", "slab", "buddy", "pool", "direct", "caching"
        ]
    );
    let [live, pages] = ["peak_live_bytes", "peak_live_pages_bytes"]
        .map(|peak| report["trace"][peak].as_u64().unwrap());
    assert_eq!(pages, live.next_multiple_of(2 << 20));
    for result in results {
        assert_eq!(result["completed"], true, "{result}");
        // Reserved bytes are never below live bytes.
        assert!(
            result["peak_reserved_bytes"].as_u64().unwrap() >= live,
            "{result}"
        );
    }
}

/// Other threads may go on while PyTorch copies the events and then the segments.
#[test]
fn segments_that_are_newer_than_the_last_event() {
    let scratch = Scratch::new("newer");
    let mut snapshot = read_sample("gpt2_train.pickle.zst");
    let events = &mut snapshot.traces[0].events;
    let is_alloc = |event: &TraceEvent| event.event.action == Action::Alloc;
    let ends = events
        .iter()
        .enumerate()
        .filter(|(_, event)| is_alloc(event));
    let last = ends.rev().nth(20).unwrap().0;
    events.truncate(last + 1);
    let events = events.len();
    let path = scratch.write_snapshot("newer.lowtide", &snapshot);
    let path = path.to_str().unwrap();

    let output = lowtide()
        .args(["replay", path, "--verify", "--json"])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["trace"]["events"], events);
    assert_eq!(report["trace"]["lost_beginning"], Value::Null);
    let verified = &report["results"][0]["verified"];
    assert_eq!(verified["first_difference"], Value::Null);
    assert_eq!(verified["same_address"], verified["compared"]);
    insta::assert_snapshot!(stderr(&output).replace(path, "newer.lowtide"));
    // The converted recording has its events and segments from one moment.
    let converted = scratch.path("converted.pickle");
    let converted = converted.to_str().unwrap();
    let output = lowtide()
        .args(["convert", path, converted])
        .output()
        .unwrap();
    assert!(output.status.success());
    let output = lowtide()
        .args(["report", converted, "-o"])
        .arg(scratch.path("report.html"))
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(stderr(&output), "");
}

/// Returns a recording with a segment at an address where the simulator reserves ranges. With the recorded
/// addresses, a replay with expandable segments breaks off, and a replay without them does not.
fn breaking_off() -> Snapshot {
    let (reserved, other) = (1 << 48, 0x7f00_0000_0000);
    let size = Bytes::mib(20);
    let segment = |address| SegmentSnapshot {
        address: DeviceAddress(address),
        size,
        stream: Stream::DEFAULT,
        pool: MempoolId::DEFAULT,
        is_large: true,
        is_expandable: false,
        blocks: vec![BlockSnapshot {
            address: DeviceAddress(address),
            size,
            requested: size,
            status: BlockStatus::Allocated,
        }],
    };
    let events = [Action::SegmentAlloc, Action::Alloc].map(|action| Event {
        action,
        pool: MempoolId::DEFAULT,
        address: DeviceAddress(other),
        size,
        stream: Stream::DEFAULT,
    });
    let segments = vec![segment(other), segment(reserved)];
    Snapshot {
        traces: vec![Trace::recovered(0, events, segments).expect("it happened")],
        ..Snapshot::default()
    }
}

#[test]
fn a_strategy_that_breaks_off_leaves_the_others_in_the_table() {
    let scratch = Scratch::new("replay-breaking-off");
    let path = scratch.write_snapshot("job.lowtide", &breaking_off());
    let path = path.to_str().unwrap();
    let both = [
        "replay",
        path,
        "--verify",
        "--strategy",
        "caching:expandable_segments:True",
        "--strategy",
        "caching",
    ];
    let table = run(&both);
    let row = |label: &str| {
        let row = table.lines().find(|line| line.starts_with(label));
        row.unwrap_or_else(|| panic!("{label}: {table}")).to_owned()
    };
    assert!(
        row("caching:expandable_segments:True ").contains('–'),
        "{table}"
    );
    assert!(!row("caching ").contains('–'), "{table}");
    let reason = "caching:expandable_segments:True: the replay broke off at event 2: cuMemMap";
    assert!(
        row("caching:expandable_segments:True:").starts_with(reason),
        "{table}"
    );

    let json = run_json(&[&both[..], &["--json"]].concat());
    let results = &json["results"];
    let error = results[0]["error"].as_str().unwrap();
    assert!(
        error.starts_with("the replay broke off at event 2"),
        "{json}"
    );
    assert_eq!(results[0]["strategy"], "caching");
    assert_eq!(results[0]["config"], "expandable_segments:True");
    assert_eq!(results[0]["completed"], false);
    assert_eq!(results[1]["error"], Value::Null);
    assert_eq!(results[1]["completed"], true);

    // If no strategy is left, it is an error.
    let line = fail(&both[..5]);
    assert!(line.contains("job.lowtide: caching:expandable_segments:True: the replay broke off"));
}
