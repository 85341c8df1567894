//! Rules for the project's documents, such as README.md and ARCHITECTURE.md.

use super::finding::Finding;
use super::tree::{Tree, extension};

/// The documents that must exist.
const GUIDES: [&str; 3] = ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"];

const LIFE: &str = "Life of one allocation";
const LIFE_STEPS_MAX: usize = 8;

/// A file or directory that a guide or a document in `docs` names in backticks must exist.
///
/// A crate's file may be named relative to the crate: `core/allocator.rs` means `crates/core/src/allocator.rs`.
/// Anything after `::` is ignored.
pub(super) fn paths_exist(tree: &Tree) -> Vec<Finding> {
    let missing = GUIDES.iter().filter(|guide| tree.text(guide).is_none());
    let mut findings: Vec<Finding> = missing
        .map(|guide| Finding::in_file(guide, "is missing"))
        .collect();
    let is_guide = |path: &str| GUIDES.contains(&path) || path.starts_with("docs/");
    for (guide, text) in tree
        .texts()
        .filter(|(path, _)| is_guide(path) && extension(path) == "md")
    {
        for (index, line) in prose(text) {
            // The text between an odd and an even backtick.
            for span in line.split('`').skip(1).step_by(2) {
                if let Some(path) = missing_path(tree, span) {
                    let message = format!("`{path}` does not exist");
                    findings.push(Finding::at_line(guide, index + 1, message));
                }
            }
        }
    }
    findings
}

/// The walk through one allocation must have few numbered steps.
pub(super) fn life_of_one_allocation_is_short(tree: &Tree) -> Vec<Finding> {
    let guide = "ARCHITECTURE.md";
    // `paths_exist` reports that it is missing.
    let Some(text) = tree.text(guide) else {
        return Vec::new();
    };
    let mut lines = prose(text).skip_while(|(_, line)| !is_life_heading(line));
    let Some((index, heading)) = lines.next() else {
        return vec![Finding::in_file(
            guide,
            format!("has no section \"{LIFE}\""),
        )];
    };
    let level = heading_level(heading);
    let ends = |line: &str| (1..=level).contains(&heading_level(line));
    let steps = lines
        .take_while(|(_, line)| !ends(line))
        .filter(|(_, line)| is_step(line))
        .count();
    if (1..=LIFE_STEPS_MAX).contains(&steps) {
        return Vec::new();
    }
    let message = format!("\"{LIFE}\" takes {steps} numbered steps, not 1 to {LIFE_STEPS_MAX}");
    vec![Finding::at_line(guide, index + 1, message)]
}

/// The changelog must have a section for the next release.
pub(super) fn changes_are_listed(tree: &Tree) -> Vec<Finding> {
    let path = "CHANGELOG.md";
    let is_unreleased = |line: &str| {
        let heading = line.strip_prefix("## ");
        heading.is_some_and(|text| text.ends_with(" (unreleased)"))
    };
    match tree.text(path) {
        None => vec![Finding::in_file(path, "is missing")],
        Some(text) if text.lines().any(is_unreleased) => Vec::new(),
        Some(_) => vec![Finding::in_file(
            path,
            "has no section such as `## 0.1.0 (unreleased)`",
        )],
    }
}

/// The manifests offer two licences, so both texts must exist.
pub(super) fn licences_are_here(tree: &Tree) -> Vec<Finding> {
    ["LICENSE-APACHE", "LICENSE-MIT"]
        .into_iter()
        .filter(|path| tree.text(path).is_none_or(str::is_empty))
        .map(|path| Finding::in_file(path, "is missing"))
        .collect()
}

/// Returns the lines outside fenced blocks, with their index. A command in a fenced block may name the reader's
/// files.
pub(super) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_fenced = false;
    text.lines().enumerate().filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        !is_fence && !is_fenced
    })
}

/// Returns the number of `#` at the start of a heading, or 0 for another line.
pub(super) fn heading_level(line: &str) -> usize {
    let level = line.bytes().take_while(|&byte| byte == b'#').count();
    if line[level..].starts_with(' ') {
        level
    } else {
        0
    }
}

fn is_life_heading(line: &str) -> bool {
    heading_level(line) > 0 && line.to_lowercase().contains(&LIFE.to_lowercase())
}

/// Returns whether a line is a numbered step: it starts with the number, without indentation.
fn is_step(line: &str) -> bool {
    line.split_once(". ")
        .is_some_and(|(number, _)| number.parse::<u32>().is_ok())
}

/// Returns the path in a span of code if it names a file of the project that does not exist.
fn missing_path<'span>(tree: &Tree, span: &'span str) -> Option<&'span str> {
    let path = span.split("::").next().unwrap_or(span);
    let path = path
        .strip_prefix("./")
        .unwrap_or(path)
        .trim_end_matches('/');
    let is_plain =
        |character: char| character.is_ascii_alphanumeric() || "_-./".contains(character);
    if path.is_empty() || !path.chars().all(is_plain) {
        return None;
    }
    let Some((first, rest)) = path.split_once('/') else {
        let is_missing = path.ends_with(".rs") && !tree.paths().any(|file| file_name(file) == path);
        return is_missing.then_some(path);
    };
    let crate_directory = format!("crates/{first}");
    let is_ours = tree.contains(first) || tree.contains(&crate_directory) || path.ends_with(".rs");
    let candidates = [
        path.to_string(),
        format!("{crate_directory}/{rest}"),
        format!("{crate_directory}/src/{rest}"),
    ];
    let exists = candidates.iter().any(|candidate| tree.contains(candidate));
    (is_ours && !first.is_empty() && !exists).then_some(path)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing_in(readme: &str) -> Vec<String> {
        let tree = Tree::of(&[
            ("ARCHITECTURE.md", ""),
            ("CONTRIBUTING.md", ""),
            ("README.md", readme),
            ("docs/guide.md", readme),
            (".ci/run", ""),
            ("crates/core/src/allocator.rs", ""),
            ("crates/capi/include/lowtide.h", ""),
        ]);
        paths_exist(&tree).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn paths_that_exist_are_fine() {
        let readme = "Read `crates/core/src/allocator.rs`, `core/allocator.rs::allocate`, `crates/core/`,\n\
                      `capi/include/lowtide.h`, `./.ci/run` and `allocator.rs`.\n";
        assert_eq!(missing_in(readme), [""; 0]);
    }

    #[test]
    fn what_is_no_path_of_ours_is_left_alone() {
        let readme = "`application/json`, `a/b`, `/dev/nvidia0`, `core::Driver`, `crates/<name>/src`,\n\
                      `cargo run crates/gone`, `snapshot.pickle`, `torch/cuda/memory.py`\n\
                      ```\n`crates/core/src/gone.rs`\n```\n";
        assert_eq!(missing_in(readme), [""; 0]);
    }

    #[test]
    fn paths_that_do_not_exist_are_found() {
        assert_eq!(
            missing_in(
                "`.ci/gone`\n```sh\n```\n`core/gone.rs::x` or `gone.rs`, `crate/core/lib.rs`\n"
            ),
            [
                "README.md:1: `.ci/gone` does not exist",
                "README.md:4: `core/gone.rs` does not exist",
                "README.md:4: `gone.rs` does not exist",
                "README.md:4: `crate/core/lib.rs` does not exist",
                "docs/guide.md:1: `.ci/gone` does not exist",
                "docs/guide.md:4: `core/gone.rs` does not exist",
                "docs/guide.md:4: `gone.rs` does not exist",
                "docs/guide.md:4: `crate/core/lib.rs` does not exist",
            ]
        );
    }

    #[test]
    fn a_guide_that_is_missing_is_found() {
        let missing: Vec<String> = GUIDES
            .iter()
            .map(|guide| format!("{guide}: is missing"))
            .collect();
        let findings: Vec<String> = paths_exist(&Tree::of(&[]))
            .iter()
            .map(Finding::to_string)
            .collect();
        assert_eq!(findings, missing);
    }

    #[test]
    fn steps() {
        let findings = |steps: usize| {
            let steps: String = (1..=steps)
                .map(|step| format!("{step}. A step.\n\n   More.\n"))
                .collect();
            let text = format!(
                "# Architecture\n1. Not here.\n\n## Life of one allocation\n\n{steps}\n### A miss\n\n## Code map\n1. Nor here.\n"
            );
            life_of_one_allocation_is_short(&Tree::of(&[("ARCHITECTURE.md", &text)]))
        };
        assert_eq!(findings(1), []);
        assert_eq!(findings(8), []);
        assert_eq!(findings(9).len(), 1);
        assert_eq!(findings(0).len(), 1);
        let other = Tree::of(&[("ARCHITECTURE.md", "# Code map\n")]);
        assert_eq!(life_of_one_allocation_is_short(&other).len(), 1);
    }

    #[test]
    fn changelog() {
        let findings = |text| changes_are_listed(&Tree::of(&[("CHANGELOG.md", text)])).len();
        assert_eq!(findings("# Changelog\n\n## 0.1.0 (unreleased)\n"), 0);
        assert_eq!(findings("# Changelog\n\n## 0.1.0\n0.2.0 (unreleased)\n"), 1);
        assert_eq!(findings("# Changelog\n\n## (unreleased)\n"), 1);
        assert_eq!(changes_are_listed(&Tree::of(&[])).len(), 1);
    }

    #[test]
    fn licences() {
        let both = [("LICENSE-APACHE", "text\n"), ("LICENSE-MIT", "text\n")];
        assert_eq!(licences_are_here(&Tree::of(&both)), []);
        assert_eq!(licences_are_here(&Tree::of(&both[..1])).len(), 1);
    }
}
