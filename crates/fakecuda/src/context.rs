//! Primary contexts, and each thread's stack of current contexts.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use crate::calls::{Outcome, driver_calls};
use crate::capture;
use crate::names::{new_name, this_thread};
use crate::pointers::Out;
use crate::progress;
use crate::state::device::{Context, ordinal};
use crate::state::{State, lock};
use crate::sys::*;
use crate::work;

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
        match &mut state.devices[index].context {
            // A context without references is being destroyed by another thread, which waits below.
            None | Some(Context { retains: 0, .. }) => return Err(CUresult::INVALID_CONTEXT),
            Some(context) => context.retains -= 1,
        }
        if state.is_retained(index) {
            return Ok(());
        }
        let tails = state.tails_of_device(index);
        let mut state = work::wait_for(state, &tails)?;
        // Another thread may have retained the context meanwhile.
        if !state.is_retained(index) {
            state.destroy_context(index);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) {
        let state = lock()?;
        let index = state.device_index(device)?;
        if state.devices[index].context.is_none() {
            return Ok(());
        }
        let tails = state.tails_of_device(index);
        let mut state = work::wait_for(state, &tails)?;
        // References to the context are lost.
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
        out.set(lock()?.current_name().unwrap_or(0));
        Ok(())
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        let mut state = lock()?;
        if context != 0 {
            state.device_of_context(context)?;
        }
        let stack = state.context_stack();
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        let mut state = lock()?;
        state.device_of_context(context)?;
        state.context_stack().push(context);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<CUcontext>) {
        let popped = lock()?.context_stack().pop();
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

impl State {
    fn context_stack(&mut self) -> &mut Vec<CUcontext> {
        self.context_stacks.entry(this_thread()).or_default()
    }

    fn current_name(&self) -> Option<CUcontext> {
        self.context_stacks.get(&this_thread())?.last().copied()
    }

    /// Returns the device of this thread's current context, and the context.
    ///
    /// # Errors
    ///
    /// `INVALID_CONTEXT` if there is none, `CONTEXT_IS_DESTROYED` if it no longer exists, and the error of the
    /// device's work if that failed.
    pub(crate) fn current(&self) -> Result<(usize, &Context), CUresult> {
        let name = self.current_name().ok_or(CUresult::INVALID_CONTEXT)?;
        let index = self.device_of_context(name)?;
        self.check_fault(index)?;
        let context = self.devices[index].context.as_ref();
        Ok((index, context.ok_or(CUresult::CONTEXT_IS_DESTROYED)?))
    }

    /// Returns the device of a context, whether it is current or not.
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

    /// Fails if the device's work made an illegal access: the context is then unusable.
    pub(crate) fn check_fault(&self, index: usize) -> Outcome {
        self.devices[index].fault.map_or(Ok(()), Err)
    }

    fn is_retained(&self, index: usize) -> bool {
        let context = self.devices[index].context.as_ref();
        context.is_some_and(|context| context.retains > 0)
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
            thread_streams: BTreeMap::new(),
        });
        name
    }

    /// Destroys a context with its streams, events and allocations, and clears its error. Handles and mappings
    /// stay, because they belong to no context.
    fn destroy_context(&mut self, index: usize) {
        self.devices[index].context = None;
        self.devices[index].fault = None;
        self.streams.retain(|_, stream| stream.device != index);
        self.events.retain(|_, event| event.device != index);
        self.peers.retain(|&(from, _)| from != index);
        self.memory.free_allocations_of(index);
        progress::notify();
    }
}
