//! Tests that need their own process: a C program, compiled against the header.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Output};
use std::sync::OnceLock;

/// Compiles `tests/c/program.c` once. In the same directory, the shared object gets the name under which programs
/// look for it. Other test processes may do the same at the same time, so each creates its own files and renames
/// them.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let own = directory.join(process::id().to_string());
        let library = directory.join("libcuda.so.1");
        symlink(fakecuda::library_path(), &own).unwrap();
        fs::rename(&own, &library).unwrap();
        let program = directory.join("program");
        let compiled = Command::new("cc")
            .args([
                "-std=c11",
                "-D_GNU_SOURCE",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-I",
            ])
            .arg(crate_directory.join("include"))
            .arg(crate_directory.join("tests/c/program.c"))
            .arg(&library)
            .arg("-o")
            .arg(&own)
            .status();
        assert!(compiled.unwrap().success());
        fs::rename(&own, &program).unwrap();
        program
    })
}

/// Runs the program with these arguments and variables.
pub(crate) fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let program = program();
    let output = Command::new(program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", program.parent().unwrap())
        .env_remove("FAKECUDA_DEVICES")
        .envs(variables.iter().copied())
        .output();
    output.unwrap()
}

/// Returns what the program printed. Panics if it failed.
pub(crate) fn printed(output: &Output) -> &str {
    let errors = str::from_utf8(&output.stderr).unwrap();
    assert!(output.status.success(), "{errors}");
    str::from_utf8(&output.stdout).unwrap()
}

#[test]
fn calls_after_the_end_fail_and_are_reported() {
    let output = run(&["exit"], &[]);
    assert_eq!(printed(&output), "freed: 0\nfreed: 4\n");
    assert_eq!(
        str::from_utf8(&output.stderr).unwrap(),
        "fakecuda: cuMemFree_v2 was called after the driver was gone\n"
    );
}

#[test]
fn a_forked_child_has_no_driver() {
    assert_eq!(printed(&run(&["fork"], &[])), "child: 3 3\nparent: 0\n");
}

#[test]
fn a_program_that_touches_what_it_may_not_is_killed() {
    let output = run(&["fault"], &[]);
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV));
    assert_eq!(output.stdout, b"read: 1\n");
}

#[test]
fn the_environment_says_what_there_is_and_what_fails() {
    let output = run(&["environment"], &[]);
    let expected = "init: 0\ndevices: 1 of 8589934592\ncreate: 0\ncreate: 0\ncreate: 0\n\
                    live: 3 handles, 6291456 bytes, 3 calls\n";
    assert_eq!(printed(&output), expected);
    let output = run(
        &["environment"],
        &[
            ("FAKECUDA_DEVICES", "3"),
            ("FAKECUDA_CAPACITY", "4194304"),
            ("FAKECUDA_FAIL", "cuMemCreate:2:800,cuMemCreate:3"),
        ],
    );
    let expected = "init: 0\ndevices: 3 of 4194304\ncreate: 0\ncreate: 800\ncreate: 2\n\
                    live: 1 handles, 2097152 bytes, 3 calls\n";
    assert_eq!(printed(&output), expected);
    let output = run(&["environment"], &[("FAKECUDA_DEVICES", "0")]);
    assert_eq!(printed(&output), "init: 100\n");
    let output = run(&["environment"], &[("FAKECUDA_FAIL", "cuInit:1:999")]);
    assert_eq!(printed(&output), "init: 999\n");
}

#[test]
fn an_environment_that_makes_no_sense_is_reported() {
    for (name, value) in [
        ("FAKECUDA_FAIL", "cuNoSuchCall:1"),
        ("FAKECUDA_FAIL", "cuMemMap"),
        ("FAKECUDA_FAIL", "cuMemMap:0"),
        ("FAKECUDA_FAIL", "cuMemMap:1:2:3"),
        ("FAKECUDA_DEVICES", "two"),
        ("FAKECUDA_CAPACITY", "1GiB"),
    ] {
        let output = run(&["environment"], &[(name, value)]);
        assert_eq!(printed(&output), "init: 1\n", "{name}={value}");
        let errors = str::from_utf8(&output.stderr).unwrap();
        assert!(errors.contains(name) && errors.contains(value), "{errors}");
    }
}

#[test]
fn memory_is_not_limited_by_open_files() {
    assert_eq!(printed(&run(&["many"], &[])), "");
}
