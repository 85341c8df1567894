//! The driver as a whole: all state, the lock around it, and its beginning and end.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};
use std::ops::{Deref, DerefMut};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::calls::{self, Fault, Outcome, driver_calls};
use crate::capture::Capture;
use crate::device::Device;
use crate::events::Event;
use crate::memory::Memory;
use crate::os;
use crate::pointers::Out;
use crate::streams::Stream;
use crate::sys::{CUcontext, CUevent, CUgraph, CUresult, CUstream, DRIVER_VERSION};

/// Everything there is between `cuInit` and the end.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Memory,
    pub(crate) streams: BTreeMap<CUstream, Stream>,
    pub(crate) events: BTreeMap<CUevent, Event>,
    /// Captures that began and did not end, by their number.
    pub(crate) captures: BTreeMap<u64, Capture>,
    /// What captures left: nothing can launch them, so they have only names.
    pub(crate) graphs: BTreeSet<CUgraph>,
    /// `(from, to)`: the context of device `from` may use memory that `to` allocated.
    pub(crate) peers: BTreeSet<(usize, usize)>,
    /// Whether streams do only what a call waits for or asks about: the latest that work can be done.
    pub(crate) is_lazy: bool,
    /// The contexts that each thread pushed and did not pop, its current one last.
    pub(crate) context_stacks: BTreeMap<Thread, Vec<CUcontext>>,
}

/// A thread of the program. Not std's number, nor anything else that needs a destructor: exit handlers
/// call the driver after the destructors of thread-local variables have run.
pub(crate) type Thread = u64;

/// The state, locked.
pub(crate) struct Guard(MutexGuard<'static, Option<State>>);

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Told whenever a task ends, a task comes, or a stream is held, released or destroyed.
static PROGRESS: Condvar = Condvar::new();
/// The process that called `cuInit`; 0 before.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static HAS_EXITED: AtomicBool = AtomicBool::new(false);
/// Whether what `FAKECUDA_FAIL` says made sense.
static FAULTS_ARE_READ: OnceLock<Outcome> = OnceLock::new();

driver_calls! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_none() {
            let devices = Device::all_from_environment()?;
            if devices.is_empty() {
                return Err(CUresult::NO_DEVICE);
            }
            *state = Some(State::new(devices));
            if PROCESS.swap(process::id(), Ordering::SeqCst) == 0 {
                os::raise_file_limit();
                os::call_at_exit(end);
            }
        }
        Ok(())
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        version.required()?.set(DRIVER_VERSION);
        Ok(())
    }
}

/// Reads the calls that are to fail from `FAKECUDA_FAIL`, once a process.
fn read_faults() -> Outcome {
    let Ok(faults) = std::env::var("FAKECUDA_FAIL") else {
        return Ok(());
    };
    for text in faults.split(',').filter(|text| !text.is_empty()) {
        let fault = Fault::parse(text);
        calls::add_fault(fault.inspect_err(|_| {
            eprintln!("fakecuda: FAKECUDA_FAIL: `{text}` is not call:n or call:n:code");
        })?);
    }
    Ok(())
}

/// After this, calls fail: the program has run its own exit handlers, and CUDA is gone.
extern "C" fn end() {
    HAS_EXITED.store(true, Ordering::SeqCst);
}

/// Returns whether this process may call the driver now.
///
/// # Errors
///
/// `DEINITIALIZED` at the end of the process, with a line on stderr that tests can look for;
/// `NOT_INITIALIZED` in a child of the process that called `cuInit`, where a card's driver does not
/// work either; `INVALID_VALUE` if the environment makes no sense.
pub(crate) fn check_process(name: &str) -> Outcome {
    if HAS_EXITED.load(Ordering::SeqCst) {
        eprintln!("fakecuda: {name} was called after the driver was gone");
        return Err(CUresult::DEINITIALIZED);
    }
    match PROCESS.load(Ordering::SeqCst) {
        // No `cuInit` yet: the environment must be known before the first call is counted.
        0 => *FAULTS_ARE_READ.get_or_init(read_faults),
        known if known == process::id() => Ok(()),
        _ => Err(CUresult::NOT_INITIALIZED),
    }
}

/// Returns the state.
///
/// # Errors
///
/// `NOT_INITIALIZED` before `cuInit`.
pub(crate) fn lock() -> Result<Guard, CUresult> {
    let guard = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    if guard.is_none() {
        return Err(CUresult::NOT_INITIALIZED);
    }
    Ok(Guard(guard))
}

/// Lets others at the state until something has changed.
///
/// # Errors
///
/// `DEINITIALIZED` if a test reset the driver meanwhile.
pub(crate) fn wait_for_progress(guard: Guard) -> Result<Guard, CUresult> {
    let guard = PROGRESS
        .wait(guard.0)
        .unwrap_or_else(PoisonError::into_inner);
    if guard.is_none() {
        return Err(CUresult::DEINITIALIZED);
    }
    Ok(Guard(guard))
}

/// Wakes everything that waits for a change.
pub(crate) fn tell_progress() {
    PROGRESS.notify_all();
}

/// Forgets everything, `cuInit` included. Whoever waits is woken with an error.
pub(crate) fn reset() {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    *state = None;
    calls::clear();
    tell_progress();
}

impl State {
    fn new(devices: Vec<Device>) -> Self {
        Self {
            devices,
            memory: Memory::default(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeSet::new(),
            peers: BTreeSet::new(),
            is_lazy: false,
            context_stacks: BTreeMap::new(),
        }
    }
}

impl Deref for Guard {
    type Target = State;
    fn deref(&self) -> &State {
        self.0.as_ref().expect("checked when the lock was taken")
    }
}

impl DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().expect("checked when the lock was taken")
    }
}

/// Returns the thread that calls.
pub(crate) fn this_thread() -> Thread {
    thread_local! {
        static THREAD: Cell<Thread> = const { Cell::new(0) };
    }
    if THREAD.get() == 0 {
        THREAD.set(new_name());
    }
    THREAD.get()
}

/// Returns a name that no context, stream, event, graph, handle or thread ever had in this process. It looks
/// like a pointer, and following it faults.
pub(crate) fn new_name() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    0xfa4e_0000_0000_0000 + 16 * (1 + LAST.fetch_add(1, Ordering::Relaxed))
}
