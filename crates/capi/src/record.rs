//! Recordings: everything that happens on every device, to a file, as it happens.
//!
//! ```text
//! lowtide_record_start, LOWTIDE_RECORD       record.rs: which recorder a process has
//! └─ file::create                            file.rs: a file for each process
//! an event, under the lock of its lane       events.rs: who is notified of each device
//! └─ Ring::put                               ring.rs: a cache line is written, nothing else
//! the recorder's thread                      recorder.rs
//! ├─ Ring::take
//! ├─ Functions::of_calls                     native.rs: which functions a new stack consists of
//! └─ StreamWriter                            lowtide-trace
//! ```
//!
//! A process that is killed leaves what was recorded up to a twentieth of a second before. One that ends by
//! `exit` or by the end of `main` leaves all. The child of a fork records nothing of its parent's; where
//! `LOWTIDE_RECORD` is set, it has a file of its own once it uses a device.

mod file;
mod native;
mod python;
mod recorder;
mod ring;
pub(crate) mod stacks;

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lowtide_trace::JobStart;

use crate::boundary::{path_from_c, run};
use crate::error::{Error, Status};
use crate::switch::Switch;
use crate::{boundary, environment, events};

pub(crate) use file::{Existing, create as create_file};
use recorder::Options;
pub(crate) use recorder::{Recorder, now_us};

/// Whether those are recorded with stacks.
static STACKS: Switch = Switch::new("LOWTIDE_RECORD_STACKS", false);

/// The file that every process with this in its environment records to.
const VARIABLE: &str = "LOWTIDE_RECORD";

/// Records everything that happens on every device from now on to a file at `path` in lowtide's own format: what
/// `lowtide replay`, `advise` and `convert` read. An earlier recording of this user is replaced by a new file, anything
/// else refused.
/// What is held already is recorded as such. A rank of several (`RANK`, `WORLD_SIZE`) puts its number before the
/// extension of the name.
///
/// The file is complete after `lowtide_record_stop`, and when the process ends. While it is recorded, it may be
/// read at any time, and of a process that is killed all but the last twentieth of a second is there. Where
/// it cannot be written to any more, that is said once on standard error, the recording ends, and the program
/// goes on. Whoever allocates waits for the file where it cannot keep up: nothing is left out.
///
/// With `stacks`, each request is recorded with the functions of Python, 3.11 or newer, that led to it or, where
/// its thread is in none, with those of the program. Like PyTorch's own history this takes Python's lock before
/// each request. While the names of the program's functions are looked up, once for each, what happens waits to be
/// written, and is not in the file of a process that is killed then. A library that was loaded where another was
/// before it may go by the names of that one.
///
/// `LOWTIDE_STATUS_STARTED` while another recording is made, `LOWTIDE_STATUS_FILE` where the file cannot be
/// created, or something is there that is no recording of this user.
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
            let has_stacks = stacks;
            Recorder::start(
                path,
                created,
                Options {
                    has_stacks,
                    tells: false,
                },
            )
        })
    })
}

/// Ends the recording and completes its file. Does nothing where none is made.
///
/// `LOWTIDE_STATUS_FILE` where the recording ended before because the file could not be written to.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_record_stop() -> Status {
    run(events::stop_recording)
}

/// Returns the recorder of this process, given what it had; where it has none, what `LOWTIDE_RECORD` asks for.
/// If there can be none, that is told, and the program goes on.
///
/// Called by whoever uses a device for the first time, one at a time.
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
    let path = environment::path_variable(VARIABLE)?;
    let mut recorder = None;
    let _ = boundary::run_and_report(|| {
        let start = environment::variable(JobStart::VARIABLE);
        let start = start.and_then(|start| JobStart::parse(&start));
        let existing = Existing::IsReplacedIfBefore(start);
        let created = file::create(&path, existing, environment::variable);
        let options = Options {
            has_stacks: STACKS.is_on(),
            tells: true,
        };
        recorder = Some(Recorder::start(&path, created, options)?);
        Ok(())
    });
    recorder
}
