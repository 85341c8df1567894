//! Who is notified of events as they happen: an observer, for histories, trace trackers and NCCL's registration of
//! memory, and the recorder.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use lowtide_core::{DeviceAddress, MempoolId, Observer, SegmentSnapshot};
use lowtide_trace::AllocatorSettings;

use crate::boundary::{Mempool, run};
use crate::devices::{self, Allocator};
use crate::error::{Error, Status};
use crate::pointers::pointer_to;
use crate::record::Recorder;
use crate::regions::table::{self, RegionPool};
use crate::settings;

/// What a `lowtide_event` says. Up to `LOWTIDE_ACTION_OUT_OF_MEMORY` the names are PyTorch's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum Action {
    /// A block was handed out. `size` is what was asked for, unrounded.
    Alloc = 0,
    /// The program let go of a block. `size` is what was asked for.
    FreeRequested = 1,
    /// A block may be reused: at once after the one before, or when other streams are done with it.
    FreeCompleted = 2,
    /// A segment came from the driver.
    SegmentAlloc = 3,
    /// A segment goes back to the driver; told before it does.
    SegmentFree = 4,
    /// Memory was mapped into an expandable segment.
    SegmentMap = 5,
    /// Memory leaves an expandable segment; told before it does.
    SegmentUnmap = 6,
    /// A snapshot was taken. `size` is the sum of the active bytes.
    Snapshot = 7,
    /// A request could not be served. `size` is the request, rounded; `address` holds the bytes that were
    /// free on the device.
    OutOfMemory = 8,
    /// The memory of a segment leaves the device, as its region is paused; told before it does. The segment
    /// stays, and so do its blocks. One that goes back before it was resumed is told of as ever.
    SegmentPaused = 9,
    /// The memory of a paused segment is back, with what is kept of its contents; of one that could not be
    /// paused, it is there still.
    SegmentResumed = 10,
}

/// One thing that happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Event {
    /// What.
    pub action: Action,
    /// On which device.
    pub device: c_int,
    /// Where.
    pub address: u64,
    /// How much.
    pub size: u64,
    /// The stream that the block or segment belongs to.
    pub stream: *mut c_void,
    /// The memory pool that it belongs to.
    pub pool: Mempool,
}

/// Is told of an event, with the `context` that was given with it, by the thread whose call caused the
/// event, before that call returns; of memory that leaves, before it does. Called under the lock of the memory
/// concerned, for different streams possibly from several threads at once: it must not call lowtide, throw or
/// unwind.
pub type EventObserver = Option<unsafe extern "C" fn(context: *mut c_void, event: *const Event)>;

/// Tells `observer` of every event on every device from now on; null ends it.
///
/// There is one observer: a later one replaces it, and when this returns the earlier one is not called any
/// more. Of a call that failed and changed nothing, no event is told but `LOWTIDE_ACTION_OUT_OF_MEMORY`, and
/// where the driver would not take memory that was to leave, events that say that it came back, with the block
/// that was to be freed with it.
///
/// # Safety
///
/// `observer` may be called with `context` from any thread until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_observe_events(
    observer: EventObserver,
    context: *mut c_void,
) -> Status {
    run(|| observe_everywhere(observer.map(|call| EventListener { call, context })))
}

/// Who is notified of events.
#[derive(Clone)]
pub(crate) struct Listeners {
    observer: Option<EventListener>,
    pub(crate) recorder: Option<Arc<Recorder>>,
}

/// Held while a device is started.
static LISTENERS: Mutex<Listeners> = Mutex::new(Listeners {
    observer: None,
    recorder: None,
});

/// Locks who is notified of events.
pub(crate) fn lock() -> Result<MutexGuard<'static, Listeners>, Error> {
    devices::lock(&LISTENERS)
}

fn observe_everywhere(observer: Option<EventListener>) -> Result<(), Error> {
    let _in_order = devices::begin_change()?;
    lock()?.observer = observer;
    notify_everywhere()
}

/// Has every device in use notify those who listen now.
fn notify_everywhere() -> Result<(), Error> {
    let listeners = lock()?.clone();
    devices::for_each(|ordinal, allocator| listeners.observe(ordinal, allocator))
}

/// Does something with those who listen, who are not replaced meanwhile.
///
/// # Errors
///
/// What `act` returned.
pub(crate) fn with_listeners(
    act: impl FnOnce(&Listeners) -> Result<(), Error>,
) -> Result<(), Error> {
    let _in_order = devices::begin_change()?;
    let listeners = lock()?.clone();
    act(&listeners)
}

/// Has a new recorder notified of the events of every device, from what each holds now on.
///
/// # Errors
///
/// If there is a recorder already, or `make` fails. Nothing is recorded then.
pub(crate) fn start_recording(
    make: impl FnOnce() -> Result<Arc<Recorder>, Error>,
) -> Result<(), Error> {
    let in_order = devices::begin_change()?;
    let listeners = {
        let mut listeners = lock()?;
        let known = listeners.recorder.as_ref();
        if known.is_some_and(|recorder| recorder.is_of_this_process()) {
            let text = "a recording is being made already: stop it first";
            return Err(Error::new(Status::Started, text));
        }
        listeners.recorder = Some(make()?);
        listeners.clone()
    };
    let begun = devices::for_each(|ordinal, allocator| {
        listeners.observe(ordinal, allocator)?;
        let pools = table::pools_on(ordinal)?;
        listeners.begin_recording(ordinal, allocator, &settings::recorded()?, &pools)
    });
    if begun.is_err() {
        // The first error says why there is none; half a recording would be taken for a whole one.
        let _ = end_recording(in_order);
    }
    begun
}

/// Has no recorder notified of events any more, and completes what the one that was has recorded.
///
/// # Errors
///
/// If the recording ended before.
pub(crate) fn stop_recording() -> Result<(), Error> {
    end_recording(devices::begin_change()?)
}

fn end_recording(in_order: MutexGuard<'static, ()>) -> Result<(), Error> {
    let recorder = lock()?.recorder.take();
    let forgotten = notify_everywhere();
    // The file may take its time, and nobody else is to wait for it.
    drop(in_order);
    let recorder = recorder.filter(|recorder| recorder.is_of_this_process());
    recorder
        .map_or(Ok(()), |recorder| recorder.end())
        .and(forgotten)
}

impl Listeners {
    /// Has a device notify those who listen of its events.
    pub(crate) fn observe(&self, ordinal: c_int, allocator: &Allocator) -> Result<(), Error> {
        let observer = self.observer.map(|observer| observer.of_device(ordinal));
        let recorder = self.recorder.as_ref();
        let recorder = recorder.map(|recorder| recorder.of_device(devices::number(ordinal)));
        let both: Option<Observer> = match (observer, recorder) {
            (Some(observer), Some(recorder)) => Some(Arc::new(move |events: &[_]| {
                recorder(events);
                observer(events);
            })),
            (observer, recorder) => observer.or(recorder),
        };
        Ok(allocator.for_each_lane(|lane| {
            lane.observe_events(both.clone());
            Ok(())
        })?)
    }

    /// Has the recorder, if there is one, record a device from what it holds now on. The pools are those of regions,
    /// of whose pauses nobody is notified meanwhile.
    pub(crate) fn begin_recording(
        &self,
        ordinal: c_int,
        allocator: &Allocator,
        settings: &AllocatorSettings,
        pools: &BTreeMap<MempoolId, RegionPool>,
    ) -> Result<(), Error> {
        let Some(recorder) = &self.recorder else {
            return Ok(());
        };
        let device = devices::number(ordinal);
        // Under the locks under which all is recorded, so that nothing is both held before and recorded.
        Ok(allocator.with_all(|all| {
            let held = all.segments();
            let away = held.iter().filter_map(|segment| {
                let region = pools.get(&segment.pool)?;
                region.away_since_us?;
                Some((Arc::clone(&region.tag), pause_event(true, segment)))
            });
            let away = away.collect();
            recorder.begin(device, settings.clone(), held, away);
        })?)
    }

    /// Returns whether nobody is notified.
    pub(crate) fn is_empty(&self) -> bool {
        self.observer.is_none() && self.recorder.is_none()
    }

    /// Notifies of segments of a device whose memory leaves, or is back. Called under the lock of the memory concerned.
    pub(crate) fn notify_of_pause(
        &self,
        ordinal: c_int,
        tag: &Arc<str>,
        segments: Vec<lowtide_core::Event>,
    ) {
        if let Some(observer) = self.observer {
            segments
                .iter()
                .for_each(|event| observer.notify(ordinal, event));
        }
        if let Some(recorder) = &self.recorder {
            recorder.record_pause(devices::number(ordinal), tag, segments);
        }
    }
}

/// Returns what those who listen are notified of for a segment whose memory leaves, or is back.
pub(crate) fn pause_event(is_leaving: bool, segment: &SegmentSnapshot) -> lowtide_core::Event {
    lowtide_core::Event {
        action: if is_leaving {
            lowtide_core::Action::SegmentPaused
        } else {
            lowtide_core::Action::SegmentResumed
        },
        pool: segment.pool,
        address: segment.address,
        size: segment.size,
        stream: segment.stream,
    }
}

/// A caller's observer and its context.
#[derive(Clone, Copy)]
struct EventListener {
    call: unsafe extern "C" fn(*mut c_void, *const Event),
    context: *mut c_void,
}

// SAFETY: the function may be called from any thread, by the contract of `lowtide_observe_events`.
unsafe impl Send for EventListener {}
// SAFETY: and from several at once.
unsafe impl Sync for EventListener {}

impl EventListener {
    /// Returns the observer of one device.
    fn of_device(self, device: c_int) -> Observer {
        Arc::new(move |events| events.iter().for_each(|event| self.notify(device, event)))
    }

    /// Notifies of an event. Called under the lock of the memory concerned, and while no observer is replaced.
    fn notify(&self, device: c_int, event: &lowtide_core::Event) {
        self.call(&Event {
            action: Action::of(event.action),
            device,
            address: event.address.get(),
            size: event.size.get(),
            stream: pointer_to(DeviceAddress(event.stream.0)),
            pool: Mempool::of(event.pool),
        });
    }

    fn call(&self, event: &Event) {
        // SAFETY: it has not been replaced, as this is called under a lock under which it would be.
        unsafe { (self.call)(self.context, ptr::from_ref(event)) };
    }
}

impl Action {
    fn of(action: lowtide_core::Action) -> Action {
        match action {
            lowtide_core::Action::Alloc => Action::Alloc,
            lowtide_core::Action::FreeRequested => Action::FreeRequested,
            lowtide_core::Action::FreeCompleted => Action::FreeCompleted,
            lowtide_core::Action::SegmentAlloc => Action::SegmentAlloc,
            lowtide_core::Action::SegmentFree => Action::SegmentFree,
            lowtide_core::Action::SegmentMap => Action::SegmentMap,
            lowtide_core::Action::SegmentUnmap => Action::SegmentUnmap,
            lowtide_core::Action::Snapshot => Action::Snapshot,
            lowtide_core::Action::OutOfMemory => Action::OutOfMemory,
            lowtide_core::Action::SegmentPaused => Action::SegmentPaused,
            lowtide_core::Action::SegmentResumed => Action::SegmentResumed,
        }
    }
}
