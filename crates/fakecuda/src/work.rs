//! The work of streams: tasks in a queue, done in order by a thread of the stream's own.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use crate::calls::{self, Outcome};
use crate::capture;
use crate::driver::{self, Guard, State};
use crate::os::{self, Access};
use crate::streams::Stream;
use crate::sys::{CUresult, CUstream};

/// A point in a stream's work. It stays valid when the stream is gone.
#[derive(Clone, Debug)]
pub(crate) struct Marker {
    progress: Arc<Progress>,
    /// How many of the stream's tasks lie before it.
    number: u64,
}

/// How far a stream is, in tasks.
#[derive(Debug, Default)]
struct Progress {
    done: AtomicU64,
    /// How many of them somebody asked for: a lazy stream does no others.
    wanted: AtomicU64,
}

impl Marker {
    /// Returns whether the work before it is done. Constant time.
    pub(crate) fn is_passed(&self) -> bool {
        self.progress.done.load(Ordering::Acquire) >= self.number
    }

    /// Asks for the work before it, which a lazy stream does not do otherwise.
    pub(crate) fn want(&self) {
        let before = self
            .progress
            .wanted
            .fetch_max(self.number, Ordering::Relaxed);
        if before < self.number {
            driver::tell_progress();
        }
    }
}

/// A stream's tasks.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    tasks: VecDeque<Task>,
    submitted: u64,
    progress: Arc<Progress>,
    has_worker: bool,
}

impl Queue {
    /// Returns the point after all that was submitted.
    pub(crate) fn tail(&self) -> Marker {
        Marker {
            progress: Arc::clone(&self.progress),
            number: self.submitted,
        }
    }

    /// Returns whether somebody asked for the next task.
    fn is_wanted(&self) -> bool {
        let Progress { done, wanted } = &*self.progress;
        wanted.load(Ordering::Relaxed) > done.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Task {
    /// Points in other streams that come first.
    after: Vec<Marker>,
    work: Work,
}

/// What a stream can do. There are no kernels.
#[derive(Debug)]
pub(crate) enum Work {
    /// Nothing, but after what it waits for.
    Wait { marker: Marker },
    /// Notes the time.
    Stamp { time: Arc<OnceLock<Instant>> },
    Copy {
        destination: Place,
        source: Source,
        bytes: u64,
    },
    Fill {
        destination: Place,
        /// Repeated.
        value: u32,
        bytes: u64,
    },
    Call {
        function: unsafe extern "C" fn(*mut c_void),
        /// The caller's pointer, as a number so that it may cross threads.
        argument: usize,
    },
    /// The end of `cuMemFreeAsync`.
    Free { address: u64 },
}

/// An address, and what it was when the work was asked for: device memory that is gone when the work
/// is done must not be taken for the host's, and pinned memory must be pinned still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) is_device: bool,
    pub(crate) is_pinned: bool,
}

#[derive(Debug)]
pub(crate) enum Source {
    Place(Place),
    /// Pageable host memory is read when the copy is asked for.
    Staged(Box<[u8]>),
}

/// Lets others at the state until every marker is passed.
pub(crate) fn wait_for(mut guard: Guard, markers: &[Marker]) -> Result<Guard, CUresult> {
    markers.iter().for_each(Marker::want);
    while !markers.iter().all(Marker::is_passed) {
        guard = driver::wait_for_progress(guard)?;
    }
    Ok(guard)
}

impl State {
    /// Gives a stream work to do, or to its capture to remember.
    ///
    /// # Errors
    ///
    /// Those of the capture rules, or `OUT_OF_MEMORY` if the host has no thread left.
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
        driver::tell_progress();
        Ok(())
    }

    /// Returns what new work of a stream waits for without being told to: the legacy default stream
    /// for all blocking streams of its context, and each of them for it.
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

    /// Does work that needs the lock. Work that touches what it may not is not done, and neither is
    /// any that follows on its device.
    fn perform(&mut self, device: usize, work: Work) {
        if self.devices[device].fault.is_none() && !self.try_to_perform(device, work) {
            self.devices[device].fault = Some(CUresult::ILLEGAL_ADDRESS);
        }
    }

    fn try_to_perform(&mut self, device: usize, work: Work) -> bool {
        match work {
            Work::Wait { .. } => true,
            Work::Stamp { time } => time.set(Instant::now()).is_ok(),
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
                // A second free was queued before the first one was done.
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

impl Stream {
    /// Takes the next task if it may begin now.
    fn next_task(&mut self, is_lazy: bool) -> Option<Task> {
        let is_wanted = !is_lazy || self.queue.is_wanted();
        if self.is_held || !is_wanted {
            return None;
        }
        let first = self.queue.tasks.front()?;
        first.after.iter().for_each(Marker::want);
        let is_due = |task: &Task| task.after.iter().all(Marker::is_passed);
        self.queue.tasks.front().is_some_and(is_due).then(|| {
            let next = self.queue.tasks.pop_front();
            next.expect("looked at above")
        })
    }
}

/// Does a stream's tasks until the stream is gone.
fn serve(name: CUstream) {
    calls::forbid_on_this_thread();
    let Ok(mut guard) = driver::lock() else {
        return;
    };
    // A stream that was destroyed first ends its work (the manual: "resources will be released
    // automatically once the device has completed all work").
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
            match driver::wait_for_progress(guard) {
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
                // SAFETY: the caller of cuLaunchHostFunc gave both, and answers for their use
                // together on another thread.
                unsafe { function(argument as *mut c_void) };
                match driver::lock() {
                    Ok(again) => guard = again,
                    Err(_) => return,
                }
            }
        } else {
            guard.perform(device, task.work);
        }
        progress.done.fetch_add(1, Ordering::Release);
        driver::tell_progress();
    }
}
