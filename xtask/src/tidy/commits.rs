//! A rule for the messages of the latest commits.

use std::path::Path;
use std::process::{Command, Stdio};

use super::finding::Finding;

/// The length that `git log --oneline` and most viewers show in one line.
const SUBJECT_CHARS_MAX: usize = 72;

/// The number of commits that are checked: more than land at once.
const COMMITS: &str = "-100";

/// The subjects of the latest commits must be short. Merges are skipped, because tools write their subjects.
///
/// Finds nothing if there is no git or no repository, as in an unpacked archive.
pub(super) fn subjects_are_short(root: &Path) -> Vec<Finding> {
    let subjects = latest_subjects(root);
    subjects.lines().filter_map(check).collect()
}

/// Checks a line that has a commit's number and its subject.
fn check(line: &str) -> Option<Finding> {
    let (number, subject) = line.split_once(' ')?;
    let count = subject.chars().count();
    let message = format!(
        "the subject has {count} characters, more than {SUBJECT_CHARS_MAX}; shorten \"{subject}\""
    );
    (count > SUBJECT_CHARS_MAX).then(|| Finding::in_file(&format!("commit {number}"), message))
}

/// Returns a line for each commit, with its number and subject; none if they are not known.
fn latest_subjects(root: &Path) -> String {
    if !root.join(".git").exists() {
        return String::new();
    }
    let output = Command::new("git")
        .args(["log", COMMITS, "--no-merges", "--format=%h %s"])
        .current_dir(root)
        .stdin(Stdio::null())
        .output();
    let known = output.ok().filter(|output| output.status.success());
    let known = known.map(|output| output.stdout);
    String::from_utf8_lossy(&known.unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_of_72_characters_is_short() {
        assert_eq!(check("0abcdef "), None);
        assert_eq!(check(&format!("0abcdef {}", "ä".repeat(72))), None);
    }

    #[test]
    fn a_longer_subject_is_found() {
        let subject = "a".repeat(73);
        let finding = check(&format!("0abcdef {subject}"));
        let finding = finding.expect("it is too long").to_string();
        assert_eq!(
            finding,
            format!(
                "commit 0abcdef: the subject has 73 characters, more than 72; shorten \"{subject}\""
            )
        );
    }

    #[test]
    fn a_tree_without_a_repository_has_no_subject() {
        let root = Path::new("there is no such directory");
        assert_eq!(subjects_are_short(root), []);
    }
}
