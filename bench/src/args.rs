//! The command line.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

/// The text of `--help`.
pub(crate) const HELP: &str = "\
usage: cargo run --release -p lowtide-bench -- COMMAND

  record [--trace FILE]… [--notes TEXT]   time everything; write bench/record/<machine>/<date>
  instructions [--update]                 count instructions; fail if they grew, or accept them
  answers [--update] [--trace FILE]…      check every benchmark's answer, or accept it
";

/// The command to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    Record {
        traces: Vec<PathBuf>,
        notes: Option<String>,
    },
    Instructions {
        update: bool,
    },
    Answers {
        update: bool,
        traces: Vec<PathBuf>,
    },
    /// Runs one pair benchmark. It has its own process, so that valgrind can count its instructions.
    Pair {
        case: String,
        strategy: String,
        count: usize,
    },
    /// Reads and replays one recording. It has its own process, so that its memory can be measured.
    Replay {
        path: PathBuf,
        strategy: String,
    },
}

impl Command {
    /// Parses the arguments.
    ///
    /// # Errors
    ///
    /// A message that names the wrong argument.
    pub(crate) fn parse(arguments: &[String]) -> Result<Command> {
        let Some((name, rest)) = arguments.split_first() else {
            return Ok(Command::Help);
        };
        let words: Vec<&str> = rest.iter().map(String::as_str).collect();
        Ok(match (name.as_str(), words.as_slice()) {
            ("help" | "--help" | "-h", _) => Command::Help,
            ("pair", &[case, strategy, count]) => Command::Pair {
                case: case.to_owned(),
                strategy: strategy.to_owned(),
                count: count.parse().context("a number of pairs")?,
            },
            ("replay", &[path, strategy]) => Command::Replay {
                path: path.into(),
                strategy: strategy.to_owned(),
            },
            ("record", words) => {
                let options = Options::parse(words)?;
                ensure!(!options.update, "`record` takes no `--update`");
                Command::Record {
                    traces: options.traces,
                    notes: options.notes,
                }
            }
            ("instructions", words) => {
                let options = Options::parse(words)?;
                let others = options.traces.is_empty() && options.notes.is_none();
                ensure!(others, "`instructions` takes only `--update`");
                Command::Instructions {
                    update: options.update,
                }
            }
            ("answers", words) => {
                let options = Options::parse(words)?;
                ensure!(options.notes.is_none(), "`answers` takes no `--notes`");
                Command::Answers {
                    update: options.update,
                    traces: options.traces,
                }
            }
            _ => bail!("cannot read `{}`; see --help", arguments.join(" ")),
        })
    }
}

#[derive(Default)]
struct Options {
    update: bool,
    traces: Vec<PathBuf>,
    notes: Option<String>,
}

impl Options {
    fn parse(words: &[&str]) -> Result<Options> {
        let mut options = Options::default();
        let mut words = words.iter();
        while let Some(&word) = words.next() {
            let mut value = || words.next().with_context(|| format!("`{word}` of what?"));
            match word {
                "--update" => options.update = true,
                "--trace" => options.traces.push(value()?.into()),
                "--notes" => options.notes = Some((*value()?).to_owned()),
                other => bail!("unknown option `{other}`; see --help"),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command> {
        let words: Vec<String> = line.split_whitespace().map(String::from).collect();
        Command::parse(&words)
    }

    #[test]
    fn commands_are_read() {
        assert_eq!(parse("").unwrap(), Command::Help);
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
    fn a_wrong_argument_is_named() {
        for (line, named) in [
            ("recrod", "`recrod`"),
            ("record --update", "`--update`"),
            ("record --trace", "`--trace` of what?"),
            ("instructions --trace a", "only `--update`"),
            ("answers --fast", "`--fast`"),
            ("pair live-1 bfc", "`pair live-1 bfc`"),
            ("pair live-1 bfc some", "a number of pairs"),
        ] {
            let message = format!("{:#}", parse(line).unwrap_err());
            assert!(message.contains(named), "{line}: {message}");
        }
    }
}
