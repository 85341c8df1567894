//! Where the command creates files, and which targets it writes to directly.

mod common;

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{GPT2, Scratch, fail, lowtide, run, stderr};

fn convert(to: &Path) {
    run(&["convert".as_ref(), GPT2.as_ref(), to.as_os_str()]);
}

fn events(path: &Path) -> usize {
    let snapshot = lowtide_trace::read(path).expect("it was just written");
    snapshot.traces[0].events.len()
}

#[test]
fn a_symbolic_link_is_refused_and_one_to_a_directory_followed() {
    let scratch = Scratch::new("links");
    fs::create_dir(scratch.path("elsewhere")).unwrap();
    let target = scratch.write("elsewhere/target.lowtide", "as it was");
    fs::set_permissions(&target, Permissions::from_mode(0o600)).unwrap();
    symlink("elsewhere", scratch.path("way")).unwrap();
    convert(&scratch.path("way/target.lowtide"));
    assert_eq!(events(&target), 116_097);
    let mode = fs::metadata(&target).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "what only its owner could read");
    for (name, target) in [("link", "elsewhere/target"), ("dangling", "elsewhere/new")] {
        let link = scratch.path(&format!("{name}.lowtide"));
        symlink(format!("{target}.lowtide"), &link).unwrap();
        let message = fail(&["convert", GPT2, link.to_str().unwrap()]);
        let why = "is a symbolic link, and only a regular file is written: choose another name";
        assert_eq!(message, format!("{}: {why}", link.display()));
        assert!(link.is_symlink());
    }
    let left: Vec<_> = fs::read_dir(scratch.path("elsewhere")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_pipe_is_written_into() {
    let scratch = Scratch::new("pipe");
    let pipe = scratch.path("pipe.lowtide");
    let status = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(status.success());
    let writer = lowtide()
        .args(["convert", GPT2, pipe.to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(events(&pipe), 116_097);
    let output = writer.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(scratch.names(), ["pipe.lowtide"]);
}

#[test]
fn standard_output_has_a_name() {
    let scratch = Scratch::new("stdout");
    let arguments = [
        "replay",
        GPT2,
        "--strategy",
        "caching",
        "--html",
        "/dev/stdout",
    ];
    let text = run(&arguments);
    assert!(text.starts_with("<!doctype html>"), "{text}");
    assert!(
        text.contains("</html>\n") && text.contains("peak live"),
        "{text}"
    );
    // The same if standard output is a file: the table comes after the page.
    let path = scratch.path("both.html");
    let file = fs::File::create(&path).unwrap();
    let status = lowtide().args(arguments).stdout(file).status().unwrap();
    assert!(status.success());
    let both = fs::read_to_string(&path).unwrap();
    assert!(both.starts_with("<!doctype html>") && both.contains("driver time"));
    // The reader may close the pipe early.
    let mut child = lowtide()
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(stderr(&output), "");
    assert!(output.status.success());
}

/// Runs a replay in a shell with `redirected` arguments, and returns the contents of `out` in `scratch` afterwards.
fn in_shell(scratch: &Scratch, redirected: &str) -> String {
    let replay = format!("\"$0\" replay {GPT2} --strategy caching {redirected}");
    let status = Command::new("sh")
        .args(["-c", &replay, env!("CARGO_BIN_EXE_lowtide")])
        .current_dir(common::sample(""))
        .env("OUT", scratch.path("out"))
        .stdout(Stdio::null())
        .status()
        .expect("there is a shell");
    assert!(status.success(), "{redirected}");
    fs::read_to_string(scratch.path("out")).expect("it is text")
}

#[test]
fn what_is_open_already_is_written_into() {
    let scratch = Scratch::new("descriptors");
    for (redirected, starts, ends) in [
        ("--html /dev/fd/1 > $OUT", "<!doctype html>", "host ns/op"),
        (
            "--html /proc/self/fd/1 > $OUT",
            "<!doctype html>",
            "host ns/op",
        ),
        ("--html $OUT > $OUT", "<!doctype html>", "host ns/op"),
        ("--html /dev/stderr 2> $OUT", "<!doctype html>", "</html>"),
        (
            "--html /dev/fd/3 3> $OUT >&3",
            "<!doctype html>",
            "host ns/op",
        ),
        ("--html /dev/fd/3 3>> $OUT", "before", "</html>"),
        ("--html - > $OUT", "<!doctype html>", "</html>"),
    ] {
        scratch.write("out", "before\n");
        let both = in_shell(&scratch, redirected);
        assert!(both.starts_with(starts), "{redirected}: {both}");
        assert!(both.contains("</html>"), "{redirected}");
        let last = both.trim_end().lines().last().unwrap();
        assert!(last.contains(ends), "{redirected}: {last}");
    }
    assert_eq!(scratch.names(), ["out"]);
}

#[test]
fn a_dash_is_standard_output_where_that_can_be() {
    let message = fail(&["convert", GPT2, "-"]);
    assert!(
        message.starts_with("-: standard output has no name"),
        "{message}"
    );
    let message = fail(&["replay", GPT2, "--html", "-", "--json"]);
    assert!(
        message.starts_with("--html - and --json both print"),
        "{message}"
    );
}

/// The recording is refused under another name, too.
#[test]
fn a_page_does_not_take_the_place_of_its_recording() {
    let scratch = Scratch::new("own-place");
    let recording = scratch.path("job.pickle.zst");
    fs::copy(common::sample(GPT2), &recording).unwrap();
    let link = scratch.path("link.html");
    symlink(&recording, &link).unwrap();
    let job = recording.to_str().unwrap();
    for target in [job, link.to_str().unwrap()] {
        let commands = [
            ["replay", job, "--html", target],
            ["report", job, "--output", target],
        ];
        for command in commands {
            let expected =
                format!("{target}: is the recording itself; choose another name for the page");
            assert_eq!(fail(&command), expected);
        }
    }
    let expected = format!("{job}: is the recording itself; choose another name for the new one");
    assert_eq!(fail(&["convert", job, job]), expected);
    assert_eq!(events(&recording), 116_097);
}

/// The program that shows pages may exist and show none.
#[test]
fn a_page_that_cannot_be_opened_is_said_to_be() {
    let scratch = Scratch::new("opens");
    let page = scratch.path("page.html");
    let open = |script: &str| {
        let program = scratch.write("xdg-open", script);
        // Another process copies the file, for the reason given in the test below.
        let bin = scratch.path("bin");
        fs::create_dir_all(&bin).unwrap();
        let program = program.to_str().unwrap();
        let copied = Command::new("install")
            .args(["-m", "755", program])
            .arg(&bin)
            .status();
        assert!(copied.unwrap().success());
        let mut command = common::lowtide();
        command.env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
        command.args(["report", GPT2, "--open", "-o"]).arg(&page);
        command.output().unwrap()
    };
    let refused = open("#!/bin/sh\nexit 3\n");
    let page = page.display();
    let expected = format!("xdg-open: cannot open {page}; open it in a browser: exit status: 3");
    assert_eq!(common::failure(&refused), expected);
    assert_eq!(open("#!/bin/sh\n").status.code(), Some(0));
}

#[test]
fn what_went_wrong_with_a_file_is_said_once() {
    let expected = "/dev/full: No space left on device (os error 28)";
    assert_eq!(fail(&["report", GPT2, "-o", "/dev/full"]), expected);
}

#[test]
fn a_file_that_is_not_for_writing_stays() {
    let scratch = Scratch::new("read-only");
    let path = scratch.write("kept.lowtide", "as it was");
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    // Root may write to any file.
    if let Err(error) = OpenOptions::new().write(true).open(&path) {
        let message = fail(&["convert", GPT2, path.to_str().unwrap()]);
        assert_eq!(message, format!("{}: {error}", path.display()));
        assert_eq!(fs::read_to_string(&path).unwrap(), "as it was");
    }
    // Even root cannot write to a program that runs.
    let program = scratch.path("runs.lowtide");
    // Another process copies the file. If this process wrote it, a program that another test starts meanwhile would
    // inherit the file open for writing, and a program that is open for writing cannot be started.
    let copied = Command::new("cp").arg("/bin/sleep").arg(&program).status();
    assert!(copied.unwrap().success());
    let mut running = Command::new(&program).arg("600").spawn().unwrap();
    let message = fail(&["convert", GPT2, program.to_str().unwrap()]);
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(message.contains("Text file busy"), "{message}");
}
