//! `liblowtide.so` in front of a program that knows nothing of it, by `LD_PRELOAD`.
//!
//! The library stands in for the functions of NVIDIA's driver that allocate and free. It does so only in a
//! process that was started with it in `LD_PRELOAD` and with `LOWTIDE_PRELOAD` set, as `lowtide run --preload`
//! does; loaded in any other way, each function passes its call on and does nothing else.
//!
//! # How a program's call gets here
//!
//! ```text
//! program ─ cudaMalloc ─ CUDA's runtime ─┐     the runtime looks every function of the driver up
//! program ─ dlsym, cuGetProcAddress ─────┤     lookup.rs: the answer is ours
//! program ─ cuMemAlloc, linked ──────────┤     the loader finds ours first
//!                                        └ stand_ins.rs ─ memory.rs ─ registry
//!                                                       └ the driver's own, for all that is not ours
//! ```
//!
//! CUDA's runtime, linked statically or not, is left as it is: it makes contexts, chooses devices and keeps
//! `cudaGetLastError` as ever, and asks the driver for memory by functions that it looks up with
//! `cuGetProcAddress`, which it looks up with `dlsym` (seen in CUDA 12.9's, both kinds). So one set of
//! functions serves both of CUDA's interfaces.
//!
//! # What is promised
//!
//! - Memory from `cudaMalloc` may be used in any stream at once, and `cudaFree` waits for the device's work,
//!   as CUDA's does. Memory from `cudaMallocAsync` is reused in the order of its stream, and in others only
//!   after an event.
//! - A request that lowtide cannot serve is the driver's to answer: its codes are CUDA's own. So is
//!   everything in a context that is not its device's primary one, after a primary context was reset, and
//!   memory that lowtide did not allocate. A pointer of lowtide's never gets to the driver's `cuMemFree`.
//! - `cudaMemGetInfo` counts what lowtide keeps for later as free. Where the driver runs out of memory for
//!   something else (arrays, managed memory, `cuMemCreate`, code that is loaded, graphs), what is kept goes back,
//!   and it is asked again. Launches are not looked at: what a kernel's stack takes is not given back for.
//!
//! # What a program can see
//!
//! Several allocations lie in one of the driver's. `cuMemGetAddressRange` and the attributes of a pointer tell
//! of that one, as libraries need it that share memory with other processes; `cudaIpcGetMemHandle` refuses
//! an allocation that does not begin it (`cudaErrorNotSupported`), because the other process would map its
//! beginning. Statistics and limits of the driver's own pools know nothing of lowtide's memory. `cudaMalloc`
//! works during a graph capture.
//!
//! What is free between blocks that are held serves requests up to its own size only, though `cudaMemGetInfo` counts
//! it: a program that leaves such gaps in most of the memory runs out of it sooner. What was freed in the order of a
//! stream is kept for that stream until memory runs out, also once the stream has ended, or the thread whose default
//! stream it was: with many of those a program comes to hold all of the card, which other processes see.

mod lookup;
mod memory;
mod order;
mod stand_ins;
mod summary;

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use lowtide_core::Config;
use lowtide_cuda::PrimaryContexts;

use crate::boundary::run_and_tell;
use crate::error::{Error, Status};
use crate::settings::Choice;
use crate::{environment, fork, registry};

pub use lookup::dlsym;
pub(crate) use order::is_of_thread;
pub use stand_ins::*;

/// What this process is: not looked at yet, one that is left alone, one that is served, and one that is told
/// at its end what that came to.
static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const LEFT_ALONE: u8 = 1;
const SERVED: u8 = 2;
const SERVED_AND_TOLD: u8 = 3;

/// Looks at the environment before the program can change it.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = {
    extern "C" fn look() {
        mode();
    }
    look
};

/// Returns whether the driver's functions are to be served here.
#[inline]
fn is_serving() -> bool {
    mode() >= SERVED
}

#[inline]
fn mode() -> u8 {
    match MODE.load(Ordering::Relaxed) {
        UNKNOWN => find_mode(),
        known => known,
    }
}

/// Takes no memory of the host: it may be the first that runs in a process.
#[cold]
fn find_mode() -> u8 {
    let is_preloaded = variable(c"LD_PRELOAD").is_some_and(|list| {
        let mut paths = list.to_bytes().split(|byte| b": ".contains(byte));
        paths.any(|path| path.ends_with(b"liblowtide.so"))
    });
    let mode = match variable(c"LOWTIDE_PRELOAD").map(CStr::to_bytes) {
        Some(b"1") if is_preloaded => SERVED_AND_TOLD,
        Some(b"quiet") if is_preloaded => SERVED,
        _ => LEFT_ALONE,
    };
    if mode == SERVED_AND_TOLD {
        summary::look_at_standard_error();
    }
    MODE.store(mode, Ordering::Relaxed);
    mode
}

fn variable(name: &CStr) -> Option<&CStr> {
    // SAFETY: the name ends with a zero byte.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: it is not null then, and a value ends with a zero byte. Nothing changes it: the program's own
    // code runs later.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

/// Where the threads of a process work that lowtide serves, once it does. `None` if it cannot, of which the user was
/// told.
static STARTED: OnceLock<Option<&PrimaryContexts>> = OnceLock::new();

/// Returns the process's contexts and makes lowtide ready, if that works and had not been done.
fn start() -> Option<&'static PrimaryContexts> {
    let contexts = STARTED.get_or_init(|| {
        let mut contexts = None;
        let status = run_and_tell(|| {
            contexts = Some(prepare().map_err(|error| {
                let text = format_args!("{}; the program runs without lowtide", error.text);
                Error::new(error.status, text)
            })?);
            Ok(())
        });
        if status == Status::Ok && mode() == SERVED_AND_TOLD {
            summary::tell_at_exit();
        }
        contexts
    });
    *contexts
}

/// Returns the process's contexts where lowtide has served something; `None` in the child of a fork, in which CUDA does
/// not work any more, and says so.
fn started() -> Option<&'static PrimaryContexts> {
    if fork::is_forked() {
        return None;
    }
    *STARTED.get()?
}

fn prepare() -> Result<&'static PrimaryContexts, Error> {
    let choice = Choice::of_environment_alone(environment::variable);
    // A program that loads lowtide besides may have chosen already.
    match registry::configure(choice) {
        Err(error) if error.status != Status::Started => return Err(error),
        _ => {}
    }
    if let Config::Caching(options) = registry::config()?
        && options.expandable_segments
    {
        let text =
            "expandable_segments is not for memory that other processes and cards may be given";
        return Err(Error::new(Status::Config, text));
    }
    registry::contexts()
}

/// CUDA's codes, which are the same for the driver and for the runtime.
mod code {
    use super::c_int;

    pub(super) const SUCCESS: c_int = 0;
    pub(super) const INVALID_VALUE: c_int = 1;
    pub(super) const OUT_OF_MEMORY: c_int = 2;
    pub(super) const NO_DEVICE: c_int = 100;
    pub(super) const ILLEGAL_STATE: c_int = 401;
    pub(super) const NOT_SUPPORTED: c_int = 801;
    pub(super) const STREAM_CAPTURE_UNSUPPORTED: c_int = 900;
    pub(super) const STREAM_CAPTURE_WRONG_THREAD: c_int = 910;
    pub(super) const UNKNOWN: c_int = 999;
}
