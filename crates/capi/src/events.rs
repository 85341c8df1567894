//! Notifies observers of events as they happen. There are two: the program's observer, for histories, trace
//! trackers and NCCL's memory registration, and the recorder.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use lowtide_core::{DeviceAddress, MempoolId, Observer, SegmentSnapshot};
use lowtide_trace::AllocatorSettings;

use crate::boundary::run;
use crate::devices::{self, Allocator};
use crate::error::{Error, Status};
use crate::pointers::{Mempool, pointer_to};
use crate::record::recorder::Recorder;
use crate::regions::table::{self, RegionPool};
use crate::settings;

/// The kind of a `lowtide_event`. The names up to `LOWTIDE_ACTION_OUT_OF_MEMORY` are PyTorch's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum Action {
    /// A block was allocated. `size` is the requested size, not rounded.
    Alloc = 0,
    /// The program freed a block. `size` is the requested size.
    FreeRequested = 1,
    /// A block may be reused: immediately after the event before, or once other streams are done with it.
    FreeCompleted = 2,
    /// A segment was allocated from the driver.
    SegmentAlloc = 3,
    /// A segment will be released to the driver. Notified before it happens.
    SegmentFree = 4,
    /// Memory was mapped into an expandable segment.
    SegmentMap = 5,
    /// Memory will be unmapped from an expandable segment. Notified before it happens.
    SegmentUnmap = 6,
    /// A snapshot was taken. `size` is the sum of the active bytes.
    Snapshot = 7,
    /// A request ran out of memory. `size` is the request, rounded; `address` holds the free bytes of the device.
    OutOfMemory = 8,
    /// The memory of a segment will leave the device, because its region is paused. Notified before it happens.
    /// The segment and its blocks stay. If the segment is released before it was resumed, the usual event
    /// follows.
    SegmentPaused = 9,
    /// The memory of a paused segment is back, with the part of its contents that was saved. Also notified if the
    /// segment could not be paused: its memory is still there.
    SegmentResumed = 10,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Event {
    /// The kind of event.
    pub action: Action,
    /// The device.
    pub device: c_int,
    /// The address.
    pub address: u64,
    /// The size in bytes.
    pub size: u64,
    /// The stream that the block or segment belongs to.
    pub stream: *mut c_void,
    /// The memory pool that it belongs to.
    pub pool: Mempool,
}

/// Is notified of an event, with the `context` that was registered with it. The thread that caused the event makes
/// the call before its own call returns; it may be one of lowtide's. If memory leaves, the call comes before that. It
/// is made under the lock of the memory concerned, for different streams possibly from several threads at once. It
/// must not call lowtide, throw or unwind.
pub type EventObserver = Option<unsafe extern "C" fn(context: *mut c_void, event: *const Event)>;

/// Registers `observer`, which is notified of every event on every device from now on. Null removes it.
///
/// There is one observer: a later one replaces it. When this returns, the earlier one is not called any more. A
/// failed call that changed nothing causes no event, with two exceptions: `LOWTIDE_ACTION_OUT_OF_MEMORY`; and, if
/// the driver refused memory that was to be released, events that report that memory as back, with the block that
/// was to be freed with it.
///
/// # Safety
///
/// `observer` may be called with `context` from any thread until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_observe_events(
    observer: EventObserver,
    context: *mut c_void,
) -> Status {
    run(|| {
        let _in_order = devices::begin_change()?;
        lock()?.observer = observer.map(|call| EventListener { call, context });
        notify_everywhere()
    })
}

/// The observers that are notified of events.
#[derive(Clone)]
pub(crate) struct Listeners {
    observer: Option<EventListener>,
    pub(crate) recorder: Option<Arc<Recorder>>,
}

/// Locked while a device is started.
static LISTENERS: Mutex<Listeners> = Mutex::new(Listeners {
    observer: None,
    recorder: None,
});

/// Locks the observers.
pub(crate) fn lock() -> Result<MutexGuard<'static, Listeners>, Error> {
    devices::lock(&LISTENERS)
}

/// Registers the current observers with every device in use.
fn notify_everywhere() -> Result<(), Error> {
    let listeners = lock()?.clone();
    devices::for_each(|ordinal, allocator| listeners.observe(ordinal, allocator))
}

/// Calls `act` with the observers, which cannot be replaced meanwhile.
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

/// Registers a new recorder with every device, starting with the memory that each holds now.
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
        // The first error is returned. Half a recording would be mistaken for a complete one, so it ends.
        let _ = end_recording(in_order);
    }
    begun
}

/// Removes the recorder from every device and completes its recording.
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
    // Completing the file may take time, and no other thread should wait for that.
    drop(in_order);
    let recorder = recorder.filter(|recorder| recorder.is_of_this_process());
    recorder
        .map_or(Ok(()), |recorder| recorder.end())
        .and(forgotten)
}

impl Listeners {
    /// Registers the observers with a device.
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
        Ok(allocator.observe_events(both.as_ref())?)
    }

    /// Lets the recorder, if there is one, record a device, starting with the memory that it holds now. `pools`
    /// are the regions' pools, and no pause is notified meanwhile.
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
        // Under the locks that recording takes, so that no block is both listed as held and recorded as new.
        Ok(allocator.with_all(|all| {
            let held = all.segments();
            let away = held.iter().filter_map(|segment| {
                let region = pools.get(&segment.pool)?;
                region.paused_since_us?;
                Some((Arc::clone(&region.tag), pause_event(true, segment)))
            });
            let away = away.collect();
            recorder.begin(device, settings.clone(), held, away);
        })?)
    }

    /// Returns whether there is no observer.
    pub(crate) fn is_empty(&self) -> bool {
        self.observer.is_none() && self.recorder.is_none()
    }

    /// Notifies the observers of a device's segments whose memory leaves or is back. Called under the lock of the
    /// memory concerned.
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

/// Returns the event for a segment whose memory leaves or is back.
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

/// The program's observer and its context.
#[derive(Clone, Copy)]
struct EventListener {
    call: unsafe extern "C" fn(*mut c_void, *const Event),
    context: *mut c_void,
}

// SAFETY: the function may be called from any thread, by the contract of `lowtide_observe_events`.
unsafe impl Send for EventListener {}
// SAFETY: the function may be called from several threads at once, by the same contract.
unsafe impl Sync for EventListener {}

impl EventListener {
    /// Returns the observer of one device.
    fn of_device(self, device: c_int) -> Observer {
        Arc::new(move |events| events.iter().for_each(|event| self.notify(device, event)))
    }

    /// Notifies the observer of an event. Called under the lock of the memory concerned; the observer is not
    /// replaced meanwhile.
    fn notify(&self, device: c_int, event: &lowtide_core::Event) {
        let Some(action) = Action::of(event.action) else {
            return;
        };
        self.call(&Event {
            action,
            device,
            address: event.address.get(),
            size: event.size.get(),
            stream: pointer_to(DeviceAddress(event.stream.0)),
            pool: Mempool::of(event.pool),
        });
    }

    fn call(&self, event: &Event) {
        // SAFETY: it has not been replaced: the caller holds a lock under which it would be.
        unsafe { (self.call)(self.context, ptr::from_ref(event)) };
    }
}

impl Action {
    /// Returns the kind of an event; `None` for an annotation, which only recordings have.
    fn of(action: lowtide_core::Action) -> Option<Action> {
        Some(match action {
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
            lowtide_core::Action::Annotate => return None,
        })
    }
}
