//! `lowtide advise`.

mod common;

use common::{GPT2, Scratch, mask_columns, read_sample, run, run_json};
use serde_json::Value;

/// Returns the sample's path as recorded with `conf`.
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
    let others = mask_columns(&format!("other settings{others}"), &["driver time"]);
    insta::assert_snapshot!(others);
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
    let scratch = Scratch::new("keep");
    let path = recorded_with(&scratch, "expandable_segments:True");
    let text = run(&["advise", &path]);
    assert!(
        text.contains(
            "With the settings it had, expandable_segments:True, this job takes 13.54 GiB"
        ),
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
