//! The project's own commands: `cargo xtask test | tidy | header | web | screenshots | wheel | gpu | torch | fuzz | mutants | miri | tsan | bench`.
//!
//! `test` needs what rustup installs, Python and Node.js; a tool that a command needs and does not find is named in
//! one line. Nothing is ever installed from here, but Python's tools among what cargo builds, and Node's in `web`.
#![forbid(unsafe_code)]

mod command;
mod header;
mod mutants;
mod process;
mod python;
mod tidy;
mod tsan;
mod web;

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser as _;
use command::Arguments;
use process::Stop;

fn main() -> ExitCode {
    let Arguments { command } = Arguments::parse();
    let Err(stop) = root().and_then(|root| command.run(&root)) else {
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
