//! Streams: creation, destruction and waits.

use std::ffi::{c_uint, c_void};

use crate::calls::driver_calls;
use crate::capture;
use crate::events;
use crate::names::{new_name, this_thread};
use crate::pointers::Out;
use crate::progress;
use crate::state::stream::{Marker, Stream, Work};
use crate::state::{State, lock};
use crate::sys::*;
use crate::work;

driver_calls! {
    fn cuStreamCreate(stream: Out<CUstream>, flags: c_uint) {
        let out = stream.required()?;
        let mut state = lock()?;
        let (device, _) = state.current()?;
        if flags > CU_STREAM_NON_BLOCKING {
            return Err(CUresult::INVALID_VALUE);
        }
        let name = state.add_stream(device, flags);
        state.stream_mut(name).is_default = false;
        out.set(name);
        Ok(())
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        let mut state = lock()?;
        // The default streams belong to the context. The code is an H200's with driver 580.
        if stream <= CU_STREAM_PER_THREAD {
            return Err(CUresult::INVALID_HANDLE);
        }
        let name = state.stream_named(stream)?;
        capture::lose_stream(&mut state, name);
        let has_ended = state.streams[&name].queue.tail().is_passed();
        state.stream_mut(name).is_destroyed = true;
        state.destroyed_streams.insert(name);
        if has_ended {
            state.streams.remove(&name);
        }
        progress::notify();
        Ok(())
    }

    fn cuStreamSynchronize(stream: CUstream) {
        let mut state = lock()?;
        let name = state.awaitable_stream(stream)?;
        let device = state.streams[&name].device;
        let ends = state.ends_of(name);
        work::wait_for(state, &ends)?.check_fault(device)
    }

    fn cuStreamQuery(stream: CUstream) {
        let mut state = lock()?;
        let name = state.awaitable_stream(stream)?;
        let ends = state.ends_of(name);
        ends.iter().for_each(Marker::want);
        if ends.iter().all(Marker::is_passed) {
            Ok(())
        } else {
            Err(CUresult::NOT_READY)
        }
    }

    fn cuStreamGetCtx(stream: CUstream, context: Out<CUcontext>) {
        let out = context.required()?;
        let mut state = lock()?;
        let name = state.stream_named(stream)?;
        let device = state.streams[&name].device;
        let context = state.devices[device].context.as_ref();
        out.set(context.ok_or(CUresult::CONTEXT_IS_DESTROYED)?.name);
        Ok(())
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) {
        let mut state = lock()?;
        let name = state.stream_named(stream)?;
        // 1 is CU_EVENT_WAIT_EXTERNAL, which makes a difference only in a capture.
        if flags > 1 {
            return Err(CUresult::INVALID_VALUE);
        }
        events::wait(&mut state, name, event)
    }

    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, argument: *mut c_void) {
        let function = function.ok_or(CUresult::INVALID_VALUE)?;
        let mut state = lock()?;
        let name = state.stream_named(stream)?;
        let argument = argument as usize;
        state.submit(name, Work::Call { function, argument })
    }
}

impl State {
    /// Returns the name of the stream that a caller means, including default streams.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` if there is no such stream; for default streams, the errors of the current context.
    pub(crate) fn stream_named(&mut self, stream: CUstream) -> Result<CUstream, CUresult> {
        match stream {
            0 | CU_STREAM_LEGACY => Ok(self.current()?.1.legacy_stream),
            CU_STREAM_PER_THREAD => {
                let (device, context) = self.current()?;
                let known = context.thread_streams.get(&this_thread());
                if let Some(&name) = known {
                    return Ok(name);
                }
                let name = self.add_stream(device, 0);
                let context = self.devices[device].context.as_mut();
                let context = context.expect("it is current");
                context.thread_streams.insert(this_thread(), name);
                Ok(name)
            }
            name => {
                // Driver 580 crashes in each call that was tried: cuEventRecord, cuStreamIsCapturing and
                // cuStreamGetCaptureInfo.
                if self.destroyed_streams.contains(&name) {
                    eprintln!("fakecuda: a call was given a stream that was destroyed");
                    std::process::abort();
                }
                let found = self.streams.get(&name);
                let device = found.ok_or(CUresult::INVALID_HANDLE)?.device;
                self.check_fault(device)?;
                Ok(name)
            }
        }
    }

    /// Like [`State::stream_named`], but fails if captures forbid to wait for the stream.
    fn awaitable_stream(&mut self, stream: CUstream) -> Result<CUstream, CUresult> {
        let name = self.stream_named(stream)?;
        capture::refuse_in_capture(self, name)?;
        capture::refuse_implicit_wait(self, name)?;
        capture::refuse_unsafe_call(self)?;
        Ok(name)
    }

    /// Returns a stream that is known to exist.
    pub(crate) fn stream_mut(&mut self, name: CUstream) -> &mut Stream {
        let found = self.streams.get_mut(&name);
        found.expect("the caller found it under the same lock")
    }

    /// Creates a default stream of a device's context.
    pub(crate) fn add_stream(&mut self, device: usize, flags: c_uint) -> CUstream {
        let stream = Stream {
            device,
            is_blocking: flags & CU_STREAM_NON_BLOCKING == 0,
            is_default: true,
            ..Stream::default()
        };
        let name = new_name();
        self.streams.insert(name, stream);
        name
    }

    pub(crate) fn legacy_stream_of(&self, device: usize) -> Option<CUstream> {
        let context = self.devices[device].context.as_ref();
        context.map(|context| context.legacy_stream)
    }

    /// Returns the markers that must be passed before a stream counts as done. The legacy stream includes the work
    /// of all blocking streams, because its next task would wait for them.
    fn ends_of(&self, name: CUstream) -> Vec<Marker> {
        let stream = &self.streams[&name];
        let mut ends = vec![stream.queue.tail()];
        if self.legacy_stream_of(stream.device) == Some(name) {
            ends.extend(self.default_stream_order(name));
        }
        ends
    }
}
