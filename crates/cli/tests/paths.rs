//! Paths that are not UTF-8, which Linux allows: the command reads them, and writes files under exactly these
//! names.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

mod common;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use common::{Scratch, failure, lowtide, sample, stderr};

/// A directory with such a name, with a recording of such a name in it.
struct Place {
    scratch: Scratch,
    directory: PathBuf,
    recording: PathBuf,
}

fn strange(name: &str) -> OsString {
    let mut bytes = name.as_bytes().to_vec();
    bytes.insert(1, 0xff);
    OsString::from_vec(bytes)
}

impl Place {
    fn new(name: &str) -> Place {
        let scratch = Scratch::new(name);
        let directory = scratch.path("").join(strange("traces"));
        fs::create_dir_all(&directory).unwrap();
        let recording = directory.join(strange("job.pickle.zst"));
        fs::copy(sample("gpt2_train.stacks.pickle.zst"), &recording).unwrap();
        Place {
            scratch,
            directory,
            recording,
        }
    }

    /// Runs the command in that directory, and returns what it prints.
    fn run<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Vec<u8> {
        let mut command = lowtide();
        command.current_dir(&self.directory);
        let output = command.args(arguments).output().unwrap();
        assert_eq!(stderr(&output), "");
        assert_eq!(output.status.code(), Some(0));
        output.stdout
    }

    /// Asserts that the directory contains these files and the recording, and no others.
    fn check_files(&self, names: &[&str]) {
        let mut expected: Vec<OsString> = names.iter().map(|name| strange(name)).collect();
        expected.push(strange("job.pickle.zst"));
        expected.sort();
        let entries = fs::read_dir(&self.directory).unwrap();
        let mut found: Vec<OsString> = entries.map(|entry| entry.unwrap().file_name()).collect();
        found.sort();
        assert_eq!(found, expected);
        assert_eq!(fs::read_dir(self.scratch.path("")).unwrap().count(), 1);
    }
}

#[test]
fn recordings_are_read() {
    let place = Place::new("strange-read");
    let recording = place.recording.as_os_str();
    for command in ["leaks", "replay", "advise"] {
        assert!(!place.run(&[command.as_ref(), recording]).is_empty());
        let json = place.run(&[command.as_ref(), recording, "--json".as_ref()]);
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert!(json.is_object(), "{command}");
    }
    assert!(
        place
            .run(&["diff".as_ref(), recording, recording])
            .ends_with(b"+0 bytes in all\n")
    );
    place.check_files(&[]);
}

#[test]
fn what_is_written_lies_where_it_was_asked_for() {
    let place = Place::new("strange-write");
    let recording = place.recording.as_os_str();
    let path = |name| place.directory.join(strange(name));
    let printed = place.run(&["report".as_ref(), recording]);
    // The printed path can be opened.
    let printed = Path::new(OsStr::from_bytes(printed.strip_suffix(b"\n").unwrap()));
    assert_eq!(printed, strange("job.html"));
    place.check_files(&["job.html"]);
    let page = path("page.html");
    let printed = place.run(&[
        "report".as_ref(),
        recording,
        "-o".as_ref(),
        page.as_os_str(),
    ]);
    assert_eq!(printed, [page.as_os_str().as_bytes(), b"\n"].concat());
    let replay = path("replay.html");
    place.run(&[
        "replay".as_ref(),
        recording,
        "--html".as_ref(),
        replay.as_os_str(),
    ]);
    let converted = path("job.lowtide");
    place.run(&["convert".as_ref(), recording, converted.as_os_str()]);
    assert!(lowtide_trace::read(&converted).is_ok());
    place.check_files(&["job.html", "page.html", "replay.html", "job.lowtide"]);
}

#[test]
fn a_program_gets_the_path_as_it_is() {
    let place = Place::new("strange-record");
    let path = |name| place.directory.join(strange(name));
    let new = path("new.lowtide");
    let mut command = lowtide();
    command.args(["record".as_ref(), "-o".as_ref(), new.as_os_str()]);
    let output = command.args(["printenv", "LOWTIDE_RECORD"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(0));
    let path_line = [new.as_os_str().as_bytes(), b"\n"].concat();
    assert_eq!(output.stdout, path_line);
    assert!(stderr(&output).contains("ew.lowtide: nothing was recorded: `printenv` "));
    place.check_files(&[]);
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    let place = Place::new("strange-wrong");
    let none = place.directory.join(strange("none.pickle"));
    let fail = |arguments: &[&OsStr]| {
        let mut command = lowtide();
        command.current_dir(&place.directory);
        failure(&command.args(arguments).output().unwrap())
    };
    let (none, strange) = (none.as_os_str(), strange("xyz"));
    for command in ["leaks", "replay", "advise", "report"] {
        let text = fail(&[command.as_ref(), none]);
        assert!(
            text.ends_with("n\u{fffd}one.pickle: No such file or directory (os error 2)"),
            "{text}"
        );
    }
    let text = fail(&[
        "replay".as_ref(),
        place.recording.as_os_str(),
        "--strategy".as_ref(),
        &strange,
    ]);
    assert_eq!(text, "invalid UTF-8 was detected in one or more arguments");
    let text = fail(&["convert".as_ref(), place.recording.as_os_str(), &strange]);
    assert!(
        text.starts_with("x\u{fffd}yz: the name says no format"),
        "{text}"
    );
    assert!(fail(&[&strange]).starts_with("unrecognized subcommand"));
    place.check_files(&[]);
}
