//! Copies through the ring of slots. The device copies to or from some slots while threads empty or fill others.
//!
//! ```text
//! save      device ──copy──▶ slot ──thread──▶ memory or file
//! restore   device ◀──copy── slot ◀──thread── memory or file
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use lowtide_core::DriverError;
use lowtide_region::BackupError;

use crate::backup::host_memory::HostMemory;
use crate::backup::layout::Layout;
use crate::backup::link::{Link, Loading, Slot, Way};
use crate::backup::sizes::Sizes;
use crate::signals::SignalsBlocked;

/// The work of a thread on a slot: called with a span of the backup and the slot's bytes for it.
pub(super) trait Work:
    Fn(&Range<usize>, &mut [u8]) -> Result<(), BackupError> + Sync
{
}

impl<T: Fn(&Range<usize>, &mut [u8]) -> Result<(), BackupError> + Sync> Work for T {}

/// The spans that go through the ring.
pub(super) struct Staged<'a> {
    layout: &'a Layout,
    /// Each lies within one unit of a slot's length. They are processed in this order.
    spans: &'a [Range<usize>],
    /// The memory that the spans belong to. Blocks of it may be page-locked meanwhile. Spans in such blocks are
    /// copied directly.
    memory: Option<&'a HostMemory>,
}

impl<'a> Staged<'a> {
    pub(super) fn new(
        layout: &'a Layout,
        spans: &'a [Range<usize>],
        memory: Option<&'a HostMemory>,
    ) -> Staged<'a> {
        Staged {
            layout,
            spans,
            memory,
        }
    }
}

/// Copies spans from the device, and lets threads `empty` them. Returns when only direct copies are still in
/// progress, or at the first error once no thread works any more.
pub(super) fn load(
    link: &mut Link,
    sizes: &Sizes,
    staged: &Staged<'_>,
    empty: impl Work,
) -> Result<(), BackupError> {
    with_threads(link, sizes, staged, empty, |ring| {
        let mut loading: VecDeque<(Loading, &Range<usize>)> = VecDeque::new();
        loop {
            while let Some((slot, _)) = ring.try_receive()? {
                ring.free.push(slot);
            }
            ring.grow()?;
            while let Some((slot, span)) = ring.next(Way::ToHost)? {
                let link = &ring.link;
                let begun = link.begin_staged(Way::ToHost, slot, staged.layout, span)?;
                loading.push_back((begun, span));
            }
            if let Some((first, span)) = loading.pop_front() {
                let slot = ring.link.end(first)?;
                ring.send(slot, span);
            } else if ring.at_work > 0 {
                let (slot, _) = ring.receive()?;
                ring.free.push(slot);
            } else {
                return Ok(());
            }
        }
    })
}

/// Lets threads `fill` spans, and copies them to the device. Returns like [`load`].
pub(super) fn store(
    link: &mut Link,
    sizes: &Sizes,
    staged: &Staged<'_>,
    fill: impl Work,
) -> Result<(), BackupError> {
    with_threads(link, sizes, staged, fill, |ring| {
        let mut storing: VecDeque<Loading> = VecDeque::new();
        loop {
            while let Some(first) = storing.front()
                && ring.link.has_ended(first)?
            {
                ring.free
                    .extend(storing.pop_front().map(Loading::into_slot));
            }
            ring.grow()?;
            while let Some((slot, span)) = ring.next(Way::ToDevice)? {
                ring.send(slot, span);
            }
            if ring.at_work > 0 {
                let (slot, span) = ring.receive()?;
                let link = &ring.link;
                storing.push_back(link.begin_staged(Way::ToDevice, slot, staged.layout, span)?);
            } else if let Some(first) = storing.pop_front() {
                let slot = ring.link.end(first)?;
                ring.free.push(slot);
            } else {
                return Ok(());
            }
        }
    })
}

/// The ring as the leading thread sees it.
struct Ring<'a> {
    link: &'a mut Link,
    layout: &'a Layout,
    memory: Option<&'a HostMemory>,
    /// The largest number of slots.
    slots_max: usize,
    /// The spans that have not been started.
    spans: std::slice::Iter<'a, Range<usize>>,
    free: Vec<Slot>,
    /// How many slots the threads have.
    at_work: usize,
    jobs: Sender<Job<'a>>,
    done: Receiver<Done<'a>>,
}

/// A slot, and the span of the backup that it is for.
type Job<'a> = (Slot, &'a Range<usize>);

struct Done<'a> {
    job: Job<'a>,
    /// The outer error is a panic.
    outcome: thread::Result<Result<(), BackupError>>,
}

impl<'a> Ring<'a> {
    /// Returns a free slot and the next span for it, as long as there are both. Begins direct copies of spans that
    /// have been page-locked meanwhile.
    fn next(&mut self, way: Way) -> Result<Option<Job<'a>>, DriverError> {
        while !self.free.is_empty()
            && let Some(span) = self.spans.next()
        {
            match self.memory.filter(|memory| memory.is_locked(span.start)) {
                Some(memory) => self.link.begin_direct(way, self.layout, span, memory)?,
                None => return Ok(self.free.pop().map(|slot| (slot, span))),
            }
        }
        Ok(None)
    }

    /// Creates one more slot if none is free.
    fn grow(&mut self) -> Result<(), DriverError> {
        let is_short = self.free.is_empty() && !self.spans.as_slice().is_empty();
        if !is_short || self.link.slots() >= self.slots_max {
            return Ok(());
        }
        match self.link.add_slot() {
            Ok(slot) => self.free.push(slot),
            Err(error) if self.link.slots() == 0 => return Err(error),
            // The host will hardly page-lock another slot soon, and fewer slots are enough.
            Err(_) => self.slots_max = self.link.slots(),
        }
        Ok(())
    }

    fn send(&mut self, slot: Slot, span: &'a Range<usize>) {
        self.at_work += 1;
        let sent = self.jobs.send((slot, span));
        assert!(
            sent.is_ok(),
            "threads wait for jobs as long as the ring is there"
        );
    }

    /// Waits until a thread has finished with a slot.
    fn receive(&mut self) -> Result<Job<'a>, BackupError> {
        let done = self.done.recv();
        self.finish(done.expect("threads end after the ring"))
    }

    /// Returns a slot that a thread has finished with, if there is one.
    fn try_receive(&mut self) -> Result<Option<Job<'a>>, BackupError> {
        let done = self.done.try_recv().ok();
        done.map(|done| self.finish(done)).transpose()
    }

    fn finish(&mut self, done: Done<'a>) -> Result<Job<'a>, BackupError> {
        self.at_work -= 1;
        done.outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(done.job)
    }
}

/// Runs `lead` with a ring and with threads that do its jobs, and waits for the threads.
fn with_threads<'a>(
    link: &'a mut Link,
    sizes: &Sizes,
    staged: &Staged<'a>,
    work: impl Work,
    lead: impl FnOnce(&mut Ring<'a>) -> Result<(), BackupError>,
) -> Result<(), BackupError> {
    let (jobs, queue) = channel();
    let (finished, done) = channel();
    let queue = Mutex::new(queue);
    thread::scope(|scope| {
        // Owned by this closure, so that it is dropped before the threads are joined: it holds the sender of their
        // queue.
        let mut ring = Ring {
            free: link.take_slots(),
            slots_max: link.slots_max(),
            link,
            layout: staged.layout,
            memory: staged.memory,
            spans: staged.spans.iter(),
            at_work: 0,
            jobs,
            done,
        };
        let signals = SignalsBlocked::begin();
        for started in 0..sizes.threads.min(staged.spans.len()) {
            let (queue, work, finished) = (&queue, &work, finished.clone());
            let serve = move || serve(queue, work, &finished);
            let spawned = thread::Builder::new()
                .name("lowtide backup".into())
                .spawn_scoped(scope, serve);
            match spawned {
                Ok(_) => {}
                Err(error) if started == 0 => {
                    let message = error.to_string();
                    return Err(BackupError::NoThread { message });
                }
                // The threads that have started are enough.
                Err(_) => break,
            }
        }
        drop(signals);
        lead(&mut ring)
    })
}

/// Does jobs until the queue is closed.
fn serve<'a>(queue: &Mutex<Receiver<Job<'a>>>, work: &impl Work, finished: &Sender<Done<'a>>) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((mut slot, span)) = next else {
            return;
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| work(span, slot.content(span))));
        let job = (slot, span);
        // After an error, the receiver is gone.
        let _ = finished.send(Done { job, outcome });
    }
}
