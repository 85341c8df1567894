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

fn check(subject: &str) -> Option<Finding> {
    let count = subject.chars().count();
    let message = format!(
        "the subject has {count} characters, more than {SUBJECT_CHARS_MAX}; shorten \"{subject}\""
    );
    (count > SUBJECT_CHARS_MAX).then(|| Finding::in_file("latest commits", message))
}

/// Returns the subjects, one a line; none if they are not known.
fn latest_subjects(root: &Path) -> String {
    if !root.join(".git").exists() {
        return String::new();
    }
    let output = Command::new("git")
        .args(["log", COMMITS, "--no-merges", "--format=%s"])
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
        assert_eq!(check(""), None);
        assert_eq!(check(&"ä".repeat(72)), None);
    }

    #[test]
    fn a_longer_subject_is_found() {
        let subject = "a".repeat(73);
        let finding = check(&subject).expect("it is too long").to_string();
        assert_eq!(
            finding,
            format!(
                "latest commits: the subject has 73 characters, more than 72; shorten \"{subject}\""
            )
        );
    }

    #[test]
    fn a_tree_without_a_repository_has_no_subject() {
        let root = Path::new("there is no such directory");
        assert_eq!(subjects_are_short(root), []);
    }
}
