//! The project's own commands: `cargo xtask test | tidy | header | web | screenshots | wheel | shims | gpu | torch | fuzz | mutants | miri | tsan | bench`.
//!
//! `test` needs rustup's toolchain, Python and Node.js. If a command's tool is missing, one line names it. Nothing
//! is installed outside this project: Python's tools go into cargo's build directory, Node's into `web`.
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
/// The path is read from the environment, not compiled in. A build directory may be moved to another checkout, and
/// its binary must then use that checkout.
fn root() -> Result<PathBuf, Stop> {
    env::var_os("CARGO_MANIFEST_DIR")
        .and_then(|xtask| Some(PathBuf::from(xtask).parent()?.to_path_buf()))
        .ok_or_else(|| Stop::new(1, "start this by `cargo xtask`"))
}
