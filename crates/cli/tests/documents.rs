//! The outputs that the documents show are what the command prints.
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs;

use common::{lowtide, mask_columns, run, run_json, sample};

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

/// Returns the output of the commands of `lowtide` in a document's block, on a recording of this repository.
fn printed_by(block: &str) -> Option<String> {
    let words = block.replace("\\\n", " ");
    let mut words = words.split_whitespace();
    if block
        .lines()
        .filter(|line| line.starts_with("lowtide "))
        .count()
        != 1
        || words.next() != Some("lowtide")
    {
        return None;
    }
    let arguments: Vec<&str> = words.collect();
    let reads = ["summary", "leaks", "diff", "advise", "replay", "check"];
    if !reads.contains(&arguments[0]) || arguments.iter().any(|word| word.ends_with("job.pickle")) {
        return None;
    }
    let output = lowtide()
        .current_dir(sample(".."))
        .args(&arguments)
        .output()
        .unwrap();
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_tutorials_show_what_the_commands_print() {
    let masked = |text: &str| mask_columns(text, &["host ns/op"]);
    let mut compared = 0;
    for name in [
        "docs/tutorials/out-of-memory.md",
        "docs/tutorials/recording.md",
        "docs/questions.md",
    ] {
        let text = read(name);
        // Outside and inside of fences by turns.
        let blocks = text.split("\n```").skip(1).step_by(2);
        let mut printed = Vec::new();
        for block in blocks {
            let (kind, block) = block.split_once('\n').unwrap();
            match kind {
                "" => printed.extend(printed_by(block)),
                "text" if !printed.is_empty() => {
                    let is_shown =
                        |printed: &String| masked(printed).contains(masked(block).trim_end());
                    assert!(
                        printed.iter().any(is_shown),
                        "{name}:\n{block}\n{printed:#?}"
                    );
                    compared += 1;
                }
                _ => {}
            }
        }
    }
    assert!(compared >= 10, "{compared}");
}
