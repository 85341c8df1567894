//! A rule for the message of the latest commit.

use std::path::Path;
use std::process::{Command, Stdio};

use super::finding::Finding;

/// The length that `git log --oneline` and most viewers show in one line.
const SUBJECT_CHARS_MAX: usize = 72;

/// The subject of the latest commit must be short. Merges are skipped, because tools write their subjects.
///
/// Finds nothing if there is no git or no repository, as in an unpacked archive.
pub(super) fn subject_is_short(root: &Path) -> Vec<Finding> {
    let subject = latest_subject(root);
    subject.as_deref().and_then(check).into_iter().collect()
}

fn check(subject: &str) -> Option<Finding> {
    let count = subject.chars().count();
    let message = format!(
        "the subject has {count} characters, more than {SUBJECT_CHARS_MAX}; shorten \"{subject}\""
    );
    (count > SUBJECT_CHARS_MAX).then(|| Finding::in_file("latest commit", message))
}

fn latest_subject(root: &Path) -> Option<String> {
    if !root.join(".git").exists() {
        return None;
    }
    let output = Command::new("git")
        .args(["log", "-1", "--no-merges", "--format=%s"])
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let is_known = output.status.success();
    is_known.then(|| {
        String::from_utf8_lossy(&output.stdout)
            .trim_end()
            .to_owned()
    })
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
                "latest commit: the subject has 73 characters, more than 72; shorten \"{subject}\""
            )
        );
    }

    #[test]
    fn a_tree_without_a_repository_has_no_subject() {
        let root = Path::new("there is no such directory");
        assert_eq!(subject_is_short(root), []);
    }
}
