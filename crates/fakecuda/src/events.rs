//! Events: points in a stream that can be queried and waited for.

use std::ffi::c_uint;

use crate::calls::{Outcome, driver_calls};
use crate::capture;
use crate::names::new_name;
use crate::pointers::Out;
use crate::state::event::{Event, Record};
use crate::state::stream::{Marker, Work};
use crate::state::{State, lock};
use crate::sys::*;
use crate::work;

driver_calls! {
    fn cuEventCreate(event: Out<CUevent>, flags: c_uint) {
        let out = event.required()?;
        let mut state = lock()?;
        let (device, _) = state.current()?;
        let known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        let has_time = flags & CU_EVENT_DISABLE_TIMING == 0;
        let is_interprocess = flags & CU_EVENT_INTERPROCESS != 0;
        if flags & !known != 0 || is_interprocess && has_time {
            return Err(CUresult::INVALID_VALUE);
        }
        let name = new_name();
        let record = Record::Never;
        state.events.insert(name, Event { device, record });
        out.set(name);
        Ok(())
    }

    fn cuEventDestroy_v2(event: CUevent) {
        let mut state = lock()?;
        // The manual: an event that has not been reached is destroyed later. Markers keep it until then.
        let removed = state.events.remove(&event);
        removed.map(drop).ok_or(CUresult::INVALID_HANDLE)
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        let mut state = lock()?;
        let stream = state.stream_named(stream)?;
        let device = state.streams[&stream].device;
        // The manual: event and stream must have the same context.
        if state.event(event)?.device != device {
            return Err(CUresult::INVALID_HANDLE);
        }
        // In a capture, the record marks a position and creates no node.
        let record = match capture::valid_position(&state, stream)? {
            Some(position) => Record::InCapture(position),
            None => {
                state.submit(stream, Work::Record)?;
                Record::InStream(state.streams[&stream].queue.tail())
            }
        };
        state.events.get_mut(&event).expect("found above").record = record;
        Ok(())
    }

    fn cuEventQuery(event: CUevent) {
        let mut state = lock()?;
        capture::refuse_unsafe_call(&mut state)?;
        match state.record_outside_capture(event)? {
            Some(marker) if !marker.is_passed() => {
                marker.want();
                Err(CUresult::NOT_READY)
            }
            _ => Ok(()),
        }
    }

    fn cuEventSynchronize(event: CUevent) {
        let mut state = lock()?;
        capture::refuse_unsafe_call(&mut state)?;
        let device = state.event(event)?.device;
        let marker = state.record_outside_capture(event)?;
        work::wait_for(state, marker.as_slice())?.check_fault(device)
    }

}

/// Makes a stream wait for an event. An event that was never recorded causes no wait. An event that was recorded in
/// a capture adds the stream to the capture.
pub(crate) fn wait(state: &mut State, stream: CUstream, event: CUevent) -> Outcome {
    match state.event(event)?.record.clone() {
        Record::InCapture(position) => capture::join(state, stream, &position),
        Record::Never => Ok(()),
        Record::InStream(marker) => {
            // An H200 with driver 580 returns this error.
            if capture::position(state, stream).is_some() {
                capture::invalidate_of(state, stream);
                return Err(CUresult::STREAM_CAPTURE_ISOLATION);
            }
            state.submit(stream, Work::Wait { marker })
        }
    }
}

impl State {
    fn event(&self, name: CUevent) -> Result<&Event, CUresult> {
        let event = self.events.get(&name).ok_or(CUresult::INVALID_HANDLE)?;
        self.check_fault(event.device)?;
        Ok(event)
    }

    /// Returns the marker of an event's last record, or `None` if it was never recorded.
    ///
    /// # Errors
    ///
    /// `CAPTURED_EVENT` if it was recorded in a capture, which is invalidated if it is still in progress.
    fn record_outside_capture(&mut self, name: CUevent) -> Result<Option<Marker>, CUresult> {
        match &self.event(name)?.record {
            Record::Never => Ok(None),
            Record::InStream(marker) => Ok(Some(marker.clone())),
            Record::InCapture(position) => {
                let capture = position.capture;
                capture::invalidate(self, capture);
                Err(CUresult::CAPTURED_EVENT)
            }
        }
    }
}
