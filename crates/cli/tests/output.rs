//! Where the command writes files: through symbolic links, and straight into what is no file.
#![cfg(unix)]

mod common;

use std::fs::{self, Permissions};
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
fn a_symbolic_link_stays_and_what_it_names_is_replaced() {
    let scratch = Scratch::new("links");
    fs::create_dir(scratch.path("elsewhere")).unwrap();
    let target = scratch.write("elsewhere/target.lowtide", "as it was");
    fs::set_permissions(&target, Permissions::from_mode(0o600)).unwrap();
    symlink("elsewhere/target.lowtide", scratch.path("second")).unwrap();
    let link = scratch.path("first.lowtide");
    symlink(scratch.path("second"), &link).unwrap();
    convert(&link);
    assert!(link.is_symlink());
    assert_eq!(events(&target), 116_097);
    let mode = fs::metadata(&target).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "what only its owner could read");

    // Also where nothing is there yet.
    let link = scratch.path("dangling.lowtide");
    symlink("elsewhere/new.lowtide", &link).unwrap();
    convert(&link);
    assert!(link.is_symlink());
    assert_eq!(events(&scratch.path("elsewhere/new.lowtide")), 116_097);
    let left: Vec<_> = fs::read_dir(scratch.path("elsewhere")).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");

    let link = scratch.path("round.lowtide");
    symlink(&link, &link).unwrap();
    let message = fail(&["convert", GPT2, link.to_str().unwrap()]);
    assert!(message.ends_with("too many symbolic links"), "{message}");
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
    // Also where that is a file: the table comes after the page.
    let path = scratch.path("both.html");
    let file = fs::File::create(&path).unwrap();
    let status = lowtide().args(arguments).stdout(file).status().unwrap();
    assert!(status.success());
    let both = fs::read_to_string(&path).unwrap();
    assert!(both.starts_with("<!doctype html>") && both.contains("driver time"));
    // Its reader may have seen enough.
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
