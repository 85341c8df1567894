//! The functions for tests beyond CUDA, as in `include/fakecuda.h`.

use std::ffi::{c_int, c_uint};

use crate::calls::{self, Fault, Outcome};
use crate::driver::find_exported;
use crate::located::Live;
use crate::pointers::{Out, Text};
use crate::progress;
use crate::state::memory::Kind;
use crate::state::{self, State, lock};
use crate::sys::{CUresult, CUstream};

#[unsafe(no_mangle)]
extern "C" fn fakecuda_reset() {
    state::reset();
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_set_capacity(device: c_int, bytes: u64) -> CUresult {
    code(with_state(|state| {
        let index = state.device_index(device)?;
        state.devices[index].capacity_bytes = bytes;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_set_attribute(device: c_int, attribute: c_uint, value: c_int) -> CUresult {
    code(with_state(|state| {
        let index = state.device_index(device)?;
        state.devices[index].attributes.insert(attribute, value);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_fail(name: Text, nth: u64, result: CUresult) -> CUresult {
    code(name.get().and_then(|name| {
        find_exported(name).ok_or(CUresult::INVALID_VALUE)?;
        calls::add_fault(Fault::new(name, nth, Some(result))?);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_fail_at_random(seed: u64, per_million: u64) {
    calls::fail_at_random(seed, per_million);
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_set_lazy(is_lazy: c_int) -> CUresult {
    code(with_state(|state| {
        state.is_lazy = is_lazy != 0;
        progress::notify();
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_fail_none() {
    calls::clear_faults();
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_calls(name: Text) -> u64 {
    name.get().map_or(0, calls::calls_of)
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_hold_stream(stream: CUstream) -> CUresult {
    code(set_held(stream, true))
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_release_stream(stream: CUstream) -> CUresult {
    code(set_held(stream, false))
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_used_bytes(device: c_int) -> u64 {
    let used = lock().and_then(|state| {
        let index = state.device_index(device)?;
        Ok(state.devices[index].used_bytes())
    });
    used.unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn fakecuda_get_live(live: Out<Live>) -> CUresult {
    code(live.required().and_then(|out| {
        out.set(lock()?.live());
        Ok(())
    }))
}

fn code(outcome: Outcome) -> CUresult {
    outcome.err().unwrap_or(CUresult::SUCCESS)
}

fn with_state(change: impl FnOnce(&mut State) -> Outcome) -> Outcome {
    let mut state = lock()?;
    change(&mut state)
}

fn set_held(stream: CUstream, is_held: bool) -> Outcome {
    with_state(|state| {
        // A held stream can still be released after it was destroyed.
        let name = match state.streams.get(&stream) {
            Some(_) => stream,
            None => state.stream_named(stream)?,
        };
        state.stream_mut(name).is_held = is_held;
        progress::notify();
        Ok(())
    })
}

impl State {
    fn live(&self) -> Live {
        let count = |number: usize| number as u64;
        let memory = &self.memory;
        let allocations = memory.allocation_count();
        let is_virtual = |kind: &Kind| matches!(kind, Kind::Virtual { .. });
        let mappings = memory.mappings.values();
        let contexts = self
            .devices
            .iter()
            .filter(|device| device.context.is_some());
        let streams = self.streams.values().filter(|stream| !stream.is_default);
        Live {
            contexts: count(contexts.count()),
            allocations: count(allocations),
            reservations: count(memory.reservations.len() - allocations),
            handles: count(memory.handles.len()),
            mappings: count(mappings.filter(|mapping| is_virtual(&mapping.kind)).count()),
            host_allocations: count(memory.host.len()),
            streams: count(streams.count()),
            events: count(self.events.len()),
            graphs: count(self.graphs.len()),
        }
    }
}
