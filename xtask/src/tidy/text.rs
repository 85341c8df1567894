//! Rules for every text file.

use super::finding::Finding;
use super::mask::find_word;
use super::tree::{Tree, extension};

/// The extensions of files that people write. The rules do not apply to generated reports and recorded test output.
const WRITTEN: [&str; 14] = [
    "", "c", "cpp", "cu", "h", "md", "py", "pyi", "rs", "sh", "supp", "toml", "yaml", "yml",
];

/// Root directories that differ between machines. A path through them is valid on one machine only.
const MACHINE_DIRECTORIES: [&str; 5] = ["Users", "home", "root", "tmp", "work"];

/// There must be no trailing whitespace, no tab in Rust, and one line break at the end.
pub(super) fn whitespace_is_clean(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree
        .texts()
        .filter(|(path, _)| WRITTEN.contains(&extension(path)))
    {
        for (index, line) in text.split('\n').enumerate() {
            if line.ends_with(char::is_whitespace) {
                findings.push(Finding::at_line(path, index + 1, "trailing whitespace"));
            }
            if extension(path) == "rs" && line.contains('\t') {
                findings.push(Finding::at_line(
                    path,
                    index + 1,
                    "a tab; write spaces, or `\\t` in a string",
                ));
            }
        }
        if !text.is_empty() && (!text.ends_with('\n') || text.ends_with("\n\n")) {
            findings.push(Finding::in_file(path, "must end with one line break"));
        }
    }
    findings
}

/// There must be no notes about work to do: it belongs in an issue.
pub(super) fn notes_to_self_are_absent(tree: &Tree) -> Vec<Finding> {
    let notes = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
    ];
    let mut findings = Vec::new();
    for (path, text) in tree
        .texts()
        .filter(|(path, _)| WRITTEN.contains(&extension(path)))
    {
        for (index, line) in text.lines().enumerate() {
            for note in notes
                .iter()
                .filter(|note| !find_word(line, note).is_empty())
            {
                findings.push(Finding::at_line(
                    path,
                    index + 1,
                    format!("`{note}`; do it, or open an issue"),
                ));
            }
        }
    }
    findings
}

/// No file may contain a path of the machine that it was written on.
pub(super) fn machine_paths_are_absent(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts() {
        for (index, line) in text.lines().enumerate() {
            for directory in MACHINE_DIRECTORIES {
                let start = format!("/{directory}/");
                if line
                    .match_indices(&start)
                    .any(|(offset, _)| starts_a_path(&line[..offset]))
                {
                    let message = format!("a path of one machine, `{start}`; make it relative");
                    findings.push(Finding::at_line(path, index + 1, message));
                }
            }
        }
    }
    findings
}

/// Returns whether a slash after `before` starts a path. It may also continue a path or a URL.
fn starts_a_path(before: &str) -> bool {
    let continues = |last: char| last.is_alphanumeric() || "_-.~/})>*".contains(last);
    !before.ends_with(continues)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(findings: &[Finding]) -> Vec<Option<usize>> {
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn whitespace() {
        let findings = |path, text| whitespace_is_clean(&Tree::of(&[(path, text)]));
        assert_eq!(findings("a.rs", "fn a() {\n}\n"), []);
        assert_eq!(findings("Makefile", "all:\n\ttrue\n"), []);
        assert_eq!(findings("empty.py", ""), []);
        assert_eq!(findings("report.snap", "cell  \n\n\n"), []);
        assert_eq!(
            lines(&findings("a.md", "one \ntwo\nthree\r\n")),
            [Some(1), Some(3)]
        );
        assert_eq!(lines(&findings("a.rs", "one\n\ttwo\n")), [Some(2)]);
        assert_eq!(lines(&findings("a.toml", "one")), [None]);
        assert_eq!(lines(&findings("a.toml", "one\n\n")), [None]);
    }

    #[test]
    fn notes_to_self() {
        let bad = format!("fine\n# {}: later\n", concat!("FIX", "ME"));
        let findings = |text| notes_to_self_are_absent(&Tree::of(&[("a.py", text)]));
        assert_eq!(lines(&findings(&bad)), [Some(2)]);
        assert_eq!(findings("mktemp name.XXXXXX\n"), []);
    }

    #[test]
    fn machine_paths() {
        let findings = |text: &str| machine_paths_are_absent(&Tree::of(&[("a.json", text)]));
        for directory in MACHINE_DIRECTORIES {
            assert_eq!(
                lines(&findings(&format!("x\n\"/{directory}/me/run.py\"\n"))),
                [Some(2)]
            );
            assert_eq!(
                findings(&format!(
                    "https://host/{directory}/me $HOME/{directory}/x\n"
                )),
                []
            );
        }
        assert_eq!(
            findings("/usr/lib/libcuda.so.1 /dev/nvidia0 (/tmpfs/x)\n"),
            []
        );
    }
}
