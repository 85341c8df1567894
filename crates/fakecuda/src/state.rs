//! All state, under one lock: what there is between `cuInit` and the end.

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

/// The state, locked.
pub(crate) struct Guard(MutexGuard<'static, Option<State>>);

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Makes the state of the devices that the environment names, unless there is one.
///
/// # Errors
///
/// `INVALID_VALUE` if the environment makes no sense, `NO_DEVICE` if there are no devices.
pub(crate) fn start() -> Outcome {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    if state.is_none() {
        let devices = Device::all_from_environment()?;
        if devices.is_empty() {
            return Err(CUresult::NO_DEVICE);
        }
        *state = Some(State::new(devices));
        process::start();
    }
    Ok(())
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
    let guard = progress::wait(guard.0);
    if guard.is_none() {
        return Err(CUresult::DEINITIALIZED);
    }
    Ok(Guard(guard))
}

/// Forgets everything, `cuInit` included. Whoever waits is woken with an error.
pub(crate) fn reset() {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    *state = None;
    calls::clear();
    progress::notify();
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
