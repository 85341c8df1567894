//! The work of streams: tasks in a queue, which a thread per stream runs in order.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use crate::calls::{self, Outcome};
use crate::capture;
use crate::os::{self, Access};
use crate::progress;
use crate::state::stream::{Marker, Source, Task, Work};
use crate::state::{self, Guard, State};
use crate::sys::{CUresult, CUstream};

/// Unlocks the state until every marker is passed.
pub(crate) fn wait_for(mut guard: Guard, markers: &[Marker]) -> Result<Guard, CUresult> {
    markers.iter().for_each(Marker::want);
    while !markers.iter().all(Marker::is_passed) {
        guard = state::wait_for_progress(guard)?;
    }
    Ok(guard)
}

impl State {
    /// Submits work to a stream, or to its capture.
    ///
    /// # Errors
    ///
    /// The errors of the capture rules, or `OUT_OF_MEMORY` if the host cannot create a thread.
    pub(crate) fn submit(&mut self, stream: CUstream, work: Work) -> Outcome {
        capture::refuse_implicit_wait(self, stream)?;
        if capture::remember(self, stream)? {
            return Ok(());
        }
        self.enqueue(stream, work)
    }

    fn enqueue(&mut self, name: CUstream, work: Work) -> Outcome {
        let mut after = self.default_stream_order(name);
        if let Work::Wait { marker } = &work {
            after.push(marker.clone());
        }
        after.retain(|marker| !marker.is_passed());
        let queue = &mut self.stream_mut(name).queue;
        if !queue.has_worker {
            let worker = thread::Builder::new().name("fakecuda stream".into());
            let spawned = worker.spawn(move || serve(name));
            spawned.map_err(|_| CUresult::OUT_OF_MEMORY)?;
            queue.has_worker = true;
        }
        queue.tasks.push_back(Task { after, work });
        queue.submitted += 1;
        progress::notify();
        Ok(())
    }

    /// Returns the implicit dependencies of a stream's new work. The legacy stream waits for all blocking streams
    /// of its context, and each of them waits for the legacy stream.
    pub(crate) fn default_stream_order(&self, name: CUstream) -> Vec<Marker> {
        let stream = &self.streams[&name];
        let Some(legacy) = self.legacy_stream_of(stream.device) else {
            return Vec::new();
        };
        if !stream.is_blocking {
            return Vec::new();
        }
        let device = stream.device;
        let others = self.streams.iter().filter(|&(&other, candidate)| {
            let is_ordered = name == legacy || other == legacy;
            is_ordered && other != name && candidate.is_blocking && candidate.device == device
        });
        others.map(|(_, other)| other.queue.tail()).collect()
    }

    /// Returns the ends of all streams of a device.
    pub(crate) fn tails_of_device(&self, device: usize) -> Vec<Marker> {
        let streams = self.streams.values();
        let own = streams.filter(|stream| stream.device == device);
        own.map(|stream| stream.queue.tail()).collect()
    }

    /// Returns the ends of all streams.
    pub(crate) fn tails(&self) -> Vec<Marker> {
        let streams = self.streams.values();
        streams.map(|stream| stream.queue.tail()).collect()
    }

    /// Runs work under the lock. After an illegal access, neither that work nor any later work of its device runs.
    fn perform(&mut self, device: usize, work: Work) {
        if self.devices[device].fault.is_none() && !self.try_to_perform(device, work) {
            self.devices[device].fault = Some(CUresult::ILLEGAL_ADDRESS);
        }
    }

    fn try_to_perform(&mut self, device: usize, work: Work) -> bool {
        match work {
            Work::Wait { .. } | Work::Record => true,
            Work::Copy {
                destination,
                source,
                bytes,
            } => {
                let (from, is_readable) = match &source {
                    Source::Staged(content) => (content.as_ptr() as u64, true),
                    &Source::Place(from) => {
                        let is_readable = self.allows(from, bytes, device, Access::Read, true);
                        (from.address, is_readable)
                    }
                };
                if !is_readable || !self.allows(destination, bytes, device, Access::ReadWrite, true)
                {
                    return false;
                }
                os::copy(destination.address, from, bytes);
                true
            }
            Work::Fill {
                destination,
                value,
                bytes,
            } => {
                if !self.allows(destination, bytes, device, Access::ReadWrite, false) {
                    return false;
                }
                os::fill(destination.address, value, bytes);
                true
            }
            Work::Free { address } => {
                // The memory was freed after this free was queued.
                let is_there = self.memory.mappings.contains_key(&address);
                if is_there {
                    self.memory.free(address);
                }
                is_there
            }
            Work::Call { .. } => unreachable!("called without the lock, by `serve`"),
        }
    }
}

/// Runs a stream's tasks until the stream no longer exists.
fn serve(name: CUstream) {
    calls::forbid_on_this_thread();
    let Ok(mut guard) = state::lock() else {
        return;
    };
    // A destroyed stream finishes its work first (the manual: "resources will be released automatically once the
    // device has completed all work").
    loop {
        let is_lazy = guard.is_lazy;
        let Some(stream) = guard.streams.get_mut(&name) else {
            return;
        };
        if stream.is_destroyed && stream.queue.tasks.is_empty() {
            guard.streams.remove(&name);
            return;
        }
        let device = stream.device;
        let Some(task) = stream.next_task(is_lazy) else {
            match state::wait_for_progress(guard) {
                Ok(again) => guard = again,
                Err(_) => return,
            }
            continue;
        };
        let progress = Arc::clone(&stream.queue.progress);
        if let Work::Call { function, argument } = task.work {
            // The manual: host functions do not run once the context has an error.
            if guard.devices[device].fault.is_none() {
                drop(guard);
                // SAFETY: the caller of cuLaunchHostFunc passed both, and is responsible for their use together on
                // another thread.
                unsafe { function(argument as *mut c_void) };
                match state::lock() {
                    Ok(again) => guard = again,
                    Err(_) => return,
                }
            }
        } else {
            guard.perform(device, task.work);
        }
        progress.done.fetch_add(1, Ordering::Release);
        progress::notify();
    }
}
