//! A file that PyTorch's profiler exported: when it is from, and a copy of it with further events.
//!
//! The file is read twice from its beginning to its end, and never kept in memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek as _, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use flate2::bufread::MultiGzDecoder;

use super::tokens::{Token, Tokens};
use crate::format;
use crate::progress::{Progress, ReadWithProgress};

/// The first bytes of a file that gzip compressed.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The depth of the file's own fields, and of those of an event.
const IN_FILE: u64 = 1;
const IN_EVENTS: u64 = 2;
const IN_EVENT: u64 = 3;

/// A file of PyTorch's profiler.
pub(crate) struct Profile {
    /// Its name for messages, on one line.
    pub(super) name: String,
    /// The time that the times in the file count from, in nanoseconds since 1970. Before PyTorch 2.4, that is 1970.
    pub(super) base_ns: i64,
    /// The times of its first event and of the end of its last one, in nanoseconds since 1970; `None` if it has no
    /// event.
    pub(super) span_ns: Option<(i64, i64)>,
    /// The number of bytes up to its first event.
    events_at: u64,
    has_events: bool,
    file: File,
}

/// What a scan has found so far.
#[derive(Default)]
struct Scan {
    base_ns: Option<i64>,
    events_at: Option<u64>,
    has_events: bool,
    /// The beginning of the first event and the end of the last, in microseconds.
    span_us: Option<(f64, f64)>,
    /// The number of brackets that are open.
    depth: u64,
    /// Whether the open bracket at [`IN_EVENTS`] is that of the events.
    is_in_events: bool,
    event: Event,
}

/// The times of an event in microseconds.
#[derive(Default)]
struct Event {
    ts: Option<f64>,
    dur: Option<f64>,
    is_metadata: bool,
}

impl Profile {
    /// Opens the file at `path`, and reads it once. Linear time, and as much memory for a large file as for a small
    /// one.
    ///
    /// # Errors
    ///
    /// If the file cannot be read twice, is cut off, or has no events.
    pub(crate) fn open(path: &Path) -> Result<Profile> {
        let name = format::path(path);
        let file = File::open(path).with_context(|| name.clone())?;
        let mut scan = Scan::default();
        let scanned = reader(&file).and_then(|reader| scan.read(reader));
        scanned.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => anyhow!("{name}: the profile is cut off"),
            io::ErrorKind::NotSeekable => {
                anyhow!("{name}: is a pipe, and a profile is read twice; name a file")
            }
            _ => anyhow!("{name}: {error}"),
        })?;
        let Some(events_at) = scan.events_at else {
            bail!(
                "{name}: is no profile with `traceEvents`, as export_chrome_trace() of torch.profiler writes it"
            );
        };
        let base_ns = scan.base_ns.unwrap_or(0);
        Ok(Profile {
            name,
            base_ns,
            span_ns: { scan.span_us }.map(|(first, last)| (at(base_ns, first), at(base_ns, last))),
            events_at,
            has_events: scan.has_events,
            file,
        })
    }

    /// Writes the file with further events before its own. `write_events` writes these, separated by commas.
    pub(super) fn write_with(
        &self,
        out: &mut dyn Write,
        write_events: impl FnOnce(&mut dyn Write) -> Result<()>,
    ) -> Result<()> {
        let mut reader = reader(&self.file).with_context(|| self.name.clone())?;
        io::copy(&mut reader.by_ref().take(self.events_at), out)?;
        write_events(out)?;
        out.write_all(if self.has_events { b",\n" } else { b"\n" })?;
        io::copy(&mut reader, out)?;
        Ok(())
    }
}

/// Returns a reader from the beginning of the file, which decompresses it if gzip compressed it.
fn reader(file: &File) -> io::Result<Box<dyn BufRead + '_>> {
    let mut rewound = file;
    rewound.rewind()?;
    let progress = Progress::new("reading", file.metadata()?.len());
    let reader = ReadWithProgress {
        reader: file,
        progress,
    };
    let mut reader = BufReader::with_capacity(1 << 16, reader);
    Ok(if reader.fill_buf()?.starts_with(&GZIP) {
        Box::new(BufReader::new(MultiGzDecoder::new(reader)))
    } else {
        Box::new(reader)
    })
}

/// Returns the time that is `us` microseconds after a base.
#[expect(
    clippy::cast_possible_truncation,
    reason = "beyond the largest time is the largest time"
)]
fn at(base_ns: i64, us: f64) -> i64 {
    base_ns.saturating_add((us * 1000.0) as i64)
}

impl Scan {
    /// Reads a file to its end.
    fn read(&mut self, reader: impl BufRead) -> io::Result<()> {
        let mut tokens = Tokens::new(reader);
        let (mut key, mut word) = (None, None);
        while let Some(token) = tokens.next()? {
            match token {
                Token::Word(next) => {
                    word = Some(next);
                    self.has_events |= self.is_in_events;
                    continue;
                }
                Token::Colon => {
                    key = word.take();
                    continue;
                }
                Token::OpenObject | Token::OpenArray => {
                    let key = key.as_ref().map_or("", |key| key.text());
                    self.open(token, key, tokens.position());
                }
                Token::Comma | Token::Close => {
                    if let (Some(key), Some(word)) = (&key, &word) {
                        self.field(key.text(), word.text());
                    }
                    if token == Token::Close {
                        self.close();
                    }
                }
            }
            (key, word) = (None, None);
        }
        if self.depth > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    fn open(&mut self, token: Token, key: &str, position: u64) {
        self.has_events |= self.is_in_events;
        self.depth += 1;
        let is_first = self.depth == IN_EVENTS && self.events_at.is_none();
        if is_first && token == Token::OpenArray && key == "traceEvents" {
            self.events_at = Some(position);
            self.is_in_events = true;
        }
    }

    fn close(&mut self) {
        if self.depth == IN_EVENT && self.is_in_events {
            let event = std::mem::take(&mut self.event);
            self.add(&event);
        }
        self.is_in_events &= self.depth > IN_EVENTS;
        self.depth = self.depth.saturating_sub(1);
    }

    fn field(&mut self, key: &str, value: &str) {
        match (self.depth, key) {
            (IN_FILE, "baseTimeNanoseconds") => self.base_ns = value.parse().ok(),
            (IN_EVENT, "ts") => self.event.ts = value.parse().ok(),
            (IN_EVENT, "dur") => self.event.dur = value.parse().ok(),
            (IN_EVENT, "ph") => self.event.is_metadata = value == "M",
            _ => {}
        }
    }

    /// Adds the time of an event. PyTorch writes 0 for a time that it does not know.
    fn add(&mut self, event: &Event) {
        let Some(start) = event.ts.filter(|&ts| ts > 0.0 && !event.is_metadata) else {
            return;
        };
        let end = start + event.dur.unwrap_or(0.0).max(0.0);
        let (first, last) = self.span_us.unwrap_or((start, end));
        self.span_us = Some((first.min(start), last.max(end)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(json: &str) -> Scan {
        let mut scan = Scan::default();
        scan.read(json.as_bytes()).unwrap();
        scan
    }

    #[test]
    fn only_the_times_of_events_count() {
        let json = r#"{"ts": 1, "deviceProperties": [{"ts": 2, "traceEvents": [{"ts": 3}]}], "traceEvents": [
            {"ph": "M", "ts": 4, "args": {"name": "]}"}},
            {"ph": "X", "ts": 0, "dur": 900},
            {"ph": "X", "ts": 20.5, "dur": 10, "args": {"ts": 5, "dur": [6, {"ts": 7}]}},
            {"ph": "i", "args": {"ts": 8}, "ts": 11.25},
            {"args": {"traceEvents": [{"ts": 9}]}}
        ], "more": [{"ts": 10}], "traceEvents": [{"ts": 12}], "baseTimeNanoseconds": 1795978805000000000}"#;
        let scan = scan(json);
        assert_eq!(scan.span_us, Some((11.25, 30.5)));
        assert_eq!(scan.base_ns, Some(1_795_978_805_000_000_000));
        assert!(scan.has_events);
        let (before, _) = json.split_at(usize::try_from(scan.events_at.unwrap()).unwrap());
        assert!(
            before.ends_with("[{\"ts\": 3}]}], \"traceEvents\": ["),
            "{before}"
        );
    }

    #[test]
    fn a_profile_may_have_no_events() {
        for json in ["{\"traceEvents\": []}", "{\"traceEvents\": [], \"x\": [1]}"] {
            let scan = scan(json);
            assert!(scan.events_at.is_some() && !scan.has_events, "{json}");
            assert_eq!((scan.span_us, scan.base_ns), (None, None));
        }
    }

    #[test]
    fn times_beyond_the_largest_are_the_largest() {
        assert_eq!(at(i64::MAX, 1e300), i64::MAX);
        assert_eq!(at(-5, f64::NAN), -5);
        assert_eq!(at(1000, 2.5), 3500);
    }
}
