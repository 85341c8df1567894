//! Writes a snapshot and a report when the process runs out of memory, for later analysis.

use std::ffi::c_void;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use lowtide_core::Count;
use lowtide_history::{BlockSizes, History, Leaks, PageData, PageTrace, trace_name};
use lowtide_trace::{Snapshot, Trace, TraceError};

use crate::boundary::run;
use crate::devices::Allocator;
use crate::environment::shown;
use crate::error::{Error, Status};
use crate::{environment, pauses, record};

/// The directory for the files that are written when memory runs out.
const VARIABLE: &str = "LOWTIDE_OOM_DUMP";

/// The report shows at most this many events, the last ones: the program waits for the report, and PyTorch's
/// history may have millions of events.
const REPORTED_EVENTS_MAX: usize = 100_000;

/// No report is made of a snapshot with more bytes than this.
const REPORTED_BYTES_MAX: usize = 128 << 20;

static WRITER: Mutex<Option<Writer>> = Mutex::new(None);

/// Passes the bytes of a PyTorch snapshot of this process to `write`, together with `to`, and returns whether it
/// succeeded. Called with the `context` that was registered with it, without any lock. It must not throw or
/// unwind.
pub type SnapshotWriter = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        write: unsafe extern "C" fn(to: *mut c_void, bytes: *const c_void, length: usize),
        to: *mut c_void,
    ) -> bool,
>;

/// Registers `writer`, which lowtide calls for the snapshot that `LOWTIDE_OOM_DUMP` requests when memory runs
/// out. The writer's snapshot can have what lowtide's has not: the call stacks. lowtide adds what is paused to
/// it. Without a writer, or if it returns false, lowtide writes its own snapshot. Null removes the writer.
///
/// # Safety
///
/// `writer` may be called with `context` from any thread until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_on_dump(writer: SnapshotWriter, context: *mut c_void) -> Status {
    run(|| {
        let writer = writer.map(|call| Writer { call, context });
        *WRITER.lock().map_err(|_| poisoned())? = writer;
        Ok(())
    })
}

/// A caller's function and its context.
#[derive(Clone, Copy)]
struct Writer {
    call: unsafe extern "C" fn(
        *mut c_void,
        unsafe extern "C" fn(*mut c_void, *const c_void, usize),
        *mut c_void,
    ) -> bool,
    context: *mut c_void,
}

// SAFETY: the function may be called from any thread, by the contract of `lowtide_on_dump`.
unsafe impl Send for Writer {}

/// Writes the files that `LOWTIDE_OOM_DUMP` requests and returns a sentence about them, once in a process; `None`
/// after that, or if the variable is not set.
#[cold]
pub(crate) fn write_once() -> Option<String> {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    let directory = environment::path_variable(VARIABLE)?;
    if IS_DONE.swap(true, Ordering::Relaxed) {
        return None;
    }
    let report = match write(&directory) {
        Ok(what) => format!("Written: {what}."),
        Err(error) => format!("{VARIABLE}={}: {}.", shown(&directory), error.text),
    };
    Some(report)
}

/// Writes the snapshot and its report into a directory, and returns a list of the files written.
fn write(directory: &Path) -> Result<String, Error> {
    let failed = |error: io::Error| Error::new(Status::File, error);
    let (pickle, snapshot) = snapshot()?;
    lowtide_files::create_directory(directory).map_err(failed)?;
    let path = directory.join("oom.pickle");
    let path = write_file(&path, environment::variable, &pickle).map_err(failed)?;
    let written = shown(&path);
    if pickle.len() > REPORTED_BYTES_MAX {
        return Ok(format!(
            "{written}, whose report would keep the program waiting: `lowtide report {written}` makes it"
        ));
    }
    let no_report = |error: &dyn Display| {
        let text = format_args!("{error}: {written} has no report");
        Error::new(Status::File, text)
    };
    let snapshot = match snapshot {
        Some(snapshot) => snapshot,
        None => lowtide_trace::read_from(&*pickle).map_err(|error| no_report(&error))?,
    };
    let (left_out, snapshot) = last_events(snapshot).map_err(|error| no_report(&error))?;
    let report = path.with_extension("html");
    let report = page(&path, &snapshot, left_out.as_deref())
        .and_then(|page| write_file(&report, |_| None, &page))
        .map_err(|error| no_report(&error))?;
    let report = shown(&report);
    Ok(match left_out {
        Some(left_out) => format!("{written} and {report}, which shows {left_out}"),
        None => format!("{written} and {report}"),
    })
}

/// Writes a new file without replacing an existing one, and returns its path.
fn write_file(
    path: &Path,
    variable: impl Fn(&str) -> Option<String>,
    contents: &[u8],
) -> io::Result<PathBuf> {
    let (mut file, path) = record::create_file(path, record::Existing::Stays, variable)?;
    if let Err(error) = file.write_all(contents) {
        // A partial file is useless. If it cannot be removed, it stays.
        let _ = lowtide_files::remove(&path);
        return Err(error);
    }
    Ok(path)
}

/// Returns a snapshot of the last events, at most [`REPORTED_EVENTS_MAX`], and a text that says which they are if
/// there were more.
fn last_events(snapshot: Snapshot) -> Result<(Option<String>, Snapshot), TraceError> {
    let lengths = |snapshot: &Snapshot| -> Vec<usize> {
        let traces = snapshot.traces.iter();
        traces.map(|trace| trace.events.len()).collect()
    };
    let before = lengths(&snapshot);
    let all: usize = before.iter().sum();
    if all <= REPORTED_EVENTS_MAX {
        return Ok((None, snapshot));
    }
    let shares = shares(&before, REPORTED_EVENTS_MAX);
    let traces = snapshot.traces.iter().zip(&shares);
    let last = Snapshot {
        traces: traces
            .map(|(trace, &share)| trace.last_events(share))
            .collect::<Result<_, _>>()?,
        ..snapshot
    };
    let kept: usize = shares.iter().sum();
    let (kept, all) = (Count(kept as u64), Count(all as u64));
    let left_out = format!("the last {kept} of {all} events");
    Ok((Some(left_out), last))
}

/// Returns how many of each length are kept, at most `budget` in total: the shorter lengths whole, and an equal
/// share of each longer one.
fn shares(lengths: &[usize], budget: usize) -> Vec<usize> {
    let mut shortest_first: Vec<usize> = (0..lengths.len()).collect();
    shortest_first.sort_by_key(|&index| lengths[index]);
    let mut shares = vec![0; lengths.len()];
    let mut left = budget;
    for (done, index) in shortest_first.into_iter().enumerate() {
        shares[index] = lengths[index].min(left / (lengths.len() - done));
        left -= shares[index];
    }
    shares
}

/// Returns the pickle of the registered writer's snapshot or else of lowtide's own, and in the latter case also
/// the snapshot.
fn snapshot() -> Result<(Vec<u8>, Option<Snapshot>), Error> {
    let writer = *WRITER.lock().map_err(|_| poisoned())?;
    if let Some(mut pickle) = writer.and_then(|writer| writer.snapshot()) {
        // PyTorch does not know about pauses.
        pauses::add_to(&mut pickle);
        return Ok((pickle, None));
    }
    let past_of = |allocator: &Allocator| allocator.with_all(|device| device.recent_past());
    let (pickle, snapshot) = pauses::snapshot_of(past_of)?;
    Ok((pickle, Some(snapshot)))
}

/// Returns the report page of a snapshot. Its title says which events it shows.
fn page(path: &Path, snapshot: &Snapshot, left_out: Option<&str>) -> io::Result<Vec<u8>> {
    let file_name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = match left_out {
        Some(left_out) => format!("{file_name}, {left_out}"),
        None => file_name.into_owned(),
    };
    let mut data = PageData::new(env!("CARGO_PKG_VERSION"));
    let traces = snapshot.traces.iter().filter(|trace| trace.is_used());
    let traces: Vec<&Trace> = traces.collect();
    // The space that each trace needs on the page is not known.
    let lengths = vec![u64::MAX; traces.len()];
    for (index, trace) in traces.iter().enumerate() {
        let sizes = BlockSizes::of(trace, &());
        let history = History::new(trace, &sizes);
        data.add(&PageTrace {
            name: &trace_name(&name, trace, traces.len()),
            trace,
            is_host: false,
            sizes: &sizes,
            history: &history,
            replayed: &[],
            replay_notes: &[],
            leaks: &Leaks::find(trace, &history),
            is_cut_off: snapshot.is_cut_off,
            lengths: &lengths[index..],
        });
    }
    let mut page = Vec::new();
    data.write_page(&mut page)?;
    Ok(page)
}

impl Writer {
    fn snapshot(&self) -> Option<Vec<u8>> {
        let mut pickle: Vec<u8> = Vec::new();
        // SAFETY: by the contract of `lowtide_on_dump`; what is written to outlives the call.
        let is_written = unsafe { (self.call)(self.context, append, (&raw mut pickle).cast()) };
        is_written.then_some(pickle)
    }
}

/// Adds bytes to the vector at `to`.
unsafe extern "C" fn append(to: *mut c_void, bytes: *const c_void, length: usize) {
    if length == 0 {
        return;
    }
    // SAFETY: the vector is the one that `Writer::snapshot` gave.
    let vector = unsafe { &mut *to.cast::<Vec<u8>>() };
    // SAFETY: the caller has so many bytes there.
    vector.extend_from_slice(unsafe { slice::from_raw_parts(bytes.cast(), length) });
}

fn poisoned() -> Error {
    Error::stopped("while it dumped")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_shorter_leave_goes_to_the_longer() {
        assert_eq!(shares(&[3, 900, 3, 3], 100), [3, 91, 3, 3]);
        assert_eq!(shares(&[500, 20, 500], 100), [40, 20, 40]);
        assert_eq!(shares(&[500, 0, 500, 500], 100), [33, 0, 33, 34]);
        assert_eq!(shares(&[100], 7), [7]);
        assert_eq!(shares(&[1, 2, 3], 6), [1, 2, 3]);
        assert!(shares(&[], 6).is_empty());
    }
}
