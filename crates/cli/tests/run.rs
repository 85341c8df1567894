//! `lowtide run --preload` with a library that prints what it sees in place of lowtide: the command, its
//! environment, its errors. What lowtide does in the process is tested in other crates.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Scratch, failure, stderr};

/// A library that prints that it was loaded, and with which settings.
const LIBRARY: &str = r#"
#include <stdio.h>
#include <stdlib.h>
static const char *value(const char *name) { return getenv(name) ? getenv(name) : "-"; }
__attribute__((constructor)) static void loaded(void) {
    fprintf(stderr, "preload=%s strategy=%s conf=%s\n", value("LOWTIDE_PRELOAD"), value("LOWTIDE_STRATEGY"),
            value("LOWTIDE_CONF"));
}
"#;

/// Puts the command into a directory, and the library where the test needs it.
fn install(scratch: &Scratch, library: Option<&str>) -> PathBuf {
    let command = scratch.path("bin/lowtide");
    fs::create_dir_all(command.parent().unwrap()).unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_lowtide"));
    if fs::hard_link(built, &command).is_err() {
        fs::copy(built, &command).unwrap();
    }
    if let Some(library) = library {
        compile(&scratch.path(library));
    }
    command
}

fn compile(library: &Path) {
    fs::create_dir_all(library.parent().unwrap()).unwrap();
    let source = library.with_extension("c");
    fs::write(&source, LIBRARY).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(library)
        .arg(source)
        .status();
    assert!(compiled.expect("cc starts").success());
}

fn run(command: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(command);
    for name in [
        "LD_PRELOAD",
        "LOWTIDE_STRATEGY",
        "LOWTIDE_CONF",
        "LOWTIDE_COMPAT",
    ] {
        command.env_remove(name);
    }
    command.args(arguments).envs(variables.iter().copied());
    command.output().unwrap()
}

#[test]
fn the_library_is_found_in_every_layout() {
    let layouts = [
        "bin/liblowtide.so",
        "lib/liblowtide.so",
        "lib/python3.12/site-packages/lowtide/liblowtide.so",
        "lib64/python3.12/site-packages/lowtide/liblowtide.so",
        "lowtide/liblowtide.so",
    ];
    for layout in layouts {
        let scratch = Scratch::new("run_layout");
        let command = install(&scratch, Some(layout));
        let output = run(
            &command,
            &["run", "--preload", "echo", "--preload", "x"],
            &[],
        );
        assert_eq!(stderr(&output), "preload=1 strategy=- conf=-\n", "{layout}");
        assert_eq!(
            output.stdout, b"--preload x\n",
            "arguments are the program's"
        );
    }
}

#[test]
fn a_named_strategy_replaces_the_environments() {
    let scratch = Scratch::new("run_strategy");
    let command = install(&scratch, Some("bin/liblowtide.so"));
    let check = |arguments: &[&str], expected: &str| {
        let arguments = [&["run", "--preload"], arguments, &["true"]].concat();
        let environment = [("LOWTIDE_STRATEGY", "slab"), ("LOWTIDE_CONF", "x:1")];
        let output = run(&command, &arguments, &environment);
        assert_eq!(stderr(&output), format!("preload=1 {expected}\n"));
    };
    check(&[], "strategy=slab conf=x:1");
    check(&["--strategy", "buddy"], "strategy=buddy conf=-");
    check(
        &["--strategy=caching:max_split_size_mb:64,pinned_use_background_threads:True"],
        "strategy=caching conf=max_split_size_mb:64,pinned_use_background_threads:True",
    );
}

#[test]
fn the_users_own_libraries_are_loaded_too() {
    let scratch = Scratch::new("run_own");
    let command = install(&scratch, Some("bin/liblowtide.so"));
    let own = scratch.path("own/libown.so");
    compile(&own);
    let output = run(
        &command,
        &["run", "--preload", "true"],
        &[("LD_PRELOAD", own.to_str().unwrap())],
    );
    // The command itself loads it once, because it is in the user's LD_PRELOAD.
    assert_eq!(stderr(&output).lines().count(), 3, "{}", stderr(&output));
}

#[test]
fn it_is_reported_that_packages_of_python_stay_as_they_are() {
    let scratch = Scratch::new("run_compat");
    let command = install(&scratch, Some("bin/liblowtide.so"));
    let check = |names: &str, expected: &str| {
        let arguments = ["run", "--preload", "true"];
        let output = run(&command, &arguments, &[("LOWTIDE_COMPAT", names)]);
        let text = stderr(&output);
        let (note, _) = text.split_once("preload=1").unwrap();
        assert_eq!(note, expected);
    };
    check("", "");
    check(
        "vllm",
        "lowtide: LOWTIDE_COMPAT changes no import here: `python -m lowtide run --preload` has Python heed it\n",
    );
}

#[test]
fn the_exit_code_is_the_programs() {
    let scratch = Scratch::new("run_code");
    let command = install(&scratch, Some("bin/liblowtide.so"));
    let output = run(&command, &["run", "--preload", "sh", "-c", "exit 7"], &[]);
    assert_eq!(output.status.code(), Some(7));
    let missing = run(&command, &["run", "--preload", "no-such-program"], &[]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(stderr(&missing).starts_with("lowtide: no-such-program: "));
    let directory = run(&command, &["run", "--preload", "/"], &[]);
    assert_eq!(directory.status.code(), Some(126));
}

/// A Python that finds lowtide's package, and prints the arguments that it is started with.
const PYTHON: &str =
    "#!/bin/sh\n[ \"$1\" = -c ] || { printf '%s|' \"$@\" \"$LOWTIDE_RECORD\"; exit 7; }\n";

#[test]
fn scripts_are_run_by_the_python_beside_the_command() {
    let scratch = Scratch::new("run_script");
    let command = install(&scratch, None);
    let python = scratch.write("bin/python", PYTHON);
    fs::set_permissions(&python, Permissions::from_mode(0o755)).unwrap();
    let check = |arguments: &[&str], expected: &str| {
        let output = run(&command, arguments, &[]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
        assert_eq!(output.status.code(), Some(7));
    };
    check(
        &["run", "a b.py", "--preload", "-x"],
        "-m|lowtide|run|--|a b.py|--preload|-x||",
    );
    check(
        &["run", "--", "--preload", "x"],
        "-m|lowtide|run|--|--preload|x||",
    );
    check(&["run", "-m", "train"], "-m|lowtide|run|--|-m|train||");
    check(
        &[
            "run",
            "--strategy",
            "bfc",
            "--config=x:1",
            "torchrun",
            "a.py",
        ],
        "-m|lowtide|run|--strategy=bfc|--config=x:1|--|torchrun|a.py||",
    );
    check(&["build"], "-m|lowtide|build||");
    check(&["doctor", "--json"], "-m|lowtide|doctor|--json||");
}

#[test]
fn what_starts_python_is_put_on_lowtide_to_be_recorded() {
    let scratch = Scratch::new("run_record");
    let command = install(&scratch, None);
    for (name, text) in [
        ("bin/python", PYTHON),
        ("bin/launch", "#!/usr/bin/env python3\n"),
    ] {
        let program = scratch.write(name, text);
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    }
    let [file, launch] = ["job.lowtide", "bin/launch"].map(|name| scratch.path(name));
    let [file, launch] = [file, launch].map(|path| path.to_str().unwrap().to_owned());
    let check = |words: &[&str], expected: &str| {
        let output = run(&command, &[&["record", "-o", &file], words].concat(), &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(text, format!("-m|lowtide|{expected}|{file}|"));
        assert_eq!(output.status.code(), Some(7));
    };
    check(&["train.py", "x"], "run|--|train.py|x");
    check(&["-m", "train"], "run|--|-m|train");
    check(
        &["python3", "t.py", "-m", "lowtide"],
        "run|--|python3|t.py|-m|lowtide",
    );
    check(&["python3", "train.py"], "run|--|python3|train.py");
    check(&[&launch, "train.py"], &format!("run|--|{launch}|train.py"));
    let python = scratch.path("bin/python");
    let itself = [python.to_str().unwrap(), "-m", "lowtide", "run", "x.py"];
    check(&itself, "run|x.py");
    // A shell may start Python.
    check(&["sh", "-c", "true"], "run|--|sh|-c|true");
}

#[test]
fn each_mistake_has_its_line() {
    let scratch = Scratch::new("run_mistakes");
    let command = install(&scratch, None);
    let check = |arguments: &[&str], expected: &str| {
        let line = failure(&run(&command, arguments, &[]));
        assert!(line.contains(expected), "{line}");
    };
    check(&["run", "--preload", "true"], "no liblowtide.so beside ");
    let without_python = run(&command, &["run", "true"], &[("PATH", "")]);
    assert!(failure(&without_python).starts_with("no Python here has the package lowtide: "));
    check(&["run", "--preload"], "<PROGRAM>");
    check(&["run", "--preload", ""], "no program given");
    check(
        &["run", "--preload", "--stratgy", "bfc", "true"],
        "unknown option `--stratgy`",
    );
    check(
        &["run", "--preload", "--strategy", "best", "true"],
        "Unknown strategy 'best'",
    );
    let twice = ["--strategy", "bfc:retry_ms:1", "--config", "retry_ms:2"];
    check(
        &[&["run", "--preload"], &twice[..], &["true"]].concat(),
        "the options are given twice",
    );
    check(
        &["run", "--preload", "--config", "x:1", "true"],
        "Unrecognized key 'x'",
    );
}
