//! A rule for the links between the project's documents.

use super::documents::{heading_level, prose};
use super::finding::Finding;
use super::tree::{Tree, extension};

/// A link from a document to a file of the project must lead to an existing file. If the link names a heading, the
/// file must have that heading.
pub(super) fn links_lead_somewhere(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (document, text) in tree.texts().filter(|(path, _)| extension(path) == "md") {
        for (index, line) in prose(text) {
            for target in targets(line).filter(|&target| !leads_somewhere(tree, document, target)) {
                let message = format!("the link to {target} leads nowhere");
                findings.push(Finding::at_line(document, index + 1, message));
            }
        }
    }
    findings
}

/// Returns the targets of the links in a line, except links to other sites.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    let behind = line.split("](").skip(1);
    let targets = behind.filter_map(|text| text.split_once(')').map(|(target, _)| target));
    targets.filter(|target| !target.contains("://"))
}

fn leads_somewhere(tree: &Tree, document: &str, target: &str) -> bool {
    let (path, heading) = target.split_once('#').unwrap_or((target, ""));
    let path = match path {
        "" => document.to_owned(),
        path => from_directory_of(document, path),
    };
    tree.contains(&path) && (heading.is_empty() || has_heading(tree.text(&path), heading))
}

/// Converts a path relative to a document to a path from the root.
fn from_directory_of(document: &str, path: &str) -> String {
    let mut names: Vec<&str> = document.split('/').collect();
    names.pop();
    for name in path.trim_end_matches('/').split('/') {
        match name {
            "." => {}
            ".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    names.join("/")
}

fn has_heading(text: Option<&str>, anchor: &str) -> bool {
    let is_it = |line: &str| heading_level(line) > 0 && anchor_of(line) == anchor;
    text.is_some_and(|text| prose(text).any(|(_, line)| is_it(line)))
}

/// Returns a heading's anchor: lower case, with hyphens for spaces and without most other signs.
fn anchor_of(heading: &str) -> String {
    let title = heading.trim_start_matches('#').trim().to_lowercase();
    let is_kept = |character: &char| character.is_alphanumeric() || " -_".contains(*character);
    title.replace(' ', "-").chars().filter(is_kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere(text: &str) -> Vec<String> {
        let tree = Tree::of(&[
            ("README.md", "# Read me\n## What `it` does, in short\n"),
            ("docs/guide.md", text),
            ("docs/picture.png", ""),
        ]);
        let findings = links_lead_somewhere(&tree);
        findings.iter().map(Finding::to_string).collect()
    }

    #[test]
    fn links_that_lead_somewhere_are_fine() {
        let text = "# Guide\n[a](../README.md), [b](../README.md#what-it-does-in-short), ![c](picture.png), [d](#guide),\n\
                    [e](../docs), [f](https://example.com/gone#there)\n```\n[g](gone.md)\n```\n";
        assert_eq!(nowhere(text), [""; 0]);
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        assert_eq!(
            nowhere(
                "# Guide\n[a](README.md) [b](../README.md#gone)\n[c](../../README.md/x) [d](#gone)\n"
            ),
            [
                "docs/guide.md:2: the link to README.md leads nowhere",
                "docs/guide.md:2: the link to ../README.md#gone leads nowhere",
                "docs/guide.md:3: the link to ../../README.md/x leads nowhere",
                "docs/guide.md:3: the link to #gone leads nowhere",
            ]
        );
    }
}
