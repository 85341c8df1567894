//! `ThreadSanitizer` on the exported functions, and on what 16 threads do with one device.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::process::{Stop, cargo, step};

/// Both halves of each program: the standard library is built with the sanitizer too, so that its locks
/// order what they order; and what a test opens when it runs finds the sanitizer in the test.
const FLAGS: &str = "-Zsanitizer=thread -Clink-arg=-Wl,--export-dynamic --cfg lowtide_tsan";

/// Where rustup's component rust-src has the standard library.
const LIBRARY: &str = "lib/rustlib/src/rust/library/Cargo.toml";

/// Runs the tests of the exported functions with the sanitizer, each thread of `stress` making `operations`
/// requests.
///
/// One of the tests is a race, which must be reported: where it is not, the others have shown nothing.
pub(crate) fn run(root: &Path, operations: u32) -> Result<(), Stop> {
    let version = ask_nightly(&["--version", "--verbose"]).ok_or_else(|| {
        let line = "tsan needs nightly: rustup toolchain install nightly --component rust-src";
        Stop::new(1, line)
    })?;
    let sysroot = ask_nightly(&["--print", "sysroot"]).unwrap_or_default();
    if !Path::new(sysroot.trim()).join(LIBRARY).exists() {
        let line = "tsan needs nightly's component rust-src: \
                    rustup component add rust-src --toolchain nightly";
        return Err(Stop::new(1, line));
    }
    let host = host_of(&version)
        .ok_or_else(|| Stop::new(1, "tsan: rustc does not say for which machine it builds"))?;
    let arguments = [
        "+nightly",
        "test",
        "-Zbuild-std",
        // The flags are not for what is built to be run by the build, which has no sanitizer.
        "--target",
        host,
        "--release",
        "--package",
        "lowtide-capi",
        "--tests",
        "--",
        "--test-threads=1",
        // The C compiler links that one, without the sanitizer.
        "--skip",
        "a_c_program_runs",
    ];
    let mut tests = cargo(root, &arguments);
    tests
        .env("RUSTFLAGS", FLAGS)
        .env("LOWTIDE_TSAN", "1")
        .env("LOWTIDE_STRESS_OPERATIONS", operations.to_string());
    step("ThreadSanitizer", &mut tests)
}

/// Returns what nightly's compiler prints, if there is one.
fn ask_nightly(arguments: &[&str]) -> Option<String> {
    let mut rustc = Command::new("rustc");
    rustc.arg("+nightly").args(arguments).stderr(Stdio::null());
    let output = rustc.output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then_some(text)
}

/// Returns the target that a compiler builds for by itself, from what it says of its version.
fn host_of(version: &str) -> Option<&str> {
    version.lines().find_map(|line| line.strip_prefix("host: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_found() {
        let version = "rustc 1.97.0-nightly\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\n";
        assert_eq!(host_of(version), Some("x86_64-unknown-linux-gnu"));
        assert_eq!(host_of("rustc 1.97.0-nightly\n"), None);
    }
}
