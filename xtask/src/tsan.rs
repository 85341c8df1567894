//! Runs `ThreadSanitizer` on the exported functions, and on 16 threads that use one device.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::process::{Stop, cargo, step};

/// The flags for all parts of a program. The standard library is built with the sanitizer as well, so that it sees
/// the order that locks create. A library that a test opens at run time uses the test's sanitizer.
const FLAGS: &str = "-Zsanitizer=thread -Clink-arg=-Wl,--export-dynamic --cfg lowtide_tsan";

/// The standard library's path in rustup's component rust-src.
const LIBRARY: &str = "lib/rustlib/src/rust/library/Cargo.toml";

/// The test suites. `planted` and `preload` start C programs, which the sanitizer does not serve. `record` replaces
/// `pthread_create`, as it does. One test of `processes` and two of `regions` fail under it.
const SUITES: [&str; 9] = [
    "captures",
    "faults",
    "notifications",
    "peers",
    "pools",
    "random_failures",
    "requests",
    "share",
    "stress",
];

/// Runs the tests of the exported functions with the sanitizer. Each thread of `stress` makes `operations`
/// requests.
///
/// One of the tests is a race that must be reported. If it is not, the other tests prove nothing.
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
    let mut arguments = vec![
        "+nightly",
        "test",
        "-Zbuild-std",
        // With a target, the flags do not apply to build scripts, which run without a sanitizer.
        "--target",
        host,
        "--release",
        "--package",
        "lowtide-capi",
        "--lib",
    ];
    arguments.extend(SUITES.iter().flat_map(|suite| ["--test", suite]));
    arguments.extend(["--", "--test-threads=1"]);
    let mut tests = cargo(root, &arguments);
    tests
        .env("RUSTFLAGS", FLAGS)
        .env("LOWTIDE_TSAN", "1")
        .env("LOWTIDE_STRESS_OPERATIONS", operations.to_string());
    step("ThreadSanitizer", &mut tests)
}

/// Returns the output of nightly's compiler, if it is installed.
fn ask_nightly(arguments: &[&str]) -> Option<String> {
    let mut rustc = Command::new("rustc");
    rustc.arg("+nightly").args(arguments).stderr(Stdio::null());
    let output = rustc.output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then_some(text)
}

/// Returns a compiler's default target, from its version text.
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
