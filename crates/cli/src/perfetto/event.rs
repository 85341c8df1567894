//! Writes events of the trace event format.
//!
//! <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>

use std::io::{self, Write};

use anyhow::Result;
use serde::{Serialize, Serializer};

/// The first id of a process. Linux has none above 2^22, and devices have small numbers, so no process of a profile has
/// such an id.
const FIRST_PROCESS: u64 = 5_000_000;

/// The distance between the ids of two processes. The ids of a process's threads lie between: older versions of
/// Perfetto give two threads of one id one name, even in different processes.
const IDS_EACH: u64 = 1000;

/// The duration of the shortest slice: the resolution of a recording, in microseconds. If a slice seems to begin and
/// end at the same time, Perfetto moves its end before its beginning.
const SLICE_MIN_US: f64 = 1.0;

/// A row of slices: a thread of a process in the format's terms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    process: u64,
    id: u64,
}

/// Writes events, separated by commas.
pub(super) struct Events<'w> {
    out: &'w mut dyn Write,
    /// The time that the times in the file count from, in nanoseconds since 1970.
    base_ns: i64,
    is_first: bool,
    processes: u64,
    /// The rows of the last process.
    rows: u64,
}

/// An event. Which of the fields it has depends on its phase.
#[derive(Serialize)]
struct Event<'a, Args> {
    ph: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    pid: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<u64>,
    /// Microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    /// The scope of an instant: `t`, its thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args>,
}

/// What a name belongs to.
#[derive(Serialize)]
struct Name<'a> {
    name: &'a str,
}

/// The values of a counter.
struct Values<'a> {
    keys: &'a [String],
    values: &'a [u64],
}

impl Serialize for Values<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.keys.iter().zip(self.values))
    }
}

impl<'w> Events<'w> {
    /// Returns a writer of events whose times count from `base_ns`.
    pub(super) fn new(out: &'w mut dyn Write, base_ns: i64) -> Events<'w> {
        Events {
            out,
            base_ns,
            is_first: true,
            processes: 0,
            rows: 0,
        }
    }

    /// Begins a process. What follows belongs to it.
    pub(super) fn begin_process(&mut self, name: &str) -> Result<()> {
        self.processes += 1;
        self.rows = 0;
        self.put_name("process_name", None, name)
    }

    /// Adds a row of slices to the process.
    pub(super) fn add_row(&mut self, name: &str) -> Result<Row> {
        self.rows += 1;
        let process = self.process();
        let row = Row {
            process,
            id: process + self.rows,
        };
        self.put_name("thread_name", Some(row.id), name)?;
        Ok(row)
    }

    /// Writes the values of a counter of the process. Each key is a track.
    pub(super) fn count(
        &mut self,
        name: &str,
        time_ns: i64,
        keys: &[String],
        values: &[u64],
    ) -> Result<()> {
        let ts = self.microseconds(time_ns);
        self.put(&Event {
            ph: "C",
            name: Some(name),
            pid: self.process(),
            tid: None,
            ts: Some(ts),
            s: None,
            args: Some(Values { keys, values }),
        })
    }

    /// Writes a slice, or an instant if it is shorter than [`SLICE_MIN_US`]. The slices of a row do not overlap, and
    /// are written in order.
    pub(super) fn slice(
        &mut self,
        row: Row,
        name: &str,
        times_ns: (i64, i64),
        args: Option<impl Serialize>,
    ) -> Result<()> {
        let [start, end] = [times_ns.0, times_ns.1].map(|time_ns| self.microseconds(time_ns));
        if end - start < SLICE_MIN_US {
            return self.put_in(row, "i", Some(name), start, args);
        }
        // With a beginning and an end, and not with a duration, neighbours never overlap: both times of a boundary are
        // rounded alike.
        self.put_in(row, "B", Some(name), start, args)?;
        self.put_in(row, "E", None, end, None::<()>)
    }

    /// Writes what has no duration.
    pub(super) fn instant(
        &mut self,
        row: Row,
        name: &str,
        time_ns: i64,
        args: impl Serialize,
    ) -> Result<()> {
        let time = self.microseconds(time_ns);
        self.put_in(row, "i", Some(name), time, Some(args))
    }

    /// Names the process, or one of its rows.
    fn put_name(&mut self, what: &str, row: Option<u64>, name: &str) -> Result<()> {
        self.put(&Event {
            ph: "M",
            name: Some(what),
            pid: self.process(),
            tid: row,
            ts: None,
            s: None,
            args: Some(Name { name }),
        })
    }

    fn put_in(
        &mut self,
        row: Row,
        ph: &'static str,
        name: Option<&str>,
        ts: f64,
        args: Option<impl Serialize>,
    ) -> Result<()> {
        self.put(&Event {
            ph,
            name,
            pid: row.process,
            tid: Some(row.id),
            ts: Some(ts),
            s: (ph == "i").then_some("t"),
            args,
        })
    }

    fn put(&mut self, event: &impl Serialize) -> Result<()> {
        let separator: &[u8] = if self.is_first { b"\n" } else { b",\n" };
        self.is_first = false;
        self.out.write_all(separator)?;
        Ok(serde_json::to_writer(&mut *self.out, event).map_err(io::Error::from)?)
    }

    /// Returns the id of the process.
    fn process(&self) -> u64 {
        FIRST_PROCESS + IDS_EACH * (self.processes - 1)
    }

    /// Returns a time as the file has it; 0 for an earlier one, because Perfetto drops events before 0.
    #[expect(
        clippy::cast_precision_loss,
        reason = "a hundred days are exact to the nanosecond, as profiles have them"
    )]
    fn microseconds(&self, time_ns: i64) -> f64 {
        time_ns.saturating_sub(self.base_ns).max(0) as f64 / 1000.0
    }
}
