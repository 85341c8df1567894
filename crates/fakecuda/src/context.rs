//! Primary contexts, and which of them is current in a thread.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};

use crate::calls::{Outcome, driver_calls};
use crate::capture;
use crate::device::ordinal;
use crate::driver::{State, lock, new_name};
use crate::pointers::Out;
use crate::sys::*;
use crate::work;

/// A device's primary context. Others cannot be made: `cuCtxCreate` is not exported.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) name: CUcontext,
    retains: u64,
    /// The default stream, which blocking streams wait for and which waits for them.
    pub(crate) legacy_stream: CUstream,
}

thread_local! {
    /// The contexts that this thread pushed, the current one last.
    static STACK: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
}

driver_calls! {
    fn cuDevicePrimaryCtxRetain(context: Out<CUcontext>, device: CUdevice) {
        let out = context.required()?;
        let mut state = lock()?;
        let index = state.device_index(device)?;
        out.set(state.retain_context(index));
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        let mut state = lock()?;
        let index = state.device_index(device)?;
        let Some(context) = &mut state.devices[index].context else {
            return Err(CUresult::INVALID_CONTEXT);
        };
        context.retains -= 1;
        if context.retains > 0 {
            return Ok(());
        }
        let tails = state.tails_of_device(index);
        let mut state = work::wait_for(state, &tails)?;
        state.destroy_context(index);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: Out<c_uint>, active: Out<c_int>) {
        let (flags, active) = (flags.required()?, active.required()?);
        let state = lock()?;
        let index = state.device_index(device)?;
        flags.set(0);
        active.set(c_int::from(state.devices[index].context.is_some()));
        Ok(())
    }

    fn cuCtxGetCurrent(context: Out<CUcontext>) {
        let out = context.required()?;
        drop(lock()?);
        out.set(top().unwrap_or(0));
        Ok(())
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        let state = lock()?;
        if context != 0 {
            state.device_of_context(context)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        lock()?.device_of_context(context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<CUcontext>) {
        drop(lock()?);
        let popped = STACK.with_borrow_mut(Vec::pop);
        context.set_if_wanted(popped.ok_or(CUresult::INVALID_CONTEXT)?);
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<CUdevice>) {
        let out = device.required()?;
        let (index, _) = lock()?.current()?;
        out.set(ordinal(index));
        Ok(())
    }

    fn cuCtxSynchronize() {
        let mut state = lock()?;
        let (index, _) = state.current()?;
        capture::refuse_if_device_captures(&mut state, index)?;
        let tails = state.tails_of_device(index);
        work::wait_for(state, &tails)?.check_fault(index)
    }

    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) {
        let mut state = lock()?;
        let (index, _) = state.current()?;
        let peer_index = state.device_of_context(peer).map_err(|_| CUresult::INVALID_CONTEXT)?;
        if flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        if index == peer_index {
            return Err(CUresult::INVALID_DEVICE);
        }
        if !state.peers.insert((index, peer_index)) {
            return Err(CUresult::PEER_ACCESS_ALREADY_ENABLED);
        }
        Ok(())
    }
}

fn top() -> Option<CUcontext> {
    STACK.with_borrow(|stack| stack.last().copied())
}

impl State {
    /// Returns the device of this thread's current context, and the context.
    ///
    /// # Errors
    ///
    /// `INVALID_CONTEXT` if there is none, `CONTEXT_IS_DESTROYED` if it is gone, and what the
    /// device's work died of.
    pub(crate) fn current(&self) -> Result<(usize, &Context), CUresult> {
        let name = top().ok_or(CUresult::INVALID_CONTEXT)?;
        let index = self.device_of_context(name)?;
        self.check_fault(index)?;
        let context = self.devices[index].context.as_ref();
        Ok((index, context.ok_or(CUresult::CONTEXT_IS_DESTROYED)?))
    }

    /// Returns the device of a context, current or not.
    ///
    /// # Errors
    ///
    /// `CONTEXT_IS_DESTROYED` if no device has that context.
    pub(crate) fn device_of_context(&self, name: CUcontext) -> Result<usize, CUresult> {
        let has_it = |context: &Context| context.name == name;
        let mut devices = self.devices.iter();
        devices
            .position(|device| device.context.as_ref().is_some_and(has_it))
            .ok_or(CUresult::CONTEXT_IS_DESTROYED)
    }

    /// Fails if work of the device has touched what it may not: the context is lost then.
    pub(crate) fn check_fault(&self, index: usize) -> Outcome {
        self.devices[index].fault.map_or(Ok(()), Err)
    }

    fn retain_context(&mut self, index: usize) -> CUcontext {
        if let Some(context) = &mut self.devices[index].context {
            context.retains += 1;
            return context.name;
        }
        let name = new_name();
        let legacy_stream = self.add_stream(index, 0);
        self.devices[index].context = Some(Context {
            name,
            retains: 1,
            legacy_stream,
        });
        name
    }

    /// Takes a context's streams, events and allocations with it. Handles and mappings belong to no
    /// context and stay. An error of the device's work is forgotten.
    fn destroy_context(&mut self, index: usize) {
        self.devices[index].context = None;
        self.devices[index].fault = None;
        self.streams.retain(|_, stream| stream.device != index);
        self.events.retain(|_, event| event.device != index);
        self.peers.retain(|&(from, _)| from != index);
        self.memory.free_allocations_of(index);
        crate::driver::tell_progress();
    }
}
