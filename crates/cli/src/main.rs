//! The `lowtide` command. From a recording of a job and without a GPU, it shows where the job's memory went and
//! what other allocators or settings would have done. It also runs any CUDA program with lowtide as its allocator,
//! and checks what lowtide finds on this machine.
//!
//! A bad argument or file is reported as one line on standard error, with exit code 2.
#![forbid(unsafe_code)]

mod advise;
mod args;
mod capacity;
mod check;
mod convert;
mod diff;
mod doctor;
mod format;
mod job;
mod json;
mod leaks;
mod moment;
mod output;
mod page;
mod perfetto;
mod program;
mod progress;
mod python;
mod ranking;
mod record;
mod recording;
mod replay;
mod replays;
mod report;
mod run;
#[cfg(test)]
mod samples;
mod sites;
mod summary;
mod table;
mod top;

use std::process::ExitCode;

use args::Command;

fn printed(text: Vec<u8>) -> anyhow::Result<ExitCode> {
    output::print(&text).map(|()| ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let command = match args::parse() {
        Ok(command) => command,
        Err(exit_code) => return exit_code,
    };
    let result = match &command {
        Command::Replay(args) => replay::run(args).map(|()| ExitCode::SUCCESS),
        Command::Advise(args) => advise::run(args).map(|()| ExitCode::SUCCESS),
        Command::Convert(args) => convert::run(args).map(|()| ExitCode::SUCCESS),
        Command::Summary(args) => summary::run(args).map(|()| ExitCode::SUCCESS),
        Command::Report(args) => report::run(args).map(|()| ExitCode::SUCCESS),
        Command::Diff(args) => diff::run(args).map(|()| ExitCode::SUCCESS),
        Command::Leaks(args) => leaks::run(args).map(|()| ExitCode::SUCCESS),
        Command::Check(args) => check::run(args),
        Command::Run(args) => run::run(args),
        Command::Record(args) => record::run(args),
        Command::Top(args) => top::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Build => python::become_package(&["build"]),
        Command::Completion(args) => printed(args::completion(args.shell)),
        Command::Man => args::manual().map_err(Into::into).and_then(printed),
    };
    match result {
        Ok(exit_code) => exit_code,
        Err(error) => {
            output::note(&output::line(&error));
            ExitCode::from(2)
        }
    }
}
