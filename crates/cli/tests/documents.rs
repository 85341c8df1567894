//! The outputs that the documents show are what the command prints.
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs;

use common::{mask_columns, run, run_json, sample};

const LLAMA: &str = "llama_varlen.pickle.zst";

fn read(document: &str) -> String {
    fs::read_to_string(sample("..").join(document)).unwrap()
}

/// Returns the part of a document's fenced block from its first line that begins so.
fn shown(document: &str, beginning: &str) -> String {
    let text = read(document);
    let start = text.find(&format!("\n{beginning}")).unwrap() + 1;
    text[start..].split("\n```").next().unwrap().to_owned()
}

#[test]
fn the_readme_shows_a_replay() {
    let shown = shown("README.md", &format!("traces/{LLAMA}, device 0"));
    let printed = format!("traces/{}", run(&["replay", LLAMA]));
    let masked = |text: &str| mask_columns(text, &["host ns/op"]);
    assert_eq!(masked(&shown), masked(&printed));
}

#[test]
fn the_page_about_replays_shows_an_advice() {
    let shown = shown("docs/replay.md", "With PyTorch's default settings this job");
    let printed = run(&["advise", LLAMA]);
    assert!(printed.contains(&shown), "{shown}\n{printed}");
}

/// A row has the ratio and the calls for memory of each sample.
#[test]
fn the_page_about_replays_compares_the_strategies() {
    let page = read("docs/replay.md");
    let rows = page.lines().map(|line| line.split('|').collect::<Vec<_>>());
    let rows: Vec<_> = rows.filter(|cells| cells.len() == 8).collect();
    for (cell, name) in (2..).zip(["mnist_mlp", "gpt2_train", "llama_varlen"]) {
        let replays = run_json(&["replay", &format!("{name}.pickle.zst"), "--json"]);
        for result in replays["results"].as_array().unwrap() {
            let [strategy, config] =
                ["strategy", "config"].map(|key| result[key].as_str().unwrap());
            let label = format!("{strategy}:{config}");
            let label = format!("`{}`", label.trim_end_matches(':'));
            let row = rows.iter().find(|cells| cells[1].contains(&label));
            let row = row.unwrap_or_else(|| panic!("no row for {label}"));
            let calls = ["device_allocs", "maps"].map(|key| result[key].as_u64().unwrap());
            let ratio = result["reserved_ratio"].as_f64().unwrap();
            let figures = format!("{ratio:.3} {}", calls.iter().sum::<u64>());
            assert_eq!(
                row[cell].replace(',', "").trim(),
                figures,
                "{label}, {name}"
            );
        }
    }
}
