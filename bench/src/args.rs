//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Records the benchmarks' results, and keeps the gate on instruction counts.
#[derive(Debug, PartialEq, Eq, Parser)]
#[command(bin_name = "cargo run --release -p lowtide-bench --")]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// One command with its arguments.
#[derive(Debug, PartialEq, Eq, Subcommand)]
pub(crate) enum Command {
    /// Times everything, and writes bench/record/<machine>/<date>.
    Record {
        /// A recording of another job; may be repeated.
        #[arg(long = "trace", value_name = "FILE")]
        traces: Vec<PathBuf>,
        /// What is unusual about the machine today.
        #[arg(long, value_name = "TEXT")]
        notes: Option<String>,
    },
    /// Counts instructions, and fails if they grew.
    Instructions {
        /// Accepts the counts.
        #[arg(long)]
        update: bool,
    },
    /// Checks every benchmark's answer.
    Answers {
        /// Accepts the answers.
        #[arg(long)]
        update: bool,
        /// A recording of another job; may be repeated.
        #[arg(long = "trace", value_name = "FILE")]
        traces: Vec<PathBuf>,
    },
    /// Runs one pair benchmark. It has its own process, so that valgrind can count its instructions.
    #[command(hide = true)]
    Pair {
        case: String,
        strategy: String,
        count: usize,
    },
    /// Reads and replays one recording. It has its own process, so that its memory can be measured.
    #[command(hide = true)]
    Replay { path: PathBuf, strategy: String },
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        let words = ["lowtide-bench"].into_iter().chain(line.split_whitespace());
        Arguments::try_parse_from(words).map(|arguments| arguments.command)
    }

    #[test]
    fn commands_are_read() {
        let record = Command::Record {
            traces: vec!["a.pickle".into(), "b.pickle".into()],
            notes: Some("loud".to_owned()),
        };
        let line = "record --trace a.pickle --notes loud --trace b.pickle";
        assert_eq!(parse(line).unwrap(), record);
        assert_eq!(
            parse("instructions --update").unwrap(),
            Command::Instructions { update: true }
        );
        let pair = Command::Pair {
            case: "live-1".to_owned(),
            strategy: "bfc".to_owned(),
            count: 7,
        };
        assert_eq!(parse("pair live-1 bfc 7").unwrap(), pair);
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for (line, kind) in [
            ("", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("recrod", ErrorKind::InvalidSubcommand),
            ("record --update", ErrorKind::UnknownArgument),
            ("record --trace", ErrorKind::InvalidValue),
            ("instructions --trace a", ErrorKind::UnknownArgument),
            ("answers --fast", ErrorKind::UnknownArgument),
            ("pair live-1 bfc", ErrorKind::MissingRequiredArgument),
            ("pair live-1 bfc some", ErrorKind::ValueValidation),
        ] {
            assert_eq!(parse(line).unwrap_err().kind(), kind, "{line}");
        }
    }
}
