//! The project's own commands: `cargo xtask test | tidy | header | web | screenshots | wheel | gpu | torch | fuzz | mutants | miri | tsan | bench`.
//!
//! `test` needs what rustup installs, Python and Node.js; a tool that a command needs and does not find is named in
//! one line. Nothing is ever installed from here, but Python's tools among what cargo builds, and Node's in `web`.
#![forbid(unsafe_code)]

mod command;
mod header;
mod mutants;
mod python;
mod tidy;
mod tsan;
mod web;

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use command::{Command, Stop};

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test                   formatting, tidy, clippy, documentation, the Python package, the report's page, then all tests
  tidy                   the project's own rules, which no other tool checks
  header                 writes crates/capi/include/lowtide.h, which `test` checks, from the source
  web                    makes the page of `lowtide report`, which `test` checks, from its sources in `web`
  screenshots            pictures of that page's views into `docs/report`; needs chromium
  wheel                  builds the Python package into `dist`
  gpu [ARGS]             tests and measurements on a GPU, and a record of them; `gpu --help` has ARGS
  torch VERSION [ARGS]   tests of the shim with a release of PyTorch, from PyPI, without a GPU; ARGS for pytest
  fuzz [--minutes N]     every fuzz target for N minutes (1) each; needs nightly and cargo-fuzz
  mutants [OPTIONS]      changes the source in --sample N (200) places, one after the other, and counts which changes a test notices;
                         --seed N (1) chooses the places, --minutes N (120) ends it; needs cargo-mutants
  miri                   lowtide-core's unit tests under Miri; needs nightly with the miri component
  tsan [--operations N]  lowtide-capi's tests under ThreadSanitizer, with N requests (100,000) a thread; needs nightly with rust-src
  bench [ARGS]           the benchmarks, and a record of them; with ARGS for `cargo bench`, no record
";

#[expect(
    clippy::print_stdout,
    reason = "help that was asked for is the command's output"
)]
fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match Command::parse(&arguments) {
        Err(message) => Err(Stop::new(2, format!("{message}; see `cargo xtask --help`"))),
        Ok(Command::Help) => {
            print!("{USAGE}");
            Ok(())
        }
        Ok(command) => root().and_then(|root| command.run(&root)),
    };
    let Err(stop) = outcome else {
        return ExitCode::SUCCESS;
    };
    if let Some(line) = &stop.line {
        eprintln!("xtask: {line}");
    }
    ExitCode::from(stop.status)
}

/// Returns the directory of the workspace.
///
/// Read from the environment and not compiled in: a build directory may be carried to another
/// checkout, and the binary in it must then look at that one.
fn root() -> Result<PathBuf, Stop> {
    env::var_os("CARGO_MANIFEST_DIR")
        .and_then(|xtask| Some(PathBuf::from(xtask).parent()?.to_path_buf()))
        .ok_or_else(|| Stop::new(1, "start this by `cargo xtask`"))
}
