//! The project's own rules: what rustfmt, clippy and the compiler do not check.
//!
//! Each rule is a function from the [`Tree`] to its [`Finding`]s. Beside it is a test on a good and a bad example.
//! The test `the_tree_is_tidy` applies all rules to the project. The rule for the latest commits' messages reads git
//! instead, and is not part of that test.

mod circles;
mod commits;
mod documents;
mod files;
mod finding;
mod links;
mod manifests;
mod mask;
mod rust;
mod text;
mod tree;

use std::path::Path;

use crate::process::Stop;
use finding::Finding;
use tree::Tree;

const RULES: [fn(&Tree) -> Vec<Finding>; 20] = [
    circles::files_form_no_circle,
    documents::changes_are_listed,
    documents::life_of_one_allocation_is_short,
    documents::licences_are_here,
    documents::paths_exist,
    files::python_writes_files_in_one_place,
    files::rust_writes_files_in_one_place,
    links::links_lead_somewhere,
    manifests::crates_are_described,
    manifests::dependencies_point_down,
    manifests::lints_are_inherited,
    manifests::version_is_the_workspaces,
    rust::files_can_be_held,
    rust::lints_are_switched_off_with_a_reason,
    rust::nothing_is_unfinished,
    rust::unsafe_is_confined,
    rust::words_are_the_vocabulary,
    text::machine_paths_are_absent,
    text::notes_to_self_are_absent,
    text::whitespace_is_clean,
];

/// Prints every finding in the project at `root`. Fails if there is one.
pub(crate) fn run(root: &Path) -> Result<(), Stop> {
    eprintln!("xtask: tidy");
    let tree = Tree::read(root).map_err(|error| Stop::new(1, format!("tidy: {error}")))?;
    for warning in rust::files_grow_long(&tree) {
        eprintln!("warning: {warning}");
    }
    let mut findings = check(&tree);
    findings.extend(commits::subjects_are_short(root));
    for finding in &findings {
        eprintln!("{finding}");
    }
    match findings.len() {
        0 => Ok(()),
        1 => Err(Stop::new(1, "tidy: 1 finding")),
        count => Err(Stop::new(1, format!("tidy: {count} findings"))),
    }
}

/// Returns the findings of every rule, sorted by path and line.
fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings: Vec<Finding> = RULES.iter().flat_map(|rule| rule(tree)).collect();
    findings.sort();
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let root = crate::root().expect("cargo runs the tests");
        let findings = check(&Tree::read(&root).expect("the project can be read"));
        let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert!(lines.is_empty(), "{}", lines.join("\n"));
    }

    #[test]
    fn findings_are_sorted_and_name_their_place() {
        let tree = Tree::of(&[("b.rs", "\tx\n"), ("a.rs", "x\ndbg!(x);\n")]);
        let lines: Vec<String> = check(&tree).iter().map(Finding::to_string).collect();
        let place = |start| lines.iter().position(|line| line.starts_with(start));
        assert!(
            place("a.rs:2: ").expect("dbg! is found")
                < place("b.rs:1: ").expect("the tab is found")
        );
        assert!(place("CHANGELOG.md: ").is_some());
    }
}
