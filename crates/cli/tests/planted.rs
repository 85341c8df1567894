//! Attacks in a directory that others may write to, where another user's commands write files.
//!
//! As root, the attacker is the user `nobody`. For any other user, the test plants only files that are refused for
//! every owner.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::{Command, Output};

use common::{Scratch, sample, stderr};

/// The attacker's commands: each creates the file named by `$1`.
const LINK: &str = "ln -s ../victim \"$1\"";
const DANGLING_LINK: &str = "ln -s ../new \"$1\"";
const FIFO: &str = "mkfifo -m 666 \"$1\"";
const OTHERS: &str = ": > \"$1\"; chmod 666 \"$1\"";

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Returns a directory with a file of the victim and a directory `shared` that others may write to.
fn shared(name: &str, mode: u32) -> Scratch {
    let scratch = Scratch::new(&format!("planted-{name}-{mode:o}"));
    scratch.write("victim", "as it was");
    fs::create_dir(scratch.path("shared")).unwrap();
    fs::set_permissions(scratch.path("shared"), Permissions::from_mode(mode)).unwrap();
    scratch
}

/// Runs a command after the attacker has run `line` for the file `name`. In `name`, `$$` is the process id of the
/// command. A command that waits is killed.
fn attack(scratch: &Scratch, line: &str, name: &str, arguments: &[&str]) -> Output {
    let attacker = if is_root() {
        "setpriv --reuid=65534 --regid=65534 --clear-groups "
    } else {
        ""
    };
    let script = format!("{attacker}sh -c '{line}' sh \"{name}\" || exit 99; exec \"$0\" \"$@\"");
    Command::new("timeout")
        .args(["--signal=KILL", "60", "sh", "-c", &script])
        .arg(env!("CARGO_BIN_EXE_lowtide"))
        .args(arguments)
        .current_dir(scratch.path("shared"))
        .output()
        .unwrap()
}

/// Checks that nothing outside of the shared directory was written.
#[track_caller]
fn check_victim(scratch: &Scratch, output: &Output) {
    let victim = fs::read_to_string(scratch.path("victim")).unwrap();
    assert_eq!(victim, "as it was", "{output:?}");
    assert_eq!(scratch.names(), ["shared", "victim"]);
}

fn names(scratch: &Scratch) -> Vec<String> {
    let entries = fs::read_dir(scratch.path("shared")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The attacks with their error: those refused for every owner, and as root also those refused only for another
/// owner.
fn plants() -> Vec<(&'static str, &'static str)> {
    let mut plants = vec![
        (LINK, "is a symbolic link"),
        (DANGLING_LINK, "is a symbolic link"),
    ];
    if is_root() {
        plants.push((FIFO, "belongs to another user (uid 65534)"));
        plants.push((OTHERS, "belongs to another user (uid 65534)"));
    }
    plants
}

#[test]
fn what_is_planted_is_refused_and_what_is_guessed_is_not_used() {
    let recording = sample("../crates/replay/tests/data/evaluated.exp.pickle.gz");
    let recording = recording.to_str().unwrap();
    let commands: [(&str, &[&str]); 3] = [
        ("page.html", &["report", recording, "-o", "page.html"]),
        ("job.lowtide", &["convert", recording, "job.lowtide"]),
        (
            "page.html",
            &[
                "replay",
                recording,
                "--strategy",
                "caching",
                "--html",
                "page.html",
            ],
        ),
    ];
    for mode in [0o777, 0o1777] {
        for (name, arguments) in commands {
            for (line, what) in plants() {
                let scratch = shared(arguments[0], mode);
                let output = attack(&scratch, line, name, arguments);
                check_victim(&scratch, &output);
                let text = stderr(&output);
                let expected = format!("lowtide: {name}: {what}");
                assert!(text.starts_with(&expected), "{mode:o} {line}: {text}");
                assert_eq!(text.lines().count(), 1, "{text}");
                assert_eq!(names(&scratch), [name]);
                fs::remove_file(scratch.path("shared").join(name)).unwrap();
                let guessed = format!(".{name}.$$.tmp");
                let output = attack(&scratch, line, &guessed, arguments);
                check_victim(&scratch, &output);
                assert_eq!(output.status.code(), Some(0), "{output:?}");
                assert_eq!(names(&scratch).len(), 2, "{:?}", names(&scratch));
            }
        }
    }
}

/// A job would wait for the reader of a FIFO, so a FIFO is refused for every owner.
#[test]
fn a_job_is_recorded_to_nothing_that_is_planted() {
    let mut plants = plants();
    plants.retain(|(line, _)| *line != FIFO);
    plants.push((FIFO, "is a FIFO"));
    for mode in [0o777, 0o1777] {
        for (line, what) in &plants {
            let scratch = shared("record", mode);
            let arguments = ["record", "-o", "job.lowtide", "touch", "ran"];
            let output = attack(&scratch, line, "job.lowtide", &arguments);
            check_victim(&scratch, &output);
            let text = stderr(&output);
            let expected = format!("lowtide: job.lowtide: {what}");
            assert!(text.starts_with(&expected), "{mode:o} {line}: {text}");
            assert_eq!(names(&scratch), ["job.lowtide"]);
        }
    }
}
