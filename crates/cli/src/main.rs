//! The `lowtide` command: what any allocator, or any setting of PyTorch's, would have done with a job,
//! from a recording of it and without a GPU.
//!
//! Everything that is wrong with an argument or a file is one line on standard error and exit code 2.
#![forbid(unsafe_code)]

mod advise;
mod args;
mod capacity;
mod convert;
mod format;
mod html;
mod json;
mod output;
mod progress;
mod ranking;
mod recording;
mod replay;
#[cfg(test)]
mod samples;
mod table;

use std::process::ExitCode;

use args::Command;

fn main() -> ExitCode {
    let command = match args::parse() {
        Ok(command) => command,
        Err(exit_code) => return exit_code,
    };
    let result = match &command {
        Command::Replay(args) => replay::run(args),
        Command::Advise(args) => advise::run(args),
        Command::Convert(args) => convert::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("{error:#}"));
            ExitCode::from(2)
        }
    }
}
