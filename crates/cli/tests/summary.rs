//! `lowtide summary`.

mod common;

use common::{GPT2, Scratch, fail, lowtide, read_sample, run, run_json, stderr};
use lowtide_core::{Action, Bytes, DeviceAddress};
use lowtide_trace::Snapshot;

/// A small training with a leak, recorded with PyTorch's default stacks.
const LEAK: &str = "../crates/cli/tests/data/leak.debian.pickle.gz";

#[test]
fn a_training_is_told_on_one_screen() {
    let text = run(&["summary", LEAK]);
    insta::assert_snapshot!(text);
    assert!(text.lines().count() <= 45);
}

#[test]
fn the_document_shows_a_summary() {
    let shown = include_str!("../../../docs/summary.md");
    let printed = run(&["summary", LEAK]).replace("../crates/", "crates/");
    assert!(
        shown.contains(&format!("```text\n{printed}```")),
        "{printed}"
    );
}

#[test]
fn the_sums_are_the_peaks() {
    let summaries = run_json(&["summary", "--json", LEAK]);
    let summary = &summaries[0];
    let peak = summary["trace"]["peak_live_bytes"].as_u64().unwrap();
    let sum = |values: Vec<&serde_json::Value>| -> u64 {
        values
            .iter()
            .map(|value| value["bytes"].as_u64().unwrap())
            .sum()
    };
    let categories = summary["categories"].as_object().unwrap();
    assert_eq!(sum(categories.values().collect()), peak);
    assert_eq!(
        sum(summary["sites"].as_array().unwrap().iter().collect()),
        peak
    );
    for moment in ["peak_live", "peak_reserved"] {
        let moment = &summary[moment];
        let causes = moment["causes"].as_object().unwrap().values();
        let rest: u64 = causes.map(|bytes| bytes.as_u64().unwrap()).sum();
        let live = moment["live_bytes"].as_u64().unwrap();
        assert_eq!(live + rest, moment["reserved_bytes"].as_u64().unwrap());
    }
    assert_eq!(summary["growth"]["leaks"], 1);
    let site = summary["growth"]["site"].as_str().unwrap();
    assert!(
        site.starts_with("remember (") && site.ends_with("› clone"),
        "{site}"
    );
}

#[test]
fn without_stacks_it_says_how_to_record_them() {
    let text = run(&["summary", GPT2]);
    assert!(text.contains("\nno stacks are recorded"), "{text}");
    assert!(!text.contains("activations"), "{text}");
    assert!(
        text.contains("requests of 1.53 GiB in stream 0\n"),
        "{text}"
    );
    assert_eq!(
        run_json(&["summary", "--json", GPT2])[0]["categories"],
        serde_json::Value::Null
    );
}

#[test]
fn several_recordings_are_compared_with_the_most_reserved_first() {
    let text = run(&["summary", "mnist_mlp.pickle.zst", GPT2]);
    insta::assert_snapshot!(text);
}

#[test]
fn each_device_of_a_recording_has_a_row() {
    let scratch = Scratch::new("summary-devices");
    let mut snapshot = read_sample("mnist_mlp.pickle.zst");
    let mut second = snapshot.traces[0].clone();
    second.device = 1;
    snapshot.traces.push(second);
    let path = scratch.write_snapshot("two.lowtide", &snapshot);
    let rows = run(&["summary".as_ref(), path.as_os_str()]);
    assert_eq!(rows.matches("two.lowtide").count(), 4, "{rows}");
    let one = run(&[
        "summary".as_ref(),
        "--device".as_ref(),
        "1".as_ref(),
        path.as_os_str(),
    ]);
    assert!(one.contains("two.lowtide, device 1: "), "{one}");
    let none = [path.to_str().unwrap(), "--device", "2"];
    assert!(fail(&[&["summary"], &none[..]].concat()).ends_with("has no device 2, only 0, 1"));
}

#[test]
fn a_job_that_died_is_told_what_would_have_served_it() {
    let scratch = Scratch::new("summary-died");
    let mut snapshot = read_sample("llama_varlen.pickle.zst");
    let trace = &mut snapshot.traces[0];
    let peak = trace.peak_reserved_bytes();
    // The request after the peak fails, although the device has memory.
    let reserved = trace
        .reserved_bytes()
        .position(|bytes| bytes == peak)
        .unwrap();
    trace.events.truncate(reserved + 1);
    let mut refused = trace.events[reserved];
    refused.event.action = Action::OutOfMemory;
    refused.event.size = Bytes::gib(2);
    refused.event.address = DeviceAddress(100 << 30);
    trace.events.push(refused);
    trace.segments.clear();
    let path = scratch.write_snapshot("died.lowtide", &Snapshot { ..snapshot });
    let output = lowtide().arg("summary").arg(&path).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(stderr(&output), "");
    assert!(
        text.contains("\nthe job had a limit between 23.89 GiB and 25.89 GiB"),
        "{text}"
    );
    assert!(
        text.contains("\nout of memory: 1 request; the last, of 2.00 GiB, after event "),
        "{text}"
    );
    assert!(
        text.contains(" was live of 23.89 GiB reserved, the largest free block "),
        "{text}"
    );
    assert!(
        text.contains("\nwith other settings, under that limit:\n"),
        "{text}"
    );
    assert!(text.contains("\n  lowtide advise "), "{text}");
}
