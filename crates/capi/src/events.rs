//! What happens, told as it does: for histories, trace trackers, and NCCL's registration of memory.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use lowtide_core::DeviceAddress;
use lowtide_shared::Observer;

use crate::boundary::{Mempool, run};
use crate::error::Status;
use crate::pointers::pointer_to;
use crate::registry;

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
    run(|| registry::observe_events(observer.map(|call| EventListener { call, context })))
}

/// A caller's observer and its context.
#[derive(Clone, Copy)]
pub(crate) struct EventListener {
    call: unsafe extern "C" fn(*mut c_void, *const Event),
    context: *mut c_void,
}

// SAFETY: the function may be called from any thread, by the contract of `lowtide_observe_events`.
unsafe impl Send for EventListener {}
// SAFETY: and from several at once.
unsafe impl Sync for EventListener {}

impl EventListener {
    /// Returns the observer of one device.
    pub(crate) fn of_device(self, device: c_int) -> Observer {
        Arc::new(move |events| events.iter().for_each(|event| self.tell(device, event)))
    }

    /// Tells of an event. Called under the lock of the memory concerned, and while no observer is replaced.
    pub(crate) fn tell(&self, device: c_int, event: &lowtide_core::Event) {
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
