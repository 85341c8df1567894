//! Asks the processes of this user for their metrics, each with a name and labels.

use std::env;
use std::ffi::OsString;
use std::io::{ErrorKind, Read as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lowtide_sockets::{Directory, Places, process_of};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The time in which all processes together have to answer. A stopped process never answers.
const PATIENCE: Duration = Duration::from_millis(500);
/// No process has an answer this long.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// The answer of a process.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answer {
    pub(super) pid: u32,
    /// The name of its socket. Processes of two containers may have the same number.
    pub(super) name: OsString,
    pub(super) samples: Vec<Sample>,
}

/// A process that was asked for its metrics.
struct Asked {
    pid: u32,
    name: OsString,
    stream: UnixStream,
    text: Vec<u8>,
}

/// The state of an answer.
enum Progress {
    /// More may follow.
    Open,
    Complete,
    /// The process ended, or its answer is invalid.
    Failed,
}

/// One metric.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) labels: Vec<(String, String)>,
    pub(super) value: f64,
}

impl Sample {
    /// Returns the value of a label; the empty text if the metric does not have it.
    pub(super) fn label(&self, name: &str) -> &str {
        let found = self.labels.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value)
    }
}

/// Returns the answers of all of this user's processes on lowtide. Processes that do not answer in time are left
/// out.
pub(super) fn all() -> Vec<Answer> {
    let directories = Places::new(env::var_os("XDG_RUNTIME_DIR")).all();
    let asked = directories.iter().flat_map(ask_all).collect();
    answers(asked, Instant::now() + PATIENCE)
}

/// Asks every process that has a socket in a directory, and removes the sockets of processes that ended.
fn ask_all(directory: &Directory) -> Vec<Asked> {
    let ask = |name: OsString| {
        let pid = process_of(&name)?;
        match directory.connect(&name) {
            Ok(stream) => Some(Asked {
                pid,
                name,
                stream,
                text: Vec::new(),
            }),
            Err(error) => {
                if error.kind() == ErrorKind::ConnectionRefused {
                    // Another `lowtide top` may have removed it.
                    let _ = directory.remove(&name);
                }
                None
            }
        }
    };
    let names = directory.names().unwrap_or_default();
    names.into_iter().filter_map(ask).collect()
}

/// Returns the answers that are complete before the deadline.
fn answers(mut asked: Vec<Asked>, deadline: Instant) -> Vec<Answer> {
    let mut answers = Vec::new();
    while !asked.is_empty() {
        let Some(ready) = wait(&asked, deadline) else {
            break;
        };
        let mut ready = ready.into_iter();
        asked.retain_mut(|process| {
            if ready.next() != Some(true) {
                return true;
            }
            match process.read() {
                Progress::Open => true,
                Progress::Complete => {
                    answers.extend(process.answer());
                    false
                }
                Progress::Failed => false,
            }
        });
    }
    answers
}

/// Waits until a process sends more, and returns for each whether it did; `None` if none does before the deadline.
fn wait(asked: &[Asked], deadline: Instant) -> Option<Vec<bool>> {
    let left = deadline.checked_duration_since(Instant::now())?;
    let mut polled: Vec<PollFd<'_>> = asked
        .iter()
        .map(|process| PollFd::new(&process.stream, PollFlags::IN))
        .collect();
    let count = match poll(&mut polled, Some(&Timespec::try_from(left).ok()?)) {
        Err(rustix::io::Errno::INTR) => return Some(vec![false; asked.len()]),
        outcome => outcome.ok()?,
    };
    let is_ready = |polled: &PollFd<'_>| !polled.revents().is_empty();
    (count > 0).then(|| polled.iter().map(is_ready).collect())
}

impl Asked {
    /// Reads the bytes that have arrived.
    fn read(&mut self) -> Progress {
        let mut bytes = [0; 1 << 16];
        match self.stream.read(&mut bytes) {
            Ok(0) => Progress::Complete,
            Ok(count) => {
                self.text.extend_from_slice(&bytes[..count]);
                if self.text.len() > TEXT_BYTES_MAX {
                    Progress::Failed
                } else {
                    Progress::Open
                }
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => Progress::Open,
                _ => Progress::Failed,
            },
        }
    }

    /// Returns the answer; `None` if it contains no metric.
    fn answer(&self) -> Option<Answer> {
        let text = String::from_utf8_lossy(&self.text);
        let samples: Vec<Sample> = text.lines().filter_map(parse).collect();
        (!samples.is_empty()).then(|| Answer {
            pid: self.pid,
            name: self.name.clone(),
            samples,
        })
    }
}

/// Parses a line `name{label="value",…} 1`. Returns `None` for a comment and for anything else.
fn parse(line: &str) -> Option<Sample> {
    let name_length = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(name_length);
    if name.starts_with('#') {
        return None;
    }
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = unquoted(after)?;
            labels.push((label.to_owned(), value));
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    Some(Sample {
        name: name.to_owned(),
        labels,
        value: rest.trim().parse().ok()?,
    })
}

/// Returns the unescaped text up to the next quotation mark, and the text behind it.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[index + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_figures() {
        let sample = parse(r#"lowtide_x{a="1",b="\"\\n\n}, "} 2.5"#).unwrap();
        assert_eq!((&*sample.name, sample.value), ("lowtide_x", 2.5));
        assert_eq!(sample.label("a"), "1");
        assert_eq!(sample.label("b"), "\"\\n\n}, ");
        assert_eq!(sample.label("c"), "");
        assert_eq!(parse("up 1").unwrap().labels, []);
        for wrong in [
            "# HELP a b",
            "",
            "a",
            "a{",
            "a{b}",
            "a{b=\"c",
            "a{b=\"c\"} x",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
