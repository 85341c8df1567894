//! `lowtide advise`.

mod common;

use common::{
    GPT2, Scratch, lowtide, mask_columns, read_sample, run, run_json, stderr, without_beginning,
};
use lowtide_core::{Action, Bytes, DeviceAddress, Event};
use lowtide_trace::TraceEvent;
use serde_json::Value;

/// A job recorded with expandable segments. The path is relative to the directory of the samples.
const EXPANDABLE: &str = "../crates/replay/tests/data/multistream.exp.pickle.gz";

/// Returns the path of the sample with `conf` as its recorded settings.
fn recorded_with(scratch: &Scratch, conf: &str) -> String {
    let mut snapshot = read_sample(GPT2);
    snapshot.traces[0].settings = lowtide_trace::AllocatorSettings {
        conf: conf.into(),
        ..Default::default()
    };
    let path = scratch.write_snapshot("recorded.lowtide", &snapshot);
    path.display().to_string()
}

#[test]
fn the_advice_is_something_to_paste() {
    let text = run(&["advise", GPT2]);
    let (advice, others) = text.split_once("\nother settings").unwrap();
    let advice: Vec<&str> = advice
        .lines()
        .filter(|line| !line.contains("driver time"))
        .collect();
    insta::assert_snapshot!(advice.join("\n"));
    let others = format!("other settings{others}");
    let others = mask_columns(&others, &["driver time", "of job"]);
    insta::assert_snapshot!(others);
}

/// A request failed while the device had memory: what is advised has to fit in the job's limit.
#[test]
fn the_limit_of_a_job_is_inferred() {
    let scratch = Scratch::new("limit");
    // Notes are on standard error.
    let advise = |arguments: &[&str]| {
        let output = lowtide().arg("advise").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stdout).unwrap()
    };
    let json = |arguments: &[&str]| -> Value {
        let text = advise(&[arguments, &["--json"]].concat());
        serde_json::from_str(&text).unwrap()
    };
    let held = json(&[GPT2])["now"]["peak_reserved_bytes"].clone();
    let mut snapshot = read_sample(GPT2);
    let left = 100 << 30;
    let mut refused = snapshot.traces[0].events[0];
    refused.event = Event {
        action: Action::OutOfMemory,
        address: DeviceAddress(left),
        size: Bytes::gib(1),
        ..refused.event
    };
    snapshot.traces[0].events.push(refused);
    let path = scratch.write_snapshot("limited.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    assert_eq!(json(&[path])["capacity_bytes"], held);
    let text = advise(&[path]);
    let line = ", as a request of 1.00 GiB failed while the device had 100.00 GiB left; ";
    assert!(text.contains(line), "{text}");
    let chosen = json(&[path, "--capacity", "64T"]);
    assert_eq!(chosen["capacity_bytes"], 64_u64 << 40);
    assert!(!advise(&[path, "--capacity", "64T"]).contains("the job had a limit"));
    // A request for more than the device had left says nothing about a limit.
    snapshot.traces[0].events.pop();
    refused.event.size = Bytes(left + 1);
    snapshot.traces[0].events.push(refused);
    let path = scratch.write_snapshot("full.lowtide", &snapshot);
    assert_eq!(
        json(&[path.to_str().unwrap()])["capacity_bytes"],
        Value::Null
    );
}

#[test]
fn json_has_now_and_best_and_all_others() {
    let advice = run_json(&["advise", GPT2, "--json"]);
    let keys: Vec<&String> = advice.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "best",
            "capacity_bytes",
            "cautions",
            "now",
            "others",
            "saved_bytes",
            "tide",
            "trace"
        ]
    );
    assert_eq!(advice["capacity_bytes"], Value::Null);
    assert_eq!(advice["now"]["conf"], "");
    let best = &advice["best"];
    assert_eq!(best["conf"], "expandable_segments:True");
    assert_eq!(best["config"], "expandable_segments:True");
    let peak = |entry: &Value| entry["peak_reserved_bytes"].as_u64().unwrap();
    assert_eq!(
        advice["saved_bytes"].as_u64(),
        Some(peak(&advice["now"]) - peak(best))
    );
    let others = advice["others"].as_array().unwrap();
    assert!(others.len() > 10);
    assert!(others.iter().all(|other| other["conf"] != best["conf"]));
}

#[test]
fn what_is_best_already_is_kept() {
    let text = run(&["advise", EXPANDABLE]);
    assert!(
        text.contains("With the settings it had, expandable_segments:True, this job takes "),
        "{text}"
    );
    assert!(
        text.contains("about the best that PyTorch's allocator can do"),
        "{text}"
    );
    assert!(!text.contains("PYTORCH_CUDA_ALLOC_CONF="), "{text}");
}

#[test]
fn settings_of_other_things_stay() {
    let scratch = Scratch::new("stay");
    let conf = "max_split_size_mb:200,pinned_use_cuda_host_register:True,roundup_power2_divisions:[64:2,>:4]";
    let path = recorded_with(&scratch, conf);
    let advice = run_json(&["advise", &path, "--json"]);
    assert_eq!(advice["now"]["conf"], conf);
    assert_eq!(
        advice["best"]["conf"],
        "expandable_segments:True,pinned_use_cuda_host_register:True"
    );
}

#[test]
fn settings_of_other_things_stay_where_others_were_changed() {
    let scratch = Scratch::new("changed");
    let mut snapshot = read_sample(GPT2);
    let settings = &mut snapshot.traces[0].settings;
    settings.conf = "max_split_size_mb:200,pinned_use_cuda_host_register:True".into();
    settings.max_split_size = Some(None);
    let path = scratch.write_snapshot("changed.lowtide", &snapshot);
    let advice = run_json(&["advise", path.to_str().unwrap(), "--json"]);
    assert_eq!(advice["now"]["conf"], "pinned_use_cuda_host_register:True");
}

#[test]
fn segments_show_which_settings_there_were() {
    let scratch = Scratch::new("inferred");
    let mut snapshot = read_sample(EXPANDABLE);
    snapshot.traces[0].settings.expandable_segments = Some(false);
    let path = scratch.write_snapshot("inferred.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    let advice = run_json(&["advise", path, "--json"]);
    assert_eq!(advice["now"]["conf"], "expandable_segments:True");
    let verified = run_json(&["replay", path, "--verify", "--json"]);
    let verified = &verified["results"][0]["verified"];
    assert_eq!(verified["compared"], verified["same_address"]);

    // A job with both kinds of segments has a note about that.
    let mut mixed = read_sample(EXPANDABLE);
    let plain = read_sample(GPT2).traces.remove(0).events;
    let is_segment = |event: &&TraceEvent| event.event.action == Action::SegmentAlloc;
    let mut segment = *plain.iter().find(is_segment).unwrap();
    segment.event.address = DeviceAddress(1 << 30);
    let release = Event {
        action: Action::SegmentFree,
        ..segment.event
    };
    let release = TraceEvent {
        event: release,
        ..segment
    };
    mixed.traces[0].events.splice(..0, [segment, release]);
    let path = scratch.write_snapshot("mixed.lowtide", &mixed);
    let output = lowtide()
        .args(["replay", path.to_str().unwrap(), "--verify"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let note = "the job had expandable segments and others; all of it is replayed with \
                expandable_segments:True";
    assert!(stderr(&output).contains(note), "{}", stderr(&output));
}

#[test]
fn completing_comes_first_where_memory_is_short() {
    let text = run(&["advise", GPT2, "--capacity", "1.05x"]);
    assert!(
        text.contains("With PyTorch's default settings this job runs out of memory at event"),
        "{text}"
    );
    assert!(
        text.contains("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"),
        "{text}"
    );
    assert!(text.contains("\nlets it complete, in 12."), "{text}");

    let text = run(&["advise", GPT2, "--capacity", "0.5x"]);
    assert!(
        text.contains("No setting of PyTorch's allocator fits the job"),
        "{text}"
    );
    let advice = run_json(&["advise", GPT2, "--capacity", "0.5x", "--json"]);
    assert_eq!(advice["best"], Value::Null);
    assert_eq!(advice["saved_bytes"], Value::Null);
}

#[test]
fn a_lost_beginning_is_said_before_the_advice() {
    let scratch = Scratch::new("advise-lost");
    let path = scratch.write_snapshot("cut.lowtide", &without_beginning(GPT2, 20_000));
    let text = run(&["advise", path.to_str().unwrap()]);
    let (_, after) = text.split_once("this job takes ").unwrap();
    let note = after.find("the recording's beginning is missing: the job had ");
    let advice = after.find("PYTORCH_CUDA_ALLOC_CONF=").unwrap();
    assert!(note.is_some_and(|note| note < advice), "{text}");
}

#[test]
fn a_recorded_option_that_is_not_known_is_named_and_not_proposed() {
    let scratch = Scratch::new("unknown");
    let path = recorded_with(&scratch, "max_split_size_mb:200,some_future_option:7");
    let note = "of the recording's own PYTORCH_CUDA_ALLOC_CONF, some_future_option:7 is not understood and left out\n";
    let check = |arguments: &[&str]| -> Value {
        let output = lowtide().args(arguments).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.ends_with(note) && said.lines().count() == 1, "{said}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let advice = check(&["advise", &path, "--json"]);
    assert_eq!(advice["now"]["config"], "max_split_size_mb:200");
    assert_eq!(
        advice["now"]["conf"],
        "max_split_size_mb:200,some_future_option:7"
    );
    assert_eq!(advice["best"]["conf"], "expandable_segments:True");
    let verified = check(&["replay", &path, "--verify", "--json"]);
    assert_eq!(verified["results"][0]["config"], "max_split_size_mb:200");
}

/// A recording's settings may contain text that a shell or a terminal interprets. A proposal contains only the part
/// that lowtide understands, as one word.
#[test]
fn what_is_to_be_pasted_is_one_word_of_known_options() {
    let scratch = Scratch::new("paste");
    let kept = "pinned_num_register_threads:2,expandable_segments_reserve_by_class:[a:0.5]";
    // A bracket that is not closed extends to the end.
    let hostile =
        "expandable_segments_reserve_by_class:[$(touch ran):0.5],x:$(touch ran)\u{1b}[1A\u{1b}[2K";
    let recorded = kept.replace(":2", ":\n2\t");
    let conf = format!("max_split_size_mb:200,{recorded},{hostile}");
    let path = recorded_with(&scratch, &conf);
    let output = lowtide().args(["advise", &path]).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let said = stderr(&output);
    let unknown = r", x:$(touch ran)\u{1b}[1A\u{1b}[2K is not understood and left out";
    assert!(said.contains(unknown), "{said}");
    assert!(
        said.contains(": expandable_segments_reserve_by_class:[$(touch ran):0.5] is not proposed"),
        "{said}"
    );
    let line = text.lines().find(|line| line.starts_with("    ")).unwrap();
    let script = format!("{line}; printf %s \"$PYTORCH_CUDA_ALLOC_CONF\"");
    let mut shell = std::process::Command::new("sh");
    let output = shell
        .arg("-c")
        .arg(script)
        .current_dir(scratch.path(""))
        .output();
    let pasted = String::from_utf8(output.unwrap().stdout).unwrap();
    assert_eq!(pasted, format!("expandable_segments:True,{kept}"));
    assert!(!scratch.path("ran").exists());
}
