//! Recordings: all events of all devices, written to a file as they happen.
//!
//! ```text
//! lowtide_record_start, LOWTIDE_RECORD       record.rs: the recorder of a process
//! └─ file::create                            file.rs: a file for each process
//! an event, under the lock of its lane       events.rs: the observers of each device
//! └─ Ring::put                               ring.rs: a cache line is written, nothing else
//! the recorder's thread                      recorder.rs
//! ├─ Ring::take
//! ├─ Functions::of_calls                     native.rs: the functions of a new stack
//! ├─ metadata::text_of                       metadata.rs: the program's text
//! └─ StreamWriter                            lowtide-trace
//! ```
//!
//! If a process is killed, its recording lacks at most the last twentieth of a second. If it ends by `exit` or by
//! the end of `main`, the recording is complete. A forked child does not continue its parent's recording. If
//! `LOWTIDE_RECORD` is set, the child has its own file once it uses a device.

mod file;
mod metadata;
mod native;
mod python;
pub(crate) mod recorder;
mod ring;
pub(crate) mod stacks;

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lowtide_core::{Action, Event};
use lowtide_trace::JobStart;

use crate::boundary::{path_from_c, run, text_from_c, write_to_c};
use crate::error::{Error, Status};
use crate::pointers::address_of;
use crate::{boundary, devices, environment, events};

pub(crate) use file::{Existing, create as create_file};
use recorder::{Options, Recorder};

/// The file that every process with this variable records to.
const VARIABLE: &str = "LOWTIDE_RECORD";

/// Records all events on all devices from now on to a file at `path`, in lowtide's own format. `lowtide replay`,
/// `advise` and `convert` read it. An earlier recording of this user is replaced by a new file; any other file is
/// refused. Memory that is allocated already is recorded as such. If the job has several ranks (`RANK`,
/// `WORLD_SIZE`), the rank is added before the name's extension, unless it is there.
///
/// The file is complete after `lowtide_record_stop`, and when the process ends. It may be read at any time
/// before. If the process is killed, at most the last twentieth of a second is missing. If the file cannot be
/// written to, that is reported once on standard error, the recording ends, and the program continues. No event
/// is dropped: threads that allocate wait if the file cannot keep up.
///
/// With `stacks`, each request is recorded with the Python functions (3.11 or newer) that led to it. If its
/// thread is in no Python function, the program's native functions are recorded. Like PyTorch's own history this
/// takes Python's lock (the GIL) before each request. Native functions are looked up once each. Events wait
/// meanwhile, and are missing if the process is killed during that time. If a library was loaded at an address
/// where another was before, its functions may get the other's names.
///
/// Returns `LOWTIDE_STATUS_STARTED` if another recording is in progress. Returns `LOWTIDE_STATUS_FILE` if the
/// file cannot be created, or if `path` exists and is not a recording of this user.
///
/// # Safety
///
/// `path` ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_record_start(path: *const c_char, stacks: bool) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let path = unsafe { path_from_c(path) }.ok_or_else(|| Error::null("path"))?;
        events::start_recording(|| {
            let created = file::create(path, Existing::IsReplaced, environment::variable);
            let options = Options {
                has_stacks: stacks,
                reports: false,
            };
            Recorder::start(path, created, options)
        })
    })
}

/// Ends the recording and completes its file. Does nothing if there is no recording.
///
/// Returns `LOWTIDE_STATUS_FILE` if the recording ended early because the file could not be written to.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_record_stop() -> Status {
    run(events::stop_recording)
}

/// Writes the number of the recording in progress, 0 if there is none. Each recording of a process has a greater number
/// than those before.
///
/// # Safety
///
/// `number` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_recording(number: *mut u64) -> Status {
    run(|| {
        let recorder = recorder()?;
        let current = recorder.map_or(0, |recorder| recorder.number());
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("number", number, current) }
    })
}

/// Sets the text that the events of this thread have in recordings from now on, as `user_metadata`. Null or an empty
/// text removes it. A process may set 1,048,575 different texts; later ones are not recorded.
///
/// # Safety
///
/// `text` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_set_metadata(text: *const c_char) -> Status {
    run(|| {
        // SAFETY: it is null or ends with a zero byte, by the contract of this function.
        metadata::set(unsafe { text_from_c("text", text) }?.unwrap_or_default());
        Ok(())
    })
}

/// Attaches a text to an allocation in the recording in progress, as `torch.cuda.memory._annotate_tensor` does in
/// PyTorch's history. `memory` is its address. Does nothing if nothing is recorded.
///
/// Returns `LOWTIDE_STATUS_NOT_ALLOCATED` if `memory` is not the address of an allocation.
///
/// # Safety
///
/// `text` ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_annotate(memory: *mut c_void, text: *const c_char) -> Status {
    run(|| {
        let Some(recorder) = recorder()? else {
            return Ok(());
        };
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let text = unsafe { text_from_c("text", text) }?.ok_or_else(|| Error::null("text"))?;
        let (device, found) = devices::find_allocation(address_of(memory))?;
        let event = Event {
            action: Action::Annotate,
            pool: found.pool,
            address: found.address,
            size: found.requested,
            stream: found.stream,
        };
        recorder.record_annotation(devices::number(device), event, text);
        Ok(())
    })
}

/// Returns the recorder of the recording in progress.
fn recorder() -> Result<Option<Arc<Recorder>>, Error> {
    let recorder = events::lock()?.recorder.clone();
    Ok(recorder.filter(|recorder| recorder.is_of_this_process()))
}

/// Returns the process's recorder: `known`, or else the one that `LOWTIDE_RECORD` requests. If it cannot be
/// created, that is reported and the program continues.
///
/// Called at the first use of a device, by one thread at a time.
pub(crate) fn of_process(known: Option<Arc<Recorder>>) -> Option<Arc<Recorder>> {
    let known = known.filter(|recorder| recorder.is_of_this_process());
    if known.is_some() {
        return known;
    }
    static TRIED_IN: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id();
    if TRIED_IN.swap(process, Ordering::Relaxed) == process {
        return None;
    }
    let mut recorder = None;
    if let Some(path) = environment::path_variable(VARIABLE) {
        let _ = boundary::run_and_report(|| {
            let start = environment::variable(JobStart::VARIABLE);
            let start = start.and_then(|start| JobStart::parse(&start));
            let existing = Existing::IsReplacedIfBefore(start);
            let created = file::create(&path, existing, environment::variable);
            let options = Options {
                has_stacks: stacks::are_asked_for(),
                reports: true,
            };
            recorder = Some(Recorder::start(&path, created, options)?);
            Ok(())
        });
    }
    if recorder.is_none() {
        // The environment may ask for stacks, too, but nothing records them.
        stacks::want(false);
    }
    recorder
}
