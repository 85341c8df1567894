//! All state between `cuInit` and the end, under one lock.

pub(crate) mod capture;
pub(crate) mod device;
pub(crate) mod event;
pub(crate) mod memory;
pub(crate) mod stream;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::calls::{self, Outcome};
use crate::names::Thread;
use crate::sys::{CUcontext, CUevent, CUgraph, CUresult, CUstream};
use crate::{process, progress};
use capture::Capture;
use device::Device;
use event::Event;
use memory::Memory;
use stream::Stream;

/// The driver's state between `cuInit` and the end.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Memory,
    pub(crate) streams: BTreeMap<CUstream, Stream>,
    pub(crate) destroyed_streams: BTreeSet<CUstream>,
    pub(crate) events: BTreeMap<CUevent, Event>,
    /// Captures in progress, by their number.
    pub(crate) captures: BTreeMap<u64, Capture>,
    /// Graphs of ended captures. They cannot be launched, so they have only names.
    pub(crate) graphs: BTreeSet<CUgraph>,
    /// `(from, to)`: the context of device `from` may use memory that `to` allocated.
    pub(crate) peers: BTreeSet<(usize, usize)>,
    /// Whether streams run only work that a call waits for or queries: work then runs as late as possible.
    pub(crate) is_lazy: bool,
    /// Each thread's stack of contexts, its current one last.
    pub(crate) context_stacks: BTreeMap<Thread, Vec<CUcontext>>,
}

/// The locked state.
pub(crate) struct Guard(MutexGuard<'static, Option<State>>);

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Creates the state for the devices that the environment describes, unless it exists.
///
/// # Errors
///
/// `INVALID_VALUE` if the environment cannot be parsed, `NO_DEVICE` if there are no devices.
pub(crate) fn start() -> Outcome {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    if state.is_none() {
        let devices = Device::all_from_environment()?;
        if devices.is_empty() {
            return Err(CUresult::NO_DEVICE);
        }
        *state = Some(State {
            devices,
            ..State::default()
        });
        process::start();
    }
    Ok(())
}

/// Locks the state.
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

/// Unlocks the state until something has changed.
///
/// # Errors
///
/// `DEINITIALIZED` if a test has reset the driver meanwhile.
pub(crate) fn wait_for_progress(guard: Guard) -> Result<Guard, CUresult> {
    let guard = progress::wait(guard.0);
    if guard.is_none() {
        return Err(CUresult::DEINITIALIZED);
    }
    Ok(Guard(guard))
}

/// Resets everything, including `cuInit`. Threads that wait are woken with an error.
pub(crate) fn reset() {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    *state = None;
    calls::clear();
    progress::notify();
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
