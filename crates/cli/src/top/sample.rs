//! What processes say of themselves: asked over their sockets, in Prometheus's text format.

use std::fs;
use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use anyhow::Context as _;

/// Where the system lists its sockets.
const SOCKETS: &str = "/proc/net/unix";
/// What the names of lowtide's begin with.
const PREFIX: &str = "@lowtide-top-";
/// How long a process may take to answer. One that is stopped never does.
const PATIENCE: Duration = Duration::from_millis(500);
/// No process has so much to say.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// What a process says.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answer {
    pub(super) pid: u32,
    pub(super) samples: Vec<Sample>,
}

/// One figure.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) labels: Vec<(String, String)>,
    pub(super) value: f64,
}

impl Sample {
    /// Returns the value of a label; the empty text where there is none.
    pub(super) fn label(&self, name: &str) -> &str {
        let found = self.labels.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value)
    }
}

/// Returns what every process of this user says that runs on lowtide, in the same network namespace.
///
/// # Errors
///
/// If the system does not list its sockets.
pub(super) fn all() -> anyhow::Result<Vec<Answer>> {
    let sockets = fs::read_to_string(SOCKETS).context(SOCKETS)?;
    let names = sockets.lines().filter_map(|line| {
        let (_, name) = line.rsplit_once(' ')?;
        name.starts_with(PREFIX).then_some(name)
    });
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    // The sockets of those that are being answered have the name, too.
    names.dedup();
    Ok(names.into_iter().filter_map(ask).collect())
}

/// Returns what one process says; nothing where it is another user's, has just ended or does not answer.
fn ask(name: &str) -> Option<Answer> {
    let number = name.strip_prefix(PREFIX)?.split('-').next()?;
    let address = SocketAddr::from_abstract_name(name.strip_prefix('@')?).ok()?;
    let stream = UnixStream::connect_addr(&address).ok()?;
    // Anyone may give a socket this name. The number is another one where the process has a namespace of its own.
    let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    if peer.uid != rustix::process::geteuid() {
        return None;
    }
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut text = String::new();
    stream.take(TEXT_BYTES_MAX).read_to_string(&mut text).ok()?;
    let samples: Vec<Sample> = text.lines().filter_map(parse).collect();
    let pid = number.parse().ok()?;
    (!samples.is_empty()).then_some(Answer { pid, samples })
}

/// Returns the figure in a line, `name{label="value",…} 1`; nothing for a comment, or for what is none.
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

/// Returns what stands before the next quotation mark, and what behind it.
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
