//! The outputs that the documents show are what the command prints.
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs;

use common::{lowtide, mask_columns, run_json, sample, stderr};

/// Returns the fenced block of a document that follows, or begins with, a line.
fn block_after(document: &str, line: &str) -> String {
    let text = fs::read_to_string(sample("..").join(document)).unwrap();
    let (_, rest) = text.split_once(&format!("{line}\n")).unwrap();
    // The line is in a block of its own if another one follows at once.
    let block = rest.strip_prefix("```\n\n```text\n").unwrap_or(rest);
    let (block, _) = block.split_once("\n```").unwrap();
    block.to_owned()
}

/// Returns what the command prints at the root of the project.
fn printed(arguments: &[&str]) -> String {
    let mut command = lowtide();
    let output = command.current_dir(sample("..")).args(arguments).output();
    let output = output.unwrap();
    assert_eq!(stderr(&output), "");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_readme_shows_a_replay() {
    let trace = "traces/llama_varlen.pickle.zst";
    let shown = block_after(
        "README.md",
        &format!("cargo run --release -- replay {trace}"),
    );
    let masked = |text: &str| mask_columns(text, &["host ns/op"]);
    assert_eq!(masked(&shown), masked(&printed(&["replay", trace])));
}

#[test]
fn the_page_about_replays_shows_an_advice() {
    let trace = "traces/llama_varlen.pickle.zst";
    let shown = block_after("docs/replay.md", &format!("$ lowtide advise {trace}"));
    let advice = printed(&["advise", trace]);
    let (_, advice) = advice.split_once("\n\n").unwrap();
    assert!(advice.starts_with(&shown), "{shown}\n{advice}");
}

/// A row has the ratio and the calls for memory of each sample.
#[test]
fn the_page_about_replays_compares_the_strategies() {
    let page = fs::read_to_string(sample("../docs/replay.md")).unwrap();
    let samples = ["mnist_mlp", "gpt2_train", "llama_varlen"];
    let mut rows: Vec<(String, [String; 3])> = Vec::new();
    for (column, name) in samples.iter().enumerate() {
        let replays = run_json(&["replay", &format!("{name}.pickle.zst"), "--json"]);
        for result in replays["results"].as_array().unwrap() {
            let calls = ["device_allocs", "maps"].map(|key| result[key].as_u64().unwrap());
            let ratio = result["reserved_ratio"].as_f64().unwrap();
            let figures = format!("{ratio:.3}, {}", with_commas(calls.iter().sum()));
            let [strategy, config] =
                ["strategy", "config"].map(|key| result[key].as_str().unwrap());
            let label = [strategy, config].join(":");
            let label = format!("`{}`", label.trim_end_matches(':'));
            match rows.iter_mut().find(|(known, _)| *known == label) {
                Some((_, row)) => row[column] = figures,
                None => {
                    let mut row = [const { String::new() }; 3];
                    row[column] = figures;
                    rows.push((label, row));
                }
            }
        }
    }
    assert_eq!(rows.len(), 8);
    for (label, row) in rows {
        let cells = format!(" | {} | ", row.join(" | "));
        let line = page.lines().find(|line| {
            let first = line.split('|').nth(1).unwrap_or_default();
            line.starts_with('|') && first.contains(&label)
        });
        let line = line.unwrap_or_else(|| panic!("no row for {label}"));
        assert!(line.contains(&cells), "{label}: {cells}\n{line}");
    }
}

fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups = groups.map(|group| str::from_utf8(group).unwrap());
    groups.collect::<Vec<_>>().join(",")
}
